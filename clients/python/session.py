"""The session with a learner: joining, messages and receipts, back-off.

Everything that docs/wire-protocol.md says about these is here.
"""

import json
import queue
import random
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import numpy as np

from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

PROTOCOL = pb.ProtocolVersion(major=1, minor=0)
JOIN_SECONDS, PULL_SECONDS, GRAPH_SECONDS = 10.0, 60.0, 300.0  # deadlines
ASK_SECONDS = 0.2  # between requests for the first parameters
FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 10.0  # seconds
DTYPES = {
    getattr(pb, f"DTYPE_{name.upper()}"): np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
CHANNEL = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 10_000),
)
REFUSALS = (  # statuses that another attempt would not change
    *(grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT),
    *(grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED),
    grpc.StatusCode.UNIMPLEMENTED,
)
REASONS_TO_JOIN = (  # rejections after which to join again before anything else is sent
    *(pb.REASON_FINGERPRINT, pb.REASON_SEQUENCE),
    *(pb.REASON_NUM_ENVS, pb.REASON_QUARANTINED),
)


class Version(NamedTuple):
    """A version of parameters."""

    incarnation: int
    version: int


class Finished(Exception):
    """Training has ended."""


class Refused(Exception):
    """The learner refuses this actor for good; the message says why."""


class Interrupted(Exception):
    """The connection is lost, or the learner wants another Join; the message says why."""


class Conversation:
    """A stream with one reply to each request, in order; it begins with the first.

    Args:
      method: of the stub.
    """

    def __init__(self, method: Callable[[Any], Any]) -> None:
        self._method = method
        self._replies: Any = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask(self, request: Any) -> Any:
        """Sends a request and returns its reply."""
        if self._replies is None:
            self._replies = self._method(iter(self._requests.get, None))
        self._requests.put(request)
        try:
            return next(self._replies)
        except StopIteration:
            raise Interrupted("The learner has ended a stream.") from None
        except grpc.RpcError as error:
            raise failure(error) from None

    def close(self) -> None:
        if self._replies is not None:
            self._requests.put(None)
            self._replies.cancel()


