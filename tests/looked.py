"""Environments to look at: each has one trait."""

from typing import Any

import gymnasium as gym
import numpy as np

from impala.environments.spaces import ACTION_MASK


class Quiet(gym.Env):
    """Ten steps of numbers from the seed, each rewarded with their number."""

    def __init__(self, spread: float = 1.0) -> None:
        self.observation_space: gym.Space = gym.spaces.Box(-spread, spread, (2,), np.float32)
        self.action_space: gym.Space = gym.spaces.Discrete(2)
        self._spread = spread

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observed(), float(self.steps), self.steps == 10, False, {}

    def observed(self) -> Any:
        numbers = self.np_random.uniform(-self._spread, self._spread, 2)
        return numbers.astype(np.float32)


class Seedless(Quiet):
    """Observes numbers that no seed determines."""

    def observed(self) -> Any:
        return np.random.default_rng().uniform(-1.0, 1.0, 2).astype(np.float32)


class FailsOnce(Quiet):
    """The first one that is made in a process fails."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        FailsOnce.made += 1
        self._fails = FailsOnce.made == 1

    def observed(self) -> Any:
        if self._fails:
            raise KeyError("gear")
        return super().observed()


class Unmade(Quiet):
    """Makes its simulator in a reset, which fails, so that there is none to stop."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.simulator = self.started("gear")
        return super().reset(seed=seed)

    def started(self, name: str) -> Any:
        raise KeyError(name)

    def close(self) -> None:
        self.simulator.stop()


class Unclosable(Quiet):
    def close(self) -> None:
        raise OSError("the simulator has gone")


class Alone(Quiet):
    """Only the first one that is made in a process can be played."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Alone.made += 1
        self._number = Alone.made

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, *ends = super().step(action)
        return observation, reward if self._number == 1 else None, *ends


class Guarded(Quiet):
    """Raises at an action that its mask forbids: two of three choices in one part, 3 in another."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Dict(
            b=gym.spaces.MultiDiscrete([3, 2]), a=gym.spaces.Discrete(4, start=1)
        )
        own = self.observation_space
        mask = gym.spaces.MultiBinary(9)
        self.observation_space = gym.spaces.Dict({"observation": own, ACTION_MASK: mask})

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        (one, other), a = action["b"], action["a"]
        if one != self.steps % 3 or other != 1 or a == 4:
            raise ValueError(f"{action} is forbidden")
        return super().step(action)

    def observed(self) -> Any:
        mask = np.zeros(9, np.int8)
        mask[[self.steps % 3, 4]] = 1
        mask[5:8] = 1
        return {"observation": super().observed(), ACTION_MASK: mask}
