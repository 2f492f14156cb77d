"""Builds a run's plan from its configuration: tasks, spaces, phases and the spec of an unroll."""

import contextlib
import logging
from collections.abc import Sequence
from typing import NamedTuple

from impala.acting import CompiledStep
from impala.agents.agent import Agent
from impala.agents.observation import has_channels_first
from impala.config import values
from impala.config.schema import Config
from impala.environments.spaces import Spaces, main_space
from impala.logdir.checkpoint import Checkpoint
from impala.parts import build, checks, sections
from impala.parts.components import ALGORITHM, OPTIMISER
from impala.play import teachers
from impala.runtime.hang import making_environments
from impala.schedule import tasks
from impala.schedule.phases import words
from impala.schedule.tasks import Schedule, Task
from impala.types import Unroll
from learner.update import optimisers, output_judge
from learner.update.phases import Phases
from learner.update.replicas import Replicas

_ALONE = Replicas()

_log = logging.getLogger(__name__)


class Plan(NamedTuple):
    """The consistent objects that a configuration describes."""

    played: Sequence[Task]
    schedule: Schedule  # when each task is played
    spaces: Spaces  # common to all tasks
    phases: Phases  # the algorithms in order, and the agent
    unroll_spec: Unroll  # a nest of ArraySpec of one environment

    @property
    def names(self) -> list[str]:
        """Returns the names of the tasks."""
        return [task.name for task in self.played]


def acting_step(config: Config, spaces: Spaces) -> CompiledStep:
    """Returns what a run's agent does in a step, as a function of its parameters.

    Args:
      config: the run's configuration.
      spaces: common to its tasks.
    """
    agent = build.agent(config.agent, *spaces, own=sections.found(config))
    return CompiledStep(agent, spaces)


def make_plan(
    config: Config,
    replicas: Replicas = _ALONE,
    found: Sequence[Checkpoint] | None = None,
    may_exit: bool = False,
) -> Plan:
    """Returns the plan of a run. Makes the agent, and every environment once.

    Args:
      config: the run's configuration.
      replicas: the devices that learn.
      found: checkpoints of teachers; None: they are read.
      may_exit: end the process if an environment hangs when it is made or closed, which no signal
        could.

    Raises:
      OptionError: there is no such environment, or the agent or an algorithm does not fit it.
    """
    try:
        played = tasks.make(config.environment, config.tasks)
        schedule = Schedule(config)
        own = sections.found(config)
        seconds = config.actor.hang_seconds * len(played)
        with making_environments(seconds) if may_exit else contextlib.nullcontext():
            spaces = build.spaces(played, own, numbered=config.agent.popart)
        with replicas.scope():
            agent = build.agent(config.agent, *spaces, seed=config.seed, own=own)
            found = teachers.read(config) if found is None else found
            taught_by = teachers.make(config, found, played, spaces)
        phases = Phases(config, agent, replicas, taught_by)
        unroll_spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
        with replicas.scope():
            _check_own(config, agent, unroll_spec)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    if has_channels_first(seen := main_space(spaces[0])):
        _log.info("Images of %s are taken to have their channels first.", list(seen.shape))
    return Plan(played, schedule, spaces, phases, unroll_spec)


def _check_own(config: Config, agent: Agent, unroll_spec: Unroll) -> None:
    """Raises ComponentError if a custom algorithm or optimiser is not as it is used."""
    for name in dict.fromkeys(word.algorithm for word in words(config)):
        if name not in ALGORITHM.built_in:
            algorithm = build.algorithm(name, config, agent)
            checks.check_loss(name, algorithm, output_judge.blank(unroll_spec))
    if (name := config.optimiser.name) not in OPTIMISER.built_in:
        variables = agent.trainable_variables
        optimiser = optimisers.make(config.optimiser, variables, sections.found(config))
        checks.check_optimiser(name, optimiser.apply, variables)
