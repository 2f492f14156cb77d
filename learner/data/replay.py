"""Replay: whole past unrolls, evicted by one of two rules and drawn uniformly.

Both rules keep the unrolls with the smallest keys. The key of an unroll is random (reservoir: the
contents are a uniform sample of everything ever added, Vitter 1985) or counts down (fifo: the
contents are the newest). No key is drawn twice, so a replay that was closed or killed resumes
exactly, as long as its records and its `State` were written together.
"""

import heapq
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tree
import zstandard

from impala.logdir.directory import StorageError
from impala.types import Unroll
from learner.data.storage import DamagedError, Head, Record, Store

Rule = Literal["reservoir", "fifo"]

_LEVEL = 1  # of zstd: pixel frames shrink to a hundredth, in microseconds each

_COMMIT_EVERY = 1000  # unrolls added; a crash loses at most so many


class Contents(NamedTuple):
    """The size of a replay's contents."""

    unrolls: int
    frames: int  # environment frames in them
    bytes: int  # compressed
    added: int  # unrolls ever added
    share_of_history: float  # held / added; 0 if nothing was added


class Drawn(NamedTuple):
    """Number and actor of a drawn unroll."""

    number: int  # how many were added before it
    actor: str  # its sender


class Replay:
    """A bounded store of unrolls. Every method is thread-safe."""

    def __init__(
        self,
        unroll_spec: Unroll,
        store: Store,
        rule: Rule,
        *,
        capacity_frames: int,
        capacity_bytes: int | None = None,
        seed: int = 0,
    ):
        """Opens a replay on the contents of a store.

        Args:
          unroll_spec: a nest of ArraySpec of one environment, from `build.unroll_spec`.
          store: keeps the records. If they are found damaged, now or later, the replay continues
            empty if the store allows it.
          rule: which unrolls are evicted when there is no room.
          capacity_frames: largest number of environment frames held.
          capacity_bytes: largest number of compressed bytes held; None: no limit. A reservoir that
            is bounded by bytes favours unrolls that compress well.
          seed: of keys and draws; combined with the number of unrolls ever added, so that a resumed
            replay does not draw the same keys again.

        Raises:
          StorageError: the records are damaged, or the capacity is too small for a single one.
        """
        self._rule = rule
        self._store = store
        self._capacity_frames = capacity_frames
        self._capacity_bytes = math.inf if capacity_bytes is None else capacity_bytes
        self._layout = _Layout(unroll_spec)
        largest = self._layout.size + self._layout.size // 128 + 512  # zstd's worst case
        if largest > self._capacity_bytes:
            raise StorageError(
                f"replay.capacity_bytes is {capacity_bytes}, but an unroll that does not compress "
                f"takes up to {largest}: raise it."
            )
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()
        self._lock = threading.Lock()

        self._seed = seed
        try:
            self._load()
        except DamagedError as damage:
            self._start_over(damage)

    def add(self, unroll: Unroll, columns: slice, actor: str) -> int:
        """Adds unrolls.

        Args:
          unroll: arrays [T + 1, E, ...]; core_state, frames and parameter_version [E, ...].
          columns: which of the E environments.
          actor: their sender.

        Returns:
          The number of the first unroll; the others are numbered consecutively. The replay decides
          which of them it keeps.

        Raises:
          ValueError: a single unroll is larger than the capacity.
          StorageError: the store cannot be written.
        """
        leaves = self._layout.leaves(unroll)
        with self._lock:
            before = self._state.added
            for column in range(*columns.indices(unroll.frames.shape[0])):
                # An unroll of seams alone has no frames, but must count towards the capacity.
                frames = max(1, int(unroll.frames[column]))
                self._add(self._layout.pack(leaves, column), frames, actor)
            if before // _COMMIT_EVERY != self._state.added // _COMMIT_EVERY:
                self._commit()
            return before

    def sample(self, unroll: Unroll, start: int, count: int) -> Sequence[Drawn]:
        """Writes `count` unrolls into columns `start` to `start + count` of `unroll`.

        They are drawn uniformly, without replacement if there are enough.

        Returns:
          The drawn unrolls, in the order of the columns.

        Raises:
          LookupError: the replay is empty, possibly because it was found damaged and has started
            over.
          StorageError: a drawn unroll is damaged, or cannot be read.
        """
        leaves = self._layout.leaves(unroll)
        with self._lock:
            if not self._held:
                raise LookupError("The replay is empty: add unrolls before sampling.")
            size = len(self._held)
            places = self._rng.choice(size, count, replace=size < count, shuffle=False)
            drawn = []
            try:
                for column, place in enumerate(places, start):
                    number = self._held[place]
                    record = self._store.get(number)
                    packed = self._decompressor.decompress(record.data)
                    self._layout.unpack(packed, leaves, column)
                    drawn.append(Drawn(number, record.actor))
            except DamagedError as damage:
                self._start_over(damage)
                raise LookupError("The replay was damaged and is empty now.") from damage
            return drawn

    def remove(self, numbers: Iterable[int]) -> int:
        """Removes unrolls permanently, and commits.

        Args:
          numbers: of the unrolls, as `sample` returned them; evicted ones are ignored.

        Returns:
          How many were removed.

        Raises:
          StorageError: the store cannot be written.
        """
        with self._lock:
            held = {number for number in numbers if number in self._places}
            for number in held:
                self._release(number)
            if held:  # Their keys stay in the heap until their turn to be evicted.
                self._commit()
            return len(held)

    def commit(self) -> int:
        """Commits everything added. Returns how many unrolls were ever added."""
        with self._lock:
            self._commit()
            return self._state.added

    def close(self) -> None:
        """Closes the store. Uncommitted unrolls are lost."""
        with self._lock:
            self._store.close()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_full(self) -> bool:
        """Returns whether an unroll was ever evicted or refused."""
        return self._state.threshold < math.inf

    def contents(self) -> Contents:
        """Returns the size of the current contents."""
        with self._lock:
            added = self._state.added
            return Contents(
                unrolls=len(self._held),
                frames=self._frames,
                bytes=self._bytes,
                added=added,
                share_of_history=len(self._held) / added if added else 0.0,
            )

    def clear(self) -> int:
        """Removes all unrolls. What is added later is held as by a new replay.

        Returns:
          How many unrolls were ever added, which is the number of the next one.
        """
        with self._lock:
            self._empty()
            return self._state.added

    def _load(self) -> None:
        """Reads the heads of the store's records."""
        self._state = self._store.state()
        self._rng = np.random.default_rng([self._seed, self._state.added])
        self._held: list[int] = []  # numbers of the unrolls held, unordered
        self._places: dict[int, int] = {}  # number -> its place in _held
        self._sizes: dict[int, tuple[int, int]] = {}  # number -> frames, bytes
        self._evicted_next: list[tuple[float, int]] = []  # heap of (-key, number)
        self._frames = self._bytes = 0
        for number, head in self._store.heads():
            self._hold(number, head)
        self._make_room()

    def _empty(self) -> None:
        for number in list(self._held):
            self._release(number)
        self._evicted_next.clear()
        self._state = self._state._replace(threshold=math.inf)

    def _start_over(self, damage: DamagedError) -> None:
        self._store.start_over(damage)
        self._load()

    def _commit(self) -> None:
        try:
            self._store.commit(self._state)
        except DamagedError as damage:
            self._start_over(damage)

    def _add(self, packed: bytes, frames: int, actor: str) -> None:
        number = self._state.added
        key = self._rng.random() if self._rule == "reservoir" else float(-number)
        self._state = self._state._replace(added=number + 1)
        if key >= self._state.threshold:  # It would have been evicted by now.
            return
        record = Record(key, frames, actor, self._compressor.compress(packed))
        if frames > self._capacity_frames or len(record.data) > self._capacity_bytes:
            raise ValueError(
                f"An unroll of {frames} frames and {len(record.data)} bytes does not fit into a "
                f"replay of {self._capacity_frames} frames and {self._capacity_bytes} bytes: raise "
                "replay.capacity_frames or replay.capacity_bytes."
            )
        self._store.put(number, record)
        self._hold(number, Head(key, frames, actor, len(record.data)))
        self._make_room()

    def _hold(self, number: int, head: Head) -> None:
        self._places[number] = len(self._held)
        self._held.append(number)
        heapq.heappush(self._evicted_next, (-head.key, number))
        self._sizes[number] = head.frames, head.size
        self._frames += head.frames
        self._bytes += head.size

    def _make_room(self) -> None:
        while self._frames > self._capacity_frames or self._bytes > self._capacity_bytes:
            negative_key, number = heapq.heappop(self._evicted_next)
            if number in self._places:  # and was not removed
                self._state = self._state._replace(threshold=-negative_key)
                self._release(number)

    def _release(self, number: int) -> None:
        self._store.delete(number)
        frames, size = self._sizes.pop(number)
        self._frames -= frames
        self._bytes -= size
        place, last = self._places.pop(number), self._held.pop()
        if last != number:  # The last one fills the gap.
            self._held[place] = last
            self._places[last] = place


