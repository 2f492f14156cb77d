"""Q-learning and soft actor-critic: against sums written out in NumPy, and what moves what."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.agents.distributions import EpsilonGreedy
from impala.algorithms.base import Algorithm, LossOutput, Played
from impala.algorithms.sac import Sac
from impala.config import schema as configs
from impala.config.schema import (
    AgentConfig,
    ObjectiveConfig,
    QLearningConfig,
    SacConfig,
)
from impala.parts import build
from impala.testing.algorithms import AlgorithmConformance
from impala.types import Batch, StepType

T, B = 6, 5
OBSERVATIONS = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
CHOICES = gym.spaces.Discrete(3, start=2)
BOX = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
VALUES = AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy")
DISCOUNT = 0.9


def make(
    action_space: gym.Space,
    config: AgentConfig,
    settings: QLearningConfig | SacConfig,
    **objective: Any,
) -> tuple[Algorithm, Batch]:
    """An algorithm, an agent's, and a batch in which episodes end in every way."""
    agent = build.agent(config, OBSERVATIONS, action_space, seed=1)
    whole = configs.Config(
        agent=config,
        objective=ObjectiveConfig(discount=DISCOUNT, **objective),
    )
    if isinstance(settings, QLearningConfig):
        name, whole = "q_learning", dataclasses.replace(whole, q_learning=settings)
    else:
        name, whole = "sac", dataclasses.replace(whole, sac=settings)
    return build.algorithm(name, whole, agent), make_batch(agent, action_space)


def make_batch(agent: Agent, action_space: gym.Space, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    spec = build.unroll_spec(agent, OBSERVATIONS, action_space, T)
    unroll = tree.map_structure(
        lambda leaf: rng.normal(size=(leaf.shape[0], B, *leaf.shape[1:])).astype(leaf.dtype),
        spec._replace(core_state=()),
    )
    action_space.seed(seed)
    actions = [[action_space.sample() for _ in range(B)] for _ in range(T + 1)]
    unroll.output.action[:] = np.array(actions)
    unroll.timestep.step_type[:] = StepType.MID
    unroll.timestep.discount[:] = 1.0
    for environment, row, discount in ((1, 2, 0.0), (2, 3, 1.0), (3, T, 1.0)):  # over, cut, cut
        unroll.timestep.step_type[row, environment] = StepType.LAST
        unroll.timestep.discount[row, environment] = discount
        if row < T:
            unroll.timestep.step_type[row + 1, environment] = StepType.FIRST
    unroll.timestep.step_type[0, 4] = StepType.LAST  # a seam right at the beginning
    unroll.timestep.step_type[1, 4] = StepType.FIRST
    core_state = tree.map_structure(
        lambda leaf: np.zeros((B, *leaf.shape), leaf.dtype), spec.core_state
    )
    unroll = unroll._replace(
        core_state=core_state, frames=np.ones(B, np.int32), parameter_version=np.zeros(B, np.int64)
    )
    return Batch(unroll, np.zeros(B, np.bool_))


def is_seam(batch: Batch, t: int, b: int) -> bool:
    return bool(batch.unroll.timestep.step_type[t + 1, b] == StepType.FIRST)


def loss_of(algorithm: Algorithm, batch: Batch) -> LossOutput:
    return algorithm.loss(tree.map_structure(tf.convert_to_tensor, batch))


def gradients(
    algorithm: Algorithm, batch: Batch, variables: Sequence[tf.Variable]
) -> list[np.ndarray]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(loss_of(algorithm, batch).loss)
    return [
        np.zeros(variable.shape) if gradient is None else gradient.numpy()
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True)
    ]


class TestQLearningConformance(AlgorithmConformance):
    action_space = CHOICES
    agent_config = VALUES

    def make(self, agent: Agent) -> Algorithm:
        return build.algorithm("q_learning", configs.Config(agent=VALUES), agent)

    def behaviour(self, agent: Agent, rng: np.random.Generator) -> np.ndarray:
        """Values, and an epsilon."""
        policy = super().behaviour(agent, rng)
        policy[..., -1] = 0.1
        return policy


