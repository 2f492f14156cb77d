"""Running normalisation: by statistics of all that was taken in, the same wherever it is done."""

import dataclasses
import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import test_learner_run
import tree
from test_agent import VECTOR, assert_close, experience, wrapped
from test_learner_run import B, Scene, Scripted, T

from impala.agents.normaliser import Moments, Normaliser, merged
from impala.config.schema import AgentConfig, Config, EnvironmentConfig
from impala.parts import build, sections
from impala.types import StepType
from learner.data.mix import Prepared
from learner.update.peers import Standing

BOX = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
NEST = gym.spaces.Dict(a=BOX, b=gym.spaces.Tuple([gym.spaces.MultiBinary(3), VECTOR]))
CHOICE = gym.spaces.Discrete(3)


def moments(rows: np.ndarray) -> Moments:
    return Moments(len(rows), rows.mean(axis=0).tolist(), rows.var(axis=0).tolist())


def test_merged_moments_are_those_of_all_rows() -> None:
    """Given parts of different size, mean and deviation, and a number that never changes."""
    rng = np.random.default_rng(0)
    sizes = enumerate((1, 2, 300, 7, 40), 1)
    parts = [rng.normal((k, -2e4 * k, 7.0), (k, 300.0, 0.0), (n, 3)) for k, n in sizes]
    total = Moments(0.0, [0.0] * 3, [1.0] * 3)
    for part in parts:
        total = merged(total, moments(part))
    assert_close(total, moments(np.concatenate(parts)), rtol=1e-12)


def test_numbers_are_normalised_and_nothing_else() -> None:
    # Given statistics of observations [T, B, ...] that were taken in in three parts, some of them
    # far from 0 ...
    space = wrapped(NEST)
    seen = experience(space, rows=50).observation
    seen["observation"]["a"] = 100.0 + 0.01 * seen["observation"]["a"]
    normaliser = Normaliser(space)
    for part in (slice(5), slice(5, 7), slice(7, 50)):
        rows = tree.map_structure(lambda x, part=part: x[part], seen)
        normaliser.update([normaliser.moments(rows)])
    # ... then the numbers get mean 0 and variance 1, and the bits between them stay what they are.
    own = seen["observation"]
    found = tree.map_structure(np.asarray, normaliser(own))
    for raw, normal in ((own["a"], found["a"]), (own["b"][1], found["b"][1])):
        raw = raw.astype(np.float64)
        expected = (raw - raw.mean(axis=(0, 1))) / raw.std(axis=(0, 1))
        np.testing.assert_allclose(normal, expected, atol=2e-3)  # of float32, at 100
        assert normal.dtype == np.float32
    np.testing.assert_array_equal(found["b"][0], own["b"][0])
    # What is further away than 10 deviations is clipped.
    assert (normaliser({**own, "a": own["a"] + 1e6})["a"].numpy() == 10.0).all()


@pytest.mark.parametrize("stack", [1, 3])
def test_the_network_sees_normalised_observations(stack: int) -> None:
    # Given an agent with statistics, also one of stacked frames, and the same one without ...
    config = AgentConfig(hidden_sizes=(8,), separate_baseline=True, frame_stack=stack)
    plain = build.agent(config, wrapped(VECTOR), CHOICE)
    config = dataclasses.replace(config, normalise_observations=True)
    agent = build.agent(config, wrapped(VECTOR), CHOICE)
    steps = experience(wrapped(VECTOR))
    steps.step_type[0] = StepType.FIRST
    steps.observation["observation"] += np.float32(3.0)
    normaliser = Normaliser(wrapped(VECTOR))
    for each in (normaliser, agent.normaliser):
        assert each is not None
        each.update([each.moments(steps.observation)])
    # ... then it makes of observations what the other one makes of normalised ones.
    own = normaliser(steps.observation["observation"])
    normal = steps._replace(observation={**steps.observation, "observation": np.asarray(own)})
    by_name = {variable.name: variable for variable in agent.variables}
    for variable in plain.variables:
        variable.assign(by_name[variable.name])
    (expected, _), (output, _) = (
        each.unroll(shown, each.initial_state(steps.reward.shape[1]))
        for each, shown in ((plain, normal), (agent, steps))
    )
    assert_close(output, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "policy", "copy"),
    [
        ("q_learning", "epsilon_greedy", "_target"),
        ("impact", "stochastic", "_target"),
        ("custom_algorithm:Slow", "stochastic", "_copy"),
    ],
)
def test_a_target_network_sees_them_by_the_statistics_of_now(
    monkeypatch: pytest.MonkeyPatch, name: str, policy: Any, copy: str
) -> None:
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "examples")
    config = AgentConfig(hidden_sizes=(8,), policy=policy, normalise_observations=True)
    agent = build.agent(config, VECTOR, CHOICE)
    whole = sections.compose(Config(algorithm=name, agent=config))
    algorithm = build.algorithm(name, whole, agent)
    assert agent.normaliser is not None
    steps = experience(VECTOR)
    agent.normaliser.update([agent.normaliser.moments(steps.observation + np.float32(3.0))])

    expected, found = (
        each.unroll(steps, each.initial_state(steps.reward.shape[1]))[0]
        for each in (agent, getattr(algorithm, copy))
    )

    tree.map_structure(np.testing.assert_array_equal, found, expected)


