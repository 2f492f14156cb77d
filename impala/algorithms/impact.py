"""IMPACT: PPO's clipped surrogate with V-trace, whose old policy is a target network's.

Luo et al. 2020, "IMPACT: Importance Weighted Asynchronous Architectures with Clipped Target
Networks", arXiv 1912.00167, section 3.
"""

import math

import tensorflow as tf

import vtrace
from impala.agents.agent import Agent
from impala.algorithms import losses
from impala.algorithms.base import LossOutput, Sums, Term, copy_if, target_of
from impala.algorithms.policy_gradient import PolicyGradient
from impala.config import demands
from impala.config.schema import ImpactConfig, ObjectiveConfig
from impala.types import Batch

_MOST_LOG_RATIO = 20.0  # beyond 88, which ratios of densities reach, float32 has no exponential


class Impact(PolicyGradient):
    """Trains policy and baseline on unrolls that are old, or are used several times.

    With the policies pi (learned), pi_target and mu (that acted), an action's ratio is

        min(mu / pi_target, rho) pi / mu = pi / max(pi_target, mu / rho)

    and the objective min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A). The advantages A and
    the baseline's targets are those of V-trace, from mu to pi_target, with the values of the target
    network.
    """

    demands = demands.IMPACT
    _config: ImpactConfig

    def __init__(
        self,
        agent: Agent,
        objective: ObjectiveConfig,
        config: ImpactConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(agent, objective, config, name=name)
        self._target = target_of(agent)
        self._updates = tf.Variable(0, trainable=False, dtype=tf.int64, name="updates")

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Returns the negative surrogate, the baseline's loss and the negative entropy."""
        config, distribution = self._config, self.agent.distribution
        steps = losses.align(batch, self.unroll(batch), self._objective, self.burn_in)
        target = self.unroll(batch, self._target)  # of all T + 1 rows
        target_values = target.baseline[:-1]

        log_probs = distribution.log_prob(steps.target_policy, steps.actions)  # [T, B], of pi
        of_target = tf.stop_gradient(distribution.log_prob(target.policy[:-1], steps.actions))
        of_mu = distribution.log_prob(steps.behaviour_policy, steps.actions)

        returns = vtrace.from_importance_weights(
            log_rhos=tf.where(steps.mask > 0.0, of_target - of_mu, -math.inf),
            discounts=steps.discounts,
            rewards=steps.rewards,
            values=target_values,
            bootstrap_value=target.baseline[-1],
            lambda_=config.gae_lambda,
        )
        advantages = tf.stop_gradient(returns.vs - target_values)

        log_ratios = log_probs - tf.maximum(of_target, of_mu - math.log(config.rho))
        ratios = tf.exp(tf.minimum(log_ratios, _MOST_LOG_RATIO))
        clipped = tf.clip_by_value(ratios, 1.0 - config.clip, 1.0 + config.clip)
        surrogate = tf.minimum(ratios * advantages, clipped * advantages)

        entropies = distribution.entropy(steps.target_policy)
        shared, sums = self.shared_terms(batch, steps, entropies, steps.mask, progress)
        baseline = losses.baseline(steps.values, returns.vs)
        terms = {
            "surrogate": Term(-surrogate, steps.mask),
            "baseline": Term(baseline, steps.mask, config.baseline_cost),
            **shared,
        }

        means = {
            "policy/entropy": entropies,
            "policy/kl_behaviour": distribution.kl(steps.behaviour_policy, steps.target_policy),
            "baseline/mean": steps.values,
            "impact/ratio": ratios,
            "impact/clip_fraction": tf.cast(tf.abs(ratios - 1.0) > config.clip, tf.float32),
        }
        metrics = {name: losses.masked_mean(term, steps.mask) for name, term in means.items()}
        metrics["baseline/explained_variance"] = losses.explained_variance(
            steps.values, returns.vs, steps.mask
        )
        return LossOutput.of(terms, metrics, {"baseline": steps.values}, sums=sums)

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Copies the agent into the target network every few updates."""
        super().after_update(progress, sums)
        is_due = self._updates.assign_add(1) % self._config.target_updates == 0
        copy_if(is_due, self.agent, self._target)
