"""Updates per second on the GPU of this machine: networks, batch sizes, with and without XLA.

Each update is the learner's own, guard and metrics included. As in a run, the next batch is copied
from the memory of the host while an update is computed, and the parameters are copied back after
each. It takes less than ten minutes.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import tensorflow as tf

from benchmarks.experience import random_batch
from benchmarks.setting import Options
from impala.config import schema as configs
from impala.parts import build
from impala.runtime import process
from impala.schedule import phases, tasks
from learner.data.rows import Layout, Placed
from learner.update.learner import Learner

_AGENTS = {
    "shallow": configs.AgentConfig(torso="shallow", frame_stack=4),
    "deep": configs.AgentConfig(torso="deep", frame_stack=4),
    "deep, LSTM": configs.AgentConfig(torso="deep", core="lstm"),
}
_BATCH_SIZES: tuple[int, ...] = (32, 128, 256)  # unrolls
_TRIAL_SIZES = (2,)
_SECONDS = 10.0  # of each measurement, at most
_TRIAL_SECONDS = 0.5
_UPDATES = 200  # of each, at most
_LIMIT = 480.0  # seconds after which no measurement is begun: XLA may compile for a minute


class Measured(NamedTuple):
    """One kind of update."""

    device: str  # its model
    agent: str
    batch_size: int  # unrolls of `unroll_length`
    xla: bool
    compile_seconds: float  # of the first update
    updates_per_second: float
    steps_per_second: float
    megabytes_per_second: float  # from host to device

    @property
    def name(self) -> str:
        """Returns what was measured, and on what."""
        return f"{_name(self.agent, self.batch_size, self.xla)}, {self.device}"


def measure(config: configs.Config, options: Options) -> dict[str, float]:
    """Measures each kind of update for seconds of its own, and prints a table in Markdown."""
    process.load_tensorflow(use_gpus=True)  # and the libraries of CUDA that it does not find
    if not (tf.config.list_physical_devices("GPU") or options.is_trial):
        raise SystemExit(
            "benchmarks: TensorFlow finds no GPU on this machine. With an NVIDIA GPU and its "
            "driver, make setup installs what it needs. --trial measures a tiny "
            "batch on a CPU."
        )
    measured = []
    for each in _updates(config, options.is_trial):
        measured.append(each)
        print(f"{each.name}: {each.updates_per_second:.1f} updates/s", flush=True)
    print(table(measured))
    return {f"{each.name}: updates/s": each.updates_per_second for each in measured}


def _updates(config: configs.Config, is_trial: bool) -> Iterator[Measured]:
    """Yields what each kind of update takes; prints what it leaves out, and why."""
    sizes, seconds = (_TRIAL_SIZES, _TRIAL_SECONDS) if is_trial else (_BATCH_SIZES, _SECONDS)
    if is_trial:
        learner = dataclasses.replace(config.learner, unroll_length=2)
        config = dataclasses.replace(config, learner=learner)
    end = time.monotonic() + _LIMIT
    for (name, agent), size, xla in itertools.product(_AGENTS.items(), sizes, (False, True)):
        what = _name(name, size, xla)
        if time.monotonic() > end:
            print(f"{what}: left out, for want of time")
            continue
        try:
            yield update(dataclasses.replace(config, agent=agent), name, size, xla, seconds)
        except tf.errors.ResourceExhaustedError:
            print(f"{what}: left out, the memory of the device is too small")


def update(
    config: configs.Config, name: str, batch_size: int, xla: bool, seconds: float = _SECONDS
) -> Measured:
    """Measures one kind of update, on whatever device TensorFlow uses."""
    config = dataclasses.replace(
        config,
        deterministic=True,  # the first update waits for XLA
        mix=configs.MixConfig(fresh=batch_size),
        learner=dataclasses.replace(config.learner, jit_compile=xla),
    )
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    agent = build.agent(config.agent, *spaces)
    algorithm = build.algorithm(config.algorithm, config, agent)
    learner = Learner(algorithm, config, phases.make(config)[0])
    batch = random_batch(config, agent, spaces)

    start = time.perf_counter()
    learner.update(batch)
    compiled = time.perf_counter() - start
    done = -1
    layout = Layout.of(batch.unroll)
    rows = layout.rows(batch.unroll)
    for placed in _placed_ahead(lambda: learner.place_rows(layout, rows)):
        learner.update(batch, None, placed)
        learner.agent_values()
        done += 1
        if done == 0:  # the one before was not like the others: nothing had been placed
            start = time.perf_counter()
        elapsed = time.perf_counter() - start
        if done > 0 and (done == _UPDATES or elapsed >= seconds):
            break
    rate = done / elapsed
    steps = rate * batch_size * config.learner.unroll_length
    model = _model(learner.device)
    return Measured(model, name, batch_size, xla, compiled, rate, steps, rate * rows.nbytes / 1e6)


def table(measured: Sequence[Measured]) -> str:
    """Returns a table in Markdown."""
    lines = [
        f"| on {', '.join({each.device: None for each in measured})} | batch | XLA | updates/s | "
        "steps/s | MB/s to the device | first update, s |",
        "|---|---:|---|---:|---:|---:|---:|",
        *(
            f"| {each.agent} | {each.batch_size} | {'yes' if each.xla else 'no'} | "
            f"{each.updates_per_second:,.1f} | {each.steps_per_second:,.0f} | "
            f"{each.megabytes_per_second:,.0f} | {each.compile_seconds:.1f} |"
            for each in measured
        ),
    ]
    return "\n".join(lines)


def _name(agent: str, batch_size: int, xla: bool) -> str:
    return f"{agent}, batch {batch_size}{', XLA' if xla else ''}"


def _placed_ahead(place: Callable[[], Placed]) -> Iterator[Placed]:
    """Yields the batch on the device again and again; while it is used, the next one is copied."""
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(place)
        while True:
            placed, ahead = ahead.result(), thread.submit(place)
            yield placed


def _model(device: str) -> str:
    """Returns the model of a GPU, or CPU."""
    for gpu in tf.config.list_physical_devices("GPU"):
        if device.endswith(gpu.name.removeprefix("/physical_device:")):
            name: str = tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
            return name
    return "CPU"
