"""A custom algorithm, with settings: policy gradients whose returns bootstrap from a slow copy.

cd examples
python custom_algorithm.py
impala train catch --algorithm custom_algorithm:Slow --slow.step 0.1 --logdir runs/slow
"""

import argparse
import dataclasses

import tensorflow as tf

import impala
from impala.agents.agent import Agent
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput, Sums, Term, target_of
from impala.config.demands import Demands
from impala.config.schema import Cost, ObjectiveConfig, Share
from impala.types import Batch


class Slow(Algorithm):
    """Learns policy and baseline from n-step returns that end in the values of a slow copy."""

    demands = Demands(on_policy=True)  # no replay

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """Policy gradients with a slow copy. Losses are summed over T and B."""

        step: Share = 0.05
        """Share of its distance to the agent by which the copy moves in an update."""
        baseline_cost: Cost = 0.5
        """Weight of 0.5 (return - V)^2."""
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
        self._copy = target_of(agent)  # checkpoints hold it, as it is an attribute

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Returns the policy gradient's loss, the baseline's and the negative entropy."""
        config, distribution = self._config, self.agent.distribution
        steps = losses.align(batch, self.unroll(batch), self._objective)
        slow = losses.align(batch, self.unroll(batch, self._copy), self._objective)
        returns = losses.lambda_returns(slow)

        log_probs = distribution.log_prob(steps.target_policy, steps.actions)  # [T, B]
        entropies = distribution.entropy(steps.target_policy)
        terms = {
            "policy_gradient": Term(
                losses.policy_gradient(log_probs, returns - steps.values), steps.mask
            ),
            "baseline": Term(
                losses.baseline(steps.values, returns), steps.mask, config.baseline_cost
            ),
            "entropy": Term(losses.entropy(entropies), steps.mask, config.entropy_cost),
        }
        return LossOutput.of(terms, {"policy/entropy": losses.masked_mean(entropies, steps.mask)})

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Moves the copy towards the agent."""
        for slow, variable in zip(self._copy.variables, self.agent.variables, strict=True):
            slow.assign_add(self._config.step * (variable - slow))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=400_000)
    parser.add_argument("--logdir", default="runs/slow")
    options = parser.parse_args()
    trained = impala.train(
        "catch",
        options.logdir,
        algorithm="custom_algorithm:Slow",
        slow={"step": 0.1},
        total_frames=options.total_frames,
    )
    print(trained.returns)
