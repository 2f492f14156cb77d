"""Recomputes what an actor's network computed, with the parameters that it says acted.

Actors compute in float32 or bfloat16, in any order, so results differ. How much they may differ is
seen from the network itself: it is computed once more with rounded parameters. That is no bound, so
`recheck` waits for several unrolls in a row that differ.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from learner.checks.mistakes import Kind, Mistake
from protos.impala.v1 import learner_pb2 as pb
from protos.network import Network

_FIRST = 0  # timestep/step_type
_MOST_ROWS = 20  # of an unroll that are recomputed
# The largest honest error is that of bfloat16: a multiple of that of rounding parameters to it.
_ROUNDINGS = 16.0
_LEAST_SHARE, _LEAST = 0.02, 1e-6  # of the size of what is computed, and absolute


class Claim(NamedTuple):
    """What an unroll of one environment says of the network: T + 1 rows."""

    observation: Mapping[str, np.ndarray]  # [T + 1, ...] by the name of the leaf
    step_type: np.ndarray  # [T + 1]
    policy: np.ndarray  # [T + 1, P]
    baseline: np.ndarray  # [T + 1]
    core_state: Sequence[np.ndarray]  # [...] before row 0


class Recomputation:
    """Compares policies and baselines with the network that a reply describes.

    Args:
      reply: of a JoinReply.

    Raises:
      NotDescribed: it has a part of somebody's own.
    """

    def __init__(self, reply: pb.JoinReply) -> None:
        self._network = Network(reply)
        # Where the outputs of each factor stand among all outputs, and among parameters.
        self._factors = []
        output = parameter = 0
        for factor in reply.policy.factors:
            is_logits = factor.family == pb.Policy.FAMILY_CATEGORICAL
            sizes = self._sizes(reply, factor.action) if is_logits else [factor.num_outputs]
            for size in sizes:
                self._factors.append((output, parameter, size, is_logits))
                output, parameter = output + size, parameter + size
            parameter += factor.num_parameters - factor.num_outputs
        self._masked = reply.policy.masked

    @staticmethod
    def _sizes(reply: pb.JoinReply, action: str) -> list[int]:
        return [n for space in reply.action_space if space.name == action for n in space.n]

    def check(self, parameters: Sequence[np.ndarray], claim: Claim) -> Mistake | None:
        """Computes what an unroll's network should have computed.

        Args:
          parameters: of the version that the message names.
          claim: what it sent.
        """
        rows = min(_MOST_ROWS, len(claim.step_type) - 1)
        acts = claim.step_type[1 : rows + 1] != _FIRST  # elsewhere no action was chosen
        if not acts.any():
            return None
        right = self._computed(parameters, claim, rows)
        rounded = self._computed([_rounded(each) for each in parameters], claim, rows)
        sent = _Outputs(claim.policy[1 : rows + 1], claim.baseline[1 : rows + 1])
        is_policy_right = self._agrees(sent.policy, right.policy, rounded.policy, acts)
        if is_policy_right:
            baselines = (each.baseline[acts] for each in (sent, right, rounded))
            if _are_close(*baselines):
                return None
        # Perhaps the output for a row's own observation stands in it, and not in the next one.
        elif self._agrees(claim.policy[:rows], right.policy, rounded.policy, acts):
            return Mistake(
                Kind.SHIFTED_ACTIONS,
                "output/policy in a row is what the network computes of that row's observation: "
                "row t has the action and the outputs that led to it, computed of row t - 1.",
            )
        which = "output/baseline" if is_policy_right else "output/policy"
        return Mistake(
            Kind.BEHAVIOUR_POLICY,
            f"{which} is not what the network computes with the parameters that the message names: "
            "this actor's network, its core state or its preprocessing differs, or it acted with "
            "other parameters.",
        )

    def _computed(self, parameters: Sequence[np.ndarray], claim: Claim, rows: int) -> "_Outputs":
        """Returns what the network computes of the first rows."""
        computed = self._network.unroll(
            parameters,
            {name: leaf[:rows, np.newaxis] for name, leaf in claim.observation.items()},
            claim.step_type[:rows, np.newaxis],
            [leaf[np.newaxis] for leaf in claim.core_state],
        )
        return _Outputs(computed.outputs[:, 0], computed.baseline[:, 0])

    def _agrees(
        self, sent: np.ndarray, right: np.ndarray, rounded: np.ndarray, acts: np.ndarray
    ) -> bool:
        """Whether policies [N, P] are made of outputs [N, O], in the rows that count."""
        for output, parameter, size, is_logits in self._factors:
            found = sent[acts, parameter : parameter + size]
            of_factor = [each[acts, output : output + size] for each in (right, rounded)]
            is_there = of_factor[0] > self._masked / 2.0
            if (is_there != (found > self._masked / 2.0)).any():  # another mask
                return False
            compared = [np.where(is_there, x, 0.0) for x in (found, *of_factor)]
            if is_logits:  # only their differences mean anything
                count = np.maximum(is_there.sum(axis=-1, keepdims=True), 1)
                compared = [
                    np.where(is_there, x - x.sum(axis=-1, keepdims=True) / count, 0.0)
                    for x in compared
                ]
            if not _are_close(*compared):
                return False
        return True


class _Outputs(NamedTuple):
    """Of a network, in N rows."""

    policy: np.ndarray  # [N, O]; or parameters of the policy, [N, P]
    baseline: np.ndarray  # [N]


def _are_close(sent: np.ndarray, right: np.ndarray, rounded: np.ndarray) -> bool:
    """Whether numbers [N, ...] differ in most rows by no more than rounding explains.

    So it has to be in most of the first ones, too, which depend on the core state before them.
    """
    size = float(np.sqrt(np.mean(np.square(right, dtype=np.float64))))
    if not np.isfinite(size):
        return True  # the parameters are bad, and whoever has them
    for rows in (slice(None), slice(max(3, len(sent) // 4))):
        error, rounding = _typical((sent - right)[rows]), _typical((rounded - right)[rows])
        if error > _ROUNDINGS * rounding + _LEAST_SHARE * size + _LEAST:
            return False
    return True


def _typical(errors: np.ndarray) -> float:
    """The median of the largest errors of each row: in some rows, rounding may change much."""
    return float(np.median(np.abs(errors).reshape(len(errors), -1).max(axis=-1)))


def _rounded(array: np.ndarray) -> np.ndarray:
    """Returns float32 numbers with the precision of bfloat16."""
    if array.dtype != np.float32:
        return array
    bits = np.ascontiguousarray(array).view(np.uint32) + np.uint32(0x8000)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32).reshape(array.shape)
