"""A run's teachers: reads their agents, and keeps copies from which the run resumes."""

import hashlib
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

from impala.algorithms import teachers
from impala.algorithms.teachers import Teacher
from impala.config import values
from impala.config.schema import Config
from impala.environments.spaces import Spaces, num_tasks
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint
from impala.parts import build, sections
from impala.play.player import has_value
from impala.schedule import tasks
from impala.schedule.tasks import Task

_log = logging.getLogger(__name__)


def read(config: Config, resumes: pathlib.Path | None = None) -> list[Checkpoint]:
    """Returns the checkpoints of a run's teachers.

    Args:
      config: of the run.
      resumes: log directory of a run that resumes, which has copies; None: it is new.

    Raises:
      ValueError: a log directory has no checkpoint, or its network has parts of its own that the
        run does not name.
    """
    found = []
    for name in config.teacher.logdirs:
        source = pathlib.Path(name)
        if resumes is not None and checkpoint.exists(copy := _copy(resumes, name)):
            source = copy
        found.append(_of_network(name, checkpoint.load(source), config))
    return found


def _of_network(name: str, saved: Checkpoint, config: Config) -> Checkpoint:
    """Returns a checkpoint of the agent alone."""
    allow = sections.allowed(config)
    try:
        whole = sections.restore(saved.config, saved.own, saved.needs, allow, sections.OF_AGENT)
    except ValueError as error:
        network = saved.config.agent
        raise ValueError(
            f"The teacher {name} has a network with parts of its own, {network.torso} and "
            f"{network.core}. Only those that this run's agent has, or that are installed as "
            "entry points of the group impala.components, can be made."
        ) from error
    agent = {n: x for n, x in saved.variables.items() if n.startswith("agent/")}
    return saved._replace(config=whole, variables=agent, accounts={})


def keep(config: Config, logdir: pathlib.Path, found: Sequence[Checkpoint]) -> None:
    """Copies the agents of teachers into a run's log directory, which then needs no other."""
    for name, saved in zip(config.teacher.logdirs, found, strict=True):
        if not checkpoint.exists(copy := _copy(logdir, name)):
            checkpoint.save(copy, saved, keep=1)


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
    return [_teacher(config, number, saved, played, spaces) for number, saved in enumerate(found)]


def _teacher(
    config: Config, number: int, saved: Checkpoint, played: Sequence[Task], spaces: Spaces
) -> Teacher:
    name, settings, own = config.teacher.logdirs[number], saved.config.agent, saved.spaces
    assert own is not None
    agent = build.agent(settings, *own, own=sections.found(saved.config))
    if settings.policy != "stochastic":
        raise ValueError(
            f"The teacher {name} has Q-values and no policy that can be imitated: choose one that "
            "was trained with impala, actor_critic, impact or sac."
        )
    if agent.recurrent_state(agent.initial_state(1)):
        raise ValueError(
            f"The teacher {name} has the core {settings.core}, whose state is not in this run's "
            "unrolls: choose a feed-forward one (frames may be stacked)."
        )
    if settings.frame_stack > config.agent.frame_stack:
        raise ValueError(
            f"The teacher {name} sees {settings.frame_stack} frames at once, this run's agent "
            f"{config.agent.frame_stack}: raise agent.frame_stack."
        )
    possible = [spaces]
    if len(config.teacher.logdirs) > 1:
        possible.insert(0, build.spaces(played[number : number + 1], sections.found(config)))
    teachers.check(name, own, *possible)
    if config.teacher.value_cost and (why := _without_value(saved, config)):
        raise ValueError(f"The teacher {name} {why}: set teacher.value_cost to 0.")
    frames = saved.counters.frames
    _log.info("%s teaches, after %s frames of %s.", name, f"{frames:,}", saved.algorithm)
    for variable, value in zip(agent.variables, saved.agent_values, strict=True):
        variable.assign(value)
    return Teacher(agent, own, spaces)


def _without_value(saved: Checkpoint, config: Config) -> str:
    """Returns why the values of a teacher mean nothing to a run; "" if they do."""
    assert saved.spaces is not None
    if not has_value(saved.algorithm):
        return f"was trained with {saved.algorithm}, which has no baseline"
    if num_tasks(saved.spaces[0]) > 1:
        return "was trained with agent.popart on several tasks, each with values of its own"
    theirs, ours = (values.flatten(_of_return(each)) for each in (saved.config, config))
    both = [(name, x, ours[name]) for name, x in theirs.items() if name in ours]
    differ = [f"{name} {x}, here {y}" for name, x, y in both if x != y]
    return f"has values of another return ({'; '.join(differ)})" if differ else ""


def _of_return(config: Config) -> dict[str, Any]:
    """Returns the settings that decide what a return is."""
    atari, repeat = config.environment.atari, config.environment.repeat
    names = ("life_loss_ends", "frame_skip", "frame_skip_most")
    played = tasks.make(config.environment, config.tasks)
    is_atari = any(task.environment.id.startswith("ALE/") for task in played)
    return {
        "objective": values.to_dict(config.objective),
        "environment.repeat": values.to_dict(repeat),
        "environment.atari": {name: getattr(atari, name) for name in names if is_atari},
    }


def _copy(logdir: pathlib.Path, name: str) -> pathlib.Path:
    return logdir / "teachers" / hashlib.sha256(name.encode()).hexdigest()[:16]
