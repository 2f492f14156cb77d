"""Advantage actor-critic, without off-policy correction.

A3C, Mnih et al. 2016, arXiv 1602.01783, section 4, with one learner instead of asynchronous
gradients; with lambda < 1, GAE: Schulman et al. 2016, arXiv 1506.02438.
"""

import tensorflow as tf

from impala.algorithms import losses
from impala.algorithms.base import LossOutput, Targets, Term
from impala.algorithms.policy_gradient import PolicyGradient
from impala.config import demands
from impala.config.schema import ActorCriticConfig
from impala.types import Batch


class ActorCritic(PolicyGradient):
    """Trains policy and baseline. There is no correction for policy lag, which must be small."""

    demands = demands.ACTOR_CRITIC
    _config: ActorCriticConfig

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Policy gradient with n-step or generalised advantages, baseline and -entropy."""
        config, distribution = self._config, self.agent.distribution
        network_output, _ = self.agent.unroll(batch.unroll.timestep, batch.unroll.core_state)
        steps = losses.align(batch, network_output, self._objective)

        returns = losses.lambda_returns(steps, config.gae_lambda)
        log_probs = distribution.log_prob(steps.target_policy, steps.actions)
        entropies = distribution.entropy(steps.target_policy)

        scales = self.value_scales(batch)
        values, targets = (losses.normalised(x, scales) for x in (steps.values, returns))
        policy_gradient = losses.policy_gradient(log_probs, targets - values)
        baseline = losses.baseline(values, targets)
        shared, sums = self.shared_terms(batch, steps, entropies, steps.mask, progress)
        terms = {
            "policy_gradient": Term(policy_gradient, steps.mask),
            "baseline": Term(baseline, steps.mask, config.baseline_cost),
            **shared,
        }

        means = {
            "policy/entropy": entropies,
            "policy/kl_behaviour": distribution.kl(steps.behaviour_policy, steps.target_policy),
            "baseline/mean": steps.values,
        }
        metrics = {name: losses.masked_mean(term, steps.mask) for name, term in means.items()}
        metrics["baseline/explained_variance"] = self.explained_variance(
            batch, steps.values, returns, steps.mask
        )
        return LossOutput.of(
            terms, metrics, {"baseline": steps.values}, Targets(returns, steps.mask), sums
        )
