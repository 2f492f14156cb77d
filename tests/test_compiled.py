"""Compiled functions called with flat lists: the same results, traced once for each shape."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from impala.agents.compiled import Flat
from impala.types import Nest


@pytest.mark.parametrize("jit_compile", [False, True])
def test_it_returns_what_the_function_returns(jit_compile: bool) -> None:
    variable = tf.Variable(2.0)

    def function(inputs: Nest, factor: tf.Tensor) -> Nest:
        variable.assign_add(1.0)
        named = {"z": inputs["z"] * factor, "a": (inputs["a"] + variable, [])}
        return named, tf.reduce_sum(inputs["z"])

    flat = Flat(function, jit_compile=jit_compile)
    for count in range(2):
        inputs = {"z": np.array([1.0, 2.0], np.float32), "a": tf.constant([[5.0]])}
        named, total = flat(inputs, np.float32(3.0))
        assert named["z"].numpy().tolist() == [3.0, 6.0]
        ((value,),), rest = named["a"]
        assert (float(value), rest) == (8.0 + count, [])
        assert float(total) == 3.0


def test_it_is_traced_once_for_each_shape_and_type() -> None:
    traced: list[tuple[tf.TensorShape, tf.DType]] = []

    def function(x: tf.Tensor) -> tf.Tensor:
        traced.append((x.shape, x.dtype))
        return x[::-1]

    flat = Flat(function)
    for x in ([1.0, 2.0], [3.0, 4.0], [5.0], [6.0, 7.0]):
        assert flat(np.array(x, np.float32)).numpy().tolist() == x[::-1]
    assert flat(np.array([8, 9])).numpy().tolist() == [9, 8]
    assert traced == [([2], tf.float32), ([1], tf.float32), ([2], tf.int64)]


def _wait_for_xla() -> None:
    for thread in threading.enumerate():
        if thread.name == "xla":
            thread.join()


def test_calls_go_on_while_xla_compiles() -> None:
    variable = tf.Variable(0.0)

    def function(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        variable.assign_add(1.0)
        return variable + 0.0, tf.random.stateless_normal([4], seed)  # XLA has another generator

    seed = np.array([1, 2], np.int32)
    flat = Flat(function, jit_compile=True, waits=False)
    first = flat(seed)
    _wait_for_xla()
    second, waited = flat(seed), Flat(function, jit_compile=True)(seed)
    assert [float(count) for count, _ in (first, second, waited)] == [1.0, 2.0, 3.0]
    assert first[1].numpy().tolist() != waited[1].numpy().tolist()
    assert second[1].numpy().tolist() == waited[1].numpy().tolist()


def test_what_xla_cannot_compile_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    flat = Flat(lambda x: tf.strings.length(tf.strings.as_string(x)), jit_compile=True, waits=False)
    for _ in range(2):
        assert flat(np.array([12.0], np.float32)).numpy().tolist() == [9]
        _wait_for_xla()
    assert "XLA cannot compile" in caplog.text


def test_run_eagerly_a_debugger_sees_numbers_in_it() -> None:
    seen = []

    def looked_at(pair: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        seen.append(hasattr(pair[0], "numpy"))
        return pair[0] + pair[1]

    flat = Flat(looked_at)
    arrays = np.ones(2, np.float32), np.full(2, 2.0, np.float32)
    tf.config.run_functions_eagerly(True)
    try:
        found = [flat(arrays), flat(arrays)]
    finally:
        tf.config.run_functions_eagerly(False)
    found.append(flat(arrays))
    assert seen == [True, True, False]
    np.testing.assert_array_equal(found, [[3.0, 3.0]] * 3)
