"""An algorithm: advantage-weighted regression, which imitates what went better than expected."""

import dataclasses
from typing import Annotated

import tensorflow as tf

from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput
from impala.config.schema import Cost, Range
from impala.types import Batch


class Awr(Algorithm):
    """Peng et al. 2019, arXiv 1910.00177: minimises -min(exp(A / temperature), largest) log pi."""

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """Advantage-weighted regression."""

        temperature: Annotated[float, Range(0.01)] = 1.0
        """What advantages are divided by."""
        largest_weight: Annotated[float, Range(1.0)] = 20.0
        """Weights are clipped to this."""
        baseline_cost: Cost = 0.5
        """Weight of 0.5 (return - V)^2."""

    _config: Settings

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        output, _ = self.agent.unroll(batch.unroll.timestep, batch.unroll.core_state)
        steps = losses.align(batch, output, self._objective)
        returns = losses.lambda_returns(steps)
        log_probs = self.agent.distribution.log_prob(steps.target_policy, steps.actions)
        weights = tf.exp((returns - steps.values) / self._config.temperature)
        weights = tf.minimum(weights, self._config.largest_weight)
        loss = losses.policy_gradient(log_probs, weights)
        loss += self._config.baseline_cost * losses.baseline(steps.values, returns)
        metrics = {"awr/weight": losses.masked_mean(weights, steps.mask)}
        return LossOutput(losses.masked(loss, steps.mask), metrics)
