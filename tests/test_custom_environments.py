"""Environments that a user brings, named module:attribute: each kind plays the same rows."""

import json
import re
from contextlib import closing
from typing import Any

import numpy as np
import own
import pytest

from impala import environments
from impala.config.schema import EnvironmentConfig, RepeatConfig
from impala.environments.base import Environment
from impala.environments.failure import EnvironmentFailed
from impala.testing.environments import column, play, same
from impala.types import EnvironmentStep, StepType


def make(name: str, num_envs: int = 3, **settings: Any) -> Environment:
    return environments.make(EnvironmentConfig(id=f"own:{name}", **settings), num_envs)


def rows(name: str, num_steps: int = 60, **settings: Any) -> list[EnvironmentStep]:
    with closing(make(name, **settings)) as environment:
        return play(environment, num_steps)


def assert_same(one: list[EnvironmentStep], other: list[EnvironmentStep]) -> None:
    """Observations, rewards, discounts, step types, frames and infos of episode ends."""
    assert same(one, other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.frames, b.frames)
        ends = a.timestep.step_type == StepType.LAST
        if ends.any():
            np.testing.assert_array_equal(a.info["episode"][ends], b.info["episode"][ends])


def test_every_kind_plays_the_same_rows() -> None:
    # Given counting environments, whose episodes end by termination and by time limits in turn ...
    with closing(environments.make(EnvironmentConfig(id="counting:CountingEnv"), 3)) as environment:
        expected = play(environment, 60)
    ends = column(expected, "discount")[column(expected, "step_type") == StepType.LAST]
    assert set(ends) == {0.0, 1.0}
    # ... then each kind of vector environment gives the same rows, with the same seeds.
    for name in ("NextStep", "SameStep", "Disabled", "Threads"):
        assert_same(rows(name), expected)
    assert_same(rows("Nested", vectorization="async"), rows("Nested"))


def test_a_simulator_with_batched_last_observations_is_read() -> None:
    assert_same(rows("Simulator"), rows("SameStep"))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
def test_ends_may_be_numbers_and_infos_come_without_masks(dtype: str) -> None:
    assert_same(rows("Bare", kwargs=json.dumps({"dtype": dtype})), rows("NextStep"))


@pytest.mark.parametrize("most", [1, 3])
def test_an_environment_may_write_into_its_actions(most: int) -> None:
    action = np.full((3, 2), 0.5, np.float32)
    with closing(make("Scribbler", repeat=RepeatConfig(most=most))) as environment:
        environment.reset(0)
        environment.send(action)
        step = environment.recv()
    np.testing.assert_array_equal(action, np.float32(0.5))
    np.testing.assert_array_equal(step.timestep.observation, action)  # that of each frame
    np.testing.assert_array_equal(step.info["3"], np.ones(3))


def test_an_unknown_autoreset_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"own:Simulator has the autoreset mode Never: have its"):
        make("Simulator", kwargs='{"mode": "Never"}')


def test_keyword_arguments_and_settings_reach_the_constructor() -> None:
    reward = column(rows("Threads"), "reward")
    for name in ("Threads", "made"):
        scaled = column(rows(name, kwargs='{"scale": 3}'), "reward")
        np.testing.assert_array_equal(scaled, 3 * reward)
    config = EnvironmentConfig(id="own:Looked")
    triple = own.Looked.Settings(scale=3.0)
    with closing(environments.make(config, 3, settings=triple)) as environment:
        np.testing.assert_array_equal(column(play(environment, 60), "reward"), 3 * reward)
    np.testing.assert_array_equal(column(rows("Looked"), "reward"), reward)


def test_an_environment_that_shows_itself_can_be_looked_at() -> None:
    config = EnvironmentConfig(id="own:Looked")
    with closing(environments.make(config, 1, render_mode="rgb_array")) as environment:
        environment.reset(0)
        assert environment.render().shape == (4, 6, 3)


