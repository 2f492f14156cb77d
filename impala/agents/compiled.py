"""Compiled functions that are called with flat lists of tensors; all private names of TensorFlow.

`tf.function` finds out in Python, in each call, whether it was traced for arguments like these.
That takes half a millisecond or more for a batch, as long as the update of a small network. What
avoids it is not part of TensorFlow's public interface: it stands here and nowhere else.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tree

from impala.runtime import process
from impala.types import Nest

Call = Callable[..., list[tf.Tensor]]

_log = logging.getLogger(__name__)


def call_of(traced: tf.types.experimental.ConcreteFunction) -> Call:
    """Returns what calls a traced function with the tensors of its inputs, which are not checked.

    No gradient flows through a call.

    Args:
      traced: a function of tensors, `tf.function.get_concrete_function`, that returns a list.
    """
    call, captured = traced.inference_fn.call_flat, traced.captured_inputs
    return lambda *leaves: call(*leaves, *captured)


def try_on_zeros(
    traced: tf.types.experimental.ConcreteFunction, leaves: Sequence[tf.Tensor]
) -> None:
    """Calls a traced function once, with variables of zeros in the place of its own, which stay."""
    zeros = {}
    for variable in traced.variables:
        with tf.device(variable.device):
            zeros[id(variable.handle)] = tf.Variable(tf.zeros_like(variable))
    captured = [zeros[id(x)].handle if id(x) in zeros else x for x in traced.captured_inputs]
    traced.inference_fn.call_flat(*leaves, *captured)


def eager_converter() -> Callable[[np.ndarray], tf.Tensor]:
    """Returns what makes a tensor of an array, without the checks of `tf.convert_to_tensor`."""
    from tensorflow.python.eager import context
    from tensorflow.python.framework.constant_op import convert_to_eager_tensor

    held = context.context()
    return lambda array: convert_to_eager_tensor(array, held)


@contextlib.contextmanager
def read_as(variables: Sequence[tf.Variable], tensors: Sequence[tf.Tensor]) -> Iterator[None]:
    """Substitutes tensors for the values of variables, while a graph is made."""
    # What `value` and `read_value` of TensorFlow's variables call.
    for variable, tensor in zip(variables, tensors, strict=True):
        variable._read_variable_op = functools.partial(_instead, tensor)
    try:
        yield
    finally:
        for variable in variables:
            del variable._read_variable_op


def _instead(tensor: tf.Tensor, no_copy: bool = False) -> tf.Tensor:
    del no_copy
    return tensor


class Flat:
    """A compiled function of nests, traced once for all arguments of the same shapes and dtypes."""

    def __init__(
        self,
        function: Callable[..., Nest],
        *,
        jit_compile: bool = False,
        waits: bool = True,
        always_alike: bool = False,
    ) -> None:
        """Traces nothing yet.

        Args:
          function: of nests of tensors, which are structured alike in all calls; returns one.
          jit_compile: whether XLA compiles it.
          waits: whether the first call waits for XLA, half a minute or more on a GPU. Otherwise
            calls use TensorFlow's own kernels until a thread has compiled it.
          always_alike: whether all calls have arguments of the same shapes and dtypes, which is
            then not checked: a tensor gives the GIL away to tell its shape.
        """
        self._function = function
        self._jit_compile = jit_compile
        self._waits = waits
        self._always_alike = always_alike
        self._calls: dict[tuple[Any, ...], tuple[Call, Nest]] = {}
        self._converted = eager_converter()

    def __call__(self, *arguments: Nest) -> Nest:
        """Returns the function's result for these nests of arrays and tensors."""
        if tf.config.functions_run_eagerly():  # which a user's debugger needs, to see numbers
            return self._function(*tree.map_structure(tf.convert_to_tensor, arguments))
        leaves = [
            leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)
            for leaf in tree.flatten(arguments)
        ]
        # Of arrays before they are tensors, which give the GIL away to tell their shapes.
        kind = () if self._always_alike else tuple(map(_kind, leaves))
        leaves = [self._converted(x) if isinstance(x, np.ndarray) else x for x in leaves]
        if kind not in self._calls:
            like, by_thread = _structure(arguments), self._jit_compile and not self._waits
            traced, results_like = self._traced(like, leaves, self._jit_compile and not by_thread)
            self._calls[kind] = call_of(traced), results_like
            first = self._called(kind, leaves)
            if by_thread:
                threading.Thread(
                    target=self._compile, args=(kind, like, leaves), name=process.COMPILER
                ).start()
            return first
        return self._called(kind, leaves)

    def _called(self, kind: tuple[Any, ...], leaves: Sequence[tf.Tensor]) -> Nest:
        call, results_like = self._calls[kind]
        return _unflattened(results_like, iter(call(*leaves)))

    def _traced(
        self, like: Nest, leaves: Sequence[tf.Tensor], jit_compile: bool
    ) -> tuple[tf.types.experimental.ConcreteFunction, Nest]:
        """Returns the function of leaves of arguments like these, and what its results are like."""
        results_like: Nest = None

        def of_leaves(*leaves: tf.Tensor) -> list[tf.Tensor]:
            nonlocal results_like
            results = self._function(*tree.unflatten_as(like, leaves))
            results_like = _structure(results)
            return tree.flatten(results)

        compiled = tf.function(of_leaves, jit_compile=jit_compile, autograph=False)
        specs = (tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves)
        return compiled.get_concrete_function(*specs), results_like

    def _compile(self, kind: tuple[Any, ...], like: Nest, leaves: Sequence[tf.Tensor]) -> None:
        """Has XLA compile the function for arguments like these, and calls that from then on."""
        started = time.monotonic()
        try:
            traced, results_like = self._traced(like, leaves, jit_compile=True)
            try_on_zeros(traced, leaves)  # XLA locks the variables for which it compiles
        except Exception:
            _log.exception("XLA cannot compile this; TensorFlow's own kernels go on.")
            return
        self._calls[kind] = call_of(traced), results_like
        _log.info("XLA has compiled the update in %.0f s.", time.monotonic() - started)


def _kind(leaf: np.ndarray | tf.Tensor) -> tuple[Any, ...]:
    shape = leaf.shape if isinstance(leaf, np.ndarray) else leaf._shape_tuple()
    return shape, leaf.dtype


def _unflattened(like: Nest, leaves: Iterator[tf.Tensor]) -> Nest:
    """Does what `tree.unflatten_as` does, in a fifth of the time."""
    match like:
        case None:
            return next(leaves)
        case dict():
            return {key: _unflattened(like[key], leaves) for key in sorted(like)}
        case list():
            return [_unflattened(part, leaves) for part in like]
        case tuple() if not hasattr(like, "_fields"):
            return tuple(_unflattened(part, leaves) for part in like)
        case tuple():
            return type(like)(*(_unflattened(part, leaves) for part in like))
    flat = tree.flatten(like)
    return tree.unflatten_as(like, [next(leaves) for _ in flat])


def _structure(nest: Nest) -> Nest:
    """Returns a nest without its tensors, which would be kept in memory."""
    return tree.map_structure(lambda _: None, nest)
