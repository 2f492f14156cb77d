"""A page about runs: `impala report`. One HTML file that needs nothing else.

Runs that differ only in the seed are one group. Curves are drawn as SVG whose text and axes have
the colour of the page, so that it is readable on light and dark screens.
"""

import base64
import html
import io
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from impala.analysis import curves, runs
from impala.analysis.curves import Curve, Style
from impala.analysis.runs import Groups, Run
from impala.logdir import rows
from impala.runtime.installation import VERSION

_PANEL = (4.6, 2.7)  # inches
_FAULTS = re.compile(
    r"actor/environment_faults/.+|guard/.+|unrolls/dropped/(?!run_finished).+|refused/.+"
    r"|messages/(duplicates|rejected/.+|violations/.+)|(telemetry|evaluations|info_names)/.*dropped"
)
# Counters that a checkpoint holds; others begin at 0 when a learner starts.
_OF_RUN = ("unrolls/", "messages/duplicates", "messages/rejected/")
_STARTS = "learner/starts"
_RECEIVED = "ingest/bytes"  # a counter of a start, for rows without the number of starts
_DASHES = {"-": "", "--": "6 3", ":": "2 3", "-.": "6 3 2 3"}
_FRAMES = "environment frames"
_SEEDS = "Several seeds: their mean (smallest to largest); in pictures, a line in a band."
_STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body {
  font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1360px;
  overflow-wrap: break-word; padding: 0 16px 48px;
}
h1 { font-size: 1.6rem; margin: 24px 0 0; }
h2 {
  border-top: 1px solid var(--line); font-size: 1.25rem; margin: 32px 0 12px; padding-top: 16px;
}
h3 { font-size: 1rem; margin: 20px 0 8px; }
header p { margin: 0; opacity: 0.7; }
p { max-width: 75ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td {
  border-bottom: 1px solid var(--line); padding: 6px 16px 6px 0; text-align: left;
  vertical-align: top; min-width: 5em;
}
.legend { list-style: none; margin: 0 0 16px; padding: 0; }
.legend li { display: inline-block; margin-right: 24px; }
.line { height: 8px; margin-right: 8px; width: 24px; }
.panels {
  display: grid; gap: 24px;
  grid-template-columns: repeat(auto-fill, minmax(min(380px, 100%), 1fr));
}
figure { margin: 0; }
figure svg { display: block; height: auto; width: 100%; }
figure svg text { fill: currentColor; }
figcaption { font-size: 0.9rem; font-weight: 600; margin-bottom: 4px; }
.video img { height: 320px; max-width: 100%; object-fit: contain; object-position: left; }
summary { cursor: pointer; }
"""


class Video(NamedTuple):
    """A video of the best agent, or the reason why there is none."""

    text: str
    gif: bytes = b""


def check(found: Groups) -> None:
    """Checks that there is something to say about each run.

    Raises:
      ValueError: a run has no returns and no rewards yet.
    """
    for run in _all(found):
        if not _reached(run):
            raise ValueError(
                f"{run.logdir} has no episode and no reward yet, in training or evaluation."
            )


def best(found: Groups) -> Run:
    """Returns the run whose agent is the best of those that play the tasks of the first one.

    By evaluations, if all have them, else by training.
    """
    every = _all(found)
    measures = (_best_evaluated, _trained, _reached)
    measure = next(each for each in measures if all(map(each, every)))
    tasks = measure(every[0]).keys()
    alike = [run for run in every if measure(run).keys() == tasks]
    return max(alike, key=lambda run: np.mean(list(measure(run).values())))


def page(found: Groups, video: Video | None) -> str:
    """Returns the page as HTML.

    Args:
      found: checked runs.
      video: to show; None: nothing is said about one.
    """
    styles = curves.styles(found)
    runs_of = sum(map(len, found.values()))
    title = f"{', '.join(_tasks(found))}: {runs_of} {'run' if runs_of == 1 else 'runs'}"
    sections = {
        "Results": _results(found, styles),
        "Learning curves": _learning(found, styles),
        "Best agent": _video(video),
        "Settings": _settings(found, styles),
        "Speed, and who waits": _speed(found, styles),
        "Policy lag": _lag(found, styles),
        "Faults and restarts": _faults(found),
    }
    body = "".join(
        f"<section><h2>{heading}</h2>{content}</section>"
        for heading, content in sections.items()
        if content
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<header><h1>{html.escape(title)}</h1><p>impala {VERSION}</p></header>"
        f"<main>{body}</main></body></html>\n"
    )


def _results(found: Groups, styles: curves.Styles) -> str:
    evaluated = any(run.evaluated for run in _all(found))
    head = ["", "seed", "frames", "minutes", "in training"]
    head += ["last evaluation", "best evaluation"] if evaluated else []
    lines = [
        (
            _name(name, styles[name]),
            html.escape(", ".join(str(run.settings.get("seed", "?")) for run in group)),
            _spread([_newest(run, "frames") for run in group], "{:,.0f}"),
            _spread([_newest(run, "seconds") / 60 for run in group], "{:,.1f}"),
            _spread(_means(map(_trained, group))),
            *((_spread(_means(map(_evaluated, group))),) if evaluated else ()),
            *((_spread(_means(map(_best_evaluated, group))),) if evaluated else ()),
        )
        for name, group in found.items()
    ]
    what = {run.standings[0].replace("\n", " ") for run in _all(found) if run.rows}
    notes = [f"In training: {each}." for each in sorted(what)]
    notes += [_SEEDS] if any(len(group) > 1 for group in found.values()) else []
    return _table(head, lines) + f"<p>{' '.join(notes)}</p>"


def _learning(found: Groups, styles: curves.Styles) -> str:
    """Shows returns in training over frames and time, and of evaluations."""
    begun = {name: [run for run in group if _trained(run)] for name, group in found.items()}
    training = runs.training({name: group for name, group in begun.items() if group})
    evaluated = runs.evaluations(found)
    unit, seconds = curves.unit(training.over_seconds)
    panels = []
    for task in dict.fromkeys([*training.over_frames, *evaluated]):
        if task in evaluated:
            title = f"{task}: return, mean of an evaluation"
            panels.append(_panel(title, evaluated[task], styles))
        if task in training.over_frames:
            title = f"{task}: {training.what}".replace("\n", " ")
            panels.append(_panel(title, training.over_frames[task], styles))
            over_time = training.over_seconds[task]
            panels.append(_panel(title, over_time, styles, f"{unit} of training", 1 / seconds))
    return _legend(styles) + _panels(panels)


def _settings(found: Groups, styles: curves.Styles) -> str:
    """Shows what differs between groups, and from the preset that is nearest to each."""
    paths = runs.differing([group[0] for group in found.values()])
    content = ""
    if paths:
        lines = [
            ["", *map(html.escape, paths)],
            *(
                [_name(name, styles[name]), *(_setting(group[0], path) for path in paths)]
                for name, group in found.items()
            ),
        ]
        if len(paths) > len(found):  # long rather than wide
            lines = list(map(list, zip(*lines, strict=True)))
        content += f"<h3>What differs</h3>{_table(lines[0], lines[1:])}"
    content += "<h3>Nearest presets</h3>"
    for name, group in found.items():
        preset, of_preset = group[0].nearest
        changed = [
            tuple(html.escape(runs.text(x)) for x in (path, group[0].settings[path], value))
            for path, value in of_preset.items()
        ]
        table = _table(("setting", "here", f"in {preset}"), changed) if changed else ""
        said = f"<code>{preset}</code>{' with these settings:' if changed else ', unchanged.'}"
        if not group[0].settings:
            said = "its config.yaml cannot be read."
        directories = ", ".join(str(run.logdir) for run in group)
        content += (
            f"<details{' open' if len(found) == 1 else ''}><summary>{html.escape(name)}</summary>"
            f"<p><code>{html.escape(directories)}</code>: {said}</p>{table}</details>"
        )
    return content


def _speed(found: Groups, styles: curves.Styles) -> str:
    metrics = {
        "speed/frames_per_second": "frames per second",
        "learner/wait_share": "share of time that the learner waits for data",
        "actor/wait_share": "share of time that actors wait for the learner",
    }
    lines = [
        (
            _name(name, styles[name]),
            _spread([_mean(run, "speed/frames_per_second") for run in group], "{:,.0f}"),
            *(
                _spread([_mean(run, metric) for run in group], "{:.0%}")
                for metric in ("learner/wait_share", "actor/wait_share")
            ),
        )
        for name, group in found.items()
    ]
    advice = (
        "<p>If the learner waits, more actors help. If the actors wait, fewer suffice, or a faster "
        "learner helps.</p>"
    )
    head = ("", "frames per second", "learner waits", "actors wait")
    return _table(head, lines) + advice + _panels(_over_frames(found, styles, metrics))


def _lag(found: Groups, styles: curves.Styles) -> str:
    metrics = {
        "policy_lag/mean": "mean, in updates",
        "policy_lag/max": "largest, in updates",
    }
    return _panels(_over_frames(found, styles, metrics))


def _faults(found: Groups) -> str:
    """Shows what went wrong in each run, as far as rows of telemetry show it."""
    lines = []
    for run in _all(found):
        names = sorted(n for n in {n for r in run.rows for n in r} if _FAULTS.match(n))
        counts = {name: _count(run, name) for name in [*names, "actor/joins"]}
        faults = [f"{name} {counts[name]:,.0f}" for name in names if counts[name]]
        lines.append(
            (
                html.escape(str(run.logdir)),
                _starts(run.logdir),
                f"{counts.get('actor/joins', 0):,.0f}",
                html.escape(", ".join(faults) or "none"),
            )
        )
    head = ("", "starts of the learner", "joins of actors and evaluators", "faults")
    return _table(head, lines)


def _video(video: Video | None) -> str:
    if video is None:
        return ""
    text = html.escape(video.text)
    if not video.gif:
        return f"<p>No video: {text}</p>"
    data = base64.b64encode(video.gif).decode()
    return (
        f'<figure class="video"><figcaption>{text}</figcaption>'
        f'<img alt="The best agent" src="data:image/gif;base64,{data}"></figure>'
    )


# Numbers of a run.


def _all(found: Groups) -> list[Run]:
    return [run for group in found.values() for run in group]


def _tasks(found: Groups) -> list[str]:
    return list(dict.fromkeys(task for run in _all(found) for task in _reached(run)))


def _trained(run: Run) -> rows.Row:
    """Returns each task's newest return or reward in training."""
    newest: rows.Row = {}
    for standing in run.standings[1]:
        newest |= standing
    return newest


def _evaluated(run: Run) -> rows.Row:
    """Returns the return of each task's last evaluation."""
    found = {} if run.evaluated is None else run.evaluated.curves
    return {task: float(curve.returns[-1]) for task, curve in found.items()}


def _best_evaluated(run: Run) -> rows.Row:
    """Returns the return of each task's best evaluation."""
    found = {} if run.evaluated is None else run.evaluated.curves
    return {task: float(curve.returns.max()) for task, curve in found.items()}


def _reached(run: Run) -> rows.Row:
    """Returns what the best agent of a run has reached in each task, as far as is known."""
    return _best_evaluated(run) or _trained(run)


def _means(of_runs: Iterable[rows.Row]) -> list[float]:
    """Returns the means over tasks."""
    return [float(np.mean(list(tasks.values()))) if tasks else np.nan for tasks in of_runs]


def _newest(run: Run, metric: str) -> float:
    return run.rows[-1][metric] if run.rows else np.nan


def _series(run: Run, metric: str) -> Curve | None:
    """Returns a scalar over frames: each time they grew, its mean since the last time.

    None: no row has it, or frames never grew.
    """
    frames, numbers, seconds = _timed(run, metric)
    ends = np.flatnonzero(np.diff(frames, prepend=0.0) > 0.0)  # a resumed run went back in between
    if not ends.size:
        return None
    starts = np.append(0, ends[:-1] + 1)  # the rows since are without new frames
    numbers, seconds = numbers[: ends[-1] + 1], seconds[: ends[-1] + 1]
    means = np.add.reduceat(numbers * seconds, starts) / np.add.reduceat(seconds, starts)
    return curves.ascending(frames[ends], means)


def _mean(run: Run, metric: str) -> float:
    """Returns the mean of a scalar over the time of its rows."""
    _, numbers, seconds = _timed(run, metric)
    return float(np.average(numbers, weights=seconds)) if numbers.size else np.nan


def _timed(run: Run, metric: str) -> np.ndarray:
    """Returns frames, a scalar and the seconds of the rows that have it: [3, N]."""
    # Rows of older versions do not tell their time: the time of training grows only with frames.
    grown = np.diff([row["seconds"] for row in run.rows], prepend=0.0)
    of_run = [
        (row["frames"], row[metric], row.get("row_seconds", more))
        for row, more in zip(run.rows, grown, strict=True)
        if metric in row
    ]
    timed = np.array(of_run, np.float64).reshape(-1, 3)
    return timed[timed[:, 2] > 0].T


def _count(run: Run, metric: str) -> float:
    """Returns a counter's value over all starts of the learner."""
    total = of_start = 0.0
    for before, row in itertools.pairwise([{}, *run.rows]):
        is_first = row.get(_STARTS, 0) != before.get(_STARTS, 0)
        is_first |= row.get(_RECEIVED, 0) < before.get(_RECEIVED, 0)
        if is_first and not metric.startswith(_OF_RUN):  # all others begin at 0
            total, of_start = total + of_start, 0.0
        of_start = row.get(metric, of_start)
    return total + of_start


def _starts(logdir: pathlib.Path) -> str:
    try:
        return str(len(json.loads((logdir / "incarnations.json").read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return "?"


def _setting(run: Run, path: str) -> str:
    unknown = "none" if run.settings else "?"
    return html.escape(runs.text(run.experiment[path]) if path in run.experiment else unknown)


# HTML.


def _spread(values: Sequence[float], form: str = "{:.4g}") -> str:
    """Returns the mean of the seeds that have a value, and the smallest and the largest."""
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return "–"
    mean, low, high = float(np.mean(known)), min(known), max(known)
    shown, least, most = map(form.format, (mean, low, high))
    if least == most or high - low <= 0.01 * abs(mean):
        return shown
    return f"{shown} ({least} to {most})"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table; all cells are HTML, the first of each line names it."""
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{line[0]}</th>{"".join(f"<td>{cell}</td>" for cell in line[1:])}</tr>'
        for line in lines
    )
    return (
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _name(name: str, style: Style) -> str:
    """Returns a group's name with a piece of its line."""
    return (
        '<svg class="line" viewBox="0 0 24 8" aria-hidden="true"><path d="M0 4H24" fill="none" '
        f'stroke="{to_hex(style.colour)}" stroke-width="3" '
        f'stroke-dasharray="{_DASHES[style.line]}"/></svg>{html.escape(name)}'
    )


def _legend(styles: curves.Styles) -> str:
    names = "".join(f"<li>{_name(name, style)}</li>" for name, style in styles.items())
    return f'<ul class="legend">{names}</ul>'


def _panels(panels: Sequence[str]) -> str:
    return f'<div class="panels">{"".join(panels)}</div>' if panels else ""


def _over_frames(found: Groups, styles: curves.Styles, metrics: Mapping[str, str]) -> list[str]:
    """Returns a panel for each scalar that there is: its name -> its title."""
    panels = []
    for metric, title in metrics.items():
        series = {name: [_series(run, metric) for run in group] for name, group in found.items()}
        known = {name: [each for each in s if each is not None] for name, s in series.items()}
        if any(known.values()):
            panels.append(_panel(title, {n: each for n, each in known.items() if each}, styles))
    return panels


def _panel(
    title: str,
    groups: curves.Curves,
    styles: curves.Styles,
    label: str = _FRAMES,
    scale: float = 1.0,
) -> str:
    """Returns curves as a figure with a caption."""
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 11}):
        figure = Figure(figsize=_PANEL, layout="constrained")
        axes = figure.subplots()
        curves.draw(axes, groups, styles, scale)
        axes.set(xlabel=label)
        axes.spines[["top", "right"]].set_visible(False)
        if label == _FRAMES:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r' id="[a-z0-9]+_\d+"', "", drawn)  # the same in every figure
    drawn = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg role="img" \1>', drawn, count=1)
    drawn = re.sub(r"\s*\n\s*", " ", drawn).replace("#000000", "currentColor")
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawn}</figure>"
