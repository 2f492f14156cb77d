"""A custom algorithm, with settings: IMPACT, whose old policy is a target network's.

    cd examples
    python custom_algorithm.py
    impala train catch --algorithm custom_algorithm:Impact --impact.clip 0.2 --logdir runs/impact

Luo et al. 2020, "IMPACT: Importance Weighted Asynchronous Architectures with Clipped Target
Networks", arXiv 1912.00167, section 3.1. With the policies pi (learned), pi_target and pi_worker
(that acted), an action's ratio is

    min(pi_worker / pi_target, rho) pi / pi_worker = pi / max(pi_target, pi_worker / rho)

and the objective min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A). The advantages A are those
of V-trace, from pi_worker to pi_target, with the values of the target network.
"""

import argparse
import copy
import dataclasses
import math
from typing import Annotated

import tensorflow as tf

import impala
import vtrace
from impala.agents.agent import Agent
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput, Term
from impala.config.schema import Cost, ObjectiveConfig, Positive, Range, Share
from impala.types import Batch


class Impact(Algorithm):
    """Learns policy and baseline from unrolls that may be used several times."""

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """IMPACT: Luo et al. 2020, arXiv 1912.00167. Losses are summed over T and B."""

        clip: Share = 0.3
        """epsilon: the surrogate is constant where a ratio is beyond 1 - epsilon or 1 + epsilon."""
        rho: Annotated[float, Range(1.0)] = 2.0
        """Largest pi_worker / pi_target that counts."""
        gae_lambda: Share = 0.995
        """Decay of the trace."""
        target_updates: Positive = 16
        """Updates after which the target network becomes a copy of the agent."""
        baseline_cost: Cost = 0.5
        """Weight of 0.5 (target - V)^2."""
        entropy_cost: Cost = 0.01
        """Weight of the entropy bonus."""

    _config: Settings

    def __init__(
        self,
        agent: Agent,
        objective: ObjectiveConfig,
        config: Settings,
        name: str | None = None,
    ) -> None:
        super().__init__(agent, objective, config, name=name)
        self._target = copy.deepcopy(agent)
        self._updates = tf.Variable(0, trainable=False, dtype=tf.int64, name="updates")

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Returns the negative surrogate, the baseline's loss and the negative entropy."""
        config, distribution = self._config, self.agent.distribution
        timestep, core_state = batch.unroll.timestep, batch.unroll.core_state
        steps = losses.align(batch, self.agent.unroll(timestep, core_state)[0], self._objective)
        target_output, _ = self._target.unroll(timestep, core_state)
        target = losses.align(batch, target_output, self._objective)

        log_probs = distribution.log_prob(steps.target_policy, steps.actions)  # [T, B], of pi
        of_target = tf.stop_gradient(distribution.log_prob(target.target_policy, steps.actions))
        of_worker = distribution.log_prob(steps.behaviour_policy, steps.actions)

        returns = vtrace.from_importance_weights(
            log_rhos=tf.where(steps.mask > 0.0, of_target - of_worker, -math.inf),
            discounts=steps.discounts,
            rewards=steps.rewards,
            values=target.values,
            bootstrap_value=target.bootstrap_value,
            lambda_=config.gae_lambda,
        )
        advantages = tf.stop_gradient(returns.vs - target.values)

        ratios = tf.exp(log_probs - tf.maximum(of_target, of_worker - math.log(config.rho)))
        clipped = tf.clip_by_value(ratios, 1.0 - config.clip, 1.0 + config.clip)
        surrogate = tf.minimum(ratios * advantages, clipped * advantages)

        entropies = distribution.entropy(steps.target_policy)
        baseline = losses.baseline(steps.values, returns.vs)
        terms = {
            "surrogate": Term(-surrogate, steps.mask),
            "baseline": Term(baseline, steps.mask, config.baseline_cost),
            "entropy": Term(losses.entropy(entropies), steps.mask, config.entropy_cost),
        }
        metrics = {
            "policy/entropy": losses.masked_mean(entropies, steps.mask),
            "impact/ratio": losses.masked_mean(ratios, steps.mask),
        }
        return LossOutput.of(terms, metrics)

    def after_update(self, progress: tf.Tensor | float) -> None:
        """Copies the agent into the target network every now and then."""
        is_due = self._updates.assign_add(1) % self._config.target_updates == 0
        for target, variable in zip(self._target.variables, self.agent.variables, strict=True):
            target.assign(tf.where(is_due, variable, target))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=400_000)
    parser.add_argument("--logdir", default="runs/impact")
    options = parser.parse_args()
    trained = impala.train(
        "catch",
        options.logdir,
        algorithm="custom_algorithm:Impact",
        impact={"clip": 0.2},
        total_frames=options.total_frames,
    )
    print(trained.returns)
