"""An environment whose episodes and steps take as long as they are told to."""

import time
from typing import Any

import gymnasium as gym
import numpy as np


class Steps(gym.Env):
    """Asks for one of two actions, and gives 1 for it; there is nothing to learn but that.

    Args:
      length: steps of an episode.
      seconds: that a step takes, without using a processor.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int, seconds: float) -> None:
        self._length = length
        self._seconds = seconds

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Begins an episode."""
        super().reset(seed=seed)
        self._step = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Takes its time."""
        time.sleep(self._seconds)
        reward = float(action == self._wanted)
        self._step += 1
        return self._observe(), reward, self._step == self._length, False, {}

    def _observe(self) -> np.ndarray:
        self._wanted = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self._wanted]
