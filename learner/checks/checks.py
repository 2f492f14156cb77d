"""All checks of a message, and what is remembered of each actor for them."""

import collections
import dataclasses
from collections.abc import Sequence

import gymnasium as gym
import numpy as np

from impala.config.schema import AgentConfig
from learner.checks import numbers
from learner.checks.actions import Actions, Evidence
from learner.checks.continuity import Continuity
from learner.checks.violations import ProtocolViolation
from protos.impala.v1 import learner_pb2 as pb

_MOST_ENVS = 1_000_000  # environments of all actors together that are remembered
_MOST_SENDERS = 10_000
_EACH_FIRST, _THEN_EVERY = 16, 17  # messages whose numbers and actions are looked at
_TURN = 256  # messages in a row whose episodes are added up: the first of a sender, and...
_TURNS = 4  # ...one turn of these


@dataclasses.dataclass
class _Sender:
    """One incarnation of an actor."""

    continuity: Continuity = dataclasses.field(default_factory=Continuity)
    evidence: Evidence = dataclasses.field(default_factory=Evidence)
    messages: int = 0


class Checks:
    """Checks messages whose shapes and ranges are right.

    Args:
      reply: what the actors of a run were told.
      action_space: of one environment.
      agent: its settings.
    """

    def __init__(self, reply: pb.JoinReply, action_space: gym.Space, agent: AgentConfig) -> None:
        self._names = [spec.name for spec in reply.unroll_specs]
        self._rows = self._names[: len(self._names) - reply.num_core_state_specs]
        self._floats = [
            spec.name
            for spec in reply.unroll_specs
            if spec.dtype in (pb.DTYPE_FLOAT16, pb.DTYPE_FLOAT32, pb.DTYPE_FLOAT64)
        ]
        self._spaces = numbers.Spaces(reply.observation_space)
        self._observation = [space.name for space in reply.observation_space]
        self._actions = Actions(agent, action_space)
        self._senders: collections.OrderedDict[tuple[str, int], _Sender] = collections.OrderedDict()
        self._num_envs = 0  # of all senders

    def check(self, message: pb.Unrolls, arrays: Sequence[np.ndarray]) -> list[ProtocolViolation]:
        """Returns the violations in a message that is the next one of its sender.

        Args:
          message: its tensors are not read.
          arrays: its tensors, decoded: [T + 1, E, ...], then the core state.
        """
        by_name = dict(zip(self._names, arrays, strict=True))
        sender = self._sender(message.actor, message.incarnation)
        adds_up = not sender.messages // _TURN % _TURNS
        before = sender.continuity.num_envs
        violations = sender.continuity.check(message, by_name, self._rows, adds_up)
        self._remember(sender.continuity.num_envs - before)
        if sender.messages < _EACH_FIRST or not sender.messages % _THEN_EVERY:
            for name in self._floats:
                if numbers.is_swapped(by_name[name]):
                    violations = [numbers.byte_order(name)]  # nothing else can be right
                    break
            else:
                outside = (self._spaces.outside(name, by_name[name]) for name in self._observation)
                violations += filter(None, outside)
                violations += self._actions.check(message, by_name, sender.evidence)
        sender.messages += 1
        return violations

    def _sender(self, actor: str, incarnation: int) -> _Sender:
        key = actor, incarnation
        if key not in self._senders:
            self._senders[key] = _Sender()
        self._senders.move_to_end(key)
        return self._senders[key]

    def _remember(self, num_envs: int) -> None:
        """Counts more environments, and forgets the senders that were silent the longest."""
        self._num_envs += num_envs
        while (self._num_envs > _MOST_ENVS and len(self._senders) > 1) or (
            len(self._senders) > _MOST_SENDERS
        ):
            _, forgotten = self._senders.popitem(last=False)
            self._num_envs -= forgotten.continuity.num_envs
