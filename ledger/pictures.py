"""Draws curves and choices from records; each picture holds a digest of what it was drawn from."""

import hashlib
import json
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
import PIL.Image

from impala.analysis.curves import Curve, Style
from impala.analysis.curves import draw as draw_curves
from ledger import statistics
from ledger.records import Record

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

_COLOURS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
_WIDTH, _HEIGHT, _LEGEND = 9.0, 2.4, 0.3  # inches: of a picture, a row of panels, a line of legend
_DPI = 160  # GitHub shows about 900 pixels: a hundred for each inch
_COLUMNS = 3
_KEY = "Ledger"  # of the digest in a PNG file
_IN_TRAINING = "training return, mean of 100"
_FRAMES = "environment frames"


class Panel(NamedTuple):
    """Curves of one task over environment frames, or another x."""

    title: str
    y: str
    lines: Mapping[str, Sequence[Sequence[tuple[float, float]]]]  # arm -> for each seed its points
    shaded: Sequence[tuple[int, int]] = ()  # frames from which and to which the task is trained
    x: str = _FRAMES


class Grid(NamedTuple):
    """A number of each step of some episodes, as shades of grey: white is 0, black is 1."""

    title: str
    rows: Sequence[Sequence[float]]  # an episode each, all of the same length


class Picture(NamedTuple):
    """Panels side by side, three in a row, or two of four."""

    panels: tuple[Panel | Grid, ...]

    @property
    def digest(self) -> str:
        """Returns a digest of what is drawn."""
        return hashlib.sha256(json.dumps(self.panels).encode()).hexdigest()


def panels(title: str, of_arms: Mapping[str, Sequence[Record]], source: str) -> list[Panel]:
    """Returns a panel for each task that the arms of an experiment play.

    Args:
      title: of the experiment; "": none, tasks say enough.
      of_arms: arm -> its records.
      source: "training" or "evaluations".
    """
    y = {"training": _IN_TRAINING, "evaluations": "return, mean of an evaluation"}[source]
    found: dict[str, dict[str, list[list[tuple[float, float]]]]] = {}
    for arm, of_seeds in of_arms.items():
        for record in of_seeds:
            for task, points in _points(record, source).items():
                found.setdefault(task, {}).setdefault(arm, []).append(points)
    names = {
        task: title if title and len(found) == 1 else ": ".join(filter(None, (title, task)))
        for task in found
    }
    shaded = _shaded([record for of_seeds in of_arms.values() for record in of_seeds])
    return [
        Panel("\n".join(textwrap.wrap(names[task], 38)), y, lines, shaded.get(task, ()))
        for task, lines in found.items()
    ]


def clocked(title: str, of_lines: Mapping[str, Sequence[Record]]) -> list[Panel]:
    """Returns two panels of the return in training: over frames, and over minutes.

    Args:
      title: of both.
      of_lines: name -> records of one task.
    """
    return [
        Panel(
            title,
            _IN_TRAINING,
            {
                line: [
                    [(row[column] / unit, row[2]) for row in next(iter(record.training.values()))]
                    for record in of_seeds
                ]
                for line, of_seeds in of_lines.items()
            },
            x=x,
        )
        for x, column, unit in ((_FRAMES, 0, 1), ("minutes", 1, 60))
    ]


def _shaded(shown: Sequence[Record]) -> dict[str, list[tuple[int, int]]]:
    """Returns the blocks of each task in the first run that trains several in turn."""
    for run in map(statistics.continual_run, shown):
        trained = [block for block in run.blocks if block.end > block.start]
        if len({block.task for block in trained}) > 1:
            return {
                name: [(block.start, block.end) for block in trained if block.task == number]
                for number, name in enumerate(run.tasks)
            }
    return {}


def _points(record: Record, source: str) -> dict[str, list[tuple[float, float]]]:
    if source == "training":
        return {task: [(row[0], row[2]) for row in rows] for task, rows in record.training.items()}
    curves = statistics.continual_run(record).curves
    return {
        task: [(float(x), float(y)) for x, y in zip(curve.frames, curve.returns, strict=True)]
        for task, curve in curves.items()
    }


def draw(picture: Picture, path: pathlib.Path) -> None:
    """Writes a picture as PNG: means over seeds.

    Around them are the curves of all seeds in a panel of one arm, and in panels of several bands
    from the smallest to the largest.
    """
    curves = [panel for panel in picture.panels if isinstance(panel, Panel)]
    arms = list(dict.fromkeys(arm for panel in curves for arm in panel.lines))
    colours = {arm: _COLOURS[i % len(_COLOURS)] for i, arm in enumerate(arms)}
    has_legend = any(len(panel.lines) > 1 for panel in curves)
    per_line = max(1, 110 // (8 + max(map(len, arms), default=0)))
    legend = -(-len(arms) // per_line) * _LEGEND if has_legend else 0.0
    columns = 2 if len(picture.panels) == 4 else min(_COLUMNS, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    figure, axes = plt.subplots(
        *(rows, columns),
        figsize=(_WIDTH, rows * _HEIGHT + 0.3 + legend),
        squeeze=False,
        layout="constrained",
    )
    for number, place in enumerate(axes.flat):
        if number >= len(picture.panels):
            place.axis("off")
            continue
        panel = picture.panels[number]
        place.set_title(panel.title, fontsize=9)
        if isinstance(panel, Grid):
            _draw_grid(place, panel, number)
            continue
        for arm, of_seeds in panel.lines.items():
            colour = colours[arm] if has_legend else _COLOURS[0]
            _draw_line(place, of_seeds, colour, has_band=len(panel.lines) > 1)
        for start, end in panel.shaded:
            place.axvspan(start, end, color="0.9", zorder=0)
        if panel.x == _FRAMES:
            place.xaxis.set_major_formatter(EngFormatter(sep=""))
        place.grid(alpha=0.3)
        if number % columns == 0:
            place.set_ylabel(panel.y, fontsize=9)
        if number + columns >= len(picture.panels):
            place.set_xlabel(panel.x, fontsize=9)
    if has_legend:
        lines = [Line2D([], [], color=colour) for colour in colours.values()]
        figure.legend(lines, arms, loc="outside lower center", ncols=per_line)
    figure.savefig(path, dpi=_DPI, metadata={_KEY: picture.digest, "Software": None})
    plt.close(figure)


def _draw_grid(place: Axes, grid: Grid, number: int) -> None:
    shown = np.array(grid.rows)
    bounds = (0.5, shown.shape[1] + 0.5, len(shown) + 0.5, 0.5)
    place.imshow(
        *(shown, "Greys"), vmin=0, vmax=1, aspect="auto", interpolation="none", extent=bounds
    )
    place.set_xlabel("step", fontsize=9)
    if number % _COLUMNS == 0:
        place.set_ylabel("episode", fontsize=9)


def _draw_line(
    place: Axes,
    of_seeds: Sequence[Sequence[tuple[float, float]]],
    colour: object,
    *,
    has_band: bool,
) -> None:
    seeds = [Curve(*np.array(points, float).T) for points in of_seeds if len(points)]
    draw_curves(place, {"": seeds}, {"": Style(colour, band=0.2 if has_band else 0.0)})
    for x, y in seeds if not has_band and len(seeds) > 1 else ():
        place.plot(x, y, color=colour, alpha=0.4, linewidth=0.5)


def digest_in(path: pathlib.Path) -> str | None:
    """Returns the digest that a picture holds; None if it is not there or holds none."""
    try:
        with PIL.Image.open(path) as image:
            return str(image.info.get(_KEY))
    except OSError:
        return None
