"""An environment that goes wrong when it is told to: "faulty:Obedient-v0" in any process.

It counts like `counting.CountingEnv`; its further actions are the ways to go wrong.
"""

import ctypes
import enum
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import counting
import gymnasium as gym
import numpy as np

ID = "faulty:Obedient-v0"


class Do(enum.IntEnum):
    """Actions."""

    COUNT = 0
    RAISE = 3
    EXIT = 4
    KILL = 5
    SEGFAULT = 6
    HANG = 7
    HANG_IN_C = 8  # with the interpreter's lock held
    LEAK = 9
    NOT_FINITE = 10
    START_A_CHILD = 11
    TAKE_LONG = 12


class ObedientEnv(counting.CountingEnv):
    """Obeys.

    Args:
      failures: a file with a number: so many environments raise when they are made.
      children: a file to which the process ids of started children are written.
    """

    def __init__(self, failures: str = "", children: str = "") -> None:
        super().__init__()
        self.action_space = gym.spaces.Discrete(len(Do) + 2)
        self._failures, self._children = failures, children
        self._leaked: list[np.ndarray] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if self._failures:
            path = pathlib.Path(self._failures)
            if (left := int(path.read_text())) > 0:
                path.write_text(str(left - 1))
                raise OSError("no such game server")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        match action:
            case Do.RAISE:
                raise KeyError("gear")
            case Do.EXIT:
                os._exit(3)
            case Do.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Do.SEGFAULT:
                ctypes.string_at(0)
            case Do.HANG:
                time.sleep(1000.0)
            case Do.HANG_IN_C:
                ctypes.PyDLL(None).sleep(1000)
            case Do.TAKE_LONG:
                time.sleep(4.0)
            case Do.LEAK:
                self._leaked.append(np.ones(1 << 28, np.uint8))
            case Do.START_A_CHILD:
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                pathlib.Path(self._children).write_text(str(child.pid))
        observation, reward, terminated, truncated, info = super().step(action)
        if action == Do.NOT_FINITE:
            reward = float("nan")
        return observation, reward, terminated, truncated, info


gym.register("Obedient-v0", "faulty:ObedientEnv")
