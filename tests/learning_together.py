"""Learns from recorded batches as one learner, on two devices or as two peers, and saves variables.

usage: learning_together.py OUTPUT CASE,CASE alone | devices | HOST:PORT,HOST:PORT PEER
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.config.presets import PRESETS
from impala.config.schema import (
    AgentConfig,
    Config,
    ImpalaConfig,
    OptimiserConfig,
    QLearningConfig,
    ReplayConfig,
    TasksConfig,
    TeacherConfig,
)
from impala.environments.spaces import Spaces
from impala.logdir.checkpoint import Checkpoint, Counters
from impala.parts import build
from impala.schedule import phases
from impala.testing.algorithms import IS_REPLAY, AlgorithmConformance, B, T, make_batch
from impala.types import Batch
from learner.plan import make_plan
from learner.update import devices, named_variables
from learner.update.learner import Learner, Update
from learner.update.replicas import Replicas

UPDATES = 20


def _config(preset: str, **changes: object) -> Config:
    return dataclasses.replace(PRESETS[preset][1], total_frames=1000, **changes)  # type: ignore[arg-type]


# The numbers are such that gradients are clipped in some updates, and variables move far. Adam's
# epsilon is large, because a gradient of 1e-8 has no digits that two orders of summation share.
CASES = {
    "impala": _config(
        "catch",
        agent=AgentConfig(hidden_sizes=(8,), core="lstm", lstm_size=5),
        impala=ImpalaConfig(entropy_target=0.5),
        replay=ReplayConfig(burn_in=2),
        optimiser=OptimiserConfig(learning_rate=0.01, clip_global_norm=20.0),
    ),
    "taught": _config(
        "catch",
        agent=AgentConfig(hidden_sizes=(8,)),
        teacher=TeacherConfig(
            ("teacher",), policy_cost=4.0, value_cost=2.0, kl_target=0.05, anneal=0.0
        ),
        optimiser=OptimiserConfig(learning_rate=0.01, clip_global_norm=20.0),
    ),
    "popart": _config(
        "catch",
        agent=AgentConfig(hidden_sizes=(8,), popart=True),
        tasks=TasksConfig(environments=("Catch", 'Catch{"reward": 1000}'), order="simultaneous"),
        optimiser=OptimiserConfig(learning_rate=0.01, clip_global_norm=20.0),
    ),
    "sac": _config(
        "pendulum",
        agent=AgentConfig(hidden_sizes=(8,), normalise_observations=True),
        # With 0.01, rounding decides within 20 updates which of two Q-values is the smaller one.
        optimiser=OptimiserConfig(
            name="adam", learning_rate=0.005, epsilon=1e-3, clip_global_norm=3000.0
        ),
    ),
    "q_learning": _config(
        "catch",
        algorithm="q_learning",
        agent=AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy"),
        q_learning=QLearningConfig(target_updates=7),
        optimiser=OptimiserConfig(learning_rate=0.01, clip_global_norm=5.0),
    ),
}


class Recorded(AlgorithmConformance):
    """Batches [7, 4, ...] in which episodes end in every way, half of them replayed."""

    def __init__(self, agent: Agent, spaces: Spaces):
        self._agent = agent
        self.observation_space, self.action_space = spaces

    def batch_of(self, seed: int) -> Batch:
        made = make_batch(self.arrays(self._agent, seed), self._agent, IS_REPLAY)
        return tree.map_structure(lambda x: x.numpy(), made)


def _teacher(config: Config) -> Checkpoint:
    """Returns the checkpoint of an agent that knows nothing, as every process makes it."""
    plan = make_plan(dataclasses.replace(config, seed=9, teacher=TeacherConfig()))
    variables = named_variables.named("agent", plan.phases.agent.variables)
    arrays = {name: variable.numpy() for name, variable in variables.items()}
    return Checkpoint(config, Counters(), arrays, accounts={}, spaces=plan.spaces)


def learn(config: Config, replicas: Replicas, part: slice) -> Iterator[Learner]:
    """Learns from this process's part of each batch."""
    with replicas.scope():
        plan = make_plan(config, replicas, [_teacher(config)] if config.teacher.logdirs else [])
        learner = Learner(
            build.algorithm(config.algorithm, config, plan.phases.agent, plan.phases.teachers),
            config,
            phases.make(config)[0],
            replicas=replicas,
        )
    recorded = Recorded(plan.phases.agent, plan.spaces)
    for seed in range(UPDATES):
        whole = recorded.batch_of(seed)
        batch = devices.columns(whole, part)
        update = learner.update(batch)
        assert isinstance(update, Update), update
        for histogram in update.histograms.values():
            assert np.shape(histogram)[:2] == (T, len(batch.is_replay))
        learner.count(unrolls=B, frames=20, steps=20, seconds=0.0)
        if (normaliser := learner.normaliser) is not None:
            normaliser.update([normaliser.moments(whole.unroll.timestep.observation)])
        yield learner


def main(output: str | pathlib.Path, names: str, how: str, peer: str = "0") -> None:
    part, strategy = slice(None), None
    if how == "devices":
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    elif how != "alone":
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": how.split(",")}),
                task_type="worker",
                task_id=int(peer),
                rpc_layer="grpc",
            )
        )
        part = slice(int(peer) * B // 2, (int(peer) + 1) * B // 2)
    replicas, saved = Replicas(strategy), dict[str, np.ndarray]()
    for name in names.split(","):
        for i, learner in enumerate(learn(CASES[name], replicas, part), 1):
            if i in (1, UPDATES):
                values = learner.variables()
                saved |= {f"{name}, update {i}, {what}": value for what, value in values.items()}
    np.savez(output, **saved)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
