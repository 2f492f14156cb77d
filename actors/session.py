"""An actor's session with the learner, as state without threads, gRPC, clock or metrics.

Events are method calls with the time: a join was answered, a receipt came, the connection was lost,
unrolls are ready. The results tell what to do next: a message to send, a request to make, the time
to wait before the next join. `actors.connection` and its clients make the calls, one at a time, and
carry out the results. The rules are those of docs/wire-protocol.md.
"""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

from impala.runtime.backoff import Backoff
from impala.runtime.installation import VERSION
from impala.types import Parameters
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

BACKOFF = Backoff(0.1, 10.0)

# gRPC statuses that another attempt would not change.
_REFUSALS = {
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "UNIMPLEMENTED",
}
# Rejections after which the actor has to join again before it sends anything. A quarantined actor
# learns for how long when it joins.
_REASONS_TO_JOIN = {
    *(pb.REASON_FINGERPRINT, pb.REASON_NUM_ENVS),
    *(pb.REASON_QUARANTINED, pb.REASON_SEQUENCE),
}
_TAKEN = {pb.STATUS_ACCEPTED, pb.STATUS_DUPLICATE}
_STATUSES = {number: name.removeprefix("STATUS_").lower() for name, number in pb.Status.items()}


class LearnerError(Exception):
    """Working with the learner is impossible; the message explains why."""


class LearnerRefused(LearnerError):
    """The learner refused a call, with its own message."""


class LearnerChanged(LearnerError):
    """Another run answers at the same address, or the same run with other limits."""


class LearnerAway(LearnerError):
    """The learner did not come back within `reconnect_timeout`."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a call failed."""

    code: str  # the name of a gRPC status
    details: str

    def __str__(self) -> str:
        return f"{self.code}: {self.details}"

    @property
    def is_refusal(self) -> bool:
        """Whether another attempt would have the same result."""
        return self.code in _REFUSALS


class Receipted(NamedTuple):
    """The content of a receipt for a message."""

    status: str  # accepted, duplicate, rejected, finished or, from a newer learner, unknown
    num_unrolls: int
    seconds: float  # from message to receipt


class Pull(NamedTuple):
    """A request for parameters newer than those held."""

    connection: int  # over which it is made
    request: pb.GetParametersRequest


class Acknowledged(NamedTuple):
    """How far this incarnation's messages are acknowledged, for the next join."""

    sequence: int = 0
    unrolls: int = 0  # accepted up to that message
    proof: bytes = b""  # MAC of both, by the learner that gave the receipt


class _Queued(NamedTuple):
    """A message without a receipt."""

    sequence: int
    num_envs: int
    data: bytes  # the whole message
    made: float  # when


class Outbox:
    """Messages without a receipt, in the order of their numbers 1, 2, 3, ..."""

    def __init__(self) -> None:
        self.acknowledged = Acknowledged()
        self._sequence = 0  # of the newest message
        self.most_envs = 0  # in a message so far
        self._messages: collections.deque[_Queued] = collections.deque()
        self._num_sent = 0  # messages, from the left, sent over the present connection

    def __len__(self) -> int:
        return len(self._messages)

    def append(
        self, message: pb.Unrolls, now: float, tensors: Sequence[bytes | memoryview]
    ) -> None:
        """Gives the message its number and queues a copy of it, with its tensors."""
        self._sequence += 1
        message.sequence = self._sequence
        self.most_envs = max(self.most_envs, message.num_envs)
        data = b"".join([*tensors, message.SerializeToString()])
        self._messages.append(_Queued(self._sequence, message.num_envs, data, now))

    def rewind(self) -> None:
        """Marks all messages as unsent, for a new connection."""
        self._num_sent = 0

    def next(self) -> bytes:
        """Returns the next message to send."""
        self._num_sent += 1
        return self._messages[self._num_sent - 1].data

    def has_next(self, most: int) -> bool:
        """Returns whether there is a message to send, and fewer than `most` lack a receipt."""
        return self._num_sent < min(most, len(self._messages))

    def numbers(self) -> list[int]:
        """Returns the numbers of the messages."""
        return [message.sequence for message in self._messages]

    def acknowledge(self, receipt: pb.Receipt) -> _Queued | None:
        """Removes the message of a receipt, and returns it.

        Returns None, and changes nothing, if the receipt is not for the oldest message sent.
        """
        if not self._num_sent or receipt.sequence != self._messages[0].sequence:
            return None
        message = self._messages.popleft()
        self._num_sent -= 1
        unrolls = self.acknowledged.unrolls
        if receipt.proof:
            unrolls = receipt.acknowledged_unrolls
        elif receipt.status in _TAKEN:  # a learner that sends no proof leaves the counting to us
            unrolls += message.num_envs
        self.acknowledged = Acknowledged(receipt.sequence, unrolls, receipt.proof)
        return message

    def largest(self) -> int:
        """Returns the bytes of the largest message."""
        return max((len(message.data) for message in self._messages), default=0)

    def clear(self) -> None:
        """Drops all messages."""
        self._messages.clear()
        self._num_sent = 0


