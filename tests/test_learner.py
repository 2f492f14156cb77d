"""One update at a time: counters, learning rate, restoring, and refusing what is not finite."""

import dataclasses
import pathlib
import resource
from typing import Any

import numpy as np
import pytest
import tree

from impala.config.presets import PRESETS
from impala.config.schema import Config, QLearningConfig
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint
from impala.parts import build
from impala.schedule import phases
from impala.types import AgentOutput, Batch, StepType, TimeStep, Unroll
from learner.update.learner import Learner, Update

CONFIG = dataclasses.replace(PRESETS["catch"][1], total_frames=1000)
T, B = 5, 4


def _learner(seed: int = 0, config: Config = CONFIG) -> Learner:
    environment = build.environment(config.environment, num_envs=1)
    agent = build.agent(
        config.agent, environment.observation_space, environment.action_space, seed=seed
    )
    return Learner(build.algorithm(config.algorithm, config, agent), config, phases.make(config)[0])


def _batch(seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    shape = (T + 1, B)
    return Batch(
        unroll=Unroll(
            timestep=TimeStep(
                observation=random.integers(0, 2, (*shape, 10, 5), np.uint8),
                reward=random.normal(size=shape).astype(np.float32),
                discount=np.ones(shape, np.float32),
                step_type=np.full(shape, StepType.MID, np.int8),
            ),
            output=AgentOutput(
                action=random.integers(0, 3, shape),
                policy=np.zeros((*shape, 3), np.float32),
                baseline=np.zeros(shape, np.float32),
            ),
            core_state=(),
            frames=np.full(B, T, np.int32),
            parameter_version=np.zeros(B, np.int64),
        ),
        is_replay=np.zeros(B, bool),
    )


def learn(learner: Learner, batch: Batch, **counts: Any) -> Update:
    """One update, counted."""
    update = learner.update(batch)
    assert isinstance(update, Update)
    learner.count(**counts)
    return update


def test_target_networks_are_copied_by_frames_and_episodes() -> None:
    either: list[dict[str, Any]] = [{"target_frames": 500}, {"target_episodes": 5}]
    for settings in either:
        config = dataclasses.replace(
            CONFIG,
            algorithm="q_learning",
            agent=dataclasses.replace(CONFIG.agent, policy="epsilon_greedy"),
            q_learning=QLearningConfig(target_updates=1, **settings),
        )
        learner = _learner(config=config)
        output = np.zeros((T + 1, B, 4), np.float32)
        batch = _batch()
        unroll = batch.unroll._replace(output=batch.unroll.output._replace(policy=output))
        counts = {"unrolls": 4, "frames": 300, "steps": 20, "seconds": 0.5, "episodes": 3}
        copied = []
        for _ in range(4):
            learn(learner, batch._replace(unroll=unroll), **counts)
            of_agent, of_target = (
                next(value for name, value in learner.variables().items() if name.endswith(which))
                for which in ("/agent/policy/w:0", "/q_learning/agent/policy/w:0")
            )
            copied.append(np.array_equal(of_agent, of_target))
        assert copied == [False, True, False, True]


def test_an_update_counts_and_moves_the_agent() -> None:
    learner = _learner()
    before = learner.agent_values()
    first = learn(learner, _batch(), unrolls=4, frames=400, steps=20, seconds=0.5)
    second = learn(learner, _batch(1), unrolls=4, frames=400, steps=19, seconds=0.25)
    assert learner.counters == checkpoint.Counters(
        updates=2, unrolls=2 * B, steps=39, frames=800, seconds=0.75
    )
    # The learning rate of an update is that of the frames before it: linear down to zero.
    full = CONFIG.optimiser.learning_rate
    rates = [update.metrics["learning_rate"] for update in (first, second)]
    assert rates == pytest.approx([full, 0.6 * full])
    assert learner.phase_progress == 0.8
    assert all(np.isfinite(value) for value in second.metrics.values())
    assert {"loss/total", "gradient_norm", "policy/entropy"} <= second.metrics.keys()
    moved = [np.any(a != b) for a, b in zip(before, learner.agent_values(), strict=True)]
    assert all(moved)


@pytest.mark.slow
def test_updates_leave_nothing_behind() -> None:
    """TensorFlow has ways to keep something of each call: here, less than 200 bytes of each."""
    learner, batch = _learner(config=dataclasses.replace(CONFIG, total_frames=10_000)), _batch()
    for _ in range(3000):  # until the heap has its size
        learn(learner, batch, unrolls=0, frames=1, steps=1, seconds=0.0)
    before = _resident_bytes()
    for _ in range(2500):
        learn(learner, batch, unrolls=0, frames=1, steps=1, seconds=0.0)
    grown = _resident_bytes() - before
    assert grown < 500_000


def _resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_restored_learner_goes_on_bit_for_bit(tmp_path: pathlib.Path) -> None:
    # Given a learner after two updates, and its checkpoint ...
    learner = _learner()
    for seed in range(2):
        learn(learner, _batch(seed), unrolls=4, frames=100, steps=20, seconds=1.0)
    saved = Checkpoint(CONFIG, learner.counters, learner.variables(), accounts={})
    checkpoint.save(tmp_path, saved, keep=1)
    # ... when another one, with other weights, is restored from it ...
    other = _learner(seed=7)
    other.restore(checkpoint.load(tmp_path))
    # ... then the same batch takes both to the same place: agent, optimiser and counters.
    for each in (learner, other):
        learn(each, _batch(9), unrolls=4, frames=100, steps=20, seconds=1.0)
    assert learner.counters == other.counters
    tree.map_structure(np.testing.assert_array_equal, learner.variables(), other.variables())
