"""Checks of choices against the policy that they are said to be drawn from.

A sequence of actions is evidence against its policy p if another policy q, known before each action
was drawn, makes it much more probable. For an honest actor the product of q(a) / p(a) has the
expectation 1 at all times, so it ever exceeds 1 / delta with a probability of delta at most
(Ville's inequality), whatever its policy and however long it acts.
"""

import math
from collections.abc import Mapping

import gymnasium as gym
import numpy as np

from impala.config.schema import AgentConfig
from impala.environments.spaces import FORBIDDEN, by_size, choices, leaves
from learner.checks.violations import Kind, ProtocolViolation
from protos.impala.v1 import learner_pb2 as pb

_FIRST = 0  # timestep/step_type
_ROWS = 256  # of a message that are looked at
_IMPOSSIBLE = math.log(1e-15)  # of a choice
_EVIDENCE = 30.0  # log(1 / delta)
_WINDOW = 20_000  # actions after which evidence is collected anew
_AT_RANDOM = 0.5  # share of a choice at random in the other policy


class Evidence:
    """Collects evidence against the policies that one incarnation of an actor sends."""

    def __init__(self) -> None:
        self.turns = 0
        """Messages that were looked at."""
        self._actions, self._sum = 0, 0.0

    def add(self, ratios: np.ndarray) -> ProtocolViolation | None:
        """Adds log-ratios [N] of another policy to the actor's.

        Returns:
          A violation once the evidence is overwhelming.
        """
        self._actions += len(ratios)
        self._sum += float(ratios.sum())
        actions, found = self._actions, self._sum > _EVIDENCE
        if found or actions >= _WINDOW:
            self._actions, self._sum = 0, 0.0
        if not found:
            return None
        return ProtocolViolation(
            Kind.BEHAVIOUR_POLICY,
            f"{actions} actions do not fit output/policy: the action in row t is the one that led "
            "to row t, drawn from the policy in row t.",
        )


class Actions:
    """Compares choices with policies; numbers of a Box are not looked at.

    Args:
      agent: its settings.
      action_space: of one environment.
    """

    def __init__(self, agent: AgentConfig, action_space: gym.Space) -> None:
        self._is_greedy = agent.policy == "epsilon_greedy"
        self._warms_up = agent.random_warm_up
        self._parts = []  # name of a leaf, its space, its choices by size, where they begin
        at = 0
        for name, leaf in leaves(action_space, "output/action", is_sorted=False):
            sizes = choices(leaf)
            groups = by_size(np.array(sizes, np.int64) + self._is_greedy)
            self._parts.append((name, leaf, groups, at))
            at += sum(sizes) + self._is_greedy if sizes else 2 * math.prod(leaf.shape or ())

    def check(
        self, message: pb.Unrolls, arrays: Mapping[str, np.ndarray], evidence: Evidence
    ) -> list[ProtocolViolation]:
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
        acts = step_type[1:, envs] != _FIRST  # elsewhere the action is ignored
        policy = arrays["output/policy"][1:, envs].astype(np.float64)
        impossible, ratios = 0, [np.zeros(0)]
        for name, leaf, groups, at in self._parts:
            chosen = arrays[name][1:, envs].reshape(length, count, -1)
            chosen = chosen - np.reshape(getattr(leaf, "start", 0), -1)
            for parts, columns in groups:
                log_probs = self._log_probs(policy[..., at + columns])  # [T, count, K, n]
                possible = np.clip(chosen[..., parts], 0, log_probs.shape[-1] - 1)
                found, its = _compared(log_probs, possible, acts[..., np.newaxis])
                impossible += found
                ratios.append(its)
        violations = []
        if impossible:
            detail = (
                f"{impossible} actions are impossible by output/policy of their row: the action "
                "in row t is drawn from the policy in row t, of choices that are not masked."
            )
            violations.append(ProtocolViolation(Kind.IMPOSSIBLE_ACTION, detail))
        if (violation := evidence.add(np.concatenate(ratios))) is not None:
            violations.append(violation)
        return violations

    def _log_probs(self, parameters: np.ndarray) -> np.ndarray:
        """Returns log-probabilities [..., n] of a categorical or an epsilon-greedy choice."""
        if not self._is_greedy:
            shifted = parameters - parameters.max(axis=-1, keepdims=True)
            return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
        values, epsilon = parameters[..., :-1], parameters[..., -1:]
        allowed = values > 0.5 * FORBIDDEN
        any_choice = allowed / np.maximum(allowed.sum(axis=-1, keepdims=True), 1)
        best = np.arange(values.shape[-1]) == values.argmax(axis=-1)[..., np.newaxis]
        with np.errstate(divide="ignore"):
            # An epsilon outside 0 to 1 would make probabilities negative.
            return np.log(np.maximum((1.0 - epsilon) * best + epsilon * any_choice, 0.0))


def _compared(
    log_probs: np.ndarray, chosen: np.ndarray, acts: np.ndarray
) -> tuple[int, np.ndarray]:
    """Returns how many actions are impossible, and the log-ratios of the others: [M].

    They are of a policy that makes some choices at random to the actor's.
    """
    log_p = np.take_along_axis(log_probs, chosen[..., np.newaxis], axis=-1)[..., 0]
    impossible = acts & (log_p < _IMPOSSIBLE)
    any_choice = -np.log((log_probs > _IMPOSSIBLE).sum(axis=-1))
    other = np.logaddexp(log_p + math.log1p(-_AT_RANDOM), any_choice + math.log(_AT_RANDOM))
    used = acts & ~impossible
    return int(impossible.sum()), other[used] - log_p[used]
