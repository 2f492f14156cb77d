"""Catch without episodes: the smallest task that never ends."""

from typing import Any

import numpy as np

from impala.environments import base
from impala.environments.catch import Catch
from impala.types import EnvironmentStep, StepType


class ContinuingCatch(Catch):
    """Catch in which the next ball falls once one was caught or missed, and nothing ever ends.

    The paddle stays where it is, the discount is always 1, and a ball takes as many steps as the
    board has rows. The best is 1 / rows of reward per step; with a paddle that is anywhere it is
    (2 / columns - 1) / rows, -0.06 on the usual board.

    Args:
      num_envs: E.
      render_mode: any, since all pictures are alike.
      **board: as for `Catch`.
    """

    def __init__(self, num_envs: int, render_mode: str | None = None, **board: Any) -> None:
        super().__init__(num_envs, **board)

    def recv(self) -> EnvironmentStep:
        self._paddle = self._moved[self._action, self._paddle]
        self._ball_row = (self._ball_row + 1) % self._rows
        if self._ball_row == 0:
            self._ball_column = np.array([g.integers(self._columns) for g in self._generators])
        timestep = base.first_timestep(self._board(), self.num_envs)
        timestep.step_type[:] = StepType.MID
        if self._ball_row == self._rows - 1:
            is_caught = self._paddle == self._ball_column
            timestep.reward[:] = np.where(is_caught, self._reward, -self._reward)
        return EnvironmentStep(timestep, self._played, {})