class _Absence:
    """Tracks how long the learner has been away, and the backoff before the next attempt.

    Args:
      learner: its address, for error messages.
      timeout: seconds after which to give up; None: never.
      now: the start of the first absence.
    """

    def __init__(self, learner: str, timeout: float | None, now: float) -> None:
        self._learner = learner
        self._timeout = timeout
        self._since = now
        self._joined: float | None = None  # None while it is away
        self._failures = 0  # since a connection worked for a while

    def end(self, now: float) -> None:
        """Notes that a join succeeded."""
        self._joined = now

    def go_on(self, now: float, is_there: bool) -> float:
        """Notes that the learner is away, or there but to be asked later. Returns the seconds.

        Raises:
          LearnerAway: it has been away for too long.
        """
        if self._joined is not None:
            if now - self._joined > BACKOFF.pause(self._failures + 1):
                self._failures = 0
            self._since, self._joined = now, None
        if is_there:
            self._since = now
        waited = now - self._since
        if self._timeout is not None and waited > self._timeout:
            raise LearnerAway(
                f"no learner at {self._learner} for {waited:.1f} s, "
                f"over the reconnect timeout of {self._timeout:g} s"
            )
        self._failures += 1
        return BACKOFF.pause(self._failures)


class Session:
    """The state between an actor and the learner, over any number of connections.

    Connections are numbered by their joins, 1, 2, ...; the number tells late events of earlier
    ones apart. The present connection ends by `lost`, or earlier by something that the learner
    sent: `is_connected` is then false, and the caller closes its side and calls `lost`.

    Args:
      learner: its address, for error messages.
      name: unique in the fleet, 1 to 200 characters.
      incarnation: random, not 0.
      role: whether unrolls will be sent.
      reconnect_timeout: seconds without a learner after which to give up; None: never.
      gives_signs_of_life: whether its pulls name the actor, which then counts as active.
      now: here and in all methods, seconds of any monotonic clock.
    """

    def __init__(
        self,
        learner: str,
        *,
        name: str,
        incarnation: int,
        role: "pb.Role" = pb.ROLE_ACTOR,
        reconnect_timeout: float | None = None,
        gives_signs_of_life: bool = False,
        now: float,
    ) -> None:
        self.reply: pb.JoinReply | None = None  # of the last join
        self.connection = 0  # number of the last join
        self.finished = False  # training has ended
        self.task = 0  # the next one to play
        self.parameters: Parameters | None = None  # the newest
        self.outbox = Outbox()
        self._learner = learner
        self._is_reported = False  # that it is away
        self.name = name
        self.incarnation = incarnation
        self._role = role
        self._gives_signs_of_life = gives_signs_of_life
        self._absence = _Absence(learner, reconnect_timeout, now)
        self.is_open = False  # whether the learner knows this actor
        self._learner_incarnation = 0  # from its last message
        self.wants_parameters = False  # set it to have newer ones pulled
        self.permit: pb.Permit | None = None  # for the next round of unrolls, with `parameters`
        self._wanted = 0  # unrolls of a round for which a permit is wanted; 0: none is
        self._round = 0  # that has begun last
        self._rejected: collections.Counter[int] = collections.Counter()  # by reason
        self._last_message = now

    # Connections.

    def join_request(self) -> pb.JoinRequest:
        """Returns the request of the next join."""
        sequence, unrolls, proof = self.outbox.acknowledged
        return pb.JoinRequest(
            protocol=codec.PROTOCOL_VERSION,
            actor=self.name,
            incarnation=self.incarnation,
            role=self._role,
            acknowledged_sequence=sequence,
            acknowledged_unrolls=unrolls,
            proof=proof,
            version=f"impala {VERSION}",
        )

    def joined(self, reply: pb.JoinReply, now: float) -> None:
        """Begins a connection; messages without a receipt are to be sent again, in order.

        Raises:
          LearnerChanged: the actor was built for a different run.
        """
        if reply.finished:
            self.finish()
            return
        self._check_same(reply)
        if self.reply is None or reply.learner_incarnation != self.reply.learner_incarnation:
            self.permit = None  # that of the learner before is worthless
        self.reply = reply
        self.connection += 1
        self.task = reply.task
        self.outbox.rewind()
        self.is_open = True
        self._learner_incarnation = reply.learner_incarnation
        self._absence.end(now)
        self._is_reported = False

    def is_connected(self, connection: int) -> bool:
        """Returns whether this connection is the present one and still in use."""
        return self.is_open and connection == self.connection

    def lost(self, failure: Failure | None, now: float) -> float:
        """Notes a failed join, or how the connection ended (None: normally).

        Returns:
          Seconds until the next join, at most.

        Raises:
          LearnerRefused: the learner refused, and would refuse again.
          LearnerAway: the learner has been away for too long.
        """
        self.is_open = False
        # The learner asks to wait: this actor is quarantined, or there are too many requests.
        is_there = failure is not None and failure.code == "RESOURCE_EXHAUSTED"
        if failure is not None:
            self.raise_if_refused(failure)
            if not self._is_reported:
                self._is_reported = True
                what = "waits for" if self.reply is None or is_there else "lost"
                _log.warning("%s %s the learner at %s: %s", self.name, what, self._learner, failure)
        return self._absence.go_on(now, is_there)

    def raise_if_refused(self, failure: Failure) -> None:
        """Raises `LearnerRefused` if another attempt would have the same result."""
        if failure.is_refusal:
            raise LearnerRefused(f"the learner at {self._learner} refused {self.name}: {failure}")

    # Unrolls and their receipts.

    def has_room(self) -> bool:
        """Returns whether one more message may be without a receipt."""
        return len(self.outbox) < self._most_in_flight()

    def append(
        self,
        message: pb.Unrolls,
        now: float,
        waited: float,
        tensors: Sequence[bytes | memoryview] = (),
    ) -> None:
        """Queues a message that lacks only its number and times; drops it after training's end.

        Args:
          message: its number and times are set here.
          now: when it was made.
          waited: seconds that the actor has waited since its previous message, on average over its
            players.
          tensors: of the message if it holds none itself, from `codec.fields`. They are copied.
        """
        if self.finished:
            return
        message.elapsed_seconds = now - self._last_message
        message.waited_seconds = min(waited, message.elapsed_seconds)
        self._last_message = now
        self.outbox.append(message, now, tensors)

    def has_message(self, connection: int) -> bool:
        """Returns whether there is a message to send over this connection now."""
        return self.is_connected(connection) and self.outbox.has_next(self._most_in_flight())

    def next_message(self, connection: int) -> bytes | None:
        """Returns the next message to send over this connection; None if there is none now."""
        return self.outbox.next() if self.has_message(connection) else None

    def receive(self, receipt: pb.Receipt, now: float) -> Receipted | None:
        """Accounts for a receipt. Returns None if its message is still without one.

        Raises:
          LearnerError: there is no such message.
        """
        if self.finished:  # a pull has already reported the end of training
            return None
        if receipt.reason == pb.REASON_UNKNOWN_ACTOR:
            self.is_open = False
            return None
        message = self.outbox.acknowledge(receipt)
        if message is None:
            raise LearnerError(
                f"the learner at {self._learner} sent a receipt for message {receipt.sequence}; "
                f"those without one are {self.outbox.numbers()}"
            )
        if not self.needs_permits:  # otherwise a permit says what is to be played
            self.task = receipt.task
        self._learner_incarnation = receipt.learner_incarnation
        if receipt.status == pb.STATUS_FINISHED:
            self.finish()
        elif receipt.status not in _TAKEN:
            self._log_rejection(receipt)
            if receipt.reason in _REASONS_TO_JOIN:
                self.is_open = False
            if receipt.reason == pb.REASON_VERSION:
                self.wants_parameters = True
        status = _STATUSES.get(receipt.status, "unknown")  # of a newer minor version
        return Receipted(status, message.num_envs, now - message.made)

    # Parameters, and permits to make a round of unrolls with them.

    @property
    def needs_permits(self) -> bool:
        """Whether a round of unrolls may only begin with a permit."""
        return self.reply is not None and self.reply.needs_permits

    def want_permit(self, unrolls: int) -> None:
        """Requests a permit for the next round, of so many unrolls."""
        self._wanted = unrolls

    def begin_round(self) -> pb.Permit:
        """Begins the round that there is a permit for; it is used up."""
        permit, self.permit = self.permit, None
        assert permit is not None
        self._wanted = 0
        self._round += 1
        self.task = permit.task
        return permit

    def must_pull(self) -> bool:
        """Returns whether to pull now rather than later."""
        if self.needs_permits:
            return self._lacks_permit()
        held = self.parameters
        return (
            self.wants_parameters or held is None or held.incarnation != self._learner_incarnation
        )

    def pull(self) -> Pull:
        """Returns the request for newer parameters, or for a permit."""
        self.wants_parameters = False
        held = self.parameters
        request = pb.GetParametersRequest(
            learner_incarnation=0 if held is None else held.incarnation,
            newer_than=0 if held is None else held.version,
        )
        if self.needs_permits or self._gives_signs_of_life:
            request.actor, request.incarnation = self.name, self.incarnation
        if self.needs_permits and self._lacks_permit():
            request.round, request.unrolls = self._round + 1, self._wanted
        return Pull(self.connection, request)

    def pulled(self, pull: Pull, reply: pb.GetParametersReply) -> bool:
        """Takes a reply to `pull`. Returns whether it held what was asked for and can be used.

        Raises:
          CodecError: they do not match the specs of the JoinReply.
        """
        if self.reply is None or pull.connection != self.connection:
            return False  # from the previous learner
        newest = reply.parameters if reply.HasField("parameters") else None
        if newest is not None:
            if newest.learner_incarnation != self.reply.learner_incarnation:
                # Another learner, whose specs are unknown before the next join.
                self._learner_incarnation = newest.learner_incarnation
                self.is_open = False
                return False
            held = self.parameters
            if (
                held is not None
                and held.incarnation == newest.learner_incarnation
                and held.version >= newest.version
                and not self.needs_permits  # which says what has to act, however old
            ):
                newest = None  # another actor of this host was faster
            else:
                self.parameters = self.parameters_in(newest)
        if reply.HasField("permit") and pull.request.round == self._round + 1:
            self.permit = reply.permit
        if reply.finished:
            self.finish()
        if self.needs_permits:
            return not pull.request.round or self.permit is not None
        return newest is not None

    def parameters_in(self, message: pb.Parameters) -> Parameters:
        """Returns the parameters in a message of the learner that was joined last.

        Raises:
          CodecError: they do not match the specs of the JoinReply.
        """
        assert self.reply is not None
        return Parameters(
            incarnation=message.learner_incarnation,
            version=message.version,
            progress=message.progress,
            frames=message.frames,
            values=codec.decode(message.tensors, self.reply.parameter_specs),
        )

    def forgotten(self, connection: int) -> None:
        """Notes that the learner did not know this actor, which has to join again."""
        if connection == self.connection:
            self.is_open = False

    def finish(self) -> None:
        """Notes the end of training."""
        self.finished = True
        self.outbox.clear()
        self.is_open = False

    def _lacks_permit(self) -> bool:
        return self._wanted > 0 and self.permit is None

    def _most_in_flight(self) -> int:
        """Returns how many messages may be without a receipt."""
        return 0 if self.reply is None else max(1, self.reply.max_unrolls_in_flight)

    def _check_same(self, reply: pb.JoinReply) -> None:
        """Raises `LearnerChanged` if the actor, or a queued message, does not fit `reply`."""
        before = self.reply
        if before is None:
            return
        if before.fingerprint != reply.fingerprint:
            raise LearnerChanged(
                f"the learner at {self._learner} came back with another environment, agent or "
                f"unroll length: this actor was built for fingerprint {before.fingerprint}, the "
                f"learner now has {reply.fingerprint}; start the actor again"
            )
        limit, sent = reply.limits.num_envs, self.outbox.most_envs
        if limit < sent:
            raise LearnerChanged(
                f"the learner at {self._learner} takes up to {limit} environments in a message, "
                f"this actor has sent {sent}: start the actor again"
            )
        if (largest := self.outbox.largest()) > reply.max_message_bytes:
            raise LearnerChanged(
                f"the learner at {self._learner} came back and takes {reply.max_message_bytes} "
                f"bytes, a message of this actor without a receipt has {largest}: start the actor "
                "again, with fewer environments per group"
            )

    def _log_rejection(self, receipt: pb.Receipt) -> None:
        """Logs the 1st, 2nd, 4th, 8th, ... rejection of each reason."""
        self._rejected[receipt.reason] += 1
        count = self._rejected[receipt.reason]
        if count & (count - 1) == 0:
            known = receipt.reason in pb.Reason.values()
            _log.warning(
                "%s: message %d was rejected (%s, number %d): %s",
                *(self.name, receipt.sequence, pb.Reason.Name(receipt.reason) if known else "?"),
                *(count, receipt.detail),
            )
