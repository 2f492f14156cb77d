"""PopArt: statistics as in the papers, and values that a rescaling of the head preserves."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tree

from actors import policy
from actors.actor import Actor
from impala.agents.agent import Agent
from impala.agents.popart import STEP, PopArt
from impala.config.schema import (
    AgentConfig,
    Config,
    EnvironmentConfig,
    LearnerConfig,
    OptimiserConfig,
    TasksConfig,
)
from impala.environments import Environment
from impala.environments.spaces import TASK
from impala.logdir.checkpoint import Counters
from impala.parts import build
from impala.testing.algorithms import loss_and_gradients
from impala.types import Batch, Parameters, Unroll
from learner.plan import Plan, make_plan
from learner.update.learner import Learner, Refusal, Update

T = 12  # an episode of Catch has 9 steps, so there is a seam
SMALL, LARGE = "Catch", 'Catch{"reward": 1000}'
CONFIG = Config(
    environment=EnvironmentConfig(id="Catch"),
    tasks=TasksConfig(environments=(SMALL, LARGE), order="simultaneous"),
    agent=AgentConfig(hidden_sizes=(8,), popart=True),
    optimiser=OptimiserConfig(name="adam", epsilon=1e-7),
    learner=LearnerConfig(unroll_length=T),
)
ALONE = dataclasses.replace(CONFIG, tasks=TasksConfig(environments=(SMALL,)))


class Oracle:
    """The statistics of one task, written from the papers: a target after the other, in float64."""

    def __init__(self) -> None:
        self.mean, self.second_moment = 0.0, 1.0

    @property
    def deviation(self) -> float:
        variance = self.second_moment - self.mean**2
        return float(np.clip(math.sqrt(max(variance, 0.0)), 1e-4, 1e6))


def observation(tasks: Sequence[int], rows: int = 1) -> dict[str, tf.Tensor]:
    return {TASK: tf.constant([list(tasks)] * rows, tf.int64)}


def head(num_tasks: int, features: int = 5) -> snt.Linear:
    made = snt.Linear(num_tasks)
    made(tf.zeros([1, features]))
    rng = np.random.default_rng(1)
    made.w.assign(rng.normal(size=made.w.shape))
    made.b.assign(rng.normal(size=made.b.shape))
    return made


def update(popart: PopArt, tasks: Sequence[int], targets: Any, weights: Any = 1.0) -> snt.Linear:
    """Updates statistics by targets [T, B] of B tasks. Returns the head."""
    linear = head(popart.num_tasks)
    targets = tf.constant(targets, tf.float32)
    weights = tf.broadcast_to(tf.constant(weights, tf.float32), targets.shape)
    popart.update(linear, observation(tasks, len(targets)), targets, weights)
    return linear


def test_popart_statistics_are_those_of_the_paper() -> None:
    """Targets of a batch have the weight of their number; inside it, each has the same."""
    rng = np.random.default_rng(0)
    popart, oracles = PopArt(3), [Oracle() for _ in range(3)]
    tasks = np.array([0, 2, 0, 2, 2])
    scale, shift = np.array([5.0, 1.0, 300.0])[tasks], np.array([0.0, 0.0, 2e4])[tasks]
    for _ in range(60):
        targets = rng.normal(size=(4, 5)) * scale + shift
        update(popart, tasks.tolist(), targets)
        for task, oracle in enumerate(oracles):
            of_task = targets[:, tasks == task].ravel().astype(np.float32).astype(np.float64)
            if of_task.size:
                kept = (1.0 - STEP) ** of_task.size
                oracle.mean = kept * oracle.mean + (1.0 - kept) * of_task.mean()
                squares = (of_task**2).mean()
                oracle.second_moment = kept * oracle.second_moment + (1.0 - kept) * squares
    np.testing.assert_allclose(popart.means, [each.mean for each in oracles], rtol=1e-4)
    np.testing.assert_allclose(popart.deviations, [each.deviation for each in oracles], rtol=1e-4)
    assert popart.means[1] == 0.0 and popart.deviations[1] == 1.0  # was never played


def test_what_has_no_weight_and_other_tasks_do_not_count() -> None:
    weights = np.array([[1.0, 0.0], [0.0, 1.0]])
    targets = np.array([[5.0, np.inf], [np.nan, 7.0]])
    popart, expected = PopArt(3), PopArt(3)
    linear = update(popart, [0, 2], targets, weights)
    update(expected, [0, 2], [[5.0, 7.0]])
    tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        [v.numpy() for v in popart.variables],
        [v.numpy() for v in expected.variables],
    )
    untouched = head(3)
    np.testing.assert_array_equal(linear.w[:, 1], untouched.w[:, 1])
    assert linear.b[1] == untouched.b[1]


def test_small_steps_of_the_bias_are_kept_beside_large_means() -> None:
    popart, linear = PopArt(1), head(1)
    popart._mean.assign([1000.0])
    popart._variance.assign([1.0])
    before = linear.b.numpy()
    for _ in range(100):
        linear.b.assign_add([1e-5])
        targets = tf.constant([[999.0, 1001.0]])
        popart.update(linear, (), targets, tf.ones_like(targets))
    np.testing.assert_allclose(linear.b - before, [1e-3], rtol=0.05)


@pytest.mark.parametrize("scale", [1e-3, 2.0, 1000.0])
@pytest.mark.parametrize("shift", [0.0, -50.0])
def test_a_rescaling_changes_no_value(scale: float, shift: float) -> None:
    rng = np.random.default_rng(0)
    popart, linear = PopArt(2), head(2)
    features = tf.constant(rng.normal(size=(1, 8, 5)), tf.float32)
    tasks = [0, 1] * 4
    seen = observation(tasks)
    before = popart.values(snt.BatchApply(linear)(features), seen).numpy()
    weights = linear.w.numpy()
    for _ in range(20):
        targets = tf.constant(shift + scale * rng.normal(size=(50, 8)), tf.float32)
        popart.update(linear, observation(tasks, 50), targets, tf.ones_like(targets))
        after = popart.values(snt.BatchApply(linear)(features), seen).numpy()
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=2e-6 * max(1.0, abs(shift)))
    assert np.abs(linear.w.numpy() / weights - 1.0).min() > 0.1  # it did something


def batch_of(plan: Plan, agent: Agent, envs: int = 2) -> Batch:
    """What an actor sends who plays all tasks of a run, one after the other."""

    def environments(task: int) -> list[Environment]:
        environment = plan.played[task].environment
        return [build.environment(environment, envs, joint=plan.spaces, task=task)]

    actor = Actor(environments, policy.make_policy(agent, CONFIG.agent, plan.spaces), T, seed=0)
    parameters = Parameters(1, 0, 0.0, 0, [v.numpy() for v in agent.variables])
    tasks = [functools.partial(int, task) for task in range(len(plan.played))]
    played = [next(actor.run(lambda: parameters, task)).unroll for task in tasks]
    timestep, output = tree.map_structure(
        lambda *parts: np.concatenate(parts, axis=1), *[(u.timestep, u.output) for u in played]
    )
    size = envs * len(played)
    frames = np.concatenate([u.frames for u in played])
    unroll = Unroll(timestep, output, (), frames, np.zeros(size, np.int64))
    return Batch(unroll, is_replay=np.zeros(size, np.bool_))


def learner_of(config: Config) -> tuple[Plan, Learner]:
    plan = make_plan(config)
    return plan, plan.phases.learner_at(Counters())


def statistics(agent: Agent) -> tuple[np.ndarray, np.ndarray]:
    assert agent.popart is not None
    return agent.popart.means.numpy(), agent.popart.deviations.numpy()


def set_statistics(agent: Agent, means: Sequence[float], deviations: Sequence[float]) -> None:
    assert agent.popart is not None
    for variable, values in zip(
        agent.popart.variables, (means, np.square(deviations)), strict=True
    ):
        variable.assign(values)


def test_actors_tell_their_task_and_the_torso_does_not_see_it() -> None:
    plan, _ = learner_of(CONFIG)
    agent = plan.phases.agent
    set_statistics(agent, [2.0, -300.0], [1.0, 50.0])
    batch = batch_of(plan, agent)
    steps = batch.unroll.timestep
    assert (steps.observation[TASK] == [0, 0, 1, 1]).all() and (steps.step_type[1:] == 0).any()
    assert np.unique(np.abs(steps.reward[:, 2:])).tolist() == [0.0, 1000.0]
    # The baseline that an actor sends is in the unit of the rewards.
    output = tree.map_structure(np.asarray, agent.unroll(steps, ())[0])
    np.testing.assert_allclose(batch.unroll.output.baseline[1:], output.baseline[:-1], rtol=1e-5)
    assert (np.abs(output.baseline[:, :2] - 2.0) < 1.0).all()
    assert (np.abs(output.baseline[:, 2:] + 300.0) < 50.0).all()
    # Another task is another value and the same policy.
    others = steps._replace(observation={**steps.observation, TASK: 1 - steps.observation[TASK]})
    other = tree.map_structure(np.asarray, agent.unroll(others, ())[0])
    np.testing.assert_array_equal(other.policy, output.policy)
    assert (np.abs(other.baseline[:, :2] + 300.0) < 50.0).all()


@pytest.mark.parametrize("name", ["impala", "actor_critic", "critic"])
def test_losses_are_those_of_normalised_values(name: str) -> None:
    """With mu and sigma of a task, the loss is that of an agent without PopArt, whose rewards are
    divided by sigma and whose values are v / sigma.
    """
    deviation, mean = 250.0, 40.0
    (with_it,), (without,) = (
        [learner_of(dataclasses.replace(ALONE, agent=agent, algorithm=name))]
        for agent in (CONFIG.agent, dataclasses.replace(CONFIG.agent, popart=False))
    )
    normalised, plain = with_it[0].phases.agent, without[0].phases.agent
    rng = np.random.default_rng(0)
    by_name = {v.name: v for v in plain.variables}
    for variable in normalised.variables:
        if variable.name in by_name:
            variable.assign(rng.normal(size=variable.shape, scale=0.3))
            by_name[variable.name].assign(variable)
    set_statistics(normalised, [mean], [deviation])
    by_name["agent/baseline/b:0"].assign_add([mean / deviation])  # v / sigma = n + mu / sigma

    batch = batch_of(with_it[0], normalised)
    batch = batch._replace(is_replay=np.array([False, name == "impala"]))
    steps = batch.unroll.timestep
    raw = batch._replace(
        unroll=batch.unroll._replace(timestep=steps._replace(reward=deviation * steps.reward))
    )
    scaled = batch._replace(
        unroll=batch.unroll._replace(
            output=batch.unroll.output._replace(baseline=batch.unroll.output.baseline / deviation)
        )
    )
    results = [
        loss_and_gradients(build.algorithm(name, CONFIG, agent), tree.map_structure(tf.constant, x))
        for agent, x in ((normalised, raw), (plain, scaled))
    ]
    (output, gradients), (expected, expected_gradients) = results
    assert np.abs(expected.loss).max() > 0.01
    np.testing.assert_allclose(output.loss, expected.loss, rtol=1e-4, atol=1e-5)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-3, atol=1e-4)


def test_the_loss_of_a_task_moves_its_own_output_alone() -> None:
    plan, _ = learner_of(CONFIG)
    agent = plan.phases.agent
    batch = tree.map_structure(tf.constant, batch_of(plan, agent))
    algorithm = build.algorithm("impala", CONFIG, agent)
    variables = [v for v in agent.trainable_variables if v.name == "agent/baseline/w:0"]
    with tf.GradientTape() as tape:
        of_first = tf.reduce_sum(algorithm.loss(batch).loss[:, :2])
    (gradient,) = tape.gradient(of_first, variables)
    assert np.abs(gradient[:, 0]).max() > 0.0 and not gradient[:, 1].numpy().any()


def test_the_difference_of_tasks_is_not_explained_variance() -> None:
    plan, _ = learner_of(CONFIG)
    agent = plan.phases.agent
    batch = tree.map_structure(tf.constant, batch_of(plan, agent))
    algorithm = build.algorithm("impala", CONFIG, agent)
    rng = np.random.default_rng(3)
    noise = rng.normal(size=[T, 4])
    # Values know which task it is, and of some tasks the rest.
    means, deviations = np.array([0.0, 0.0, 500.0, 500.0]), np.array([1.0, 1.0, 50.0, 50.0])
    set_statistics(agent, [0.0, 500.0], [1.0, 50.0])
    targets = tf.constant(means + deviations * noise, tf.float32)
    mask = tf.ones([T, 4])

    def explained(known: Sequence[float]) -> float:
        values = tf.constant(means + deviations * noise * known, tf.float32)
        return float(algorithm.explained_variance(batch, values, targets, mask))

    assert explained([0.0, 0.0, 0.0, 0.0]) == pytest.approx(0.0, abs=1e-5)
    assert explained([1.0, 1.0, 1.0, 1.0]) == pytest.approx(1.0, abs=1e-5)
    left = np.concatenate([noise[:, :2], np.zeros([T, 2])], axis=1)
    expected = 1.0 - left.var() / noise.var()
    assert explained([0.0, 0.0, 1.0, 1.0]) == pytest.approx(expected, abs=1e-4)


def test_an_update_moves_the_statistics_by_its_targets() -> None:
    plan, learner = learner_of(CONFIG)
    agent = plan.phases.agent
    batch = batch_of(plan, agent)
    algorithm = build.algorithm("impala", CONFIG, agent)
    targets = algorithm.loss(tree.map_structure(tf.constant, batch)).targets
    assert targets is not None
    oracles = []
    for columns in (slice(2), slice(2, 4)):
        values = targets.values.numpy()[:, columns][targets.mask.numpy()[:, columns] > 0.0]
        kept = (1.0 - STEP) ** values.size
        assert 0 < values.size < 2 * T  # seams are no steps
        mean = (1.0 - kept) * values.mean()
        second = kept + (1.0 - kept) * np.square(values.astype(np.float64)).mean()
        oracles.append((mean, math.sqrt(second - mean**2)))
    result = learner.update(batch)
    assert isinstance(result, Update)
    means, deviations = statistics(agent)
    np.testing.assert_allclose(np.stack([means, deviations], axis=1), oracles, rtol=1e-4)
    for name, of_all in (("mean", means), ("deviation", deviations)):
        for task, value in zip((SMALL, LARGE), of_all, strict=True):
            assert result.metrics[f"popart/{name}/{task}"] == pytest.approx(value)


def test_an_unroll_of_an_unknown_task_is_refused() -> None:
    plan, learner = learner_of(CONFIG)
    batch = batch_of(plan, plan.phases.agent)
    assert isinstance(learner.update(batch), Update)
    wrong = tree.map_structure(np.copy, batch)
    wrong.unroll.timestep.observation[TASK][:, 2] = 7
    refusal = learner.update(wrong)
    assert isinstance(refusal, Refusal) and refusal.culprits == [2]
