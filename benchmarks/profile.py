"""Where the time of one update and of one inference goes, operation by operation, as a picture.

TensorFlow's profiler times each operation, on one thread. Run it with nothing beside it: these are
wall-clock times.
"""

import collections
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from actors import policy
from benchmarks.experience import random_batch, random_timestep
from benchmarks.setting import Options
from impala.config import schema as configs
from impala.parts import build
from impala.runtime import process
from impala.schedule import phases, tasks
from learner.update.learner import Learner

_BY_XLA = "CpuExecutable::ExecuteAsyncOnStream"  # a function that XLA has compiled
_CALLS = 10
_PICTURE = pathlib.Path("build/profile.png")
_SMALL = 0.5  # µs a step, which are drawn but not printed
_SHOWN = 9  # operations; the others are added up


def measure(config: configs.Config, options: Options) -> dict[str, float]:
    """Returns microseconds a step of each operation, longest first, and draws them."""
    del options  # it takes as long as it takes
    process.set_threads(intra_op=1)
    if config.learner.bfloat16:
        process.use_bfloat16()
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    agent = build.agent(config.agent, *spaces)
    num_envs = config.actor.num_envs // config.actor.num_groups
    timestep = random_timestep(num_envs, spaces[0])
    acting = policy.Compiled(agent).begin(timestep, [1, 2])
    algorithm = build.algorithm(config.algorithm, config, agent)
    learner = Learner(algorithm, config, phases.make(config)[0])
    batch = random_batch(config, agent, spaces)
    rows = config.mix.batch_size * config.learner.unroll_length
    measured = {
        "inference": _operations(lambda: acting.act(timestep), num_envs),
        "update": _operations(lambda: learner.update(batch), rows),
    }
    _PICTURE.parent.mkdir(parents=True, exist_ok=True)
    _draw(measured, _PICTURE)
    print(f"Drawn to {_PICTURE}.")
    return {
        f"{part}: {name}, µs a step": value
        for part, operations in measured.items()
        for name, value in operations.items()
        if value > _SMALL
    }


def _draw(measured: Mapping[str, Mapping[str, float]], path: pathlib.Path) -> None:
    """Draws a bar for each operation, in a panel for each part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(measured), figsize=(14, 4.5), layout="constrained")
    for panel, (part, operations) in zip(panels, measured.items(), strict=True):
        names = list(operations)[:_SHOWN]
        rest = sum(operations.values()) - sum(operations[name] for name in names)
        values = [*(operations[name] for name in names), rest]
        bars = panel.barh([*names, "all others"], values)
        panel.bar_label(bars, fmt="%.1f", padding=3)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_title(f"{part}: {sum(operations.values()):.0f} µs a step")
        panel.set_xlabel("µs a step, one thread")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _operations(call: Callable[[], Any], steps: int) -> dict[str, float]:
    """Returns microseconds a step of each operation of a call."""
    for _ in range(3):
        call()
    with tempfile.TemporaryDirectory(prefix="impala-profile-") as directory:
        tf.profiler.experimental.start(directory)
        for _ in range(_CALLS):
            call()
        tf.profiler.experimental.stop()
        (trace,) = pathlib.Path(directory).glob("plugins/profile/*/*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    spent: collections.Counter[str] = collections.Counter()
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                # NAME:OPERATION; what contains others is named differently.
                name = plane.event_metadata[event.metadata_id].name
                if name == _BY_XLA:
                    name = "pixels:XLA"
                where, colon, operation = name.rpartition(":")
                if colon and operation.isidentifier() and "::" not in name and " " not in name:
                    spent[f"{_room(where)} {_short(operation)}"] += event.duration_ps
    return {name: ps / 1e6 / _CALLS / steps for name, ps in spent.most_common()}


def _short(operation: str) -> str:
    return operation.removeprefix("_").removeprefix("MklNative").removesuffix("WithBias")


def _room(where: str) -> str:
    """Returns what part of the network or the update an operation belongs to."""
    return where.removeprefix("gradient_tape/").removeprefix("cond/then/_0/").rsplit("/", 1)[0]
