"""Running normalisation of observations: to mean 0 and variance 1, by statistics in the parameters.

The learner updates them by what it takes in, and publishes and saves them with the weights, so that
whoever has the parameters sees the same. Unrolls and replay hold what environments gave.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import sonnet as snt
import tensorflow as tf
import tree

from impala.environments.spaces import is_wrapped, leaves, main_space
from impala.types import Nest

CLIP = 10.0
"""Largest absolute value of a normalised number."""
LEAST = 1e-8
"""Added to variances, which are 0 where a number never changes."""


class Moments(NamedTuple):
    """The statistics of rows of N numbers."""

    rows: float  # their number
    mean: Sequence[float]  # [N]
    variance: Sequence[float]  # [N], of these rows: divided by their number


def merged(one: Moments, other: Moments) -> Moments:
    """Returns the statistics of the rows of both, in float64; one of them has rows.

    Chan, Golub and LeVeque 1983, Algorithms for computing the sample variance, equation 2.1.
    """
    mean, variance = (np.asarray(x, np.float64) for x in one[1:])
    count = one.rows + other.rows
    share, shift = other.rows / count, other.mean - mean
    spread = other.variance - variance + (1.0 - share) * np.square(shift)
    return Moments(count, (mean + share * shift).tolist(), (variance + share * spread).tolist())


class Numbers:
    """Where the floating-point numbers are in observations, N in each.

    Those that wrappers added, such as the last reward, are not among them.

    Args:
      space: of one observation.

    Raises:
      ValueError: there are none.
    """

    def __init__(self, space: gym.Space) -> None:
        self._is_wrapped = is_wrapped(space)
        self._parts: list[tuple[slice, tuple[int, ...]] | None] = []  # of each leaf
        self.size = 0
        """N."""
        for _, leaf in leaves(main_space(space)):
            part = None
            if isinstance(leaf, gym.spaces.Box) and leaf.dtype.kind == "f":
                part = slice(self.size, self.size + math.prod(leaf.shape)), leaf.shape
                self.size = part[0].stop
            self._parts.append(part)
        if not self.size:
            raise ValueError(
                f"agent.normalise_observations is true, but {space} has no floating-point numbers: "
                "set it to false (--agent.no-normalise-observations)."
            )

    def moments(self, observation: Nest) -> Moments:
        """Returns the statistics of observations [T, B, ...], with what wrappers added."""
        own = observation["observation"] if self._is_wrapped else observation
        found = [
            np.asarray(value, np.float64).reshape(-1, math.prod(part[1]))
            for part, value in zip(self._parts, tree.flatten(own), strict=True)
            if part is not None
        ]
        rows = np.concatenate(found, axis=1)  # [T * B, N]
        return Moments(float(len(rows)), rows.mean(axis=0).tolist(), rows.var(axis=0).tolist())

    def replaced(self, own: Nest, new: Callable[[Any, slice, tuple[int, ...]], Any]) -> Nest:
        """Returns observations without what wrappers added, in which the numbers are others.

        Args:
          own: [..., *shape].
          new: returns those of a leaf: of its values, their place among the N, and their shape.
        """
        values = [
            value if part is None else new(value, *part)
            for part, value in zip(self._parts, tree.flatten(own), strict=True)
        ]
        return tree.unflatten_as(own, values)


class Normaliser(snt.Module):
    """Normalises the floating-point numbers of observations.

    Args:
      space: of one observation, before the frame stack.
      frame_stack: frames along the last axis of what is normalised.

    Raises:
      ValueError: there are no such numbers.
    """

    def __init__(self, space: gym.Space, frame_stack: int = 1, name: str = "normaliser") -> None:
        super().__init__(name=name)
        self._numbers = Numbers(space)
        self._frame_stack = frame_stack
        size = self._numbers.size
        self._count = tf.Variable(0.0, trainable=False, name="count")
        self._mean = tf.Variable(tf.zeros([size]), trainable=False, name="mean")
        self._variance = tf.Variable(tf.ones([size]), trainable=False, name="variance")

    def __call__(self, own: Nest) -> Nest:
        """Returns observations [N, *shape], without what wrappers added, normalised: float32."""
        return self._numbers.replaced(own, self._normal)

    def _normal(self, value: tf.Tensor, where: slice, shape: tuple[int, ...]) -> tf.Tensor:
        if self._frame_stack > 1 and len(shape) == 2:
            shape = (*shape, 1)  # frames [H, W] are stacked along a new axis
        dtype = tf.float64 if value.dtype == tf.float64 else tf.float32

        def of_leaf(statistic: tf.Tensor) -> tf.Tensor:
            part = tf.cast(tf.reshape(statistic[where], shape), dtype)
            return part if self._frame_stack == 1 else tf.concat([part] * self._frame_stack, -1)

        deviation = of_leaf(tf.sqrt(self._variance + LEAST))
        scaled = (tf.cast(value, dtype) - of_leaf(self._mean)) / deviation
        return tf.cast(tf.clip_by_value(scaled, -CLIP, CLIP), tf.float32)

    def moments(self, observation: Nest) -> Moments:
        """Returns the statistics of observations [T, B, ...], with what wrappers added."""
        return self._numbers.moments(observation)

    def update(self, seen: Iterable[Moments]) -> None:
        """Adds what was observed to the statistics, outside of compiled functions."""
        variables = self._count, self._mean, self._variance
        total = Moments(*(variable.numpy() for variable in variables))
        for moments in seen:
            total = merged(total, moments)
        for variable, value in zip(variables, total, strict=True):
            variable.assign(value)
