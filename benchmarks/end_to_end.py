"""Measures `impala train` end to end, by its own telemetry."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks import cpu
from impala.config import layers
from impala.config.schema import Config


class Trained(NamedTuple):
    """What a run did while it was measured."""

    steps_per_second: float  # agent steps learned from
    cpu: Mapping[str, float]  # microseconds a step, by what has spent them


def measure(config: Config, seconds: float, warm_up: float = 20.0) -> Trained:
    """Returns what training does with an actor for each core.

    Args:
      config: of the run, which is stopped before its end.
      seconds: how long to measure, after the first update and `warm_up` seconds more.
      warm_up: seconds before measuring: tracing, filling queues, first episodes.

    Raises:
      RuntimeError: training ended before its time or made no step.
    """
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as directory:
        logdir = pathlib.Path(directory) / "run"
        command = [
            *(sys.executable, "-m", "impala", "train", "atari"),
            *("--logdir", str(logdir), "--total-frames", "1000000000", "--evaluate", "no"),
            *("--num-actors", str(os.cpu_count())),
        ]
        environ = {**os.environ, **layers.to_environment(config), "COLUMNS": "200"}
        log = open(pathlib.Path(directory) / "log", "w+", encoding="utf-8")  # noqa: SIM115
        with (
            log,
            subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environ
            ) as training,
        ):
            try:
                metrics = logdir / "metrics.jsonl"
                _wait_for_rows(metrics, training, count=1)
                time.sleep(warm_up)
                before, spent = _last_row(metrics), cpu.seconds(training.pid)
                began = time.monotonic()
                time.sleep(seconds)
                after, spent_after = _last_row(metrics), cpu.seconds(training.pid)
                took = time.monotonic() - began
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
    rate = (after["steps"] - before["steps"]) / (after["time"] - before["time"])
    steps = rate * took
    return Trained(
        rate,
        {name: 1e6 * (spent_after[name] - spent.get(name, 0.0)) / steps for name in spent_after},
    )


def _wait_for_rows(metrics: pathlib.Path, training: subprocess.Popen[bytes], count: int) -> None:
    for _ in range(1200):
        if training.poll() is not None:
            raise RuntimeError(f"Training ended with status {training.returncode}.")
        if metrics.exists() and len(metrics.read_text().splitlines()) >= count:
            return
        time.sleep(0.1)
    raise RuntimeError("No telemetry within two minutes.")


def _last_row(metrics: pathlib.Path) -> dict[str, float]:
    row: dict[str, float] = json.loads(metrics.read_text().splitlines()[-1])
    return row
