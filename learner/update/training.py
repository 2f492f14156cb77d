"""The training loop: a stream of iterations, consumed by telemetry, checkpoints and others."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from learner.data.mix import Mix, Prepared, Provenance
from learner.update.guard import Guard
from learner.update.learner import Learner, Update
from learner.update.phases import Phases

_log = logging.getLogger(__name__)

_BATCH_SECONDS = 0.5  # time that an iteration waits for a batch


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

    @property
    def provenance(self) -> Sequence[Provenance]:
        """Returns the unrolls to account for, learned from or not."""
        return () if self.prepared is None else self.prepared.provenance

    @property
    def is_whole(self) -> bool:
        """Whether a batch of fresh unrolls is done with."""
        return self.prepared is not None and self.prepared.is_whole


class Training:
    """Learns from batch after batch, phase after phase."""

    def __init__(self, phases: Phases, learner: Learner, mix: Mix, guard: Guard):
        """Prepares the first iteration.

        Args:
          phases: make the learners of later phases.
          learner: of the first phase.
          mix: provides batches.
          guard: has the learner learn from their good unrolls.
        """
        self._phases = phases
        self._mix = mix
        self._guard = guard
        self.learner = learner
        """The learner of the current phase."""

    @property
    def is_finished(self) -> bool:
        """Whether the run's last phase has ended."""
        return self._phases.are_over(self.learner.counters)

    def iterations(self, until: Callable[[], bool]) -> Iterator[Iteration]:
        """Learns until the run is finished. Between two iterations nothing is learned.

        Args:
          until: called before each iteration; ends the stream if it returns True.

        Yields:
          The results of each iteration; without batches, at regular intervals.

        Raises:
          NotFiniteError: variables, loss or gradients are not finite, and a rollback does not help.
          StorageError: replay cannot be written or read.
        """
        last = time.monotonic()  # when the previous batch came
        while not (until() or self.is_finished):
            began = time.monotonic()
            prepared = self._mix.get(timeout=_BATCH_SECONDS)
            came = time.monotonic()
            update, update_seconds, begins_phase = None, 0.0, False
            is_new = self._guard.judge_outputs(self.learner)
            if prepared is not None:
                is_new = True
                prepared, update = self._guard.learn(self.learner, prepared)
                update_seconds = time.monotonic() - came
                self._count(prepared, came - last)
                last = came
                begins_phase = self._begin_next_phase()
            yield Iteration(
                learner=self.learner,
                prepared=prepared,
                update=update,
                waited_seconds=came - began,
                update_seconds=update_seconds,
                begins_phase=begins_phase,
                is_new=is_new,
                in_doubt=self._guard.in_doubt,
            )

    def settle(self) -> bool:
        """Rolls back variables in doubt, before the run ends.

        Returns:
          Whether the variables may be saved.
        """
        return self._guard.settle(self.learner)

    def _count(self, prepared: Prepared, seconds: float) -> None:
        self.learner.count(
            unrolls=prepared.unrolls,
            frames=prepared.frames,
            steps=prepared.steps,
            episodes=prepared.episodes,
            seconds=seconds,
        )

    def _begin_next_phase(self) -> bool:
        """Starts the next phase if it is due: the agent stays, all else is new."""
        before = self.learner
        if before.phase_progress < 1.0 or self.is_finished:
            return False
        self._guard.settle(before)
        self.learner = self._phases.learner_at(before.counters)
        if not self._phases.config.replay.across_phases:
            self._mix.begin_phase()
        self.learner.last_good = before.last_good
        frames, algorithm = self.learner.counters.frames, self.learner.phase.algorithm
        _log.info("From %s frames on: %s.", f"{frames:,}", algorithm)
        return True
