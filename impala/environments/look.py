"""A look at an environment before training: random play for a few seconds, and what it showed."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import tree

from impala.environments.base import Environment
from impala.environments.spaces import ACTION_MASK, Spaces, choices, has_action_mask
from impala.types import Nest, StepType


class Look(NamedTuple):
    """What random play of one environment has shown."""

    spaces: Spaces
    steps: int  # played, without resets
    lengths: list[int]  # of the episodes that ended, in steps
    terminated: int  # of those episodes, the ones that no time limit cut off
    rewards: np.ndarray  # [steps]
    largest: float  # absolute floating-point number that was observed
    forbidden: float  # mean share of the choices that an action mask forbade
    step_seconds: float  # mean
    reset_seconds: float  # mean, without the first unless it is the only one
    first: list[np.ndarray]  # the leaves of the first observation

    @property
    def seconds(self) -> float:
        """Mean time of a step, its share of the resets between episodes included."""
        return self.step_seconds + self.reset_seconds * len(self.lengths) / self.steps


def look(make: Callable[[], Environment], steps: int, seconds: float, seed: int = 0) -> Look:
    """Plays an environment at random and returns what that showed.

    Args:
      make: makes one environment.
      steps: most of them, resets not counted.
      seconds: after which no further step begins.
      seed: of the environment and the actions.

    Raises:
      EnvironmentFailed: it fails, or gives values that no agent can use.
      ValueError: it cannot be made.
    """
    rewards: list[float] = []
    lengths: list[int] = []
    forbidden: list[float] = []
    took: dict[bool, list[float]] = {False: [], True: []}  # whether it was a reset -> seconds
    largest, terminated, length = 0.0, 0, 0
    with contextlib.closing(make()) as environment:
        actions = _Actions(environment, seed)
        began = time.monotonic()
        timestep = environment.reset(seed)
        took[True].append(time.monotonic() - began)
        first = _copied(timestep.observation)
        while True:
            largest = max(largest, _largest(timestep.observation))
            forbidden.append(1.0 - float(actions.allowed(timestep.observation).mean()))
            if len(rewards) == steps or (rewards and time.monotonic() - began > seconds):
                break
            action = actions.draw(timestep.observation)
            sent = time.monotonic()
            environment.send(action)
            step = environment.recv()
            timestep, is_first = step.timestep, step.timestep.step_type[0] == StepType.FIRST
            took[bool(is_first)].append(time.monotonic() - sent)
            if is_first:
                continue
            rewards.append(float(timestep.reward[0]))
            length += 1
            if timestep.step_type[0] == StepType.LAST:
                lengths.append(length)
                terminated += int(timestep.discount[0] == 0.0)
                length = 0
        spaces = environment.observation_space, environment.action_space
    resets = took[True][1:] or took[True]
    return Look(
        *(spaces, len(rewards), lengths, terminated, np.array(rewards), largest),
        float(np.mean(forbidden)),
        *(float(np.mean(took[False])), float(np.mean(resets)), first),
    )


def begins_alike(make: Callable[[], Environment], seen: Look, seed: int = 0) -> bool:
    """Returns whether another environment begins with the same observation, as it should.

    Args:
      make: makes one environment.
      seen: what the first one has shown.
      seed: of both.

    Raises:
      EnvironmentFailed: it fails, or gives values that no agent can use.
      ValueError: it cannot be made.
    """
    with contextlib.closing(make()) as environment:
        first = _copied(environment.reset(seed).observation)
    return all(np.array_equal(*pair) for pair in zip(first, seen.first, strict=True))


class _Actions:
    """Random actions that an action mask allows, of one environment."""

    def __init__(self, environment: Environment, seed: int) -> None:
        self._space = environment.action_space
        self._space.seed(seed)
        self._random = np.random.default_rng(seed)
        self._is_masked = has_action_mask(environment.observation_space)
        self._sizes = choices(self._space)

    def allowed(self, observation: Nest) -> np.ndarray:
        """Returns which choices there are, of all parts together: bool [N]."""
        if not self._is_masked:
            return np.ones(max(1, sum(self._sizes)), np.bool_)
        mask: np.ndarray = np.asarray(observation[ACTION_MASK])[0] != 0
        return mask

    def draw(self, observation: Nest) -> Nest:
        """Returns an action, [1, ...]."""
        allowed = self.allowed(observation)
        parts = iter(np.split(allowed, np.cumsum(self._sizes)[:-1]))
        return tree.map_structure(lambda x: np.asarray(x)[np.newaxis], self._of(self._space, parts))

    def _of(self, space: gym.Space, parts: Iterator[np.ndarray]) -> Any:
        match space:
            case gym.spaces.Dict():
                return {name: self._of(part, parts) for name, part in space.spaces.items()}
            case gym.spaces.Tuple():
                return tuple(self._of(part, parts) for part in space.spaces)
            case gym.spaces.Box():
                return space.sample()
        chosen = [self._random.choice(_options(next(parts))) for _ in choices(space)]
        numbers = np.reshape(chosen, space.shape or ()) + getattr(space, "start", 0)
        return numbers.astype(space.dtype)


def _options(allowed: np.ndarray) -> np.ndarray:
    """Returns the numbers of what is allowed; all where nothing is, at the end of an episode."""
    return np.flatnonzero(allowed if allowed.any() else ~allowed)


def _copied(observation: Nest) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in tree.flatten(observation)]


def _largest(observation: Nest) -> float:
    """Returns the largest absolute floating-point number of an observation."""
    leaves = map(np.asarray, tree.flatten(observation))
    return max((float(abs(x).max()) for x in leaves if x.dtype.kind == "f" and x.size), default=0.0)
