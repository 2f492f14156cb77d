"""The writer: passes telemetry and evaluations to sinks and files, in threads beside training.

Slow or failing disks, terminals and callers neither delay training nor end it. Evaluators' reports
have a thread of their own: snapshots wait for them, and in the end training does.
"""

import contextlib
import copy
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from impala.parts.components import described
from impala.runtime import process
from learner.evaluation.evaluations import Evaluations
from learner.evaluation.evaluators import EvaluationReport
from learner.telemetry.sinks import Sink, pass_on
from learner.telemetry.telemetry import Interval

_log = logging.getLogger(__name__)

_QUEUED = 64  # rows that may wait
_LOOK_SECONDS = 0.2  # between two checks whether to close
_DRAIN_SECONDS = 10.0  # time limit for the last rows
_ROW_SHARE, _ROW_SECONDS = 1 / 200, 60.0  # of the run that a row of files covers, and at most
_HISTOGRAM_SHARE, _HISTOGRAM_SECONDS = 1 / 20, 1800.0  # the same of histograms and images
_ROWS, _REPORTS = process.WRITERS  # names of the threads

_T = TypeVar("_T")


class Attempts:
    """Calls what may fail. The first error of each kind is logged, again after a success."""

    def __init__(self) -> None:
        """Starts without errors."""
        self._failing: set[tuple[int, type[BaseException]]] = set()

    def __call__(self, sink: object, do: Callable[..., None], *arguments: object) -> None:
        """Calls `do` on behalf of a sink."""
        try:
            do(*arguments)
        except BaseException as error:  # including SystemExit, which would end the thread
            kind = (id(sink), type(error))
            if kind not in self._failing:
                self._failing.add(kind)
                _log.error(
                    "%s fails, and training goes on: %s. The next row is tried all the same.",
                    *(type(sink).__name__, described(error)),
                )
        else:
            self._failing = {kind for kind in self._failing if kind[0] != id(sink)}


class Files:
    """Sinks that get rows less often as a run gets older, each covering the time since the last.

    A row covers about a 200th of the run so far, at most a minute. Histograms and images, which are
    larger, go with a row when a 20th of the run has passed since the last ones, or 30 minutes.
    """

    def __init__(
        self, files: Sequence[Sink], attempt: Attempts, seconds_per_update: float | None = None
    ):
        """Starts with nothing written.

        Args:
          files: receive the rows.
          attempt: calls what may fail.
          seconds_per_update: used instead of the clock, if given.
        """
        self._files = files
        self._seconds_per_update = seconds_per_update
        self._attempt = attempt
        self._age = 0.0  # of this process
        self._row_age, self._histogram_age = 0.0, math.inf  # since the last ones
        self._interval: Interval | None = None  # not written yet

    def write(self, interval: Interval) -> None:
        """Takes over an interval; the last one is written at once."""
        seconds, run_seconds = interval.seconds, interval.counters.seconds
        if self._seconds_per_update is not None:
            seconds = interval.updates * self._seconds_per_update
            run_seconds = interval.counters.updates * self._seconds_per_update
        self._age += seconds
        self._row_age += seconds
        self._histogram_age += seconds
        if self._interval is None:
            self._interval = interval
        else:
            self._interval.merge(interval)
        run = max(run_seconds, self._age)
        if self._interval.is_last or self._row_age >= min(_ROW_SECONDS, run * _ROW_SHARE):
            self._write(self._interval, run)
            self._interval, self._row_age = None, 0.0

    def _write(self, interval: Interval, run: float) -> None:
        row, histograms = interval.row()
        images = interval.images
        if self._histogram_age < min(_HISTOGRAM_SECONDS, run * _HISTOGRAM_SHARE):
            histograms, images = {}, {}
        else:
            self._histogram_age = 0.0
        for file in self._files:
            self._attempt(file, pass_on, file, row, histograms, images)

    def close(self) -> None:
        """Writes what is not written yet, as of a run that has failed, and closes the files."""
        if self._interval is not None:
            self._write(self._interval, math.inf)
        for file in self._files:
            self._attempt(file, file.close)


