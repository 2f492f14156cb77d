"""Compiled functions that are called with flat lists of tensors.

`tf.function` finds out in Python, in each call, whether it was traced for arguments like these.
That takes half a millisecond or more for a batch, as long as the update of a small network.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tree

from impala.types import Nest

Call = Callable[..., list[tf.Tensor]]


def call_of(traced: tf.types.experimental.ConcreteFunction) -> Call:
    """Returns what calls a traced function with the tensors of its inputs, which are not checked.

    No gradient flows through a call.

    Args:
      traced: a function of tensors, `tf.function.get_concrete_function`, that returns a list.
    """
    call, captured = traced.inference_fn.call_flat, traced.captured_inputs
    return lambda *leaves: call(*leaves, *captured)


class Flat:
    """A compiled function of nests, traced once for all arguments of the same shapes and dtypes."""

    def __init__(self, function: Callable[..., Nest], *, jit_compile: bool = False) -> None:
        """Traces nothing yet.

        Args:
          function: of nests of tensors, which are structured alike in all calls; returns one.
          jit_compile: whether XLA compiles it.
        """
        self._function = function
        self._compiled = tf.function(self._trace, jit_compile=jit_compile, autograph=False)
        self._arguments_like: Nest = None  # of what is traced at the moment
        self._results_like: Nest = None
        self._calls: dict[tuple[Any, ...], tuple[Call, Nest]] = {}

    def __call__(self, *arguments: Nest) -> Nest:
        """Returns the function's result for these nests of arrays and tensors."""
        leaves = [
            leaf if isinstance(leaf, tf.Tensor) else tf.convert_to_tensor(leaf)
            for leaf in tree.flatten(arguments)
        ]
        kind = tuple((leaf._shape_tuple(), leaf.dtype) for leaf in leaves)
        if kind not in self._calls:
            self._arguments_like = _structure(arguments)
            specs = (tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves)
            call = call_of(self._compiled.get_concrete_function(*specs))
            self._calls[kind] = call, self._results_like
        call, results_like = self._calls[kind]
        return tree.unflatten_as(results_like, call(*leaves))

    def _trace(self, *leaves: tf.Tensor) -> list[tf.Tensor]:
        results = self._function(*tree.unflatten_as(self._arguments_like, leaves))
        self._results_like = _structure(results)
        return tree.flatten(results)


def _structure(nest: Nest) -> Nest:
    """Returns a nest without its tensors, which would be kept in memory."""
    return tree.map_structure(lambda _: None, nest)
