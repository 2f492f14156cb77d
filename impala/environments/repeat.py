"""An action that is held for several frames: always as many, or as many as the agent says."""

import copy
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np

from impala.config.schema import RepeatConfig
from impala.environments.gymnasium import number, numbers
from impala.environments.spaces import ACTION_MASK, choices, chosen, has_action_mask


class ActionRepeat(gym.Wrapper):
    """Plays an action again and again, as one step: up to the end of the episode, to a discount of
    0, or to where the environment's mask forbids it.

    The reward is the sum of the frames' rewards, or the discounted sum; the other infos are those
    of the last frame. Info `frames` says how many were played. If the number is learned, the action
    space becomes a Dict of `action` and `repeat` (1 to most), and an action mask allows every
    number.

    Args:
      environment: a single one.
      config: how often, and who says so. A discount below 1 makes rewards within the step count
        gamma^i, and is passed on as info `discount`, gamma^(k - 1) after k frames: with the
        learner's own gamma that is gamma^k.
    """

    def __init__(self, environment: gym.Env, config: RepeatConfig) -> None:
        super().__init__(environment)
        self._config = config
        self._is_masked = has_action_mask(environment.observation_space)
        if not config.learned:
            return
        self.action_space = gym.spaces.Dict(
            {
                "action": environment.action_space,
                "repeat": gym.spaces.Discrete(config.most, start=1),
            }
        )
        if self._is_masked:
            space = environment.observation_space
            assert isinstance(space, gym.spaces.Dict)
            wider = gym.spaces.MultiBinary(space[ACTION_MASK].shape[0] + config.most)  # type: ignore[index]
            self.observation_space = gym.spaces.Dict({**space.spaces, ACTION_MASK: wider})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._widened(observation), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        config = self._config
        repeat = config.most
        if config.learned:
            action, repeat = action["action"], int(action["repeat"])
        total, frames, weight, discount = 0.0, 0, 1.0, 1.0
        for _ in range(repeat):
            # A copy each time, since the environment may write into it.
            played = self.env.step(copy.deepcopy(action))
            observation, reward, terminated, truncated, info = played
            total += weight * number(reward)
            given = numbers(info)
            frames += int(given.get("frames", 1))
            discount = weight * given.get("discount", 1.0)
            weight = config.discount * discount
            if terminated or truncated or discount == 0.0 or self._forbids(observation, action):
                break
        info = {**info, "frames": frames, "discount": discount}
        return self._widened(observation), total, terminated, truncated, info

    def _forbids(self, observation: Any, action: Any) -> bool:
        """Whether the action, once more, is what the environment's own mask excludes."""
        if not self._is_masked:
            return False
        offsets = np.cumsum([0, *choices(self.env.action_space)])[:-1]
        entries = offsets + chosen(self.env.action_space, action)
        return not observation[ACTION_MASK][entries].all()

    def _widened(self, observation: Any) -> Any:
        if not (self._is_masked and self._config.learned):
            return observation
        mask = observation[ACTION_MASK]
        every = np.ones(self._config.most, mask.dtype)
        return {**observation, ACTION_MASK: np.concatenate([mask, every])}
