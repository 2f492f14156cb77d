"""The training loop: a stream of iterations, consumed by telemetry, checkpoints and others."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tree

from impala.agents.normaliser import Moments
from impala.types import Nest, Unroll
from learner.data.mix import Mix, Prepared, Provenance
from learner.update.guard import Guard
from learner.update.learner import Learner, Update
from learner.update.output_judge import Finding
from learner.update.peers import Peers, Standing
from learner.update.phases import Phases

_log = logging.getLogger(__name__)

_BATCH_SECONDS = 0.5  # time that an iteration waits for a batch
_WAIT_SECONDS = 0.2  # between two looks whether it may learn again
_ALONE = Peers()


class Iteration(NamedTuple):
    """The results of one iteration of the training loop."""

    learner: Learner  # after the iteration, of the next phase if one begins
    prepared: Prepared | None  # what to account for; None if no batch came in time
    update: Update | None  # None if nothing was learned
    waited_seconds: float  # for `prepared`
    update_seconds: float  # 0.0 if no batch came in time
    begins_phase: bool  # a phase has ended, so the learner is new
    is_new: bool  # counters or variables have changed since the last iteration
    in_doubt: bool  # the variables may be bad, and must not be saved
    standings: Sequence[Standing] = ()  # of each peer, before the iteration

    @property
    def provenance(self) -> Sequence[Provenance]:
        """Returns the unrolls to account for, learned from or not."""
        return () if self.prepared is None else self.prepared.provenance

    @property
    def is_whole(self) -> bool:
        """Whether a batch of fresh unrolls is done with."""
        return self.prepared is not None and self.prepared.is_whole


class Training:
    """Learns from batch after batch, phase after phase, together with all peers.

    In an iteration, all of them learn from their parts of a batch, or none does. A part that is
    ready waits for the others.
    """

    def __init__(
        self, phases: Phases, learner: Learner, mix: Mix, guard: Guard, peers: Peers = _ALONE
    ):
        """Prepares the first iteration.

        Args:
          phases: make the learners of later phases.
          learner: of the first phase.
          mix: provides batches.
          guard: has the learner learn from their good unrolls.
          peers: those that learn together.
        """
        self._peers = peers
        self._ready: Prepared | None = None  # a batch for which other peers are not ready
        self._phases = phases
        self._mix = mix
        self._guard = guard
        self.learner = learner
        """The learner of the current phase."""

    @property
    def is_finished(self) -> bool:
        """Whether the run's last phase has ended."""
        return self._phases.are_over(self.learner.counters)

    def iterations(
        self,
        until: Callable[[], bool],
        may_learn: Callable[[], bool] = lambda: True,
        queued: Callable[[], int] = lambda: 0,
    ) -> Iterator[Iteration]:
        """Learns until the run is finished. Between two iterations nothing is learned.

        Args:
          until: called before each iteration; ends the stream of all peers if it returns True.
          may_learn: called before each iteration; nothing is learned if it returns False.
          queued: returns how many unrolls wait to be learned from, for the other peers.

        Yields:
          The results of each iteration; without batches, at regular intervals.

        Raises:
          NotFiniteError: variables, loss or gradients are not finite, and a rollback does not help.
          StorageError: replay cannot be written or read.
          PeerLost: a peer has ended.
        """
        last = self._peers.clock()  # when the previous batch had come
        waited = 0.0  # for this peer's part of the next one
        while not self.is_finished:
            ends, began = until(), time.monotonic()
            if not ends and self._ready is None:
                self._ready = self._mix.get(timeout=_BATCH_SECONDS)
            came = time.monotonic()
            waited += came - began
            if waits := not may_learn():
                time.sleep(_WAIT_SECONDS)
            finding = self._guard.judge_outputs(self.learner)
            standings = [
                Standing(*standing)
                for standing in self._peers.meet(
                    Standing(
                        ends=ends,
                        has_batch=_has_batch(self._ready) and not waits,
                        has_news=self._ready is not None and not _has_batch(self._ready),
                        finding=finding,
                        queued=queued(),
                        lag=_mean_lag(self._ready, self.learner) if self._peers.count > 1 else None,
                        waited_seconds=waited,
                    )
                )
            ]
            if any(each.ends for each in standings):
                return
            found = [Finding(*each.finding) for each in standings if each.finding is not None]
            if found:
                self._guard.apply_finding(self.learner, found[0])
            learns = all(each.has_batch for each in standings)
            waited = 0.0 if learns else waited
            counts = learns or any(each.has_news for each in standings)
            prepared, update, begins_phase = None, None, False
            if learns or not _has_batch(self._ready):
                prepared, self._ready = self._ready, None
            started = time.monotonic()
            if prepared is not None:
                prepared, update = self._guard.learn(self.learner, prepared)
            update_seconds = time.monotonic() - started if prepared is not None else 0.0
            if counts:
                now = self._peers.clock()
                self._count(prepared, now - last)
                self._observe(prepared)
                last = now
                begins_phase = self._begin_next_phase()
            yield Iteration(
                learner=self.learner,
                prepared=prepared,
                update=update,
                waited_seconds=came - began,
                update_seconds=update_seconds,
                begins_phase=begins_phase,
                is_new=counts or bool(found),
                in_doubt=self._guard.in_doubt,
                standings=standings,
            )

    def settle(self) -> bool:
        """Rolls back variables in doubt, before the run ends.

        Returns:
          Whether the variables may be saved.
        """
        return self._guard.settle(self.learner)

    def _count(self, prepared: Prepared | None, seconds: float) -> None:
        """Counts what all peers have learned from."""
        own = (0, 0, 0, 0)
        if prepared is not None:
            own = prepared.unrolls, prepared.frames, prepared.steps, prepared.episodes
        unrolls, frames, steps, episodes = map(sum, zip(*self._peers.meet(own), strict=True))
        self.learner.count(
            unrolls=unrolls, frames=frames, steps=steps, episodes=episodes, seconds=seconds
        )

    def _observe(self, prepared: Prepared | None) -> None:
        """Updates statistics of observations by the fresh unrolls of all peers."""
        if (normaliser := self.learner.normaliser) is None:
            return
        fresh = () if prepared is None else prepared.fresh
        own = [normaliser.moments(_observed(*each)) for each in fresh]
        every = [Moments(*each) for peer in self._peers.meet(own) for each in peer]
        if every:
            normaliser.update(every)

    def _begin_next_phase(self) -> bool:
        """Starts the next phase if it is due: the agent stays, all else is new."""
        before = self.learner
        if before.phase_progress < 1.0 or self.is_finished:
            return False
        self._guard.settle(before)
        self.learner = self._phases.learner_at(before.counters)
        self._mix.begin_phase(
            self.learner.counters.updates,
            empties_replay=not self._phases.config.replay.across_phases,
        )
        self.learner.last_good, self.learner.trained_by = before.last_good, before.trained_by
        frames, algorithm = self.learner.counters.frames, self.learner.phase.algorithm
        _log.info("From %s frames on: %s.", f"{frames:,}", algorithm)
        return True


def _has_batch(prepared: Prepared | None) -> bool:
    return prepared is not None and prepared.batch is not None


def _observed(unroll: Unroll, columns: slice) -> Nest:
    """Returns what some of E unrolls add to the ones before them: row 0 repeats the last one."""
    return tree.map_structure(lambda x: x[1:, columns], unroll.timestep.observation)


def _mean_lag(prepared: Prepared | None, learner: Learner) -> float | None:
    """Returns the mean policy lag of a batch's fresh unrolls, in updates; None without any."""
    if prepared is None or prepared.batch is None or prepared.batch.is_replay.all():
        return None
    versions = prepared.batch.unroll.parameter_version[~prepared.batch.is_replay]
    return float(np.maximum(0, learner.counters.updates - versions).mean())
