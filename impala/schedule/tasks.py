"""The tasks of a run: their names, environments and order."""

import dataclasses
import json
from collections.abc import Sequence
from typing import NamedTuple

from impala.config.schema import (
    Config,
    EnvironmentConfig,
    LimitsConfig,
    TasksConfig,
    keyword_arguments,
)

_TURNS = 4  # of all actors, after which one that has not asked counts as gone
_MOST_ACTORS = 10_000  # that are remembered


class Task(NamedTuple):
    """An environment of a run."""

    name: str  # as the user wrote it: an id, possibly followed by keyword arguments
    environment: EnvironmentConfig


class Block(NamedTuple):
    """A part of a sequential run in which one task is trained."""

    task: int
    start: int  # environment frames of the run
    end: int


def make(environment: EnvironmentConfig, tasks: TasksConfig) -> list[Task]:
    """Returns the tasks of a run; one if `tasks` names none.

    Raises:
      ValueError: keyword arguments are not a JSON object, or a name occurs twice.
    """
    if not tasks.environments:
        return [Task(environment.id, environment)]
    made = [_task(name, environment) for name in tasks.environments]
    for name in tasks.environments:
        if tasks.environments.count(name) > 1:
            raise ValueError(f"tasks.environments names {name} twice: give each task once.")
    return made


def choose(config: Config, number: int) -> Task:
    """Returns a task of a run by its number, counted from 0.

    Raises:
      ValueError: there is no such task; names the existing ones.
    """
    of_run = make(config.environment, config.tasks)
    if not 0 <= number < len(of_run):
        names = ", ".join(f"{i} is {each.name}" for i, each in enumerate(of_run))
        raise ValueError(f"task is {number}; of this run's tasks {names}.")
    return of_run[number]


def _task(name: str, environment: EnvironmentConfig) -> Task:
    id, brace, rest = name.partition("{")
    kwargs = environment.kwargs
    if brace:
        what = f"tasks.environments has {name!r}: behind {id} there is"
        own = keyword_arguments(what, brace + rest)
        kwargs = json.dumps({**environment.keyword_arguments(), **own})
    return Task(name, dataclasses.replace(environment, id=id, kwargs=kwargs))


def frames_per_step(task: Task, limits: LimitsConfig) -> int:
    """Returns the largest number of environment frames in one agent step of a task."""
    environment = task.environment
    if environment.id.startswith("ALE/"):
        return max(environment.atari.frame_skip, environment.atari.frame_skip_most)
    return limits.frames_per_step * environment.repeat.most


def total_frames(config: Config) -> int:
    """Returns the environment frames after which a run ends."""
    return sum(config.tasks.frames) * config.tasks.cycles or config.total_frames


def progress(config: Config, frames: int, episodes: int) -> float:
    """Returns the share of a run that is done, 0 to 1: of its frames or, if more, its episodes."""
    shares = [frames / total_frames(config)]
    if config.total_episodes:
        shares.append(episodes / config.total_episodes)
    return min(1.0, max(shares))


def evaluation_frames(config: Config) -> int:
    """Returns the environment frames of training between two evaluations.

    By default a fiftieth of the run's frames, also if `total_episodes` ends it earlier; all of
    them if evaluations are counted in seconds only.
    """
    parts = 1 if config.evaluator.every_seconds else 50
    return config.evaluator.every_frames or max(1, total_frames(config) // parts)


def blocks(config: Config) -> list[Block]:
    """Returns the blocks of a run whose tasks are sequential; one block for a single task.

    Raises:
      ValueError: `tasks.frames` does not have a number for each task, or nothing is to be trained.
    """
    num_tasks = max(1, len(config.tasks.environments))
    end = 0
    made = []
    for _ in range(config.tasks.cycles):
        for task, frames in enumerate(_frames(config, num_tasks)):
            start, end = end, end + frames
            made.append(Block(task, start, end))
    # The last block gets the remainder.
    made[-1] = made[-1]._replace(end=total_frames(config))
    return made


def _frames(config: Config, num_tasks: int) -> Sequence[int]:
    """Returns the environment frames of each task in a cycle."""
    frames = config.tasks.frames
    if not frames:
        turns = num_tasks * config.tasks.cycles
        if config.total_frames < turns:
            raise ValueError(
                f"total_frames is {config.total_frames}, too few for {turns} turns: raise it."
            )
        return [config.total_frames // turns] * num_tasks
    if len(frames) != num_tasks:
        raise ValueError(
            f"tasks.frames has {len(frames)} numbers for {num_tasks} tasks: give one for each, 0 "
            "for a task that is only evaluated, or none at all."
        )
    if not any(frames):
        raise ValueError(
            f"tasks.frames is {', '.join(map(str, frames))}: at least one task must be trained."
        )
    return frames


class Schedule:
    """Decides which task an actor plays next. Not thread-safe."""

    def __init__(self, config: Config):
        """Starts with no frames played.

        Raises:
          ValueError: as `blocks`.
        """
        self._blocks = blocks(config)
        self._is_simultaneous = config.tasks.order == "simultaneous"
        self.num_tasks = max(1, len(config.tasks.environments))
        self._shares = _frames(config, self.num_tasks)
        self._played = [0] * self.num_tasks  # environment frames
        self._size = 1  # frames that came last; before that any number will do
        self._count = 0  # of tasks named to actors
        # Actor -> the task that it was named last, and the count of then; the oldest first.
        self._named: dict[str, tuple[int, int]] = {}
        self._playing = [0] * self.num_tasks  # actors whose last one it is

    def played(self, task: int, frames: int) -> None:
        """Counts frames of a task that were received."""
        self._played[task] += frames
        self._size = frames

    def next(self, frames: int, actor: str = "") -> int:
        """Returns the task to play after `frames` environment frames of the run.

        Sequential tasks: that of the current block. Simultaneous: the one furthest behind its
        share, where what other actors are playing counts as played: otherwise all would play the
        same one until it has overtaken the others.

        Args:
          frames: of the run.
          actor: its name, if one is told to play the task; "": the answer is not remembered.
        """
        if self._is_simultaneous:
            self._forget(actor)
            trained = [task for task, share in enumerate(self._shares) if share]
            task = min(
                trained,
                key=lambda task: (
                    (self._played[task] + self._size * self._playing[task]) / self._shares[task]
                ),
            )
            if actor:
                self._count += 1
                self._named[actor] = task, self._count
                self._playing[task] += 1
            return task
        for block in self._blocks:
            if frames < block.end:
                return block.task
        return next(block.task for block in reversed(self._blocks) if block.end > block.start)

    def _forget(self, actor: str) -> None:
        """Forgets an actor, and those that have not asked for long: they are gone."""
        if actor in self._named:
            self._drop(actor)
        while self._named:
            oldest, (_, count) = next(iter(self._named.items()))
            asked_recently = count >= self._count - _TURNS * len(self._named)
            if asked_recently and len(self._named) <= _MOST_ACTORS:
                return
            self._drop(oldest)

    def _drop(self, actor: str) -> None:
        task, _ = self._named.pop(actor)
        self._playing[task] -= 1
