"""The guard: handles batches that the learner refuses.

A batch is refused if its loss, a gradient or a new variable is not finite; nothing has changed
then. Unrolls that are bad by themselves are the culprits: they are left out of the update, dropped,
removed from replay, and their actors are blamed. If there are none, the whole batch is skipped and
nobody is blamed. After too many skips the variables are presumed bad: they are rolled back to the
newest checkpoint, once; if that does not help, the run ends.
"""

import collections
import itertools
import logging
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from impala.logdir.checkpoint import CheckpointError
from impala.types import Batch, StepType
from learner.data.mix import Mix, Prepared, Provenance
from learner.data.replay import Replay
from learner.fleet.records import RefusedOutput
from learner.update.bad_updates import BadUpdates, hint
from learner.update.culprits import Culprits, names
from learner.update.devices import columns
from learner.update.learner import Learner, Refusal, Update
from learner.update.output_judge import Finding, OutputJudge
from learner.update.peers import Peers
from learner.update.rollback import Rollback

_log = logging.getLogger(__name__)

# So many skipped batches of the last ones are too many; after a rollback, so many good updates have
# to follow before another one.
_MOST_SKIPS, _WINDOW_BATCHES = 5, 100

_ALONE = Peers()

NOT_FINITE = "not_finite"  # why culprits are dropped
SKIPPED_UPDATE = "skipped_update"  # why the unrolls of a skipped batch are dropped


class Guard:
    """Updates the learner by the good unrolls of each batch, and counts the rest."""

    def __init__(
        self,
        logdir: pathlib.Path,
        mix: Mix,
        replay: Replay | None,
        blame: Callable[[str, str], None],
        refused_outputs: collections.deque[RefusedOutput],
        clock: Callable[[], float] = time.monotonic,
        peers: Peers = _ALONE,
        blank: Batch | None = None,
    ):
        """Starts with all counts at 0.

        Args:
          logdir: of the checkpoints, and of the files of bad batches.
          mix: makes the batches; notified of those without an update.
          replay: culprits are removed from it.
          blame: called with the actor of a culprit, and the reason.
          refused_outputs: of actors, to be judged.
          clock: monotonic, in seconds.
          peers: do the same with their parts of each batch.
          blank: upon which the network is tried before the first batch.
        """
        self._peers = peers
        self._mix = mix
        self._rollback = Rollback(logdir, mix, _WINDOW_BATCHES, peers)
        self._culprits = Culprits(replay, blame)
        self._outputs = OutputJudge(
            *(refused_outputs, blame, self._rollback, logdir, clock), blank=blank
        )
        self._bad_updates = BadUpdates(logdir / "bad-updates")
        self._recent: collections.deque[bool] = collections.deque(maxlen=_WINDOW_BATCHES)
        self._suspects: collections.Counter[str] = collections.Counter()
        self.skipped_updates = 0
        """Number of batches skipped."""

    @property
    def culprits(self) -> int:
        """Returns how many unrolls were left out of updates, each as often as it was found."""
        return self._culprits.count

    @property
    def rollbacks(self) -> int:
        """Returns how often the variables were rolled back."""
        return self._rollback.count

    @property
    def in_doubt(self) -> bool:
        """Whether the last batch was skipped without culprits, so that the variables may be bad."""
        return bool(self._recent and self._recent[-1])

    def learn(self, learner: Learner, prepared: Prepared) -> tuple[Prepared, Update | None]:
        """Learns from the good unrolls of a batch.

        Returns:
          What to account for, where culprits and skipped unrolls are dropped and do not count; and
          the update, None if there was no batch or it was skipped.

        Raises:
          NotFiniteError: too many batches were skipped, also after a rollback.
        """
        batch = prepared.batch
        if prepared.unrolls:
            self._outputs.good_came_in()
        if batch is None:
            return prepared, None
        result = learner.update(batch, prepared.weights, prepared.placed)
        if isinstance(result, Update):
            self._good()
            return prepared, result
        refusal, culprits = result, set(result.culprits)
        written = self._bad_updates.write(learner, prepared, refusal)
        if culprits:
            self._culprits.punish(prepared, refusal, learner.counters.updates + 1, written)
        counts = self._peers.meet([len(culprits), self._can_replace(learner, prepared, culprits)])
        left_out = sum(count for count, _ in counts)
        tries_again = left_out > 0 and all(can_replace for _, can_replace in counts)
        if tries_again:
            result = learner.update(
                *_without(batch, prepared.weights, refusal.culprits, learner.last_good)
            )
        learned = isinstance(result, Update)
        if learned:
            self._good()
        else:
            self.skipped_updates += 1
            self._mix.shift_version(-1)
        prepared = _account(prepared, culprits, learned)
        if isinstance(result, Update):
            return prepared, result
        if tries_again or not left_out:
            self._skip(learner, prepared, result, left_out, written)
        return prepared, None

    def settle(self, learner: Learner) -> bool:
        """Rolls back variables in doubt, before they are saved or published.

        Returns:
          Whether they may be saved: not if they are in doubt and there is no checkpoint.
        """
        if not self.in_doubt:
            return True
        update = learner.counters.updates
        try:
            updates = self._rollback.go_back(learner)
        except CheckpointError as error:
            _log.error("The variables of update %d are in doubt: not saved. %s", update, error)
            return False
        self._forget()
        _log.warning(
            "The variables of update %d are in doubt: those of update %d take their place.",
            *(update, updates),
        )
        return True

    def judge_outputs(self, learner: Learner) -> Finding | None:
        """Judges the refused outputs of this peer's actors: see `OutputJudge.judge`."""
        return self._outputs.judge(learner)

    def apply_finding(self, learner: Learner, finding: Finding) -> None:
        """Rolls the variables back: those of a checkpoint are the next version.

        Raises:
          NotFiniteError: a rollback has not helped, or is impossible.
        """
        self._rollback.insist(learner, *finding)
        self._forget()

    def _can_replace(self, learner: Learner, prepared: Prepared, culprits: set[int]) -> bool:
        """Returns whether there is a good unroll in the place of a culprit."""
        is_part = self._peers.count > 1  # of a batch that may be good elsewhere
        return len(culprits) < len(prepared.origins) or (is_part and learner.last_good is not None)

    def _good(self) -> None:
        self._recent.append(False)
        self._rollback.good()

    def _forget(self) -> None:
        """Forgets skipped batches, after a rollback."""
        self._recent.clear()
        self._suspects.clear()

    def _skip(
        self,
        learner: Learner,
        prepared: Prepared,
        refusal: Refusal,
        left_out: int,
        written: pathlib.Path | None,
    ) -> None:
        """Counts a skipped batch; rolls back to a checkpoint or ends the run after too many.

        Args:
          learner: that has refused it.
          prepared: the whole batch.
          refusal: of the unrolls left after removing culprits.
          left_out: number of culprits removed before.
          written: the file that the batch was written to.

        Raises:
          NotFiniteError: too many batches were skipped, also after a rollback.
        """
        self._recent.append(True)
        self._suspects.update(origin.actor for origin in prepared.origins)
        update, what = learner.counters.updates + 1, ", ".join(refusal.not_finite)
        _log.warning(
            "Update %d is not finite in %s, %s: the batch is skipped.%s",
            *(update, what),
            f"also without {left_out} culprits" if left_out else "and no unroll stands out",
            hint(written),
        )
        if not left_out and _is_of_step(refusal):
            self._culprits.forget(prepared)
        if sum(self._recent) < _MOST_SKIPS:
            return
        seen = (
            f"{sum(self._recent)} of the last {len(self._recent)} batches were not finite, the "
            f"last one in {what}, at update {update}; they held unrolls of "
            f"{names(self._suspects.elements())}"
        )
        advice = (
            "Lower optimiser.learning_rate, raise optimiser.epsilon, clip the rewards "
            "(objective.reward_clipping), or start with --empty-replay if there is a replay. "
            f"The batches are in {self._bad_updates.directory}."
        )
        self._rollback.insist(learner, seen, advice)
        self._forget()


