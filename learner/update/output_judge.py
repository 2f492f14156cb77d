"""Whose fault it is that messages are refused for what actors' networks computed.

Variables may grow until the network's outputs, though finite, are beyond what the learner takes
from actors. Then all messages are refused, there are no batches, and it is the refused outputs that
lead back to a checkpoint.
"""

import pathlib
import time
from collections.abc import Callable

from impala.finite import NotFiniteError
from learner.front.refused_outputs import RefusedOutput, RefusedOutputs
from learner.update.learner import Learner
from learner.update.rollback import Rollback

_UNCLEAR_REFUSALS = 100  # of outputs, while nothing good came in: then it is the variables ...
_UNCLEAR_SECONDS = 60.0  # ... if they came over at least so long


class OutputJudge:
    """Tries the learner's own network, and blames either the actors or the variables."""

    def __init__(
        self,
        refused: RefusedOutputs,
        blame: Callable[[str, str], None],
        rollback: Rollback,
        logdir: pathlib.Path,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Has judged nothing yet.

        Args:
          refused: outputs of actors, to be judged.
          blame: called with the actor of an output, and why.
          rollback: for variables that are to blame.
          logdir: of the run, named in advice.
          clock: gives seconds that never go back.
        """
        self._refused = refused
        self._blame = blame
        self._rollback = rollback
        self._logdir = logdir
        self._clock = clock
        self._unclear = 0  # refused outputs of which nobody knows whose fault they are
        self._unclear_since = 0.0

    def good_came_in(self) -> None:
        """Takes note of fresh unrolls: the network's outputs are taken."""
        self._unclear = 0

    def judge(self, learner: Learner) -> bool:
        """Finds out whose fault it is that outputs of actors were refused, and acts on it.

        The learner's network is applied to unrolls of the last good batch. If its outputs are
        within the limits, the actors are blamed. If most are not, the variables go back to a
        checkpoint. If it is not clear, nobody is blamed, and only if nothing good comes in for long
        it is the variables.

        Returns:
          Whether the variables went back, and are the next version.

        Raises:
          NotFiniteError: it is the variables, and going back has not helped or is not possible.
        """
        refused = self._refused.take()
        if not refused:
            return False
        beyond = learner.outputs_beyond_limits()
        if beyond == 0.0:
            for each in refused:
                if each.version >= self._rollback.version:  # else bad variables may have acted
                    self._blame(each.actor, each.why)
            return False
        if beyond is None or beyond <= 0.5:
            if not self._unclear:
                self._unclear_since = self._clock()
            self._unclear += len(refused)
            seconds = self._clock() - self._unclear_since
            if self._unclear < _UNCLEAR_REFUSALS or seconds < _UNCLEAR_SECONDS:
                return False
        self._unclear = 0
        self._diverged(learner, refused[-1], beyond)
        return True

    def _diverged(self, learner: Learner, last: RefusedOutput, beyond: float | None) -> None:
        """Goes back to a checkpoint, or ends the run, since its network says what is refused.

        Raises:
          NotFiniteError: that was the last time, or there is nothing to go back to.
        """
        seen = (
            "Messages are refused for what actors' networks compute (the last one, of "
            f"{last.actor}: {last.why})"
        )
        advice = (
            "Lower optimiser.learning_rate; raise limits.policy_parameter and limits.baseline if "
            "such outputs are meant; or go on from an earlier checkpoint, by moving the newest out "
            f"of {self._logdir / 'checkpoints'}."
        )
        if beyond is None:  # nothing was learned since the start, so the newest is what there is
            raise NotFiniteError(
                f"{seen}, and nothing else has come in since the start: the variables that the run "
                f"began with are too large. {advice}"
            )
        self._rollback.insist(
            learner,
            f"{seen}, and {beyond:.0%} of the learner's own outputs are beyond limits too, at "
            f"update {learner.counters.updates}",
            advice,
        )