class TestSacConformance(AlgorithmConformance):
    action_space = BOX
    is_random = True

    def make(self, agent: Agent) -> Algorithm:
        return build.algorithm("sac", configs.Config(), agent)


class TestSacWithAValueNetworkConformance(TestSacConformance):
    def make(self, agent: Agent) -> Algorithm:
        config = configs.Config(sac=SacConfig(value_network=True))
        return build.algorithm("sac", config, agent)


# ---------------------------------------------------------------------------- Q-learning


def expected_targets(batch: Batch, state_values: np.ndarray, n: int) -> np.ndarray:
    """One step of one environment at a time."""
    timestep = batch.unroll.timestep
    targets = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            factor = 1.0
            for k in range(t, T):
                if is_seam(batch, k, b):
                    break  # what came before it was bootstrapped already
                targets[t, b] += factor * timestep.reward[k + 1, b]
                factor *= DISCOUNT * timestep.discount[k + 1, b]
                is_last = k + 1 == t + n or k + 1 == T or is_seam(batch, k + 1, b)
                if is_last:
                    targets[t, b] += factor * state_values[k + 1, b]
                    break
    return targets


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 10**9])
def test_the_loss_is_hubers_of_the_n_step_error(n: int, double: bool) -> None:
    settings = QLearningConfig(steps=n, double=double, huber_delta=0.7)
    algorithm, batch = make(CHOICES, VALUES, settings)
    rng = np.random.default_rng(3)
    for variable in algorithm.variables:  # the target network knows something else
        if variable.dtype == tf.float32:
            variable.assign(rng.normal(size=variable.shape))
    values, others = (
        agent.unroll(batch.unroll.timestep, batch.unroll.core_state)[0].policy.numpy()
        for agent in (algorithm.agent, algorithm._target)
    )
    best = (values if double else others).argmax(-1)
    state_values = np.take_along_axis(others, best[..., None], -1)[..., 0]
    targets = expected_targets(batch, state_values, n)
    taken = np.take_along_axis(values[:-1], batch.unroll.output.action[1:, :, None] - 2, -1)[..., 0]
    error = np.abs(targets - taken)
    expected = np.where(error < 0.7, 0.5 * error**2, 0.7 * (error - 0.35))

    loss = loss_of(algorithm, batch).loss.numpy()

    seams = np.array([[is_seam(batch, t, b) for b in range(B)] for t in range(T)])
    np.testing.assert_allclose(loss, np.where(seams, 0.0, expected), rtol=1e-4, atol=1e-5)
    assert 0 < seams.sum() < seams.size


def test_the_policy_alone_is_learned() -> None:
    algorithm, _ = make(CHOICES, VALUES, QLearningConfig())
    learned = {id(variable) for variable in algorithm.learned_variables}
    assert learned == {id(v) for v in algorithm.agent.policy_variables}


def test_the_target_network_follows_every_few_updates() -> None:
    algorithm, _ = make(CHOICES, VALUES, QLearningConfig(target_updates=3))
    for variable in algorithm.learned_variables:
        variable.assign_add(tf.ones_like(variable))
    follows = []
    for _ in range(6):
        algorithm.after_update(0.25, {})
        pairs = zip(algorithm._target.variables, algorithm.agent.variables, strict=True)
        follows.append(all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs))
        for variable in algorithm.learned_variables:
            variable.assign_add(tf.ones_like(variable))
    assert follows == [False, False, True, False, False, True]
    assert isinstance(algorithm.agent.distribution, EpsilonGreedy)
    assert algorithm.agent.distribution.progress.numpy() == 0.25


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_frames": 100}, [False, True, False]),
        ({"target_episodes": 3}, [True, False, True]),
    ],
)
def test_the_target_network_follows_every_few_frames_or_episodes(
    settings: dict[str, Any], expected: list[bool]
) -> None:
    algorithm, _ = make(CHOICES, VALUES, QLearningConfig(target_updates=1, **settings))
    counted = [Played(0, 0), Played(99, 3), Played(201, 5), Played(299, 6)]
    follows = []
    for before, after in itertools.pairwise(counted):
        for variable in algorithm.learned_variables:
            variable.assign_add(tf.ones_like(variable))
        algorithm.after_update(0.25, {})
        algorithm.after_count(before, after)
        pairs = zip(algorithm._target.variables, algorithm.agent.variables, strict=True)
        follows.append(all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs))
    assert follows == expected


