"""Telemetry: what happened since the last row, for TensorBoard, as JSON lines and on a console.

`learner.prometheus` is another place that rows go to.
"""

import collections
import logging
import math
import pathlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import rich.console
import rich.live
import rich.table
import rich.text
import tensorflow as tf
import tree

from impala import json_lines
from impala.types import Episode, Nest
from learner.checkpoint import Counters
from learner.service import EvaluationReport

_log = logging.getLogger(__name__)

Row = dict[str, float]
Histograms = dict[str, np.ndarray]


class Telemetry:
    """Gathers numbers and turns them into a row of scalars every so often.

    Frames are environment frames (repeats counted), steps are agent decisions; both are counted
    when they have been learned from.
    """

    def __init__(self, recent: int = 100):
        """Starts counting.

        Args:
          recent: how many of a task's last episodes its running mean return is over.
        """
        self._recent: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=recent)
        )
        self._episodes: collections.Counter[str] = collections.Counter()
        self._waited_ever = 0.0
        self._lock = threading.Lock()  # of the samples, which come from any thread
        self._samples: dict[str, list[np.ndarray]] = {}
        self._base: Counters | None = None
        self._clear()

    def _clear(self) -> None:
        self._sums: dict[str, float] = collections.defaultdict(float)
        self._counts: collections.Counter[str] = collections.Counter()
        self._newest: dict[str, Nest] = {}
        self._waited = 0.0
        self._since = time.monotonic()

    def mean(self, name: str, value: float, weight: int = 1) -> None:
        """Adds to a scalar that the row reports the mean of."""
        self._sums[name] += value * weight
        self._counts[name] += weight

    def waited(self, seconds: float) -> None:
        """Adds time for which the learner had nothing to learn from."""
        self._waited += seconds
        self._waited_ever += seconds

    def sample(self, name: str, values: np.ndarray | float) -> None:
        """Adds numbers whose distribution is of interest. Thread-safe."""
        with self._lock:
            self._samples.setdefault(name, []).append(np.atleast_1d(values))

    def policy_lag(self, lags: np.ndarray, is_replay: np.ndarray) -> None:
        """Adds the lags of one batch's unrolls, in updates: [B]."""
        self.sample("policy_lag", lags[~is_replay])
        self.sample("replay/policy_lag", lags[is_replay])

    def newest(self, name: str, values: Nest) -> None:
        """Keeps numbers [N, ...] in the place of those before: for a histogram, not for the row."""
        self._newest[name] = values

    def actor(self, elapsed: float, waited: float) -> None:
        """Adds what an actor says of its time: seconds in all, and of those waiting for us."""
        if elapsed > 0:
            self.mean("actor/wait_share", min(1.0, waited / elapsed))

    def episodes(self, task: str, episodes: Sequence[Episode], prefix: str = "episode") -> None:
        """Adds finished episodes of a task; with another prefix, those of an evaluator."""
        for episode in episodes:
            name = f"{prefix}/{task}"
            self.mean(f"{name}/return", episode.episode_return)
            self.mean(f"{name}/length", episode.length)
            self.mean(f"{name}/frames", episode.frames)
            for key, value in episode.info.items():
                self.mean(f"{name}/info/{key}", value)
            if prefix == "episode":
                self._recent[task].append(episode.episode_return)
                self._episodes[task] += 1

    def due(self, seconds: float) -> bool:
        """Whether the last row is at least this old."""
        return time.monotonic() - self._since >= seconds

    def row(self, counters: Counters, gauges: Mapping[str, float]) -> tuple[Row, Histograms]:
        """Ends the interval: everything that was added since the last row.

        Returns:
          Scalars; and all numbers of what is distributed, with what is newest, each part of a
          nest by itself.
        """
        with self._lock:
            samples, self._samples = self._samples, {}
        gathered = {name: np.concatenate(parts) for name, parts in samples.items()}
        histograms = {name: values for name, values in gathered.items() if values.size}
        row = self._scalars(counters, {**gauges, **_quantiles(histograms)})
        histograms |= self._newest_histograms()
        self._base = counters
        self._clear()
        return row, histograms

    def _newest_histograms(self) -> Histograms:
        found = {}
        for path, leaf in tree.flatten_with_path(self._newest):
            name = "/".join(map(str, path))
            parts = leaf.reshape(len(leaf), math.prod(leaf.shape[1:]))
            for i, part in enumerate(parts.T):
                found[f"{name}/{i}" if len(parts.T) > 1 else name] = part
        return {name: values for name, values in found.items() if values.size}

    def _scalars(self, counters: Counters, gauges: Mapping[str, float]) -> Row:
        elapsed = max(time.monotonic() - self._since, 1e-9)
        base = self._base or counters
        row: Row = {
            "frames": counters.frames,
            "steps": counters.steps,
            "updates": counters.updates,
            "unrolls": counters.unrolls,
            "seconds": counters.seconds,
            "speed/frames_per_second": (counters.frames - base.frames) / elapsed,
            "speed/steps_per_second": (counters.steps - base.steps) / elapsed,
            "speed/updates_per_second": (counters.updates - base.updates) / elapsed,
            "learner/wait_share": min(1.0, self._waited / elapsed),
            "learner/wait_seconds": self._waited_ever,
            **{name: self._sums[name] / self._counts[name] for name in self._sums},
            **gauges,
        }
        for task, returns in self._recent.items():
            row[f"episode/{task}/return_recent"] = float(np.mean(returns))
            row[f"episodes/{task}"] = self._episodes[task]
        return row

    def begin(self, counters: Counters) -> None:
        """Sets where speeds are measured from, when the first update is about to be made."""
        self._base = counters
        self._clear()


