"""The roofline of this machine: each part of training alone, on all cores at once.

A step of training costs one environment step, one inference and one share of an update. If each
part alone reaches R_env, R_inference and R_learner steps per second with every core loaded, then no
division of the cores between them trains faster than 1 / (1/R_env + 1/R_inference + 1/R_learner):
the roofline.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from impala import build
from impala.config import schema as configs
from impala.runtime import process
from impala.schedule import phases, tasks
from impala.types import AgentOutput, Batch, StepType, TimeStep, Unroll


class Roofline(NamedTuple):
    """Agent steps per second of the whole machine, every core loaded."""

    environment: float
    inference: float
    learner: float

    @property
    def steps_per_second(self) -> float:
        """Returns the combined rate with a perfect division of the cores."""
        return 1.0 / (1.0 / self.environment + 1.0 / self.inference + 1.0 / self.learner)


def measure(config: configs.Config, seconds: float) -> Roofline:
    """Measures each part for `seconds`, with one single-threaded process per core."""
    return Roofline(
        environment=_on_all_cores(_environment, config, seconds),
        inference=_on_all_cores(_inference, config, seconds),
        learner=_on_all_cores(_learner, config, seconds),
    )


def _on_all_cores(
    part: Callable[[configs.Config], tuple[Callable[[], Any], int]],
    config: configs.Config,
    seconds: float,
) -> float:
    """Returns steps per second of one process per core, all running at the same time."""
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(cores)
    with context.Pool(cores, _keep_barrier, (barrier,)) as pool:
        results = [pool.apply_async(_timed, (part, config, seconds)) for _ in range(cores)]
        return sum(result.get(timeout=seconds + 300) for result in results)


_barrier: Any = None


def _keep_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _timed(
    part: Callable[[configs.Config], tuple[Callable[[], Any], int]],
    config: configs.Config,
    seconds: float,
) -> float:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    once, steps = part(config)
    for _ in range(3):
        once()
    _barrier.wait(timeout=300)
    start = time.perf_counter()
    done = 0
    while time.perf_counter() - start < seconds:
        once()
        done += steps
    return done / (time.perf_counter() - start)


def _environment(config: configs.Config) -> tuple[Callable[[], Any], int]:
    num_envs = config.actor.num_envs // config.actor.num_groups
    environment = build.environment(config.environment, num_envs)
    environment.reset(seed=os.getpid())
    random = np.random.default_rng(os.getpid())

    space = environment.action_space
    assert isinstance(space, gym.spaces.Discrete)

    def once() -> None:
        environment.send(random.integers(space.n, size=num_envs))
        environment.recv()

    return once, num_envs


def _agent(config: configs.Config) -> tuple[Any, Any, Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if config.learner.bfloat16:
        process.use_bfloat16()
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    return build.agent(config.agent, *spaces), *spaces


def _inference(config: configs.Config) -> tuple[Callable[[], Any], int]:
    from actors import policy

    agent, *spaces = _agent(config)
    num_envs = config.actor.num_envs // config.actor.num_groups
    timestep = random_timestep(num_envs, spaces[0])
    acting = policy.of(agent, config.agent, (spaces[0], spaces[1])).begin(timestep, [1, 2])
    return lambda: acting.act(timestep), num_envs


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
    import tree

    spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
    batch_size = config.mix.batch_size
    random = np.random.default_rng(0)

    def timed(leaf: Any) -> np.ndarray:
        shape = (leaf.shape[0], batch_size, *leaf.shape[1:])
        if np.issubdtype(leaf.dtype, np.uint8):
            return random.integers(0, 255, shape, np.uint8)
        return np.zeros(shape, leaf.dtype)

    return Batch(
        unroll=Unroll(
            timestep=tree.map_structure(timed, spec.timestep)._replace(
                step_type=np.full(
                    (config.learner.unroll_length + 1, batch_size), StepType.MID, np.int8
                )
            ),
            output=AgentOutput(*tree.map_structure(timed, tuple(spec.output))),
            core_state=tree.map_structure(
                lambda leaf: np.zeros((batch_size, *leaf.shape), leaf.dtype), spec.core_state
            ),
            frames=np.full(batch_size, 4 * config.learner.unroll_length, np.int32),
            parameter_version=np.zeros(batch_size, np.int64),
        ),
        is_replay=np.zeros(batch_size, bool),
    )


def _learner(config: configs.Config) -> tuple[Callable[[], Any], int]:
    from learner.update.learner import Learner

    agent, *spaces = _agent(config)
    learner = Learner(
        build.algorithm(config.algorithm, config, agent), config, phases.make(config)[0]
    )
    batch = random_batch(config, agent, (spaces[0], spaces[1]))
    steps = config.mix.batch_size * config.learner.unroll_length
    return lambda: learner.update(batch), steps
