"""A run's teachers: reads their agents, and keeps copies from which the run resumes."""

import hashlib
import pathlib
from collections.abc import Sequence

from impala.algorithms import teachers
from impala.algorithms.teachers import Teacher
from impala.config.schema import Config
from impala.environments.spaces import Spaces
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint
from impala.parts import build, sections
from impala.play.player import Player
from impala.schedule.tasks import Task


def read(config: Config, resumes: pathlib.Path | None = None) -> list[Checkpoint]:
    """Returns the checkpoints of a run's teachers.

    Args:
      config: of the run.
      resumes: log directory of a run that resumes, which has copies; None: it is new.

    Raises:
      CheckpointError: a log directory has no checkpoint.
    """
    found = []
    for name in config.teacher.logdirs:
        source = pathlib.Path(name)
        if resumes is not None and checkpoint.exists(copy := _copy(resumes, name)):
            source = copy
        found.append(checkpoint.load(source))
    return found


def keep(config: Config, logdir: pathlib.Path, found: Sequence[Checkpoint]) -> None:
    """Copies the agents of teachers into a run's log directory, which then needs no other."""
    for name, saved in zip(config.teacher.logdirs, found, strict=True):
        if not checkpoint.exists(copy := _copy(logdir, name)):
            agent = {n: x for n, x in saved.variables.items() if n.startswith("agent/")}
            checkpoint.save(copy, saved._replace(variables=agent, accounts={}), keep=1)


def digest(found: Sequence[Checkpoint]) -> str:
    """Returns a digest of what teachers have learned."""
    hashed = hashlib.sha256()
    for saved in found:
        for value in saved.agent_values:
            hashed.update(value.tobytes())
    return hashed.hexdigest()


def make(
    config: Config, found: Sequence[Checkpoint], played: Sequence[Task], spaces: Spaces
) -> list[Teacher]:
    """Returns the teachers of a run.

    Args:
      config: of the run.
      found: their checkpoints.
      played: the run's tasks.
      spaces: common to the tasks.

    Raises:
      ValueError: one of them cannot teach this run; says why.
    """
    if len(found) > 1 and len(found) != len(played):
        raise ValueError(
            f"teacher.logdirs has {len(found)} teachers for {len(played)} tasks: give one for "
            "each, in the order of tasks.environments, or one for all."
        )
    if len(found) > 1 and not config.agent.popart:
        raise ValueError(
            f"teacher.logdirs has {len(found)} teachers: set agent.popart, by which the learner "
            "knows the task of each step."
        )
    return [_teacher(config, number, saved, played, spaces) for number, saved in enumerate(found)]


def _teacher(
    config: Config, number: int, saved: Checkpoint, played: Sequence[Task], spaces: Spaces
) -> Teacher:
    name, settings = config.teacher.logdirs[number], saved.config.agent
    player = Player(saved, allow=sections.allowed(config))
    if settings.policy != "stochastic":
        raise ValueError(
            f"The teacher {name} has Q-values and no policy that can be imitated: choose one that "
            "was trained with impala, actor_critic, impact or sac."
        )
    if player.agent.recurrent_state(player.agent.initial_state(1)):
        raise ValueError(
            f"The teacher {name} has the core {settings.core}, whose state is not in this run's "
            "unrolls: choose a feed-forward one (frames may be stacked)."
        )
    if settings.frame_stack > config.agent.frame_stack:
        raise ValueError(
            f"The teacher {name} sees {settings.frame_stack} frames at once, this run's agent "
            f"{config.agent.frame_stack}: raise agent.frame_stack."
        )
    if config.teacher.value_cost and not player.has_value:
        raise ValueError(
            f"The teacher {name} was trained with {saved.algorithm}, which has no baseline: set "
            "teacher.value_cost to 0."
        )
    possible = [spaces]
    if len(config.teacher.logdirs) > 1:
        possible.insert(0, build.spaces(played[number : number + 1], sections.found(config)))
    teachers.check(name, player.spaces, *possible)
    return Teacher(player.agent, player.spaces, spaces)


def _copy(logdir: pathlib.Path, name: str) -> pathlib.Path:
    return logdir / "teachers" / hashlib.sha256(name.encode()).hexdigest()[:16]
