"""Critic pre-training: fits the baseline to the returns of the policy.

A policy gradient needs good advantages; after this, they are good from the start.
"""

from collections.abc import Sequence

import tensorflow as tf

from impala.agents.distributions import EpsilonGreedy
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput, Sums, Targets, Term
from impala.config import demands
from impala.config.schema import CriticConfig
from impala.types import Batch


class Critic(Algorithm):
    """Trains everything that the baseline is computed from, or what serves the baseline alone.

    With a torso or core that policy and baseline share, the first moves the policy too.
    """

    demands = demands.CRITIC
    scope = "critic/"
    _config: CriticConfig

    @property
    def learned_variables(self) -> Sequence[tf.Variable]:
        if self._config.trains == "baseline":
            return self.agent.baseline_variables
        return self.agent.variables_of_values

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Computes half the squared error to the discounted return, bootstrapped from V(x_T)."""
        steps = losses.align(batch, self.unroll(batch), self._objective, self.burn_in)
        returns = losses.lambda_returns(steps)
        scales = self.value_scales(batch)
        baseline = losses.baseline(
            losses.normalised(steps.values, scales), losses.normalised(returns, scales)
        )
        terms = {"baseline": Term(baseline, steps.mask, self._config.baseline_cost)}
        metrics = {
            "baseline/mean": losses.masked_mean(steps.values, steps.mask),
            "baseline/explained_variance": self.explained_variance(
                batch, steps.values, returns, steps.mask
            ),
        }
        if isinstance(self.agent.distribution, EpsilonGreedy):
            metrics["policy/epsilon"] = self.agent.distribution.mean_epsilon()
        return LossOutput.of(
            terms, metrics, {"baseline": steps.values}, Targets(returns, steps.mask)
        )

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Anneals the epsilon of an epsilon-greedy policy."""
        if isinstance(self.agent.distribution, EpsilonGreedy):
            self.agent.distribution.progress.assign(progress)
