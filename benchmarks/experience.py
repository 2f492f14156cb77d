"""Random experience in the shapes of a configuration."""

from typing import Any

import gymnasium as gym
import numpy as np
import tree

from impala.config import schema as configs
from impala.parts import build
from impala.types import AgentOutput, Batch, StepType, TimeStep, Unroll


def random_timestep(num_envs: int, observation_space: gym.Space) -> TimeStep:
    """Returns a time step with images of noise, in the middle of episodes: [E, ...]."""
    shape = (num_envs, *(observation_space.shape or ()))
    return TimeStep(
        observation=np.random.default_rng(0).integers(0, 255, shape, np.uint8),
        reward=np.zeros(num_envs, np.float32),
        discount=np.ones(num_envs, np.float32),
        step_type=np.full(num_envs, StepType.MID, np.int8),
    )


def random_batch(config: configs.Config, agent: Any, spaces: tuple[Any, Any]) -> Batch:
    """Returns a batch of random experience in the shape that actors would send: [T + 1, B, ...]."""
    spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
    batch_size = config.mix.batch_size
    random = np.random.default_rng(0)

    def timed(leaf: Any) -> np.ndarray:
        shape = (leaf.shape[0], batch_size, *leaf.shape[1:])
        if np.issubdtype(leaf.dtype, np.uint8):
            return random.integers(0, 255, shape, np.uint8)
        return np.zeros(shape, leaf.dtype)

    timestep: TimeStep = tree.map_structure(timed, spec.timestep)
    timestep.step_type[:] = StepType.MID
    return Batch(
        unroll=Unroll(
            timestep=timestep,
            output=AgentOutput(*tree.map_structure(timed, tuple(spec.output))),
            core_state=tree.map_structure(
                lambda leaf: np.zeros((batch_size, *leaf.shape), leaf.dtype), spec.core_state
            ),
            frames=np.full(batch_size, 4 * config.learner.unroll_length, np.int32),
            parameter_version=np.zeros(batch_size, np.int64),
        ),
        is_replay=np.zeros(batch_size, bool),
    )
