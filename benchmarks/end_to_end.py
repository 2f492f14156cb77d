"""Measures `impala train` end to end, by its own telemetry, in turn with something else.

The speed of a shared machine changes from minute to minute. So all processes of the run are stopped
every few seconds, and what it is compared with has the machine to itself.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from benchmarks import cpu
from impala.config import values
from impala.config.schema import Config

_TURN = 9.0  # seconds, of which the run has two thirds
_ROW = 6.0  # seconds within which the run adds a row of telemetry


class Trained(NamedTuple):
    """What a run did while it was measured."""

    steps_per_second: float  # agent steps learned from
    cpu: Mapping[str, float]  # microseconds a step, by what has spent them
    other: float  # mean of what the other measurements gave


def measure(
    config: Config, seconds: float, other: Callable[[float], float], warm_up: float = 20.0
) -> Trained:
    """Returns what training does with an actor for each core.

    Args:
      config: of the run, which is stopped before its end.
      seconds: how long to measure, after the first update and `warm_up` seconds more.
      other: measures something else for so many seconds, while the run stands still. It has a third
        of the time.
      warm_up: seconds before measuring: tracing, filling queues, first episodes.

    Raises:
      RuntimeError: training ended before its time or made no step.
    """
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as directory:
        logdir, file = pathlib.Path(directory) / "run", pathlib.Path(directory) / "config.yaml"
        file.write_text(values.to_yaml(config))
        command = [
            *(sys.executable, "-m", "impala", "train", "atari"),
            *("--logdir", str(logdir), "--total-frames", "1000000000", "--evaluate", "no"),
            *("--num-actors", str(os.cpu_count()), "--config", str(file)),
        ]
        environ = {**os.environ, "COLUMNS": "200"}
        log = open(pathlib.Path(directory) / "log", "w+", encoding="utf-8")  # noqa: SIM115
        with (
            log,
            subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ
            ) as training,
        ):
            try:
                metrics = logdir / "metrics.jsonl"
                _wait_for_updates(metrics, training)
                time.sleep(warm_up)
                before, spent = _last_row(metrics), cpu.seconds(training.pid)
                began = time.monotonic()
                others: list[float] = []
                pauses: list[tuple[float, float]] = []
                for _ in range(max(1, round(seconds / _TURN))):
                    time.sleep(_TURN * 2 / 3)
                    start = time.time()
                    with _stopped(training.pid):
                        others.append(other(_TURN / 3))
                    pauses.append((start, time.time()))
                time.sleep(_ROW)  # what was done after the last pause
                after, spent_after = _last_row(metrics), cpu.seconds(training.pid)
                took = time.monotonic() - began - sum(end - start for start, end in pauses)
            except RuntimeError as error:
                log.seek(0)
                raise RuntimeError(f"{error}\n{log.read()[-2000:]}") from None
            finally:
                training.send_signal(signal.SIGINT)
                try:
                    training.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    training.kill()
    if after["time"] <= before["time"]:
        raise RuntimeError(f"No row of telemetry in {seconds} seconds.")
    between = [(a, b) for a, b in pauses if before["time"] <= a and b <= after["time"]]
    paused = sum(b - a for a, b in between)
    rate = (after["steps"] - before["steps"]) / (after["time"] - before["time"] - paused)
    steps = rate * took
    return Trained(
        rate,
        {name: 1e6 * (spent_after[name] - spent.get(name, 0.0)) / steps for name in spent_after},
        sum(others) / len(others),
    )


@contextlib.contextmanager
def _stopped(parent: int) -> Iterator[None]:
    """Stops all processes that a process has started, and lets them go on."""
    processes = cpu.descendants(parent)

    def tell(number: signal.Signals) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process, number)

    tell(signal.SIGSTOP)
    try:
        yield
    finally:
        tell(signal.SIGCONT)


def _wait_for_updates(metrics: pathlib.Path, training: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        if training.poll() is not None:
            raise RuntimeError(f"Training ended with status {training.returncode}.")
        if (
            metrics.exists()
            and metrics.read_text().endswith("\n")
            and _last_row(metrics)["updates"]
        ):
            return
        time.sleep(0.1)
    raise RuntimeError("No update within two minutes.")


def _last_row(metrics: pathlib.Path) -> dict[str, float]:
    row: dict[str, float] = json.loads(metrics.read_text().splitlines()[-1])
    return row
