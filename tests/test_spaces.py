"""Spaces as plain data: what comes back equals what was stored, and pictures stay small."""

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from impala.environments import spaces

SPACES: dict[str, gym.Space] = {
    "image": gym.spaces.Box(0, 255, (210, 160, 3), np.uint8),
    "unbounded": gym.spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "half bounded": gym.spaces.Box(
        np.array([-np.inf, 0.1, -1e-7], np.float32), np.array([0.3, np.inf, 2.5], np.float32)
    ),
    "scalar": gym.spaces.Box(0, 1, (), np.float64),
    "empty": gym.spaces.Box(0, 1, (0, 2), np.float32),
    "padded image": gym.spaces.Box(
        0, np.arange(24, dtype=np.uint8).reshape(2, 3, 4), (2, 3, 4), np.uint8
    ),
    "whole numbers beyond float64": gym.spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    "float16": gym.spaces.Box(-1, 1, (2, 2), np.float16),
    "discrete": gym.spaces.Discrete(5, start=-2),
    "multi-discrete": gym.spaces.MultiDiscrete(
        np.array([[2, 3], [4, 5]]), start=np.array([[0, 1], [-1, 0]])
    ),
    "multi-discrete of int8": gym.spaces.MultiDiscrete([2, 3], dtype=np.int8),
    "multi-binary": gym.spaces.MultiBinary(4),
    "multi-binary, two axes": gym.spaces.MultiBinary([2, 3]),
    "nested, not sorted": gym.spaces.Dict(
        [
            ("z", gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Dict({})])),
            ("a", gym.spaces.Box(-1, 1, (2,), np.float32)),
        ]
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_space_comes_back_from_json_as_it_was(name: str) -> None:
    space = SPACES[name]
    text = json.dumps(spaces.to_dict(space), allow_nan=False)  # what every JSON reader knows
    read = spaces.from_dict(json.loads(text))
    assert read == space
    assert read.dtype == space.dtype
    if isinstance(space, gym.spaces.Dict):
        assert list(read) == list(space)  # type: ignore[call-overload]
    read.seed(3), space.seed(3)
    np.testing.assert_equal(read.sample(), space.sample())


@pytest.mark.parametrize(
    ("data", "space"),
    [
        ({"type": "Box", "shape": [2]}, gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)),
        (
            {"type": "Box", "shape": [8, 8], "dtype": "uint8"},
            gym.spaces.Box(0, 255, (8, 8), np.uint8),
        ),
        ({"type": "Box", "shape": [2], "dtype": "int8"}, gym.spaces.Box(-128, 127, (2,), np.int8)),
        ({"type": "Discrete", "n": 3}, gym.spaces.Discrete(3)),
        ({"type": "MultiDiscrete", "nvec": [2, 4]}, gym.spaces.MultiDiscrete([2, 4])),
    ],
)
def test_what_is_left_out_of_a_space_is_usual(data: Any, space: gym.Space) -> None:
    assert spaces.from_dict(data) == space


def test_bounds_that_are_all_the_same_take_no_room() -> None:
    assert len(json.dumps(spaces.to_dict(SPACES["image"]))) < 100


def test_a_space_without_a_fixed_size_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Text\(.*use Box"):
        spaces.to_dict(gym.spaces.Dict({"words": gym.spaces.Text(8)}))


@pytest.mark.parametrize(
    "data", [{}, {"type": "Graph"}, {"type": "Discrete"}, {"type": "Tuple", "spaces": 3}]
)
def test_what_is_no_space_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="not a space that this version knows"):
        spaces.from_dict(data)
