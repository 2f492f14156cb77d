"""What came out of a sweep: a table, a picture, and which settings are the best.

Trials that differ only in the seed are one candidate, ranked by the mean of their scores.
"""

import csv
import io
import math
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from ray import tune

from impala.analysis import curves, runs
from impala.logdir import atomic, rows
from impala.sweeps.description import SEED, Sweep
from impala.sweeps.trial import scores, trial_directory

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

_WIDTH, _HEIGHT = 5.0, 3.4  # inches of a panel
_LINE_HEIGHT = 0.24  # inches of a line of the legend
_PANELS_IN_A_ROW = 2
_MOST_IN_A_LINE = 100  # characters of the legend
_MOST_NAMED = 7  # candidates with a colour and a name; the others are grey
_OTHERS = curves.Style("0.7", width=0.8, band=0.0)


class Result(NamedTuple):
    """A trial, as it was when the sweep ended."""

    trial: str
    status: str  # finished, stopped early, stopped or failed
    score: float  # the last one
    frames: int
    settings: Mapping[str, Any]  # those that were searched
    copied: str  # the last trial that it has copied; "": none
    logdir: pathlib.Path


class Candidate(NamedTuple):
    """Settings that were tried."""

    settings: Mapping[str, Any]  # those that were searched, without the seed
    trials: Sequence[Result]  # at least one, the best first: a seed each

    @property
    def score(self) -> float:
        """Mean over the seeds."""
        return sum(trial.score for trial in self.trials) / len(self.trials)


def of(grid: tune.ResultGrid, output: pathlib.Path) -> tuple[list[Candidate], int]:
    """Returns the results of trials, the best first, and how many trials failed without one."""
    found, lost = [], 0
    for each in map(grid.__getitem__, range(len(grid))):
        metrics = each.metrics or {}
        if "frames" not in metrics:  # it has not reported anything
            lost += each.error is not None
            continue
        trial = metrics["trial_id"]
        if each.error is not None:
            status = "failed"
        elif not metrics.get("done"):
            status = "stopped"
        else:
            status = "finished" if metrics["is_whole"] else "stopped early"
        found.append(
            Result(
                *(trial, status, metrics["score"], metrics["frames"], metrics["config"]),
                *(metrics["copied"], trial_directory(output, trial)),
            )
        )
    return ranked(found), lost


def ranked(results: Sequence[Result]) -> list[Candidate]:
    """Returns candidates, those with the largest mean score first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        alone = "" if SEED in result.settings else result.trial
        found.setdefault(f"{alone}{_without_seed(result.settings)}", []).append(result)
    candidates = [
        Candidate(
            _without_seed(trials[0].settings),
            sorted(trials, key=lambda trial: trial.score, reverse=True),
        )
        for trials in found.values()
    ]
    return sorted(candidates, key=lambda candidate: candidate.score, reverse=True)


def write(found: Sequence[Candidate], sweep: Sweep, output: pathlib.Path) -> None:
    """Writes results.csv, results.png and the link `best` to the log directory of the best
    candidate's best trial.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([_head(sweep), *(_row(candidate, sweep) for candidate in found)])
    atomic.write(output / "results.csv", text.getvalue().encode())
    if not found:
        return
    drawn = figure(found, sweep)
    drawn.savefig(output / "results.png", dpi=100)
    plt.close(drawn)
    link = output / "best"
    link.unlink(missing_ok=True)
    link.symlink_to(found[0].trials[0].logdir.relative_to(output))


