"""Learning curves: seeds as their mean in a band, and lines that can be told apart."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes

_COLOURS = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
_Line = Literal["-", "--", ":", "-."]
_LINES: tuple[_Line, ...] = get_args(_Line)  # the next one when all colours are used
_GRID = 500  # points of a mean curve, or a long one


class Curve(NamedTuple):
    """A number over training."""

    x: np.ndarray  # [N] ascending
    y: np.ndarray  # [N]


class Style(NamedTuple):
    """How the curves of a group are drawn."""

    colour: Any
    line: _Line = "-"
    width: float = 1.5
    band: float = 0.2  # opacity


Curves = Mapping[str, Sequence[Curve]]  # name of a group -> a curve per seed
Styles = Mapping[str, Style]  # name of a group -> its style


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Returns a style for each group; up to 40 are different."""
    return {
        name: Style(_COLOURS[i % len(_COLOURS)], _LINES[i // len(_COLOURS) % len(_LINES)])
        for i, name in enumerate(names)
    }


def ascending(x: np.ndarray, y: np.ndarray) -> Curve:
    """Returns a curve in which the last part counts where a run resumed from a checkpoint."""
    later = np.minimum.accumulate(x[::-1])[::-1]  # the smallest of this and all later ones
    kept = np.append(x[:-1] < later[1:], True)
    return Curve(x[kept].astype(np.float64), y[kept].astype(np.float64))


def unit(over_seconds: Mapping[str, Curves]) -> tuple[str, float]:
    """Returns a unit of time that suits these curves, and its seconds."""
    groups = [group for of_task in over_seconds.values() for group in of_task.values()]
    longest = max((curve.x[-1] for group in groups for curve in group), default=0.0)
    units = {"hours": 3600.0, "minutes": 60.0}
    return next(((n, s) for n, s in units.items() if longest > 3 * s), ("seconds", 1.0))


def draw(panel: Axes, groups: Curves, styles: Styles, scale: float = 1.0) -> None:
    """Draws a curve of each group: that of its run, or the mean of several in a band where they
    have frames in common.

    Args:
      panel: to draw in.
      groups: each with at least one curve.
      styles: of at least these groups.
      scale: factor of x.
    """
    for name, curves in groups.items():
        style = styles[name]
        drawn: dict[str, Any] = {
            "color": style.colour,
            "linestyle": style.line,
            "linewidth": style.width,
        }
        x, y = curves[0]
        if len(curves) == 1 and len(x) <= _GRID:
            panel.plot(x * scale, y, marker="." if len(x) == 1 else "", **drawn)
            continue
        # Only over the frames of all seeds: otherwise the mean would jump where one ends.
        start, end = max(c.x[0] for c in curves), min(c.x[-1] for c in curves)
        if start >= end:  # there are none: each seed by itself
            for x, y in curves:
                panel.plot(x * scale, y, marker="." if len(x) == 1 else "", **drawn)
            continue
        grid = np.linspace(start, end, _GRID)
        all_seeds = np.array([np.interp(grid, curve.x, curve.y) for curve in curves])
        panel.plot(grid * scale, all_seeds.mean(axis=0), **drawn)
        if len(curves) > 1:
            low, high = all_seeds.min(axis=0), all_seeds.max(axis=0)
            panel.fill_between(
                *(grid * scale, low, high), color=style.colour, alpha=style.band, linewidth=0
            )
