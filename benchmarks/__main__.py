"""`make bench`: measures this machine and the services on it, prints a table, writes JSON."""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import rich.console
import rich.table

from benchmarks.machine import machine
from impala.config import presets, values
from impala.config import schema as configs
from impala.runtime import process, tether

_ATARI = presets.PRESETS["atari"][1]
# The paper's batch: T 20, B 32.
_CONFIG = dataclasses.replace(
    _ATARI,
    learner=dataclasses.replace(_ATARI.learner, unroll_length=20, queue_unrolls=64, threads=1),
    mix=configs.MixConfig(fresh=32),
    actor=configs.ActorConfig(num_envs=128, num_groups=1),
)

_Part = Callable[[configs.Config, float], dict[str, float]]


def main() -> int:
    """Runs the selected benchmarks; by default, the quick ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        help="training, ingest, replay, by default; actor, gpu, profile, peers",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="for each measurement")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("build/bench.json"))
    parser.add_argument(
        "--presets", nargs="+", default=["catch", "cartpole"], help="actor: what one actor plays"
    )
    parser.add_argument(
        "--against",
        type=pathlib.Path,
        help="actor: a checkout of another version, to take turns with",
    )
    parser.add_argument(
        "--trial", action="store_true", help="gpu: a tiny batch, on a CPU if there is no GPU"
    )
    arguments = parser.parse_args()
    by_default: dict[str, _Part] = {"training": _training, "ingest": _ingest, "replay": _replay}
    measures: dict[str, _Part] = {
        **by_default,
        "actor": functools.partial(_actor, arguments.presets, arguments.against),
        "gpu": functools.partial(_gpu, arguments.trial),
        "profile": _profile,
        "peers": _peers,
    }
    if unknown := set(arguments.parts) - measures.keys():
        parser.error(f"no part {sorted(unknown)[0]!r}; there are {', '.join(measures)}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    process.prefer_onednn()

    console = rich.console.Console()
    named = f"{machine()}, {time.strftime('%Y-%m-%d')}"
    results: dict[str, Any] = {"machine": named, "config": values.to_dict(_CONFIG)}
    for part in arguments.parts or by_default:
        results[part] = _in_a_process(measures[part], arguments.seconds)
        table = rich.table.Table("measured", "value", title=f"{part} ({results['machine']})")
        for name, value in results[part].items():
            table.add_row(name, f"{value:,.3g}" if value < 100 else f"{value:,.0f}")
        console.print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"Written to {arguments.json}.")
    return 0


def _in_a_process(measure: _Part, seconds: float) -> dict[str, float]:
    """Measures a part in a process of its own, as TensorFlow's threads can be set only once."""
    # Forked, as a spawned one does not find the functions of this module; nothing with threads is
    # imported here.
    context = multiprocessing.get_context("fork")
    results, child_end = context.Pipe(duplex=False)
    child = context.Process(target=_send_measured, args=(child_end, os.getpid(), measure, seconds))
    child.start()
    child_end.close()
    try:
        measured: dict[str, float] = results.recv()
    except EOFError:  # it has said why
        raise SystemExit(1) from None
    finally:
        child.join()
    return measured


def _send_measured(to: Connection, parent: int, measure: _Part, seconds: float) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    tether.tie(parent)
    to.send(measure(_CONFIG, seconds))


def _training(config: configs.Config, seconds: float) -> dict[str, float]:
    """Compares training with the emulator alone, measured in turn, and with the roofline.

    The roofline is of our own parts. The emulator alone is not: what it does on all cores, with
    nothing to learn and random actions, is the most that any trainer can do.
    """
    from benchmarks import end_to_end, roofline

    with roofline.OnAllCores(roofline.environment, config) as emulators:
        trained = end_to_end.measure(config, seconds * 2, emulators.measure)
    with roofline.OnAllCores(roofline.inference, config) as inferring:
        inference = inferring.measure(seconds / 3)
    with roofline.OnAllCores(roofline.learner, config) as learning:
        learner = learning.measure(seconds / 3)
    parts = roofline.Roofline(trained.other, inference, learner)
    return {
        "environment alone, steps/s": parts.environment,
        "inference alone, steps/s": parts.inference,
        "learner alone, steps/s": parts.learner,
        "roofline, steps/s": parts.steps_per_second,
        "training end to end, steps/s": trained.steps_per_second,
        "share of the roofline": trained.steps_per_second / parts.steps_per_second,
        "share of the emulator alone": trained.steps_per_second / parts.environment,
        **{f"CPU of the {name}, µs a step": value for name, value in trained.cpu.items()},
    }