@pytest.mark.parametrize(
    ("id", "settings", "says"),
    [
        ("own:Nowhere", {}, "own has no attribute 'Nowhere'"),
        ("own:NUMBER", {}, "own:NUMBER is a int; it must be a subclass of gymnasium.Env"),
        ("own:Raises", {}, r"Making own:Raises raises KeyError: 'map' \(.*own.py:\d+, in __init__"),
        ("own:WithoutSpaces", {}, "has no observation_space: have its constructor set it"),
        ("own:Alone", {}, "made with num_envs 3, but its num_envs is 1"),
        ("own:Threads", {"vectorization": "async"}, "cannot have a process each"),
        ("own:SameStep", {"repeat": RepeatConfig(most=2)}, "cannot be repeated"),
        ("own:Threads", {"kwargs": '{"scal": 3}'}, "unexpected keyword argument 'scal'.*It takes"),
        ("own:dataclasses", {}, "own:dataclasses is a module"),
        ("own:WithoutSeed", {}, r"has a reset that takes no seed .*: define it as reset\(self, \*"),
        *(
            ("own:Keyed", {"kwargs": json.dumps({"what": what})}, "has the key 0: keys must be str")
            for what in ("observation", "action")
        ),
        ("own:play-v0", {}, "'own:play-v0', which is not registered"),
        ("roundabout-v0", {}, "PACKAGE:roundabout-v0. Use module:attribute"),
    ],
)
def test_what_cannot_be_played_is_refused_in_a_line(
    id: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        environments.make(EnvironmentConfig(id=id, **settings), 3)
    assert "\n" not in str(caught.value)


def error_of(name: str, steps: int = 3, **settings: Any) -> str:
    """What the screen is told when this environment fails, within so many steps."""
    with closing(make(name, **settings)) as environment, pytest.raises(EnvironmentFailed) as failed:
        play(environment, steps)
    assert "\n" not in failed.value.error
    assert re.fullmatch(r"/.*/own\.py:\d+, in step", failed.value.where)
    return failed.value.error


SHAPE = r"observation/pair has shape \(2, 1\), expected \(2,\) by its space: return that shape, or"
FOUR = (
    "step returned 4 values, expected observation, reward, terminated, truncated, info: return te"
)
ONE = "; it must be one number: return a float"
OUTSIDE = "outside of its space, -1.0 to 3.0: clip or scale it, or correct observation_space"


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        ("Odd", "shape", f"environment 0 of own:Odd: {SHAPE}"),
        ("Odd", "four values", f"environment 0 of own:Odd: {FOUR}"),
        ("Odd", "low", rf"own:Odd: observation/pair\[1\] of environment 0 is -1\.5, {OUTSIDE}"),
        ("Odd", "high", rf"own:Odd: observation/pair\[1\] of environment 0 is 3\.5, {OUTSIDE}"),
        (
            "Odd",
            "choice",
            "observation/count of environment 0 is 4, outside of its space, 1 to 3: c",
        ),
        ("Odd", "no reward", f"environment 0 of own:Odd: the reward is None{ONE}"),
        ("Odd", "word", f"environment 0 of own:Odd: the reward is 'one'{ONE}"),
        ("Odd", "array", rf"environment 0 of own:Odd: the reward is an array of shape \(1,\){ONE}"),
        (
            "Odd",
            "no info",
            "environment 0 of own:Odd: the info is None; it must be a dict: return {}",
        ),
    ],
)
def test_what_an_environment_returns_wrongly_is_told_in_a_line(
    name: str, how: str, says: str, most: int
) -> None:
    """Also in the last of several frames for which an action is held."""
    kwargs = json.dumps({"how": how, "at": most})
    error = error_of(name, kwargs=kwargs, repeat=RepeatConfig(most=most))
    assert re.match(f"ValueError: .*{says}", error), error


@pytest.mark.parametrize(
    ("how", "says"), [("four values", FOUR), ("no reward", f"the reward is None{ONE}")]
)
def test_a_process_of_its_own_tells_it_too(how: str, says: str) -> None:
    kwargs = json.dumps({"how": how})
    config = EnvironmentConfig(id="own:Odd", kwargs=kwargs, vectorization="async")
    with closing(environments.make(config, 1)) as environment:
        environment.reset(0)
        environment.send(np.zeros(1, np.int64))
        (fault,) = environment.recv().faults
    assert fault.detail.startswith(f"fault 1, ValueError: own:Odd: {says}")


@pytest.mark.parametrize(
    ("numbers", "dtype", "says"),
    [
        ([3, 300], "uint16", r"\[1\] is 300, which uint8 cannot hold: clip, scale or round it, or"),
        ([1.5, 3.0], "float32", r"\[0\] is 1\.5, which uint8 cannot hold"),
    ],
)
def test_numbers_that_a_spaces_type_cannot_hold_are_refused(
    numbers: list[float], dtype: str, says: str
) -> None:
    error = error_of("Wide", kwargs=json.dumps({"numbers": numbers, "dtype": dtype}))
    assert re.match(f"ValueError: environment 0 of own:Wide: observation/depth{says}", error), error


def test_numbers_that_a_spaces_type_can_hold_are_converted() -> None:
    kwargs = json.dumps({"numbers": [3, 255], "dtype": "int64"})
    for vectorization in ("sync", "async"):
        depth = rows("Wide", 1, kwargs=kwargs, vectorization=vectorization)[1].timestep.observation
        np.testing.assert_array_equal(depth["depth"], np.array([[3, 255]] * 3, np.uint8))


def test_shapes_are_checked_always_and_limits_a_hundred_times() -> None:
    for at in (100, 101):
        kwargs = json.dumps({"how": "shape", "at": at})
        assert re.search(SHAPE, error_of("Odd", 102, kwargs=kwargs))
    assert OUTSIDE in error_of("Odd", 102, kwargs='{"how": "low", "at": 100}')
    pairs = [
        step.timestep.observation["pair"]
        for step in rows("Odd", 102, kwargs='{"how": "low", "at": 101}')
    ]
    assert pairs[101].min() == -1.5


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_reset_need_take_no_options(vectorization: str) -> None:
    reset, step = rows("Seeded", 1, vectorization=vectorization)
    assert reset.timestep.step_type[0] == StepType.FIRST and step.timestep.reward[0] == 1.0


def test_what_is_no_picture_is_refused_with_its_name() -> None:
    says = r"own:Blind shows None; an image is uint8 \[height"
    with closing(make("Blind")) as environment, pytest.raises(ValueError, match=says):
        environment.render()


@pytest.mark.parametrize("name", ["Threads", "SameStep", "Nested"])
def test_what_cannot_be_looked_at_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be shown, since it cannot be made with render_"):
        environments.make(EnvironmentConfig(id=f"own:{name}"), 1, render_mode="rgb_array")
