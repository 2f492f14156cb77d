"""Environments that are played elsewhere: here they have spaces, and steps that are handed in.

A learner needs no more of them than their spaces. A program that plays them connects to it
(`actors.external`) and hands in what happened; an ordinary actor cannot play them.
"""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from impala.environments import base, spaces
from impala.types import EnvironmentStep, Nest, TimeStep


class External(base.Environment):
    """Environments that somebody else plays.

    Args:
      num_envs: E.
      observation_space: of one environment, a space of Gymnasium or its description as JSON has it:
        see docs/external.md.
      action_space: of one environment, likewise.

    Raises:
      ValueError: a description is not one.
    """

    def __init__(
        self,
        num_envs: int,
        observation_space: gym.Space | Mapping[str, Any],
        action_space: gym.Space | Mapping[str, Any],
    ) -> None:
        self.num_envs = num_envs
        self.observation_space = _space("observation_space", observation_space)
        self.action_space = _space("action_space", action_space)
        self.action: Nest = None
        """[E, ...], what the agent did last."""
        self._handed: EnvironmentStep | None = None

    def hand(self, step: EnvironmentStep) -> None:
        """Hands in what `reset` or the next `recv` returns."""
        self._handed = step

    def reset(self, seed: int) -> TimeStep:
        return self.recv().timestep

    def send(self, action: Nest) -> None:
        self.action = action

    def recv(self) -> EnvironmentStep:
        if self._handed is None:
            raise ValueError(
                "External is played by programs that connect to the learner with impala.connect "
                "(docs/external.md): start no actors and no evaluators for it"
            )
        step, self._handed = self._handed, None
        return step

    def render(self) -> np.ndarray:
        raise ValueError("External shows nothing: it is played elsewhere.")

    def close(self) -> None:
        pass


def _space(name: str, given: gym.Space | Mapping[str, Any]) -> gym.Space:
    """Returns the space of a description."""
    if isinstance(given, gym.Space):
        return given
    try:
        return spaces.from_dict(given)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} of External is {given!r}: {error}") from None
