"""The reporter: makes rows of telemetry from the iterations of the training loop."""

import time
from collections.abc import Sequence

import numpy as np
import tree

from impala.logdir.checkpoint import Counters
from impala.types import Batch, StepType
from learner.data.ingest import Arrival
from learner.telemetry.gauges import Gauges
from learner.telemetry.telemetry import Telemetry
from learner.telemetry.writer import Writer
from learner.update.learner import Update
from learner.update.training import Iteration


class Reporter:
    """Collects the results of iterations, and passes a row to the writer at intervals."""

    def __init__(
        self,
        telemetry: Telemetry,
        gauges: Gauges,
        writer: Writer,
        tasks: Sequence[str],
        seconds: float,
        updates: int | None = None,
    ):
        """Starts the first row at the first iteration.

        Args:
          telemetry: collects the numbers, also from other threads.
          gauges: read when a row ends.
          writer: receives the rows.
          tasks: their names, in order.
          seconds: time between rows.
          updates: between rows, used instead of the time; None: the time counts.
        """
        self._telemetry = telemetry
        self._gauges = gauges
        self._writer = writer
        self._tasks = tasks
        self._seconds = seconds
        self._updates = updates
        self._newest: tuple[Batch, Update] | None = None  # of the row, for histograms

    def take(self, iteration: Iteration) -> None:
        """Collects the results of an iteration, and ends the row if it is due."""
        self._telemetry.waited(iteration.waited_seconds)
        if iteration.prepared is not None:
            if iteration.update is not None and iteration.prepared.batch is not None:
                self._telemetry.sample("learner/update_seconds", iteration.update_seconds)
                before = iteration.learner.counters.updates - 1  # the version before the update
                self._learned(iteration.prepared.batch, iteration.update, before)
            for part in iteration.provenance:
                self._telemetry.unrolls(
                    self._tasks[part.task], part.unrolls, part.lag, part.dropped
                )
            dropped = {part.message for part in iteration.provenance if part.dropped}
            for arrival in iteration.prepared.arrivals:
                message = arrival.actor, arrival.incarnation, arrival.sequence
                self._arrived(arrival, is_dropped=message in dropped)
        self.end_row_if_due(iteration.learner.counters)

    def end_row_if_due(self, counters: Counters) -> None:
        """Ends the row if it is time."""
        if self._updates is None:
            is_due = self._telemetry.due(self._seconds)
        else:
            is_due = self._telemetry.updates(counters) >= self._updates
        if is_due:
            self.end_row(counters)

    def end_row(self, counters: Counters, is_last: bool = False) -> None:
        """Ends the row, and begins the next."""
        if self._newest is not None:
            self._add_histograms(*self._newest)
            self._newest = None
        interval = self._telemetry.end(counters, self._gauges.read(counters))
        self._writer.put(interval, is_last)

    def _learned(self, batch: Batch, update: Update, before: int) -> None:
        telemetry, unroll = self._telemetry, batch.unroll
        for name, value in update.metrics.items():
            telemetry.mean(name, value)
        telemetry.mean("learning_rate", update.learning_rate)
        # After a restart, actors may still act with a newer version than the checkpoint's.
        lags = np.maximum(0, before - unroll.parameter_version)
        telemetry.policy_lag(lags, batch.is_replay)
        self._newest = batch, update

    def _add_histograms(self, batch: Batch, update: Update) -> None:
        unroll = batch.unroll
        is_step = unroll.timestep.step_type[1:] != StepType.FIRST
        fresh = is_step & ~batch.is_replay
        actions = tree.map_structure(lambda x: x[1:][fresh], unroll.output.action)
        self._telemetry.newest("action", actions)
        for name, values in update.histograms.items():
            self._telemetry.newest(name, np.asarray(values)[is_step])

    def _arrived(self, arrival: Arrival, is_dropped: bool) -> None:
        telemetry, task = self._telemetry, self._tasks[arrival.task]
        telemetry.episodes(task, arrival.episodes)
        telemetry.lengths(task, arrival.episodes, is_dropped)
        telemetry.actor(task, arrival.elapsed_seconds, arrival.waited_seconds)
        telemetry.sample("ingest/seconds", time.monotonic() - arrival.received)
