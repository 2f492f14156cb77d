"""Decides whether actors or the variables are the cause of refused network outputs.

Variables may grow until the network's outputs, though finite, exceed the learner's limits for
messages. Then all messages are refused and there are no batches, so the refused outputs themselves
must lead to a rollback.
"""

import collections
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tree

from impala.finite import NotFiniteError
from impala.types import ArraySpec, Batch, Unroll
from learner.fleet.records import RefusedOutput
from learner.update.learner import Learner
from learner.update.rollback import Rollback

_UNCLEAR_REFUSALS = 100  # of outputs without a good unroll, after which the variables are blamed...
_UNCLEAR_SECONDS = 60.0  # ...if the refusals came over at least this time


class Finding(NamedTuple):
    """Why variables have to be rolled back."""

    seen: str  # the evidence against them, for the log and the error
    advice: str  # what the user can do, likewise


class OutputJudge:
    """Tries the learner's own network, and blames the actors or the variables."""

    def __init__(
        self,
        refused: collections.deque[RefusedOutput],
        blame: Callable[[str, str], None],
        rollback: Rollback,
        logdir: pathlib.Path,
        clock: Callable[[], float] = time.monotonic,
        blank: Batch | None = None,
    ):
        """Starts without refused outputs.

        Args:
          refused: outputs of actors, to be judged.
          blame: called with the actor of an output, and the reason.
          rollback: for bad variables.
          logdir: the run's log directory, named in error messages.
          clock: monotonic, in seconds.
          blank: from `blank`, to try the network upon before there is a good batch.
        """
        self._refused = refused
        self._blank = blank
        self._blame = blame
        self._rollback = rollback
        self._logdir = logdir
        self._clock = clock
        self._unclear = 0  # refused outputs of unknown cause
        self._unclear_since = 0.0

    def good_came_in(self) -> None:
        """Notes fresh unrolls: the network's outputs are accepted."""
        self._unclear = 0

    def judge(self, learner: Learner) -> Finding | None:
        """Determines why outputs of actors were refused, and blames actors or the variables.

        The learner's network is applied to unrolls of the last good batch, or before the first to
        blank ones. If its outputs are within the limits, the actors are blamed. If most are not,
        the variables are. Otherwise nobody is blamed, and the variables only after a long time
        without good unrolls.

        Returns:
          Why the variables have to be rolled back; None if they do not.

        Raises:
          NotFiniteError: the variables are bad, and there is nothing to go back to.
        """
        refused = [self._refused.popleft() for _ in range(len(self._refused))]
        if not refused:
            return None
        has_learned = learner.last_good is not None
        beyond = learner.outputs_beyond_limits() if has_learned else self._of_blank(learner)
        if beyond == 0.0:
            for each in refused:
                # Variables that were rolled back, or that an earlier learner had, may be the cause.
                if each.version is not None and each.version >= self._rollback.version:
                    self._blame(each.actor, each.why)
            return None
        if beyond is None or beyond <= 0.5:
            if not self._unclear:
                self._unclear_since = self._clock()
            self._unclear += len(refused)
            seconds = self._clock() - self._unclear_since
            if self._unclear < _UNCLEAR_REFUSALS or seconds < _UNCLEAR_SECONDS:
                return None
        self._unclear = 0
        return self._diverged(learner, refused[-1], beyond if has_learned else None)

    def _of_blank(self, learner: Learner) -> float | None:
        """Returns the share of blank unrolls with outputs beyond limits; None without any."""
        learner.last_good = self._blank
        try:
            return learner.outputs_beyond_limits()
        finally:
            learner.last_good = None

    def _diverged(self, learner: Learner, last: RefusedOutput, beyond: float | None) -> Finding:
        """Returns why the variables are bad.

        Raises:
          NotFiniteError: they are those that the run began with.
        """
        seen = (
            "Messages are refused for what actors' networks compute (the last one, of "
            f"{last.actor}: {last.why})"
        )
        advice = (
            "Lower optimiser.learning_rate, or go on from an earlier checkpoint: move the newest "
            f"out of {self._logdir / 'checkpoints'}."
        )
        if beyond is None:  # nothing was learned since the start, so the newest is the current one
            raise NotFiniteError(
                f"{seen}, and nothing else has come in since the start: the variables that the run "
                f"began with are too large. {advice}"
            )
        return Finding(
            f"{seen}, and {beyond:.0%} of the learner's own outputs are beyond limits too, at "
            f"update {learner.counters.updates}",
            advice,
        )


def blank(spec: Unroll) -> Batch:
    """Returns an unroll of zeros and one of ones, upon which a good network's outputs are small.

    Args:
      spec: a nest of ArraySpec of one environment's unroll.
    """

    def filled(leaf: ArraySpec, axis: int) -> np.ndarray:
        return np.stack([np.full(leaf.shape, value, leaf.dtype) for value in (0, 1)], axis)

    rows = tree.map_structure(lambda leaf: filled(leaf, 1), spec._replace(core_state=()))
    state = tree.map_structure(lambda leaf: filled(leaf, 0), spec.core_state)
    unroll = rows._replace(
        core_state=state, frames=np.zeros(2, np.int32), parameter_version=np.zeros(2, np.int64)
    )
    return Batch(unroll, np.zeros(2, np.bool_))
