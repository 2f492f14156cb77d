"""The precision of what tests compare."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def plain_float32() -> Iterator[None]:
    """Computes products in float32, also on GPUs where TensorFlow rounds their factors (TF32).

    Also a decorator, of a test that compares an operation with the same one compiled: each of them
    rounds differently, by a thousandth of the largest value.
    """
    enable = tf.config.experimental.enable_tensor_float_32_execution
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    enable(False)
    try:
        yield
    finally:
        enable(before)
