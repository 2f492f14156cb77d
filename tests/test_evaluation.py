"""Evaluation plays a fair sample of whole episodes, and tells what was played."""

import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from impala.environments.base import Environment
from impala.environments.episodes import EpisodeStatistics
from impala.environments.failure import EnvironmentFailed
from impala.play import evaluation
from impala.types import (
    AgentOutput,
    EnvironmentFault,
    EnvironmentStep,
    Episode,
    StepType,
    TimeStep,
)


class Scripted(Environment):
    """Environment e plays episodes of `lengths[e]` steps, one after another, for ever.

    The reward is 1 per step and there are 4 frames in it; after LAST comes a FIRST row.
    """

    observation_space = gym.spaces.Box(0, 1000, (), np.int32)
    action_space = gym.spaces.Discrete(5)

    def __init__(self, lengths: Sequence[Sequence[int]]) -> None:
        self.num_envs = len(lengths)
        self.actions: list[np.ndarray] = []
        self._lengths = [itertools.cycle(own) for own in lengths]
        self._left = np.zeros(self.num_envs, np.int32)

    def reset(self, seed: int) -> TimeStep:
        self.seed = seed
        return self._advance(np.ones(self.num_envs, bool)).timestep

    def send(self, action: Any) -> None:
        self.actions.append(np.array(action))

    def recv(self) -> EnvironmentStep:
        return self._advance(self._left == 0)

    def render(self) -> np.ndarray:
        return np.zeros((4, 4, 3), np.uint8)

    def close(self) -> None:
        pass

    def _advance(self, first: np.ndarray) -> EnvironmentStep:
        fresh = [
            next(own) if begins else 0 for own, begins in zip(self._lengths, first, strict=True)
        ]
        self._left = np.where(first, fresh, self._left - 1).astype(np.int32)
        inner = np.where(self._left == 0, StepType.LAST, StepType.MID)
        timestep = TimeStep(
            observation=self._left.copy(),
            reward=np.where(first, 0, 1).astype(np.float32),
            discount=np.ones(self.num_envs, np.float32),
            step_type=np.where(first, StepType.FIRST, inner).astype(np.int8),
        )
        frames = np.where(first, 0, 4).astype(np.int32)
        return EnvironmentStep(timestep, frames, {"left": self._left + 7.0})


class Counting:
    """Greedily it plays how many steps it has seen of the episode (mod 5), else at random."""

    def initial_state(self, batch_size: int) -> tf.Tensor:
        return tf.zeros([batch_size], tf.int64)

    def acting(self, core_state: tf.Tensor) -> tf.Tensor:
        return core_state

    def act(self, timestep: TimeStep, acting: tf.Tensor, seed: tf.Tensor | None) -> Any:
        seen = tf.where(timestep.step_type == StepType.FIRST, tf.zeros_like(acting), acting)
        action = seen % 5
        if seed is not None:
            action = tf.random.stateless_uniform(tf.shape(seen), seed, maxval=5, dtype=tf.int64)
        return AgentOutput(action, (), ()), seen + 1


def _play(environment: Environment, num: int, greedy: bool = True, seed: int = 0) -> list[Episode]:
    return evaluation.play_episodes(environment, Counting(), num, greedy, seed)  # type: ignore


def test_episodes_are_the_first_of_each_environment() -> None:
    episodes = _play(Scripted([[3, 5, 9], [2, 4, 8], [6, 7, 1]]), 7)

    assert [episode.length for episode in episodes] == [3, 5, 9, 2, 4, 6, 7]


def test_fewer_episodes_than_environments() -> None:
    assert [episode.length for episode in _play(Scripted([[3], [2], [1]]), 2)] == [3, 2]


class Failing(Scripted):
    """Episodes of environment 0 with fewer than five steps end by a failure."""

    def recv(self) -> EnvironmentStep:
        step = super().recv()
        if step.timestep.step_type[0] == StepType.LAST and self.length < 5:
            return step._replace(
                faults=[EnvironmentFault(0, "crashed", "fault 3, KeyError: 'map'")]
            )
        return step

    def _advance(self, first: np.ndarray) -> EnvironmentStep:
        step = super()._advance(first)
        if first[0]:
            self.length = self._left[0]
        return step


