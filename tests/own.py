"""Environments of each kind that one can bring, all of which count: see counting.py.

They are named as own:ATTRIBUTE; none of them is registered.
"""

import dataclasses
import queue
import sys
import threading
from typing import Any

import counting
import gymnasium as gym
import numpy as np
from counting import CountingEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from impala.environments.base import (
    Environment,
    environment_step,
    first_timestep,
    seeds,
)
from impala.types import EnvironmentStep, Nest, TimeStep


def made(**kwargs: Any) -> gym.Env:
    """A function that returns an environment."""
    return gym.wrappers.TransformReward(CountingEnv(), lambda reward: reward * kwargs["scale"])


class Looked(CountingEnv):
    """An environment that can be looked at, with settings."""

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """How it counts."""

        scale: float = 1.0
        """What rewards are multiplied by."""

    def __init__(self, settings: Settings, render_mode: str | None = None) -> None:
        super().__init__()
        self._scale = settings.scale
        self.render_mode = render_mode

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, self._scale * reward, terminated, truncated, info

    def render(self) -> Any:
        return np.full((4, 6, 3), self._step, np.uint8)


class Nested(CountingEnv):
    """Its observation is a nest."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Dict(
            {
                "count": self.observation_space,
                "pair": gym.spaces.Tuple([gym.spaces.Discrete(9)] * 2),
            }
        )

    def _observation(self) -> Any:
        return {"count": super()._observation(), "pair": (self._step, self._episode % 9)}


class NextStep(SyncVectorEnv):
    def __init__(self, num_envs: int, env: type[gym.Env] = CountingEnv) -> None:
        super().__init__([env] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


class Bare(NextStep):
    """Its ends are numbers, and its infos have no masks."""

    def __init__(self, num_envs: int, dtype: str) -> None:
        super().__init__(num_envs)
        self._dtype = dtype

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, infos = super().step(actions)
        ends = terminated.astype(self._dtype), truncated.astype(self._dtype)
        infos = {name: values for name, values in infos.items() if not name.startswith("_")}
        return observation, reward, *ends, infos


class Scribbler(gym.Env):
    """Shows each action as it came, then writes into it; its info has a number for a name."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[Any, Any]]:
        seen = action.copy()
        action *= 0.1
        return seen, 0.0, False, False, {3: 1.0}


