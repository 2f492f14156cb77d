"""Checkpoints of a learner: resumes a run from the newest one, and saves at intervals."""

import logging
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from impala.config import values
from impala.config.schema import Config
from impala.environments.spaces import Spaces, leaves
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, CheckpointError, Counters
from learner.data.replay import Replay
from learner.fleet.accounts import Accounts
from learner.update import named_variables
from learner.update.learner import Learner
from learner.update.peers import Peers
from learner.update.phases import Phases
from learner.update.training import Iteration

_log = logging.getLogger(__name__)

_ALONE = Peers()
_FIRST_SECONDS = 30.0
_FITS = 0.5  # share of an agent's weights from another one, below which that is a warning


class Resumed(NamedTuple):
    """The state from which a run resumes."""

    learner: Learner
    replay_added: int = 0  # unrolls ever added to replay, according to the checkpoint
    is_new: bool = False  # the run begins


def resume(
    logdir: pathlib.Path,
    phases: Phases,
    accounts: Accounts,
    initial: Checkpoint | None,
    peers: Peers = _ALONE,
) -> Resumed:
    """Makes the learner of a run, restored from the newest checkpoint if there is one.

    All peers go on with the variables and counters of the first one's checkpoint, each with the
    accounts of its own of then.

    Args:
      logdir: the run's log directory.
      phases: make the learner.
      accounts: restored if there is a checkpoint.
      initial: of another run; a new run takes from its agent what fits.
      peers: those that learn together.

    Raises:
      CheckpointError: no checkpoint can be read or fits the run, or nothing of `initial` fits; or
        the run has finished and other settings would learn nothing.
    """
    checkpoint.remove_leftovers(logdir)
    saved = None
    if peers.is_first and checkpoint.exists(logdir):
        saved = checkpoint.load(logdir)
    counters = Counters(*peers.of_first(Counters() if saved is None else saved.counters))
    if not peers.is_first:
        saved = _at_most(counters, logdir)
    if saved is None and initial is not None:
        settings = phases.config.agent
        share, lines = named_variables.initialise(phases.agent.variables, initial, settings)
        seen = [] if initial.spaces is None else leaves(initial.spaces[0])
        sees_images = any(len(part.shape or ()) > 1 for _, part in seen)
        for name in ("normalise_observations", *["standardise_images"] * sees_images):
            before, now = getattr(initial.config.agent, name), getattr(settings, name)
            if before != now:
                _log.warning(
                    "agent.%s was %s for the agent that this run starts from, and is %s: its "
                    "network sees other numbers than it was trained on.",
                    *(name, before, now),
                )
        for line in lines:
            _log.log(logging.INFO if share >= _FITS else logging.WARNING, "%s", line)
    if saved is not None and saved.algorithm != phases.algorithm_at(counters):
        # For what the algorithm copies of the agent.
        named_variables.initialise(phases.agent.variables, saved, phases.config.agent)
    learner = phases.learner_at(counters)
    if saved is not None:
        learner.restore(saved)
    peers.share(learner)
    if saved is None:
        return Resumed(learner, is_new=counters == Counters())
    try:
        accounts.restore(saved.accounts)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The accounts in the checkpoint of {logdir} make no sense ({error!r}). "
            "Another version of impala may have written it; start over with --fresh."
        ) from error
    _log.info("Resumed %s at %s.", logdir, counters)
    kind = type(phases.config)
    before = {**values.to_dict(saved.config), **saved.own}
    for change in values.differences(before, values.to_dict(phases.config)):
        if phases.are_over(counters) and not values.is_operational(kind, change.partition(":")[0]):
            raise CheckpointError(
                f"{logdir} holds a finished run, which would learn nothing with the changed "
                f"{change}. Raise {_length(phases.config, counters)}, start over with --fresh, or "
                "name a new --logdir."
            )
        _log.info("Changed since that checkpoint: %s.", change)
    return Resumed(learner, saved.replay_added)


def _length(config: Config, counters: Counters) -> str:
    """Returns the flags that say how long a run is that has ended."""
    if 0 < config.total_episodes <= counters.episodes:
        return "--total-episodes"
    return "--tasks.frames or --tasks.cycles" if config.tasks.frames else "--total-frames"


