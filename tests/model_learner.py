"""A learner as docs/wire-protocol.md describes it, without network, threads and clock.

Written from that page and not from the service, so that a client which works with one need not work
with the other. What a message holds is abstract: its only tensor is one byte, 0 if the message is
good, else the number of the reason for which it is to be rejected.
"""

import dataclasses
import hashlib
import hmac
from typing import Any

import numpy as np

from protos import codec
from protos.impala.v1 import learner_pb2 as pb

Identity = tuple[str, int]  # name and incarnation of an actor

GOOD = 0
OF_A_NEWER_VERSION = 77  # a reason, with a status, that no client knows

PARAMETERS = (np.zeros(2, np.int64),)  # incarnation and version, so that they can be told apart


class CallFailed(Exception):
    """A call ends with this gRPC status."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclasses.dataclass
class Account:
    """What a learner knows of the unrolls of one incarnation of an actor."""

    # Of each message that was accepted or rejected: how many unrolls were accepted up to it.
    through: dict[int, int] = dataclasses.field(default_factory=lambda: {0: 0})
    partial: int = 0  # unrolls of the next message that were learned from before a crash
    done: int = 0  # unrolls learned from or dropped

    @property
    def last(self) -> int:
        """The number of the last message that was accepted or rejected."""
        return max(self.through)

    @property
    def received(self) -> int:
        return self.through[self.last] + self.partial

    @property
    def queued(self) -> int:
        return self.received - self.done

    def decide(self, sequence: int, num_unrolls: int) -> None:
        """Notes that the next message was accepted, or rejected with 0 unrolls."""
        assert sequence == self.last + 1
        self.through[sequence] = self.through[self.last] + max(self.partial, num_unrolls)
        self.partial = 0

    def saved(self) -> "Account":
        """What a checkpoint holds: nothing that is queued."""
        last = max(sequence for sequence, n in self.through.items() if n <= self.done)
        through = {sequence: n for sequence, n in self.through.items() if sequence <= last}
        return Account(through, self.done - through[last], self.done)


@dataclasses.dataclass
class Checkpoint:
    version: int = 0
    accounts: dict[Identity, Account] = dataclasses.field(default_factory=dict)

    def copy(self) -> "Checkpoint":
        accounts = {identity: account.saved() for identity, account in self.accounts.items()}
        return Checkpoint(self.version, accounts)


@dataclasses.dataclass
class Run:
    """What outlives the processes of a run: its log directory."""

    key: bytes
    fingerprint: str
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    # Of each learner of this run: the highest version that it published.
    published: dict[int, int] = dataclasses.field(default_factory=dict)


class ModelLearner:
    """One process of a learner, which resumes its run's checkpoint.

    Args:
      run: its log directory.
      incarnation: of this process.
      max_in_flight: messages without a receipt that an actor may have.
    """

    capacity = 6  # unrolls that may be queued

    def __init__(self, run: Run, incarnation: int, max_in_flight: int) -> None:
        self.run = run
        self.incarnation = incarnation
        self.max_in_flight = max_in_flight
        self.finished = False
        self.quarantined = False
        self.state = run.checkpoint.copy()
        self.joined: dict[str, int] = {}  # name -> incarnation
        run.published[incarnation] = self.state.version

    # What it does by itself.

    def learn(self, num_unrolls: int) -> None:
        """Learns from queued unrolls, oldest first, and publishes."""
        for account in self.state.accounts.values():
            taken = min(num_unrolls, account.queued)
            account.done += taken
            num_unrolls -= taken
        self.state.version += 1
        self.run.published[self.incarnation] = self.state.version

    def save(self) -> None:
        self.run.checkpoint = self.state.copy()

    def stop(self) -> None:
        """Drops what is queued, counted, and saves."""
        for account in self.state.accounts.values():
            account.done = account.received
        self.save()

    def finish(self) -> None:
        self.stop()
        self.finished = True

    # What actors ask.

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        assert request.incarnation and request.protocol.major == codec.PROTOCOL_VERSION.major
        if self.quarantined:
            raise CallFailed("RESOURCE_EXHAUSTED")
        identity = request.actor, request.incarnation
        self.joined[request.actor] = request.incarnation
        account = self.state.accounts.setdefault(identity, Account())
        sequence, unrolls = request.acknowledged_sequence, request.acknowledged_unrolls
        giver = self._giver(request)
        if giver == self.incarnation:
            assert account.through[sequence] == unrolls, "this learner never said so"
        elif sequence > account.last:
            if giver is not None:  # what a crash lost: received and dropped
                assert unrolls >= account.received
                account.done += unrolls - account.received
            else:
                unrolls = account.received
            account.through[sequence] = unrolls
            account.partial = 0
        return pb.JoinReply(
            protocol=codec.PROTOCOL_VERSION,
            learner_incarnation=self.incarnation,
            fingerprint=self.run.fingerprint,
            parameter_specs=codec.specs(PARAMETERS),
            max_unrolls_in_flight=self.max_in_flight,
            max_message_bytes=1000,
            limits=pb.Limits(num_envs=1000),
            finished=self.finished,
            task=self.state.version % 3,
        )

    def receive(self, message: pb.Unrolls) -> pb.Receipt | None:
        """The receipt of a message; None if it has to wait for room in the queue."""
        if self.joined.get(message.actor) != message.incarnation:
            return self._receipt(message, pb.STATUS_REJECTED, pb.REASON_UNKNOWN_ACTOR)
        account = self.state.accounts[message.actor, message.incarnation]
        if self.finished:
            return self._receipt(message, pb.STATUS_FINISHED)
        if message.sequence <= account.last:
            return self._receipt(message, pb.STATUS_DUPLICATE)
        if message.sequence != account.last + 1:
            return self._receipt(message, pb.STATUS_REJECTED, pb.REASON_SEQUENCE)
        if reason := self._reason(message):
            account.decide(message.sequence, 0)
            status = 9 if reason == OF_A_NEWER_VERSION else pb.STATUS_REJECTED
            return self._receipt(message, status, reason)
        if account.queued and account.queued + message.num_envs > self.capacity:
            return None
        account.decide(message.sequence, message.num_envs)
        return self._receipt(message, pb.STATUS_ACCEPTED)

    def parameters(self, request: pb.GetParametersRequest) -> pb.GetParametersReply:
        reply = pb.GetParametersReply(finished=self.finished)
        held = request.learner_incarnation, request.newer_than
        if held < (self.incarnation, self.state.version) or held[0] != self.incarnation:
            values = [np.array([self.incarnation, self.state.version])]
            reply.parameters.CopyFrom(
                pb.Parameters(
                    learner_incarnation=self.incarnation,
                    version=self.state.version,
                    tensors=codec.encode(values),
                )
            )
        return reply

    def _reason(self, message: pb.Unrolls) -> int:
        """Why a message is rejected; 0 if it is not."""
        if self.quarantined:
            return pb.REASON_QUARANTINED
        assert message.fingerprint == self.run.fingerprint
        [kind] = message.tensors[0]
        newest = self.run.published.get(message.learner_incarnation, -1)
        if not kind and message.parameter_version > newest:
            return pb.REASON_VERSION
        return kind

    def _receipt(self, message: pb.Unrolls, status: Any, reason: Any = 0) -> pb.Receipt:
        receipt = pb.Receipt(
            sequence=message.sequence,
            learner_incarnation=self.incarnation,
            newest_version=self.state.version,
            task=self.state.version % 3,
        )
        receipt.status, receipt.reason = status, reason  # also such as have no name
        if reason != pb.REASON_UNKNOWN_ACTOR:
            account = self.state.accounts[message.actor, message.incarnation]
            if (unrolls := account.through.get(message.sequence)) is not None:
                receipt.acknowledged_unrolls = unrolls
                identity = message.actor, message.incarnation
                mac = self._mac(identity, message.sequence, unrolls, self.incarnation)
                receipt.proof = b"%d:" % self.incarnation + mac
        return receipt

    def _giver(self, request: pb.JoinRequest) -> int | None:
        """The learner whose receipt a join repeats; None if that is not proven."""
        if not request.proof:
            return None
        giver, _, mac = request.proof.partition(b":")
        identity = request.actor, request.incarnation
        claim = request.acknowledged_sequence, request.acknowledged_unrolls
        ours = self._mac(identity, *claim, int(giver))
        return int(giver) if hmac.compare_digest(mac, ours) else None

    def _mac(self, actor: Identity, sequence: int, unrolls: int, learner: int) -> bytes:
        what = repr((actor, sequence, unrolls, learner)).encode()
        return hmac.digest(self.run.key, what, hashlib.sha256)
