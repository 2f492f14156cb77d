"""A counting environment and a counting agent prove the unroll loop, row by row.

Every number an unroll should hold is computed again from the rows themselves: whoever mixes up a
row, a group, a version or a core state breaks an equation.
"""

import itertools
from collections.abc import Iterator

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import tree

from actors.actor import Actor
from impala.environments.base import Environment
from impala.types import (
    ActorUnrolls,
    AgentOutput,
    EnvironmentStep,
    Parameters,
    StepType,
    TimeStep,
    Unroll,
)

FRAMES = 3  # environment frames per step
NUM_ACTIONS = 7


class Script(Environment):
    """Environments whose observation says who, which episode, which step, and the last action.

    Environment i plays episodes of i + 2 steps; every other one ends at a time limit. The arrays
    given out are used again by the next step, as they may be.
    """

    def __init__(self, num_envs: int, first: int):
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

    def step(
        self, timestep: TimeStep, core_state: tf.Tensor, seed: tf.Tensor
    ) -> tuple[AgentOutput, tf.Tensor]:
        count = tf.where(timestep.step_type == int(StepType.FIRST), 0, core_state) + 1
        action = tf.random.stateless_uniform(
            tf.shape(count), seed, maxval=NUM_ACTIONS, dtype=tf.int64
        )
        version = tf.repeat(self._version, tf.shape(count)[0])
        policy = tf.stack([version, tf.cast(count, tf.float32)], axis=-1)
        return AgentOutput(action, policy, tf.cast(timestep.observation[:, 2], tf.float32)), count


def growing_versions() -> Iterator[Parameters]:
    """Another version each time that anyone asks."""
    version = 0
    while True:
        version += 1
        yield Parameters(5, version, 0.0, 0, [np.array([version], np.float32)])


def collect(
    environments: list[Script], unroll_length: int, rounds: int, seed: int = 1
) -> list[list[ActorUnrolls]]:
    """Unrolls of `rounds` rounds, copied, by group."""
    versions = growing_versions()
    stream = Actor(lambda task: environments, Counter(), unroll_length, seed).run(
        lambda: next(versions)
    )
    groups: list[list[ActorUnrolls]] = [[] for _ in environments]
    for _ in range(rounds):
        for group in groups:
            group.append(copied(next(stream)))
    return groups


def copied(unrolls: ActorUnrolls) -> ActorUnrolls:
    """What the actor yields is overwritten by the next."""
    return unrolls._replace(unroll=tree.map_structure(np.copy, unrolls.unroll))


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
    def whole(leaf_of) -> np.ndarray:
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

    for i, (unroll, _, incarnation, _) in enumerate(group):
        assert incarnation == 5
        # One version acted in rows 1..T.
        np.testing.assert_array_equal(unroll.output.policy[1:, :, 0], unroll.parameter_version)
        before = count[i * unroll_length - 1] if i else np.zeros(num_envs, np.int32)
        np.testing.assert_array_equal(unroll.core_state, before)
        played = unroll.timestep.step_type[1:] != StepType.FIRST
        np.testing.assert_array_equal(unroll.frames, FRAMES * played.sum(axis=0))


def check_episodes(group: list[ActorUnrolls]) -> None:
    """Every episode is reported once, by the unroll in which it ended, with its own numbers."""
    num_envs = len(group[0].unroll.frames)
    running = np.zeros(num_envs)
    steps = np.zeros(num_envs, int)
    total = 0
    for unroll, _, _, episodes in group:
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


@pytest.mark.parametrize("unroll_length", [1, 4, 7])
@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)])
def test_every_row_is_where_it_belongs(unroll_length: int, order: tuple[int, ...]) -> None:
    num_envs = 3
    environments = [Script(num_envs, first=10 * group) for group in order]
    rounds = 1 + 60 // unroll_length

    groups = collect(environments, unroll_length, rounds)

    for group, unrolls in zip(order, groups, strict=True):
        check_group(unrolls, unroll_length, num_envs, first=10 * group)
        check_episodes(unrolls)