class SameStep(SyncVectorEnv):
    def __init__(self, num_envs: int, env: type[gym.Env] = CountingEnv) -> None:
        super().__init__([env] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class Disabled(SyncVectorEnv):
    def __init__(self, num_envs: int, env: type[gym.Env] = CountingEnv) -> None:
        super().__init__([env] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


class Simulator(VectorEnv):
    """Counts for all environments at once; the last observations are a batch, as simulators do it.

    It is told when to reset by `mode`, and gives nothing to look at.
    """

    def __init__(self, num_envs: int, mode: str = "SameStep") -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 2**31 - 1, (3,), np.int32)
        self.single_action_space = gym.spaces.Discrete(3)
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        assert isinstance(seed, int)
        self._state = np.zeros((self.num_envs, 3), np.int32)
        self._state[:, 0] = seed
        return self._state.copy(), {}

    def step(
        self, actions: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        assert actions.shape == (self.num_envs,)
        state = self._state
        state[:, 2] += 1
        rows = [(int(seed), int(episode)) for seed, episode, _ in state]
        done = state[:, 2] == [counting.episode_length(*row) for row in rows]
        cut_off = np.array([counting.ends_by_time_limit(*row) for row in rows])
        reward = state[:, 2].astype(np.float64)
        final = state.copy()
        state[done, 1] += 1
        state[done, 2] = 0
        numbers = {"frames": 1 + final[:, 2] % 3, "episode": final[:, 1].astype(np.float64)}
        given = {f"_{name}": np.ones(self.num_envs, np.bool_) for name in numbers}
        infos = {**numbers, **given}
        if done.any():
            infos |= {"final_obs": final, "_final_obs": done, "final_info": dict(infos)}
        return state.copy(), reward, done & ~cut_off, done & cut_off, infos


class Threads(Environment):
    """Environments that each step in a thread of their own, as soon as an action is sent."""

    def __init__(self, num_envs: int, scale: float = 1.0) -> None:
        self.num_envs = num_envs
        self._scale = scale
        self._envs = [CountingEnv() for _ in range(num_envs)]
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space
        self._actions: list[queue.Queue[Any]] = [queue.Queue() for _ in range(num_envs)]
        self._answers: list[queue.Queue[Any]] = [queue.Queue() for _ in range(num_envs)]
        self._threads = [threading.Thread(target=self._play, args=(i,)) for i in range(num_envs)]
        for thread in self._threads:
            thread.start()

    def reset(self, seed: int) -> TimeStep:
        first = [
            env.reset(seed=int(s))
            for env, s in zip(self._envs, seeds(seed, self.num_envs), strict=True)
        ]
        self._ended = np.zeros(self.num_envs, np.bool_)
        return first_timestep(np.stack([observation for observation, _ in first]), self.num_envs)

    def send(self, action: Nest) -> None:
        for i, ended in enumerate(self._ended):
            self._actions[i].put("reset" if ended else action[i])

    def recv(self) -> EnvironmentStep:
        answers = [answer.get() for answer in self._answers]
        observation, reward, terminated, truncated = map(
            np.stack, zip(*[a[:4] for a in answers], strict=True)
        )
        info = {
            name: np.array([a[4].get(name, np.nan) for a in answers])
            for name in ("frames", "episode")
        }
        first, self._ended = self._ended, terminated | truncated
        return environment_step(
            observation, self._scale * reward, terminated, truncated, first, info
        )

    def render(self) -> np.ndarray:
        raise ValueError("nothing to render: threads have no window")

    def close(self) -> None:
        for i, thread in enumerate(self._threads):
            self._actions[i].put(None)
            thread.join()

    def _play(self, i: int) -> None:
        while (action := self._actions[i].get()) is not None:
            if isinstance(action, str):
                observation, info = self._envs[i].reset()
                self._answers[i].put((observation, 0.0, False, False, info))
            else:
                self._answers[i].put(self._envs[i].step(action))


class Blind(Threads):
    """Shows nothing."""

    def render(self) -> Any:
        return None


class WithoutSpaces(gym.Env):
    pass


class Alone(Threads):
    """Forgets how many environments it was to make."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(1)


class Odd(gym.Env):
    """Counts to 3 in each of two numbers, until it does what it is told to.

    Args:
      how: what it does differently.
      at: the step in which it does so; 0 is the reset.
    """

    def __init__(self, how: str, at: int = 1) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "pair": gym.spaces.Box(-1.0, 3.0, (2,), np.float32),
                "count": gym.spaces.Discrete(3, start=1),
            }
        )
        self.action_space = gym.spaces.Discrete(2)
        self._how, self._at, self._step = how, at, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._step = 0
        return self._observation(), {}

    def step(self, action: int) -> Any:
        self._step += 1
        observation = self._observation()
        if self._step == self._at and self._how == "four values":
            return observation, 0.0, False, {}
        is_odd = self._step == self._at
        if is_odd and self._how == "exit":
            sys.exit(3)
        rewards = {"no reward": None, "word": "one", "array": np.ones(1)}
        reward = rewards.get(self._how, 0.0) if is_odd else 0.0
        info: dict[str, Any] | None = None if is_odd and self._how == "no info" else {}
        return observation, reward, False, False, info

    def _observation(self) -> Any:
        pair = np.full(2, self._step % 4, np.float32)
        is_odd = self._step == self._at
        if is_odd and self._how == "shape":
            pair = np.zeros((2, 1), np.float32)
        if is_odd and self._how == "low":
            pair[1] = -1.5
        if is_odd and self._how == "high":
            pair[1] = 3.5
        return {"pair": pair, "count": 4 if is_odd and self._how == "choice" else 1}


class Wide(gym.Env):
    """Observes numbers of another type than its space's.

    Args:
      numbers: two of them, after the first observation.
      dtype: theirs.
    """

    observation_space: gym.Space = gym.spaces.Dict(
        {"depth": gym.spaces.Box(0, 255, (2,), np.uint8)}
    )
    action_space = gym.spaces.Discrete(2)

    def __init__(self, numbers: list[float], dtype: str) -> None:
        self._numbers = np.array(numbers, dtype)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return {"depth": np.zeros(2, np.uint8)}, {}

    def step(self, action: int) -> Any:
        return {"depth": self._numbers}, 0.0, False, False, {}


class Seeded(gym.Env):
    """Its reset takes a seed and nothing else."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        return 0, {}

    def step(self, action: int) -> Any:
        return 0, 1.0, True, False, {}


class Keyed(gym.Env):
    """One of its spaces has a number for a key, within a part.

    Args:
      what: which space: observation or action.
    """

    def __init__(self, what: str) -> None:
        self.observation_space = self.action_space = gym.spaces.Discrete(2)
        parts: Any = {0: gym.spaces.Discrete(2), 1: gym.spaces.Discrete(2)}
        within = gym.spaces.Tuple([gym.spaces.Dict(pair=gym.spaces.Dict(parts))])
        setattr(self, f"{what}_space", within)


class WithoutSeed(gym.Env):
    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def reset(self) -> Any:  # type: ignore[override]
        return 0


class Raises(gym.Env):
    def __init__(self) -> None:
        raise KeyError("map")


NUMBER = 7
