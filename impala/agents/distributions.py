"""Action distributions, parametrised by one flat float32 vector for any action space.

A `Distribution` knows the shapes of the action and of its parameters. The parameters come from the
network and are sent in `AgentOutput.policy`, so that the learner can evaluate the behaviour policy.
Sampling is stateless: the same seed draws the same action (XLA's generator is different).
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import tensorflow as tf

from impala.config.schema import EpsilonConfig
from impala.environments.spaces import FORBIDDEN, by_size
from impala.types import Array, Nest

MOST_MEAN = 5.0
"""Largest mean of a Gaussian that tanh squashes; its smallest is the negative."""


class Normal(NamedTuple):
    """The Gaussians whose samples tanh squashes into a box, one per dimension of that."""

    mean: Array  # [..., *shape]; squashed, it is the greedy action
    deviation: Array  # [..., *shape]


class Distribution(abc.ABC):
    """A family of distributions over one action, for any number of leading dimensions.

    The network's outputs are the parameters, unless a family has its own exploration: then
    `behaviour` computes parameters from outputs.
    """

    num_parameters: int  # P
    num_outputs: int  # of the network
    num_choices: int = 0  # that can be masked, over all parts
    num_parts: int = 1  # choices and dimensions of boxes
    has_density: bool = False  # of actions in a box: in its unit, and no probability

    def behaviour(self, outputs: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        """Returns the parameters of the behaviour policy.

        Args:
          outputs: [B, num_outputs], of the network.
          seed: [2] int32, whose first number is constant for an actor; None: no exploration.

        Returns:
          [B, P].
        """
        return outputs

    @abc.abstractmethod
    def sample_and_log_prob(self, parameters: tf.Tensor, seed: tf.Tensor) -> tuple[Nest, tf.Tensor]:
        """Draws an action for each row of parameters.

        Args:
          parameters: [..., P] float32.
          seed: [2] int32.

        Returns:
          Actions [..., *shape], structured and typed like the action space; log-probs [...].
        """

    @abc.abstractmethod
    def mode(self, parameters: tf.Tensor) -> Nest:
        """Returns the greedy action. [..., *shape]."""

    @abc.abstractmethod
    def described(self, parameters: tf.Tensor) -> Nest:
        """Returns a distribution in terms that do not depend on its parametrisation.

        Returns:
          Of a choice the probabilities [..., n]; of a box a `Normal`; of several parts a nest of
          these that is structured like the action, but a tuple for the parts of one array.
        """

    @abc.abstractmethod
    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        """Returns the log-probability, or log-density, of an action. [...]."""

    @abc.abstractmethod
    def entropy(self, parameters: tf.Tensor) -> tf.Tensor:
        """Returns the entropy in nats. [...]."""

    def entropy_at(self, share: tf.Tensor | float, parameters: tf.Tensor) -> tf.Tensor:
        """Returns a target for the entropy, in nats, that means the same for any action space.

        Args:
          share: [] of a choice, the share of the largest entropy, that of all allowed choices being
            equally likely; of a box, the share of each dimension over which actions are uniform.
          parameters: [..., P], which tell what is allowed.

        Returns:
          [...].
        """
        raise NotImplementedError(f"{type(self).__name__} has an exploration of its own.")

    @abc.abstractmethod
    def kl(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """Returns KL(p || q) in nats, of parameters [..., P]. [...]."""

    def bound(self, outputs: tf.Tensor) -> tf.Tensor:
        """Returns a network's outputs [..., num_outputs] with limits, where there are any."""
        return outputs

    def mask(self, outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
        """Returns outputs [..., num_outputs] that give masked choices a probability of 0.

        Args:
          outputs: [..., num_outputs].
          allowed: [..., num_choices], 0 for masked choices. Where all choices of a part are masked,
            as some environments report after an episode's end, all are allowed.
        """
        return outputs


class Categorical(Distribution):
    """One of n actions; the parameters are n logits.

    Args:
      num_actions: n.
      start: the number of the first action; or [K], where the last of the leading dimensions is K.
      dtype: of an action.
    """

    def __init__(
        self,
        num_actions: int,
        start: int | np.ndarray = 0,
        dtype: np.dtype | type = np.int64,
    ) -> None:
        self.num_outputs = self.num_parameters = self.num_choices = num_actions
        self._start = start
        self._dtype = tf.as_dtype(dtype)

    def sample_and_log_prob(self, parameters: tf.Tensor, seed: tf.Tensor) -> tuple[Nest, tf.Tensor]:
        # The argmax of logit + Gumbel noise: a sample of the softmax that XLA can compile.
        tiny = np.finfo(np.float32).tiny
        uniform = _drawn(tf.random.stateless_uniform, tf.shape(parameters), seed, minval=tiny)
        action = self._action(parameters - tf.math.log(-tf.math.log(uniform)))
        return action, self.log_prob(parameters, action)

    def mode(self, parameters: tf.Tensor) -> Nest:
        return self._action(parameters)

    def described(self, parameters: tf.Tensor) -> Nest:
        return tf.nn.softmax(parameters)

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        # One-hot instead of gather: an action outside the space adds 0 and raises no error.
        index = tf.cast(action, tf.int32) - tf.cast(self._start, tf.int32)
        chosen = tf.one_hot(index, self.num_parameters)
        return tf.reduce_sum(chosen * tf.nn.log_softmax(parameters), axis=-1)

    def entropy(self, parameters: tf.Tensor) -> tf.Tensor:
        return -tf.reduce_sum(tf.nn.softmax(parameters) * tf.nn.log_softmax(parameters), axis=-1)

    def entropy_at(self, share: tf.Tensor | float, parameters: tf.Tensor) -> tf.Tensor:
        return share * tf.math.log(tf.reduce_sum(_allowed(parameters), axis=-1))

    def kl(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        difference = tf.nn.log_softmax(p) - tf.nn.log_softmax(q)
        return tf.reduce_sum(tf.nn.softmax(p) * difference, axis=-1)

    def mask(self, outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
        return _masked(outputs, allowed)

    def _action(self, scores: tf.Tensor) -> tf.Tensor:
        index = tf.argmax(scores, axis=-1, output_type=tf.int64)
        return tf.cast(index + tf.cast(self._start, tf.int64), self._dtype)


class Choices(Distribution):
    """K independent choices among n each, in an array [K]; the parameters are the logits of each.

    Args:
      num_actions: n.
      starts: [K], the number of the first action of each.
      dtype: of an action.
    """

    def __init__(self, num_actions: int, starts: np.ndarray, dtype: np.dtype) -> None:
        self._each = Categorical(num_actions, starts, dtype)
        self.num_parts = len(starts)
        self._shape = len(starts), num_actions
        self.num_outputs = self.num_parameters = self.num_choices = len(starts) * num_actions

    def sample_and_log_prob(self, parameters: tf.Tensor, seed: tf.Tensor) -> tuple[Nest, tf.Tensor]:
        action, log_prob = self._each.sample_and_log_prob(self._logits(parameters), seed)
        return action, tf.reduce_sum(log_prob, axis=-1)

    def mode(self, parameters: tf.Tensor) -> Nest:
        return self._each.mode(self._logits(parameters))

    def described(self, parameters: tf.Tensor) -> Nest:
        return self._each.described(self._logits(parameters))

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        return tf.reduce_sum(self._each.log_prob(self._logits(parameters), action), axis=-1)

    def entropy(self, parameters: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self._each.entropy(self._logits(parameters)), axis=-1)

    def entropy_at(self, share: tf.Tensor | float, parameters: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self._each.entropy_at(share, self._logits(parameters)), axis=-1)

    def kl(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self._each.kl(self._logits(p), self._logits(q)), axis=-1)

    def mask(self, outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
        masked = self._each.mask(self._logits(outputs), self._logits(allowed))
        return tf.reshape(masked, tf.shape(outputs))

    def _logits(self, values: tf.Tensor) -> tf.Tensor:
        """Reshapes [..., K n] to [..., K, n]."""
        return tf.reshape(values, tf.concat([tf.shape(values)[:-1], self._shape], axis=0))


class EpsilonGreedy(Distribution, tf.Module):
    """Epsilon-greedy over n Q-values: the best action, or with probability epsilon a random one.

    The network outputs n Q-values; the parameters are these and epsilon. Every environment has its
    own epsilon, which is annealed from 1 to one of several final values: Mnih et al. 2016, arXiv
    1602.01783, section 5.1 and supplement 8. The variable `progress` determines how far; it is
    published with the agent's variables and updated by the algorithm.

    Args:
      num_actions: n.
      anneal: share of the phase over which epsilon falls.
      finals: its final values.
      weights: their relative probabilities.
      start: the number of the first action.
      dtype: of an action.
    """

    def __init__(
        self,
        num_actions: int,
        anneal: float,
        finals: Sequence[float],
        weights: Sequence[float],
        start: int = 0,
        dtype: np.dtype | type = np.int64,
    ) -> None:
        tf.Module.__init__(self, name="epsilon_greedy")
        self.num_outputs = self.num_choices = num_actions
        self.num_parameters = num_actions + 1
        self.progress = tf.Variable(0.0, trainable=False, name="progress")
        self._anneal = anneal
        self._finals = np.asarray(finals, np.float32)
        self._until = upper_ends(weights)  # of the finals
        self._start = start
        self._dtype = tf.as_dtype(dtype)

    def behaviour(self, outputs: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        if seed is None:
            return tf.concat([outputs, tf.zeros_like(outputs[..., :1])], axis=-1)
        # Depends only on the actor's constant number, so epsilon is the same in every step.
        drawn = tf.random.stateless_uniform(tf.shape(outputs)[:1], tf.stack([seed[0], 0]))
        which = tf.reduce_sum(tf.cast(drawn[:, tf.newaxis] >= self._until, tf.int32), axis=-1)
        epsilon = self.annealed(tf.gather(_float32(self._finals), which))
        return tf.concat([outputs, epsilon[:, tf.newaxis]], axis=-1)

    def mean_epsilon(self) -> tf.Tensor:
        """Returns the epsilon of now, on average over the environments: []."""
        weights = np.diff(self._until, prepend=0.0)
        return self.annealed(_float32(np.dot(weights, self._finals)))

    def sample_and_log_prob(self, parameters: tf.Tensor, seed: tf.Tensor) -> tuple[Nest, tf.Tensor]:
        probabilities = self._probabilities(parameters)
        tiny = np.finfo(np.float32).tiny
        uniform = _drawn(tf.random.stateless_uniform, tf.shape(probabilities), seed, minval=tiny)
        gumbel = -tf.math.log(-tf.math.log(uniform))
        action = self._action(tf.math.log(probabilities) + gumbel)
        return action, self.log_prob(parameters, action)

    def mode(self, parameters: tf.Tensor) -> Nest:
        return self._action(parameters[..., :-1])

    def described(self, parameters: tf.Tensor) -> Nest:
        return self._probabilities(parameters)

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        chosen = tf.one_hot(self.index(action), self.num_choices)
        return tf.math.log(tf.reduce_sum(chosen * self._probabilities(parameters), axis=-1))

    def entropy(self, parameters: tf.Tensor) -> tf.Tensor:
        p = self._probabilities(parameters)
        return -tf.reduce_sum(tf.math.xlogy(p, p), axis=-1)

    def kl(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """Returns KL(p || q), infinite where q gives no probability to an action of p."""
        of_p, of_q = self._probabilities(p), self._probabilities(q)
        return tf.reduce_sum(tf.math.xlogy(of_p, of_p) - tf.math.xlogy(of_p, of_q), axis=-1)

    def mask(self, outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
        return _masked(outputs, allowed)

    def index(self, action: Nest) -> tf.Tensor:
        """Returns the index of an action among the n outputs: 0 to n - 1."""
        return tf.cast(action, tf.int32) - self._start

    def is_allowed(self, values: tf.Tensor) -> tf.Tensor:
        """Returns which of n masked Q-values [..., n] are of possible actions: bool [..., n]."""
        return _allowed(values) > 0.0

    def annealed(self, final: tf.Tensor) -> tf.Tensor:
        """Returns epsilon now, of what it ends with."""
        share = tf.minimum(1.0, self.progress / self._anneal) if self._anneal else 1.0
        return 1.0 + share * (final - 1.0)

    def _probabilities(self, parameters: tf.Tensor) -> tf.Tensor:
        values, epsilon = parameters[..., :-1], parameters[..., -1:]
        allowed = _allowed(values)
        anyone = allowed / tf.reduce_sum(allowed, axis=-1, keepdims=True)
        best = tf.one_hot(tf.argmax(values, axis=-1), self.num_choices)
        return (1.0 - epsilon) * best + epsilon * anyone

    def _action(self, scores: tf.Tensor) -> tf.Tensor:
        index = tf.argmax(scores, axis=-1, output_type=tf.int64)
        return tf.cast(index + self._start, self._dtype)


def bounded_log_std(unbounded: tf.Tensor) -> tf.Tensor:
    """Returns the logarithm of a `TanhNormal`'s deviation: from -5 to 1, and 0 at 0."""
    low, high = -5.0, 1.0
    return low + (high - low) * tf.sigmoid(unbounded + math.log(-low / high))


class TanhNormal(Distribution):
    """A Gaussian per dimension of a box, squashed by tanh into the box.

    The parameters are D means and D numbers that determine the log-std, smoothly bounded to (-5, 1)
    and 0 at 0. Beyond a standard deviation of e, the squashed density only accumulates at the
    edges. A network's means are smoothly bounded to (-5, 5), which come within 1e-4 of the edges: a
    gradient that makes an action at the edge less probable would move a mean beyond it further
    away, without end.
    """

    has_density = True

    def __init__(self, low: np.ndarray, high: np.ndarray, dtype: np.dtype | type) -> None:
        self._shape = low.shape
        self.size = self.num_parts = math.prod(low.shape)  # D
        self._dtype = tf.as_dtype(dtype)
        self._low, self._high = low, high
        flat_low, flat_high = (bound.reshape(-1).astype(np.float64) for bound in (low, high))
        self._half_width = flat_high / 2 - flat_low / 2  # [D]; halved first: cannot overflow
        self._centre = flat_high / 2 + flat_low / 2
        self.num_outputs = self.num_parameters = 2 * self.size
        # Difference of the log-density in (-1, 1)^D and that in units of the box.
        self.log_volume = float(np.log(self._half_width).sum())

    def sample_and_log_prob(self, parameters: tf.Tensor, seed: tf.Tensor) -> tuple[Nest, tf.Tensor]:
        mean, log_std = self._gaussian(parameters)
        noise = _drawn(tf.random.stateless_normal, tf.shape(mean), seed)
        point = mean + tf.exp(log_std) * noise
        return self._squash(point), self._log_density(mean, log_std, point)

    def mode(self, parameters: tf.Tensor) -> Nest:
        """Returns the squashed mean of the Gaussian: the median, as the mode has no closed form."""
        return self._squash(self._gaussian(parameters)[0])

    def described(self, parameters: tf.Tensor) -> Nest:
        mean, log_std = map(self._shaped, self._gaussian(parameters))
        return Normal(mean, tf.exp(log_std))

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        """Returns the log-density in units of the box; an action at the edge is moved inside."""
        mean, log_std = self._gaussian(parameters)
        unit = self.unit(action)
        limit = 1.0 - 1e-6  # atanh 7.25, beyond which float32 cannot distinguish points
        return self._log_density(mean, log_std, tf.atanh(tf.clip_by_value(unit, -limit, limit)))

    def unit(self, action: Nest) -> tf.Tensor:
        """Returns actions [..., *shape] of the box as points [..., D] of (-1, 1)^D."""
        action = self._flat(tf.cast(action, tf.float32))
        return (action - _float32(self._centre)) / _float32(self._half_width)

    def bound(self, outputs: tf.Tensor) -> tf.Tensor:
        mean, unbounded = tf.split(outputs, 2, axis=-1)
        return tf.concat([MOST_MEAN * tf.tanh(mean / MOST_MEAN), unbounded], axis=-1)

    def entropy(self, parameters: tf.Tensor) -> tf.Tensor:
        """Returns the Gaussian's entropy + E[log |d action / d point|], by Gauss-Hermite.

        There is no closed form. The sum over fixed nodes is deterministic and differentiable, with
        an error of about 0.01 nats per dimension.
        """
        mean, log_std = self._gaussian(parameters)
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        points = mean[..., tf.newaxis] + tf.exp(log_std)[..., tf.newaxis] * _float32(nodes)
        expected = tf.reduce_sum(
            _log_slope(points) * _float32(weights / weights.sum()), axis=-1
        )  # [..., D]
        gaussian = log_std + 0.5 * math.log(2 * math.pi * math.e)
        return tf.reduce_sum(gaussian + expected + self._log_half_width(), axis=-1)

    def entropy_at(self, share: tf.Tensor | float, parameters: tf.Tensor) -> tf.Tensor:
        whole = self.log_volume + self.size * tf.math.log(2.0 * share)
        return tf.fill(tf.shape(parameters)[:-1], whole)

    def kl(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        """Returns the KL of the Gaussians, which is invariant under the common squashing."""
        p_mean, p_log_std = self._gaussian(p)
        q_mean, q_log_std = self._gaussian(q)
        log_ratio = p_log_std - q_log_std
        distance = (p_mean - q_mean) * tf.exp(-q_log_std)
        return tf.reduce_sum(
            0.5 * (tf.exp(2 * log_ratio) - 1 + tf.square(distance)) - log_ratio, axis=-1
        )

    def _gaussian(self, parameters: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        mean, unbounded = tf.split(parameters, 2, axis=-1)  # [..., D] each
        return mean, bounded_log_std(unbounded)

    def _log_density(self, mean: tf.Tensor, log_std: tf.Tensor, point: tf.Tensor) -> tf.Tensor:
        distance = (point - mean) * tf.exp(-log_std)
        gaussian = -0.5 * tf.square(distance) - log_std - 0.5 * math.log(2 * math.pi)
        change = _log_slope(point) + self._log_half_width()
        return tf.reduce_sum(gaussian - change, axis=-1)

    def _log_half_width(self) -> tf.Tensor:
        return _float32(np.log(self._half_width))  # [D]

    def _squash(self, point: tf.Tensor) -> tf.Tensor:
        action = _float32(self._centre) + _float32(self._half_width) * tf.tanh(point)
        action = tf.cast(self._shaped(action), self._dtype)
        return tf.clip_by_value(action, self._low, self._high)  # Rounding may leave the box.

    def _shaped(self, flat: tf.Tensor) -> tf.Tensor:
        """Reshapes [..., D] to [..., *shape]."""
        shape = tf.concat([tf.shape(flat)[:-1], tf.constant(self._shape, tf.int32)], axis=0)
        return tf.reshape(flat, shape)

    def _flat(self, action: tf.Tensor) -> tf.Tensor:
        """Reshapes [..., *shape] to [..., D]."""
        leading = tf.shape(action)[: action.shape.rank - len(self._shape)]
        return tf.reshape(action, tf.concat([leading, [self.size]], axis=0))


class Joint(Distribution):
    """Independent parts of one action: parameters are concatenated, log-probabilities etc. summed.

    Args:
      components: the distributions of the parts.
      split: splits an action into its parts.
      join: joins the parts to an action.
      order: [P], where the parameters of the parts are, part after part; only for parts whose
        parameters are choices. None: in this order.
      collect: joins what describes the parts; None: as `join`.
    """

    def __init__(
        self,
        components: Sequence[Distribution],
        split: Callable[[Nest], Sequence[Nest]],
        join: Callable[[Sequence[Nest]], Nest],
        order: np.ndarray | None = None,
        collect: Callable[[Sequence[Nest]], Nest] | None = None,
    ) -> None:
        self._components = tuple(components)
        self._split = split
        self._join = join
        self._order = order
        self._collect = collect or join
        self._sizes = [component.num_parameters for component in components]
        self.num_outputs = self.num_parameters = sum(self._sizes)
        self._choices = [component.num_choices for component in components]
        self.num_choices = sum(self._choices)
        self.has_density = any(component.has_density for component in components)
        self.num_parts = sum(component.num_parts for component in components)

    def sample_and_log_prob(self, parameters: tf.Tensor, seed: tf.Tensor) -> tuple[Nest, tf.Tensor]:
        seeds = tf.unstack(tf.random.split(seed, len(self._components)))
        samples = [
            component.sample_and_log_prob(part, part_seed)
            for component, part, part_seed in zip(
                self._components, self._parts(parameters), seeds, strict=True
            )
        ]
        actions, log_probs = zip(*samples, strict=True)
        return self._join(actions), tf.add_n(log_probs)

    def mode(self, parameters: tf.Tensor) -> Nest:
        parts = zip(self._components, self._parts(parameters), strict=True)
        return self._join([component.mode(part) for component, part in parts])

    def described(self, parameters: tf.Tensor) -> Nest:
        parts = zip(self._components, self._parts(parameters), strict=True)
        return self._collect([component.described(part) for component, part in parts])

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        parts = zip(self._components, self._parts(parameters), self._split(action), strict=True)
        return tf.add_n([component.log_prob(part, chosen) for component, part, chosen in parts])

    def entropy(self, parameters: tf.Tensor) -> tf.Tensor:
        parts = zip(self._components, self._parts(parameters), strict=True)
        return tf.add_n([component.entropy(part) for component, part in parts])

    def entropy_at(self, share: tf.Tensor | float, parameters: tf.Tensor) -> tf.Tensor:
        parts = zip(self._components, self._parts(parameters), strict=True)
        return tf.add_n([component.entropy_at(share, part) for component, part in parts])

    def kl(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        parts = zip(self._components, self._parts(p), self._parts(q), strict=True)
        return tf.add_n([component.kl(part_p, part_q) for component, part_p, part_q in parts])

    def bound(self, outputs: tf.Tensor) -> tf.Tensor:
        if self._order is not None:  # all parts are choices
            return outputs
        parts = zip(self._components, self._parts(outputs), strict=True)
        return tf.concat([component.bound(part) for component, part in parts], axis=-1)

    def mask(self, outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
        of_parts = tf.split(self._ordered(allowed), self._choices, axis=-1)
        parts = zip(self._components, self._parts(outputs), of_parts, strict=True)
        masked = tf.concat([component.mask(*part) for component, *part in parts], axis=-1)
        return masked if self._order is None else tf.gather(masked, self._order.argsort(), axis=-1)

    def _parts(self, parameters: tf.Tensor) -> list[tf.Tensor]:
        return tf.split(self._ordered(parameters), self._sizes, axis=-1)

    def _ordered(self, values: tf.Tensor) -> tf.Tensor:
        return values if self._order is None else tf.gather(values, self._order, axis=-1)


def _masked(outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
    """Returns outputs [..., n] of one part, with masked ones replaced, unless all are masked."""
    is_allowed = allowed if allowed.dtype == tf.bool else allowed > 0
    says_nothing = ~tf.reduce_any(is_allowed, axis=-1, keepdims=True)
    # Not -inf: 0 * -inf in an entropy is NaN. This value has a probability of exactly zero, too.
    return tf.where(is_allowed | says_nothing, outputs, FORBIDDEN)


def _allowed(outputs: tf.Tensor) -> tf.Tensor:
    """Returns 1 for the choices of one part that were not masked, else 0: [..., n]."""
    return tf.cast(outputs > 0.5 * FORBIDDEN, tf.float32)


def epsilon_greedy_for_space(action_space: gym.Space, config: EpsilonConfig) -> EpsilonGreedy:
    """Returns the distribution over the actions of a Discrete space.

    Raises:
      ValueError: the space is another one.
    """
    if not isinstance(action_space, gym.spaces.Discrete):
        raise ValueError(
            f"agent.policy is epsilon_greedy, which chooses one of n actions, not {action_space}: "
            "play another environment, or set agent.policy to stochastic."
        )
    return EpsilonGreedy(
        int(action_space.n),
        config.anneal,
        config.finals,
        config.weights,
        int(action_space.start),
        action_space.dtype,
    )


def for_space(action_space: gym.Space) -> Distribution:
    """Returns the distribution over the actions of a space.

    Raises:
      ValueError: there is none for such a space; the message says what to do.
    """
    match action_space:
        case gym.spaces.Discrete():
            return Categorical(int(action_space.n), int(action_space.start), action_space.dtype)
        case gym.spaces.MultiDiscrete():
            return _choices(
                action_space.nvec, action_space.start, action_space.shape, action_space.dtype
            )
        case gym.spaces.MultiBinary():
            twos = np.full(action_space.shape, 2)
            return _choices(twos, 0 * twos, action_space.shape, action_space.dtype)
        case gym.spaces.Box():
            return _box(action_space)
        case gym.spaces.Dict() if action_space.spaces:
            names = list(action_space.spaces)
            return Joint(
                [for_space(space) for space in action_space.spaces.values()],
                split=lambda action: [action[name] for name in names],
                join=lambda parts: dict(zip(names, parts, strict=True)),
            )
        case gym.spaces.Tuple() if action_space.spaces:
            return Joint([for_space(space) for space in action_space.spaces], list, tuple)
    raise ValueError(
        f"No action distribution for {action_space}. Supported: Discrete, MultiDiscrete, "
        "MultiBinary, Box with finite bounds, and Dict or Tuple of these (not empty). Wrap the "
        "environment so that it takes one of them."
    )


def _choices(
    sizes: np.ndarray, starts: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
) -> Joint:
    """Returns the distribution of several choices in one array: one part for those of each size."""
    starts = starts.reshape(-1)
    groups = by_size(sizes.reshape(-1))
    components = [Choices(each.shape[1], starts[parts], dtype) for parts, each in groups]
    order, columns = (
        np.concatenate([x.reshape(-1) for x in of]) for of in zip(*groups, strict=True)
    )
    count, rank, is_mixed = sizes.size, len(shape), len(groups) > 1

    def split(action: tf.Tensor) -> list[tf.Tensor]:
        leading = tf.shape(action)[: tf.convert_to_tensor(action).shape.rank - rank]
        flat = tf.reshape(action, tf.concat([leading, [count]], axis=0))
        return [tf.gather(flat, parts, axis=-1) for parts, _ in groups] if is_mixed else [flat]

    def join(parts: Sequence[tf.Tensor]) -> tf.Tensor:
        flat = tf.gather(tf.concat(parts, -1), order.argsort(), axis=-1) if is_mixed else parts[0]
        return tf.reshape(flat, tf.concat([tf.shape(flat)[:-1], shape], axis=0))

    def collect(parts: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        each = {
            place: described[..., i, :]
            for (places, _), described in zip(groups, parts, strict=True)
            for i, place in enumerate(places)
        }
        return tuple(each[place] for place in range(count))

    return Joint(components, split, join, columns if is_mixed else None, collect)


def _box(space: gym.spaces.Box) -> TanhNormal:
    if not np.issubdtype(space.dtype, np.floating):
        raise ValueError(
            f"No action distribution for {space}: its dtype {space.dtype} is not a float. Use "
            "Discrete or MultiDiscrete for choices, or a float Box."
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"No action distribution for {space}: its bounds must be finite. Give it those between "
            "which actions are useful, for instance by gymnasium.wrappers.TransformAction(env, "
            f"lambda action: action, gymnasium.spaces.Box(0.0, 1.0, {space.shape}))."
        )
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    if not (low < high).all():
        raise ValueError(
            f"No action distribution for {space}: low must be less than high in every dimension. "
            "Leave out the dimensions in which there is nothing to choose."
        )
    half = high / 2.0 - low / 2.0
    if not ((half >= 1e-30) & (half <= 1e30) & (half >= 1e-6 * np.maximum(-low, high))).all():
        raise ValueError(
            f"No action distribution for {space}: float32 cannot tell its values apart. Shift and "
            "scale the action, by gymnasium.wrappers.RescaleAction for instance."
        )
    return TanhNormal(space.low, space.high, space.dtype)


def upper_ends(weights: Sequence[float]) -> np.ndarray:
    """Returns the upper ends of intervals in 0 to 1 that are as wide as weights, float32."""
    shares = np.asarray(weights, np.float64) / max(weights)  # which do not overflow
    return (shares.cumsum() / shares.sum()).astype(np.float32)


def _log_slope(point: tf.Tensor) -> tf.Tensor:
    """Returns log(d tanh(x) / dx) = log(1 - tanh(x)^2), exact also where tanh(x) rounds to 1."""
    return 2.0 * (math.log(2.0) - point - tf.nn.softplus(-2.0 * point))


def _drawn(
    draw: Callable[..., tf.Tensor], shape: tf.Tensor, seed: tf.Tensor, **arguments: Any
) -> tf.Tensor:
    """Returns random numbers; for a replica of the learner, those of its part of the whole batch.

    Args:
      draw: a stateless operation of `tf.random`.
      shape: [T, B, ...] for a replica, whose rows are the whole batch's [i B, (i + 1) B).
      seed: [2], the same for all replicas.
      **arguments: for `draw`.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return draw(shape, seed, **arguments)
    size = shape[1]
    whole = tf.concat([shape[:1], [context.num_replicas_in_sync * size], shape[2:]], axis=0)
    start = context.replica_id_in_sync_group * size
    return draw(whole, seed, **arguments)[:, start : start + size]


def _float32(array: np.ndarray) -> tf.Tensor:
    return tf.constant(array, tf.float32)
