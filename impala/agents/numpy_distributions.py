"""Sampling from `impala.agents.distributions` in NumPy, for `impala.agents.numpy_agent`.

Parameters mean what they mean there. Only what an actor needs is here: to explore, to mask, and to
draw actions.
"""

import abc
import itertools
import math
from collections.abc import Callable, Sequence

import gymnasium as gym
import numpy as np
import tensorflow as tf

from impala.agents.distributions import MOST_MEAN, upper_ends
from impala.config.schema import AgentConfig, EpsilonConfig
from impala.environments.spaces import FORBIDDEN, by_size
from impala.types import Nest


class NotServed(Exception):
    """Only TensorFlow computes this; the message says what."""


class Random:
    """The random numbers of a batch of environments.

    Args:
      num_envs: B.
      seed: two numbers, as `Agent.step` takes them.
    """

    def __init__(self, num_envs: int, seed: Sequence[int]) -> None:
        self.generator = np.random.default_rng(seed)
        # [B] in [0, 1), the same that the agent draws in every step: by them epsilons differ.
        self.of_environments = tf.random.stateless_uniform([num_envs], [seed[0], 0]).numpy()


class Sampler(abc.ABC):
    """A family of distributions over one action, for a batch [B, ...]."""

    num_outputs: int  # of the network
    num_choices: int = 0  # that can be masked, of all parts together

    def behaviour(self, outputs: np.ndarray, random: Random) -> np.ndarray:
        """Parameters [B, P] that actions are drawn from, from outputs [B, num_outputs]."""
        return outputs

    def bound(self, outputs: np.ndarray) -> np.ndarray:
        """Outputs [B, num_outputs] of a network with limits, where there are any."""
        return outputs

    def mask(self, outputs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """Outputs with which choices have probability zero where allowed [B, num_choices] is 0."""
        return outputs

    @abc.abstractmethod
    def sample(self, parameters: np.ndarray, random: Random) -> Nest:
        """Draws actions [B, ...], structured and typed like the action space."""


def for_agent(config: AgentConfig, action_space: gym.Space) -> Sampler:
    """Returns what samples as the distribution of an agent does.

    Raises:
      NotServed: only TensorFlow does.
    """
    if config.policy == "epsilon_greedy":
        check_space(action_space)
        assert isinstance(action_space, gym.spaces.Discrete)
        return EpsilonGreedy(action_space, config.epsilon)
    return for_space(action_space)


def for_space(space: gym.Space) -> Sampler:
    """As `distributions.for_space`.

    Raises:
      NotServed: a space of another kind.
    """
    check_space(space)
    match space:
        case gym.spaces.Discrete():
            return Choices([int(space.n)], np.array(space.start), (), space.dtype)
        case gym.spaces.MultiDiscrete():
            return Choices(space.nvec.reshape(-1).tolist(), space.start, space.shape, space.dtype)
        case gym.spaces.MultiBinary():
            sizes = [2] * math.prod(space.shape)
            return Choices(sizes, np.zeros(space.shape), space.shape, space.dtype)
        case gym.spaces.Box():
            return TanhNormal(space)
        case gym.spaces.Dict():
            names = list(space.spaces)
            return Joint(
                [for_space(part) for part in space.spaces.values()],
                lambda parts: dict(zip(names, parts, strict=True)),
            )
        case gym.spaces.Tuple():
            return Joint([for_space(part) for part in space.spaces], tuple)
    raise NotServed(f"actions of {space}")


def check_space(space: gym.Space) -> None:
    """Checks that the class of a space is one of Gymnasium's.

    Raises:
      NotServed: it is somebody's own, even if derived from one of Gymnasium's.
    """
    if not type(space).__module__.startswith("gymnasium.spaces."):
        raise NotServed(f"the space {space} of the class {type(space).__name__}")


class Choices(Sampler):
    """Independent choices in one array of a shape; the parameters are the logits of all."""

    def __init__(
        self, sizes: Sequence[int], start: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self.num_outputs = self.num_choices = sum(sizes)
        self._sizes = np.array(sizes)
        self._begins = self._sizes.cumsum() - self._sizes
        self._groups = by_size(self._sizes)
        self._start = np.reshape(start, -1)
        self._is_shifted = bool(np.any(self._start))
        self._shape, self._dtype = shape, dtype

    def mask(self, outputs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        is_allowed = allowed > 0
        says_something = np.logical_or.reduceat(is_allowed, self._begins, axis=-1)
        says_nothing = ~says_something.repeat(self._sizes, axis=-1)
        return np.where(is_allowed | says_nothing, outputs, np.float32(FORBIDDEN))

    def sample(self, parameters: np.ndarray, random: Random) -> np.ndarray:
        # The largest of logit + Gumbel noise, which is finite, is a sample of the softmax.
        scores = parameters + random.generator.gumbel(size=parameters.shape)
        if len(self._groups) == 1:
            action = scores.reshape(len(scores), len(self._sizes), -1).argmax(axis=-1)
        else:
            action = np.empty((len(scores), len(self._sizes)), np.int64)
            for parts, columns in self._groups:
                action[:, parts] = scores[:, columns].argmax(axis=-1)
        if self._is_shifted:
            action = action + self._start
        return action.reshape(-1, *self._shape).astype(self._dtype, copy=False)


class EpsilonGreedy(Choices):
    """The best of n actions or, with probability epsilon, any of them.

    The parameters are n values and epsilon.
    """

    def __init__(self, space: gym.spaces.Discrete, config: EpsilonConfig) -> None:
        super().__init__([int(space.n)], np.array(space.start), (), space.dtype)
        self._anneal = config.anneal
        self._finals = np.asarray(config.finals, np.float32)
        self._until = upper_ends(config.weights)
        self.progress = np.float32(0.0)
        """Share of the phase that is done: a variable of the agent."""

    def behaviour(self, outputs: np.ndarray, random: Random) -> np.ndarray:
        which = (random.of_environments[:, np.newaxis] >= self._until).sum(axis=-1)
        share = np.minimum(np.float32(1.0), self.progress / self._anneal) if self._anneal else 1.0
        epsilon = 1.0 + share * (self._finals[which] - 1.0)
        return np.concatenate([outputs, epsilon[:, np.newaxis]], axis=-1, dtype=np.float32)

    def sample(self, parameters: np.ndarray, random: Random) -> np.ndarray:
        values, epsilon = parameters[:, :-1], parameters[:, -1]
        ranks = random.generator.random(values.shape)
        ranks[values <= 0.5 * FORBIDDEN] = -1.0
        explores = random.generator.random(len(values)) < epsilon
        action = np.where(explores, ranks.argmax(axis=-1), values.argmax(axis=-1))
        return (action + self._start).astype(self._dtype, copy=False)


class TanhNormal(Sampler):
    """Points of a box: a Gaussian per dimension, squashed by tanh into the box."""

    def __init__(self, space: gym.spaces.Box) -> None:
        self._low, self._high = space.low, space.high
        self._dtype = space.dtype
        low, high = (bound.reshape(-1).astype(np.float64) for bound in (space.low, space.high))
        self._half_width = (high / 2 - low / 2).astype(np.float32)  # [D]
        self._centre = (high / 2 + low / 2).astype(np.float32)
        self.num_outputs = 2 * math.prod(space.shape)

    def bound(self, outputs: np.ndarray) -> np.ndarray:
        mean, unbounded = np.split(outputs, 2, axis=-1)
        return np.concatenate([MOST_MEAN * np.tanh(mean / MOST_MEAN), unbounded], axis=-1)

    def sample(self, parameters: np.ndarray, random: Random) -> np.ndarray:
        mean, unbounded = np.split(parameters, 2, axis=-1)  # [B, D] each
        # As `distributions.TanhNormal` bounds it: to (-5, 1), and 0 at 0.
        log_std = 6.0 / (1.0 + np.exp(-(unbounded + math.log(5.0)))) - 5.0
        noise = random.generator.standard_normal(mean.shape, np.float32)
        action = self._centre + self._half_width * np.tanh(mean + np.exp(log_std) * noise)
        action = action.reshape(-1, *self._low.shape).astype(self._dtype)
        return np.clip(action, self._low, self._high)  # rounding may leave the box


class Joint(Sampler):
    """Independent parts of one action, whose parameters are concatenated."""

    def __init__(
        self, components: Sequence[Sampler], join: Callable[[Sequence[Nest]], Nest]
    ) -> None:
        self._components = components
        self._outputs = _slices([component.num_outputs for component in components])
        self._choices = _slices([component.num_choices for component in components])
        self.num_outputs = sum(component.num_outputs for component in components)
        self.num_choices = sum(component.num_choices for component in components)
        self._join = join

    def bound(self, outputs: np.ndarray) -> np.ndarray:
        parts = zip(self._components, self._outputs, strict=True)
        return np.concatenate([part.bound(outputs[:, of]) for part, of in parts], axis=-1)

    def mask(self, outputs: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        parts = zip(self._components, self._outputs, self._choices, strict=True)
        masked = [part.mask(outputs[:, of], allowed[:, choices]) for part, of, choices in parts]
        return np.concatenate(masked, axis=-1)

    def sample(self, parameters: np.ndarray, random: Random) -> Nest:
        parts = zip(self._components, self._outputs, strict=True)
        return self._join([part.sample(parameters[:, of], random) for part, of in parts])


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Where parts of these sizes stand, one behind the other."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
