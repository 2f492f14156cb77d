"""What bounds of the policy lag do: to shares of tasks, and to learning with more or fewer actors.

Each run is `impala train` on this machine. `shares` plays two tasks, of which one has episodes ten
times as long and an environment four times as slow, and compares what was learned from with what
was played: without a bound, with `mix.max_policy_lag` and with `mix.lag_budget`. `curves` learns
with an exact lag and one, two and four actors.
"""

import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

FAST = 'benchmarks.steps:Steps{"length":20,"seconds":0.002}'
SLOW = 'benchmarks.steps:Steps{"length":200,"seconds":0.008}'
LAG = 4  # updates
_SHARES = (
    *("--tasks.order", "simultaneous", "--tasks.environments", FAST, SLOW),
    *("--environment.vectorization", "sync", "--learner.unroll-length", "10"),
    *("--mix.fresh", "8", "--actor.num-envs", "8", "--num-actors", "4"),
)
BOUNDS: Mapping[str, Sequence[str]] = {
    "no bound": (),
    f"max_policy_lag {LAG}": ("--mix.max-policy-lag", str(LAG)),
    f"lag_budget {LAG}": ("--mix.lag-budget", str(LAG)),
}

EXACT = 2  # updates
ACTORS = (1, 2, 4)
ENVS = 32  # of all actors together: how many there are changes what is learned from
SEEDS = (101, 102, 103)
POINTS = (0.25, 0.5, 0.75, 1.0)  # of a run, at which returns are compared
_CURVES: Mapping[str, Sequence[str]] = {
    "catch": ("--total-frames", "200000", "--mix.fresh", "32"),
    "cartpole": ("--total-frames", "300000", "--mix.fresh", "32", "--mix.replayed", "32"),
}


class Shares(NamedTuple):
    """What became of the slow task's unrolls, beside the other's."""

    played: float  # the slow task's share of unrolls that came
    learned: float  # and of those that were learned from
    dropped: tuple[int, int]  # unrolls of the fast and of the slow task
    lags: tuple[float, float]  # mean, of those learned from, in updates
    most_lag: float
    waited: tuple[float, float]  # seconds that their actors waited for the learner, in all
    frames_per_second: float


def shares(frames: int = 30_000) -> dict[str, Shares]:
    """Plays the two tasks under each bound."""
    return {
        name: _shares(_train("catch", *_SHARES, *flags, frames=frames))
        for name, flags in BOUNDS.items()
    }


def _shares(rows: Sequence[Mapping[str, float]]) -> Shares:
    last = rows[-1]

    def total(task: str, fate: str) -> int:
        return int(
            sum(v for name, v in last.items() if name.startswith(f"task/{task}/unrolls/{fate}"))
        )

    def mean(name: str) -> float:
        found = [row[name] for row in rows if name in row]
        return float(np.mean(found)) if found else float("nan")

    learned, dropped = (
        {task: total(task, fate) for task in (FAST, SLOW)} for fate in ("learned", "dropped")
    )
    played = {task: learned[task] + dropped[task] for task in learned}
    return Shares(
        played=played[SLOW] / sum(played.values()),
        learned=learned[SLOW] / sum(learned.values()),
        dropped=(dropped[FAST], dropped[SLOW]),
        lags=(mean(f"task/{FAST}/policy_lag/learned"), mean(f"task/{SLOW}/policy_lag/learned")),
        most_lag=max(row.get("policy_lag/max", 0.0) for row in rows),
        waited=(last[f"task/{FAST}/wait_seconds"], last[f"task/{SLOW}/wait_seconds"]),
        frames_per_second=last["frames"] / last["seconds"],
    )


