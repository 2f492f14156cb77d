"""Bandits for learning to learn: an episode is a number of pulls of one bandit that hides its arms.

The problems of Wang et al. 2016, arXiv 1611.05763, section 3.1, registered with Gymnasium as
Bandit/<Problem>-v0. There is nothing to see: an agent needs its last action and reward.
"""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

_TARGET, _OTHER, _NUM_TARGETS = 5.0, 1.0, 10  # what the eleven arms pay
_SWAP = 0.04  # probability that restless arms trade places before a pull

_Draw = Callable[[np.random.Generator, int], np.ndarray]


def _independent(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.random((count, 2))


def _dependent(rng: np.random.Generator, count: int) -> np.ndarray:
    p = rng.random((count, 1))
    return np.concatenate([p, 1.0 - p], axis=1)


def _one_of(better: float) -> _Draw:
    """One arm pays with this probability, the other one with the rest."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        p = np.where(rng.random((count, 1)) < 0.5, better, 1.0 - better)
        return np.concatenate([p, 1.0 - p], axis=1)

    return draw


def _eleven(rng: np.random.Generator, count: int) -> np.ndarray:
    target = rng.integers(_NUM_TARGETS, size=count)
    payoffs = np.full((count, _NUM_TARGETS + 1), _OTHER)
    payoffs[np.arange(count), target] = _TARGET
    payoffs[:, -1] = (target + 1) / _NUM_TARGETS
    return payoffs


PROBLEMS: dict[str, _Draw] = {
    "Independent": _independent,
    "DependentUniform": _dependent,
    "DependentEasy": _one_of(0.9),
    "DependentMedium": _one_of(0.75),
    "DependentHard": _one_of(0.6),
    "Restless": _one_of(0.8),
    "ElevenArms": _eleven,
}
"""Name -> draws what the arms pay on average, [count, arms]."""


class BanditVector(VectorEnv):
    """E bandits, each a new one in every episode; autoreset in the next step.

    A pull pays 1 with the arm's probability and else 0. Arms of `Restless` (0.8 and 0.2) trade
    places now and then, before a pull. The arms of `ElevenArms` pay the same each time: one of the
    first ten, the target, 5, the others 1, and the last one a tenth of the target's number, 1 to
    10. Infos are `regret`, what was lost so far against always pulling the best arm of the
    moment, on average over the payoffs; and `best`, whether that arm was pulled (0 or 1).

    Args:
      num_envs: E.
      problem: a name in `PROBLEMS`.
      pulls: length of an episode.
    """

    def __init__(self, num_envs: int = 1, problem: str = "Independent", pulls: int = 100) -> None:
        if problem not in PROBLEMS:
            raise TypeError(f"problem is {problem!r}; there are {', '.join(PROBLEMS)}.")
        if not isinstance(pulls, int) or pulls < 1:
            raise TypeError(f"pulls is {pulls!r}; it must be a whole number of at least 1.")
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self._problem, self._pulls = problem, pulls
        arms = PROBLEMS[problem](np.random.default_rng(0), 1).shape[1]
        self.single_observation_space = gym.spaces.Discrete(1)
        self.single_action_space = gym.spaces.Discrete(arms)
        self.observation_space = gym.spaces.MultiDiscrete([1] * num_envs)
        self.action_space = gym.spaces.MultiDiscrete([arms] * num_envs)
        self._envs = np.arange(num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed[0] if isinstance(seed, list) else seed)
        self._payoffs = PROBLEMS[self._problem](self.np_random, self.num_envs)
        self._count = np.zeros(self.num_envs, np.int64)
        self._regret = np.zeros(self.num_envs)
        self._ended = np.zeros(self.num_envs, np.bool_)
        return self._nothing(), {}

    def step(
        self, actions: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        first = self._ended
        if self._problem == "Restless":
            swaps = self.np_random.random(self.num_envs) < _SWAP
            self._payoffs[swaps] = self._payoffs[swaps, ::-1]
        mean, most = self._payoffs[self._envs, actions], self._payoffs.max(axis=1)
        paid = mean
        if self._problem != "ElevenArms":
            paid = (self.np_random.random(self.num_envs) < mean).astype(np.float64)
        self._regret = self._regret + (most - mean)
        self._count += 1
        if first.any():
            self._payoffs[first] = PROBLEMS[self._problem](self.np_random, int(first.sum()))
            self._count[first] = 0
            self._regret[first] = 0.0
        self._ended = self._count == self._pulls
        info = {"regret": self._regret, "best": (mean == most).astype(np.float64)}
        given = {f"_{name}": ~first for name in info}
        never = np.zeros(self.num_envs, np.bool_)
        return (
            self._nothing(),
            np.where(first, 0.0, paid),
            self._ended.copy(),
            never,
            {**info, **given},
        )

    def _nothing(self) -> np.ndarray:
        return np.zeros(self.num_envs, np.int64)


class Bandit(gym.Env):
    """One bandit, a new one in every episode: see `BanditVector`."""

    def __init__(self, problem: str = "Independent", pulls: int = 100) -> None:
        self._vector = BanditVector(1, problem, pulls)
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.int64, dict[str, Any]]:
        super().reset(seed=seed)
        observation, _ = self._vector.reset(seed=seed)
        return observation[0], {}

    def step(self, action: Any) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, _, info = self._vector.step(np.array([action]))
        numbers = {name: float(info[name][0]) for name in ("regret", "best")}
        return observation[0], float(reward[0]), bool(terminated[0]), False, numbers


def register() -> None:
    """Makes the problems known to Gymnasium."""
    for problem in PROBLEMS:
        gym.register(
            f"Bandit/{problem}-v0",
            entry_point="impala.environments.bandit:Bandit",
            vector_entry_point="impala.environments.bandit:BanditVector",
            kwargs={"problem": problem},
        )
