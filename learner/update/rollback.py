"""Rolls bad variables back to a checkpoint: once, and not again soon."""

import logging
import pathlib

from impala.finite import NotFiniteError
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, CheckpointError
from learner.data.mix import Mix
from learner.update.learner import Learner
from learner.update.peers import Peers

_log = logging.getLogger(__name__)


class Rollback:
    """Restores the variables of the newest good checkpoint."""

    def __init__(self, logdir: pathlib.Path, mix: Mix, window_updates: int, peers: Peers):
        """Starts without a rollback.

        Args:
          logdir: of the checkpoints.
          mix: makes the batches; notified that the version changes.
          window_updates: good updates required before another rollback.
          peers: get the first one's variables.
        """
        self._peers = peers
        self._logdir = logdir
        self._mix = mix
        self._window_updates = window_updates
        self._good_since: int | None = None  # updates since the rollback; None: there was none
        self.count = 0
        """Number of rollbacks."""
        self.version = 0
        """Version made by the last rollback; 0 if there was none."""

    def good(self) -> None:
        """Notes a good update."""
        if self._good_since is not None:
            self._good_since += 1

    def insist(self, learner: Learner, seen: str, advice: str) -> None:
        """Rolls back, unless the last rollback was too recent.

        Args:
          learner: whose variables are bad.
          seen: the evidence against them, for the log and the error.
          advice: what the user can do, likewise.

        Raises:
          NotFiniteError: there is no checkpoint, or a rollback has not helped.
        """
        if self._good_since is not None and self._good_since < self._window_updates:
            raise NotFiniteError(
                f"{seen}. Going back to a checkpoint {self._good_since} updates ago has "
                f"not helped. The last checkpoint is intact. {advice}"
            )
        try:
            updates = self.go_back(learner)
        except CheckpointError as error:
            raise NotFiniteError(
                f"{seen}. There is no checkpoint to go back to ({error}). {advice}"
            ) from None
        _log.error(
            "%s. Going back to the variables of update %d, which become version %d.",
            *(seen, updates, learner.counters.updates),
        )

    def go_back(self, learner: Learner) -> int:
        """Rolls back to the newest checkpoint whose network's outputs are within the limits.

        Newer ones are deleted, from which a learner that starts again would go on.

        Returns:
          The updates of the checkpoint, whose variables are the learner's next version.

        Raises:
          CheckpointError: there is none; nothing has changed.
        """
        now, values = learner.counters, learner.variables()
        tried = 0

        def is_fit(saved: Checkpoint) -> bool:
            nonlocal tried
            tried += 1
            learner.counters = now
            learner.roll_back(saved)
            return (learner.outputs_beyond_limits() or 0.0) <= 0.5

        updates, error = None, None
        if self._peers.is_first:
            try:
                updates = checkpoint.load(self._logdir, is_fit).counters.updates
                if tried > 1:
                    checkpoint.delete_later(self._logdir, "checkpoints", updates)
            except CheckpointError as none:
                learner.assign(values)
                learner.counters = now
                error = str(none)
        updates, error = self._peers.of_first([updates, error])
        if error is not None:
            raise CheckpointError(error)
        self._peers.share(learner)
        self._mix.shift_version(1)
        self.count += 1
        self._good_since = 0
        self.version = learner.counters.updates
        return int(updates)