@pytest.fixture
def scene(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A training loop whose agent sees four normalised numbers, and ones not taken in yet."""
    config = dataclasses.replace(
        test_learner_run.CONFIG,
        environment=EnvironmentConfig(id="CartPole-v1"),
        agent=AgentConfig(hidden_sizes=(8,), normalise_observations=True),
    )
    monkeypatch.setattr(test_learner_run, "CONFIG", config)
    return Scene(tmp_path / "run")


def statistics(scene: Scene) -> list[np.ndarray]:
    normaliser = scene.training.learner.normaliser
    assert normaliser is not None
    return [variable.numpy() for variable in normaliser.variables]  # rows, mean, variance


def test_each_fresh_observation_counts_once_for_all_peers(scene: Scene) -> None:
    # Given a message of three unrolls, of which this peer has taken in two, at first only to warm
    # up replay, and then an update from replay ...
    prepared = scene.prepared(is_replay=True)
    assert prepared.batch is not None
    unroll = prepared.batch.unroll
    seen = np.random.default_rng(0).normal(5.0, 2.0, (T + 1, 3, 4)).astype(np.float32)
    message = unroll._replace(timestep=unroll.timestep._replace(observation=seen))
    of_other = np.random.default_rng(1).normal(-3.0, 1.0, (6, 4))
    idle = list(Standing(False, False, False, None, queued=0, lag=None, waited_seconds=0.0))
    ends = list(Standing(True, False, False, None, queued=0, lag=None, waited_seconds=0.0))
    learns = list(Standing(False, True, False, None, queued=0, lag=None, waited_seconds=0.0))
    script = [idle, [0, 0, 0, 0], [], learns, [1, 6, 6, 0], [moments(of_other)], ends]
    scene.training._peers = Scripted(script)
    scene.batches.ready = [prepared._replace(batch=None, fresh=[(message, slice(1, 3))]), prepared]
    scene.iterations(2, lambda iteration: None)
    # ... then the rows after the first of these two count, and what the other peer has taken in.
    rows = np.concatenate([seen[1:, 1:].reshape(-1, 4), of_other])
    assert_close(statistics(scene), [len(rows), rows.mean(axis=0), rows.var(axis=0)], rtol=1e-5)
    assert not script


def test_a_batch_that_is_refused_does_not_count(scene: Scene) -> None:
    before = statistics(scene)
    prepared = scene.prepared()
    assert prepared.batch is not None
    prepared.batch.unroll.timestep.reward[:] = np.nan
    scene.batches.ready = [prepared._replace(fresh=[(prepared.batch.unroll, slice(B))])]
    scene.iterations(1, lambda iteration: None)
    assert scene.training.learner.counters.updates == 0
    assert_close(statistics(scene), before)


def test_a_resumed_run_goes_on_with_its_statistics(scene: Scene) -> None:
    prepared = scene.prepared()
    assert prepared.batch is not None
    seen = prepared.batch.unroll.timestep.observation
    seen[:] = np.random.default_rng(0).normal(5.0, 2.0, seen.shape)
    taken: Prepared = prepared._replace(fresh=[(prepared.batch.unroll, slice(B))])
    scene.batches.ready = [taken]
    scene.iterations(1, lambda iteration: None)
    scene.checkpoints.save(scene.training.learner)

    resumed = Scene(scene.logdir)
    assert statistics(resumed)[0] == B * T
    resumed.batches.ready, scene.batches.ready = [taken], [taken]
    for each in (scene, resumed):
        each.iterations(1, lambda iteration: None)
    one, other = (each.training.learner.variables() for each in (scene, resumed))
    tree.map_structure(np.testing.assert_array_equal, one, other)
