"""The phases of a run: makes the learner of each, and computes the run's progress."""

import collections
import logging
from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from impala.agents.agent import Agent
from impala.algorithms.teachers import Teacher
from impala.config.schema import Config
from impala.logdir.checkpoint import Counters
from impala.parts import build
from impala.schedule import phases, tasks
from learner.update.learner import Learner
from learner.update.replicas import Replicas

_log = logging.getLogger(__name__)
_ALONE = Replicas()


class Phases:
    """The algorithms that learn one after another for the same agent. Only `agent` has state."""

    def __init__(
        self,
        config: Config,
        agent: Agent,
        replicas: Replicas = _ALONE,
        teachers: Sequence[Teacher] = (),
    ):
        """Makes every algorithm once, so that errors appear at the start.

        Args:
          config: the run's configuration.
          agent: shared by all phases.
          replicas: the devices that learn, which have the agent's variables.
          teachers: of all phases.

        Raises:
          ValueError: an algorithm is unknown or does not fit the agent, or the frames of `phases`
            do not add up.
        """
        self.config = config
        self.agent = agent
        self._replicas = replicas
        self.teachers = teachers
        self._phases = phases.make(config)
        with replicas.scope():
            first, *_ = [
                build.algorithm(phase.algorithm, config, agent, teachers) for phase in self._phases
            ]
        self.begin_with_demonstrations: bool = first.demands.from_demonstrations
        """Whether the first algorithm learns from demonstrations."""

    def algorithm_at(self, counters: Counters) -> str:
        """Returns the name of the algorithm of the phase at these counters."""
        return phases.current(self._phases, counters.frames).algorithm

    def learner_at(self, counters: Counters) -> Learner:
        """Returns a learner for the phase at these counters, with a new optimiser.

        What its algorithm copies from the agent, such as a target network, is as the agent is now.
        """
        phase = phases.current(self._phases, counters.frames)
        with self._replicas.scope():
            algorithm = build.algorithm(phase.algorithm, self.config, self.agent, self.teachers)
            learner = Learner(algorithm, self.config, phase, counters, self._replicas)
        learned = {id(variable) for variable in algorithm.learned_variables}
        left = [v for v in self.agent.trainable_variables if id(v) not in learned]
        owners = self.agent.name, algorithm.name
        _log.info(
            "%s trains %s%s.",
            *(phase.algorithm, _parameters(algorithm.learned_variables, owners)),
            f", and leaves {_parameters(left, owners)} as they are" if left else "",
        )
        return learner

    def number(self, counters: Counters) -> int:
        """Returns which phase it is, counted from 1."""
        return 1 + self._phases.index(phases.current(self._phases, counters.frames))

    def title(self, number: int) -> str:
        """Returns which phase this is and what learns in it; "" if there is no other one."""
        if len(self._phases) == 1:
            return ""
        return f"{number} of {len(self._phases)}, {self._phases[number - 1].algorithm}"

    def progress(self, counters: Counters) -> float:
        """Returns the share of the run that is done, 0 to 1."""
        return tasks.progress(self.config, counters.frames, counters.episodes)

    def are_over(self, counters: Counters) -> bool:
        """Returns whether the last phase, or the last episode of the run, has ended."""
        return self.progress(counters) >= 1.0


def _parameters(variables: Iterable[tf.Variable], owners: Collection[str]) -> str:
    """Returns how many parameters there are, by network: the module, within its owner."""
    sizes: collections.Counter[str] = collections.Counter()
    for variable in variables:
        first, *others = variable.name.partition(":")[0].split("/")
        network = others[0] if first in owners and others else first
        sizes[network] += variable.shape.num_elements()
    each = ", ".join(f"{network} {size:,}" for network, size in sizes.items())
    return f"{sum(sizes.values()):,} parameters ({each})"
