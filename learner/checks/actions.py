"""Checks of actions against the policy that they are said to be drawn from.

A sequence of actions is evidence against its policy p if another policy q, known before each action
was drawn, makes it much more probable. For an honest actor the product of q(a) / p(a) has the
expectation 1 at all times, so it ever exceeds 1 / delta with a probability of delta at most
(Ville's inequality): an honest actor is hardly ever named, whatever its policy and however long it
acts. Continuous actions are compared by the quantile of their policy that they fall into.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from learner.checks.mistakes import Kind, Mistake
from protos import policy
from protos.impala.v1 import learner_pb2 as pb
from protos.network import NotDescribed

_FIRST = 0  # timestep/step_type
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


class Actions:
    """Compares actions with policies.

    Args:
      reply: of a JoinReply.
    """

    def __init__(self, reply: pb.JoinReply) -> None:
        try:
            self._factors = policy.factors(reply)
        except NotDescribed:
            self._factors = []
        self._warms_up = reply.settings.agent.random_warm_up

    def check(
        self, message: pb.Unrolls, arrays: Mapping[str, np.ndarray], evidence: Evidence
    ) -> list[Mistake]:
        """Checks some of the actions in a message.

        Args:
          message: its tensors are not read.
          arrays: [T + 1, E, ...] of the message by name.
          evidence: against its sender; is added to.
        """
        if not self._factors or (self._warms_up and message.parameter_version == 0):
            return []
        step_type = arrays["timestep/step_type"]
        length, num_envs = step_type.shape[0] - 1, step_type.shape[1]
        count = min(num_envs, max(1, _ROWS // length))
        envs = (evidence.turns * count + np.arange(count)) % num_envs
        evidence.turns += 1
        acts = (step_type[1:, envs] != _FIRST).reshape(-1)  # elsewhere the action is ignored
        parameters = _rows(arrays["output/policy"], envs)
        impossible, ratios = 0, [np.zeros((0, len(_SHARES) + 3))]
        for factor, its in zip(self._factors, policy.split(self._factors, parameters), strict=True):
            for drawn in _drawn(factor, its, _rows(arrays[factor.action], envs)):
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


def _drawn(factor: policy.Factor, parameters: np.ndarray, action: np.ndarray) -> Sequence[_Drawn]:
    match factor:
        case policy.Choices():
            chosen = factor.chosen(action)
            never = np.zeros(len(chosen), bool)
            log_probs = factor.log_probs(parameters)[:_NUMBERS]
            # Row 0 of the very first unroll may hold anything.
            return [
                _Drawn(each, np.clip(chosen[:, i], 0, each.shape[1] - 1), never)
                for i, each in enumerate(log_probs)
            ]
        case policy.TanhNormal():
            if factor.rounding(action.dtype) > _ROUNDING:
                return []
            means, log_deviations = factor.gaussian(parameters)
            units = np.clip(factor.unit(action), -1.0, 1.0)
            of_numbers = (means.T, np.exp(log_deviations).T, units.T)
            return [_quantiles(*each) for each in zip(*of_numbers, strict=True)][:_NUMBERS]
    return []


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
