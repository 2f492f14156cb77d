"""The phases of a run: makes the learner of each, and computes the run's progress."""

from impala import build
from impala.agents.agent import Agent
from impala.config.schema import Config
from impala.logdir.checkpoint import Counters
from impala.schedule import phases
from learner.update.learner import Learner


class Phases:
    """The algorithms that learn one after another for the same agent. Only `agent` has state."""

    def __init__(self, config: Config, agent: Agent):
        """Makes every algorithm once, so that errors appear at the start.

        Args:
          config: the run's configuration.
          agent: shared by all phases.

        Raises:
          ValueError: an algorithm is unknown or does not fit the agent, or the frames of `phases`
            do not add up.
        """
        self.config = config
        self.agent = agent
        self._phases = phases.make(config)
        for phase in self._phases:
            build.algorithm(phase.algorithm, config, agent)

    def learner_at(self, counters: Counters) -> Learner:
        """Returns a learner for the phase at these counters, with a new optimiser."""
        phase = phases.current(self._phases, counters.frames)
        algorithm = build.algorithm(phase.algorithm, self.config, self.agent)
        return Learner(algorithm, self.config, phase, counters)

    def progress(self, counters: Counters) -> float:
        """Returns the share of the run that is done, 0 to 1."""
        return min(1.0, counters.frames / self._phases[-1].end)

    def are_over(self, counters: Counters) -> bool:
        """Returns whether the last phase has ended."""
        return counters.frames >= self._phases[-1].end