def test_groups_act_in_a_round_with_the_same_version() -> None:
    groups = collect([Script(2, 0), Script(2, 10)], unroll_length=3, rounds=4)
    versions = [[int(u.unroll.parameter_version) for u in group] for group in groups]
    assert versions == [[1, 2, 3, 4], [1, 2, 3, 4]]


def test_each_task_goes_on_where_it_was_left() -> None:
    """Tasks change at the boundary for all groups; no row and no episode of any is lost."""
    unroll_length, num_envs = 4, 3
    plan = [0, 0, 2, 0, 2, 2, 1, 0] * 12
    made: list[int] = []

    def environments(task: int) -> list[Script]:
        made.append(task)
        return [Script(num_envs, first=100 * task), Script(num_envs, first=100 * task + 10)]

    versions, tasks = growing_versions(), iter([*plan, 0])
    stream = Actor(environments, Counter(), unroll_length, seed=1).run(
        lambda: next(versions), lambda: next(tasks)
    )
    unrolls = [copied(next(stream)) for _ in range(2 * len(plan))]

    assert [u.task for u in unrolls] == [task for task in plan for _ in range(2)]
    assert made == [0, 2, 1]  # each when it was first played
    for task in made:
        groups = [u for u in unrolls if u.task == task]
        for place in (0, 1):
            group = groups[place::2]
            check_group(group, unroll_length, num_envs, first=100 * task + 10 * place)
            check_episodes(group)


def test_the_seed_decides_environments_and_actions() -> None:
    def actions(seed: int) -> tuple[list[int], list[np.ndarray]]:
        environments = [Script(2, 0), Script(2, 0)]
        groups = collect(environments, unroll_length=8, rounds=2, seed=seed)
        return [s for e in environments for s in e.seeds], [
            np.concatenate([u.unroll.output.action[1:] for u in group]) for group in groups
        ]

    seeds, (one, two) = actions(1)
    assert len(seeds) == 2
    assert seeds[0] != seeds[1]
    assert (one != two).any(), "groups must not share their random numbers"
    again_seeds, (again, _) = actions(1)
    assert again_seeds == seeds
    np.testing.assert_array_equal(again, one)
    other_seeds, (other, _) = actions(2)
    assert other_seeds != seeds
    assert (other != one).any()


def test_parameters_are_assigned_only_when_they_are_others() -> None:
    agent = Counter()
    same = Parameters(5, 1, 0.0, 0, [np.array([1.0], np.float32)])
    stream = Actor(lambda task: [Script(2, 0)], agent, 2, seed=0).run(lambda: same)
    next(stream)
    agent.variables[0].assign([42.0])  # would be overwritten by an assignment
    next(stream)
    unroll: Unroll = next(stream).unroll
    np.testing.assert_array_equal(unroll.output.policy[1:, :, 0], 42.0)

    # Another incarnation is another set of parameters, whatever its version.
    stream = Actor(lambda task: [Script(2, 0)], agent, 2, seed=0).run(
        iter([same, same._replace(incarnation=6), same._replace(incarnation=6)]).__next__
    )
    assert [next(stream).incarnation for _ in range(2)] == [5, 6]
    np.testing.assert_array_equal(agent.variables[0].numpy(), [1.0])


def test_parameters_of_another_agent_are_refused() -> None:
    actor = Actor(lambda task: [Script(2, 0)], Counter(), 2, seed=0)
    with pytest.raises(ValueError, match="holds 2 arrays, the agent has 1"):
        next(actor.run(lambda: Parameters(5, 3, 0.0, 0, [np.zeros(1), np.zeros(1)])))


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        next(Actor(lambda task: [], Counter(), 2, seed=0).run(growing_versions().__next__))
    with pytest.raises(ValueError, match="unroll_length is 0"):
        Actor(lambda task: [Script(1, 0)], Counter(), 0, seed=0)
