"""Makes snapshots of the agent at fixed numbers of frames, and has training wait for evaluators."""

import logging
import math
import pathlib
import time

from impala.config.schema import Config
from impala.environments.spaces import Spaces
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, CheckpointError, Counters
from impala.schedule import phases as schedule
from impala.schedule import tasks
from learner.evaluation.snapshots import Snapshot, Snapshots
from learner.update.checkpoints import Resumed, of_agent
from learner.update.learner import Learner
from learner.update.phases import Phases
from learner.update.training import Iteration

_log = logging.getLogger(__name__)

_MOST_WAITING = 20  # snapshots; then training waits for evaluators
_REMIND_SECONDS = 600.0  # between two messages that training waits


class SnapshotMaker:
    """Consumes the training loop, and makes snapshots whether or not evaluators are free.

    One is due at the start, at the first update at or after each multiple of
    `evaluator.every_frames` or of `evaluator.every_seconds`, and at the end of each phase, of each
    block of sequential tasks, and of the run.
    """

    def __init__(
        self,
        logdir: pathlib.Path,
        resumed: Resumed,
        phases: Phases,
        spaces: Spaces,
        snapshots: Snapshots,
        incarnation: int,
    ):
        """Adds the snapshots that the run has made before and that may still wait.

        Those of later frames than the checkpoint are deleted: the run repeats these frames.

        Args:
          logdir: the run's log directory.
          resumed: the state from which the run resumed.
          phases: compute the run's progress.
          spaces: those that the agent was made for, saved with it.
          snapshots: receives them.
          incarnation: of this learner.
        """
        counters = resumed.learner.counters
        self._logdir = logdir
        self._phases = phases
        self._spaces = spaces
        self._snapshots = snapshots
        self._incarnation = incarnation
        self._every = tasks.evaluation_frames(phases.config)
        self._ends = _ends(phases.config)
        self._every_seconds = phases.config.evaluator.every_seconds or math.inf
        self._next = 0 if counters == Counters() else self._after(counters.frames)
        self._next_seconds = self._after_seconds(counters.seconds)
        # Frames of the newest snapshot; what a checkpoint counts had its own, if they were wanted.
        self._newest = counters.frames or -1
        self._reminded = -_REMIND_SECONDS
        for path in () if snapshots.are_refused else checkpoint.of_kind(logdir, "snapshots"):
            self._restore(path, counters)

    def make_if_due(self, learner: Learner) -> None:
        """Makes a snapshot if one is due and wanted.

        Raises:
          StorageError: it cannot be written.
        """
        frames, seconds = learner.counters.frames, learner.counters.seconds
        is_due = frames >= self._next or seconds >= self._next_seconds
        if self._snapshots.are_wanted and is_due and frames > self._newest:
            self._make(learner)

    def take(self, iteration: Iteration) -> None:
        """Makes a snapshot if one is due; of variables in doubt, not until they are good.

        Raises:
          StorageError: it cannot be written.
        """
        if not iteration.in_doubt:
            self.make_if_due(iteration.learner)

    def make_last(self, learner: Learner) -> None:
        """Makes the snapshot of a run that this learner has finished, unless there is one already.

        Raises:
          StorageError: it cannot be written.
        """
        if self._snapshots.are_wanted and learner.counters.frames > self._newest:
            self._make(learner)

    def has_room(self) -> bool:
        """Returns whether another snapshot may be made; otherwise, training has to wait."""
        if len(self._snapshots) < _MOST_WAITING:
            return True
        if time.monotonic() >= self._reminded + _REMIND_SECONDS:
            self._reminded = time.monotonic()
            _log.warning(
                "Training waits for evaluators: %d snapshots are not evaluated, the most that "
                "may wait. If there is no evaluator, start one (impala actor "
                "--role evaluator), or go on with --learner.snapshots never.",
                _MOST_WAITING,
            )
        return False

    def _make(self, learner: Learner) -> None:
        counters = learner.counters
        self._next = self._after(counters.frames)
        self._next_seconds = self._after_seconds(counters.seconds)
        self._newest = counters.frames
        made = of_agent(learner, self._spaces, self._incarnation)
        self._add(checkpoint.save(self._logdir, made, keep=None, kind="snapshots"), made)

    def _restore(self, path: pathlib.Path, resumed: Counters) -> None:
        """Adds a snapshot of this run's past, or deletes it."""
        try:
            made = checkpoint.load(path)
        except CheckpointError as error:
            _log.error("A snapshot is not evaluated: %s", error)
        else:
            if made.counters.frames <= resumed.frames:
                self._newest = max(self._newest, made.counters.frames)
                self._add(path, made)
                return
        checkpoint.delete(path)

    def _add(self, path: pathlib.Path, made: Checkpoint) -> None:
        updates, frames = made.counters.updates, made.counters.frames
        progress = self._phases.progress(made.counters)
        self._snapshots.add(Snapshot(path, made.incarnation, updates, frames, progress))

    def _after(self, frames: int) -> int:
        """Returns the frames at which the next snapshot is due."""
        later = [end for end in self._ends if end > frames]
        return min([(frames // self._every + 1) * self._every, *later])

    def _after_seconds(self, seconds: float) -> float:
        """Returns the seconds of training at which the next snapshot is due."""
        return (seconds // self._every_seconds + 1.0) * self._every_seconds


def _ends(config: Config) -> set[int]:
    """Returns the frames at which phases and blocks of tasks end."""
    ends = {phase.end for phase in schedule.make(config)}
    if config.tasks.order == "sequential":
        ends |= {block.end for block in tasks.blocks(config)}
    return ends
