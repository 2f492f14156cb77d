"""Publishes parameters to actors and evaluators: when they ask, or when the learner has time.

They are copied from the device, checked and published in a thread, while the next update runs.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from impala.types import Array, Parameters
from learner.fleet.incarnations import Incarnations
from learner.update.demand import Demand
from learner.update.guard import Guard
from learner.update.learner import Learner
from learner.update.phases import Phases
from learner.update.training import Iteration


class Publisher:
    """Passes a learner's parameters to the service, one version after the other."""

    def __init__(
        self,
        publish: Callable[..., None],
        incarnations: Incarnations,
        phases: Phases,
        guard: Guard,
        demand: Demand,
        each_version: bool = False,
    ):
        """Publishes nothing yet.

        Args:
          publish: gives them to actors, as `LearnerService.publish`.
          incarnations: records each version first, for later learners.
          phases: compute the run's progress.
          guard: counts what the status reports beside the parameters.
          demand: tells whether somebody asks for what was learned.
          each_version: whether to publish after each iteration that has changed something.
        """
        self._publish_to_actors = publish
        self._incarnations = incarnations
        self._phases = phases
        self._guard = guard
        self._demand = demand
        self._each_version = each_version
        self._is_behind = False  # something was learned and is not published
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._under_way: Future[None] | None = None

    def take(self, iteration: Iteration, has_time: bool = True) -> None:
        """Begins to publish what is new, if it is asked for or there is time.

        Args:
          iteration: has ended.
          has_time: whether the learner has to wait for unrolls.

        Raises:
          NotFiniteError: a parameter of the version before is not finite.
        """
        self.wait()
        self._is_behind |= iteration.is_new
        if not self._is_behind:
            return
        if has_time or self._each_version or self._demand.is_asked:
            self._begin(iteration.learner)
        else:
            self._demand.fall_behind()

    def publish(self, learner: Learner) -> None:
        """Publishes the agent's variables.

        Raises:
          NotFiniteError: a parameter is not finite.
        """
        self.wait()
        self._begin(learner)
        self.wait()

    def wait(self) -> None:
        """Returns when all that was begun is published.

        Raises:
          NotFiniteError: a parameter is not finite, and so was not published.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

    def _begin(self, learner: Learner) -> None:
        counters, self._is_behind = learner.counters, False
        self._incarnations.reserve(counters.updates)
        parameters = Parameters(
            incarnation=self._incarnations.own,
            version=counters.updates,
            progress=self._phases.progress(counters),
            frames=counters.frames,
            values=(),
        )
        shown = {
            "phase": self._phases.title(self._phases.number(counters)),
            "skipped_updates": self._guard.skipped_updates,
            "rollbacks": self._guard.rollbacks,
        }
        self._under_way = self._thread.submit(
            self._publish, parameters, learner.agent_tensors(), shown
        )

    def _publish(
        self, parameters: Parameters, values: Sequence[Array], shown: Mapping[str, Any]
    ) -> None:
        parameters = parameters._replace(values=[np.asarray(value) for value in values])
        self._publish_to_actors(parameters, **shown)
        self._demand.meet()
