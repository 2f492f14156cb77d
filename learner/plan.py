"""What a run's configuration comes to: what is played, by which network, and what it learns."""

from collections.abc import Sequence
from typing import NamedTuple

from impala import build
from impala.config import parts, values
from impala.config.schema import Config
from impala.environments.spaces import Spaces
from impala.schedule import tasks
from impala.schedule.tasks import Schedule, Task
from impala.types import Unroll
from learner.update.phases import Phases


class Plan(NamedTuple):
    """A configuration that goes together, and what it stands for."""

    played: Sequence[Task]
    schedule: Schedule  # which of them is played when
    spaces: Spaces  # through which all of them are played
    phases: Phases  # what learns when, and for which agent
    unroll_spec: Unroll  # a nest of ArraySpec of one environment

    @property
    def names(self) -> list[str]:
        """Of the tasks."""
        return [task.name for task in self.played]


def plan_of(config: Config) -> Plan:
    """Returns what is played and learned. Makes the agent, and every environment once.

    Raises:
      OptionError: there is no such environment, or the agent or an algorithm does not go with it.
    """
    try:
        played = tasks.make(config.environment, config.tasks)
        schedule = Schedule(config)
        own = parts.found(config)
        spaces = build.spaces(played, own)
        agent = build.agent(config.agent, *spaces, seed=config.seed, own=own)
        phases = Phases(config, agent)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    unroll_spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
    return Plan(played, schedule, spaces, phases, unroll_spec)
