"""Checks of actions against the policy that they are said to be drawn from.

A sequence of actions is evidence against its policy p if another policy q, known before each action
was drawn, makes it much more probable. For an honest actor the product of q(a) / p(a) has the
expectation 1 at all times, so it ever exceeds 1 / delta with a probability of delta at most
(Ville's inequality): an honest actor is hardly ever named, whatever its policy and however long it
acts. Continuous actions are compared by the quantile of their policy that they fall into.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import gymnasium as gym
import numpy as np

from impala.config.schema import AgentConfig
from impala.environments.spaces import FORBIDDEN, choices, leaves, limits
from learner.checks.mistakes import Kind, Mistake
from protos.impala.v1 import learner_pb2 as pb

_FIRST = 0  # timestep/step_type
_LOG_DEVIATIONS = -5.0, 1.0  # bounds, of `impala.agents.distributions.TanhNormal`
_ROWS = 256  # of a message that are looked at
_NUMBERS = 4  # of a leaf of an action
_IMPOSSIBLE = math.log(1e-15)  # of a choice...
_DEVIATIONS = 10.0  # ...and the distance from the mean for a number in a box
_EVIDENCE = 30.0  # log(1 / delta)
_WINDOW = 20_000  # actions after which evidence is collected anew
_EDGE = 1.0 - 1e-4  # of (-1, 1), beyond which an action does not tell from which point it came
_QUANTILES = np.array([1e-4, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1 - 1e-4])
_NORMAL = np.array(
    [-3.719016, -2.326348, -1.281552, -0.524401, 0.0, 0.524401, 1.281552, 2.326348, 3.719016]
)
_LEAST_SHARE = 1e-7  # of a quantile: smaller ones are not exact
_ROUNDING = 1e-5  # of an action, in units of half its box: above it actions tell too little
_SHARES = (0.02, 0.2, 0.9)  # of any choice, beside the policy, in other policies


class _Drawn(NamedTuple):
    """What was drawn for one number of an action, in N rows."""

    log_probs: np.ndarray  # [N, n], of the choices, or of the quantiles
    chosen: np.ndarray  # [N]
    far: np.ndarray  # [N] bool: beyond everything that is drawn


class Evidence:
    """Collects evidence against the policies that one incarnation of an actor sends."""

    def __init__(self) -> None:
        self.turns = 0
        """Messages that were looked at."""
        self._actions = 0
        # Log-ratios of other policies: any choice with three shares, a sharper one, that of the row
        # before; and that of the row after, which is no evidence but says what went wrong.
        self._sums = np.zeros(len(_SHARES) + 3)

    def add(self, ratios: np.ndarray) -> Mistake | None:
        """Adds log-ratios [N, 6]. Returns a mistake once the evidence is overwhelming."""
        self._actions += len(ratios)
        self._sums += ratios.sum(axis=0)
        *others, after = self._sums
        evidence = _log_mean_exp(np.array(others))
        if evidence <= _EVIDENCE:
            if self._actions >= _WINDOW:
                self._actions, self._sums = 0, np.zeros_like(self._sums)
            return None
        actions, before, best = self._actions, others[-1], max(others)
        self._actions, self._sums = 0, np.zeros_like(self._sums)
        of = f"of {actions} actions"
        if before >= best - 1.0 or after > max(best, _EVIDENCE):
            where = "before" if before >= after else "after"
            return Mistake(
                Kind.SHIFTED_ACTIONS,
                f"{of} most fit output/policy of the row {where}: the action in row t is the one "
                "that led to row t, drawn from the policy in row t.",
            )
        return Mistake(
            Kind.BEHAVIOUR_POLICY,
            f"{of} too many are improbable, or too few, by output/policy: send the parameters that "
            "each action was drawn from.",
        )


class _Part(NamedTuple):
    """What is chosen for one leaf of an action, independently of the others."""

    name: str  # of the leaf
    space: gym.Space
    sizes: list[int]  # of its choices; empty for a box
    num_parameters: int


class Actions:
    """Compares actions with policies.

    Args:
      agent: its settings.
      action_space: of one environment.
    """

    def __init__(self, agent: AgentConfig, action_space: gym.Space) -> None:
        self._is_greedy = agent.policy == "epsilon_greedy"
        self._warms_up = agent.random_warm_up
        self._parts = []
        for name, leaf in leaves(action_space, "output/action", is_sorted=False):
            sizes = choices(leaf)
            count = sum(sizes) + self._is_greedy if sizes else 2 * math.prod(leaf.shape or ())
            self._parts.append(_Part(name, leaf, sizes, count))

    def check(
        self, message: pb.Unrolls, arrays: Mapping[str, np.ndarray], evidence: Evidence
    ) -> list[Mistake]:
        """Checks some of the actions in a message.

        Args:
          message: its tensors are not read.
          arrays: [T + 1, E, ...] of the message by name.
          evidence: against its sender; is added to.
        """
        if self._warms_up and message.parameter_version == 0:
            return []
        step_type = arrays["timestep/step_type"]
        length, num_envs = step_type.shape[0] - 1, step_type.shape[1]
        count = min(num_envs, max(1, _ROWS // length))
        envs = (evidence.turns * count + np.arange(count)) % num_envs
        evidence.turns += 1
        acts = (step_type[1:, envs] != _FIRST).reshape(-1)  # elsewhere the action is ignored
        parameters = _rows(arrays["output/policy"], envs)
        impossible, ratios, at = 0, [np.zeros((0, len(_SHARES) + 3))], 0
        for part in self._parts:
            its = parameters[:, at : at + part.num_parameters]
            at += part.num_parameters
            for drawn in self._drawn(part, its, _rows(arrays[part.name], envs)):
                found, its_ratios = _compared(drawn, length, count, acts)
                impossible += found
                ratios.append(its_ratios)
        mistakes = []
        if impossible:
            detail = (
                f"{impossible} actions are impossible by output/policy of their row: the action "
                "in row t is drawn from the policy in row t, of choices that are not masked."
            )
            mistakes.append(Mistake(Kind.IMPOSSIBLE_ACTION, detail))
        if (mistake := evidence.add(np.concatenate(ratios))) is not None:
            mistakes.append(mistake)
        return mistakes

    def _drawn(self, part: _Part, parameters: np.ndarray, action: np.ndarray) -> Sequence[_Drawn]:
        """Returns what was drawn for the first numbers of an action [N, ...]."""
        parameters = parameters.astype(np.float64)
        if not part.sizes:
            return _drawn_in_box(part.space, parameters, action)
        if self._is_greedy:
            log_probs = [_epsilon_greedy(parameters[:, :-1], parameters[:, -1:])]
        else:
            ends = np.cumsum(part.sizes)[:-1]
            log_probs = [_log_softmax(each) for each in np.split(parameters, ends, axis=-1)]
        start = np.reshape(getattr(part.space, "start", 0), -1)
        chosen = action.reshape(len(action), -1) - start
        never = np.zeros(len(chosen), bool)
        # Row 0 of the very first unroll may hold anything.
        return [
            _Drawn(each, np.clip(chosen[:, i], 0, each.shape[1] - 1), never)
            for i, each in enumerate(log_probs[:_NUMBERS])
        ]


def _rows(array: np.ndarray, envs: np.ndarray) -> np.ndarray:
    """[T + 1, E, ...] as [(T + 1) * K, ...] of K environments."""
    chosen = array[:, envs]
    return chosen.reshape(-1, *chosen.shape[2:])


def _compared(drawn: _Drawn, length: int, count: int, acts: np.ndarray) -> tuple[int, np.ndarray]:
    """Returns how many actions are impossible, and the log-ratios of the others: [M, 6]."""
    n = drawn.log_probs.shape[-1]
    every = drawn.log_probs.reshape(length + 1, count, n)
    now, before = every[1:].reshape(-1, n), every[:-1].reshape(-1, n)
    after = np.concatenate([every[2:], every[-1:]]).reshape(-1, n)
    chosen = drawn.chosen.reshape(length + 1, count)[1:].reshape(-1, 1)
    far = drawn.far.reshape(length + 1, count)[1:].reshape(-1)

    def log_prob(of: np.ndarray) -> np.ndarray:
        return np.take_along_axis(of, chosen, axis=-1)[:, 0]

    log_p = log_prob(now)
    impossible = acts & (far | (log_p < _IMPOSSIBLE))
    used = acts & ~impossible
    any_one = -np.log((now > _IMPOSSIBLE).sum(axis=-1))  # of the choices that there are
    sharper = 2.0 * log_p - np.log(np.exp(2.0 * now).sum(axis=-1))
    others = [
        *(np.logaddexp(log_p + math.log1p(-share), any_one + math.log(share)) for share in _SHARES),
        sharper,
        np.logaddexp(log_prob(before) + math.log(0.9), any_one + math.log(0.1)),
        np.logaddexp(log_prob(after) + math.log(0.9), any_one + math.log(0.1)),
    ]
    with np.errstate(invalid="ignore"):
        ratios = np.stack(others, axis=-1) - log_p[:, np.newaxis]
    return int(impossible.sum()), ratios[used]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _epsilon_greedy(values: np.ndarray, epsilon: np.ndarray) -> np.ndarray:
    """Returns log-probabilities [N, n] of the best choice or, with probability epsilon, any."""
    allowed = values > 0.5 * FORBIDDEN
    any_one = allowed / np.maximum(allowed.sum(axis=-1, keepdims=True), 1)
    best = np.arange(values.shape[1]) == values.argmax(axis=-1)[:, np.newaxis]
    with np.errstate(divide="ignore"):
        result: np.ndarray = np.log((1.0 - epsilon) * best + epsilon * any_one)
    return result


def _drawn_in_box(space: gym.Space, parameters: np.ndarray, action: np.ndarray) -> Sequence[_Drawn]:
    """Returns from which quantiles of their Gaussians, squashed by tanh, actions came."""
    low, high = (np.float64(bound).reshape(-1) for bound in limits(space))
    centre, half_width = high / 2 + low / 2, high / 2 - low / 2
    offset = np.abs(centre / half_width).max(initial=0.0)
    if np.finfo(action.dtype).eps * (1.0 + offset) > _ROUNDING:
        return []
    means, unbounded = np.split(parameters, 2, axis=-1)
    least, most = _LOG_DEVIATIONS
    with np.errstate(over="ignore"):
        share = 1.0 / (1.0 + np.exp(-(unbounded + math.log(-least / most))))
    deviations = np.exp(least + (most - least) * share)
    units = np.clip((action.reshape(len(action), -1) - centre) / half_width, -1.0, 1.0)
    of_numbers = zip(means.T, deviations.T, units.T, strict=True)
    return [_quantiles(*each) for each in itertools.islice(of_numbers, _NUMBERS)]


def _quantiles(mean: np.ndarray, deviation: np.ndarray, unit: np.ndarray) -> _Drawn:
    """Which quantile of their Gaussian actions came from; all [N].

    At an edge of the box an action tells only from which side of the edge it came. So quantiles
    end at the edge, and what is beyond it belongs to the last one.
    """
    edge = math.atanh(_EDGE)
    point = np.arctanh(np.clip(unit, -_EDGE, _EDGE))
    ends = np.clip(mean[:, np.newaxis] + deviation[:, np.newaxis] * _NORMAL, -edge, edge)
    below = _normal_cdf((ends - mean[:, np.newaxis]) / deviation[:, np.newaxis])
    below = np.where(np.abs(ends) < edge, _QUANTILES, below)
    shares = np.diff(below, axis=-1, prepend=0.0, append=1.0)
    is_at_edge = np.abs(unit) >= _EDGE
    beyond = np.where(is_at_edge, np.copysign(np.inf, unit), point)
    chosen = (beyond[:, np.newaxis] > ends).sum(axis=-1)
    log_shares = np.log(np.maximum(shares, _LEAST_SHARE))
    distance = np.abs(point - mean) / deviation
    is_past = is_at_edge & (
        np.sign(unit) * (mean - point) > 0.0
    )  # the mean is beyond the edge, too
    return _Drawn(log_shares, chosen, (distance > _DEVIATIONS) & ~is_past)


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun 1964, 26.2.17: exact to 1e-7."""
    t = 1.0 / (1.0 + 0.2316419 * np.abs(x))
    tail = (
        np.exp(-0.5 * x**2)
        / math.sqrt(2.0 * math.pi)
        * t
        * (
            0.319381530
            + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
        )
    )
    return np.where(x > 0.0, 1.0 - tail, tail)


def _log_mean_exp(x: np.ndarray) -> float:
    largest = x.max()
    return float(largest + math.log(np.exp(x - largest).mean()))
