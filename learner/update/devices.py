"""Configures TensorFlow for learning (GPU memory, threads, bfloat16), and places batches."""

import logging
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import tensorflow as tf
import tree

from impala.config.schema import Config
from impala.runtime import process
from impala.types import Batch, Unroll
from learner.data.rows import Layout

T = TypeVar("T")

_log = logging.getLogger(__name__)


def set_up(config: Config) -> None:
    """Applies the configured threads and precision, and lets GPU memory grow as needed."""
    if config.deterministic:
        # Its operations want a seed of the global generator, which building the agent sets again.
        tf.random.set_seed(config.seed)
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
        _log.info("Learning on %s.", gpu.name)
    is_used = process.use_bfloat16(config.learner.bfloat16, on_gpu=bool(gpus))
    if config.learner.bfloat16:
        kind = "bfloat16" if is_used else "float32, which is faster on this CPU"
        _log.info("A torso of standardised images computes in %s.", kind)
    cores = 1 if config.deterministic else process.available_cores()
    process.set_threads(config.learner.threads or cores, inter_op=cores)
    if uses_xla(config, "GPU" if gpus else "CPU"):
        _log.info(
            "XLA compiles the update when the first batch has come, beside the first updates."
        )


def is_cpu(device: str) -> bool:
    """Returns whether a device, by TensorFlow's name of it, is a CPU."""
    return "GPU" not in device


def uses_xla(config: Config, device: str) -> bool:
    """Returns whether XLA compiles updates on a device, by TensorFlow's name of it."""
    return config.learner.jit_compile and not is_cpu(device)


def place(batch: T, device: str) -> T:
    """Copies a batch to a device, and returns when it is there.

    Args:
      batch: a nest of NumPy arrays, or tensors of any device.
      device: TensorFlow's name of it.

    Returns:
      Tensors on the device.
    """
    with tf.device(device):
        # An operation of the device: a mere conversion would copy when the tensor is first used.
        placed: T = tree.map_structure(lambda leaf: tf.raw_ops.Identity(input=leaf), batch)
    return placed


def shared(rows: np.ndarray) -> tf.Tensor:
    """Returns a tensor of the same memory, which must not change any more.

    A conversion would copy it.
    """
    tensor: tf.Tensor = tf.experimental.dlpack.from_dlpack(rows.__dlpack__())
    return tensor


def unpack(layout: Layout, rows: tf.Tensor, device: str) -> Unroll:
    """Returns the tensors of rows: [T + 1, B, ...], or [B, ...] untimed.

    Args:
      layout: of a row.
      rows: uint8 [B, row_bytes].
      device: on which they are, by TensorFlow's name of it.
    """
    tensors = []
    for leaf in layout.leaves:
        # TensorFlow has no kernel on GPUs that splits bytes, but one that takes slices.
        part = rows[:, leaf.offset : leaf.offset + leaf.size]
        shape = [rows.shape[0], *leaf.shape]
        if leaf.dtype == np.bool_:
            tensor = tf.cast(tf.reshape(part, shape), tf.bool)
        elif leaf.dtype.itemsize == 1:
            tensor = tf.bitcast(tf.reshape(part, shape), leaf.dtype)
        else:
            tensor = tf.bitcast(tf.reshape(part, [*shape, leaf.dtype.itemsize]), leaf.dtype)
        if leaf.is_timed:
            tensor = _time_first(tensor, device)
        tensors.append(tensor)
    return layout.nest(tensors)


def _time_first(tensor: tf.Tensor, device: str) -> tf.Tensor:
    """[B, T + 1, ...] as [T + 1, B, ...]."""
    unrolls, steps, *others = tensor.shape
    if is_cpu(device):
        # oneDNN would log an error that it does not transpose bytes; this is faster, too.
        order = np.arange(unrolls * steps).reshape(unrolls, steps).T
        return tf.gather(tf.reshape(tensor, [order.size, *others]), order)
    # GPUs have no kernel that gathers bytes.
    return tf.transpose(tensor, [1, 0, *range(2, tensor.shape.rank)])


def columns(batch: Batch, which: Sequence[int] | np.ndarray | slice) -> Batch:
    """Returns some unrolls of a batch, in the given order: [T + 1, len(which), ...].

    A slice of them is a view, others are copied.
    """
    unroll = batch.unroll
    timed = tree.map_structure(lambda x: x[:, which], (unroll.timestep, unroll.output))
    others = tree.map_structure(
        lambda x: x[which], (unroll.core_state, unroll.frames, unroll.parameter_version)
    )
    return Batch(type(unroll)(*timed, *others), batch.is_replay[which])
