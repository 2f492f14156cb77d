"""Updates per second on the GPU of this machine: networks, batch sizes, with and without XLA.

Each update is the learner's own, guard and metrics included, of a batch that comes from the memory
of the host, as in a run. It takes less than ten minutes.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

import tensorflow as tf

from benchmarks.roofline import random_batch
from impala import build
from impala.config import schema as configs
from impala.schedule import phases, tasks
from learner.update.learner import Learner

_AGENTS = {
    "shallow": configs.AgentConfig(torso="shallow", frame_stack=4),
    "deep": configs.AgentConfig(torso="deep", frame_stack=4),
    "deep, LSTM": configs.AgentConfig(torso="deep", core="lstm"),
}
_BATCH_SIZES = (32, 128, 256)  # unrolls
_SECONDS = 10.0  # of each measurement, at most
_UPDATES = 200  # of each, at most


class Measured(NamedTuple):
    """One kind of update."""

    agent: str
    batch_size: int  # unrolls of `unroll_length`
    xla: bool
    compile_seconds: float  # of the first update
    updates_per_second: float
    steps_per_second: float
    megabytes_per_second: float  # from host to device


def measure(config: configs.Config) -> Iterator[Measured]:
    """Measures each kind of update.

    Args:
      config: the environment, the algorithm and the unroll length.

    Raises:
      RuntimeError: TensorFlow finds no GPU.
    """
    if not tf.config.list_physical_devices("GPU"):
        raise RuntimeError(
            "TensorFlow finds no GPU on this machine. With an NVIDIA GPU and its driver, install "
            "requirements-gpu.lock (docs/operations.md)."
        )
    for (name, agent), size, xla in itertools.product(_AGENTS.items(), _BATCH_SIZES, (False, True)):
        yield update(dataclasses.replace(config, agent=agent), name, size, xla)


def update(config: configs.Config, name: str, batch_size: int, xla: bool) -> Measured:
    """Measures one kind of update, on whatever device TensorFlow uses."""
    config = dataclasses.replace(
        config,
        mix=configs.MixConfig(fresh=batch_size),
        learner=dataclasses.replace(config.learner, jit_compile=xla),
    )
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    agent = build.agent(config.agent, *spaces)
    algorithm = build.algorithm(config.algorithm, config, agent)
    learner = Learner(algorithm, config, phases.make(config)[0])
    batch = random_batch(config, agent, spaces)
    size = sum(leaf.nbytes for leaf in tf.nest.flatten(batch))

    start = time.perf_counter()
    learner.update(batch)
    compiled = time.perf_counter() - start
    learner.update(batch)
    done, start = 0, time.perf_counter()
    while done < _UPDATES and time.perf_counter() - start < _SECONDS:
        learner.update(batch)
        done += 1
    rate = done / (time.perf_counter() - start)
    steps = rate * batch_size * config.learner.unroll_length
    return Measured(name, batch_size, xla, compiled, rate, steps, rate * size / 1e6)
