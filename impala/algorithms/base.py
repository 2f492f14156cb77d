"""The interface of an algorithm: what the learner needs to know of it, and nothing more."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import sonnet as snt
import tensorflow as tf

from impala.agents.agent import Agent
from impala.config.demands import Demands
from impala.config.schema import ObjectiveConfig
from impala.types import Batch


class LossOutput(NamedTuple):
    """What there is to minimise, and what to show of it."""

    loss: tf.Tensor  # [T, B] weighted, 0 on seams; the learner sums it over T and B
    metrics: dict[str, tf.Tensor]  # name -> scalar mean over experience; terms are unweighted
    histograms: Mapping[str, tf.Tensor] = {}  # name -> [T, B], seams and all


class Algorithm(snt.Module, abc.ABC):
    """Turns a batch into a loss; owns whatever is trained but never sent to actors.

    A class of one's own may have settings: a nested frozen dataclass `Settings`, written like those
    in `impala.config.schema`.
    """

    demands: ClassVar[Demands] = Demands()
    """What the rest of a run must be like."""

    def __init__(
        self, agent: Agent, objective: ObjectiveConfig, config: Any, name: str | None = None
    ) -> None:
        """Initialises the algorithm.

        Args:
          agent: what acts.
          objective: what it shall maximise.
          config: the algorithm's own settings: an instance of its class `Settings`, None if it has
            none; built-in algorithms get what `impala.config.schema` has under their name.
          name: of the module.
        """
        super().__init__(name=name)
        self.agent = agent
        self._objective = objective
        self._config = config

    @property
    def learned_variables(self) -> Sequence[tf.Variable]:
        """What gradients move: the agent's variables, and what an algorithm adds to them."""
        return self.agent.trainable_variables

    @abc.abstractmethod
    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """The loss of each of T x B steps; differentiable by every one of `learned_variables`.

        Args:
          batch: [T + 1, B, ...].
          progress: [] share of the phase done, 0 to 1: what is annealed depends on it.
        """

    def after_update(self, progress: tf.Tensor | float) -> None:
        """Called after each update of `learned_variables`; what is not learned moves here.

        Args:
          progress: as for `loss`.
        """