def _quantiles(histograms: Histograms) -> Row:
    """How each set of numbers is distributed."""
    row: Row = {}
    for name, values in histograms.items():
        row[f"{name}/mean"] = float(values.mean())
        for quantile in (10, 50, 90):
            row[f"{name}/p{quantile}"] = float(np.percentile(values, quantile))
        row[f"{name}/max"] = float(values.max())
    return row


class Sink(Protocol):
    """Somewhere that rows go."""

    def write(self, row: Row, histograms: Histograms) -> None:
        """Takes one row, and the numbers behind its quantiles."""

    def close(self) -> None:
        """Is called last."""


class TensorBoard:
    """Writes rows as TensorBoard scalars over frames, and histograms."""

    def __init__(self, directory: pathlib.Path):
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, row: Row, histograms: Histograms) -> None:
        """Writes one row and flushes it."""
        step = int(row["frames"])
        with self._writer.as_default():
            for name, value in row.items():
                tf.summary.scalar(name, value, step=step)
            for name, values in histograms.items():
                tf.summary.histogram(f"histogram/{name}", values, step=step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


class JsonLines:
    """Writes rows as JSON lines; a resumed run goes on in the same file."""

    def __init__(self, path: pathlib.Path):
        self._file = json_lines.Appender(path)

    def write(self, row: Row, histograms: Histograms) -> None:
        """Writes one row, as far as it is finite."""
        del histograms
        finite = {name: value for name, value in row.items() if math.isfinite(value)}
        self._file.write({"time": time.time(), **finite})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Evaluations:
    """Writes what evaluators report as JSON lines, which `impala.continual` reads."""

    def __init__(self, path: pathlib.Path):
        self._file = json_lines.Appender(path, seals=True)

    def write(self, task: str, report: EvaluationReport) -> None:
        """Writes one report."""
        line = {
            "time": time.time(),
            "task": task,
            "frames": report.frames,
            "learner": report.learner_incarnation,
            "version": report.parameter_version,
            "returns": [episode.episode_return for episode in report.episodes],
        }
        self._file.write(line)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Console:
    """Shows the newest row: live on a terminal, a line per row in a file or in the log."""

    def __init__(
        self, total_frames: int, console: rich.console.Console | None = None, to_log: bool = False
    ):
        self._total = total_frames
        self._console = console or rich.console.Console()
        self._to_log = to_log
        self._live = (
            rich.live.Live(console=self._console, auto_refresh=False, transient=False)
            if self._console.is_terminal and not to_log
            else None
        )
        if self._live:
            self._live.start()

    def write(self, row: Row, histograms: Histograms) -> None:
        """Shows one row."""
        del histograms
        line = _line(row, self._total)
        if self._to_log:
            _log.info("%s", line)
        elif self._live:
            view = rich.console.Group(rich.text.Text(line, "bold"), _table(row))
            self._live.update(view, refresh=True)
        else:
            self._console.file.write(line + "\n")
            self._console.file.flush()

    def close(self) -> None:
        """Leaves the last row on the screen."""
        if self._live:
            self._live.stop()


def _line(row: Row, total_frames: int) -> str:
    """How the run is doing, as far as it is known."""
    returns = [value for name, value in row.items() if name.endswith("/return_recent")]
    speed = row["speed/frames_per_second"]
    parts = [f"frames {row['frames']:,.0f} ({row['frames'] / total_frames:.1%})"]
    if returns:
        parts.append(f"return {'/'.join(f'{value:.2f}' for value in returns)}")
    parts.append(f"{speed:,.0f} frames/s")
    if speed > 0:
        parts.append(f"left {max(0.0, total_frames - row['frames']) / speed / 60:.0f} min")
    for name, word, digits in (
        ("loss/total", "loss", 2),
        ("policy/entropy", "entropy", 3),
        ("policy_lag/mean", "lag", 1),
    ):
        if name in row:
            parts.append(f"{word} {row[name]:.{digits}f}")
    parts.append(f"actors {row['actor/active']:.0f}")
    waits = f"waits: learner {row['learner/wait_share']:.0%}"
    if "actor/wait_share" in row:
        waits += f" actors {row['actor/wait_share']:.0%}"
    return "  ".join([*parts, waits])


def _table(row: Row) -> rich.table.Table:
    """All scalars, a line for those that differ in the last part of their names only."""
    groups: dict[str, list[rich.text.Text]] = {}
    for name in sorted(row):
        group, _, last = name.rpartition("/")
        value = f"{row[name]:,.4g}" if abs(row[name]) < 1e4 else f"{row[name]:,.0f}"
        pair = rich.text.Text.assemble(last, "=", (value, "bold"))
        groups.setdefault(group, []).append(pair)
    table = rich.table.Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for group, pairs in sorted(groups.items()):
        table.add_row(rich.text.Text(group or "run"), rich.text.Text("  ").join(pairs))
    return table
