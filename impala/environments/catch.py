"""Catch (as in Osband et al. 2020, arXiv 1908.03568): the smallest game worth watching."""

from typing import Any

import gymnasium as gym
import numpy as np

from impala.environments import base
from impala.types import EnvironmentStep, Nest, StepType, TimeStep

_PIXELS_PER_CELL = 16


class Catch(base.Environment):
    """A ball falls from a random column, a row each step; the paddle on the bottom row is moved.

    Observations are uint8 [rows, columns], 1 where the ball and the paddle are. Actions are left,
    stay and right. An episode has rows - 1 steps and gives `reward` at its end if the ball was
    caught, and as much less than 0 if not.

    Games that contradict each other, to be told apart by what is seen, make tasks for one agent; so
    do those with rewards of different size.

    Args:
      num_envs: E.
      rows: height of the board, at least 2.
      columns: width of the board, at least 1.
      shift: turns the meaning of the actions: 1 makes them stay, right and left, 2 right, left and
        stay. Not one of them means the same with another shift.
      marked: adds a row to the board, below the paddle, where cell `shift` is 1.
      reward: what a ball is worth.
    """

    def __init__(
        self,
        num_envs: int,
        rows: int = 10,
        columns: int = 5,
        shift: int = 0,
        marked: bool = False,
        reward: float = 1.0,
    ) -> None:
        for name, value, least in (("rows", rows, 2), ("columns", columns, 1), ("shift", shift, 0)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} of Catch is {value!r}; it must be {least} or more.")
        if not isinstance(marked, bool):
            raise ValueError(f"marked of Catch is {marked!r}; it must be true or false.")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or reward <= 0.0:
            raise ValueError(f"reward of Catch is {reward!r}; it must be a number above 0.")
        if shift > 2 or (marked and shift >= columns):
            raise ValueError(
                f"shift of Catch is {shift}; there are 0, 1 and 2, and as many as columns to mark."
            )
        self.num_envs = num_envs
        self.observation_space = gym.spaces.Box(0, 1, (rows + marked, columns), np.uint8)
        self.action_space = gym.spaces.Discrete(3)
        self._rows, self._columns = rows, columns
        self._shift, self._marked, self._reward = shift, marked, reward
        # [3, columns]: where an action takes the paddle.
        moves = (np.arange(3)[:, np.newaxis] + shift) % 3 - 1
        self._moved = np.clip(np.arange(columns) + moves, 0, columns - 1)
        cells = (rows + marked) * columns
        self._boards = np.arange(num_envs) * cells  # where each begins, if all are one flat array
        self._played = np.ones(num_envs, np.int32)
        # All episodes are equally long, so all environments are always in the same row.
        self._ball_row = 0
        self._ball_column = np.zeros(num_envs, np.int64)
        self._paddle = np.zeros(num_envs, np.int64)

    def reset(self, seed: int) -> TimeStep:
        self._generators = [np.random.default_rng(s) for s in base.seeds(seed, self.num_envs)]
        return self._first()

    def send(self, action: Nest) -> None:
        self._action = action

    def recv(self) -> EnvironmentStep:
        if self._ball_row == self._rows - 1:
            return EnvironmentStep(self._first(), np.zeros_like(self._played), {})
        self._ball_row += 1
        self._paddle = self._moved[self._action, self._paddle]
        timestep = base.first_timestep(self._board(), self.num_envs)
        if self._ball_row < self._rows - 1:
            timestep.step_type[:] = StepType.MID
        else:
            timestep.step_type[:] = StepType.LAST
            timestep.discount[:] = 0.0
            is_caught = self._paddle == self._ball_column
            timestep.reward[:] = np.where(is_caught, self._reward, -self._reward)
        return EnvironmentStep(timestep, self._played, {})

    def render(self) -> np.ndarray:
        cells = self._board()[0] * np.uint8(255)
        grey = np.kron(cells, np.ones((_PIXELS_PER_CELL, _PIXELS_PER_CELL), np.uint8))
        return np.repeat(grey[:, :, np.newaxis], 3, axis=2)

    def close(self) -> None:
        pass

    def _first(self) -> TimeStep:
        """Begins an episode everywhere."""
        self._ball_row = 0
        self._ball_column = np.array([g.integers(self._columns) for g in self._generators])
        self._paddle = np.full(self.num_envs, self._columns // 2)
        return base.first_timestep(self._board(), self.num_envs)

    def _board(self) -> np.ndarray:
        board = np.zeros((self.num_envs, self._rows + self._marked, self._columns), np.uint8)
        cells = board.reshape(-1)
        cells[self._boards + self._ball_row * self._columns + self._ball_column] = 1
        cells[self._boards + (self._rows - 1) * self._columns + self._paddle] = 1
        if self._marked:
            board[:, self._rows, self._shift] = 1
        return board


def make(kwargs: dict[str, Any], num_envs: int) -> Catch:
    """Catch with the board and the rules of `kwargs`."""
    known = ("rows", "columns", "shift", "marked", "reward")
    if unknown := sorted(set(kwargs) - set(known)):
        raise ValueError(f"environment.kwargs has {unknown}; Catch knows {', '.join(known)}.")
    return Catch(num_envs, **kwargs)
