"""The bonus for the entropy, whose weight is learned if there is a target."""

import math

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import test_algorithms

from impala.agents.agent import Agent
from impala.algorithms.impala import Impala
from impala.algorithms.policy_gradient import PolicyGradient
from impala.config.schema import (
    ActorCriticConfig,
    Config,
    ImpactConfig,
    ImpalaConfig,
    ObjectiveConfig,
)
from impala.parts import build
from impala.testing.algorithms import AlgorithmConformance, loss_and_gradients
from impala.types import Batch, Nest, NetworkOutput, TimeStep

SECTIONS = {"impala": ImpalaConfig, "actor_critic": ActorCriticConfig, "impact": ImpactConfig}


def sums_of(algorithm: PolicyGradient, batch: Batch, progress: float = 0.0) -> dict[str, tf.Tensor]:
    return {name: tf.reduce_sum(x) for name, x in algorithm.loss(batch, progress).sums.items()}


def make(name: str, agent: object, **settings: float) -> PolicyGradient:
    config = Config(**{name: SECTIONS[name](**settings)})
    return build.algorithm(name, config, agent)  # type: ignore[arg-type]


class TestWithATarget(AlgorithmConformance):
    """What every algorithm promises, with several parts in an action."""

    action_space = gym.spaces.MultiDiscrete([2, 3])

    def make(self, agent: Agent) -> Impala:
        return Impala(agent, ObjectiveConfig(), ImpalaConfig(entropy_target=0.2))


@pytest.mark.parametrize("name", SECTIONS)
def test_the_weight_rises_by_what_the_entropy_lacks(name: str) -> None:
    """The mean over steps that are no seams, in nats; of a target that changes with progress."""
    agent = test_algorithms.table_agent()
    settings = {"entropy_cost": 0.05, "entropy_target": 0.9, "entropy_anneal": 0.5}
    algorithm = make(name, agent, **settings, entropy_target_end=0.3)
    arrays = test_algorithms.make_arrays()
    batch = test_algorithms.make_batch(arrays, agent)

    output = algorithm.loss(batch, 0.25)
    algorithm.after_update(0.25, sums_of(algorithm, batch, 0.25))
    after = algorithm.loss(batch, 0.25)

    logits = agent.policy.numpy().astype(np.float64)[:-1]
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    is_step = arrays["step_type"][1:] != 0
    entropies = -(p * np.log(p)).sum(axis=-1)[is_step]
    lacking = np.mean(0.6 * math.log(3) - entropies)
    assert output.metrics["entropy_cost"].numpy() == pytest.approx(0.05)
    expected = 0.05 * math.exp(0.01 * lacking)
    assert after.metrics["entropy_cost"].numpy() == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(
        tf.reduce_sum(after.terms["entropy"]), -expected * entropies.sum(), rtol=1e-5
    )


def test_the_weight_stays_within_a_hundred_times_its_first_value() -> None:
    agent = test_algorithms.table_agent()
    algorithm = make("impala", agent, entropy_cost=0.05, entropy_target=0.5)
    batch = test_algorithms.make_batch(test_algorithms.make_arrays(), agent)
    for lacking, bound in ((1e9, 5.0), (-1e9, 5e-4)):
        sums = {"lacking_entropy": tf.constant(lacking), "steps": tf.constant(10.0)}
        algorithm.after_update(0.0, sums)
        cost = algorithm.loss(batch).metrics["entropy_cost"].numpy()
        assert cost == pytest.approx(bound, rel=1e-5)


class SamePolicy(test_algorithms.TableAgent):
    """A table whose rows all have the policy of the first."""

    def unroll(self, timestep: TimeStep, core_state: Nest) -> tuple[NetworkOutput, Nest]:
        output, core_state = super().unroll(timestep, core_state)
        policy = tf.zeros_like(output.policy) + output.policy[:1, :1]
        return output._replace(policy=policy), core_state


@pytest.mark.parametrize("start", [0.0, 5.0])
def test_the_policy_comes_to_its_target_from_both_sides(start: float) -> None:
    """One action is always paid: nothing but the entropy keeps the policy from being certain."""
    arrays = test_algorithms.make_arrays()
    arrays["action"] = np.resize([0, 1, 2], arrays["action"].shape)
    arrays["policy"] = np.zeros_like(arrays["policy"])  # all actions are as likely
    arrays["reward"] = np.where(arrays["action"] == 0, 1.0, 0.0)
    agent = SamePolicy(arrays["policy"] + [start, 0.0, 0.0], arrays["baseline"] * 0.0)
    config = ImpalaConfig(entropy_cost=0.1, entropy_target=0.5, baseline_cost=0.0)
    algorithm = Impala(agent, ObjectiveConfig(discount=0.0), config)
    batch = test_algorithms.make_batch(arrays, agent)

    @tf.function(autograph=False)
    def update() -> tf.Tensor:
        output, gradients = loss_and_gradients(algorithm, batch)
        for variable, gradient in zip(algorithm.learned_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        algorithm.after_update(0.0, {name: tf.reduce_sum(x) for name, x in output.sums.items()})
        return output.metrics["policy/entropy"]

    first = update().numpy()
    for _ in range(2000):
        last = update().numpy()
    target = 0.5 * math.log(3)
    assert abs(first - target) > 0.4
    assert last == pytest.approx(target, abs=0.02)
