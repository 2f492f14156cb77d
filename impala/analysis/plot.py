"""Plots runs' learning curves and forgetting between tasks: `impala plot`.

Runs that differ only in the seed are one curve: their mean, in a band from the smallest to the
largest. Each task has a panel, the legend is below the panels, and runs of several tasks have a
table below it.
"""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from impala.analysis import continual, curves, runs
from impala.analysis.runs import Groups

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

_WIDTH, _PANEL_HEIGHT, _LINE_HEIGHT = 9.0, 2.4, 0.24  # inches
_MOST_CHARACTERS = 44  # of a name in the table
_MOST_IN_A_LINE = 90  # characters of the legend


def draw(logdirs: Sequence[pathlib.Path], output: pathlib.Path) -> None:
    """Writes a figure of all runs, in the format of the file's suffix (PNG, SVG, ...).

    Raises:
      ValueError: as `figure`, or there is no such format.
    """
    check(output)
    drawn = figure(logdirs)
    output.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(output, dpi=100)
    plt.close(drawn)


def figure(logdirs: Sequence[pathlib.Path]) -> Figure:
    """Returns a figure of all runs: the returns of evaluations or, if a run has none, of training.

    Raises:
      ValueError: a log directory has neither.
    """
    groups = runs.grouped(map(runs.read, logdirs))
    if all(run.evaluated is not None for group in groups.values() for run in group):
        return _evaluations(groups)
    return _training(groups)


def check(output: pathlib.Path) -> None:
    """Checks that figures can be written in the format of this suffix.

    Raises:
      ValueError: they cannot; names the possible suffixes.
    """
    known = plt.figure().canvas.get_supported_filetypes()
    plt.close()
    if output.suffix[1:] not in known:
        raise ValueError(f"No figure can be written to {output}; use one of .{', .'.join(known)}.")


