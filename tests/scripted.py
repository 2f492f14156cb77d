"""An environment and an agent that count, and checks of the unrolls they make: shared by tests.

Every number an unroll should hold is computed again from the rows themselves: whoever mixes up a
row, a group, a version or a core state breaks an equation.
"""

import itertools
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.environments.base import Environment
from impala.types import ActorUnrolls, AgentOutput, EnvironmentStep, StepType, TimeStep, Unroll

FRAMES = 3  # environment frames per step
NUM_ACTIONS = 7


class Script(Environment):
    """Environments whose observation says who, which episode, which step, and the last action.

    Environment i plays episodes of i + 2 steps; every other one ends at a time limit. The arrays
    given out are used again by the next step, as they may be.
    """

    def __init__(self, num_envs: int, first: int) -> None:
        self.num_envs = num_envs
        self.observation_space = gym.spaces.Box(0, 1000, (4,), np.int32)
        self.action_space = gym.spaces.Discrete(NUM_ACTIONS)
        self.seeds: list[int] = []
        self._length = np.arange(num_envs) + 2
        self._observation = np.zeros((num_envs, 4), np.int32)
        self._observation[:, 0] = np.arange(num_envs) + first
        self._reward = np.zeros(num_envs, np.float32)
        self._discount = np.ones(num_envs, np.float32)
        self._step_type = np.zeros(num_envs, np.int8)
        self._frames = np.zeros(num_envs, np.int32)
        self._action: np.ndarray | None = None

    def reset(self, seed: int) -> TimeStep:
        self.seeds.append(seed)
        return self._timestep()

    def send(self, action: np.ndarray) -> None:
        assert self._action is None, "sent twice without a recv"
        assert action.shape == (self.num_envs,)
        self._action = action.copy()

    def recv(self) -> EnvironmentStep:
        assert self._action is not None, "received without a send"
        action, self._action = self._action, None
        for i in range(self.num_envs):
            _, episode, step, _ = self._observation[i]
            if self._step_type[i] == StepType.LAST:
                self._observation[i, 1:] = episode + 1, 0, 0
                self._reward[i], self._discount[i], self._frames[i] = 0, 1, 0
                self._step_type[i] = StepType.FIRST
                continue
            self._observation[i, 2:] = step + 1, action[i]
            last = step + 1 == self._length[i]
            self._step_type[i] = StepType.LAST if last else StepType.MID
            self._reward[i] = step + 1 + action[i]
            self._discount[i] = 0 if last and episode % 2 == 0 else 1
            self._frames[i] = FRAMES
        info = {"episode": self._observation[:, 1].astype(np.float64)}
        return EnvironmentStep(self._timestep(), self._frames, info)

    def _timestep(self) -> TimeStep:
        return TimeStep(self._observation, self._reward, self._discount, self._step_type)

    def render(self) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Counter(tf.Module):
    """An agent whose core state counts the rows of the episode, and whose policy tells it."""

    def __init__(self) -> None:
        super().__init__()
        self._version = tf.Variable([-1.0])

    def initial_state(self, batch_size: int) -> tf.Tensor:
        return tf.zeros([batch_size], tf.int32)

    def acting(self, core_state: tf.Tensor) -> tf.Tensor:
        return core_state

    def core_state(self, acting: tf.Tensor) -> tf.Tensor:
        return acting

    def act(
        self, timestep: TimeStep, acting: tf.Tensor, seed: tf.Tensor
    ) -> tuple[AgentOutput, tf.Tensor]:
        count = tf.where(timestep.step_type == int(StepType.FIRST), 0, acting) + 1
        action = tf.random.stateless_uniform(
            tf.shape(count), seed, maxval=NUM_ACTIONS, dtype=tf.int64
        )
        version = tf.repeat(self._version, tf.shape(count)[0])
        policy = tf.stack([version, tf.cast(count, tf.float32)], axis=-1)
        return AgentOutput(action, policy, tf.cast(timestep.observation[:, 2], tf.float32)), count


