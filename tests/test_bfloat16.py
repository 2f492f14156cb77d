"""A torso in bfloat16: heads, losses and what goes on the wire stay float32, also of large values.

On values that fit their rewards, advantages are small differences of large numbers: outputs that
are rounded to bfloat16 would make other gradients.
"""

from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from actors.policy import Compiled
from impala.agents.agent import Agent
from impala.algorithms.base import Algorithm
from impala.config import values
from impala.config.presets import PRESETS
from impala.parts import build
from impala.runtime import process
from impala.schedule import tasks
from impala.types import AgentOutput, Batch, NetworkOutput, StepType, TimeStep, Unroll
from learner.update import devices

NUM_ENVS, STEPS = 6, 12
CONFIG = values.overlay(PRESETS["atari"][1], {"objective": {"reward_clipping": "none"}})


class Scene(NamedTuple):
    """An agent of Pong, and rows of the game."""

    agent: Agent
    algorithm: Algorithm
    rows: TimeStep  # [T + 1, B]


@pytest.fixture(scope="module")
def scene() -> Scene:
    played = tasks.make(CONFIG.environment, CONFIG.tasks)
    spaces = build.spaces(played)
    agent = build.agent(CONFIG.agent, *spaces, seed=1)
    environment = build.environment(CONFIG.environment, NUM_ENVS)
    environment.reset(3)
    rng, seen = np.random.default_rng(0), []
    for _ in range(60):
        environment.send(rng.integers(0, spaces[1].n, NUM_ENVS))  # type: ignore[attr-defined]
        seen.append(np.array(environment.recv().timestep.observation))
    environment.close()
    ones = tf.ones([STEPS + 1, NUM_ENVS])
    step_type = tf.fill([STEPS + 1, NUM_ENVS], tf.constant(StepType.MID, tf.int8))
    rows = TimeStep(tf.constant(np.stack(seen[-STEPS - 1 :])), 0.0 * ones, ones, step_type)
    return Scene(agent, build.algorithm("impala", CONFIG, agent), rows)


def outputs(scene: Scene, rows: TimeStep) -> NetworkOutput:
    unroll = tf.function(scene.agent.unroll, autograph=False)
    found: NetworkOutput = unroll(rows, scene.agent.initial_state(NUM_ENVS))[0]
    return found


def gradients(scene: Scene, batch: Batch) -> dict[str, np.ndarray]:
    variables = scene.algorithm.learned_variables

    @tf.function(autograph=False)
    def found() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(scene.algorithm.loss(batch, tf.constant(0.0)).loss)
        gradients: list[tf.Tensor] = tape.gradient(loss, variables)
        return gradients

    return {v.name: g.numpy() for v, g in zip(variables, found(), strict=True)}


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


@pytest.mark.parametrize("value", [1.0, 500.0])
def test_gradients_on_fitted_values_are_those_of_float32(
    scene: Scene, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = scene.agent._baseline_head
    head.b.assign([value])
    rows = scene.rows._replace(reward=tf.fill([STEPS + 1, NUM_ENVS], 0.01 * value))
    exact = outputs(scene, rows)
    choices = int(exact.policy.shape[-1])
    actions = np.random.default_rng(5).integers(0, choices, (STEPS + 1, NUM_ENVS))
    unroll = Unroll(
        *(rows, AgentOutput(tf.constant(actions), exact.policy, exact.baseline)),
        core_state=scene.agent.initial_state(NUM_ENVS),
        frames=tf.ones([NUM_ENVS], tf.int32),
        parameter_version=tf.zeros([NUM_ENVS], tf.int64),
    )
    batch = Batch(unroll, tf.constant([False, True] * (NUM_ENVS // 2)))
    wanted = gradients(scene, batch)

    monkeypatch.setattr(process, "_uses_bfloat16", True)
    rounded = outputs(scene, rows)
    assert np.any(rounded.policy != exact.policy)  # it is computed otherwise
    for one, other in zip(rounded, exact, strict=True):
        assert np.abs(one - other).max() <= 2e-3 * max(1.0, np.abs(other).max())
    found = gradients(scene, batch)
    together = [np.concatenate([g.ravel() for g in each.values()]) for each in (found, wanted)]
    assert cosine(*together) >= 0.999
    for name, gradient in wanted.items():
        assert cosine(found[name], gradient) >= (0.997 if name.endswith("w:0") else 0.98), name


def test_the_learner_computes_the_policy_that_acted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an actor that acts row by row, and policies that are decided."""
    monkeypatch.setattr(process, "_uses_bfloat16", True)
    head = scene.agent._policy_head
    head.w.assign(30.0 * head.w)
    try:
        learned = tf.nn.log_softmax(outputs(scene, scene.rows).policy)
        rows = [
            tf.nest.map_structure(lambda leaf, t=t: leaf[t].numpy(), scene.rows)
            for t in range(STEPS)
        ]
        acting = Compiled(scene.agent).begin(rows[0], [1, 2])
        for t, row in enumerate(rows):
            _, policy, _ = acting.act(row)
            ratios = np.exp(learned[t] - tf.nn.log_softmax(policy))
            assert np.abs(ratios - 1.0).max() < 1e-3, t
    finally:
        head.w.assign(head.w / 30.0)


def test_the_next_run_of_a_process_has_its_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_uses_bfloat16", False)
    monkeypatch.setattr(process, "_cpu_flags", lambda: frozenset({"amx_bf16"}))
    monkeypatch.setattr(process, "set_threads", lambda *limits, **more: None)
    used = []
    for bfloat16 in (True, False):
        devices.set_up(values.overlay(CONFIG, {"learner": {"bfloat16": bfloat16}}))
        used.append(process.uses_bfloat16())
    assert used == [True, False]
