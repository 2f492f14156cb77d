"""The environment interface: E games that step together, and the rules that each one follows."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from impala.types import EnvironmentStep, Nest, StepType, TimeStep

LEAF_SPACES = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiBinary,
    gym.spaces.MultiDiscrete,
)
# What arrays are compared with and filled from many times a second: an enum's member is found, and
# a number of Python turned into one of NumPy, in as much time as an operation takes.
_FIRST, _MID, _LAST = np.int8(StepType.FIRST), np.int8(StepType.MID), np.int8(StepType.LAST)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


class Environment(abc.ABC):
    """E environments that step together.

    `reset` once, then `send` and `recv` in turns. Episodes follow each other without a call: the
    step after LAST ignores its action and is the FIRST of the next episode, with reward 0,
    discount 1 and no frames; every other step plays one frame or more. The discount is 0 where an
    episode terminated, and 1 where a time limit cut it off.
    """

    observation_space: gym.Space  # of one environment, as the agent sees it
    action_space: gym.Space  # of one environment
    num_envs: int  # E
    code: Any = None  # what a user has written of it, for the place of an error

    @abc.abstractmethod
    def reset(self, seed: int) -> TimeStep:
        """Starts all environments, each with its own seed (see `seeds`).

        Returns:
          [E, ...], all FIRST. The arrays may be written again by the next `recv`.
        """

    @abc.abstractmethod
    def send(self, action: Nest) -> None:
        """Starts a step, without waiting for it where that is possible.

        Args:
          action: [E, ...], structured like the action space; not to be changed before `recv`.
        """

    @abc.abstractmethod
    def recv(self) -> EnvironmentStep:
        """Waits for the step that `send` started.

        Returns:
          [E, ...]. The arrays may be written again by the next `recv`.
        """

    @abc.abstractmethod
    def render(self) -> np.ndarray:
        """What environment 0 shows: RGB, uint8 [height, width, 3]."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees threads, processes and windows; a second call does nothing."""


class Wrapper(Environment):
    """Environments around others, of which it changes what is observed.

    Args:
      environment: what is wrapped.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.observation_space = environment.observation_space
        self.action_space = environment.action_space
        self.num_envs = environment.num_envs

    @abc.abstractmethod
    def changed(self, timestep: TimeStep) -> TimeStep:
        """Returns a time step as it is seen from outside."""

    def reset(self, seed: int) -> TimeStep:
        return self.changed(self._environment.reset(seed))

    def send(self, action: Nest) -> None:
        self._environment.send(action)

    def recv(self) -> EnvironmentStep:
        step = self._environment.recv()
        return step._replace(timestep=self.changed(step.timestep))

    def render(self) -> np.ndarray:
        return self._environment.render()

    def close(self) -> None:
        self._environment.close()


def seeds(seed: int, num_envs: int) -> np.ndarray:
    """The seeds of E environments: int64 [E], 31 bits each.

    Environment i's depends on `seed` and i alone, and neighbouring `seed`s share none: seed + i
    would give environment 1 of seed 0 the games of environment 0 of seed 1.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be 0 or more.")
    words = [np.random.SeedSequence([seed, i]).generate_state(1)[0] for i in range(num_envs)]
    return np.array(words, np.int64) >> 1


def first_timestep(observation: Nest, num_envs: int) -> TimeStep:
    """What `reset` returns, around its observation [E, ...]."""
    return TimeStep(
        observation=observation,
        reward=np.zeros(num_envs, np.float32),
        discount=np.ones(num_envs, np.float32),
        step_type=np.full(num_envs, StepType.FIRST, np.int8),
    )


def next_timestep(
    observation: Nest,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    first: np.ndarray,
) -> TimeStep:
    """A time step from what a Gymnasium vector environment says, all [E].

    `first` is where the step before was LAST, so where this one started an episode. An episode
    that terminates at its time limit has terminated.
    """
    step_type = np.where(terminated | truncated, _LAST, _MID)
    step_type[first] = _FIRST
    reward = np.asarray(reward)
    if reward.dtype != np.float32:
        with np.errstate(over="ignore"):  # What is too large becomes infinite and is then refused.
            reward = reward.astype(np.float32)
    return TimeStep(observation, reward, np.where(terminated, _ZERO, _ONE), step_type)


def environment_step(
    observation: Nest,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    first: np.ndarray,
    info: dict[str, np.ndarray],
) -> EnvironmentStep:
    """A step from what Gymnasium environments say, as for `next_timestep`, and their infos.

    Info `frames` says how many frames a step played, 1 if there is none; info `discount`, by what a
    step that does not terminate is discounted. NaN is as if it were not given.
    """
    info = dict(info)
    terminated, truncated, first = (
        np.asarray(each, np.bool_) for each in (terminated, truncated, first)
    )
    timestep = next_timestep(observation, reward, terminated, truncated, first)
    frames = (~first).astype(np.int32)
    if "frames" in info:
        frames *= np.nan_to_num(info.pop("frames"), nan=1.0).astype(np.int32)
    if "discount" in info:
        discount = np.nan_to_num(info.pop("discount"), nan=1.0).astype(np.float32)
        timestep = timestep._replace(discount=timestep.discount * np.where(first, _ONE, discount))
    return EnvironmentStep(timestep, frames, info)


def check_shape(name: str, space: gym.Space, value: Any, leading: tuple[int, ...] = ()) -> None:
    """Checks that a value is [*leading, *shape], with the shape of its space.

    Raises:
      ValueError: it is not.
    """
    expected = (*leading, *(space.shape or ()))
    if (shape := np.shape(value)) != expected:
        raise ValueError(
            f"{name} has shape {shape}, expected {expected} by its space: return that shape, or "
            "correct observation_space"
        )


def map_leaves(function: Callable[..., Any], name: str, space: gym.Space, *values: Nest) -> Nest:
    """function(name, leaf space, *leaf values) for each leaf, in a nest structured like the space.

    Raises:
      ValueError: if a value is not structured like the space, or the space has no fixed size.
    """
    if type(space) in LEAF_SPACES:  # the usual case
        return function(name, space, *values)
    match space:
        case gym.spaces.Dict():
            for value in values:
                if not isinstance(value, Mapping) or set(value) != set(space.spaces):
                    keys = sorted(value) if isinstance(value, Mapping) else type(value).__name__
                    raise ValueError(f"{name} has {keys}; expected the keys {sorted(space.spaces)}")
            return {
                key: map_leaves(function, f"{name}/{key}", part, *(value[key] for value in values))
                for key, part in space.spaces.items()
            }
        case gym.spaces.Tuple():
            for value in values:
                if not isinstance(value, tuple | list) or len(value) != len(space.spaces):
                    raise ValueError(
                        f"{name} is a {type(value).__name__}; expected {len(space.spaces)} parts"
                    )
            return tuple(
                map_leaves(function, f"{name}/{i}", part, *(value[i] for value in values))
                for i, part in enumerate(space.spaces)
            )
    if not isinstance(space, LEAF_SPACES):
        names = ", ".join(leaf.__name__ for leaf in LEAF_SPACES)
        raise ValueError(
            f"{name} has the space {space}, which has no fixed size. Supported: {names}, and Dict "
            "or Tuple of these; for observations of single environments also Text. Wrap the "
            "environment so that it has one of them: pad a Sequence or a Graph, for instance."
        )
    return function(name, space, *values)