class Writer:
    """A thread that owns the sinks, and one that files evaluators' reports.

    Rows wait in a bounded queue. When it is full, the next row waits in front of it and is merged
    with those that follow. An error of a sink is logged once, and the sink still gets the next row.
    """

    def __init__(
        self,
        evaluations: Evaluations,
        reports: "queue.Queue[EvaluationReport]",
        exporter: Sink | None,
        live: Sequence[Sink],
        files: Sequence[Sink],
        own: Sequence[Sink] = (),
        seconds_per_update: float | None = None,
    ):
        """Starts the threads.

        Args:
          evaluations: writes the reports.
          reports: of evaluators, as they arrive.
          exporter: gets every row, also those after the run's last.
          live: get every row of the run.
          files: get rows over longer intervals, merged exactly.
          own: get copies of the same rows as `live`, after all others: they may be slow.
          seconds_per_update: used for these intervals instead of the clock, if given.
        """
        self._evaluations = evaluations
        self._reports = reports
        self._exporter = [exporter] if exporter is not None else []
        self._live = live
        self._own = own
        self._attempt = Attempts()
        self._files = Files(files, self._attempt, seconds_per_update)
        self._queue: queue.Queue[Interval] = queue.Queue(_QUEUED)
        self._waiting: Interval | None = None  # in front of the full queue
        self._has_ended = False
        self._closing = threading.Event()
        self.dropped = 0
        """Rows that were merged into the next one because the queue was full."""
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in ((_ROWS, self._write_rows), (_REPORTS, self._file_reports))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, interval: Interval, is_last: bool = False) -> None:
        """Queues a row without waiting.

        Args:
          interval: owned by the writer from now on.
          is_last: files get it at once, and only the exporter gets later ones.

        Raises:
          RuntimeError: a thread of the writer has died.
        """
        if not all(thread.is_alive() for thread in self._threads):
            raise RuntimeError("A thread that writes telemetry has died; the log says why.")
        interval.is_last = is_last
        if self._waiting is None:
            self._waiting = interval
        else:
            if not self.dropped:
                _log.warning("Telemetry cannot be written as fast as it comes: rows are merged.")
            self.dropped += 1
            self._waiting.merge(interval)
        self._hand_over()

    def drain(self, seconds: float = _DRAIN_SECONDS) -> bool:
        """Waits until everything queued is written. Returns whether that was in time."""
        deadline = time.monotonic() + seconds
        self._hand_over()
        while self._waiting or self._queue.unfinished_tasks or self._reports.unfinished_tasks:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
            self._hand_over()
        return True

    def close(self, seconds: float = _DRAIN_SECONDS) -> None:
        """Writes what is queued and closes the sinks, within a time limit."""
        deadline = time.monotonic() + seconds
        self._hand_over(seconds)
        self._closing.set()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.warning(
                "Telemetry could not be written within %.0f seconds: rows are lost.", seconds
            )

    def _hand_over(self, seconds: float = 0.0) -> None:
        """Queues the waiting row if there is or will be room."""
        if self._waiting is not None:
            with contextlib.suppress(queue.Full):
                self._queue.put(self._waiting, timeout=seconds)
                self._waiting = None

    def _write_rows(self) -> None:
        self._for_each(self._queue, lambda each: self._attempt(self, self._write, each))
        for sink in (*self._exporter, *self._live):
            self._attempt(sink, sink.close)
        self._files.close()
        for sink in self._own:
            self._attempt(sink, sink.close)

    def _file_reports(self) -> None:
        attempt, evaluations = Attempts(), self._evaluations
        self._for_each(self._reports, lambda report: attempt(evaluations, evaluations.add, report))
        attempt(evaluations, evaluations.close)

    def _for_each(self, queued: "queue.Queue[_T]", do: Callable[[_T], None]) -> None:
        """Takes what comes in a queue, until the writer is closed and the queue is empty."""
        while True:
            is_closing = self._closing.is_set()  # before the queue, so that nothing is missed
            try:
                each = queued.get(timeout=0.0 if is_closing else _LOOK_SECONDS)
            except queue.Empty:
                if is_closing:
                    return
                continue
            try:
                do(each)
            finally:
                queued.task_done()

    def _write(self, interval: Interval) -> None:
        self._evaluations.report(interval)
        row, histograms = interval.row()
        for sink in (*self._exporter, *(() if self._has_ended else self._live)):
            self._attempt(sink, pass_on, sink, row, histograms, interval.images)
        if not self._has_ended:
            self._files.write(interval)
            for sink in self._own:
                copies = copy.deepcopy((row, histograms, interval.images))
                self._attempt(sink, pass_on, sink, *copies)
        self._has_ended |= interval.is_last