class _Layout:
    """The layout of an unroll's arrays in a record."""

    def __init__(self, unroll_spec: Unroll):
        timed = tree.flatten((unroll_spec.timestep, unroll_spec.output))
        self._num_timed = len(timed)
        self._specs = [
            *((spec.shape, spec.dtype) for spec in timed),
            *((spec.shape, spec.dtype) for spec in tree.flatten(unroll_spec.core_state)),
            ((), np.dtype(np.int32)),  # frames
            ((), np.dtype(np.int64)),  # parameter_version
        ]
        self._sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._specs]
        self.size = sum(self._sizes)  # bytes of an unroll

    def leaves(self, unroll: Unroll) -> Sequence[np.ndarray]:
        """Returns the arrays of E unrolls, in the order of a record, with E as the first axis."""
        leaves = tree.flatten(unroll)
        return [
            leaf.swapaxes(0, 1) if place < self._num_timed else leaf
            for place, leaf in enumerate(leaves)
        ]

    def pack(self, leaves: Sequence[np.ndarray], column: int) -> bytes:
        """Returns one environment's values as bytes."""
        return b"".join(leaf[column].tobytes() for leaf in leaves)

    def unpack(self, packed: bytes, leaves: Sequence[np.ndarray], column: int) -> None:
        """Writes packed values into column `column`."""
        offset = 0
        for (shape, dtype), size, leaf in zip(self._specs, self._sizes, leaves, strict=True):
            values: Any = np.frombuffer(packed, dtype, math.prod(shape), offset)
            leaf[column] = values.reshape(shape)
            offset += size
