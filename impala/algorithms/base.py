"""The interface of algorithms."""

import abc
import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import sonnet as snt
import tensorflow as tf

from impala.agents.agent import Agent
from impala.algorithms import burn_in, losses
from impala.config.demands import Demands
from impala.config.schema import ObjectiveConfig
from impala.types import Batch, Nest, NetworkOutput

Sums = Mapping[str, tf.Tensor]
"""Name -> [], over the batch of all devices."""


class Targets(NamedTuple):
    """What a baseline is trained towards; not normalised."""

    values: tf.Tensor  # [T, B]
    mask: tf.Tensor  # [T, B] float32, 1 where it is


class Term(NamedTuple):
    """A term of a loss, and the steps that it applies to."""

    values: tf.Tensor  # [T, B] unweighted
    mask: tf.Tensor  # [T, B], 1 on these steps, else 0
    cost: tf.Tensor | float | None = None  # weight; None: it has none


class LossOutput(NamedTuple):
    """A loss, and its metrics."""

    loss: tf.Tensor  # [T, B] weighted, 0 where masked; the learner sums it over T and B
    metrics: dict[str, tf.Tensor]  # name -> scalar, such as a mean over experience
    histograms: Mapping[str, tf.Tensor] = {}  # name -> [T, B, ...], including seams
    targets: Targets | None = None  # of the baseline; PopArt needs them
    terms: Mapping[str, tf.Tensor] = {}  # name -> [T, B] weighted; they add up to the loss
    sums: Mapping[str, tf.Tensor] = {}  # name -> [T, B], 0 where masked; for `after_update`

    @classmethod
    def of(
        cls,
        terms: Mapping[str, Term],
        metrics: Mapping[str, tf.Tensor],
        histograms: Mapping[str, tf.Tensor] = {},
        targets: Targets | None = None,
        sums: Mapping[str, tf.Tensor] = {},
    ) -> "LossOutput":
        """Returns the loss that consists of these terms.

        A term NAME has up to three scalars: `loss/NAME`, its weighted sum over T and B, which the
        learner computes as it does `loss/total`; `loss_mean/NAME`, its unweighted mean over the
        steps that it applies to; and its weight, `NAME_cost`.
        """
        weighted, found = {}, dict(metrics)
        for name, (values, mask, cost) in terms.items():
            weighted[name] = losses.masked(values, mask)
            found[f"loss_mean/{name}"] = losses.masked_mean(values, mask)
            if cost is not None:
                weighted[name] *= cost
                found[f"{name}_cost"] = tf.convert_to_tensor(cost, tf.float32)
        loss = tf.add_n(list(weighted.values()))
        return cls(loss, found, histograms, targets, weighted, sums)


class Played(NamedTuple):
    """What the run has learned from so far."""

    frames: int  # of environments
    episodes: int  # that ended


class Algorithm(snt.Module, abc.ABC):
    """Computes the loss of a batch; owns what is trained but not sent to actors.

    A custom class may have settings: a nested frozen dataclass `Settings`, written like those
    in `impala.config.schema`.
    """

    demands: ClassVar[Demands] = Demands()
    """Requirements on the rest of the configuration."""

    scope: ClassVar[str] = ""
    """Prefix of the names of its scalars and histograms in the telemetry."""

    burn_in: int = 0
    """Rows of a replayed unroll that are not learned from: `replay.burn_in`, set by
    `impala.parts.build` for algorithms that have `Demands.burns_in`."""

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

    def value_scales(self, batch: Batch) -> tf.Tensor | None:
        """Returns PopArt's deviation of the values in T steps: [T, B] or []; None without PopArt.

        `losses.normalised` divides advantages, values and their targets by it.
        """
        popart = self.agent.popart
        return None if popart is None else popart.scales(_observation(batch))

    def explained_variance(
        self, batch: Batch, values: tf.Tensor, targets: tf.Tensor, mask: tf.Tensor
    ) -> tf.Tensor:
        """Returns `losses.explained_variance`, with PopArt of normalised values and targets.

        Else a baseline that knows no more than each task's mean return would seem to explain most.
        """
        popart = self.agent.popart
        if popart is not None:
            observation = _observation(batch)
            values, targets = (popart.normalised(x, observation) for x in (values, targets))
        return losses.explained_variance(values, targets, mask)

    def renormalise(self, batch: Batch, output: LossOutput, weights: tf.Tensor) -> None:
        """Updates PopArt's statistics by the targets of a batch, if the agent has PopArt.

        Args:
          batch: [T + 1, B, ...].
          output: its loss.
          weights: [B], of the unrolls.
        """
        if self.agent.popart is not None and output.targets is not None:
            values, mask = output.targets
            self.agent.renormalise(_observation(batch), values, weights * mask)

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Updates what is not trained by gradients, after each update of `learned_variables`.

        Args:
          progress: as for `loss`.
          sums: of `LossOutput.sums`, with the weights of the unrolls.
        """

    @snt.no_name_scope
    def after_count(self, before: Played, after: Played) -> None:
        """Updates what depends on frames or episodes. Called between updates, outside the graph.

        Args:
          before: what had been counted at the last call, or at the start of the phase.
          after: what has been counted now.
        """


def target_of(agent: Agent) -> Agent:
    """Returns a copy of an agent, which normalises observations by the agent's statistics."""
    return copy.deepcopy(agent, {id(agent.normaliser): agent.normaliser})


def copy_if(is_due: tf.Tensor, source: snt.Module, target: snt.Module) -> None:
    """Copies all variables of a module into those of its copy where `is_due`, [], is true."""
    for old, new in zip(target.variables, source.variables, strict=True):
        old.assign(tf.where(is_due, new, old))


def _observation(batch: Batch) -> Nest:
    """Returns what was observed in T steps: [T, B, ...]."""
    return tf.nest.map_structure(lambda leaf: leaf[:-1], batch.unroll.timestep.observation)
