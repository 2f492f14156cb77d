"""Burn-in of replayed unrolls: what is learned is what would be of the rest of the unroll alone."""

import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.agents.cores import Core
from impala.agents.observation import Features, FrameStack
from impala.agents.torsos import MLP
from impala.algorithms import burn_in
from impala.config import rules, values
from impala.config.presets import PRESETS
from impala.config.schema import (
    AgentConfig,
    Config,
    EpsilonConfig,
    ImpalaConfig,
    LearnerConfig,
    MixConfig,
    ReplayConfig,
)
from impala.config.values import OptionError
from impala.parts import build
from impala.schedule import phases
from impala.testing.algorithms import (
    IS_REPLAY,
    AlgorithmConformance,
    B,
    T,
    loss_and_gradients,
)
from impala.types import Batch, Nest, StepType, Unroll
from learner.update.learner import Learner, Update

VECTOR = gym.spaces.Box(-9.0, 9.0, (2,), np.float32)
CHOICE = gym.spaces.Discrete(3)
ROWS = 2  # of burn-in; the first episode that ends does so in row 2

AGENTS = {
    "lstm": AgentConfig(hidden_sizes=(8,), core="lstm", lstm_size=5),
    "two networks and frames": AgentConfig(
        hidden_sizes=(8,), core="lstm", lstm_size=5, frame_stack=3, separate_baseline=True
    ),
}


