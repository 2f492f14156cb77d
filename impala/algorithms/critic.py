"""Critic pre-training: trains the baseline for a fixed policy.

A policy gradient needs good advantages; after this, they are good from the start.
"""

from collections.abc import Sequence

import tensorflow as tf

from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput
from impala.config import demands
from impala.config.schema import CriticConfig
from impala.types import Batch


class Critic(Algorithm):
    """Trains the variables that only the baseline uses: its head, and its torso if it has one."""

    demands = demands.CRITIC
    _config: CriticConfig

    @property
    def learned_variables(self) -> Sequence[tf.Variable]:
        return self.agent.baseline_variables

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Computes half the squared error to the discounted return, bootstrapped from V(x_T)."""
        steps = losses.align(batch, self.unroll(batch), self._objective, self.burn_in)
        returns = losses.lambda_returns(steps)
        baseline = losses.baseline(steps.values, returns)
        metrics = {
            "loss/baseline": losses.masked_mean(baseline, steps.mask),
            "baseline/mean": losses.masked_mean(steps.values, steps.mask),
            "baseline/explained_variance": losses.explained_variance(
                steps.values, returns, steps.mask
            ),
        }
        return LossOutput(losses.masked(self._config.baseline_cost * baseline, steps.mask), metrics)
