"""The guard: what becomes of a batch that the learner refuses, and of a run that has too many.

A batch is refused if its loss, a gradient or a new variable is not finite; nothing has moved then.
Unrolls that are bad by themselves are the culprits: they are left out of the update, dropped,
removed from replay, and their actors are blamed. If none stands out, the whole batch is skipped
and nobody is blamed. Too many such skips mean that it is the variables: they go back to the newest
checkpoint, once; if that does not help, the run ends.

Variables may also grow until the network's outputs, though finite, are beyond what the learner
takes from actors. Then all messages are refused, there are no batches, and it is the refused
outputs that lead to the same end.
"""

import collections
import itertools
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from impala.config.schema import GuardConfig
from impala.finite import NotFiniteError
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, CheckpointError
from impala.types import Batch, StepType
from learner.data.mix import Mix, Prepared, Provenance
from learner.data.replay import Replay
from learner.front.refused_outputs import RefusedOutput, RefusedOutputs
from learner.update.bad_updates import BadUpdates
from learner.update.learner import Learner, Refusal, Update, columns

_log = logging.getLogger(__name__)

NOT_FINITE = "not_finite"  # why culprits are dropped
SKIPPED_UPDATE = "skipped_update"  # why the unrolls of a skipped batch are dropped

_LOG_SECONDS = 10.0  # between two lines about culprits
_UNCLEAR_REFUSALS = 100  # of outputs, while nothing good came in: then it is the variables ...
_UNCLEAR_SECONDS = 60.0  # ... if they came over at least so long
_REMEMBERED = 4096  # unrolls of replay that were removed, and may still be in batches made ahead


