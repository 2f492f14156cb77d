"""What algorithms that train a policy and a baseline share: a bonus for the policy's entropy."""

import math
from collections.abc import Mapping

import sonnet as snt
import tensorflow as tf

from impala.agents.agent import Agent
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, Sums, Term
from impala.config.schema import ObjectiveConfig, PolicyGradientConfig

_STEP = 0.01
"""Change of a multiplier's logarithm, at each update, for each nat of one part of the action."""
_RANGE = 100.0
"""Largest factor between a multiplier and its first value."""


class Multiplier(snt.Module):
    """A Lagrange multiplier, learned in log space: it rises where its constraint is violated.

    Args:
      initial: its first value, more than 0.
    """

    def __init__(self, initial: float, name: str | None = None) -> None:
        super().__init__(name=name)
        self._initial = math.log(initial)
        self._log = tf.Variable(self._initial, trainable=False, name="log_multiplier")

    @property
    def value(self) -> tf.Tensor:
        """Returns the multiplier: []."""
        return tf.exp(self._log)

    def update(self, violation: tf.Tensor) -> None:
        """Ascends the gradient of the Lagrangian, within two orders of magnitude of the start.

        Args:
          violation: [] in nats for each part of the action; negative where the constraint holds.
        """
        lowest, highest = self._initial - math.log(_RANGE), self._initial + math.log(_RANGE)
        self._log.assign(tf.clip_by_value(self._log + _STEP * violation, lowest, highest))


class PolicyGradient(Algorithm):
    """Base class of algorithms that train a policy and a baseline."""

    _config: PolicyGradientConfig

    def __init__(
        self,
        agent: Agent,
        objective: ObjectiveConfig,
        config: PolicyGradientConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(agent, objective, config, name=name)
        self._entropy_cost = Multiplier(config.entropy_cost) if config.entropy_target else None

    def entropy_bonus(
        self,
        policy: tf.Tensor,
        entropies: tf.Tensor,
        mask: tf.Tensor,
        progress: tf.Tensor | float,
    ) -> tuple[Term, Mapping[str, tf.Tensor]]:
        """Returns the term -H(pi), and what `LossOutput.sums` must have for its weight.

        Args:
          policy: [T, B, P] of pi.
          entropies: [T, B] of pi.
          mask: [T, B], of what is learned from.
          progress: [] share of the phase done.
        """
        config = self._config
        over = config.entropy_anneal
        if self._entropy_cost is None:
            cost = losses.annealed(config.entropy_cost, config.entropy_cost_end, progress, over)
            return Term(losses.entropy(entropies), mask, cost), {}
        share = losses.annealed(config.entropy_target, config.entropy_target_end, progress, over)
        lacking = self.agent.distribution.entropy_at(share, policy) - entropies
        sums = {"lacking_entropy": losses.masked(lacking, mask), "steps": mask}
        return Term(losses.entropy(entropies), mask, self._entropy_cost.value), sums

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Moves the weight of the entropy towards what keeps the policy at its target."""
        if self._entropy_cost is not None:
            lacking = tf.math.divide_no_nan(sums["lacking_entropy"], sums["steps"])
            self._entropy_cost.update(lacking / self.agent.distribution.num_parts)
