"""The roofline of this machine: each part of training alone, on all cores at once.

A step of training costs one environment step, one inference and one share of an update. If each
part alone reaches R_env, R_inference and R_learner steps per second with every core loaded, then no
division of the cores between them trains faster than 1 / (1/R_env + 1/R_inference + 1/R_learner):
the roofline.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from impala.config import schema as configs
from impala.parts import build
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


_Part = Callable[[configs.Config], tuple[Callable[[], Any], int]]


class OnAllCores(contextlib.AbstractContextManager["OnAllCores"]):
    """One single-threaded process per core that does a part when asked, and waits otherwise.

    Args:
      part: `environment`, `inference` or `learner`.
      config: of the run whose part it is.
    """

    def __init__(self, part: _Part, config: configs.Config) -> None:
        context = multiprocessing.get_context("spawn")
        self._children, self._pipes = [], []
        for _ in os.sched_getaffinity(0):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(theirs, part, config), daemon=True)
            child.start()
            theirs.close()
            self._children.append(child)
            self._pipes.append(ours)
        self.measure(0.0)  # they have started, and done it once

    def measure(self, seconds: float) -> float:
        """Returns steps per second of all processes together, all running at the same time.

        Raises:
          EOFError: a process has ended.
        """
        for pipe in self._pipes:
            pipe.send(seconds)
        return float(sum(pipe.recv() for pipe in self._pipes))

    def __exit__(self, *exception: object) -> None:
        for child in self._children:
            child.kill()
            child.join()


def _serve(
    pipe: multiprocessing.connection.Connection, part: _Part, config: configs.Config
) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    once, steps = part(config)
    for _ in range(3):
        once()
    while True:
        seconds = pipe.recv()
        start, done = time.perf_counter(), 0
        while not done or time.perf_counter() - start < seconds:
            once()
            done += steps
        pipe.send(done / (time.perf_counter() - start))


def environment(config: configs.Config) -> tuple[Callable[[], Any], int]:
    """Returns what steps environments with random actions, and how many steps that is."""
    num_envs = config.actor.num_envs // config.actor.num_groups
    environments = build.environment(config.environment, num_envs)
    environments.reset(seed=os.getpid())
    random = np.random.default_rng(os.getpid())

    space = environments.action_space
    assert isinstance(space, gym.spaces.Discrete)

    def once() -> None:
        environments.send(random.integers(space.n, size=num_envs))
        environments.recv()

    return once, num_envs


def _agent(config: configs.Config) -> tuple[Any, Any, Any]:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    if config.learner.bfloat16:
        process.use_bfloat16()
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    return build.agent(config.agent, *spaces), *spaces


def inference(config: configs.Config) -> tuple[Callable[[], Any], int]:
    """Returns what acts for environments, and for how many."""
    from actors import policy

    agent, *spaces = _agent(config)
    num_envs = config.actor.num_envs // config.actor.num_groups
    timestep = random_timestep(num_envs, spaces[0])
    acting = policy.make_policy(agent, config.agent, (spaces[0], spaces[1])).begin(timestep, [1, 2])
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


def learner(config: configs.Config) -> tuple[Callable[[], Any], int]:
    """Returns what makes an update, and of how many steps."""
    from learner.update.learner import Learner

    agent, *spaces = _agent(config)
    algorithm = build.algorithm(config.algorithm, config, agent)
    learns = Learner(algorithm, config, phases.make(config)[0])
    batch = random_batch(config, agent, (spaces[0], spaces[1]))
    steps = config.mix.batch_size * config.learner.unroll_length
    return lambda: learns.update(batch), steps
