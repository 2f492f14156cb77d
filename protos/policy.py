"""The policy that a JoinReply describes, in NumPy: how probable `output/policy` makes an action."""

import abc
import math
from collections.abc import Mapping, Sequence

import numpy as np

from protos.impala.v1 import learner_pb2 as pb
from protos.network import NotDescribed

_EDGE = 1.0 - 1e-6  # of (-1, 1): beyond it float32 cannot distinguish points


class Factor(abc.ABC):
    """What is chosen for one leaf of the action, independently of the others.

    Args:
      described: in the reply.
      space: of the leaf.
    """

    def __init__(self, described: pb.Policy.Factor, space: pb.Space) -> None:
        self.action = described.action
        self.num_parameters = described.num_parameters

    @abc.abstractmethod
    def log_prob(self, parameters: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Returns the log-probability, or log-density, of an action.

        Args:
          parameters: [N, num_parameters] float32.
          action: [N, ...].

        Returns:
          [N] float64.
        """


class Choices(Factor):
    """Independent choices; the parameters are the logits of all of them."""

    def __init__(self, described: pb.Policy.Factor, space: pb.Space) -> None:
        super().__init__(described, space)
        self._start = np.array(space.start)
        self._ends = np.cumsum(space.n)

    def log_probs(self, parameters: np.ndarray) -> list[np.ndarray]:
        """Returns the log-probabilities of the choices of each number: [N, n]."""
        logits = np.split(parameters.astype(np.float64), self._ends[:-1], axis=-1)
        return [_log_softmax(of_number) for of_number in logits]

    def chosen(self, action: np.ndarray) -> np.ndarray:
        """Returns which choice was made for each number: [N, numbers], from 0."""
        return action.reshape(len(action), -1) - self._start

    def log_prob(self, parameters: np.ndarray, action: np.ndarray) -> np.ndarray:
        of_numbers = zip(self.log_probs(parameters), self.chosen(action).T, strict=True)
        return sum(
            (np.take_along_axis(each, at[:, np.newaxis], axis=-1)[:, 0] for each, at in of_numbers),
            np.zeros(len(parameters)),
        )


class EpsilonGreedy(Choices):
    """The best of n choices or, with probability epsilon, any of them.

    The parameters are n values and epsilon.
    """

    def __init__(self, described: pb.Policy.Factor, space: pb.Space, masked: float) -> None:
        super().__init__(described, space)
        self._least = masked / 2.0  # value of a choice that there is

    def log_probs(self, parameters: np.ndarray) -> list[np.ndarray]:
        values, epsilon = parameters[:, :-1], parameters[:, -1:].astype(np.float64)
        allowed = (values > self._least).astype(np.float64)
        any_one = allowed / np.maximum(allowed.sum(axis=-1, keepdims=True), 1.0)
        best = np.arange(values.shape[1]) == values.argmax(axis=-1)[:, np.newaxis]
        with np.errstate(divide="ignore"):
            return [np.log((1.0 - epsilon) * best + epsilon * any_one)]


class TanhNormal(Factor):
    """A Gaussian for each of D numbers of a box, squashed by tanh into the box.

    The parameters are D means and D numbers from which deviations come.
    """

    def __init__(self, described: pb.Policy.Factor, space: pb.Space) -> None:
        super().__init__(described, space)
        low, high = np.array(space.low), np.array(space.high)
        self._centre, self._half_width = high / 2 + low / 2, high / 2 - low / 2
        self._bounds = described.lowest_log_deviation, described.highest_log_deviation

    def gaussian(self, parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns means and log-deviations before the squashing: [N, D] each."""
        means, unbounded = np.split(parameters.astype(np.float64), 2, axis=-1)
        low, high = self._bounds
        with np.errstate(over="ignore"):
            share = 1.0 / (1.0 + np.exp(-(unbounded + math.log(-low / high))))
        return means, low + (high - low) * share

    def rounding(self, dtype: np.dtype) -> float:
        """Returns how much actions of a dtype are rounded, as points of (-1, 1)^D."""
        offset = np.abs(self._centre / self._half_width)
        return float(np.finfo(dtype).eps * (1.0 + offset.max(initial=0.0)))

    def unit(self, action: np.ndarray) -> np.ndarray:
        """Returns actions in the box as points of (-1, 1)^D: [N, D]."""
        return (action.reshape(len(action), -1) - self._centre) / self._half_width

    def log_prob(self, parameters: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Returns the log-density; a point at the edge is moved inside."""
        means, log_deviations = self.gaussian(parameters)
        points = np.arctanh(np.clip(self.unit(action), -_EDGE, _EDGE))
        distances = (points - means) * np.exp(-log_deviations)
        gaussian = -0.5 * distances**2 - log_deviations - 0.5 * math.log(2.0 * math.pi)
        slope = np.log1p(-(np.tanh(points) ** 2)) + np.log(self._half_width)
        log_prob: np.ndarray = (gaussian - slope).sum(axis=-1)
        return log_prob


def factors(reply: pb.JoinReply) -> list[Factor]:
    """Returns the factors of a run's policy, in the order of their parameters.

    Raises:
      NotDescribed: one is of a newer protocol, or the learner is older than 2.3.
    """
    spaces = {space.name: space for space in reply.action_space}
    if not reply.policy.factors:
        raise NotDescribed(f"The reply of the learner ({reply.version}) describes no policy.")
    return [
        _factor(each, spaces[each.action], reply.policy.masked) for each in reply.policy.factors
    ]


def split(factors: Sequence[Factor], parameters: np.ndarray) -> list[np.ndarray]:
    """Returns the parameters [N, P] of each factor."""
    ends = np.cumsum([factor.num_parameters for factor in factors])
    return np.split(parameters, ends[:-1], axis=-1)


def log_prob(
    factors: Sequence[Factor], parameters: np.ndarray, action: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Returns the log-probability, or log-density, of actions.

    Args:
      factors: of the policy.
      parameters: [N, P].
      action: [N, ...] by the name of the leaf.

    Returns:
      [N] float64.
    """
    pairs = zip(factors, split(factors, parameters), strict=True)
    return sum(
        (factor.log_prob(its, action[factor.action]) for factor, its in pairs),
        np.zeros(len(parameters)),
    )


def _factor(described: pb.Policy.Factor, space: pb.Space, masked: float) -> Factor:
    match described.family:
        case pb.Policy.FAMILY_CATEGORICAL:
            return Choices(described, space)
        case pb.Policy.FAMILY_EPSILON_GREEDY:
            return EpsilonGreedy(described, space, masked)
        case pb.Policy.FAMILY_TANH_NORMAL:
            return TanhNormal(described, space)
    raise NotDescribed(f"The policy of {described.action} is of the family {described.family}.")


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
