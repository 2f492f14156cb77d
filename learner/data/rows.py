"""Rows: an unroll as bytes, its arrays one after the other. Batches and replay are made of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from impala.types import AgentOutput, ArraySpec, Nest, TimeStep, Unroll

_ALIGNMENT = 8  # of the arrays in a row, in bytes
_TENSOR_ALIGNMENT = 64  # of an array whose memory TensorFlow shares


class Leaf(NamedTuple):
    """Where an array is in a row."""

    offset: int  # in bytes
    shape: tuple[int, ...]  # of one environment: [T + 1, ...] if it is timed
    dtype: np.dtype[Any]
    is_timed: bool

    @property
    def size(self) -> int:
        """Returns its size, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> list[int]:
        """Returns how many bytes are between neighbours along each axis of `shape`."""
        return [
            math.prod(self.shape[i + 1 :]) * self.dtype.itemsize for i in range(len(self.shape))
        ]


class Layout:
    """The layout of an unroll's arrays in a row. Layouts of the same arrays are equal."""

    def __init__(self, unroll_spec: Unroll):
        """Computes offsets.

        Args:
          unroll_spec: a nest of ArraySpec of one environment, from `build.unroll_spec`.
        """
        timed = tree.flatten((unroll_spec.timestep, unroll_spec.output))
        specs = [(spec.shape, np.dtype(spec.dtype), True) for spec in timed]
        specs += [
            (spec.shape, np.dtype(spec.dtype), False)
            for spec in tree.flatten(unroll_spec.core_state)
        ]
        specs += [((), np.dtype(np.int32), False), ((), np.dtype(np.int64), False)]
        self._like = unroll_spec
        self._action_at = len(tree.flatten(unroll_spec.timestep))  # its first leaf
        self._state_at = len(timed)
        self.leaves: list[Leaf] = []
        """In the order of `tree.flatten(unroll)`."""
        end = 0
        for shape, dtype, is_timed in specs:
            leaf = Leaf(-(-end // _ALIGNMENT) * _ALIGNMENT, tuple(shape), dtype, is_timed)
            self.leaves.append(leaf)
            end = leaf.offset + leaf.size
        self.row_bytes = -(-end // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
        """Size of a row."""
        ends = [leaf.offset + leaf.size for leaf in self.leaves]
        begins = [*(leaf.offset for leaf in self.leaves[1:]), self.row_bytes]
        self._hash = hash(tuple(self.leaves))
        self._views = [_view(leaf, self.row_bytes) for leaf in self.leaves]
        self._gaps = [slice(*gap) for gap in zip(ends, begins, strict=True) if gap[0] < gap[1]]

    @classmethod
    def of(cls, unroll: Unroll) -> "Layout":
        """Returns the layout of B unrolls: arrays [T + 1, B, ...], or [B, ...] untimed."""
        timed = tree.map_structure(
            lambda x: ArraySpec((x.shape[0], *x.shape[2:]), x.dtype),
            (unroll.timestep, unroll.output),
        )
        state = tree.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), unroll.core_state)
        return cls(Unroll(timed[0], timed[1], state, (), ()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.leaves == other.leaves

    def __hash__(self) -> int:
        return self._hash

    def nest(self, leaves: Sequence[Any]) -> Unroll:
        """Returns an unroll of these leaves."""
        # Written out, as `tree.unflatten_as` takes ten times as long.
        action, state = self._action_at, self._state_at
        return Unroll(
            TimeStep(
                _nest(self._like.timestep.observation, leaves[: action - 3]),
                *leaves[action - 3 : action],
            ),
            AgentOutput(
                _nest(self._like.output.action, leaves[action : state - 2]),
                *leaves[state - 2 : state],
            ),
            _nest(self._like.core_state, leaves[state:-2]),
            *leaves[-2:],
        )

    def empty(self, count: int) -> np.ndarray:
        """Returns uninitialised rows, uint8 [count, row_bytes], whose memory a tensor can share."""
        memory = np.empty(count * self.row_bytes + _TENSOR_ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _TENSOR_ALIGNMENT
        return memory[start : start + count * self.row_bytes].reshape(count, self.row_bytes)

    def unroll(self, rows: np.ndarray) -> Unroll:
        """Returns views of B rows: arrays [T + 1, B, ...], or [B, ...] of what is not timed."""
        return self.nest(self._arrays(rows))

    def frames(self, rows: np.ndarray) -> np.ndarray:
        """Returns a view of the environment frames in each of B rows: [B]."""
        frames: np.ndarray = self._arrays(rows, self._views[-2:-1])[0]
        return frames

    def write(self, unroll: Unroll, columns: slice, rows: np.ndarray) -> None:
        """Copies some of E unrolls into as many rows.

        Args:
          unroll: arrays [T + 1, E, ...], or [E, ...] of what is not timed.
          columns: which of the E.
          rows: uint8 [number of them, row_bytes].
        """
        for leaf, source, target in zip(
            self.leaves, tree.flatten(unroll), self._arrays(rows), strict=True
        ):
            target[...] = source[:, columns] if leaf.is_timed else source[columns]
        for gap in self._gaps:
            rows[:, gap] = 0

    def rows(self, unroll: Unroll) -> np.ndarray:
        """Returns a copy of B unrolls as rows."""
        rows = self.empty(len(unroll.frames))
        self.write(unroll, slice(None), rows)
        return rows

    def _arrays(self, rows: np.ndarray, views: "Sequence[_View] | None" = None) -> list[np.ndarray]:
        """Returns the views of all leaves, or some."""
        count, memory = len(rows), rows.data
        return [
            np.ndarray((*before, count, *after), dtype, memory, offset, strides)
            for before, after, dtype, offset, strides in views or self._views
        ]


class Placed(NamedTuple):
    """A batch where the learner's devices read it: on a CPU, the rows themselves."""

    layout: Layout
    rows: Any  # uint8 [B, row_bytes]


class _View(NamedTuple):
    """How an array of B rows is seen."""

    before: tuple[int, ...]  # its shape before the axis of B
    after: tuple[int, ...]  # and after it
    dtype: np.dtype[Any]
    offset: int
    strides: list[int]


def _view(leaf: Leaf, row_bytes: int) -> _View:
    timed = int(leaf.is_timed)
    strides = [*leaf.strides[:timed], row_bytes, *leaf.strides[timed:]]
    return _View(leaf.shape[:timed], leaf.shape[timed:], leaf.dtype, leaf.offset, strides)


def _nest(like: Nest, leaves: Sequence[Any]) -> Nest:
    return tree.unflatten_as(like, leaves) if tree.is_nested(like) else leaves[0]
