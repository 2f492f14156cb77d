"""An environment that counts, so that every row of a pipeline says where it belongs.

`register_counting()` returns the id to play it by; "counting:Counting-v0" works in other processes
that have this folder on their path.
"""

from typing import Any

import gymnasium as gym
import numpy as np

_ID = "Counting-v0"


def episode_length(seed: int, episode: int) -> int:
    """Steps of an episode: 1 to 7."""
    return 1 + (seed + 3 * episode) % 7


def ends_by_time_limit(seed: int, episode: int) -> bool:
    """Whether an episode is truncated instead of terminated."""
    return (seed + episode) % 2 == 1


def frames_of(step: int) -> int:
    """Frames that a step of an episode, counted from 1, played: 1 to 3."""
    return 1 + step % 3


class CountingEnv(gym.Env):
    """Counts its episodes and steps from its seed alone; any of the three actions will do.

    Observation, int32 [3]: the seed of the first reset, the episode (from 0), the step in the
    episode (0 at its start). The reward of a step is its number, so an episode of n steps returns
    n (n + 1) / 2. `info` has the `frames` that the step played, and the `episode`.
    """

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 2**31 - 1, (3,), np.int32)
        self.action_space = gym.spaces.Discrete(3)
        self._seed = 0
        self._episode = -1
        self._step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._episode += 1
        self._step = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        done = self._step == episode_length(self._seed, self._episode)
        cut_off = ends_by_time_limit(self._seed, self._episode)
        info = {"frames": frames_of(self._step), "episode": self._episode}
        return self._observation(), float(self._step), done and not cut_off, done and cut_off, info

    def _observation(self) -> np.ndarray:
        return np.array([self._seed, self._episode, self._step], np.int32)


def register_counting() -> str:
    """Makes CountingEnv known to Gymnasium, and returns its id."""
    if _ID not in gym.registry:
        gym.register(_ID, "counting:CountingEnv")
    return _ID


register_counting()
