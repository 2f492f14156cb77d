"""Bounds of the numbers in valid messages, from the spaces, the tasks and the limits."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from impala.config.schema import Config, LimitsConfig
from impala.environments.spaces import FORBIDDEN
from impala.schedule import tasks
from impala.schedule.tasks import Task

_TOLERANCE = 1e-5  # relative, of a box: rounding may move an action at its edge


class Bounds(NamedTuple):
    """Inclusive limits of an action leaf; arrays broadcast against its trailing axes."""

    low: Any
    high: Any


class MessageBounds(NamedTuple):
    """Bounds of the numbers in a run's messages."""

    actions: Sequence[Bounds | None]  # of each leaf of the action; None: any finite number
    frames_per_step: Sequence[int]  # of each task, the most environment frames of one agent step
    limits: LimitsConfig = LimitsConfig()


class Limit(NamedTuple):
    """The largest absolute value in a leaf, and the setting that raises it."""

    value: float
    setting: str  # "": no limit, the numbers need only be finite
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


def message_bounds(
    config: Config, played: Sequence[Task], action_space: gym.Space
) -> MessageBounds:
    """Returns the bounds of a run's messages.

    Args:
      config: the run's configuration.
      played: its tasks.
      action_space: common to all tasks.
    """
    return MessageBounds(
        actions=list(_actions(action_space)),
        frames_per_step=[tasks.frames_per_step(task, config.limits) for task in played],
        limits=config.limits,
    )


def box(low: np.ndarray, high: np.ndarray) -> Bounds:
    """Returns the bounds of an action in a box from `low` to `high`, float64 of any shape."""
    return Bounds(
        low - _TOLERANCE * np.maximum(1.0, np.abs(low)),
        high + _TOLERANCE * np.maximum(1.0, np.abs(high)),
    )


def limit_of(name: str, dtype: np.dtype, limits: LimitsConfig) -> Limit | None:
    """Returns the limit of the leaf of an unroll with this name; None if it needs no check."""
    finite = Limit(sys.float_info.max, "")
    match name.split("/"):
        case ["timestep", "reward"]:
            limit = Limit(limits.reward, "limits.reward")
        case ["timestep", "observation", *_] | ["core_state", *_]:
            limit = Limit(limits.observation, "limits.observation")
        case ["output", "policy"]:
            limit = Limit(limits.policy_parameter, "limits.policy_parameter", FORBIDDEN)
        case ["output", "baseline"]:
            limit = Limit(limits.baseline, "limits.baseline")
        case _:
            limit = finite
    if dtype.kind in "iu" and np.iinfo(dtype).max <= limit.value:
        return None  # such as the bytes of an image
    return limit if dtype.kind in "fiu" else None


def _actions(space: gym.Space) -> Iterator[Bounds | None]:
    """Yields the bounds of each leaf of an action."""
    match space:
        case gym.spaces.Dict():
            for name in sorted(space.spaces):
                yield from _actions(space[name])
        case gym.spaces.Tuple():
            for part in space.spaces:
                yield from _actions(part)
        case gym.spaces.Discrete():
            yield Bounds(space.start, space.start + space.n - 1)
        case gym.spaces.MultiDiscrete():
            yield Bounds(space.start, space.start + space.nvec - 1)
        case gym.spaces.MultiBinary():
            yield Bounds(0, 1)
        case gym.spaces.Box() if space.dtype is not None and space.dtype.kind == "f":
            # Infinite where the box is not bounded.
            yield box(space.low.astype(np.float64), space.high.astype(np.float64))
        case _:
            yield None
