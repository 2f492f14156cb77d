"""Our environments as Gymnasium's, for custom loops: one as an `Env`, several as a vector."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import tree
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from impala.environments import base
from impala.types import EnvironmentFault, EnvironmentStep, Nest, StepType, TimeStep

Make = Callable[[], base.Environment]
"""Makes an environment that was not reset yet."""


class SingleEnv(gym.Env):
    """One environment as a `gymnasium.Env`.

    With the same seed it plays the same episodes as the environment itself. It is made anew if it
    is reset with a seed, or before the end of an episode.

    Args:
      make: makes the environment, for which E is 1.
      render_mode: with which it is made.
    """

    def __init__(self, make: Make, render_mode: str | None = None) -> None:
        self._envs = SeveralEnvs(make, render_mode)
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space
        self.metadata = {"render_modes": ["rgb_array", "human"]}
        self.render_mode = render_mode
        self._last_action: Nest | None = None  # set: the episode has ended

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Nest, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and self._last_action is not None:
            observation, *_ = self._envs.step(self._last_action)
        else:
            observation, _ = self._envs.reset(seed=seed)
        self._last_action = None
        return _only(observation), {}

    def step(self, action: Nest) -> tuple[Nest, float, bool, bool, dict[str, Any]]:
        if self._last_action is not None:
            raise RuntimeError("The episode has ended: call reset.")
        actions = tree.map_structure(lambda leaf: np.asarray(leaf)[np.newaxis], action)
        observation, reward, terminated, truncated, infos = self._envs.step(actions)
        if terminated[0] or truncated[0]:
            self._last_action = actions
        info = {name: values[0] for name, values in infos.items() if f"_{name}" in infos}
        return (
            _only(observation),
            float(reward[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            {name: value for name, value in info.items() if not np.isnan(value)},
        )

    @property
    def faults(self) -> Sequence[EnvironmentFault]:
        """As those of `SeveralEnvs`."""
        return self._envs.faults

    def render(self) -> np.ndarray:
        return self._envs.render()[0]

    def close(self) -> None:
        self._envs.close()


class SeveralEnvs(VectorEnv):
    """E environments as a `gymnasium.vector.VectorEnv` that resets itself in the next step.

    With the same seed they play the same episodes as the environments themselves. Reset again, they
    are made anew.

    Args:
      make: makes the environments.
      render_mode: with which environment 0 is made.
    """

    def __init__(self, make: Make, render_mode: str | None = None) -> None:
        self._make, self._made, self._is_new = make, make(), True
        self.num_envs = self._made.num_envs
        self.single_observation_space = self._made.observation_space
        self.single_action_space = self._made.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = render_mode
        self.faults: Sequence[EnvironmentFault] = ()
        """Failures of environments, which were started again, in the last step."""

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Nest, dict[str, Any]]:
        if isinstance(seed, list):
            raise ValueError("Give one seed: environments get seeds of their own, made from it.")
        super().reset(seed=seed)
        if not self._is_new:
            self._made.close()
            self._made = self._make()
        self._is_new = False
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        return _copy(self._made.reset(drawn).observation), {}

    def step(
        self, actions: Nest
    ) -> tuple[Nest, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        self._made.send(actions)
        step = self._made.recv()
        self.faults = step.faults
        terminated, truncated = _ends(step.timestep)
        infos = _infos(step)
        given = {f"_{name}": ~np.isnan(values) for name, values in infos.items()}
        observation, reward = _copy((step.timestep.observation, step.timestep.reward))
        return observation, reward, terminated, truncated, {**infos, **given}

    def render(self) -> tuple[np.ndarray, ...]:
        return (self._made.render(),)

    def close_extras(self, **kwargs: Any) -> None:
        self._made.close()


def _ends(timestep: TimeStep) -> tuple[np.ndarray, np.ndarray]:
    """Whether episodes terminated, and whether they were truncated: [E] each."""
    ended = timestep.step_type == StepType.LAST
    return ended & (timestep.discount == 0.0), ended & (timestep.discount != 0.0)


def _infos(step: EnvironmentStep) -> dict[str, np.ndarray]:
    """What Gymnasium has no other place for, as `base.environment_step` reads it back."""
    terminated, _ = _ends(step.timestep)
    discount = np.where(terminated, np.nan, step.timestep.discount)
    return _copy({**step.info, "frames": step.frames, "discount": discount})


def _copy(nest: Nest) -> Nest:
    """The environment may write into its arrays again."""
    return tree.map_structure(np.array, nest)


def _only(nest: Nest) -> Nest:
    """A copy of what belongs to environment 0."""
    return tree.map_structure(lambda leaf: np.array(leaf[0])[()], nest)