def _training(groups: Groups) -> Figure:
    """Plots returns in training over frames and over time."""
    what, over_frames, over_time = runs.training(groups)
    styles = curves.styles(groups)
    figure, axes = plt.subplots(
        len(over_frames),
        2,
        figsize=(_WIDTH + 1.0, _height(len(over_frames), groups)),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    unit, seconds = curves.unit(over_time)
    for (left, right), task in zip(axes, over_frames, strict=True):
        curves.draw(left, over_frames[task], styles)
        curves.draw(right, over_time[task], styles, scale=1.0 / seconds)
        left.set(ylabel=what)
        left.set_title(_wrapped(task, 50), fontsize="medium")
        left.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[-1, 0].set(xlabel="environment frames")
    axes[-1, 1].set(xlabel=f"{unit} of training")
    _legend(figure, groups, styles)
    return figure


def _evaluations(groups: Groups) -> Figure:
    """Plots returns of evaluations over frames, and forgetting if there are several tasks."""
    found = runs.evaluations(groups)
    evaluated = {
        name: [run.evaluated for run in group if run.evaluated is not None]
        for name, group in groups.items()
    }
    of_runs = [run for group in evaluated.values() for run in group]
    tasks = list(dict.fromkeys(task for run in of_runs for task in run.curves))
    styles = curves.styles(groups)
    table = _table(evaluated, tasks) if any(len(run.tasks) > 1 for run in of_runs) else []
    panels_height = _height(len(tasks), groups)
    table_height = _LINE_HEIGHT * (len(table) + 1)
    figure = plt.figure(
        figsize=(_WIDTH, panels_height + (table_height if table else 0.0)), layout="constrained"
    )
    if table:
        parts = figure.subfigures(2, 1, squeeze=False, height_ratios=(panels_height, table_height))
        above, below = parts[:, 0]
        _show(below.subplots(), table)
    else:
        above = figure
    axes = above.subplots(len(tasks), squeeze=False, sharex=True)[:, 0]
    sequential = next((run for run in of_runs if len(run.tasks) > 1 and run.blocks), None)
    for letter, panel, task in zip(_letters(tasks), axes, tasks, strict=True):
        if sequential is not None:
            _shade(panel, sequential, task)
        curves.draw(panel, found[task], styles)
        panel.set(ylabel="return, mean\nof an evaluation")
        panel.set_title(_wrapped(f"{letter}: {task}" if table else task, 90), fontsize="medium")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    shaded = "" if sequential is None else "; shaded: this task is trained"
    axes[-1].set(xlabel=f"environment frames of training{shaded}")
    _legend(above, groups, styles)
    return figure


def _shade(panel: Axes, run: continual.Run, task: str) -> None:
    """Marks the blocks in which a task was trained."""
    for block in run.blocks:
        if run.tasks[block.task] == task and block.end > block.start:
            panel.axvspan(block.start, block.end, color="0.9", linewidth=0)


def _table(
    groups: Mapping[str, Sequence[continual.Run]], tasks: Sequence[str]
) -> list[tuple[str, ...]]:
    """Returns areas and forgetting, as means over seeds; the first row has the headings."""

    def mean(of_runs: Sequence[float | None]) -> str:
        known = [value for value in of_runs if value is not None]
        return f"{np.mean(known):.2f}" if known else ""

    def area(run: continual.Run, task: str) -> float | None:
        return run.curves[task].area(_end(run)) if task in run.curves else None

    head = ("run", *(f"{what} {x}" for what in ("area", "forgetting") for x in _letters(tasks)))
    return [
        head,
        *(
            (
                f"{_shortened(name)} ({len(group)} runs)" if len(group) > 1 else _shortened(name),
                *(mean([area(run, task) for run in group]) for task in tasks),
                *(mean([continual.forgetting(run).get(task) for run in group]) for task in tasks),
            )
            for name, group in groups.items()
        ),
    ]


def _show(axes: Axes, table: Sequence[tuple[str, ...]]) -> None:
    """Draws a table whose columns are as wide as their contents."""
    axes.axis("off")
    head, *body = table
    widths = [max(len(row[column]) + 2 for row in table) for column in range(len(head))]
    shown = axes.table(
        cellText=[list(row) for row in body],
        colLabels=list(head),
        colWidths=[width / sum(widths) for width in widths],
        loc="center",
        cellLoc="right",
        bbox=Bbox.unit(),
    )
    shown.auto_set_font_size(False)
    # A character is about 0.6 of the font size wide; the size is in 1/72 inch.
    shown.set_fontsize(min(9.0, _WIDTH * 72.0 / (0.6 * sum(widths))))
    for (_, column), cell in shown.get_celld().items():
        cell.set_linewidth(0.5)
        if column == 0:
            cell.set_text_props(ha="left")


def _legend(figure: Any, groups: Groups, styles: curves.Styles) -> None:
    """Draws the legend below the panels."""
    lines = [Line2D([], [], color=style.colour, linestyle=style.line) for style in styles.values()]
    names = list(map("\n".join, _names(groups)))
    columns = max(1, int(100 / (8 + max(map(len, names)))))
    figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False)


def _height(panels: int, groups: Groups) -> float:
    return panels * _PANEL_HEIGHT + 0.6 + _LINE_HEIGHT * sum(map(len, _names(groups)))


def _names(groups: Groups) -> list[list[str]]:
    """Returns the lines of each group's name in the legend."""
    return [
        textwrap.wrap(
            name if len(group) == 1 else f"{name} ({len(group)} runs: mean, smallest to largest)",
            _MOST_IN_A_LINE,
        )
        for name, group in groups.items()
    ]


def _letters(tasks: Sequence[str]) -> list[str]:
    """Returns the names of tasks in a table: A, B, ..., and numbers from the 27th on."""
    return [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(tasks))]


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _shortened(name: str) -> str:
    if len(name) <= _MOST_CHARACTERS:
        return name
    half = _MOST_CHARACTERS // 2 - 1
    return f"{name[:half]}...{name[-half:]}"


def _end(run: continual.Run) -> float:
    return float(max(np.max(curve.frames) for curve in run.curves.values())) or 1.0
