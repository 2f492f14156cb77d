"""IMPACT against sums written out from the paper, step by step, and its target network."""

import dataclasses
import math

import gymnasium as gym
import numpy as np
import tensorflow as tf
import test_algorithms

from impala.agents.agent import Agent
from impala.algorithms.impact import Impact
from impala.config.schema import AgentConfig, ImpactConfig, ObjectiveConfig
from impala.parts import build
from impala.testing.algorithms import AlgorithmConformance, loss_and_gradients
from learner.update import output_judge

SETTINGS = ImpactConfig(clip=0.2, rho=1.5, gae_lambda=0.9, entropy_cost=0.0)


class TestContinuous(AlgorithmConformance):
    """What every algorithm promises, with actions in a box."""

    action_space = gym.spaces.Box(-1.0, 2.0, (2,), np.float32)

    def make(self, agent: Agent) -> Impact:
        return Impact(agent, ObjectiveConfig(), ImpactConfig())


def test_it_is_the_surrogate_of_the_paper() -> None:
    """Against sums written out, with ratios on both sides of every clip."""
    agent = test_algorithms.table_agent()
    algorithm = Impact(agent, ObjectiveConfig(discount=0.9), SETTINGS)
    rng = np.random.default_rng(3)
    agent.policy.assign_add(0.7 * rng.normal(size=agent.policy.shape))  # away from the target
    agent.baseline.assign_add(rng.normal(size=agent.baseline.shape))
    arrays = test_algorithms.make_arrays()
    batch = test_algorithms.make_batch(arrays, agent)

    found = algorithm.loss(batch).loss.numpy()
    _, gradients = loss_and_gradients(algorithm, batch)

    target = algorithm._target
    old, values_now, values_then = target.policy, agent.baseline.numpy(), target.baseline.numpy()
    expected = np.zeros(found.shape)
    by_policy, by_baseline = np.zeros(agent.policy.shape), np.zeros(agent.baseline.shape)
    clips = set()
    for b in range(found.shape[1]):
        steps = len(found)
        seam = [arrays["step_type"][t + 1, b] == 0 for t in range(steps)]
        action = [int(arrays["action"][t + 1, b]) for t in range(steps)]

        def log(table: "tf.Variable | np.ndarray", t: int, b: int = b) -> np.ndarray:
            logits = np.asarray(table, np.float64)[t, b]
            return logits - np.log(np.sum(np.exp(logits)))

        pi = [math.exp(log(agent.policy, t)[action[t]]) for t in range(steps)]
        pi_target = [math.exp(log(old, t)[action[t]]) for t in range(steps)]
        worker = [math.exp(log(arrays["policy"], t + 1)[action[t]]) for t in range(steps)]
        for t in range(steps):
            if seam[t]:
                continue
            advantage, weight = 0.0, 1.0
            for i in range(t, steps):
                if seam[i]:
                    break
                rho = min(1.0, pi_target[i] / worker[i])
                discount = 0.9 * arrays["discount"][i + 1, b]
                reward = arrays["reward"][i + 1, b]
                delta = reward + discount * values_then[i + 1, b] - values_then[i, b]
                advantage += weight * rho * delta
                weight *= discount * 0.9 * rho
            ratio = min(worker[t] / pi_target[t], 1.5) * pi[t] / worker[t]
            clipped = min(max(ratio, 0.8), 1.2)
            clips |= {(worker[t] / pi_target[t] > 1.5), ("low", "in", "high")[int(ratio > 0.8)
                      + int(ratio > 1.2)]}  # fmt: skip
            surrogate = min(ratio * advantage, clipped * advantage)
            error = values_then[t, b] + advantage - values_now[t, b]
            expected[t, b] = -surrogate + 0.5 * 0.5 * error**2
            # The surrogate is constant where the clipped side is the smaller one.
            slope = ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
            by_policy[t, b] = slope * np.exp(log(agent.policy, t))
            by_policy[t, b, action[t]] -= slope
            by_baseline[t, b] = -0.5 * error
    assert clips == {True, False, "low", "in", "high"}
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    by_name = {id(v): g for v, g in zip(algorithm.learned_variables, gradients, strict=True)}
    np.testing.assert_allclose(by_name[id(agent.policy)], by_policy, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(by_name[id(agent.baseline)], by_baseline, rtol=1e-4, atol=1e-4)


def test_densities_that_differ_by_any_factor_leave_the_loss_finite() -> None:
    """An action that was impossible and bad, and that the policy has become certain of."""
    space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    spaces = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), space
    agent = build.agent(AgentConfig(hidden_sizes=(4,)), *spaces, own={})
    bias = next(v for v in agent.policy_variables if v.name == "agent/policy/b:0")
    bias.assign([-9.0, -3.0])
    algorithm = Impact(agent, ObjectiveConfig(), ImpactConfig())
    bias.assign([5 * math.atanh(0.8), -20.0])
    before = output_judge.blank(build.unroll_spec(agent, *spaces, 3))
    timestep = before.unroll.timestep._replace(reward=np.full([4, 2], -1.0, np.float32))
    actions = np.full([4, 2, 1], math.tanh(4.0), np.float32)
    policy = np.tile(np.array([-4.0, -3.0], np.float32), [4, 2, 1])
    acted = before.unroll.output._replace(action=actions, policy=policy)
    unroll = before.unroll._replace(timestep=timestep, output=acted)
    batch = tf.nest.map_structure(tf.convert_to_tensor, before._replace(unroll=unroll))
    output, gradients = loss_and_gradients(algorithm, batch)
    assert np.isfinite(output.loss).all()
    assert output.metrics["impact/ratio"] > 100.0
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_the_target_network_is_a_copy_every_few_updates() -> None:
    agent = test_algorithms.table_agent()
    settings = dataclasses.replace(SETTINGS, target_updates=3)
    algorithm = Impact(agent, ObjectiveConfig(), settings)
    first = agent.policy.numpy()
    for update in range(1, 7):
        agent.policy.assign_add(tf.ones_like(agent.policy))
        algorithm.after_update(0.0, {})
        copied = first + update // 3 * 3
        np.testing.assert_allclose(algorithm._target.policy.numpy(), copied, rtol=1e-6)
