"""What an episode was worth: raw returns, lengths and frames, counted as its steps go by."""

import numpy as np

from impala.types import EnvironmentStep, Episode, StepType

_MOST = float(np.finfo(np.float32).max)
_FIRST, _LAST = np.int8(StepType.FIRST), np.int8(StepType.LAST)


class EpisodeStatistics:
    """Counts for E environments that step together."""

    def __init__(self, num_envs: int):
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._frames = np.zeros(num_envs, np.int64)

    def update(self, step: EnvironmentStep) -> list[tuple[int, Episode]]:
        """Counts a step. A seam (FIRST) is not a step.

        Returns:
          The episodes that it ended, each with the index of its environment.
        """
        step_type = step.timestep.step_type
        self._returns += step.timestep.reward
        self._lengths += step_type != _FIRST
        self._frames += step.frames
        if _LAST not in step_type:
            return []
        ended = np.flatnonzero(step_type == _LAST)
        episodes = [(int(i), self._episode(int(i), step)) for i in ended]
        for counts in (self._returns, self._lengths, self._frames):
            counts[ended] = 0
        return episodes

    def _episode(self, index: int, step: EnvironmentStep) -> Episode:
        info = {name: float(values[index]) for name, values in step.info.items()}
        return Episode(
            episode_return=float(self._returns[index]),
            length=int(self._lengths[index]),
            frames=int(self._frames[index]),
            # NaN is how Gymnasium says that this environment gave no such number.
            # A message holds float32.
            info={name: value for name, value in info.items() if abs(value) <= _MOST},
        )