def epsilon_greedy(**kwargs: Any) -> EpsilonGreedy:
    kwargs = {"anneal": 0.5, "finals": (0.1, 0.5), "weights": (0.25, 0.75), **kwargs}
    return EpsilonGreedy(4, **kwargs)


def test_every_environment_keeps_an_annealed_epsilon() -> None:
    distribution = epsilon_greedy()
    outputs = tf.zeros([2000, 4])
    for progress, finals in (
        (0.0, {1.0}),
        (0.25, {0.55, 0.75}),
        (0.5, {0.1, 0.5}),
        (1.0, {0.1, 0.5}),
    ):
        distribution.progress.assign(progress)
        rows = [distribution.behaviour(outputs, tf.constant([7, step])) for step in (1, 2)]
        epsilon = rows[0].numpy()[:, -1]
        assert {round(float(value), 6) for value in epsilon} == finals
        np.testing.assert_array_equal(rows[0], rows[1])  # the same in every step
    assert np.mean(epsilon < 0.2) == pytest.approx(0.25, abs=0.04)
    other = distribution.behaviour(outputs, tf.constant([8, 1])).numpy()[:, -1]
    assert (other != epsilon).any()
    assert not distribution.behaviour(outputs, None).numpy()[:, -1].any()  # when it is tested


def test_epsilon_greedy_against_enumeration() -> None:
    distribution = epsilon_greedy(start=3)
    values = tf.constant([[1.0, 3.0, 2.0, 0.0]] * 2)
    allowed = np.array([[1, 1, 1, 1], [1, 0, 1, 0]])
    masked = distribution.mask(values, tf.constant(allowed))
    p = tf.concat([masked, [[0.3], [0.3]]], axis=-1)
    q = tf.concat([masked, [[0.6], [0.6]]], axis=-1)

    def probabilities(epsilon: float) -> np.ndarray:
        rows = epsilon * allowed / allowed.sum(-1, keepdims=True)
        rows[0, 1] += 1.0 - epsilon
        rows[1, 2] += 1.0 - epsilon
        return rows

    actions = np.arange(3, 7)
    for action in actions:
        with np.errstate(divide="ignore"):
            expected = np.log(probabilities(0.3)[:, action - 3])
        np.testing.assert_allclose(distribution.log_prob(p, [action] * 2), expected, rtol=1e-5)
    of_p, of_q = probabilities(0.3), probabilities(0.6)
    safe = np.where(of_p > 0, of_p, 1.0)
    np.testing.assert_allclose(distribution.entropy(p), -(of_p * np.log(safe)).sum(-1), rtol=1e-5)
    ratio = np.where(of_p > 0, of_p / np.where(of_q > 0, of_q, 1.0), 1.0)
    np.testing.assert_allclose(distribution.kl(p, q), (of_p * np.log(ratio)).sum(-1), rtol=1e-5)
    assert distribution.mode(p).numpy().tolist() == [4, 5]
    many = tf.repeat(p, 20_000, axis=0)
    drawn, log_prob = distribution.sample_and_log_prob(many, tf.constant([1, 2]))
    np.testing.assert_allclose(log_prob, distribution.log_prob(many, drawn))
    for row, expected in zip(drawn.numpy().reshape(2, -1), of_p, strict=True):
        shares = [(row == action).mean() for action in actions]
        np.testing.assert_allclose(shares, expected, atol=0.015)


def test_q_values_of_a_box_are_refused() -> None:
    with pytest.raises(ValueError, match=r"agent\.policy"):
        build.agent(VALUES, OBSERVATIONS, BOX)


def test_who_says_no_values_cannot_learn_them() -> None:
    with pytest.raises(ValueError, match="epsilon_greedy"):
        make(CHOICES, AgentConfig(), QLearningConfig())


# ---------------------------------------------------------------------------- SAC


