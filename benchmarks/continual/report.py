"""Scores of finished runs as a table in Markdown and a figure.

A task's score is the area under its evaluation curve, 0 for the untrained policy and 1 for the
task trained alone for as many frames; an arm's is the mean over tasks. Intervals are bootstrapped
over seeds, 95%.
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.continual.tiers import Tier, arms
from impala.logdir import continual, plot


class Score(NamedTuple):
    """The scores of an arm, over seeds."""

    area: np.ndarray  # [seeds]
    forgetting: np.ndarray  # [seeds]


def logdir(directory: pathlib.Path, arm: str, seed: int) -> pathlib.Path:
    """Returns the log directory of a run."""
    return directory / f"{arm.replace(' ', '-')}-seed-{seed}"


def write(directory: pathlib.Path, tier: Tier, seeds: Sequence[int]) -> None:
    """Writes `table.md` and `figure.png` for the arms with all seeds finished."""
    names = [
        name
        for name in arms(tier)
        if all((logdir(directory, name, seed) / "done").exists() for seed in seeds)
    ]
    runs = {
        (name, seed): continual.read(logdir(directory, name, seed))
        for name in names
        for seed in seeds
    }
    if missing := [
        name for name in arms(tier) if name.startswith("separate") and name not in names
    ]:
        raise SystemExit(f"No score without {', '.join(missing)}, which say what 1 means.")
    table = _table(scores(tier, runs, seeds))
    (directory / "table.md").write_text(table, encoding="utf-8")
    print(table)
    whole = [name for name in names if not name.startswith("separate")]
    logdirs = [logdir(directory, name, seed) for name in whole for seed in seeds]
    plot.draw(logdirs, directory / "figure.png")


def scores(
    tier: Tier, runs: dict[tuple[str, int], continual.Run], seeds: Sequence[int]
) -> dict[str, Score]:
    """Returns the score of each arm in which every task is trained."""
    curves = {task: [run.curves[task] for run in runs.values()] for task in tier.tasks}
    random = {
        task: float(np.mean([curve.returns[0] for curve in of_task if curve.frames[0] == 0]))
        for task, of_task in curves.items()
    }
    alone = {
        task: float(np.mean([_area(runs[f"separate-{i}", seed], task) for seed in seeds]))
        for i, task in enumerate(tier.tasks)
    }

    def area(run: continual.Run) -> float:
        return float(
            np.mean(
                [
                    continual.normalised(_area(run, task), random[task], alone[task])
                    for task in tier.tasks
                ]
            )
        )

    return {
        name: Score(
            area=np.array([area(runs[name, seed]) for seed in seeds]),
            forgetting=np.array([_forgetting(runs[name, seed]) for seed in seeds]),
        )
        for name in dict.fromkeys(name for name, _ in runs)
        if not name.startswith("separate")
    }


def _area(run: continual.Run, task: str) -> float:
    return run.curves[task].area(run.blocks[-1].end if run.blocks else _end(run))


def _end(run: continual.Run) -> float:
    return float(max(curve.frames[-1] for curve in run.curves.values()))


def _forgetting(run: continual.Run) -> float:
    return float(np.mean(list(continual.forgetting(run).values()))) if run.blocks else np.nan


def _table(of_arms: dict[str, Score]) -> str:
    reference, worst = of_arms.get("simultaneous"), of_arms.get("sequential")
    lines = [
        "| arm | area (95%) | share of simultaneous | gap closed | forgetting (95%) |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, score in of_arms.items():
        share = closed = ""
        if reference is not None:
            share = f"{score.area.mean() / reference.area.mean():.2f}"
        if reference is not None and worst is not None:
            gap = reference.area.mean() - worst.area.mean()
            closed = f"{(score.area.mean() - worst.area.mean()) / gap:.2f}"
        lines.append(
            f"| {name} | {_interval(score.area)} | {share} | {closed} "
            f"| {_interval(score.forgetting)} |"
        )
    return "\n".join(lines) + "\n"


def _interval(values: np.ndarray) -> str:
    if not np.isfinite(values).all():
        return ""
    rng = np.random.default_rng(0)
    means = rng.choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{values.mean():.2f} ({low:.2f} to {high:.2f})"