class Session:
    """A session with a learner.

    Args:
      learner: HOST:PORT or unix:PATH.
      name: unique in the fleet.
    """

    def __init__(self, learner: str, name: str) -> None:
        self._learner, self.name = learner, name
        self.incarnation = secrets.randbits(63) + 1
        self.reply = pb.JoinReply()  # of the last Join
        self.settings: dict[str, Any] = {}  # of it
        self._dial()
        self._sequence = 0  # of the newest message
        self._acknowledged = (0, 0, b"")
        self._message: pb.Unrolls | None = None  # has no receipt
        self._held = pb.Parameters()
        self._arrays: list[np.ndarray] = []
        self._made = time.monotonic()  # when the last message was
        self._waited = 0.0  # seconds since, in which the actor stood still

    def _dial(self) -> None:
        self._channel = grpc.insecure_channel(self._learner, CHANNEL)
        self._stub = pb_grpc.LearnerStub(self._channel)

    def run(self, play: Callable[[], None]) -> None:
        """Joins and plays until the end of training; again, with back-off, when interrupted.

        Args:
          play: plays and calls `send` until Finished or Interrupted is raised.
        """
        backoff, told = FIRST_BACKOFF, ""
        while True:
            began = time.monotonic()
            try:
                self._join()
                self._acting = Conversation(self._stub.Act)
                self._sending = Conversation(self._stub.StreamUnrolls)
                try:
                    if self._message is not None:
                        self._exchange(self._message)
                    play()
                finally:
                    self._acting.close()
                    self._sending.close()
            except Finished:
                self._channel.close()
                return
            except Interrupted as error:
                if str(error) != told:
                    print(f"{self.name} waits for {self._learner}: {error}", file=sys.stderr)
                told = str(error)
                # A new channel: this one may ask for the address of a name minutes later only.
                self._channel.close()
                self._dial()
            if time.monotonic() - began > max(backoff, 0.5):  # it was a good session
                backoff = FIRST_BACKOFF
            time.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2.0 * backoff, LONGEST_BACKOFF)

    def send(self, played: Any) -> None:
        """Sends unrolls, as `group.Played`, and waits for the receipt."""
        now = time.monotonic()
        self._sequence += 1
        self._message = pb.Unrolls(
            actor=self.name,
            incarnation=self.incarnation,
            sequence=self._sequence,
            fingerprint=self.reply.fingerprint,
            learner_incarnation=played.version.incarnation,
            parameter_version=played.version.version,
            num_envs=len(played.frames),
            frames=played.frames,
            episodes=played.episodes,
            tensors=[played.arrays[spec.name].tobytes() for spec in self.reply.unroll_specs],
            elapsed_seconds=now - self._made,
            waited_seconds=min(self._waited, now - self._made),
        )
        self._made, self._waited = now, 0.0
        self._exchange(self._message)

    def act(self, **row: Any) -> pb.ActReply:
        """Requests actions for a row from the learner."""
        request = pb.ActRequest(actor=self.name, incarnation=self.incarnation, **row)
        reply: pb.ActReply = self._acting.ask(request)
        if reply.finished:
            raise Finished
        return reply

    def parameters(self) -> tuple[Version, list[np.ndarray]]:
        """Returns the newest parameters of the learner; waits until there are some."""
        began = time.monotonic()
        while True:
            held = self._held
            reply = self._call(
                self._stub.GetParameters,
                pb.GetParametersRequest(
                    learner_incarnation=held.learner_incarnation, newer_than=held.version
                ),
                PULL_SECONDS,
            )
            if reply.finished:
                raise Finished
            if reply.HasField("parameters"):
                self._held = held = reply.parameters
                self._arrays = [
                    np.frombuffer(tensor, DTYPES[spec.dtype]).reshape(tuple(spec.shape))
                    for tensor, spec in zip(held.tensors, self.reply.parameter_specs, strict=True)
                ]
            if held.learner_incarnation == self.reply.learner_incarnation:
                self._waited += time.monotonic() - began
                return Version(held.learner_incarnation, held.version), self._arrays
            if reply.HasField("parameters"):
                raise Interrupted("Another learner has taken over.")
            time.sleep(ASK_SECONDS)

    def executable_policy(self) -> pb.GetExecutablePolicyReply:
        """Returns the graph of the run."""
        request = pb.GetExecutablePolicyRequest()
        reply: pb.GetExecutablePolicyReply = self._call(
            self._stub.GetExecutablePolicy, request, GRAPH_SECONDS
        )
        return reply

    def _call(self, method: Any, request: Any, seconds: float) -> Any:
        try:
            return method(request, timeout=seconds)
        except grpc.RpcError as error:
            raise failure(error) from None

    def _join(self) -> None:
        sequence, unrolls, proof = self._acknowledged
        request = pb.JoinRequest(
            protocol=PROTOCOL,
            actor=self.name,
            incarnation=self.incarnation,
            role=pb.ROLE_ACTOR,
            version="impala-actor-python 0.1.0",
            acknowledged_sequence=sequence,
            acknowledged_unrolls=unrolls,
            proof=proof,
        )
        reply = self._call(self._stub.Join, request, JOIN_SECONDS)
        if reply.protocol.major != PROTOCOL.major:
            raise Refused(f"The learner speaks protocol {reply.protocol.major}.")
        if reply.finished:
            raise Finished
        before, self.reply = self.reply.fingerprint, reply
        self.settings = json.loads(reply.settings)
        if before not in ("", reply.fingerprint):  # what has no receipt is lost; begin anew
            self._message, self._sequence, self._acknowledged = None, 0, (0, 0, b"")
            self.incarnation = secrets.randbits(63) + 1
            raise Interrupted("Another run answers.")
        if self._message is not None and self._message.ByteSize() > reply.max_message_bytes:
            raise Refused(
                f"Message {self._sequence} has {self._message.ByteSize()} bytes, the learner now "
                f"takes {reply.max_message_bytes}: start again."
            )

    def _exchange(self, message: pb.Unrolls) -> None:
        """Sends the message, and deals with its receipt."""
        began = time.monotonic()
        receipt: pb.Receipt = self._sending.ask(message)
        self._waited += time.monotonic() - began
        if receipt.reason == pb.REASON_UNKNOWN_ACTOR:
            raise Interrupted(receipt.detail)  # the message keeps its number
        if receipt.sequence != message.sequence:
            raise RuntimeError(f"A receipt of message {receipt.sequence} came, which is not due.")
        self._acknowledged = (receipt.sequence, receipt.acknowledged_unrolls, receipt.proof)
        self._message = None
        if receipt.status == pb.STATUS_FINISHED:
            raise Finished
        if receipt.status not in (pb.STATUS_ACCEPTED, pb.STATUS_DUPLICATE):
            print(f"Message {receipt.sequence} was rejected: {receipt.detail}", file=sys.stderr)
            if receipt.reason in REASONS_TO_JOIN:
                raise Interrupted(receipt.detail)


def failure(error: grpc.RpcError) -> Exception:
    """Returns what a failed call means."""
    why = f"{error.code().name}: {error.details()}"
    return Refused(why) if error.code() in REFUSALS else Interrupted(why)