def _is_of_step(refusal: Refusal) -> bool:
    """Returns whether loss and gradients are finite, and only what the optimiser makes is not.

    Each unroll is good by itself then, and the variables are: the gradients are too large.
    """
    return not any(what.startswith(("the loss", "the gradient")) for what in refusal.not_finite)


def _without(
    batch: Batch, weights: np.ndarray | None, culprits: Sequence[int], last_good: Batch | None
) -> tuple[Batch, np.ndarray]:
    """Returns the batch with culprits replaced by good unrolls, and weights that are 0 there."""
    is_good = np.ones(len(batch.is_replay), np.bool_)
    is_good[list(culprits)] = False
    kept = is_good.astype(np.float32)
    weights = kept if weights is None else kept * weights
    if not is_good.any():
        assert last_good is not None
        return last_good, weights
    which = np.where(is_good, np.arange(len(is_good)), np.flatnonzero(is_good)[0])
    return columns(batch, which), weights


def _account(prepared: Prepared, culprits: set[int], learned: bool) -> Prepared:
    """Marks fresh culprits, and all fresh unrolls if nothing was learned, as dropped."""
    batch = prepared.batch
    assert batch is not None
    # The first ones, in the order of the queue; frames and steps of demonstrations count too.
    fresh = len(batch.is_replay) if prepared.is_demonstrated else int((~batch.is_replay).sum())
    if not fresh:
        return prepared  # fresh unrolls were only added to replay
    otherwise = None if learned else SKIPPED_UPDATE
    reasons = [NOT_FINITE if i in culprits else otherwise for i in range(fresh)]
    lost = [i for i, reason in enumerate(reasons) if reason]
    sent = [] if prepared.is_demonstrated else lost
    step_type = batch.unroll.timestep.step_type
    return prepared._replace(
        provenance=list(_split(prepared.provenance, iter(reasons))),
        unrolls=prepared.unrolls - len(sent),
        frames=prepared.frames - int(batch.unroll.frames[lost].sum()),
        steps=prepared.steps - int((step_type[1:, lost] != StepType.FIRST).sum()),
        episodes=prepared.episodes - int((step_type[1:, sent] == StepType.LAST).sum()),
        fresh=prepared.fresh if learned else (),
    )


def _split(provenance: Sequence[Provenance], reasons: Iterator[str | None]) -> Iterator[Provenance]:
    """Splits what is accounted for where the reasons change."""
    for part in provenance:
        if part.dropped:
            yield part
            continue
        for reason, group in itertools.groupby(itertools.islice(reasons, part.unrolls)):
            yield part._replace(unrolls=len(list(group)), dropped=reason)
