"""The contract of environments (see `impala.environments.Environment`) as tests."""

import time
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import tree

from impala.environments import base
from impala.environments.base import Environment
from impala.environments.failure import close
from impala.types import EnvironmentStep, Nest, StepType

_WAIT_SECONDS = 0.02  # for an environment's thread to write where it must not


class EnvironmentConformance:
    """Plays environments at random and checks their output.

    A class or function named module:attribute, a registered id, and a vector environment are made
    by `impala.environments.make(EnvironmentConfig(id=...), num_envs)`.
    """

    num_envs = 3
    """Number of environments."""
    num_steps = 160
    """Number of steps, in which each of them must end an episode and begin another one."""
    most_frames = 1
    """Largest number of frames per step: `limits.frames_per_step`."""
    is_random = True
    """Whether another seed gives another game."""

    def make(self, num_envs: int) -> Environment:
        """Returns environments that were not reset yet."""
        raise NotImplementedError(f"{type(self).__name__} has to define make(num_envs).")

    def test_its_attributes_say_what_it_is(self) -> None:
        """Spaces of a fixed size, and as many environments as were asked for."""
        for num_envs in (1, self.num_envs):
            with closing(self.make(num_envs)) as environment:
                assert environment.num_envs == num_envs
                for what in ("observation", "action"):
                    base.map_leaves(lambda *_: None, what, getattr(environment, f"{what}_space"))

    def test_observations_are_in_the_space(self) -> None:
        """Each environment's part of each observation."""
        environment, steps = self.played()
        for step in steps:
            for i in range(self.num_envs):
                value = numbered(step.timestep.observation, i)
                assert environment.observation_space.contains(value), (
                    f"{value} is not in {environment.observation_space}"
                )

    def test_the_rest_has_its_shape_and_dtype(self) -> None:
        """Arrays [E]: reward and discount float32, step type int8, frames int32; infos numbers."""
        for step in self.played()[1]:
            timestep = step.timestep
            for name, array, dtype in (
                ("reward", timestep.reward, np.float32),
                ("discount", timestep.discount, np.float32),
                ("step_type", timestep.step_type, np.int8),
                ("frames", step.frames, np.int32),
            ):
                assert array.dtype == dtype, f"{name} is {array.dtype}, not {np.dtype(dtype)}"
                assert array.shape == (self.num_envs,), f"{name} has the shape {array.shape}"
            for name, array in step.info.items():
                assert array.shape == (self.num_envs,), f"info {name} has the shape {array.shape}"
                assert array.dtype.kind in "biuf", f"info {name} is {array.dtype}"

    def test_an_episode_is_first_mids_last_and_then_first_again(self) -> None:
        """Nothing is reset within an episode, and every end is followed by a reset."""
        step_type = column(self.played()[1], "step_type")
        assert np.isin(step_type, list(StepType)).all(), f"step types are {np.unique(step_type)}"
        assert (step_type[0] == StepType.FIRST).all(), "reset gives a row that is not FIRST"
        ended = step_type[:-1] == StepType.LAST
        assert ended.any(axis=0).all(), f"no end in {self.num_steps} steps: raise num_steps"
        follows = step_type[1:] == StepType.FIRST
        assert (follows | ~ended).all(), "the row behind LAST is not FIRST"
        assert (ended | ~follows).all(), "a row is FIRST without a LAST before it"

    def test_a_first_row_carries_nothing(self) -> None:
        """Reward 0, discount 1, no frames."""
        steps = self.played()[1]
        first = column(steps, "step_type") == StepType.FIRST
        assert (column(steps, "reward")[first] == 0.0).all(), "a FIRST row has a reward"
        assert (column(steps, "discount")[first] == 1.0).all(), "a FIRST row has a discount"
        assert (np.stack([s.frames for s in steps])[first] == 0).all(), "a FIRST row has frames"

    def test_every_other_row_played_frames_that_the_learner_takes(self) -> None:
        """At least one, at most `most_frames`."""
        steps = self.played()[1]
        first = column(steps, "step_type") == StepType.FIRST
        frames = np.stack([step.frames for step in steps])[~first]
        assert frames.min() > 0, "a step has played no frame"
        assert frames.max() <= self.most_frames, f"a step has played {frames.max()} frames"

    def test_rewards_are_finite_and_discounts_are_from_0_to_1(self) -> None:
        """NaN would end an actor."""
        steps = self.played()[1]
        assert np.isfinite(column(steps, "reward")).all()
        discount = column(steps, "discount")
        assert (discount >= 0.0).all() and (discount <= 1.0).all(), "a discount is not in [0, 1]"

    def test_the_seed_decides(self) -> None:
        """The same seed and actions give the same rows."""

        def run(seed: int) -> list[EnvironmentStep]:
            with closing(self.make(2)) as environment:
                return play(environment, 40, seed)

        assert same(run(3), run(3)), "two games with the same seed differ"
        if self.is_random:
            assert not same(run(3), run(4)), "two seeds make the same game: see is_random"

    def test_environments_of_one_seed_differ(self) -> None:
        """Each plays its own game, even with the same actions."""
        if not self.is_random:
            return
        with closing(self.make(6)) as environment:
            steps = play(environment, 20, alike=True)
        streams = [[numbered(step.timestep, i) for step in steps] for i in range(6)]
        first, *others = [[tree.flatten(row) for row in stream] for stream in streams]
        assert any(
            not np.array_equal(a, b)
            for other in others
            for x, y in zip(first, other, strict=True)
            for a, b in zip(x, y, strict=True)
        ), "all environments of a seed play the same game"

    def test_what_it_gave_stays_as_it_is_until_the_next_recv(self) -> None:
        """Arrays may be reused, but not before the next recv."""
        with closing(self.make(self.num_envs)) as environment:
            actions = _action_space(environment, 0)
            given: Nest = environment.reset(0)
            for _ in range(6):
                before = copied(given)
                action = actions.sample()
                sent = copied(action)
                environment.send(action)
                time.sleep(_WAIT_SECONDS)
                for now, then in zip(tree.flatten(given), tree.flatten(before), strict=True):
                    assert np.array_equal(now, then), "send has changed what recv gave before"
                given = environment.recv().timestep
                for now, then in zip(tree.flatten(action), tree.flatten(sent), strict=True):
                    assert np.array_equal(now, then), "a step has changed its action"

    def test_it_can_be_closed_twice_and_within_a_step(self, caplog: Any) -> None:
        """`close` ends whatever has begun, without an error, which would only be logged."""
        environment = self.make(2)
        environment.reset(0)
        environment.send(_action_space(environment, 0).sample())
        environment.close()
        environment.close()
        failed = [each.getMessage() for each in caplog.records if each.name == close.__module__]
        assert not failed, f"close has failed: {failed}"

    def played(self) -> tuple[Environment, list[EnvironmentStep]]:
        """Returns environments, closed, and their rows: played once for all tests of a class."""
        cls: Any = type(self)
        if "_played" not in cls.__dict__:
            with closing(self.make(self.num_envs)) as environment:
                cls._played = environment, play(environment, self.num_steps)
        played: tuple[Environment, list[EnvironmentStep]] = cls._played
        return played


