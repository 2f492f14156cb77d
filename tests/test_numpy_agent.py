"""The step in NumPy is the agent's, for every torso, core and distribution that it serves."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import tree
from distribution_suite import DistributionConformance
from test_agent import B, booleans, experience, row, wrapped
from test_distributions import CASES

from actors import policy
from actors.actor import Actor
from impala import environments
from impala.agents import distributions, numpy_agent, numpy_distributions
from impala.agents.agent import Agent
from impala.agents.distributions import Distribution
from impala.agents.numpy_agent import NumPyAgent
from impala.agents.numpy_distributions import Random
from impala.config.schema import AgentConfig, EnvironmentConfig, EpsilonConfig
from impala.environments.spaces import TASK, choices
from impala.parts import build
from impala.types import Nest, Parameters

spaces = gym.spaces

CHOICE = spaces.Discrete(3)
VECTOR = spaces.Box(-1.0, 1.0, (4,), np.float32)
SEED = (3, 5)

OBSERVATIONS: dict[str, gym.Space] = {
    "vector": VECTOR,
    "double": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "pixels": spaces.Box(0, 255, (5, 4), np.uint8),
    "bytes of 0 and 1": spaces.Box(0, 1, (5, 4, 2), np.uint8),
    "booleans": booleans(4, 4, 2),
    "integers": spaces.Box(-3, 3, (2,), np.int32),
    "choice": spaces.Discrete(4, start=-1),
    "choices": spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[0, 1], [-1, 2]])),
    "bits": spaces.MultiBinary((2, 2)),
    "nested": spaces.Dict({"b": spaces.Tuple([VECTOR, CHOICE]), "a": spaces.MultiBinary(3)}),
    "wrapped": wrapped(VECTOR),
    "wrapped choices": wrapped(spaces.MultiDiscrete([2, 3])),
}
SMALL = AgentConfig(hidden_sizes=(8, 7))
LSTM = AgentConfig(hidden_sizes=(8,), core="lstm", lstm_size=5)
SEPARATE = AgentConfig(hidden_sizes=(6,), core="lstm", lstm_size=5, separate_baseline=True)
EPSILON = EpsilonConfig(anneal=0.5, finals=(0.3, 0.01), weights=(1.0, 2.0))
GREEDY = AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy", epsilon=EPSILON)


def masked(space: gym.Space, action_space: gym.Space) -> spaces.Dict:
    allowed = spaces.Box(0, 1, (sum(choices(action_space)),), np.int8)
    return spaces.Dict({"observation": space, "action_mask": allowed})


def numbered(space: gym.Space, tasks: int) -> spaces.Dict:
    parts = space.spaces if isinstance(space, spaces.Dict) else {"observation": space}
    return spaces.Dict({**parts, TASK: spaces.Discrete(tasks)})


CASE = tuple[AgentConfig, gym.Space, gym.Space]
AGENTS: dict[str, CASE] = {
    **{f"sees {name}": (SMALL, space, CHOICE) for name, space in OBSERVATIONS.items()},
    **{
        f"chooses {name}": (SMALL, masked(VECTOR, space) if choices(space) else VECTOR, space)
        for name, space in CASES.items()
    },
    "auto": (AgentConfig("auto", hidden_sizes=(8, 7)), OBSERVATIONS["nested"], CHOICE),
    "no layer": (AgentConfig(hidden_sizes=()), VECTOR, CHOICE),
    "lstm": (LSTM, wrapped(VECTOR), CHOICE),
    "lstm, no layer": (AgentConfig(hidden_sizes=(), core="lstm", lstm_size=5), VECTOR, CHOICE),
    "separate": (AgentConfig(hidden_sizes=(6, 5), separate_baseline=True), VECTOR, CHOICE),
    "separate lstm": (SEPARATE, wrapped(VECTOR), CHOICE),
    "epsilon-greedy": (GREEDY, VECTOR, spaces.Discrete(4, start=2)),
    "masked epsilon-greedy": (GREEDY, masked(VECTOR, CHOICE), CHOICE),
    "constant epsilon": (
        AgentConfig(policy="epsilon_greedy", epsilon=EpsilonConfig(anneal=0.0)),
        VECTOR,
        CHOICE,
    ),
    "normalised": (
        dataclasses.replace(SEPARATE, normalise_observations=True),
        wrapped(OBSERVATIONS["nested"]),
        CHOICE,
    ),
    "normalised doubles": (
        dataclasses.replace(SMALL, normalise_observations=True),
        OBSERVATIONS["double"],
        CHOICE,
    ),
    "popart": (dataclasses.replace(SMALL, popart=True), VECTOR, CHOICE),
    "popart of three tasks": (dataclasses.replace(SMALL, popart=True), numbered(VECTOR, 3), CHOICE),
    "popart of two, separate": (
        dataclasses.replace(SEPARATE, popart=True),
        numbered(masked(VECTOR, CHOICE), 2),
        CHOICE,
    ),
}


def pair(
    config: AgentConfig, observation_space: gym.Space, action_space: gym.Space
) -> tuple[Agent, NumPyAgent]:
    """An agent with weights that matter, and the same in NumPy."""
    agent = build.agent(config, observation_space, action_space)
    rng = np.random.default_rng(2)
    for variable in agent.variables:
        values = 0.7 if "progress" in variable.name else rng.normal(0.0, 0.5, variable.shape)
        variable.assign(np.abs(values) if "variance" in variable.name else values)
    twin = NumPyAgent(config, (observation_space, action_space), agent.variables)
    twin.assign([variable.numpy() for variable in agent.variables])
    return agent, twin


def assert_alike(found: Nest, expected: Nest) -> None:
    for one, other in zip(tree.flatten(found), tree.flatten(expected), strict=True):
        other = np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", AGENTS)
def test_a_step_is_the_agents_step(name: str) -> None:
    """Policy, baseline and core state over rows in which episodes begin and end at random."""
    config, observation_space, action_space = AGENTS[name]
    agent, twin = pair(config, observation_space, action_space)
    timesteps = experience(observation_space)
    core_state, own_core_state = agent.initial_state(B), twin.initial_state(B)
    random = Random(B, SEED)
    assert_alike(own_core_state, core_state)

    for t in range(len(timesteps.reward)):
        timestep = row(timesteps, t)
        before = tree.map_structure(np.copy, own_core_state)
        expected, core_state = agent.step(timestep, core_state, tf.constant(SEED))
        output, after = twin.step(timestep, own_core_state, random)

        assert_alike(output[1:], expected[1:])
        tree.map_structure(np.testing.assert_array_equal, own_core_state, before)
        tree.assert_same_structure(after, core_state)
        assert_alike(after, core_state)
        tree.assert_same_structure(output.action, expected.action)
        for one, other in zip(
            tree.flatten(output.action), tree.flatten(expected.action), strict=True
        ):
            assert (one.dtype, one.shape) == (other.dtype.as_numpy_dtype, other.shape)
        own_core_state = after


class Drawn:
    """A distribution whose masks and samples are NumPy's, and the rest TensorFlow's."""

    def __init__(self, space: gym.Space, config: AgentConfig = SMALL) -> None:
        self._truth: Distribution = distributions.for_space(space)
        self._sampler = numpy_distributions.for_agent(config, space)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._truth, name)

    def mask(self, outputs: tf.Tensor, allowed: np.ndarray) -> tf.Tensor:
        found = self._sampler.mask(np.asarray(outputs), allowed)
        np.testing.assert_array_equal(found, self._truth.mask(outputs, allowed))
        return tf.constant(found)

    def sample_and_log_prob(
        self, parameters: tf.Tensor, seed: tuple[int, int]
    ) -> tuple[Nest, tf.Tensor]:
        random = Random(len(parameters), seed)
        with np.errstate(all="ignore"):  # as in a step
            sample = self._sampler.sample(np.asarray(parameters), random)
        sample = tree.map_structure(tf.constant, sample)
        return sample, self._truth.log_prob(parameters, sample)


@pytest.mark.parametrize("name", CASES)
def test_samples_pass_the_suite_of_distributions(name: str) -> None:
    """Probabilities are those that the learner computes from the parameters that travel."""

    class Suite(DistributionConformance):
        action_space = CASES[name]

        def make(self) -> Distribution:
            return Drawn(self.action_space)  # type: ignore[return-value]

    suite = Suite()
    suite.test_sampling_frequencies_are_the_probabilities()
    suite.test_samples_are_actions_of_the_space()
    suite.test_the_seed_decides_and_rows_differ()
    suite.test_the_mode_of_a_certain_policy_is_what_it_samples()
    if choices(suite.action_space):
        suite.test_masked_choices_are_impossible()


@pytest.mark.parametrize("allowed", [(1, 1, 1, 1), (1, 0, 1, 1), (0, 1, 0, 1)])
def test_epsilon_greedy_samples_have_the_right_probabilities(
    allowed: tuple[int, ...],
) -> None:
    n, space = 20_000, spaces.Discrete(4, start=2)
    truth = distributions.epsilon_greedy_for_space(space, EPSILON)
    sampler = numpy_distributions.for_agent(GREEDY, space)
    outputs = np.tile(np.array([0.3, 0.9, -0.2, 0.5], np.float32), (n, 1))
    outputs = sampler.mask(outputs, np.tile(np.array(allowed), (n, 1)))
    parameters = np.concatenate([outputs, np.full((n, 1), 0.4, np.float32)], axis=-1)

    actions = sampler.sample(parameters, Random(n, SEED))

    every = np.arange(2, 6)
    expected = n * np.exp(truth.log_prob(parameters[:4], every))
    seen = np.bincount(actions - 2, minlength=4)
    possible = expected > 0
    assert (seen[~possible] == 0).all()
    statistic = np.sum((seen - expected)[possible] ** 2 / expected[possible])
    freedom = np.count_nonzero(possible)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_array_equal(actions, sampler.sample(parameters, Random(n, SEED)))


def test_a_masked_action_is_never_chosen() -> None:
    """Over many rows with other masks in each, by the whole step."""
    space = spaces.MultiDiscrete([3, 2])
    _, twin = pair(SMALL, masked(VECTOR, space), space)
    timesteps = experience(masked(VECTOR, space), rows=300)
    random, state = Random(B, SEED), twin.initial_state(B)
    for t in range(300):
        timestep = row(timesteps, t)
        output, state = twin.step(timestep, state, random)
        mask = timestep.observation["action_mask"]
        for part, chosen in zip((mask[:, :3], mask[:, 3:]), output.action.T, strict=True):
            forbidden = part.any(axis=1) & (part[np.arange(B), chosen] == 0)
            assert not forbidden.any()


def parameters_of(agent: Agent) -> Parameters:
    return Parameters(5, 1, 0.0, 0, [variable.numpy() for variable in agent.variables])


def test_the_learner_finds_the_policy_that_acted() -> None:
    """An actor's unrolls, on the learner's network: the same policy, baseline and core state."""
    config = EnvironmentConfig("Catch", last_action=True, last_reward=True, time_in_episode=True)
    environment = environments.make(config, 6)
    of = environment.observation_space, environment.action_space
    agent, _ = pair(SEPARATE, *of)
    chosen = policy.make_policy(agent, SEPARATE, of)
    assert isinstance(chosen, policy.InNumPy)
    stream = Actor(lambda task: [environment], chosen, 7, seed=1).run(lambda: parameters_of(agent))
    core_state = agent.initial_state(6)
    for _ in range(5):
        unroll = tree.map_structure(np.copy, next(stream).unroll)
        assert_alike(unroll.core_state, core_state)
        rows = tree.map_structure(lambda x: x[:-1], unroll.timestep)
        output, core_state = agent.unroll(rows, core_state)
        assert_alike((unroll.output.policy[1:], unroll.output.baseline[1:]), tuple(output))


class OwnDiscrete(spaces.Discrete):
    """A space of somebody's own."""