class Guard:
    """Has the learner learn from what is good of each batch, and keeps count of the rest."""

    def __init__(
        self,
        config: GuardConfig,
        logdir: pathlib.Path,
        mix: Mix,
        replay: Replay | None,
        blame: Callable[[str, str], None],
        refused_outputs: RefusedOutputs,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts with a clean record.

        Args:
          config: how many skips are too many.
          logdir: whose checkpoints are gone back to, and where bad batches are written.
          mix: makes the batches; it is told of those that moved nothing.
          replay: culprits are removed from it.
          blame: called with the actor of a culprit, and why.
          refused_outputs: of actors, to be judged.
          clock: gives seconds that never go back.
        """
        self._config = config
        self._logdir = logdir
        self._mix = mix
        self._replay = replay
        self._blame = blame
        self._refused_outputs = refused_outputs
        self._clock = clock
        self._unclear = 0  # refused outputs of which nobody knows whose fault they are
        self._unclear_since = 0.0
        self._bad_updates = BadUpdates(logdir / "bad-updates")
        self._recent: collections.deque[bool] = collections.deque(maxlen=config.window_updates)
        self._suspects: collections.Counter[str] = collections.Counter()
        self._removed: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._good_since_rollback: int | None = None  # None: there was none
        self._rolled_back_to = 0  # the version that the last return to a checkpoint has made
        self._logged = -_LOG_SECONDS
        self.skipped_updates = 0  # batches of which nothing was learned
        self.culprits = 0  # unrolls, each as often as it was found
        self.rollbacks = 0

    @property
    def in_doubt(self) -> bool:
        """Whether the last batch was skipped with nobody to blame, so that variables may be bad."""
        return bool(self._recent and self._recent[-1])

    def learn(self, learner: Learner, prepared: Prepared) -> tuple[Prepared, Update | None]:
        """Learns from what is good of a batch.

        Returns:
          What is to be accounted for: culprits and skipped unrolls are dropped, and do not count.
          And the update; None if there was no batch, or nothing of it was learned.

        Raises:
          NotFiniteError: too many batches were skipped, also after going back to a checkpoint.
        """
        batch = prepared.batch
        if prepared.unrolls:
            self._unclear = 0
        if batch is None:
            return prepared, None
        result = learner.update(batch)
        if isinstance(result, Update):
            self._good()
            return prepared, result
        refusal, culprits = result, set(result.culprits)
        written = self._bad_updates.write(learner, prepared, refusal)
        if culprits:
            self._punish(learner, prepared, refusal, written)
        if culprits and len(culprits) < len(prepared.origins):
            result = learner.update(*_without(batch, refusal.culprits))
        learned = isinstance(result, Update)
        if learned:
            self._good()
        else:
            self.skipped_updates += 1
            self._mix.shift_version(-1)
        prepared = _account(prepared, culprits, learned)
        if isinstance(result, Update):
            return prepared, result
        if len(culprits) < len(prepared.origins):
            self._skip(learner, prepared, result, len(culprits), written)
        return prepared, None

    def settle(self, learner: Learner) -> bool:
        """Has variables in doubt go back to a checkpoint, before they are saved or handed on.

        Returns:
          Whether they may be saved: not if they are in doubt and there is no checkpoint.
        """
        if not self.in_doubt:
            return True
        update = learner.counters.updates
        try:
            saved = self._roll_back(learner)
        except CheckpointError as error:
            _log.error("The variables of update %d are in doubt: not saved. %s", update, error)
            return False
        _log.warning(
            "The variables of update %d are in doubt: those of update %d take their place.",
            *(update, saved.counters.updates),
        )
        return True

    def judge_outputs(self, learner: Learner) -> bool:
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
        refused = self._refused_outputs.take()
        if not refused:
            return False
        beyond = learner.outputs_beyond_limits()
        if beyond == 0.0:
            for each in refused:
                if each.version >= self._rolled_back_to:  # else bad variables may have acted
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
        self._go_back(
            learner,
            f"{seen}, and {beyond:.0%} of the learner's own outputs are beyond limits too, at "
            f"update {learner.counters.updates}",
            advice,
        )

    def _good(self) -> None:
        self._recent.append(False)
        if self._good_since_rollback is not None:
            self._good_since_rollback += 1

    def _punish(
        self, learner: Learner, prepared: Prepared, refusal: Refusal, written: pathlib.Path | None
    ) -> None:
        """Removes culprits from replay and blames their actors, once for each unroll of replay."""
        origins = [prepared.origins[i] for i in refusal.culprits]
        self.culprits += len(origins)
        fresh = [each for each in origins if each.number not in self._removed]
        numbers = [each.number for each in origins if each.number is not None]
        if self._replay is not None:
            self._replay.remove(numbers)
            self._removed.extend(numbers)
        update, what = learner.counters.updates + 1, ", ".join(refusal.not_finite[:2])
        for actor, count in collections.Counter(each.actor for each in fresh).items():
            self._blame(
                actor, f"{count} unrolls with which update {update} is not finite in {what}"
            )
        if time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            _log.warning(
                "Update %d is not finite in %s because of %d unrolls of %s: left out. %d were in "
                "all.%s",
                *(update, what, len(origins), _names(each.actor for each in origins)),
                *(self.culprits, _hint(written)),
            )

    def _skip(
        self,
        learner: Learner,
        prepared: Prepared,
        refusal: Refusal,
        left_out: int,
        written: pathlib.Path | None,
    ) -> None:
        """Takes note of a batch that is bad as a whole; goes back to a checkpoint or ends the run.

        Args:
          learner: which has refused it.
          prepared: what it came with.
          refusal: of what was left of it.
          left_out: culprits that were left out before.
          written: the file that it was written to.

        Raises:
          NotFiniteError: that was the last time.
        """
        self._recent.append(True)
        self._suspects.update(origin.actor for origin in prepared.origins)
        update, what = learner.counters.updates + 1, ", ".join(refusal.not_finite)
        _log.warning(
            "Update %d is not finite in %s, %s: the batch is skipped.%s",
            *(update, what),
            f"also without {left_out} culprits" if left_out else "and no unroll stands out",
            _hint(written),
        )
        if sum(self._recent) < self._config.max_skips:
            return
        seen = (
            f"{sum(self._recent)} of the last {len(self._recent)} batches were not finite, the "
            f"last one in {what}, at update {update}; they held unrolls of "
            f"{_names(self._suspects.elements())}"
        )
        advice = (
            "Lower optimiser.learning_rate, raise optimiser.epsilon, clip the rewards "
            "(objective.reward_clipping), or start with --empty-replay if there is a replay. "
            f"What was learned from is in {self._bad_updates.directory}: look at it with impala "
            "replay-update FILE."
        )
        self._go_back(learner, seen, advice)

    def _go_back(self, learner: Learner, seen: str, advice: str) -> None:
        """Goes back to the newest checkpoint whose outputs are good, unless it did so just now.

        Raises:
          NotFiniteError: there is none, or going back has not helped.
        """
        if (
            self._good_since_rollback is not None
            and self._good_since_rollback < self._config.window_updates
        ):
            raise NotFiniteError(
                f"{seen}. Going back to a checkpoint {self._good_since_rollback} updates ago has "
                f"not helped. The last checkpoint is intact. {advice}"
            )
        try:
            saved = self._roll_back(learner)
        except CheckpointError as error:
            raise NotFiniteError(
                f"{seen}. There is no checkpoint to go back to ({error}). {advice}"
            ) from None
        _log.error(
            "%s. Going back to the variables of update %d, which become version %d.",
            *(seen, saved.counters.updates, learner.counters.updates),
        )

    def _roll_back(self, learner: Learner) -> Checkpoint:
        """Puts the newest good checkpoint's variables in place.

        Raises:
          CheckpointError: there is none; the variables may have moved.
        """
        now = learner.counters

        def is_fit(saved: Checkpoint) -> bool:
            learner.counters = now
            learner.roll_back(saved)
            return (learner.outputs_beyond_limits() or 0.0) <= 0.5

        saved = checkpoint.load(self._logdir, is_fit)
        self._mix.shift_version(1)
        self.rollbacks += 1
        self._good_since_rollback = 0
        self._rolled_back_to = learner.counters.updates
        self._recent.clear()
        self._suspects.clear()
        return saved


def _without(batch: Batch, culprits: Sequence[int]) -> tuple[Batch, np.ndarray]:
    """The batch with a good unroll in the place of each culprit, and weights that leave it out."""
    is_good = np.ones(len(batch.is_replay), np.bool_)
    is_good[list(culprits)] = False
    which = np.where(is_good, np.arange(len(is_good)), np.flatnonzero(is_good)[0])
    return columns(batch, which), is_good.astype(np.float32)


def _account(prepared: Prepared, culprits: set[int], learned: bool) -> Prepared:
    """Has culprits, and all unrolls if nothing was learned, dropped if they are fresh."""
    batch = prepared.batch
    assert batch is not None
    fresh = int((~batch.is_replay).sum())  # the first ones, in the order of the queue
    if not fresh:
        return prepared  # what was fresh only went to replay
    otherwise = None if learned else SKIPPED_UPDATE
    reasons = [NOT_FINITE if i in culprits else otherwise for i in range(fresh)]
    lost = [i for i, reason in enumerate(reasons) if reason]
    step_type = batch.unroll.timestep.step_type
    return prepared._replace(
        provenance=list(_split(prepared.provenance, iter(reasons))),
        unrolls=prepared.unrolls - len(lost),
        frames=prepared.frames - int(batch.unroll.frames[lost].sum()),
        steps=prepared.steps - int((step_type[1:, lost] != StepType.FIRST).sum()),
    )


def _split(provenance: Sequence[Provenance], reasons: Iterator[str | None]) -> Iterator[Provenance]:
    """Splits what is accounted for where the reasons change."""
    for part in provenance:
        if part.dropped:
            yield part
            continue
        for reason, group in itertools.groupby(itertools.islice(reasons, part.unrolls)):
            yield part._replace(unrolls=len(list(group)), dropped=reason)


def _names(actors: Iterator[str]) -> str:
    """Those with the most unrolls first: "a (3), b (1)"."""
    return ", ".join(f"{name} ({n})" for name, n in collections.Counter(actors).most_common(10))


def _hint(written: pathlib.Path | None) -> str:
    return f" impala replay-update {written} computes it again." if written else ""
