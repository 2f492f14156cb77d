"""The reports of a run's evaluators: written as JSON lines, and summarised by task."""

import logging
import pathlib
import threading
import time
from collections.abc import Sequence

from impala.analysis import continual
from impala.config.schema import Config
from impala.logdir import json_lines
from learner.evaluation.evaluators import EvaluationReport
from learner.evaluation.snapshots import Snapshots
from learner.telemetry.telemetry import Interval

_log = logging.getLogger(__name__)


class Evaluations:
    """The evaluations of a run, including those before a restart, which `continual` reads.

    One thread may call `add` and `close`, and another one `tell`.
    """

    def __init__(
        self,
        logdir: pathlib.Path,
        config: Config,
        tasks: Sequence[str],
        snapshots: Snapshots,
        frames: int,
    ):
        """Reads the existing reports, and notes in their file from where this learner goes on.

        Args:
          logdir: the run's log directory.
          config: the run's configuration.
          tasks: their names, in order.
          snapshots: those that may wait for reports.
          frames: from which this learner goes on.

        Raises:
          OSError: the file cannot be written.
        """
        path = logdir / "evaluations.jsonl"
        self._tasks = tasks
        self._snapshots = snapshots
        self._history = continual.History(config)
        lines = json_lines.read(path, continual.parse)
        for line in lines:
            self._add(line)
        self._file = json_lines.Appender(path)
        if frames or lines:  # what follows is not of the learner before
            self._add(continual.Resumed(frames))
            self._file.write({"time": time.time(), "resumed": frames})
        self._lock = threading.Lock()  # guards what follows, and the history
        self._new: list[EvaluationReport] = []  # not in a row yet
        self.dropped = 0
        """Number of reports that were not of a waiting snapshot, and so not written."""
        self.summaries: dict[str, continual.TaskSummary] = continual.summary(self._history.run())
        """Summary of each task that was evaluated, as of the last row."""

    def add(self, report: EvaluationReport) -> None:
        """Writes a report to the file, if its snapshot waits for it.

        Raises:
          OSError: it cannot be written; the snapshot still waits.
        """
        place = report.learner_incarnation, report.frames, report.task
        if not self._snapshots.awaits(*place):
            if not self.dropped:
                _log.info(
                    "An evaluation by %s is not filed: it is of no snapshot that waits for one. "
                    "Further ones are counted.",
                    report.actor,
                )
            self.dropped += 1
            return
        line = {
            "time": time.time(),
            "task": self._tasks[report.task],
            "frames": report.frames,
            "learner": report.learner_incarnation,
            "version": report.parameter_version,
            "returns": [episode.episode_return for episode in report.episodes],
        }
        try:
            self._file.write(line)
        except OSError:
            self._snapshots.report(*place, is_lost=True)
            raise
        filed = continual.Report.parse(line)
        _log.info(
            "Evaluation of %s at %s frames: return %.2f, mean of %d episode(s).",
            *(filed.task, f"{filed.frames:,}", filed.mean, len(report.episodes)),
        )
        with self._lock:
            self._new.append(report)
            self._add(filed)

    def _add(self, line: continual.Report | continual.Resumed) -> None:
        self._history.add(line)
        if isinstance(line, continual.Resumed):
            return
        if line.task in self._tasks:
            task = self._tasks.index(line.task)
            self._snapshots.settle(line.learner, line.frames, task, line.mean)

    def report(self, interval: Interval) -> None:
        """Adds the reports since the last call, and the summary of each task, to an interval."""
        with self._lock:
            reports, self._new = self._new, []
            if reports:
                self.summaries = continual.summary(self._history.run())
        for report in reports:
            name = f"evaluation/{self._tasks[report.task]}"
            interval.episodes(name, report.episodes)
            interval.mean(f"{name}/snapshot_frames", report.frames, len(report.episodes))
            if steps := sum(episode.length for episode in report.episodes):
                total = sum(episode.episode_return for episode in report.episodes)
                interval.mean(f"{name}/reward_per_step", total / steps, steps)
        for task, summary in self.summaries.items():
            interval.levels({f"task/{task}/{name}": n for name, n in summary._asdict().items()})
        interval.levels({"evaluations/dropped": self.dropped})

    def log(self) -> None:
        """Logs the summaries."""
        for task, summary in self.summaries.items():
            numbers = ", ".join(f"{name} {n:.2f}" for name, n in summary._asdict().items())
            _log.info("%s: %s.", task, numbers)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
