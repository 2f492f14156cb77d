"""Rows: what was written is what is read, on the host and on a device, for any nest and dtype."""

import functools
from typing import Any

import messages
import numpy as np
import tensorflow as tf
import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python.framework import kernels

from impala.types import AgentOutput, ArraySpec, TimeStep, Unroll
from learner.data.rows import Layout
from learner.update import devices
from learner.update.replicas import Replicas

T = 3
DTYPES = (np.bool_, np.uint8, np.int8, np.uint16, np.int32, np.int64, np.float32, np.float64)


def leaf_specs() -> st.SearchStrategy[ArraySpec]:
    shapes = st.lists(st.integers(1, 4), max_size=3).map(lambda shape: (T + 1, *shape))
    return st.builds(ArraySpec, shapes, st.sampled_from(DTYPES).map(np.dtype))


def spec_with(observation: list[ArraySpec], states: list[ArraySpec]) -> Unroll:
    like = messages.spec()
    scalar = ArraySpec((T + 1,), np.dtype(np.float32))
    return like._replace(
        timestep=TimeStep(
            tuple(observation), scalar, scalar, ArraySpec((T + 1,), np.dtype(np.int8))
        ),
        output=AgentOutput(ArraySpec((T + 1,), np.dtype(np.int64)), scalar, scalar),
        core_state=tuple(ArraySpec(spec.shape[1:], spec.dtype) for spec in states),
    )


def random_unroll(spec: Unroll, envs: int) -> Unroll:
    rng = np.random.default_rng(0)

    def filled(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return rng.integers(0, 2 if dtype == np.bool_ else 100, shape).astype(dtype)

    timed = tree.map_structure(
        lambda leaf: filled((T + 1, envs, *leaf.shape[1:]), leaf.dtype),
        (spec.timestep, spec.output),
    )
    state = tree.map_structure(lambda x: filled((envs, *x.shape), x.dtype), spec.core_state)
    frames = filled((envs,), np.dtype(np.int32))
    return Unroll(timed[0], timed[1], state, frames, filled((envs,), np.dtype(np.int64)))


@settings(max_examples=40, deadline=None)
@given(st.lists(leaf_specs(), min_size=1, max_size=4), st.lists(leaf_specs(), max_size=2))
def test_rows_hold_any_unroll(observation: list[ArraySpec], states: list[ArraySpec]) -> None:
    layout = Layout(spec_with(observation, states))
    unroll = random_unroll(spec_with(observation, states), envs=5)

    rows = layout.rows(unroll)

    assert rows.ctypes.data % 64 == 0 and rows.shape == (5, layout.row_bytes)
    tree.map_structure(np.testing.assert_array_equal, layout.unroll(rows), unroll)
    seen = tree.map_structure(lambda x: (x.shape, x.dtype), layout.unroll(rows))
    assert seen == tree.map_structure(lambda x: (x.shape, x.dtype), unroll)
    part = layout.empty(2)
    layout.write(unroll, slice(1, 3), part)
    np.testing.assert_array_equal(part, rows[1:3])  # gaps too: they go to the disk
    for device in ("CPU:0", "GPU:0"):  # what it does for a GPU a CPU can do
        unpack = functools.partial(devices.unpack, layout, device=device)
        on_device = tf.function(unpack, autograph=False)(rows)
        tree.map_structure(np.testing.assert_array_equal, on_device, unroll)


def numbered() -> Unroll:
    versions = np.arange(6)
    return messages.unroll(6, seed=1)._replace(
        frames=versions.astype(np.int32), parameter_version=versions
    )


def test_xla_unpacks_rows() -> None:
    layout = Layout(messages.spec())
    unpack = tf.function(
        lambda rows: devices.unpack(layout, rows, "GPU:0"), autograph=False, jit_compile=True
    )
    tree.map_structure(np.testing.assert_array_equal, unpack(layout.rows(numbered())), numbered())


def test_placed_rows_are_the_batch() -> None:
    layout = Layout(messages.spec())
    rows = layout.rows(numbered())
    placed = Replicas().place(layout, rows, "CPU:0")
    unroll = devices.unpack(placed.layout, placed.rows, "CPU:0")
    tree.map_structure(np.testing.assert_array_equal, unroll, numbered())
    rows[:] = 7
    np.testing.assert_array_equal(placed.rows, rows)  # nothing was copied, on a CPU
    assert Layout.of(numbered()) == layout and hash(Layout.of(numbered())) == hash(layout)


def test_a_gpu_has_kernels_for_what_unpacks_rows() -> None:
    """Otherwise TensorFlow would copy each batch to the host and back, and say nothing."""
    layout = Layout(messages.spec())
    spec = tf.TensorSpec([6, layout.row_bytes], tf.uint8)
    traced = tf.function(lambda rows: devices.unpack(layout, rows, "GPU:0"), autograph=False)
    operations = traced.get_concrete_function(spec).graph.get_operations()
    for operation in operations:
        if operation.type in ("Placeholder", "Const"):
            continue
        found = kernels.get_registered_kernels_for_op(operation.type).kernel
        assert any(_runs(operation, kernel) for kernel in found), operation


def _runs(operation: tf.Operation, kernel: Any) -> bool:
    """Whether a kernel is a GPU's, and for the operation's types."""
    return kernel.device_type == "GPU" and all(
        operation.get_attr(each.name) in [tf.as_dtype(x) for x in each.allowed_values.list.type]
        for each in kernel.constraint
    )