def _ingest(config: configs.Config, seconds: float) -> dict[str, float]:
    from benchmarks import ingest

    ours, bare = ingest.measure(config, seconds)
    return {
        "ingest, MB/s": ours.bytes_per_second / 1e6,
        "ingest, unrolls/s": ours.unrolls_per_second,
        "bare stream, MB/s": bare.bytes_per_second / 1e6,
        "share of the bare stream": ours.bytes_per_second / bare.bytes_per_second,
        "CPU of a GB, ingest, ms": 1e3 * ours.cpu_seconds,
        "CPU of a GB, bare stream, ms": 1e3 * bare.cpu_seconds,
        "share of the bare stream, by CPU": bare.cpu_seconds / ours.cpu_seconds,
    }


def _replay(config: configs.Config, seconds: float) -> dict[str, float]:
    from benchmarks import replay

    cost = replay.measure(config, seconds)
    return {
        "updates/s, all fresh": cost.fresh.per_second,
        "updates/s, half replayed": cost.replaying.per_second,
        "share of all fresh": cost.replaying.per_second / cost.fresh.per_second,
        "CPU of an update, all fresh, ms": 1e3 * cost.fresh.cpu_seconds,
        "CPU of an update, half replayed, ms": 1e3 * cost.replaying.cpu_seconds,
        "share of all fresh, by CPU": cost.fresh.cpu_seconds / cost.replaying.cpu_seconds,
        "stored bytes per agent frame": cost.bytes_per_frame,
        "the same, not compressed": cost.raw_bytes_per_frame,
        "add an unroll, µs": cost.add_seconds * 1e6,
        "sample an unroll, µs": cost.sample_seconds * 1e6,
    }


def _actor(
    presets: Sequence[str], against: pathlib.Path | None, config: configs.Config, seconds: float
) -> dict[str, float]:
    """Three rounds; for each preset one actor, and one of the other version if it is given."""
    from benchmarks import actor

    del config
    measured = actor.measure(presets, seconds / 3, 3, against)
    print(actor.table(measured))
    return {
        f"{preset}, round {number}, {whose}: {name.replace('_', ' ')}": value
        for preset, rounds in measured.items()
        for number, acted in enumerate(rounds, start=1)
        for whose, each in zip(("ours", "theirs"), acted, strict=True)
        if each is not None
        for name, value in each._asdict().items()
    }


def _peers(config: configs.Config, seconds: float) -> dict[str, float]:
    """Uses the deep network and the paper's batch in each of two learners."""
    from benchmarks import peers

    deep = dataclasses.replace(config, agent=presets.PRESETS["atari-deep"][1].agent)
    return peers.measure(deep, seconds)


def _gpu(is_trial: bool, config: configs.Config, seconds: float) -> dict[str, float]:
    """Measures updates of several networks and batch sizes, each for seconds of its own."""
    from benchmarks import gpu

    del seconds
    measured = []
    try:
        for each in gpu.measure(config, is_trial=is_trial):
            measured.append(each)
            print(f"{each.name}: {each.updates_per_second:.1f} updates/s", flush=True)
    except RuntimeError as error:
        raise SystemExit(f"benchmarks: {error}") from None
    print(gpu.table(measured))
    return {
        f"{each.name}: {field.replace('_', ' ')}": value
        for each in measured
        for field, value in each._asdict().items()
        if isinstance(value, float)
    }


def _profile(config: configs.Config, seconds: float) -> dict[str, float]:
    """Measures ten updates and inferences, and draws them."""
    from benchmarks import profile

    del seconds
    measured = profile.measure(config)
    path = pathlib.Path("build/profile.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.draw(measured, path)
    print(f"Drawn to {path}.")
    return {
        f"{part}: {name}, µs a step": value
        for part, operations in measured.items()
        for name, value in operations.items()
        if value > 0.5
    }


if __name__ == "__main__":
    sys.exit(main())
