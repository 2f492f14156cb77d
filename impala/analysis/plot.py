"""Plots runs' learning curves and forgetting between tasks: `impala plot`.

Runs that differ only in the seed are one curve: their mean, in a band from the smallest to the
largest. Each task has a panel, the legend is below the panels, and runs of several tasks have a
table below it.
"""

import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from impala.analysis import continual
from impala.config import layers, values
from impala.config.schema import Config
from impala.logdir import rows

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

_COLOURS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
_WIDTH, _PANEL_HEIGHT, _LINE_HEIGHT = 9.0, 2.4, 0.24  # inches
_MOST_CHARACTERS = 44  # of a name in the table
_GRID = 500  # points of a mean curve


class Curve(NamedTuple):
    """A number over training."""

    x: np.ndarray  # [N] ascending
    y: np.ndarray  # [N]


class Run(NamedTuple):
    """The data of a log directory."""

    logdir: pathlib.Path
    experiment: str  # equal for runs that differ only in the seed
    evaluated: continual.Run | None  # None: it has no evaluations


Curves = Mapping[str, Sequence[Curve]]  # task -> a curve per seed that has played it


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
    groups = _groups([_read(logdir) for logdir in logdirs])
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


def _read(logdir: pathlib.Path) -> Run:
    if not logdir.is_dir():
        raise ValueError(f"There is no log directory {logdir}.")
    try:
        stored = layers.read_yaml(logdir / "config.yaml")
        config = values.from_stored(Config, stored)
    except values.OptionError:
        experiment = str(logdir.resolve())  # unknown: not grouped with others
    else:
        built_in = values.flatten(config)
        settings = values.settings_that_matter(config)
        settings |= {path: v for path, v in values.flatten(stored).items() if path not in built_in}
        settings.pop("seed", None)
        experiment = str(sorted(settings.items(), key=str))
    try:
        evaluated = continual.read(logdir)
    except continual.NoEvaluations:
        return Run(logdir, experiment, None)
    # Without curves, all evaluations are of tasks that the run no longer has.
    return Run(logdir, experiment, evaluated if evaluated.curves else None)


def _groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs of the same experiment under their common name."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.experiment, []).append(run)
    names = [_name(group) for group in found.values()]
    return {
        name if names.count(name) == 1 else str(group[0].logdir.resolve()): group
        for name, group in zip(names, found.values(), strict=True)
    }


def _name(group: Sequence[Run]) -> str:
    names = [run.logdir.resolve().name for run in group]
    if len(names) == 1:
        return names[0]
    without_seed = {re.sub(r"[-_.]?seed[-_.=]?\d+", "", name) for name in names}
    name = without_seed.pop() if len(without_seed) == 1 else f"{names[0]}, ..."
    return f"{name} ({len(group)} runs: mean, smallest to largest)"