def make_sac(**settings: Any) -> tuple[Sac, Batch]:
    algorithm, batch = make(BOX, AgentConfig(hidden_sizes=(8,)), SacConfig(**settings))
    rng = np.random.default_rng(5)
    for variable in algorithm.trainable_variables:
        variable.assign_add(0.3 * rng.normal(size=variable.shape))
    return algorithm, batch


def sac_terms(algorithm: Sac, batch: Batch) -> Any:
    """Rewards, targets and so on, written out; gradients may flow wherever they can."""
    timestep, policy = batch.unroll.timestep, algorithm.agent.distribution
    output, _ = algorithm.agent.unroll(timestep, batch.unroll.core_state)
    actions, log_probs = policy.sample_and_log_prob(output.policy, tf.constant([0, 0]))
    log_probs += np.log(2.0) + np.log(0.5)  # half the widths of the box
    points = (actions - [0.0, 0.5]) / [2.0, 0.5]
    alpha = tf.exp(algorithm._log_temperature)
    next_q = tf.reduce_min(algorithm._target_critics(timestep.observation[1:], points[1:]), -1)
    target = timestep.reward[1:] + DISCOUNT * timestep.discount[1:] * (
        next_q - alpha * log_probs[1:]
    )
    taken = (batch.unroll.output.action[1:] - [0.0, 0.5]) / [2.0, 0.5]
    q = algorithm._critics(timestep.observation[:-1], tf.cast(taken, tf.float32))
    worth = tf.reduce_min(algorithm._critics(timestep.observation[:-1], points[:-1]), -1)
    seams = np.array([[is_seam(batch, t, b) for b in range(B)] for t in range(T)])
    keep = tf.cast(~seams, tf.float32)
    critic = tf.reduce_sum(
        keep[..., None] * 0.5 * tf.square(q - tf.stop_gradient(target)[..., None])
    )
    actor = tf.reduce_sum(keep * (tf.stop_gradient(alpha) * log_probs[:-1] - worth))
    lacking = tf.reduce_sum(keep * tf.stop_gradient(log_probs[:-1] - 2.0))
    return critic, actor, -alpha * lacking