def shares_table(measured: Mapping[str, Shares]) -> str:
    """Markdown."""
    lines = [
        "| | slow task's share of what was played | of what was learned from "
        "| dropped, fast / slow | mean lag, fast / slow | largest lag "
        "| waited, fast / slow, s | frames/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, each in measured.items():
        lines.append(
            f"| {name} | {each.played:.1%} | {each.learned:.1%} | {each.dropped[0]:,} / "
            f"{each.dropped[1]:,} | {each.lags[0]:.1f} / {each.lags[1]:.1f} "
            f"| {each.most_lag:.0f} | {each.waited[0]:.0f} / {each.waited[1]:.0f} "
            f"| {each.frames_per_second:,.0f} |"
        )
    return "\n".join(lines)


Curves = dict[tuple[int, int], list[float]]  # actors, seed -> return at each of POINTS


def curves(preset: str, actors: Sequence[int] = ACTORS, seeds: Sequence[int] = SEEDS) -> Curves:
    """Learns with an exact lag and as many environments, dealt to more or fewer actors.

    Raises:
      ValueError: a lag was another one.
    """
    measured: Curves = {}
    for seed, number in itertools.product(seeds, actors):
        rows = _train(
            *(preset, *_CURVES[preset], "--mix.exact-lag", str(EXACT), "--seed", str(seed)),
            *("--num-actors", str(number), "--actor.num-envs", str(ENVS // number)),
            *("--learner.log-seconds", "0.5"),
        )
        # After the first updates, which have only so many before them.
        told = [row for a, row in itertools.pairwise(rows) if a["updates"] >= EXACT]
        named = ("policy_lag/p10", "policy_lag/max")
        lags = {row[name] for row in told for name in named if name in row}
        if lags != {float(EXACT)}:
            raise ValueError(f"{preset}, {number} actors, seed {seed}: lags of {sorted(lags)}")
        measured[number, seed] = _at(rows)
        print(f"{preset}, {number} actors, seed {seed}: {measured[number, seed]}", flush=True)
    return measured


def _at(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """The mean return of the last hundred episodes, at each of POINTS."""
    (name,) = {n for n in rows[-1] if n.startswith("episode/") and n.endswith("/return_recent")}
    end = rows[-1]["frames"]
    told = [row for row in rows if name in row]
    return [
        next(row[name] for row in told if row["frames"] >= 0.999 * point * end) for point in POINTS
    ]


def agreement(measured: Curves) -> list[tuple[float, float]]:
    """At each of POINTS: the largest difference of two fleets' means, and the spread of seeds.

    The spread is the largest that one fleet has, from its lowest to its highest seed.
    """
    found = []
    for i in range(len(POINTS)):
        of_fleet: dict[int, list[float]] = {}
        for (number, _), returns in measured.items():
            of_fleet.setdefault(number, []).append(returns[i])
        means = [float(np.mean(each)) for each in of_fleet.values()]
        spread = max(max(each) - min(each) for each in of_fleet.values())
        found.append((max(means) - min(means), spread))
    return found


def curves_table(measured: Curves) -> str:
    """Markdown."""
    lines = [
        "| actors | " + " | ".join(f"{point:.0%} of the run" for point in POINTS) + " |",
        "|---|" + "---:|" * len(POINTS),
    ]
    for number in sorted({number for number, _ in measured}):
        of_fleet = np.array([r for (n, _), r in measured.items() if n == number])
        cells = [f"{c.mean():.2f} ({c.min():.2f} to {c.max():.2f})" for c in of_fleet.T]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    cells = [f"{difference:.2f} of {spread:.2f}" for difference, spread in agreement(measured)]
    lines.append("| means differ by, of seeds' spread | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _train(preset: str, *flags: str, frames: int | None = None) -> list[dict[str, float]]:
    """Trains, and returns the rows of telemetry."""
    if frames is not None:
        flags = (*flags, "--total-frames", str(frames))
    root = str(pathlib.Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as name:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "impala", "train", preset, "--logdir", f"{name}/run"),
                *("--evaluate", "no", *flags),
            ],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        lines = pathlib.Path(name, "run", "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]
