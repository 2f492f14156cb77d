"""Running normalisation: the statistics of all rows, the same wherever an agent acts or learns."""

import dataclasses
import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from test_learner_run import Scene, Scripted

from impala.agents.normaliser import Moments, Normaliser, Numbers, merged
from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig
from impala.logdir import checkpoint
from impala.parts import build
from impala.types import Nest, Parameters
from learner.update.peers import Standing

BOX = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
NEST = gym.spaces.Dict(
    a=gym.spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
    b=gym.spaces.Tuple([gym.spaces.MultiBinary(3), BOX]),
)
WRAPPED = gym.spaces.Dict(observation=NEST, last_reward=gym.spaces.Box(-1.0, 1.0, ()))


def moments_of(rows: np.ndarray) -> Moments:
    return Moments(len(rows), rows.mean(axis=0).tolist(), rows.var(axis=0).tolist())


@pytest.fixture(name="parts")
def make_parts() -> list[np.ndarray]:
    """Rows in parts of different size, mean and deviation, one number constant."""
    rng = np.random.default_rng(0)
    scale, shift = np.array([1.0, 300.0, 1e-3, 0.0]), np.array([50.0, -2e4, 0.0, 7.0])
    return [
        (k + 1) * scale * rng.normal(size=(n, 4)) + (1 + k % 3) * shift * (scale > 0) + shift
        for k, n in enumerate((1, 2, 300, 7, 40))
    ]


def test_merged_moments_are_those_of_all_rows(parts: list[np.ndarray]) -> None:
    total = Moments(0.0, [0.0] * 4, [1.0] * 4)
    for part in parts:
        total = merged(total, moments_of(part))
    rows = np.concatenate(parts)
    assert total.rows == len(rows)
    np.testing.assert_allclose(total.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(total.variance, rows.var(axis=0), rtol=1e-9, atol=1e-20)


def test_numbers_are_normalised_and_nothing_else() -> None:
    # Given statistics of observations [T, B, ...] beside a reward, added in two parts ...
    rng = np.random.default_rng(1)
    seen = {
        "a": 40.0 + 5.0 * rng.normal(size=(30, 2, 2, 3)),
        "b": (np.ones((30, 2, 3), np.int8), rng.normal(size=(30, 2, 2)).astype(np.float32)),
    }
    normaliser = Normaliser(WRAPPED)
    for rows in (slice(7), slice(7, 30)):
        part: Any = tf.nest.map_structure(lambda x: x[rows], seen)  # noqa: B023
        normaliser.update([normaliser.moments({"observation": part, "last_reward": np.ones(())})])
    # ... then they have mean 0 and variance 1, and what is far away is clipped.
    flat = tf.nest.map_structure(lambda x: x.reshape(60, *x.shape[2:]), seen)
    normal = normaliser(tf.nest.map_structure(tf.constant, flat))
    for values, raw in ((normal["a"], flat["a"]), (normal["b"][1], flat["b"][1])):
        assert values.dtype == tf.float32
        expected = (raw - raw.mean(axis=0)) / raw.std(axis=0)
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-4)
    assert (normal["b"][0].numpy() == 1).all()
    far = normaliser(tf.nest.map_structure(lambda x: tf.constant(1000 * x), flat))
    assert far["a"].numpy().min() == 10.0


def test_what_has_no_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"but MultiBinary\(3\) has no floating-point numbers"):
        Numbers(gym.spaces.MultiBinary(3))
