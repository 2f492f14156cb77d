"""A custom environment, trained with `impala train` or from Python.

    cd examples
    python custom_environment.py
    impala train catch --environment.id custom_environment:Corridor --logdir runs/corridor

Actors are other processes, so they get the environment by name, as module:attribute. The module
must be importable, as it is in the working directory.
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np

import impala


class Corridor(gym.Env):
    """Walk right to the end of a corridor, where 1 is paid; each step costs 0.01."""

    def __init__(self, length: int = 8) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._length = length

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = int(self.np_random.integers(self._length - 1))
        self._steps = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._place = max(0, self._place + (1 if action == 1 else -1))
        self._steps += 1
        arrived = self._place == self._length - 1
        reward = (1.0 if arrived else 0.0) - 0.01
        return self._observation(), reward, arrived, self._steps == 50, {}

    def _observation(self) -> np.ndarray:
        return np.eye(self._length, dtype=np.float32)[self._place]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=100_000)
    parser.add_argument("--logdir", default="runs/corridor")
    options = parser.parse_args()
    trained = impala.train(
        "catch",
        options.logdir,
        environment={"id": "custom_environment:Corridor"},
        total_frames=options.total_frames,
    )
    print(trained.returns)