def test_what_is_not_known_exactly_acts_with_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(config: AgentConfig, *of: Any) -> policy.Policy:
        return policy.make_policy(build.agent(config, *of), config, of)

    assert isinstance(chosen(SMALL, VECTOR, CHOICE), policy.InNumPy)
    assert isinstance(chosen(SMALL, VECTOR, OwnDiscrete(3)), policy.Compiled)
    assert isinstance(chosen(SMALL, OwnDiscrete(3), CHOICE), policy.Compiled)
    assert isinstance(chosen(SMALL, spaces.Dict({"a": OwnDiscrete(3)}), CHOICE), policy.Compiled)
    stacks = dataclasses.replace(SMALL, frame_stack=2)
    assert isinstance(chosen(stacks, VECTOR, CHOICE), policy.Compiled)
    assert isinstance(chosen(AgentConfig("small"), booleans(10, 10, 4), CHOICE), policy.Compiled)
    assert isinstance(chosen(AgentConfig(hidden_sizes=(800,) * 2), VECTOR, CHOICE), policy.Compiled)
    monkeypatch.setattr(numpy_agent, "MOST_WEIGHTS", 100)
    assert isinstance(chosen(SMALL, VECTOR, CHOICE), policy.Compiled)


def test_commands_multiply_in_one_thread_by_default() -> None:
    """It has to be said before NumPy is imported, which commands do."""
    script = """
import os, sys
from impala import __main__
assert "numpy" not in sys.modules
__main__.main()
print(os.environ["OPENBLAS_NUM_THREADS"], "numpy" in sys.modules)
"""
    environ = {name: value for name, value in os.environ.items() if "BLAS" not in name}
    for told, expected in (({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**environ, **told},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert done.stdout.splitlines()[-1] == f"{expected} True"
