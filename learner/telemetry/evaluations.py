"""The reports of a run's evaluators: written as JSON lines, and summarised by task."""

import logging
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from impala.config.schema import Config
from impala.logdir import continual, json_lines
from learner.front.service import EvaluationReport
from learner.telemetry.telemetry import Interval

_log = logging.getLogger(__name__)

_FIRST_BYTES = 4e6  # that may be written at once: some 10,000 evaluations of 20 episodes...
_BYTES_PER_SECOND = 2e6 / 86400  # ...and per second after that


class Evaluated(NamedTuple):
    """An evaluation of all tasks with the same parameters."""

    learner: int  # incarnation
    version: int
    mean: float  # return, averaged over tasks


class Evaluations:
    """The evaluations of a run, including those before a restart, which `continual` reads.

    One thread may use it, except for `missing`, `newest` and `summaries`.
    """

    def __init__(self, logdir: pathlib.Path, config: Config, tasks: Sequence[str], learner: int):
        """Reads the existing reports.

        Args:
          logdir: the run's log directory.
          config: the run's configuration.
          tasks: their names, in order.
          learner: this learner's incarnation. Reports on another learner's parameters are written
            only if it has reported before.
        """
        path = logdir / "evaluations.jsonl"
        self._tasks = tasks
        self._learners: set[int | str] = {learner}
        self._history = continual.History(config)
        for report in json_lines.read(path, continual.Report.parse):
            self._learners.add(report.learner)
            self._history.add(report)
        self._file = json_lines.Appender(path, seals=True)
        self._opened = time.monotonic()
        self._new: list[EvaluationReport] = []  # not in a row yet
        self._newest: dict[str, tuple[int, int]] = {}  # task -> incarnation, version
        self._means: dict[str, float] = {}  # task -> mean return in that evaluation
        self.newest: Evaluated | None = None
        """The newest evaluation of all tasks that was reported to this learner."""
        self.dropped = 0
        """Number of reports not written: of an unknown learner, or too many."""
        self.summaries: dict[str, continual.TaskSummary] = continual.summary(self._history.run())
        """Of each task that was evaluated, as of the last row."""

    def missing(self, learner: int, version: int) -> set[str]:
        """Returns the tasks whose last evaluation had other parameters. Thread-safe."""
        newest = dict(self._newest)
        return {task for task in self._tasks if newest.get(task) != (learner, version)}

    def add(self, report: EvaluationReport) -> None:
        """Writes a report to the file.

        Raises:
          OSError: it cannot be written; it counts nevertheless.
        """
        allowed = _FIRST_BYTES + _BYTES_PER_SECOND * (time.monotonic() - self._opened)
        if report.learner_incarnation not in self._learners or self._file.written > allowed:
            if not self.dropped:
                _log.warning(
                    "An evaluation is not filed: it is of the parameters of an unknown learner, "
                    "or there are more than fit into evaluations.jsonl. Further ones are counted."
                )
            self.dropped += 1
            return
        task = self._tasks[report.task]
        line = {
            "time": time.time(),
            "task": task,
            "frames": report.frames,
            "learner": report.learner_incarnation,
            "version": report.parameter_version,
            "returns": [episode.episode_return for episode in report.episodes],
        }
        try:
            self._file.write(line)
        finally:
            parsed = continual.Report.parse(line)
            self._history.add(parsed)
            self._new.append(report)
            played = report.learner_incarnation, report.parameter_version
            self._means[task] = parsed.mean
            if self.missing(*played) <= {task}:
                self.newest = Evaluated(*played, sum(self._means.values()) / len(self._means))
            self._newest[task] = played  # last, as other threads read it first

    def tell(self, interval: Interval) -> None:
        """Adds the reports since the last call, and the summary of each task, to an interval."""
        reports, self._new = self._new, []
        if reports:
            self.summaries = continual.summary(self._history.run())
        for report in reports:
            interval.episodes(f"evaluation/{self._tasks[report.task]}", report.episodes)
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
