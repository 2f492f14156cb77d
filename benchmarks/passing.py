"""Runs training with an evaluator, and measures when its greedy play passes."""

import math
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

import numpy as np

from impala.analysis import continual
from impala.logdir import rows

_IN_A_ROW = 3
"""Consecutive evaluations required; one alone may pass by luck (CartPole after 26,000 frames)."""


class Passed(NamedTuple):
    """When evaluations first passed, as the age of their parameters; infinite if none did."""

    frames: float
    seconds: float  # of training


def train(preset: str, least: float, *flags: str) -> Passed:
    """Trains a preset to its end. Returns when three consecutive evaluations averaged `least`.

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
    """Returns the same for a finished run of one task."""
    (curve,) = continual.read(logdir).curves.values()
    ends = range(_IN_A_ROW, len(curve.returns) + 1)
    good = [end for end in ends if curve.returns[end - _IN_A_ROW : end].mean() >= least]
    if not good:
        return Passed(math.inf, math.inf)
    frames = curve.frames[good[0] - 1]
    training = rows.read(logdir)
    seconds = np.interp(
        frames, [0, *(r["frames"] for r in training)], [0, *(r["seconds"] for r in training)]
    )
    return Passed(float(frames), float(seconds))
