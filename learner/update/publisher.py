"""Publishes parameters to actors and evaluators after each iteration that has changed them."""

from impala.types import Parameters
from learner.front.incarnations import Incarnations
from learner.front.service import LearnerService
from learner.update.guard import Guard
from learner.update.learner import Learner
from learner.update.phases import Phases
from learner.update.training import Iteration


class Publisher:
    """Passes a learner's parameters to the service."""

    def __init__(
        self, service: LearnerService, incarnations: Incarnations, phases: Phases, guard: Guard
    ):
        """Publishes nothing yet.

        Args:
          service: serves the parameters to actors.
          incarnations: records each version first, for later learners.
          phases: compute the run's progress.
          guard: counts what the status reports beside the parameters.
        """
        self._service = service
        self._incarnations = incarnations
        self._phases = phases
        self._guard = guard

    def take(self, iteration: Iteration) -> None:
        """Publishes if anything has changed.

        Raises:
          NotFiniteError: a parameter is not finite.
        """
        if iteration.is_new:
            self.publish(iteration.learner)

    def publish(self, learner: Learner) -> None:
        """Publishes copies of the agent's variables.

        Raises:
          NotFiniteError: a parameter is not finite.
        """
        counters = learner.counters
        self._incarnations.reserve(counters.updates)
        self._service.publish(
            Parameters(
                incarnation=self._incarnations.own,
                version=counters.updates,
                progress=self._phases.progress(counters),
                frames=counters.frames,
                values=learner.agent_values(),
            ),
            skipped_updates=self._guard.skipped_updates,
            rollbacks=self._guard.rollbacks,
        )