class Leaky(Core):
    """h' = h / 2 + x, forgotten where an episode begins: whatever it was, burn-in halves it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def initial_state(self, batch_size: int | tf.Tensor) -> Nest:
        return {
            "sum": tf.zeros([batch_size, self._width]),
            "steps": tf.zeros([batch_size], tf.int32),
        }

    def __call__(
        self, inputs: tf.Tensor, is_first: tf.Tensor, state: Nest
    ) -> tuple[tf.Tensor, Nest]:
        outputs, total = [], state["sum"]
        for x, first in zip(tf.unstack(inputs), tf.unstack(is_first), strict=True):
            total = tf.where(first[:, None], 0.0, total) / 2.0 + x
            outputs.append(total)
        return tf.stack(outputs), {"sum": total, "steps": state["steps"] + len(outputs)}


def leaky(frame_stack: FrameStack | None = None) -> Agent:
    space = VECTOR if frame_stack is None else frame_stack.observation_space
    torso = Features(MLP(AgentConfig(hidden_sizes=())), space)
    policy = build.agent(AgentConfig(), VECTOR, CHOICE).distribution
    assert space.shape is not None
    return Agent(torso, Leaky(space.shape[0]), policy, frame_stack)


def made(name: str, agent: Agent, rows: int = ROWS, **settings: Any) -> Any:
    config = Config(replay=ReplayConfig(burn_in=rows))
    section = dataclasses.replace(getattr(config, name), **settings)
    return build.algorithm(name, dataclasses.replace(config, **{name: section}), agent)


def batch_for(agent: Agent, seed: int = 0) -> Batch:
    """A batch, half of it replayed, whose core states are of the middle of episodes."""
    suite = AlgorithmConformance()
    batch = suite.batch(suite.arrays(agent, seed), agent)
    rng = np.random.default_rng(seed)
    state = tree.map_structure(
        lambda x: tf.cast(rng.normal(size=x.shape), x.dtype), batch.unroll.core_state
    )
    return batch._replace(unroll=batch.unroll._replace(core_state=state))


def part(batch: Batch, columns: np.ndarray, first: int, core_state: Nest) -> Batch:
    """Some unrolls from row `first` on, with this core state before it."""
    which = np.flatnonzero(columns)
    timed = tree.map_structure(
        lambda x: tf.gather(x[first:], which, axis=1), (batch.unroll.timestep, batch.unroll.output)
    )
    untimed = tree.map_structure(
        lambda x: tf.gather(x, which),
        (core_state, batch.unroll.frames, batch.unroll.parameter_version),
    )
    return Batch(Unroll(*timed, *untimed), tf.gather(batch.is_replay, which))


def q_agent(config: AgentConfig) -> Agent:
    config = dataclasses.replace(config, policy="epsilon_greedy", epsilon=EpsilonConfig(anneal=0.0))
    return build.agent(config, VECTOR, CHOICE, seed=1)


@pytest.mark.parametrize("config", AGENTS.values(), ids=AGENTS)
@pytest.mark.parametrize("name", ["impala", "critic", "q_learning"])
def test_replayed_unrolls_begin_after_the_burn_in(name: str, config: AgentConfig) -> None:
    """With the state of the present network there, as a constant; fresh ones from their start."""
    if name == "q_learning":
        agent = q_agent(config)
    else:
        agent = build.agent(config, VECTOR, CHOICE, seed=1)
    batch = batch_for(agent)

    output, gradients = loss_and_gradients(made(name, agent), batch)

    early = tree.map_structure(lambda x: x[:ROWS], batch.unroll.timestep)
    _, after = agent.unroll(early, batch.unroll.core_state)
    alone = made(name, agent, rows=0)
    fresh, by_fresh = loss_and_gradients(alone, part(batch, ~IS_REPLAY, 0, batch.unroll.core_state))
    late, by_late = loss_and_gradients(alone, part(batch, IS_REPLAY, ROWS, after))
    loss = output.loss.numpy()
    np.testing.assert_allclose(loss[:, ~IS_REPLAY], fresh.loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss[ROWS:, IS_REPLAY], late.loss, rtol=1e-4, atol=1e-6)
    assert not loss[:ROWS, IS_REPLAY].any()
    for gradient, one, other in zip(gradients, by_fresh, by_late, strict=True):
        np.testing.assert_allclose(gradient, one + other, rtol=1e-3, atol=1e-5)


def test_the_burn_in_is_silent() -> None:
    """No reward, action or policy in it changes what is learned; what was seen does."""
    agent = build.agent(AGENTS["lstm"], VECTOR, CHOICE, seed=1)
    algorithm, batch = made("impala", agent), batch_for(agent)
    expected = loss_and_gradients(algorithm, batch)

    def changed(leaf: tf.Tensor, rows: slice, value: float) -> tf.Tensor:
        array = leaf.numpy()
        array[rows, IS_REPLAY] = value
        return tf.constant(array)

    rows = slice(1, ROWS + 1)  # the results of the steps of the burn-in
    timestep, output = batch.unroll.timestep, batch.unroll.output
    silent = batch._replace(
        unroll=batch.unroll._replace(
            timestep=timestep._replace(reward=changed(timestep.reward, rows, np.nan)),
            output=output._replace(
                policy=changed(output.policy, rows, np.nan),
                baseline=changed(output.baseline, rows, np.inf),
            ),
        )
    )
    for a, b in zip(
        tf.nest.flatten(loss_and_gradients(algorithm, silent)),
        tf.nest.flatten(expected),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    seen = timestep._replace(observation=changed(timestep.observation, slice(0, ROWS), 1.0))
    other, _ = loss_and_gradients(
        algorithm, batch._replace(unroll=batch.unroll._replace(timestep=seen))
    )
    differs = other.loss.numpy() != expected[0].loss.numpy()
    assert differs[ROWS, 2]  # the second environment begins an episode there and forgets
    assert not differs[ROWS:, 1].any() and not differs[:, ~IS_REPLAY].any()


# ---------------------------------------------------------------------------- the stored state


def replayed(batch: Batch) -> Batch:
    """The batch, all of it replayed, in which no episode begins."""
    middle = tf.fill(batch.unroll.timestep.step_type.shape, tf.constant(StepType.MID, tf.int8))
    timestep = batch.unroll.timestep._replace(step_type=middle)
    return Batch(batch.unroll._replace(timestep=timestep), tf.fill([B], True))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_influence_is_what_a_leaky_memory_has_left(rows: int) -> None:
    agent = leaky()
    batch = replayed(batch_for(agent))

    found = burn_in.influence(agent, batch, rows).numpy()

    stored = batch.unroll.core_state[0]["sum"].numpy().astype(float)
    left = stored / 2.0**rows
    seen = batch.unroll.timestep.observation.numpy().astype(float)
    state = left + sum(seen[t] / 2.0 ** (rows - 1 - t) for t in range(rows))
    norm = np.linalg.norm
    assert found == pytest.approx(np.mean(norm(left, axis=1) / norm(state, axis=1)), rel=1e-4)


# ---------------------------------------------------------------------------- a run


def learner_config(rows: int) -> Config:
    return dataclasses.replace(
        PRESETS["bandit"][1],
        algorithm="impala",
        agent=AgentConfig(hidden_sizes=(8,), core="lstm", lstm_size=5),
        impala=ImpalaConfig(trust_region=0.5),
        mix=MixConfig(fresh=2, replayed=2),
        replay=ReplayConfig(burn_in=rows),
        learner=LearnerConfig(unroll_length=T),
    )


@pytest.mark.parametrize("rows", [0, ROWS])
def test_a_learner_tells_of_both_in_its_metrics(rows: int) -> None:
    config = rules.validate(learner_config(rows))
    agent = build.agent(config.agent, VECTOR, CHOICE, seed=1)
    learner = Learner(build.algorithm("impala", config, agent), config, phases.make(config)[0])
    batch = batch_for(agent)
    arrays = tree.map_structure(lambda x: x.numpy(), batch)

    update = learner.update(arrays)

    assert isinstance(update, Update)
    assert 0.0 < update.metrics["trust_region/left_out"] < 1.0
    assert ("replay/state_influence" in update.metrics) == (rows > 0)
    if rows:
        assert 0.0 < update.metrics["replay/state_influence"] < 2.0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"replay": {"burn_in": 6}}, "replay.burn_in is 6 and learner.unroll_length 6"),
        ({"agent": {"core": "feed_forward"}}, "agent.core is feed_forward, which has no state"),
        ({"mix": {"replayed": 0}}, "replay.burn_in is 2, but mix.replayed is 0"),
        ({"algorithm": "actor_critic"}, "actor_critic does not correct"),
        ({"replay": {"burn_in": -1}}, "replay.burn_in is -1"),
        ({"impala": {"trust_region": -0.1}}, "impala.trust_region is -0.1"),
    ],
)
def test_what_cannot_be_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        rules.validate(values.overlay(learner_config(ROWS), data))
    assert message in str(caught.value)
