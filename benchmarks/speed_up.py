"""Two actors against one, at the same frames in all: time until Q-learning passes CartPole.

Each run is `impala train cartpole-q --num-actors N`, with an evaluator that plays greedily. In Mnih
et al. 2016 (arXiv 1602.01783) a thread acts and computes gradients; here an actor only acts, and
the one learner makes the same updates for the same frames, however many actors there are.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from impala import continual

PASSED = 475.0  # mean return of an evaluation
PAPER = {1: 1.0, 2: 3.0, 4: 6.3, 8: 13.3, 16: 24.1}
"""Threads -> speed-up of one-step Q-learning on seven Atari games: the paper's table 2."""


def measure(
    actors: Sequence[int] = (1, 2), seeds: Sequence[int] = (1, 2, 3)
) -> dict[int, list[float]]:
    """Seconds to the pass line for each number of actors, seed by seed; infinite if never."""
    measured: dict[int, list[float]] = {number: [] for number in actors}
    for seed in seeds:  # by turns, since a shared machine changes its speed
        for number, seconds in measured.items():
            seconds.append(_train(number, seed))
            print(f"{number} actors, seed {seed}: {seconds[-1]:.1f} s", flush=True)
    return measured


def seconds_to(logdir: pathlib.Path, passed: float) -> float:
    """Training time of the first parameters whose evaluation passes; infinite if none does."""
    (curve,) = continual.read(logdir).curves.values()
    good = curve.frames[curve.returns >= passed]
    if not good.size:
        return math.inf
    lines = (logdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return float(
        np.interp(good[0], [0, *(r["frames"] for r in rows)], [0, *(r["seconds"] for r in rows)])
    )


def speed_ups(measured: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Of the medians, against the smallest number of actors."""
    medians = {number: statistics.median(seconds) for number, seconds in measured.items()}
    slowest = medians[min(medians)]
    return {number: slowest / median for number, median in medians.items()}


def table(measured: Mapping[int, Sequence[float]]) -> str:
    """Markdown, beside the paper."""
    ours = speed_ups(measured)
    lines = [
        f"| actors | seconds to {PASSED:.0f}, seed by seed | median | speed-up | paper, threads |",
        "|---:|---|---:|---:|---:|",
    ]
    for number in sorted(ours.keys() | PAPER.keys()):
        cells = ["", "", ""]
        if number in ours:
            seconds = measured[number]
            cells = [
                ", ".join(f"{each:.0f}" for each in seconds),
                f"{statistics.median(seconds):.0f}",
                f"{ours[number]:.2f}",
            ]
        cells.append(f"{PAPER[number]:.1f}" if number in PAPER else "")
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _train(actors: int, seed: int) -> float:
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as directory:
        logdir = pathlib.Path(directory) / "run"
        command = [
            *(sys.executable, "-m", "impala", "train", "cartpole-q", "--logdir", str(logdir)),
            *("--num-actors", str(actors), "--seed", str(seed), "--learner.log-seconds", "0.5"),
            *("--evaluate", "yes", "--evaluator.greedy"),
        ]
        training = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if training.returncode:
            raise RuntimeError(
                f"Training ended with {training.returncode}.\n{training.stdout[-2000:]}"
            )
        return seconds_to(logdir, PASSED)
