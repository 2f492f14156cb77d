"""An environment whose rewards are now and then beyond what a loss can hold."""

from typing import Any

import gymnasium as gym
import numpy as np

EVERY = 40  # episodes of an environment


class Poison(gym.Env[np.ndarray, np.int64]):
    """Ten steps an episode; the last reward is 1, or, every so often, 9e29."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    _episode = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode += 1
        self._step = 0
        return self.observation_space.sample(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        over = self._step == 10
        reward = (9e29 if self._episode % EVERY == 2 else 1.0) if over else 0.0
        return self.observation_space.sample(), reward, over, False, {}


gym.register("Poison-v0", "poison:Poison")