def play(
    environment: Environment, num_steps: int, seed: int = 7, alike: bool = False
) -> list[EnvironmentStep]:
    """Returns the reset and steps of random play, copied.

    Args:
      environment: E environments that were not reset yet.
      num_steps: of each of them.
      seed: of environments and actions.
      alike: whether all environments get the action of the first one.
    """
    space = _action_space(environment, seed)
    no_frames = np.zeros(environment.num_envs, np.int32)
    steps = [copied(EnvironmentStep(environment.reset(seed), no_frames, {}))]
    for _ in range(num_steps):
        action = space.sample()
        if alike:
            action = tree.map_structure(lambda leaf: np.repeat(leaf[:1], len(leaf), 0), action)
        environment.send(action)
        steps.append(copied(environment.recv()))
    return steps


def same(one: list[EnvironmentStep], other: list[EnvironmentStep]) -> bool:
    """Returns whether all time steps are equal."""
    pairs = zip(one, other, strict=True)
    return all(
        np.array_equal(a, b)
        for x, y in pairs
        for a, b in zip(tree.flatten(x.timestep), tree.flatten(y.timestep), strict=True)
    )


def column(steps: list[EnvironmentStep], field: str) -> np.ndarray:
    """Returns one field of the time steps, [T, E]."""
    return np.stack([getattr(step.timestep, field) for step in steps])


def numbered(nest: Nest, i: int) -> Nest:
    """Returns environment i's part of a nest, copied, as an element of its single space."""
    return tree.map_structure(lambda leaf: np.array(leaf[i]), nest)


def copied(nest: Any) -> Any:
    """Returns a deep copy of a nest of arrays."""
    return tree.map_structure(np.array, nest)


def _action_space(environment: Environment, seed: int) -> gym.Space:
    space = gym.vector.utils.batch_space(environment.action_space, environment.num_envs)
    space.seed(seed)
    return space