def _training(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Plots the mean return of the last 100 training episodes, or the mean reward of a step where
    there are none, over frames and over time.
    """
    over_frames: dict[str, dict[str, list[Curve]]] = {}
    over_time: dict[str, dict[str, list[Curve]]] = {}
    for name, group in groups.items():
        for run in group:
            of_run = rows.read(run.logdir)
            what, standings = rows.standings(of_run)
            tasks = dict.fromkeys(task for standing in standings for task in standing)
            if not tasks:
                raise ValueError(
                    f"{run.logdir} has no episode and no reward yet, in training or evaluation."
                )
            for task in tasks:
                pairs = zip(of_run, standings, strict=True)
                of_task = [(row, standing[task]) for row, standing in pairs if task in standing]
                values = np.array([value for _, value in of_task])
                for curves, key in ((over_frames, "frames"), (over_time, "seconds")):
                    curve = _ascending(np.array([row[key] for row, _ in of_task]), values)
                    curves.setdefault(task, {}).setdefault(name, []).append(curve)
    colours = _colours(groups)
    figure, axes = plt.subplots(
        len(over_frames),
        2,
        figsize=(_WIDTH + 1.0, _height(len(over_frames), groups)),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    longest = max(curve.x[-1] for c in over_time.values() for g in c.values() for curve in g)
    seconds, unit = (3600.0, "hours") if longest > 10_800 else (60.0, "minutes")
    for (left, right), task in zip(axes, over_frames, strict=True):
        _draw(left, over_frames[task], colours)
        _draw(right, over_time[task], colours, scale=1.0 / seconds)
        left.set(ylabel=what)
        left.set_title(_wrapped(task, 50), fontsize="medium")
        left.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[-1, 0].set(xlabel="environment frames")
    axes[-1, 1].set(xlabel=f"{unit} of training")
    _legend(figure, colours)
    return figure


def _evaluations(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Plots returns of evaluations over frames, and forgetting if there are several tasks."""
    evaluated = {
        name: [run.evaluated for run in group if run.evaluated is not None]
        for name, group in groups.items()
    }
    runs = [run for group in evaluated.values() for run in group]
    tasks = list(dict.fromkeys(task for run in runs for task in run.curves))
    colours = _colours(groups)
    table = _table(evaluated, tasks) if any(len(run.tasks) > 1 for run in runs) else []
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
    sequential = next((run for run in runs if len(run.tasks) > 1 and run.blocks), None)
    for letter, panel, task in zip(_letters(tasks), axes, tasks, strict=True):
        if sequential is not None:
            _shade(panel, sequential, task)
        curves = {
            name: [
                _ascending(run.curves[task].frames, run.curves[task].returns)
                for run in group
                if task in run.curves
            ]
            for name, group in evaluated.items()
        }
        _draw(panel, {name: found for name, found in curves.items() if found}, colours)
        panel.set(ylabel="return, mean\nof an evaluation")
        panel.set_title(_wrapped(f"{letter}: {task}" if table else task, 90), fontsize="medium")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    shaded = "" if sequential is None else "; shaded: this task is trained"
    axes[-1].set(xlabel=f"environment frames of training{shaded}")
    _legend(above, colours)
    return figure


def _draw(
    panel: Axes,
    groups: Curves,
    colours: Mapping[str, Any],
    scale: float = 1.0,
) -> None:
    """Draws a curve of each group: that of its run, or the mean of several in a band."""
    for name, curves in groups.items():
        if len(curves) == 1:
            panel.plot(curves[0].x * scale, curves[0].y, color=colours[name])
            continue
        # Only over the frames of all seeds: otherwise the mean would jump where one ends.
        start, end = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
        grid = np.linspace(start, max(start, end), _GRID)
        all_seeds = np.array([np.interp(grid, curve.x, curve.y) for curve in curves])
        panel.plot(grid * scale, all_seeds.mean(axis=0), color=colours[name])
        low, high = all_seeds.min(axis=0), all_seeds.max(axis=0)
        panel.fill_between(grid * scale, low, high, color=colours[name], alpha=0.2, linewidth=0)


def _ascending(x: np.ndarray, y: np.ndarray) -> Curve:
    """Returns a curve in which the last part counts where a run resumed from a checkpoint."""
    later = np.minimum.accumulate(x[::-1])[::-1]  # the smallest of this and all later ones
    kept = np.append(x[:-1] < later[1:], True)
    return Curve(x[kept].astype(np.float64), y[kept].astype(np.float64))


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
                _shortened(name),
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


def _legend(figure: Any, colours: Mapping[str, Any]) -> None:
    """Draws the legend below the panels."""
    lines = [Line2D([], [], color=colour) for colour in colours.values()]
    columns = max(1, int(100 / (8 + max(map(len, colours)))))
    figure.legend(lines, list(colours), loc="outside lower center", ncols=columns, frameon=False)


def _colours(groups: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(groups)}


def _height(panels: int, groups: Mapping[str, Any]) -> float:
    return panels * _PANEL_HEIGHT + 0.6 + _LINE_HEIGHT * len(groups)


def _letters(tasks: Sequence[str]) -> list[str]:
    """Returns the names of tasks in a table: A, B, ..., and numbers from the 27th on."""
    return [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(tasks))]


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _shortened(name: str) -> str:
    name = re.sub(r" \((\d+) runs: .*\)", r" (\1 runs)", name)
    if len(name) <= _MOST_CHARACTERS:
        return name
    half = _MOST_CHARACTERS // 2 - 1
    return f"{name[:half]}...{name[-half:]}"


def _end(run: continual.Run) -> float:
    return float(max(np.max(curve.frames) for curve in run.curves.values())) or 1.0
