"""Measures `impala train` by its own telemetry, in turn with the emulator alone on all cores.

What the emulator does alone, with nothing to learn and random actions, is the most that any trainer
can do. The speed of a shared machine changes from minute to minute: so all processes of the run are
stopped every few seconds, and the emulator has the machine to itself.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import gymnasium as gym
import numpy as np

from benchmarks import setting
from impala.config import values
from impala.config.schema import Config
from impala.parts import build

_WARM_UP = 20.0  # seconds after the first update: tracing, filling queues, first episodes
_TURN = 9.0  # seconds, of which the run has two thirds
_ROW = 6.0  # seconds within which the run adds a row of telemetry


def measure(config: Config, options: setting.Options) -> dict[str, float]:
    """Measures training with an actor for each core.

    Raises:
      RuntimeError: training ended before its time or made no step.
    """
    with _Emulators(config) as emulators, tempfile.TemporaryDirectory() as name:
        logdir, file = pathlib.Path(name) / "run", pathlib.Path(name) / "config.yaml"
        file.write_text(values.to_yaml(config))
        command = [
            *(sys.executable, "-m", "impala", "train", "atari"),
            *("--logdir", str(logdir), "--total-frames", "1000000000", "--evaluate", "no"),
            *("--num-actors", str(len(os.sched_getaffinity(0))), "--config", str(file)),
        ]
        with open(pathlib.Path(name) / "log", "wb+") as log:
            training = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                return _in_turn(training, logdir / "metrics.jsonl", emulators, options.seconds)
            except RuntimeError as error:
                log.seek(0)
                raise RuntimeError(f"{error}\n{log.read()[-2000:].decode()}") from None
            finally:
                training.send_signal(signal.SIGINT)
                try:
                    training.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    training.kill()


def _in_turn(
    training: "subprocess.Popen[bytes]",
    metrics: pathlib.Path,
    emulators: "_Emulators",
    seconds: float,
) -> dict[str, float]:
    _wait_for_updates(metrics, training)
    time.sleep(_WARM_UP)
    before, spent = _last_row(metrics), _spent(training.pid)
    began = time.monotonic()
    alone: list[float] = []
    pauses: list[tuple[float, float]] = []
    for _ in range(max(1, round(2 * seconds / _TURN))):
        time.sleep(_TURN * 2 / 3)
        start = time.time()
        with _stopped(training.pid):
            alone.append(emulators.measure(_TURN / 3))
        pauses.append((start, time.time()))
    time.sleep(_ROW)  # what was done after the last pause
    after, spent_after = _last_row(metrics), _spent(training.pid)
    took = time.monotonic() - began - sum(end - start for start, end in pauses)
    if after["time"] <= before["time"]:
        raise RuntimeError(f"No row of telemetry in {seconds} seconds.")
    between = [(a, b) for a, b in pauses if before["time"] <= a and b <= after["time"]]
    paused = sum(b - a for a, b in between)
    rate = (after["steps"] - before["steps"]) / (after["time"] - before["time"] - paused)
    emulator = sum(alone) / len(alone)
    return {
        "environment alone, steps/s": emulator,
        "training end to end, steps/s": rate,
        "share of the environment alone": rate / emulator,
        **{
            f"CPU of the {name}, µs a step": 1e6 * (used - spent.get(name, 0.0)) / rate / took
            for name, used in spent_after.items()
        },
    }


def _spent(parent: int) -> dict[str, float]:
    """Returns the CPU seconds of the learner and actors that `impala train` has started.

    They are given by what spends them: a program's main thread, and its other threads together. An
    actor's main thread assembles unrolls and calls the others, which emulate and infer. A learner's
    main thread waits while TensorFlow's threads compute.
    """
    spent: dict[str, float] = {}
    for process in setting.descendants(parent):
        words = pathlib.Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        program = next((w.decode() for w in words if w in (b"learner", b"actor")), None)
        for thread in pathlib.Path(f"/proc/{process}/task").iterdir() if program else ():
            name = f"{program}, {'main thread' if int(thread.name) == process else 'others'}"
            spent[name] = spent.get(name, 0.0) + setting.cpu_seconds(thread)
    return spent


@contextlib.contextmanager
def _stopped(parent: int) -> Iterator[None]:
    """Stops all processes that a process has started, and lets them go on."""
    processes = setting.descendants(parent)

    def send(number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process, number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


def _wait_for_updates(metrics: pathlib.Path, training: "subprocess.Popen[bytes]") -> None:
    for _ in range(1200):
        if training.poll() is not None:
            raise RuntimeError(f"Training ended with status {training.returncode}.")
        is_written = metrics.exists() and metrics.read_text().endswith("\n")
        if is_written and _last_row(metrics)["updates"]:
            return
        time.sleep(0.1)
    raise RuntimeError("No update within two minutes.")


def _last_row(metrics: pathlib.Path) -> dict[str, float]:
    row: dict[str, float] = json.loads(metrics.read_text().splitlines()[-1])
    return row


class _Emulators(contextlib.AbstractContextManager["_Emulators"]):
    """A process for each core that plays random actions when asked, and waits otherwise."""

    def __init__(self, config: Config) -> None:
        context = multiprocessing.get_context("spawn")
        self._children, self._pipes = [], []
        for _ in os.sched_getaffinity(0):
            ours, theirs = context.Pipe()
            child = context.Process(target=_emulate, args=(theirs, config), daemon=True)
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(ours)
        self.measure(0.0)  # they have started

    def measure(self, seconds: float) -> float:
        """Returns steps per second of all processes together, all running at the same time.

        Raises:
          EOFError: a process has ended.
        """
        for pipe in self._pipes:
            pipe.send(seconds)
        return float(sum(pipe.recv() for pipe in self._pipes))

    def __exit__(self, *exception: object) -> None:
        for child in self._children:
            child.kill()
            child.join()


def _emulate(pipe: Connection, config: Config) -> None:
    num_envs = config.actor.num_envs // config.actor.num_groups
    environments = build.environment(config.environment, num_envs)
    environments.reset(seed=os.getpid())
    random = np.random.default_rng(os.getpid())
    space = environments.action_space
    assert isinstance(space, gym.spaces.Discrete)
    while True:
        seconds = pipe.recv()
        start, done = time.perf_counter(), 0
        while not done or time.perf_counter() - start < seconds:
            environments.send(random.integers(space.n, size=num_envs))
            environments.recv()
            done += num_envs
        pipe.send(done / (time.perf_counter() - start))