def check_group(group: list[ActorUnrolls], unroll_length: int, num_envs: int, first: int) -> None:
    """Checks the consecutive unrolls of one group against what their rows say."""
    for before, after in itertools.pairwise(group):
        for old, new in zip(
            tree.flatten((before.unroll.timestep, before.unroll.output)),
            tree.flatten((after.unroll.timestep, after.unroll.output)),
            strict=True,
        ):
            np.testing.assert_array_equal(new[0], old[-1])

    # The rows in one piece: each unroll adds its rows 1..T.
    def whole(leaf_of: Callable[[Unroll], np.ndarray]) -> np.ndarray:
        leaves = [leaf_of(u.unroll) for u in group]
        return np.concatenate([leaves[0][:1], *(leaf[1:] for leaf in leaves)])

    observation = whole(lambda u: u.timestep.observation)
    reward = whole(lambda u: u.timestep.reward)
    discount = whole(lambda u: u.timestep.discount)
    step_type = whole(lambda u: u.timestep.step_type)
    action = whole(lambda u: u.output.action)
    policy = whole(lambda u: u.output.policy)
    baseline = whole(lambda u: u.output.baseline)
    is_first = step_type == StepType.FIRST

    # Environments stay in their column; steps and episodes count on without a gap.
    np.testing.assert_array_equal(
        observation[..., 0], np.broadcast_to(np.arange(num_envs) + first, is_first.shape)
    )
    assert is_first[0].all()
    assert not is_first[1].any()
    np.testing.assert_array_equal(is_first[1:], step_type[:-1] == StepType.LAST)
    np.testing.assert_array_equal(
        observation[1:, :, 2], np.where(is_first[1:], 0, observation[:-1, :, 2] + 1)
    )
    np.testing.assert_array_equal(observation[1:, :, 1], observation[:-1, :, 1] + is_first[1:])

    # The action in a row is the one that led to it, but over a seam, which ignores it.
    np.testing.assert_array_equal(observation[1:, :, 3], np.where(is_first[1:], 0, action[1:]))
    assert len(np.unique(action[1:])) == NUM_ACTIONS

    # Rewards are raw and 0 on seams; a termination has discount 0, a time limit 1.
    np.testing.assert_array_equal(
        reward[1:], np.where(is_first[1:], 0, observation[1:, :, 2] + action[1:])
    )
    terminated = (step_type == StepType.LAST) & (observation[..., 1] % 2 == 0)
    np.testing.assert_array_equal(discount, 1 - terminated)
    assert terminated.any()
    assert (discount[step_type == StepType.LAST] == 1).any()

    # The output in a row came from the observation before it, and from the state before that one.
    np.testing.assert_array_equal(baseline[1:], observation[:-1, :, 2])
    count = np.zeros(is_first.shape, np.int32)  # after each row
    for row in range(len(count)):
        count[row] = np.where(is_first[row], 0, count[row - 1]) + 1
    np.testing.assert_array_equal(policy[1:, :, 1], count[:-1])

    for i, (unroll, _, incarnation, *_) in enumerate(group):
        assert incarnation == 5
        # One version acted in rows 1..T.
        np.testing.assert_array_equal(unroll.output.policy[1:, :, 0], unroll.parameter_version)
        count_before = count[i * unroll_length - 1] if i else np.zeros(num_envs, np.int32)
        np.testing.assert_array_equal(unroll.core_state, count_before)
        played = unroll.timestep.step_type[1:] != StepType.FIRST
        np.testing.assert_array_equal(unroll.frames, FRAMES * played.sum(axis=0))


def check_episodes(group: list[ActorUnrolls]) -> None:
    """Every episode is reported once, by the unroll in which it ended, with its own numbers."""
    num_envs = len(group[0].unroll.frames)
    running = np.zeros(num_envs)
    steps = np.zeros(num_envs, int)
    total = 0
    for unroll, _, _, episodes, faults, step_info, _ in group:
        assert not faults and not step_info
        expected = []
        for row in range(1, len(unroll.timestep.reward)):
            step_type = unroll.timestep.step_type[row]
            running += unroll.timestep.reward[row]
            steps += step_type != StepType.FIRST
            for i in np.flatnonzero(step_type == StepType.LAST):
                number = float(unroll.timestep.observation[row, i, 1])
                expected.append((running[i], steps[i], FRAMES * steps[i], {"episode": number}))
                running[i] = steps[i] = 0
        assert [tuple(episode) for episode in episodes] == expected
        total += len(expected)
    assert total > 0
