"""The environments that this actor plays: Catch, and everything that Gymnasium makes."""

import json
from typing import Any

import gymnasium as gym
import numpy as np


class Catch(gym.Env[np.ndarray, np.int64]):
    """Catch, as docs/wire-protocol.md describes it."""

    def __init__(self, rows: int = 10, columns: int = 5) -> None:
        self._rows, self._columns = rows, columns
        self.observation_space = gym.spaces.Box(0, 1, (rows, columns), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._row, self._column = 0, int(self.np_random.integers(self._columns))
        self._paddle = self._columns // 2
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._row += 1
        self._paddle = min(self._columns - 1, max(0, self._paddle + int(action) - 1))
        terminated = self._row == self._rows - 1
        reward = 0.0
        if terminated:
            reward = 1.0 if self._paddle == self._column else -1.0
        return self._seen(), reward, terminated, False, {}

    def _seen(self) -> np.ndarray:
        board = np.zeros((self._rows, self._columns), np.uint8)
        board[self._row, self._column] = 1
        board[-1, self._paddle] = 1
        return board


def make(id: str, kwargs: str) -> gym.Env:
    """Returns an environment as `settings.tasks[].environment` names it.

    Raises:
      ValueError: it cannot be made here.
    """
    arguments = json.loads(kwargs)
    try:
        return Catch(**arguments) if id == "Catch" else gym.make(id, **arguments)
    except (TypeError, ImportError, gym.error.Error) as error:
        raise ValueError(f"The learner plays {id} {kwargs}, which fails here: {error}") from error
