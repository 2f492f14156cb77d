"""Keeps checkpoints besides the newest: the best agent, and milestones of the run."""

import collections
import json
import logging
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from impala.config.schema import LearnerConfig
from impala.environments.spaces import Spaces
from impala.logdir import atomic, checkpoint, json_lines
from impala.logdir.checkpoint import CheckpointError, Counters
from impala.logdir.directory import StorageError
from impala.schedule import tasks
from learner.evaluation.snapshots import Evaluated
from learner.update.checkpoints import Resumed, of_agent
from learner.update.learner import Learner
from learner.update.training import Iteration

_log = logging.getLogger(__name__)

_EPISODES = 100  # of training, whose mean return substitutes for an evaluation
_BY = ("rewards", "training", "evaluation")  # from the least to the most telling
_LOOKS = 50  # checks of the training returns over a run: the default number of evaluations


class Score(NamedTuple):
    """The mean return for which an agent was kept as the best.

    By rewards, it is the mean reward of a step in training, until 100 episodes have ended.
    """

    mean: float
    by: Literal["evaluation", "training", "rewards"]
    frames: int  # of training when the agent was kept
    tasks: Any  # the tasks played, as data for JSON

    def is_beaten_by(self, other: "Score") -> bool:
        """Returns whether another score is better, or of other tasks and so not comparable.

        An evaluation always beats a mean return in training, and this one a mean reward.
        """
        if self.tasks != other.tasks:
            return True
        if self.by == other.by:
            return other.mean > self.mean
        return _BY.index(other.by) > _BY.index(self.by)

    @classmethod
    def read(cls, path: pathlib.Path) -> Self | None:
        """Returns the score that `write` has written; None if there is no valid one."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            score = cls(data["return"], data["by"], data["frames"], data["tasks"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        is_one = json_lines.is_number(score.mean) and score.by in _BY
        return score if is_one else None

    def write(self, path: pathlib.Path) -> None:
        """Writes the score as JSON.

        Raises:
          StorageError: it cannot be written.
        """
        data = {
            "return": self.mean,
            "by": self.by,
            "frames": self.frames,
            "tasks": self.tasks,
        }
        try:
            path.parent.mkdir(exist_ok=True)
            atomic.write(path, json.dumps(data).encode())
        except OSError as error:
            raise StorageError(f"{path} cannot be written ({error.strerror}).") from error


class BestAndMilestones:
    """Consumes the training loop, and keeps the best agent and milestones.

    The best agent is the snapshot with the highest mean return over all tasks. Until one has been
    evaluated, it is the current agent when the mean return of the last 100 training episodes is the
    highest, in runs of one task; or, until so many have ended, the mean reward of a step since the
    last look.
    """

    def __init__(
        self,
        logdir: pathlib.Path,
        resumed: Resumed,
        spaces: Spaces,
        evaluated: Callable[[], Sequence[Evaluated]],
        settings: LearnerConfig,
        *,
        keeps_best: bool = True,
    ):
        """Continues from what the run has kept before. Later milestones are deleted.

        Args:
          logdir: the run's log directory.
          resumed: the state that the run resumed from.
          spaces: those that the agent was made for, saved with it.
          evaluated: returns the snapshots evaluated since the last call, to be kept or deleted.
          settings: what to keep.
          keeps_best: whether to keep the best agent, too.
        """
        config, counters = resumed.learner.config, resumed.learner.counters
        self._logdir = logdir
        self._spaces = spaces
        self._evaluated = evaluated
        self._keeps_best = keeps_best
        self._milestones = settings.milestones
        self._config = config
        played = [task.environment for task in tasks.make(config.environment, config.tasks)]
        self._tasks = [[each.id, each.keyword_arguments()] for each in played]
        self._has_one_task = len(config.tasks.environments) < 2
        self._score_file = logdir / "best" / "score.json"
        self._best = self._of_kept()
        checkpoint.delete_later(logdir, "milestones", counters.updates)  # they are passed once more
        self._period = 3600.0 * settings.milestone_hours or math.inf
        self._passed = self._milestones_at(counters)
        self._look = self._share(counters, _LOOKS)
        self._returns: collections.deque[float] = collections.deque(maxlen=_EPISODES)
        self._rewards, self._steps = 0.0, 0  # their sum since the last look, and in how many steps

    def take(self, iteration: Iteration) -> None:
        """Keeps the agent if it is the best one so far, or if a milestone is passed.

        Raises:
          StorageError: it cannot be written.
        """
        for arrival in iteration.prepared.arrivals if iteration.prepared is not None else ():
            self._returns.extend(episode.episode_return for episode in arrival.episodes)
            rewards, steps = arrival.rewards
            self._rewards, self._steps = self._rewards + rewards, self._steps + steps
        self.keep_evaluated()
        if not iteration.in_doubt:
            self.consider(iteration.learner)

    def keep_evaluated(self) -> None:
        """Keeps the best of the newly evaluated snapshots, and deletes the others.

        Raises:
          StorageError: one cannot be kept.
        """
        for snapshot in self._evaluated():
            score = Score(snapshot.mean, "evaluation", snapshot.frames, self._tasks)
            if self._is_best(score):
                # First, as it may fail: the snapshot is still there then, for the next learner.
                self._note(score)
                self._log(score, checkpoint.make_best(snapshot.path, self._logdir))
            else:
                checkpoint.delete(snapshot.path)

    def consider(self, learner: Learner) -> None:
        """Keeps a learner's agent as a milestone, or as the best in training.

        Raises:
          StorageError: it cannot be written.
        """
        passed = self._milestones_at(learner.counters)
        if passed != self._passed:
            self._passed = passed
            path = self._save(learner, None, "milestones")
            _log.info("Milestone at %s frames: %s.", f"{learner.counters.frames:,}", path)
        score = self._score(learner.counters)
        if score is not None and self._is_best(score):
            path = self._save(learner, 1, "best")
            self._note(score)
            self._log(score, path)

    def _is_best(self, score: Score) -> bool:
        return self._keeps_best and (self._best is None or self._best.is_beaten_by(score))

    def _of_kept(self) -> Score | None:
        """Returns the score of the agent in best/; None if another one's was written last."""
        score = Score.read(self._score_file)
        try:
            frames = checkpoint.choose(self._logdir, "best").counters.frames
        except CheckpointError:
            return None
        return score if score is not None and score.frames == frames else None

    def _note(self, score: Score) -> None:
        score.write(self._score_file)
        self._best = score

    def _log(self, score: Score, path: pathlib.Path) -> None:
        is_return = score.by != "rewards"
        what = f"return in {score.by}" if is_return else "reward per step"
        _log.info(
            "Best %s so far: %.*f. Kept as %s.", what, 2 if is_return else 4, score.mean, path
        )

    def _score(self, counters: Counters) -> Score | None:
        """Returns the agent's score in training if there is a new one."""
        look = self._share(counters, _LOOKS)
        if look == self._look:
            return None
        self._look = look
        rewards, steps = self._rewards, self._steps
        self._rewards, self._steps = 0.0, 0
        if not self._has_one_task:
            return None
        if len(self._returns) == _EPISODES:
            mean = float(np.mean(self._returns))
            return Score(mean, "training", counters.frames, self._tasks)
        if steps:
            return Score(rewards / steps, "rewards", counters.frames, self._tasks)
        return None

    def _milestones_at(self, counters: Counters) -> tuple[int, float]:
        """Returns how many milestones of the run's progress and of its time are passed."""
        return self._share(counters, self._milestones), counters.seconds // self._period

    def _share(self, counters: Counters, parts: int) -> int:
        """Returns how many of `parts` equal parts of the run are done."""
        return int(tasks.progress(self._config, counters.frames, counters.episodes) * parts)

    def _save(
        self, learner: Learner, keep: int | None, kind: Literal["milestones", "best"]
    ) -> pathlib.Path:
        saved = of_agent(learner, self._spaces)
        return checkpoint.save(self._logdir, saved, keep, kind)
