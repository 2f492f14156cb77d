"""What came out of a sweep: a table, a picture, and which run is the best."""

import csv
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from ray import tune

from impala.logdir import atomic, rows
from impala.sweeps.description import Sweep
from impala.sweeps.trial import scores, trial_directory

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

_WIDTH, _HEIGHT = 5.0, 3.4  # inches of a panel
_PANELS_IN_A_ROW = 2


class Result(NamedTuple):
    """A trial, as it was when the sweep ended."""

    trial: str
    status: str  # finished, stopped early, stopped or failed
    score: float  # the last one
    frames: int
    settings: Mapping[str, Any]  # those that were searched
    copied: str  # the last trial that it has copied; "": none
    logdir: pathlib.Path


def of(grid: tune.ResultGrid, sweep: Sweep, output: pathlib.Path) -> list[Result]:
    """Returns the results of a sweep's trials, the best first."""
    found = []
    for each in map(grid.__getitem__, range(len(grid))):
        metrics = each.metrics or {}
        if "frames" not in metrics:
            continue  # it has not reported anything
        trial, frames = metrics["trial_id"], metrics["frames"]
        if each.error is not None:
            status = "failed"
        elif not metrics.get("done"):
            status = "stopped"
        else:
            is_whole = metrics["is_whole"] or frames >= sweep.total_frames
            status = "finished" if is_whole else "stopped early"
        found.append(
            Result(
                *(trial, status, metrics["score"], frames, metrics["config"]),
                *(metrics["copied"], trial_directory(output, trial)),
            )
        )
    return sorted(found, key=lambda result: result.score, reverse=True)


def write(found: Sequence[Result], sweep: Sweep, output: pathlib.Path) -> None:
    """Writes results.csv, results.png and the link `best` to the best trial's log directory."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([_head(sweep), *(_row(result, sweep) for result in found)])
    atomic.write(output / "results.csv", text.getvalue().encode())
    if not found:
        return
    _draw(found, sweep, output / "results.png")
    link = output / "best"
    link.unlink(missing_ok=True)
    link.symlink_to(found[0].logdir.relative_to(output))


def table(found: Sequence[Result], sweep: Sweep) -> str:
    """Returns the results as a table, the best first."""
    lines = [_head(sweep), *(_shown(result, sweep) for result in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def text(value: Any) -> str:
    """Returns a setting, a score, or several settings, as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _head(sweep: Sweep) -> list[str]:
    copied = ["copied"] if sweep.options.scheduler == "pbt" else []
    return ["trial", "score", "frames", "status", *sweep.search, *copied]


def _row(result: Result, sweep: Sweep) -> list[Any]:
    """Returns a line of the table, with the numbers as they are."""
    settings = [result.settings[name] for name in sweep.search]
    copied = [result.copied or "none"] if sweep.options.scheduler == "pbt" else []
    return [result.trial, result.score, result.frames, result.status, *settings, *copied]


def _shown(result: Result, sweep: Sweep) -> list[str]:
    """Returns a line of the table as it is printed, with rounded numbers."""
    trial, score, frames, *rest = _row(result, sweep)
    return [trial, text(score), f"{frames:,}", *map(text, rest)]


def _draw(found: Sequence[Result], sweep: Sweep, file: pathlib.Path) -> None:
    """Draws the score of each trial over frames, and of all over each setting."""
    panels = 1 + len(sweep.search)
    columns = min(panels, _PANELS_IN_A_ROW)
    lines = math.ceil(panels / columns)
    figure, axes = plt.subplots(
        *(lines, columns),
        figsize=(columns * _WIDTH, lines * _HEIGHT),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    first, *others = axes.flat
    best = plt.get_cmap("tab10")(1)
    for place, result in reversed(list(enumerate(found))):  # the best on top
        told = rows.read(result.logdir)
        scored = zip(told, scores(told, sweep.options.score), strict=True)
        curve = [(row["frames"], value) for row, value in scored if value is not None]
        if curve:
            colour, width = (best, 2.0) if place == 0 else ("grey", 0.8)
            first.plot(*np.array(curve).T, color=colour, linewidth=width)
    first.set(xlabel="environment frames", ylabel=sweep.options.score or "return in training")
    first.set_title(f"trials; the best is {found[0].trial}", fontsize="medium")
    first.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel, name in zip(others, sweep.search, strict=False):
        _draw_setting(panel, name, found, sweep)
        panel.plot(*_point(found[0], name, sweep), "o", color=best, markersize=8)
    for panel in others[len(sweep.search) :]:
        panel.set_axis_off()
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _draw_setting(panel: Axes, name: str, found: Sequence[Result], sweep: Sweep) -> None:
    space = sweep.search[name]
    points = [_point(result, name, sweep) for result in found]
    panel.plot(*zip(*points, strict=True), "o", color="grey", markersize=5)
    if space.kind == "log_uniform":
        panel.set_xscale("log")
    elif not space.is_range:
        panel.set_xticks(range(len(space.values)), [text(value) for value in space.values])
    panel.set(xlabel=name)
    panel.set_title("score at a trial's end", fontsize="medium")


def _point(result: Result, name: str, sweep: Sweep) -> tuple[float, float]:
    """Returns where a trial is in the panel of a setting."""
    space, value = sweep.search[name], result.settings[name]
    place = value if space.is_range else list(space.values).index(value)
    return place, result.score
