"""The reporter: makes rows of telemetry from the iterations of the training loop."""

import logging
import time
from collections.abc import Sequence

import numpy as np
import tree

from impala.logdir.checkpoint import Counters
from impala.types import Batch, Nest, StepType, Unroll
from learner.data.ingest import Arrival
from learner.telemetry import images
from learner.telemetry.gauges import Gauges
from learner.telemetry.telemetry import Telemetry
from learner.telemetry.writer import Writer
from learner.update.learner import Learner, Update
from learner.update.training import Iteration

_log = logging.getLogger(__name__)


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
        logs_episodes: bool = False,
    ):
        """Starts the first row at the first iteration.

        Args:
          telemetry: collects the numbers, also from other threads.
          gauges: read when a row ends.
          writer: receives the rows.
          tasks: their names, in order.
          seconds: time between rows.
          updates: between rows, used instead of the time; None: the time counts.
          logs_episodes: whether to log a line for each episode.
        """
        self._telemetry = telemetry
        self._gauges = gauges
        self._writer = writer
        self._tasks = tasks
        self._seconds = seconds
        self._updates = updates
        self._logs_episodes = logs_episodes
        self._newest: tuple[Batch, Update, Learner] | None = None  # of the row
        self._fresh: list[Unroll] = []  # the newest, learned from or only added to replay

    def take(self, iteration: Iteration) -> None:
        """Collects the results of an iteration, and ends the row if it is due."""
        self._telemetry.waited(iteration.waited_seconds)
        together = len(iteration.standings) > 1 and all(x.has_batch for x in iteration.standings)
        for i, peer in enumerate(iteration.standings if together else ()):
            self._telemetry.sample(f"peer/{i}/waited_seconds", peer.waited_seconds)
            self._telemetry.interval.mean(f"peer/{i}/queued", float(peer.queued))
            if peer.lag is not None:
                self._telemetry.interval.mean(f"peer/{i}/policy_lag", peer.lag)
        if iteration.prepared is not None:
            if iteration.update is not None and iteration.prepared.batch is not None:
                self._telemetry.sample("learner/update_seconds", iteration.update_seconds)
                self._learned(iteration.prepared.batch, iteration.update, iteration.learner)
            for part in iteration.provenance:
                self._telemetry.unrolls(
                    self._tasks[part.task], part.unrolls, part.lag, part.dropped
                )
            dropped = {part.message for part in iteration.provenance if part.dropped}
            fresh = [x.unroll for x in iteration.prepared.arrivals if x.unroll is not None]
            self._fresh = fresh or self._fresh
            for arrival in iteration.prepared.arrivals:
                message = arrival.actor, arrival.incarnation, arrival.sequence
                self._arrived(arrival, is_dropped=message in dropped)
        self.end_row_if_due(iteration.learner.counters)

    def end_row_if_due(self, counters: Counters) -> None:
        """Ends the row if it is time."""
        interval = self._telemetry.interval
        if self._updates is None:
            is_due = time.monotonic() - interval.since >= self._seconds
        else:
            is_due = counters.updates - interval.counters.updates >= self._updates
        if is_due:
            self.end_row(counters)

    def end_row(self, counters: Counters, is_last: bool = False) -> None:
        """Ends the row, and begins the next."""
        if self._newest is not None:
            self._add_newest(*self._newest)
            self._newest = None
        interval = self._telemetry.end(counters, self._gauges.read(counters))
        self._writer.put(interval, is_last)

    def _learned(self, batch: Batch, update: Update, learner: Learner) -> None:
        telemetry, unroll = self._telemetry, batch.unroll
        for name, value in update.metrics.items():
            telemetry.interval.mean(name, value)
        # After a restart, actors may still act with a newer version than the checkpoint's.
        before = learner.counters.updates - 1  # the version before the update
        acted = unroll.parameter_version >= 0  # not demonstrated
        lags = np.maximum(0, before - unroll.parameter_version[acted])
        telemetry.policy_lag(lags, batch.is_replay[acted])
        self._newest = batch, update, learner

    def _add_newest(self, batch: Batch, update: Update, learner: Learner) -> None:
        """Adds what is read once a row: norms, and histograms of the newest data."""
        interval = self._telemetry.interval
        for name, norm in learner.norms().items():
            interval.mean(name, norm)
        for name, values in update.histograms.items():
            interval.newest(name, np.asarray(values)[_is_step(batch.unroll)].ravel())
        fresh = _is_step(batch.unroll) & ~batch.is_replay
        actions = [_actions(batch.unroll, fresh)]
        if not fresh.any():  # it is replayed as a whole
            actions += [_actions(unroll, _is_step(unroll)) for unroll in self._fresh]
        joined = tree.map_structure(lambda *x: np.concatenate(x), *actions)
        interval.newest("action", joined)
        interval.images |= images.of_observations(batch.unroll.timestep.observation)

    def _arrived(self, arrival: Arrival, is_dropped: bool) -> None:
        telemetry, task = self._telemetry, self._tasks[arrival.task]
        for episode in arrival.episodes if self._logs_episodes else ():
            told = episode._asdict() | {f"info/{name}": x for name, x in episode.info.items()}
            line = ", ".join(f"{name} {x:.9g}" for name, x in told.items() if name != "info")
            _log.info("Episode of %s by %s: %s.", task, arrival.actor, line)
        telemetry.episodes(task, arrival.episodes)
        telemetry.rewards(task, *arrival.rewards)
        for name, values in arrival.step_info.items():
            telemetry.sample(f"step/{task}/info/{name}", values)
        telemetry.lengths(task, arrival.episodes, is_dropped)
        telemetry.actor(
            *(arrival.actor, task, arrival.elapsed_seconds, arrival.waited_seconds),
            pace=arrival.pace,
        )
        telemetry.sample("ingest/seconds", time.monotonic() - arrival.queued)


def _is_step(unroll: Unroll) -> np.ndarray:
    """Returns which steps are experience and no seams: [T, B]."""
    is_step: np.ndarray = unroll.timestep.step_type[1:] != StepType.FIRST
    return is_step


def _actions(unroll: Unroll, which: np.ndarray) -> Nest:
    """Returns the actions of some of the T x B steps: [N, ...]."""
    return tree.map_structure(lambda x: x[1:][which], unroll.output.action)
