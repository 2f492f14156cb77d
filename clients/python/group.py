"""Environments that step together, and the rows that they write.

Everything that docs/wire-protocol.md says under "Rows" is here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from agents import Agent
from session import DTYPES, Version

from protos.impala.v1 import learner_pb2 as pb

FIRST, MID, LAST = 0, 1, 2
OBSERVATION, ACTION = "timestep/observation", "output/action"


class Played(NamedTuple):
    """What a message says of one unroll of each environment."""

    version: Version  # of the parameters that acted
    arrays: dict[str, np.ndarray]  # by the names of unroll_specs, [T + 1, E, ...] and [E, ...]
    frames: list[int]  # [E]
    episodes: list[pb.Episode]


class Group:
    """E environments, which an agent plays.

    Args:
      reply: of the learner.
      agent: acts for this group alone.
      environments: with one array as observation and one as action.
      seed: of the environments.

    Raises:
      ValueError: they are not those of the learner.
    """

    def __init__(
        self,
        reply: pb.JoinReply,
        agent: Agent,
        environments: Sequence[gym.Env],
        seed: np.random.SeedSequence,
    ) -> None:
        self.num_envs = len(environments)
        self._agent, self._environments = agent, environments
        self._length = reply.unroll_length
        self._timed = len(reply.unroll_specs) - reply.num_core_state_specs
        self._specs = {
            spec.name: (tuple(spec.shape), DTYPES[spec.dtype]) for spec in reply.unroll_specs
        }
        self._check(environments[0])
        self._states = [spec.name for spec in reply.unroll_specs[self._timed :]]
        # The agent's memory, which is zeros at first.
        self._state = {name: self._zeros(self.num_envs, name) for name in self._states}
        self._ended = np.zeros(self.num_envs, bool)
        self._episodes = [pb.Episode() for _ in environments]
        self._arrays = self._allocated()
        # The reset, as if it were row T of an unroll before: no output led to it.
        numbers = seed.generate_state(self.num_envs)
        for env, environment in enumerate(environments):
            seen, _ = environment.reset(seed=int(numbers[env]))
            self._write(self._length, env, seen, FIRST, 0.0, 1.0)

    def play(self) -> Played:
        """Acts T steps with one version of the parameters."""
        before, self._arrays = self._arrays, self._allocated()
        for name, array in self._arrays.items():
            array[0] = before[name][-1]  # row 0 is row T
        self._agent.begin(self.num_envs)
        core_state = self._state  # before row 0
        frames, episodes = [0] * self.num_envs, []
        for row in range(1, self._length + 1):
            shown = {
                name: self._arrays[name][row - 1] for name in (OBSERVATION, "timestep/step_type")
            }
            said = self._agent.act({**shown, **self._state})
            self._state = {name: said[f"next/{name}"] for name in self._states}
            for name in (ACTION, "output/policy", "output/baseline"):
                self._arrays[name][row] = said[name]
            for env in range(self.num_envs):
                is_seam = self._ended[env]
                self._step(row, env)
                frames[env] += not is_seam
                if self._ended[env]:
                    episodes.append(self._episodes[env])
                    self._episodes[env] = pb.Episode()
        return Played(self._agent.version, {**self._arrays, **core_state}, frames, episodes)

    def _step(self, row: int, env: int) -> None:
        """Takes one step of one environment. After the end of an episode it is the seam."""
        environment = self._environments[env]
        if self._ended[env]:  # the action is ignored
            self._ended[env] = False
            seen, _ = environment.reset()
            self._write(row, env, seen, FIRST, 0.0, 1.0)
            return
        seen, reward, terminated, truncated, _ = environment.step(
            self._arrays[ACTION][row, env].copy()  # the environment may write into it
        )
        self._ended[env] = terminated or truncated
        kind, discount = (LAST if self._ended[env] else MID), (0.0 if terminated else 1.0)
        self._write(row, env, seen, kind, float(reward), discount)
        episode = self._episodes[env]
        episode.episode_return += float(reward)
        episode.length += 1
        episode.frames += 1

    def _write(
        self, row: int, env: int, seen: Any, step_type: int, reward: float, discount: float
    ) -> None:
        for name, value in (
            (OBSERVATION, seen),
            *(("timestep/reward", reward), ("timestep/discount", discount)),
            ("timestep/step_type", step_type),
        ):
            self._arrays[name][row, env] = value

    def _allocated(self) -> dict[str, np.ndarray]:
        names = list(self._specs)[: self._timed]
        return {
            name: np.zeros((shape[0], self.num_envs, *shape[1:]), dtype)
            for name, (shape, dtype) in self._specs.items()
            if name in names
        }

    def _zeros(self, num_envs: int, name: str) -> np.ndarray:
        shape, dtype = self._specs[name]
        return np.zeros((num_envs, *shape), dtype)

    def _check(self, environment: gym.Env) -> None:
        for name, space in (
            (OBSERVATION, environment.observation_space),
            (ACTION, environment.action_space),
        ):
            shape, dtype = self._specs.get(name, ((), None))
            if (shape[1:], dtype) != (space.shape, space.dtype):
                raise ValueError(
                    f"The learner's {name} is {dtype} {list(shape[1:])}, here it is {space}."
                )