def test_episodes_that_a_failure_cut_off_do_not_count() -> None:
    episodes = _play(Failing([[2, 7, 3, 9], [4]]), 4)
    assert [episode.length for episode in episodes] == [7, 9, 4, 4]
    first = evaluation.FirstEpisodes(1)
    environment, agent = Failing([[2, 7], [4]]), Counting()
    evaluation.play_episodes(environment, agent, 2, True, 0, first)  # type: ignore
    assert len(first.steps[0]["reward"]) == 7
    # Failures of an environment that has played its share are nobody's concern.
    assert len(_play(Failing([[7, *[2] * 50], [90]]), 2)) == 2
    with pytest.raises(
        EnvironmentFailed, match="crashed: KeyError: 'map', the end of more than 4 ep"
    ):
        _play(Failing([[2], [4]]), 4)


def test_a_failure_before_an_episode_cuts_off_none() -> None:
    """Also if the episode has one step, with which it is reported."""

    class FailsToStart(Scripted):
        def recv(self) -> EnvironmentStep:
            fault = EnvironmentFault(0, "crashed", "fault 1, KeyError: 'map'", cuts=False)
            return super().recv()._replace(faults=[fault])

    first = evaluation.FirstEpisodes(1)
    agent: Any = Counting()
    episodes = evaluation.play_episodes(FailsToStart([[1, 9]]), agent, 1, True, 0, first)
    assert [episode.length for episode in episodes] == [1]
    assert len(first.steps[0]["reward"]) == 1


def test_an_episode_tells_return_steps_frames_and_the_last_info() -> None:
    # The row that starts the second episode counts nowhere.
    assert _play(Scripted([[3]]), 2) == [Episode(3.0, 3, 12, {"left": 7.0})] * 2


def test_numbers_that_no_message_can_hold_are_left_out() -> None:
    """A float32 of the wire would make infinity of them, which is refused."""
    one = np.ones(1, np.float32)
    timestep = TimeStep(one, one, one, np.array([StepType.LAST], np.int8))
    info = {"best_cost": np.array([1e39]), "speed": np.array([0.5])}
    step = EnvironmentStep(timestep, np.ones(1, np.int32), info)
    ((_, episode),) = EpisodeStatistics(1).update(step)
    assert episode.info == {"speed": 0.5}


def test_steps_of_first_episodes_are_kept_if_asked_for() -> None:
    # Given three environments, and the steps of two of them kept,
    first = evaluation.FirstEpisodes(2)
    environment, agent = Scripted([[2, 1], [3, 5], [9]]), Counting()
    evaluation.play_episodes(environment, agent, 6, False, 7, first)  # type: ignore
    # then each has those of its first episode, and nothing of what follows.
    assert first.steps == [
        {"reward": [1.0, 1.0], "left": [8.0, 7.0]},
        {"reward": [1.0, 1.0, 1.0], "left": [9.0, 8.0, 7.0]},
    ]


def test_greedy_play_carries_the_core_state() -> None:
    environment = Scripted([[4], [2]])
    _play(environment, 2, seed=11)

    assert environment.seed == 11
    np.testing.assert_array_equal(environment.actions, [[0, 0], [1, 1], [2, 2], [3, 0]])


def test_sampled_play_is_decided_by_its_seed() -> None:
    def actions(seed: int) -> list[list[int]]:
        environment = Scripted([[40], [40]])
        _play(environment, 2, greedy=False, seed=seed)
        return np.array(environment.actions).tolist()

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)
    assert len({tuple(row) for row in actions(1)}) > 5  # another seed at each step


def test_summary() -> None:
    episodes = [Episode(1.0, 10, 40, {}), Episode(4.0, 20, 80, {}), Episode(-2.0, 30, 120, {})]

    summary = evaluation.summary(episodes)

    assert (summary.episodes, summary.frames) == (3, 240)
    assert (summary.return_mean, summary.return_min, summary.return_max) == (1.0, -2.0, 4.0)
    assert summary.return_std == pytest.approx(6**0.5)
    assert (summary.length_mean, summary.length_min, summary.length_max) == (20.0, 10, 30)
