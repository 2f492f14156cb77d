"""Normalisation of observations: mean 0 and variance 1, with fixed statistics.

The statistics are settings. So they are the same numbers for every actor, evaluator and checkpoint,
and for a policy that is loaded without its environment: an observation means the same wherever and
whenever it was made, also in replay. Statistics that run along with an actor's experience would be
other ones in each actor and at each time, and the agent would learn from old observations as if
they were on today's scale. `measure` finds the numbers once, before a run.
"""

import math
from typing import Any

import gymnasium as gym
import numpy as np

from impala.config.schema import NormaliseConfig
from impala.environments import base
from impala.environments.spaces import is_wrapped, main_space
from impala.types import Nest, TimeStep


class Normaliser:
    """Shifts and scales the floating-point numbers of observations; the rest stays as it is.

    What stands beside the observation in a Dict, such as an action mask, is left alone.

    Args:
      config: the statistics.
      space: of one observation, before.

    Raises:
      ValueError: there are not as many statistics as numbers.
    """

    def __init__(self, config: NormaliseConfig, space: gym.Space) -> None:
        sizes = _sizes(space)
        total = sum(sizes.values())
        means, deviations = len(config.mean), len(config.deviation)
        if total == 0 or not {means, deviations} <= {1, total}:
            raise ValueError(
                f"environment.normalise has {means} means and {deviations} deviations, but the "
                f"observation {space} has {total} floating-point numbers: give as many, or one for "
                "all, or none at all to leave observations as they are."
            )
        ends = np.cumsum([*sizes.values()])[:-1]
        of_leaves = (
            np.split(np.broadcast_to(np.asarray(numbers, np.float64), total), ends)
            for numbers in (config.mean, config.deviation)
        )
        self._statistics = dict(zip(sizes, zip(*of_leaves, strict=True), strict=True))
        self._clip = config.clip
        self._main_space, self._is_wrapped = main_space(space), is_wrapped(space)
        own = _as_space(base.map_leaves(self._normal_space, "observation", self._main_space))
        self.space = own
        if is_wrapped(space):
            self.space = gym.spaces.Dict({**space.spaces, "observation": own})

    def __call__(self, observation: Nest) -> Nest:
        """Returns observations [..., *shape] normalised, as float32."""
        if self._is_wrapped:
            return {**observation, "observation": self._own(observation["observation"])}
        return self._own(observation)

    def _own(self, observation: Nest) -> Nest:
        return base.map_leaves(self._normal, "observation", self._main_space, observation)

    def _normal(self, name: str, space: gym.Space, value: np.ndarray) -> np.ndarray:
        if name not in self._statistics:
            return value
        mean, deviation = (each.reshape(space.shape or ()) for each in self._statistics[name])
        scaled = (np.asarray(value, np.float64) - mean) / deviation
        return np.clip(scaled, -self._clip, self._clip).astype(np.float32)

    def _normal_space(self, name: str, space: gym.Space) -> gym.Space:
        if name not in self._statistics:
            return space
        return gym.spaces.Box(-self._clip, self._clip, space.shape, np.float32)


class Normalised(base.Wrapper):
    """Normalises what environments observe.

    Args:
      environment: what is wrapped.
      config: the statistics.
    """

    def __init__(self, environment: base.Environment, config: NormaliseConfig) -> None:
        super().__init__(environment)
        self._normalise = Normaliser(config, environment.observation_space)
        self.observation_space = self._normalise.space

    def changed(self, timestep: TimeStep) -> TimeStep:
        return timestep._replace(observation=self._normalise(timestep.observation))


def measure(environment: base.Environment, steps: int, seed: int = 0) -> NormaliseConfig:
    """Returns mean and standard deviation of each number in the observations of random play.

    Numbers that do not change get a deviation of 1.

    Args:
      environment: E environments that were not reset yet, without normalisation.
      steps: of each of them.
      seed: of environments and actions.
    """
    actions = gym.vector.utils.batch_space(environment.action_space, environment.num_envs)
    actions.seed(seed)
    space = environment.observation_space
    rows = [_numbers(space, environment.reset(seed).observation)]
    for _ in range(steps):
        environment.send(actions.sample())
        rows.append(_numbers(space, environment.recv().timestep.observation))
    seen = np.concatenate(rows)
    deviation = seen.std(axis=0)
    return NormaliseConfig(
        mean=tuple(seen.mean(axis=0).tolist()),
        deviation=tuple(np.where(deviation > 1e-8, deviation, 1.0).tolist()),
    )


def _sizes(space: gym.Space) -> dict[str, int]:
    """How many floating-point numbers each part of an observation has, if any."""
    sizes: dict[str, int] = {}

    def add(name: str, leaf: gym.Space) -> None:
        if leaf.dtype is not None and leaf.dtype.kind == "f":
            sizes[name] = math.prod(leaf.shape or ())

    base.map_leaves(add, "observation", main_space(space))
    return sizes


def _numbers(space: gym.Space, observation: Nest) -> np.ndarray:
    """The floating-point numbers of observations [E, ...], copied: float64 [E, N]."""
    parts: list[np.ndarray] = []

    def add(name: str, leaf: gym.Space, value: np.ndarray) -> None:
        if name in sizes:
            parts.append(np.array(value, np.float64).reshape(len(value), -1))

    sizes = _sizes(space)
    own = observation["observation"] if is_wrapped(space) else observation
    base.map_leaves(add, "observation", main_space(space), own)
    return np.concatenate(parts, axis=1)


def _as_space(nest: Any) -> gym.Space:
    """A space from a nest of spaces."""
    match nest:
        case dict():
            return gym.spaces.Dict({key: _as_space(value) for key, value in nest.items()})
        case tuple():
            return gym.spaces.Tuple([_as_space(value) for value in nest])
    space: gym.Space = nest
    return space