def table(found: Sequence[Candidate], sweep: Sweep) -> str:
    """Returns the results as a table, the best first."""
    lines = [_head(sweep), *(_shown(candidate, sweep) for candidate in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _head(sweep: Sweep) -> list[str]:
    seeds = ["lowest", "highest", "seeds"] if SEED in sweep.search else []
    copied = ["copied"] if sweep.options.scheduler == "pbt" else []
    return ["trial", "score", *seeds, "frames", "status", *_searched(sweep), *copied]


def _row(candidate: Candidate, sweep: Sweep) -> list[Any]:
    """Returns a line of the table, with the numbers as they are."""
    trials, best = candidate.trials, candidate.trials[0]
    seeds = [
        trials[-1].score,
        best.score,
        " ".join(str(each.settings.get(SEED)) for each in trials),
    ]
    return [
        " ".join(each.trial for each in trials),
        candidate.score,
        *(seeds if SEED in sweep.search else []),
        min(each.frames for each in trials),
        ", ".join(dict.fromkeys(each.status for each in trials)),
        *(candidate.settings[name] for name in _searched(sweep)),
        *([best.copied or "none"] if sweep.options.scheduler == "pbt" else []),
    ]


def _shown(candidate: Candidate, sweep: Sweep) -> list[str]:
    """Returns a line of the table as it is printed, with rounded numbers."""
    return [
        f"{value:,}" if name == "frames" else runs.text(value)
        for name, value in zip(_head(sweep), _row(candidate, sweep), strict=True)
    ]


def figure(found: Sequence[Candidate], sweep: Sweep) -> Figure:
    """Returns a figure of the score of each candidate over frames, and of all over each setting."""
    styles = _styles(found)
    named = found[:_MOST_NAMED]
    names = [
        textwrap.fill(runs.described(each.settings) or sweep.options.preset, _MOST_IN_A_LINE)
        for each in named
    ]
    names += [f"{len(found) - len(named)} more"] if len(found) > len(named) else []
    lines = [
        Line2D([], [], color=style.colour, linestyle=style.line, linewidth=style.width)
        for style in list(styles.values())[: _MOST_NAMED + 1]
    ]
    searched = _searched(sweep)
    panels = 1 + len(searched)
    columns = min(panels, _PANELS_IN_A_ROW)
    height = math.ceil(panels / columns)
    drawn, axes = plt.subplots(
        *(height, columns),
        figsize=(2 * _WIDTH, height * _HEIGHT + _LINE_HEIGHT * ("\n".join(names).count("\n") + 1)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    first, *others = axes.flat
    for candidate in reversed(found):  # the best on top
        if of_trials := list(filter(None, (_curve(each, sweep) for each in candidate.trials))):
            curves.draw(first, {_key(candidate): of_trials}, styles)
    first.set(xlabel="environment frames", ylabel=sweep.options.score or "return in training")
    first.set_title(
        "mean of the seeds, smallest to largest" if SEED in sweep.search else "trials",
        fontsize="medium",
    )
    first.xaxis.set_major_formatter(EngFormatter(sep=""))
    for panel, name in zip(others, searched, strict=False):
        _draw_setting(panel, name, found, sweep, styles)
    for panel in others[len(searched) :]:
        panel.set_axis_off()
    drawn.legend(lines, names, loc="outside lower center", frameon=False)
    return drawn


def _draw_setting(
    panel: Axes, name: str, found: Sequence[Candidate], sweep: Sweep, styles: curves.Styles
) -> None:
    """Draws the scores at the trials' end over a setting: mean, smallest and largest."""
    space = sweep.search[name]
    for candidate in reversed(found):
        value = candidate.settings[name]
        place = value if space.is_range else list(space.values).index(value)
        ends = [candidate.trials[-1].score, candidate.trials[0].score]
        colour = styles[_key(candidate)].colour
        panel.plot([place, place], ends, color=colour, clip_on=False)
        panel.plot(place, candidate.score, "o", color=colour, markersize=5, clip_on=False)
    if space.is_range:
        panel.set_xscale("log" if space.kind == "log_uniform" else "linear")
        panel.set_xlim(*space.values)
    else:
        panel.set_xticks(range(len(space.values)), [runs.text(value) for value in space.values])
    panel.set(xlabel=name)
    panel.set_title("score at a trial's end", fontsize="medium")


def _curve(result: Result, sweep: Sweep) -> curves.Curve | None:
    """Returns a trial's scores over frames; None: it has none yet."""
    told = rows.read(result.logdir)
    scored = zip(told, scores(told, sweep.options.score), strict=True)
    points = [(row["frames"], value) for row, value in scored if value is not None]
    return curves.ascending(*np.array(points).T) if points else None


def _styles(found: Sequence[Candidate]) -> dict[str, curves.Style]:
    """Returns the style of each candidate, by its key."""
    own = curves.styles(map(_key, found[:_MOST_NAMED]))
    best = own[_key(found[0])]
    return {
        **dict.fromkeys(map(_key, found), _OTHERS),
        **own,
        _key(found[0]): best._replace(width=2.5),
    }


def _key(candidate: Candidate) -> str:
    return candidate.trials[0].trial


def _searched(sweep: Sweep) -> list[str]:
    """Returns the names of the settings that are compared: all but the seed."""
    return [name for name in sweep.search if name != SEED]


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != SEED}
