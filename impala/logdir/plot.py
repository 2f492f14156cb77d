"""Draws the curves of one or several runs, with what was forgotten: `impala plot`."""

import pathlib
from collections.abc import Sequence

import matplotlib
import numpy as np

from impala.logdir import continual, rows

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOURS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]


def draw(logdirs: Sequence[pathlib.Path], output: pathlib.Path) -> None:
    """Writes a figure of all runs as PNG, SVG or whatever else the name's ending says.

    Runs with evaluations get a panel per task, shaded where it was trained, and a table of areas
    and forgetting; if one of them has none, the returns in training are drawn instead.

    Raises:
      ValueError: if a log directory has neither, or there is no such kind of figure.
    """
    figure = plt.figure()
    known = figure.canvas.get_supported_filetypes()
    plt.close(figure)
    if output.suffix[1:] not in known:
        raise ValueError(f"No figure can be written to {output}; use one of .{', .'.join(known)}.")
    names = _names(logdirs)
    try:
        runs = {name: continual.read(logdir) for name, logdir in zip(names, logdirs, strict=True)}
    except continual.NoEvaluations:
        figure = _training(names, logdirs)
    else:
        figure = _evaluations(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)
    plt.close(figure)


def _names(logdirs: Sequence[pathlib.Path]) -> list[str]:
    """The directories' own names, or their paths if two have the same."""
    paths = [logdir.resolve() for logdir in logdirs]
    short = [path.name for path in paths]
    return [
        name if short.count(name) == 1 else str(path)
        for name, path in zip(short, paths, strict=True)
    ]


def _training(labels: Sequence[str], logdirs: Sequence[pathlib.Path]) -> Figure:
    """Mean return of the last 100 episodes in training, over frames and over time."""
    figure, (over_frames, over_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for label, logdir in zip(labels, logdirs, strict=True):
        of_run = rows.read(logdir)
        tasks = dict.fromkeys(task for row in of_run for task in rows.recent_returns(row))
        if not tasks:
            raise ValueError(f"{logdir} has no episode yet, in training or evaluation.")
        for task in sorted(tasks):
            of_task = [row for row in of_run if task in rows.recent_returns(row)]
            returns = [rows.recent_returns(row)[task] for row in of_task]
            of_both = label if len(tasks) == 1 else f"{label}: {task}"
            over_frames.plot([row["frames"] / 1e6 for row in of_task], returns, label=of_both)
            over_time.plot([row["seconds"] / 60 for row in of_task], returns)
    over_frames.set(xlabel="million frames", ylabel="return, mean of the last 100 episodes")
    over_time.set(xlabel="minutes of training")
    over_frames.legend()
    figure.tight_layout()
    return figure


def _evaluations(runs: dict[str, continual.Run]) -> Figure:
    tasks = list(dict.fromkeys(task for run in runs.values() for task in run.curves))
    height = 2.2 * len(tasks) + 0.8 + 0.3 * len(runs)
    figure, axes = plt.subplots(
        len(tasks) + 1,
        figsize=(9, height),
        squeeze=False,
        height_ratios=[2.2] * len(tasks) + [0.8 + 0.3 * len(runs)],
    )
    *panels, below = axes[:, 0]
    for number, (panel, task) in enumerate(zip(panels, tasks, strict=True)):
        _shade(panel, next((run for run in runs.values() if run.blocks), None), task)
        for colour, (name, run) in enumerate(runs.items()):
            if task in run.curves:
                curve = run.curves[task]
                panel.plot(
                    curve.frames / 1e6,
                    curve.returns,
                    label=name,
                    color=_COLOURS[colour % len(_COLOURS)],
                )
        panel.set(ylabel="return", title=task)
        if number == 0:
            panel.legend()
    panels[-1].set(xlabel="million frames of training; shaded: trained")
    below.axis("off")
    table = below.table(
        cellText=[
            [
                name,
                *[
                    _cell(run.curves[task].area(_end(run))) if task in run.curves else ""
                    for task in tasks
                ],
                *[_cell(continual.forgetting(run).get(task)) for task in tasks],
            ]
            for name, run in runs.items()
        ],
        colLabels=["run", *[f"area, {t}" for t in tasks], *[f"forgetting, {t}" for t in tasks]],
        loc="center",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    figure.tight_layout()
    return figure


def _shade(panel: Axes, run: continual.Run | None, task: str) -> None:
    """Marks where a task was trained."""
    if run is None or len(run.tasks) == 1:
        return
    for block in run.blocks:
        if run.tasks[block.task] == task:
            panel.axvspan(block.start / 1e6, block.end / 1e6, color="0.9")


def _end(run: continual.Run) -> float:
    return float(max(np.max(curve.frames) for curve in run.curves.values())) or 1.0


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