def test_each_term_moves_its_own_variables_and_no_others() -> None:
    algorithm, batch = make_sac()
    groups = (
        algorithm.agent.policy_variables,
        algorithm._critics.trainable_variables,
        [algorithm._log_temperature],
    )
    with tf.GradientTape(persistent=True) as tape:
        critic, actor, temperature = sac_terms(algorithm, batch)
    for variables, term in zip(groups, (actor, critic, temperature), strict=True):
        expected = tape.gradient(term, variables)
        for ours, theirs in zip(gradients(algorithm, batch, variables), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    learned = {id(v) for group in groups for v in group}
    assert {id(v) for v in algorithm.learned_variables} == learned
    of_targets = gradients(algorithm, batch, algorithm._target_critics.trainable_variables)
    assert not any(gradient.any() for gradient in of_targets)


def test_critics_learn_from_the_target_of_the_value_network() -> None:
    """Haarnoja et al. 2018, arXiv 1801.01290, equations 5 to 10; the policy on the first critic."""
    algorithm, batch = make_sac(value_network=True, learn_temperature=False, temperature=0.2)
    assert algorithm._value is not None
    algorithm._log_temperature.assign(3.0)  # as of a checkpoint with another fixed temperature
    timestep, policy = batch.unroll.timestep, algorithm.agent.distribution
    now, then = timestep.observation[:-1], timestep.observation[1:]
    keep = np.array([[not is_seam(batch, t, b) for b in range(B)] for t in range(T)])
    for variable in algorithm._target_value.trainable_variables:
        variable.assign_add(tf.ones_like(variable))
    with tf.GradientTape(persistent=True) as tape:
        output, _ = algorithm.agent.unroll(timestep, batch.unroll.core_state)
        actions, log_probs = policy.sample_and_log_prob(output.policy, tf.constant([0, 0]))
        log_probs = log_probs[:-1] + np.log(2.0) + np.log(0.5)  # half the widths of the box
        q_of_policy = algorithm._critics(now, ((actions - [0.0, 0.5]) / [2.0, 0.5])[:-1])
        value_target = tf.reduce_min(q_of_policy, -1) - 0.2 * log_probs
        values = algorithm._value(now)
        v = tf.reduce_sum(keep * 0.5 * tf.square(values - tf.stop_gradient(value_target)))
        target = timestep.reward[1:] + DISCOUNT * timestep.discount[1:] * algorithm._target_value(
            then
        )
        taken = (batch.unroll.output.action[1:] - [0.0, 0.5]) / [2.0, 0.5]
        q = algorithm._critics(now, tf.cast(taken, tf.float32))
        error = tf.square(q - tf.stop_gradient(target)[..., None])
        critic = tf.reduce_sum(keep[..., None] * 0.5 * error)
        actor = tf.reduce_sum(keep * (0.2 * log_probs - q_of_policy[..., 0]))
    groups = (
        algorithm.agent.policy_variables,
        algorithm._critics.trainable_variables,
        algorithm._value.trainable_variables,
    )
    for variables, term in zip(groups, (actor, critic, v), strict=True):
        expected = tape.gradient(term, variables)
        for ours, theirs in zip(gradients(algorithm, batch, variables), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    learned = {id(variable) for group in groups for variable in group}
    assert {id(variable) for variable in algorithm.learned_variables} == learned

    metrics = loss_of(algorithm, batch).metrics
    assert float(metrics["loss_mean/v"]) == pytest.approx(float(v) / keep.sum(), rel=1e-4)
    assert float(metrics["v/max"]) == pytest.approx(values.numpy()[keep].max(), rel=1e-4)


@pytest.mark.parametrize("network", ["critics", "value"])
def test_target_networks_follow_a_little_each_update(network: str) -> None:
    algorithm, _ = make_sac(target_step=0.25, value_network=network == "value")
    followed = getattr(algorithm, f"_{network}").variables
    targets = getattr(algorithm, f"_target_{network}").variables
    before = [variable.numpy() for variable in targets]
    algorithm.after_update(0.5, {})
    for target, old, now in zip(targets, before, followed, strict=True):
        np.testing.assert_allclose(target, 0.75 * old + 0.25 * now.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("space", "config", "message"),
    [
        (CHOICES, AgentConfig(), "continuous"),
        (BOX, AgentConfig(core="lstm", lstm_size=4), "feed_forward"),
    ],
)
def test_what_sac_cannot_learn_is_refused(
    space: gym.Space, config: AgentConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(space, config, SacConfig())


def test_a_time_limit_bootstraps_from_actions_that_there_are() -> None:
    """Given an action mask that forbids everything once the episode is over."""
    space = gym.spaces.Dict(
        observation=OBSERVATIONS, action_mask=gym.spaces.MultiBinary(int(CHOICES.n))
    )
    agent = build.agent(VALUES, space, CHOICES, seed=1)
    whole = configs.Config(agent=VALUES, q_learning=QLearningConfig(steps=1, double=False))
    algorithm = build.algorithm("q_learning", whole, agent)
    spec = build.unroll_spec(agent, space, CHOICES, T)
    losses = []
    for last in (0, 1):
        unroll = tree.map_structure(
            lambda leaf: np.zeros((leaf.shape[0], 1, *leaf.shape[1:]), leaf.dtype),
            spec._replace(core_state=()),
        )
        unroll.timestep.step_type[:] = StepType.MID
        unroll.timestep.step_type[T] = StepType.LAST
        unroll.timestep.discount[:] = 1.0
        unroll.output.action[:] = 2
        unroll.timestep.observation["action_mask"][..., 0] = 1
        unroll.timestep.observation["action_mask"][T, :, 0] = last
        for variable in agent.variables:
            if variable.name.endswith("policy/b:0"):
                variable.assign([-50.0, 0.0, 3.0])
        for target, variable in zip(algorithm._target.variables, agent.variables, strict=True):
            target.assign(variable)
        batch = Batch(unroll, np.zeros(1, bool))
        losses.append(loss_of(algorithm, batch).loss.numpy())
    np.testing.assert_array_equal(*losses)
