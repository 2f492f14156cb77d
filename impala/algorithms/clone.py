"""Cloning of demonstrations: supervised learning of the actions that others took, and of returns.

Before reinforcement learning, as in AlphaStar: Vinyals et al. 2019, Nature 575.
"""

import tensorflow as tf

from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput, Targets, Term
from impala.config import demands
from impala.config.schema import CloneConfig
from impala.types import Batch


class Clone(Algorithm):
    """Trains policy and baseline on demonstrations, whose policy is unknown."""

    demands = demands.CLONE
    scope = "clone/"
    _config: CloneConfig

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Returns -log pi(a) of the demonstrated actions, and the baseline's squared error."""
        steps = losses.align(batch, self.unroll(batch), self._objective)
        distribution = self.agent.distribution
        log_probs = distribution.log_prob(steps.target_policy, steps.actions)
        returns = losses.lambda_returns(steps)
        scales = self.value_scales(batch)
        values, targets = (losses.normalised(x, scales) for x in (steps.values, returns))
        baseline = losses.baseline(values, targets)
        terms = {
            "policy": Term(-log_probs, steps.mask, self._config.policy_cost),
            "baseline": Term(baseline, steps.mask, self._config.baseline_cost),
        }
        means = {
            "policy/entropy": distribution.entropy(steps.target_policy),
            "baseline/mean": steps.values,
        }
        metrics = {name: losses.masked_mean(term, steps.mask) for name, term in means.items()}
        metrics["baseline/explained_variance"] = self.explained_variance(
            batch, steps.values, returns, steps.mask
        )
        return LossOutput.of(
            terms, metrics, {"baseline": steps.values}, Targets(returns, steps.mask)
        )
