"""The interface of algorithms."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import sonnet as snt
import tensorflow as tf

from impala.agents.agent import Agent
from impala.algorithms import burn_in
from impala.config.demands import Demands
from impala.config.schema import ObjectiveConfig
from impala.types import Batch, NetworkOutput


class LossOutput(NamedTuple):
    """A loss, and its metrics."""

    loss: tf.Tensor  # [T, B] weighted, 0 where masked; the learner sums it over T and B
    metrics: dict[str, tf.Tensor]  # name -> scalar mean over experience; terms are unweighted
    histograms: Mapping[str, tf.Tensor] = {}  # name -> [T, B], including seams


class Algorithm(snt.Module, abc.ABC):
    """Computes the loss of a batch; owns what is trained but not sent to actors.

    A class of one's own may have settings: a nested frozen dataclass `Settings`, written like those
    in `impala.config.schema`.
    """

    demands: ClassVar[Demands] = Demands()
    """Requirements on the rest of the configuration."""

    burn_in: int = 0
    """Rows of a replayed unroll that are not learned from: `replay.burn_in`, set by `impala.build`
    for algorithms that have `Demands.burns_in`."""

    def __init__(
        self, agent: Agent, objective: ObjectiveConfig, config: Any, name: str | None = None
    ) -> None:
        """Initialises the algorithm.

        Args:
          agent: the agent to train.
          objective: the return to maximise.
          config: an instance of the class's `Settings`, None if it has none; built-in algorithms
            get the section of their name in `impala.config.schema`.
          name: of the module.
        """
        super().__init__(name=name)
        self.agent = agent
        self._objective = objective
        self._config = config

    @property
    def learned_variables(self) -> Sequence[tf.Variable]:
        """Returns the variables to train: the agent's, and those that the algorithm adds."""
        return self.agent.trainable_variables

    def unroll(self, batch: Batch, agent: Agent | None = None) -> NetworkOutput:
        """Applies the agent, or another one, to all rows of a batch: [T + 1, B, ...].

        There is no gradient through the burn-in of replayed unrolls. Pass `self.burn_in` to
        `losses.align`, which masks it.
        """
        return burn_in.unroll(self.agent if agent is None else agent, batch, self.burn_in)

    @abc.abstractmethod
    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Returns the loss of each of T x B steps, differentiable by all `learned_variables`.

        Args:
          batch: [T + 1, B, ...].
          progress: [] share of the phase done, 0 to 1, for annealed coefficients.
        """

    def after_update(self, progress: tf.Tensor | float) -> None:
        """Updates what is not trained by gradients, after each update of `learned_variables`.

        Args:
          progress: as for `loss`.
        """
