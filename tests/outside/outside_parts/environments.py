"""Coins in lanes: environments that step in threads of their own while the agent is thinking."""

import dataclasses
import queue
import threading
from typing import Any

import gymnasium as gym
import numpy as np

from impala.environments import Environment
from impala.environments.base import environment_step, first_timestep, seeds
from impala.types import EnvironmentStep, Nest, TimeStep


class Lanes(Environment):
    """A coin lies in one of some lanes, and is shown; being in its lane pays 1.

    It moves after each step; an episode is cut off after some. Observations are one-hot.
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """The road."""

        lanes: int = 3
        """Lanes, at least 2."""
        steps: int = 8
        """Steps of an episode."""

    def __init__(self, num_envs: int, settings: Settings, render_mode: str | None = None) -> None:
        self.num_envs = num_envs
        self._settings = settings
        self.observation_space = gym.spaces.Box(0.0, 1.0, (settings.lanes,), np.float32)
        self.action_space = gym.spaces.Discrete(settings.lanes)
        self._actions: list[queue.Queue[Any]] = [queue.Queue() for _ in range(num_envs)]
        self._answers: list[queue.Queue[Any]] = [queue.Queue() for _ in range(num_envs)]
        self._threads = [
            threading.Thread(target=self._play, args=(i,), name=f"lane-{i}")
            for i in range(num_envs)
        ]
        for thread in self._threads:
            thread.start()

    def reset(self, seed: int) -> TimeStep:
        for actions, own in zip(self._actions, seeds(seed, self.num_envs), strict=True):
            actions.put(("seed", int(own)))
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._shown, *_ = self._gathered()
        return first_timestep(self._shown, self.num_envs)

    def send(self, action: Nest) -> None:
        for actions, ended, each in zip(self._actions, self._ended, action, strict=True):
            actions.put(("reset", 0) if ended else ("step", int(each)))

    def recv(self) -> EnvironmentStep:
        first = self._ended
        self._shown, reward, self._ended = self._gathered()
        never = np.zeros(self.num_envs, np.bool_)
        return environment_step(self._shown, reward, never, self._ended, first, {})

    def render(self) -> np.ndarray:
        lanes = np.repeat(np.repeat(self._shown[:1], 16, axis=0), 16, axis=1)
        picture: np.ndarray = np.repeat(lanes[..., np.newaxis] * 255, 3, axis=2).astype(np.uint8)
        return picture

    def close(self) -> None:
        for actions, thread in zip(self._actions, self._threads, strict=True):
            actions.put(None)
            thread.join()

    def _gathered(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        observation, reward, ended = zip(*(answers.get() for answers in self._answers), strict=True)
        return np.stack(observation), np.array(reward), np.array(ended)

    def _play(self, i: int) -> None:
        """Plays one environment, in its thread."""
        lanes, steps = self._settings.lanes, self._settings.steps
        rng = np.random.default_rng()
        coin = step = 0
        while (said := self._actions[i].get()) is not None:
            what, number = said
            if what == "seed":
                rng = np.random.default_rng(number)
            reward = float(what == "step" and number == coin)
            step = step + 1 if what == "step" else 0
            coin = int(rng.integers(lanes))
            observation = np.eye(lanes, dtype=np.float32)[coin]
            self._answers[i].put((observation, reward, step == steps))
