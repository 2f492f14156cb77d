"""Environments around environments: what refuses nonsense, and what adds to the observation."""

from collections.abc import Collection
from typing import Any

import gymnasium as gym
import numpy as np

from impala.environments import base
from impala.environments.failure import EnvironmentFailed, close, failure_of
from impala.environments.spaces import (
    ACTION_MASK,
    choices,
    has_action_mask,
    is_wrapped,
    limits,
)
from impala.runtime.signals import exits_by_signal
from impala.types import EnvironmentStep, Nest, StepType, TimeStep

_FIRST_STEPS = 100  # in which observations are compared with the limits of their space
_IMAGE = "an image is uint8 [height, width, 3]"


class Checked(base.Environment):
    """Refuses calls out of order, actions outside the space and values that no agent can use.

    Observations outside their space are refused in the first 100 steps: where the space is wrong,
    that is soon seen, and to look at every number of every step would cost time.

    Args:
      environment: what is checked.
      name: its name in messages.
      first: index of environment 0 among the actor's, for messages.
    """

    def __init__(self, environment: base.Environment, name: str, first: int = 0) -> None:
        self._environment = environment
        self._name = name
        self._first = first
        self._state = "new"  # then ready and stepping by turns, and closed or broken at the end
        self._steps = 0
        self.observation_space = environment.observation_space
        self.action_space = environment.action_space
        self.num_envs = environment.num_envs
        self._choices: list[int] = []
        if has_action_mask(environment.observation_space):
            self._choices = choices(environment.action_space)

    def reset(self, seed: int) -> TimeStep:
        """As `Environment.reset`.

        Raises:
          RuntimeError: if called again.
          EnvironmentFailed: if the environment fails or gives unusable values.
        """
        self._expect("new", "reset comes once, before the first send")
        timestep = self._guarded(lambda: self._environment.reset(seed), "reset")
        self._guarded(lambda: self._check_timestep(timestep), "reset")
        self._state = "ready"
        return timestep

    def send(self, action: Nest) -> None:
        """As `Environment.send`.

        Raises:
          ValueError: if the action is not in the space; it may be sent again, corrected.
          RuntimeError: before `reset`, or before the `recv` of the last `send`.
        """
        self._expect("ready", "send comes after reset or recv")
        action = base.map_leaves(self._check_action, "action", self.action_space, action)
        self._guarded(lambda: self._environment.send(action))
        self._state = "stepping"

    def recv(self) -> EnvironmentStep:
        """As `Environment.recv`.

        Raises:
          RuntimeError: without a `send` before.
          EnvironmentFailed: if the environment fails or gives unusable values.
        """
        self._expect("stepping", "recv comes after send")
        self._steps += 1
        step = self._guarded(self._environment.recv)
        self._guarded(lambda: self._check_timestep(step.timestep))
        self._state = "ready"
        return step

    def render(self) -> np.ndarray:
        """As `Environment.render`.

        Raises:
          ValueError: if it is not an image.
        """
        image: Any = self._environment.render()
        if not isinstance(image, np.ndarray):
            raise ValueError(f"{self._name} shows {image!r:.100}; {_IMAGE}")
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"{self._name} shows {image.dtype} {list(image.shape)}; {_IMAGE}")
        return image

    def close(self) -> None:
        """As `Environment.close`; an error of the environment is only logged."""
        if self._state != "closed":
            self._state = "closed"
            close(self._environment, self._name)

    def _expect(self, state: str, rule: str) -> None:
        if self._state != state:
            raise RuntimeError(f"{self._name} is {self._state}, not {state}: {rule}")

    def _guarded(self, call: Any, method: str = "step") -> Any:
        """What the call returns; its errors get the environment's name and the step."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            if exits_by_signal(error):
                raise
            self._state = "broken"
            raise EnvironmentFailed(
                f"{self._name} failed at step {self._steps}: {type(error).__name__}: {error}",
                *failure_of(error, self._name, self._environment.code, method),
            ) from error

    def _check_action(self, name: str, space: gym.Space, action: Any) -> np.ndarray:
        action = np.asarray(action)
        expected = (self.num_envs, *(space.shape or ()))
        if action.shape != expected:
            raise ValueError(
                f"{name} for {self._name} has shape {action.shape}, expected {expected}"
            )
        kind, wanted = action.dtype.kind, np.dtype(space.dtype).kind
        if not ((kind in "biu" and wanted in "biuf") or kind == wanted == "f"):
            raise ValueError(f"{name} for {self._name} is {action.dtype}, expected {space.dtype}")
        if isinstance(space, gym.spaces.Box):
            valid = np.isfinite(action)
        else:
            low, high = limits(space)
            valid = (action >= low) & (action <= high)
        if not valid.all():
            i = int(np.argwhere(~valid)[0][0])
            which = f"environment {self._first + i} of {self._name}"
            raise ValueError(f"{name} {action[i]} for {which} is not in {space}")
        return action.astype(space.dtype)  # a copy: environments may write into it

    def _check_timestep(self, timestep: TimeStep) -> None:
        base.map_leaves(
            self._check_observation, "observation", self.observation_space, timestep.observation
        )
        if self._choices:
            acts = timestep.step_type != StepType.LAST  # what is done at the end is ignored
            self._check_mask(timestep.observation[ACTION_MASK], acts)
        reward, discount = timestep.reward, timestep.discount
        good_reward, good_discount = np.isfinite(reward), (discount >= 0.0) & (discount <= 1.0)
        if not (good_reward & good_discount).all():
            name, values, good = ("discount", discount, good_discount)
            if not good_reward.all():
                name, values, good = ("reward", reward, good_reward)
            i = int(np.flatnonzero(~good)[0])
            raise ValueError(f"the {name} of environment {self._first + i} is {values[i]}")

    def _check_mask(self, mask: np.ndarray, acts: np.ndarray) -> None:
        if mask.shape[1:] != (sum(self._choices),):
            raise ValueError(
                f"the {ACTION_MASK} has {mask.shape[1:]} entries; the action has {self._choices} "
                "choices"
            )
        begins = np.cumsum([0, *self._choices[:-1]])
        stuck = acts[:, np.newaxis] & ~np.logical_or.reduceat(mask, begins, axis=1)  # [E, parts]
        if stuck.any():
            env, part = np.argwhere(stuck)[0]
            raise ValueError(
                f"the {ACTION_MASK} of environment {self._first + env} forbids all of part {part}"
            )

    def _check_observation(self, name: str, space: gym.Space, value: np.ndarray) -> None:
        base.check_shape(name, space, value, (self.num_envs,))
        if value.dtype != space.dtype:
            raise ValueError(f"{name} is {value.dtype}, expected {space.dtype}")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            i = int(np.argwhere(~np.isfinite(value))[0][0])
            raise ValueError(f"{name} of environment {self._first + i} is not finite: {value[i]}")
        if self._steps <= _FIRST_STEPS:
            self._check_limits(name, space, value)

    def _check_limits(self, name: str, space: gym.Space, value: np.ndarray) -> None:
        low, high = (np.broadcast_to(limit, value.shape) for limit in limits(space))
        outside = (value < low) | (value > high)
        if outside.any():
            place = tuple(map(int, np.argwhere(outside)[0]))
            at = f"[{', '.join(map(str, place[1:]))}]" if place[1:] else ""
            raise ValueError(
                f"{name}{at} of environment {self._first + place[0]} is {value[place]}, outside of "
                f"its space, {low[place]} to {high[place]}: clip or scale it, or correct "
                "observation_space"
            )


class History:
    """What happened just before an observation, in E environments, for agents that see it.

    At the start of an episode:
    `last_action` is "none": for choices one more number, one below the smallest; else zeros;
    `last_reward` (float32, raw) is 0;
    `time_in_episode` (int32, agent steps) is 0.

    Args:
      action_space: of one environment.
      num_envs: E.
      parts: which of the three.
    """

    def __init__(self, action_space: gym.Space, num_envs: int, parts: Collection[str]) -> None:
        spaces = {
            "last_action": _with_none(action_space),
            "last_reward": gym.spaces.Box(-np.inf, np.inf, (), np.float32),
            "time_in_episode": gym.spaces.Box(0, 2**31 - 1, (), np.int32),
        }
        self.spaces = {name: space for name, space in spaces.items() if name in parts}
        self._action_space = action_space
        self._no_action = base.map_leaves(
            lambda _, space: _none(space, num_envs), "last_action", action_space
        )
        self._time = np.zeros(num_envs, np.int32)

    def before(self, first: np.ndarray, action: Nest | None, reward: np.ndarray) -> dict[str, Nest]:
        """Returns what happened before the next observation, and counts it.

        Args:
          first: [E] bool, where an episode begins with it.
          action: [E, ...] that led to it; None if there was none yet.
          reward: [E] float32 that came with it.
        """
        self._time = np.where(first, 0, self._time + 1).astype(np.int32)
        happened = {
            "last_action": self._last(first, action) if "last_action" in self.spaces else None,
            "last_reward": np.where(first, 0.0, reward).astype(np.float32),
            "time_in_episode": self._time,
        }
        return {name: happened[name] for name in self.spaces}

    def _last(self, first: np.ndarray, action: Nest | None) -> Nest:
        def last(name: str, space: gym.Space, action: np.ndarray, none: np.ndarray) -> np.ndarray:
            is_first = first.reshape(-1, *[1] * (none.ndim - 1))
            return np.where(is_first, none, action).astype(none.dtype, copy=False)

        action = self._no_action if action is None else action
        return base.map_leaves(last, "last_action", self._action_space, action, self._no_action)


class WithHistory(base.Wrapper):
    """Puts the observation in a dict, beside what happened just before it: see `History`.

    `observation` is the environment's own; so is the `action_mask`, if it has one.

    Args:
      environment: what is wrapped.
      parts: which of the three.
    """

    def __init__(self, environment: base.Environment, parts: Collection[str]) -> None:
        super().__init__(environment)
        own = environment.observation_space
        self._is_wrapped = is_wrapped(own)
        spaces: dict[str, gym.Space] = dict(own.spaces) if is_wrapped(own) else {"observation": own}
        self._history = History(environment.action_space, environment.num_envs, parts)
        self.observation_space = gym.spaces.Dict({**spaces, **self._history.spaces})
        self._action: Nest | None = None

    def send(self, action: Nest) -> None:
        super().send(action)
        self._action = action

    def changed(self, timestep: TimeStep) -> TimeStep:
        own = timestep.observation
        observation = dict(own) if self._is_wrapped else {"observation": own}
        first = timestep.step_type == StepType.FIRST
        observation |= self._history.before(first, self._action, timestep.reward)
        return timestep._replace(observation=observation)


def _none(space: gym.Space, num_envs: int) -> np.ndarray:
    start = getattr(space, "start", 1) - 1  # spaces of choices have one; the others get 0
    return np.broadcast_to(start, (num_envs, *(space.shape or ()))).astype(space.dtype)


def _with_none(space: gym.Space) -> gym.Space:
    """The space of an action or none."""
    match space:
        case gym.spaces.Dict():
            return gym.spaces.Dict({key: _with_none(part) for key, part in space.spaces.items()})
        case gym.spaces.Tuple():
            return gym.spaces.Tuple([_with_none(part) for part in space.spaces])
        case gym.spaces.Discrete():
            return gym.spaces.Discrete(int(space.n) + 1, start=int(space.start) - 1)
        case gym.spaces.MultiDiscrete():
            return gym.spaces.MultiDiscrete(space.nvec + 1, start=space.start - 1)
        case gym.spaces.Box():
            low, high = np.minimum(space.low, 0), np.maximum(space.high, 0)
            return gym.spaces.Box(low, high, space.shape, space.dtype.type)  # () is not inferred
    return space
