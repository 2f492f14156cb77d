"""Learns Catch in one process: environment, agent, unroll, V-trace loss and update on one page.

    python examples/catch.py

It acts with the newest parameters, so rho is 1 and V-trace has nothing to correct; behind a network
it has. On two cores it takes less than a minute to a mean return of 0.9 or more.
"""

import argparse
import math
from collections import deque

import numpy as np
import sonnet as snt
import tensorflow as tf
import tree

import vtrace
from impala.agents.agent import Agent
from impala.algorithms import losses
from impala.config.schema import AgentConfig, ObjectiveConfig
from impala.environments.catch import Catch
from impala.parts import build
from impala.types import AgentOutput, Batch, StepType, TimeStep, Unroll

UNROLL_LENGTH = 9  # T: an episode of Catch
NUM_ENVS = 32  # B: an update learns from one unroll of each environment
OBJECTIVE = ObjectiveConfig(discount=0.99)
BASELINE_COST, ENTROPY_COST = 0.5, 0.01


def loss(agent: Agent, batch: Batch) -> tf.Tensor:
    """Returns the sum of policy gradient, baseline and entropy loss over T x B steps."""
    output, _ = agent.unroll(batch.unroll.timestep, batch.unroll.core_state)  # [T + 1, B]
    steps = losses.align(batch, output, OBJECTIVE)  # [T, B]: what led to what
    distribution = agent.distribution
    log_probs = distribution.log_prob(steps.target_policy, steps.actions)
    log_mus = distribution.log_prob(steps.behaviour_policy, steps.actions)
    returns = vtrace.from_importance_weights(
        log_rhos=tf.where(steps.mask > 0.0, log_probs - log_mus, -math.inf),
        discounts=steps.discounts,
        rewards=steps.rewards,
        values=steps.values,
        bootstrap_value=steps.bootstrap_value,
    )
    terms = (
        losses.policy_gradient(log_probs, returns.pg_advantages)
        + BASELINE_COST * losses.baseline(steps.values, returns.vs)
        + ENTROPY_COST * losses.entropy(distribution.entropy(steps.target_policy))
    )
    return tf.reduce_sum(losses.masked(terms, steps.mask))


def train(updates: int, seed: int = 0) -> float:
    """Learns for so many updates; returns the mean return of the last 500 episodes."""
    environment = Catch(NUM_ENVS)
    agent = build.agent(
        AgentConfig(torso="mlp", hidden_sizes=(64, 64)),
        environment.observation_space,
        environment.action_space,
        seed=seed,
    )
    optimiser = snt.optimizers.Adam(2e-3)
    act = tf.function(agent.step, autograph=False)

    @tf.function(autograph=False)
    def update(batch: Batch) -> None:
        with tf.GradientTape() as tape:
            total = loss(agent, batch)
        variables = agent.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(total, variables), 40.0)
        optimiser.apply(gradients, variables)

    # A row holds a time step and the output that led to it; nothing led to the first one.
    timestep: TimeStep = environment.reset(seed)
    core_state = agent.initial_state(NUM_ENVS)
    output = AgentOutput(
        np.zeros(NUM_ENVS, np.int64),
        np.zeros((NUM_ENVS, agent.distribution.num_parameters), np.float32),
        np.zeros(NUM_ENVS, np.float32),
    )
    episodes: deque[float] = deque(maxlen=500)
    step = 0
    for count in range(1, updates + 1):
        # Keep the last row as the first of the next unroll.
        rows, state_before = [(timestep, output)], core_state
        for _ in range(UNROLL_LENGTH):
            before = tree.map_structure(tf.constant, timestep)
            said, core_state = act(before, core_state, tf.constant([seed, step]))
            output = tree.map_structure(lambda tensor: tensor.numpy(), said)
            environment.send(output.action)
            timestep = environment.recv().timestep
            rows.append((timestep, output))
            episodes.extend(timestep.reward[timestep.step_type == StepType.LAST])
            step += 1
        timesteps, outputs = tree.map_structure(lambda *row: np.stack(row), *rows)
        unroll = Unroll(timesteps, outputs, state_before, frames=(), parameter_version=())
        update(tree.map_structure(tf.constant, Batch(unroll, np.zeros(NUM_ENVS, np.bool_))))
        if count % 200 == 0 or count == updates:
            print(f"{count} updates: mean return {np.mean(episodes):.2f}", flush=True)
    return float(np.mean(episodes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=600)
    train(parser.parse_args().updates)
