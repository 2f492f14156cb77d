"""Environments to play: one where it counts how long an action is held, one that forbids some."""

from typing import Any

import gymnasium as gym
import numpy as np

LONGEST = 8


class Hold(gym.Env[np.int64, np.int64]):
    """A number n is shown, 1 to 8; who presses for n frames and then lets go gets 1, else 0.

    While it is pressed nothing is shown (0), so one who does not remember n, and decides anew every
    k frames, gets it right once in eight at best: what is done after k frames, 2 k, ... cannot
    depend on n. One who can say beforehand for how long gets it right every time.
    """

    observation_space = gym.spaces.Discrete(LONGEST + 1)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(1, LONGEST + 1))
        self._pressed = self._frames = 0
        return np.int64(self._number), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        self._frames += 1
        ended = False
        if action == 1:
            self._pressed += 1
        elif self._pressed:
            ended = True
        reward = float(ended and self._pressed == self._number)
        shown = 0 if self._pressed else self._number
        return (
            np.int64(shown),
            reward,
            ended,
            self._frames >= 4 * LONGEST,
            {"pressed": self._pressed},
        )


gym.register("Hold-v0", entry_point="hold:Hold")


class Masked(gym.Env[dict[str, Any], np.int64]):
    """Three actions, of which each step forbids one at random; doing it ends the episode."""

    observation_space = gym.spaces.Dict(
        {"observation": gym.spaces.Discrete(1), "action_mask": gym.spaces.MultiBinary(3)}
    )
    action_space = gym.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        forbidden = bool(self._mask[action] == 0)
        self._count += 1
        return self._observation(), -float(forbidden), forbidden, self._count == 10, {}

    def _observation(self) -> dict[str, Any]:
        self._mask = np.ones(3, np.int8)
        self._mask[self.np_random.integers(3)] = 0
        return {"observation": 0, "action_mask": self._mask}


gym.register("Masked-v0", entry_point="hold:Masked")