def _at_most(counters: Counters, logdir: pathlib.Path) -> Checkpoint | None:
    """Returns the newest checkpoint that is not of a later state; None if there is none."""
    try:
        saved = checkpoint.load(
            logdir,
            lambda saved: saved.counters.updates <= counters.updates,
            unfit="the first peer goes on from an earlier one",
        )
    except CheckpointError as error:
        if counters.updates or checkpoint.exists(logdir):
            _log.warning(
                "The first peer goes on at %s, this one begins its accounts anew. %s",
                *(counters, error),
            )
        return None
    if saved.counters.updates != counters.updates:
        _log.warning(
            "The first peer goes on at update %d, the accounts of this one are of update %d.",
            *(counters.updates, saved.counters.updates),
        )
    # They would be the newest and push the others out, before the first peer has one again.
    checkpoint.delete_later(logdir, "checkpoints", counters.updates)
    return saved


def of_agent(learner: Learner, spaces: Spaces, incarnation: int = 0) -> Checkpoint:
    """Returns a checkpoint of a learner's agent alone, from which no run can resume.

    Args:
      learner: has the agent.
      spaces: those that it was made for.
      incarnation: of the learner, for a snapshot.
    """
    return Checkpoint(
        learner.config,
        learner.counters,
        named_variables.of_agent(learner.variables()),
        accounts={},
        algorithm=learner.trained_by,
        spaces=spaces,
        incarnation=incarnation,
    )


class Checkpoints:
    """Saves replay, then a checkpoint, which so counts no unroll that replay may have lost."""

    def __init__(
        self,
        logdir: pathlib.Path,
        resumed: Resumed,
        spaces: Spaces,
        accounts: Accounts,
        replay: Replay | None,
        clock: Callable[[], float] | None = None,
        peers: Peers = _ALONE,
    ):
        """Starts the time to the next checkpoint.

        Args:
          logdir: the run's log directory.
          resumed: the state from which the run resumed.
          spaces: those that the agent was made for, saved with the variables.
          accounts: saved with the variables.
          replay: committed before each checkpoint. Without one, the resumed count is kept.
          clock: monotonic, in seconds; None: that of the peers.
          peers: save at the same time; each of them has what the first one's checkpoint needs.
        """
        self._peers = peers
        self._logdir = logdir
        self._spaces = spaces
        self._accounts = accounts
        self._replay = replay
        self._replay_added = resumed.replay_added
        self._clock = peers.clock if clock is None else clock
        self._seconds = resumed.learner.config.learner.checkpoint_seconds
        self._next = self._clock() + self._seconds  # when the next one is due
        self._unsaved_since: float | None = None  # when the first update was made that is in none
        self._saved = resumed.learner.counters

    @property
    def age_seconds(self) -> float:
        """Returns the seconds since the first update that is in no checkpoint; 0.0 without one."""
        return 0.0 if self._unsaved_since is None else self._clock() - self._unsaved_since

    def take(self, iteration: Iteration) -> None:
        """Saves if it is due, also without new data; but not the same state twice.

        The first checkpoint of a run is due at most 30 s after its first update.

        Raises:
          StorageError: the checkpoint or the replay cannot be written.
        """
        if iteration.update is not None and self._unsaved_since is None:
            self._unsaved_since = self._clock()
            if not self._saved.updates:
                self._next = min(self._next, self._unsaved_since + _FIRST_SECONDS)
        is_due = self._clock() >= self._next and iteration.learner.counters != self._saved
        # A checkpoint holds the variables of its own phase, so a new phase begins with one.
        if (iteration.begins_phase or is_due) and not iteration.in_doubt:
            self.save(iteration.learner)

    def save(self, learner: Learner) -> None:
        """Saves now, together with all peers.

        Raises:
          StorageError: the checkpoint or the replay cannot be written.
          NotFiniteError: a variable is not finite.
        """
        if self._replay is not None:
            self._replay_added = self._replay.commit()
        saved = Checkpoint(
            learner.config,
            learner.counters,
            learner.variables(),
            self._accounts.state(),
            self._replay_added,
            learner.phase.algorithm,
            self._spaces,
        )
        keep = learner.config.learner.checkpoints_kept
        with self._peers.first_last():
            # Others keep the one before: the first may end before it has written this one.
            keep = keep if self._peers.is_first else max(2, keep)
            path = checkpoint.save(self._logdir, saved, keep)
        self._unsaved_since = None
        self._next = self._clock() + self._seconds
        self._saved = saved.counters
        _log.info("Checkpoint %s at %s frames.", path, f"{saved.counters.frames:,}")
