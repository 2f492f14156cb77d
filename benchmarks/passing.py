"""Whole runs with an evaluator beside them: after how much training its greedy play passes."""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import numpy as np

from impala import continual

_IN_A_ROW = 3
"""Evaluations: one alone may pass by luck, as greedy play of CartPole did after 26,000 frames."""


class Passed(NamedTuple):
    """When evaluations first passed, as the age of their parameters; infinite if none did."""

    frames: float
    seconds: float  # of training


def train(preset: str, least: float, *flags: str) -> Passed:
    """Trains a preset to its end; when the mean return of evaluations was at least `least`.

    Raises:
      RuntimeError: if training fails.
    """
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as directory:
        logdir = pathlib.Path(directory) / "run"
        command = [
            *(sys.executable, "-m", "impala", "train", preset, "--logdir", str(logdir)),
            *("--learner.log-seconds", "0.5", "--evaluate", "yes", "--evaluator.greedy", *flags),
        ]
        training = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if training.returncode:
            raise RuntimeError(
                f"Training ended with {training.returncode}.\n{training.stdout[-2000:]}"
            )
        return read(logdir, least)


def read(logdir: pathlib.Path, least: float) -> Passed:
    """The same of a run that has ended, on one task."""
    (curve,) = continual.read(logdir).curves.values()
    means = np.convolve(curve.returns, np.full(_IN_A_ROW, 1 / _IN_A_ROW), mode="valid")
    good = curve.frames[_IN_A_ROW - 1 :][means >= least]
    if not good.size:
        return Passed(math.inf, math.inf)
    lines = (logdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    seconds = np.interp(
        good[0], [0, *(r["frames"] for r in rows)], [0, *(r["seconds"] for r in rows)]
    )
    return Passed(float(good[0]), float(seconds))
