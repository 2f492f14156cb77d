"""Bounds of the numbers in valid messages, from the spaces, the tasks and the limits."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from impala.config.schema import Config, LimitsConfig
from impala.environments.spaces import FORBIDDEN, Spaces, leaves
from impala.schedule import tasks
from impala.schedule.tasks import Task

# Largest absolute values.
OBSERVATION = 1e10  # of a number in an observation or a core state
POLICY_PARAMETER = 1e7  # a logit, an action value, a mean; `FORBIDDEN` is always valid

MOST_NAMES = 64  # of numbers in episodes' `info` that a run records

_RAISE = "Raise limits.reward of the learner if that is what the environment gives."
_TOLERANCE = 1e-5  # relative, of a box: rounding may move an action at its edge


class Bounds(NamedTuple):
    """Inclusive limits of a leaf; arrays broadcast against its trailing axes."""

    low: Any
    high: Any


class MessageBounds(NamedTuple):
    """Bounds of the numbers in a run's messages."""

    actions: Sequence[Bounds | None]  # of each leaf of the action; None: any finite number
    frames_per_step: Sequence[int]  # of each task, the most environment frames of one agent step
    limits: LimitsConfig = LimitsConfig()
    observations: Sequence[
        Bounds | None
    ] = ()  # of each leaf; None: as `limits` say; (): so are all


class Limit(NamedTuple):
    """The largest absolute value in a leaf."""

    value: float
    advice: str = ""  # what to do about a number beyond it
    exempt: float | None = None  # a number that is valid beyond the limit

    def beyond(self, array: np.ndarray) -> Any | None:
        """Returns a number of the array that is not finite or beyond the limit, or None."""
        if not array.size:
            return None
        low, high = float(array.min()), float(array.max())  # NaN if the array has one
        if -self.value <= low and high <= self.value:
            return None
        limit = np.float64(self.value)
        wrong = ~((array >= -limit) & (array <= limit))
        if self.exempt is not None:
            wrong &= array != np.float64(self.exempt)
        return array[wrong].flat[0] if wrong.any() else None


def message_bounds(config: Config, played: Sequence[Task], spaces: Spaces) -> MessageBounds:
    """Returns the bounds of a run's messages.

    Args:
      config: the run's configuration.
      played: its tasks.
      spaces: common to all tasks.
    """
    observation_space, action_space = spaces
    return MessageBounds(
        actions=[_bounds(leaf) for _, leaf in leaves(action_space)],
        frames_per_step=[tasks.frames_per_step(task, config.limits) for task in played],
        limits=config.limits,
        observations=[
            None if isinstance(leaf, gym.spaces.Box) else _bounds(leaf)
            for _, leaf in leaves(observation_space)
        ],
    )


def box(low: np.ndarray, high: np.ndarray) -> Bounds:
    """Returns the bounds of an action in a box from `low` to `high`, float64 of any shape."""
    return Bounds(
        low - _TOLERANCE * np.maximum(1.0, np.abs(low)),
        high + _TOLERANCE * np.maximum(1.0, np.abs(high)),
    )


def most_baseline(limits: LimitsConfig) -> float:
    """Returns the largest absolute value of a value estimate."""
    return 100.0 * limits.reward


def limit_of(name: str, dtype: np.dtype, limits: LimitsConfig) -> Limit | None:
    """Returns the limit of the leaf of an unroll with this name; None if it needs no check."""
    finite = Limit(sys.float_info.max)
    match name.split("/"):
        case ["timestep", "reward"]:
            limit = Limit(float(np.float32(limits.reward)), _RAISE)  # as rewards are sent
        case ["timestep", "observation", *_] | ["core_state", *_]:
            limit = Limit(OBSERVATION, "Scale it down in the environment.")
        case ["output", "policy"]:
            limit = Limit(POLICY_PARAMETER, exempt=FORBIDDEN)
        case ["output", "baseline"]:
            limit = Limit(most_baseline(limits), _RAISE)
        case _:
            limit = finite
    if dtype.kind in "iu" and np.iinfo(dtype).max <= limit.value:
        return None  # such as the bytes of an image
    return limit if dtype.kind in "fiu" else None


def _bounds(leaf: gym.Space) -> Bounds | None:
    """Returns the bounds of a leaf; None if any finite number is in it."""
    match leaf:
        case gym.spaces.Discrete():
            return Bounds(leaf.start, leaf.start + leaf.n - 1)
        case gym.spaces.MultiDiscrete():
            return Bounds(leaf.start, leaf.start + leaf.nvec - 1)
        case gym.spaces.MultiBinary():
            return Bounds(0, 1)
        case gym.spaces.Box() if leaf.dtype is not None and leaf.dtype.kind == "f":
            # Infinite where the box is not bounded.
            return box(leaf.low.astype(np.float64), leaf.high.astype(np.float64))
    return None
