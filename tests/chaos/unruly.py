"""Catch, one game a process, that goes wrong when it is told to: "chaos.unruly:Unruly-v0".

Whichever process first takes a file named crash, hang or leak out of its directory obeys it.
"""

import ctypes
import pathlib
import time
from typing import Any

import gymnasium as gym
import numpy as np

from impala.environments.catch import Catch

ID = "chaos.unruly:Unruly-v0"
LEAK_BYTES = 1 << 28


class Unruly(gym.Env):
    """Catch.

    Args:
      control: the directory.
    """

    def __init__(self, control: str) -> None:
        self._control = pathlib.Path(control)
        self._catch = Catch(1)
        self.observation_space = self._catch.observation_space
        self.action_space = self._catch.action_space
        self._leaked: list[np.ndarray] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._catch.reset(int(self.np_random.integers(2**31))).observation[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._is_told_to("crash"):
            ctypes.string_at(0)
        if self._is_told_to("hang"):
            time.sleep(1000.0)
        if self._is_told_to("leak"):
            self._leaked.append(np.ones(LEAK_BYTES, np.uint8))
        self._catch.send(np.array([action]))
        timestep = self._catch.recv().timestep
        over = bool(timestep.discount[0] == 0)
        return timestep.observation[0], float(timestep.reward[0]), over, False, {}

    def _is_told_to(self, what: str) -> bool:
        try:
            (self._control / what).unlink()
        except FileNotFoundError:
            return False
        return True


gym.register("Unruly-v0", "chaos.unruly:Unruly")
