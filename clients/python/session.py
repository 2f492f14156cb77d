"""The session with a learner: joins, a stream of messages with receipts, parameters.

Everything that docs/wire-protocol.md says about numbers, receipts, resending, incarnations and
back-off is here. A thread keeps the connection; the methods are for the thread that plays.
"""

import collections
import math
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
import numpy as np

from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

PROTOCOL = pb.ProtocolVersion(major=2, minor=4)
JOIN_SECONDS, PULL_SECONDS, GRAPH_SECONDS = 10.0, 60.0, 300.0  # deadlines
ASK_SECONDS = 1.0  # between two requests for parameters while the learner has no newer ones
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
    *(pb.REASON_UNKNOWN_ACTOR, pb.REASON_FINGERPRINT, pb.REASON_SEQUENCE),
    *(pb.REASON_NUM_ENVS, pb.REASON_QUARANTINED),
)


class Parameters(NamedTuple):
    """Parameters of the learner."""

    incarnation: int
    version: int
    arrays: list[np.ndarray]  # as parameter_specs


class Refused(RuntimeError):
    """The learner refuses this actor for good."""


class Finished(Exception):
    """Training has ended."""


class Left(Exception):
    """The learner that acted is gone, in the middle of an unroll."""


class Session:
    """Of one actor with a learner.

    Args:
      learner: HOST:PORT or unix:PATH.
      name: unique in the fleet.
      reconnect_seconds: without a learner, after which to give up.
    """

    def __init__(self, learner: str, name: str, reconnect_seconds: float = math.inf) -> None:
        self.reply = pb.JoinReply()  # of the last Join
        self.incarnation = secrets.randbits(63) + 1
        self.name = name
        self._learner, self._reconnect_seconds = learner, reconnect_seconds
        self._channel = grpc.insecure_channel(learner, CHANNEL)
        self.stub = pb_grpc.LearnerStub(self._channel)
        self._changed = threading.Condition()  # guards what follows
        self._finished = False
        self._error: BaseException | None = None  # why the session cannot go on
        self._sequence = 0  # of the newest message
        self._acknowledged = (0, 0, b"")
        self._outbox: collections.deque[pb.Unrolls] = collections.deque()  # without a receipt
        self._sent = 0  # of these, how many are in the present stream
        self._stream: Any = None
        self._newest = (0, 0)  # incarnation and version that the learner has spoken of
        self._parameters: Parameters | None = None
        self._pulling = False
        self._pulled = -math.inf  # when parameters were asked for last
        self._made = time.monotonic()  # when the last message was
        self._waited = 0.0  # seconds since, in which the actor stood still

    # For the thread that plays: raise Finished at the end of training, and errors of the session.

    def join(self) -> None:
        """Begins the session, and returns when the learner has answered."""
        threading.Thread(target=self._run, daemon=True).start()
        self._wait(lambda: self.reply.fingerprint != "")

    def send(self, reply: pb.JoinReply, played: Any) -> None:
        """Sends unrolls, after waiting for room if too many messages have no receipt.

        Args:
          reply: for which they were made; if another run answers now they are worth nothing.
          played: as `group.Played`.
        """
        started = time.monotonic()
        self._wait(lambda: len(self._outbox) < self.reply.max_unrolls_in_flight)
        with self._changed:
            now = time.monotonic()
            self._waited += now - started
            if self.reply.fingerprint != reply.fingerprint:
                return
            self._sequence += 1
            message = pb.Unrolls(
                actor=self.name,
                incarnation=self.incarnation,
                sequence=self._sequence,
                fingerprint=reply.fingerprint,
                learner_incarnation=played.version.incarnation,
                parameter_version=played.version.version,
                num_envs=len(played.frames),
                frames=played.frames,
                episodes=played.episodes,
                tensors=[played.arrays[spec.name].tobytes() for spec in reply.unroll_specs],
                elapsed_seconds=now - self._made,
                waited_seconds=min(self._waited, now - self._made),
            )
            if message.ByteSize() > reply.max_message_bytes:
                raise ValueError(
                    f"A message has {message.ByteSize()} bytes, the learner takes "
                    f"{reply.max_message_bytes}: lower --num-envs."
                )
            self._made, self._waited = now, 0.0
            self._outbox.append(message)
            self._changed.notify_all()

    def prefetch(self) -> None:
        """Asks for newer parameters in the background, if the learner may have some."""
        with self._changed:
            held = self._parameters
            is_old = held is None or held[:2] != self._newest
            is_early = time.monotonic() - self._pulled < ASK_SECONDS
            if self._pulling or self._stream is None or (not is_old and is_early):
                return
            self._pulling, self._pulled = True, time.monotonic()
        threading.Thread(target=self._pull, daemon=True).start()

    def newest_parameters(self) -> Parameters:
        """Returns the newest parameters of the learner that answers now; waits for the first."""
        started = time.monotonic()

        def are_there() -> bool:
            return self._parameters is not None and self._parameters[0] == self._newest[0]

        while True:
            with self._changed:
                if are_there():
                    self._waited += time.monotonic() - started
                    assert self._parameters is not None
                    return self._parameters
            self.prefetch()
            self._wait(are_there, seconds=0.2)

    def executable_policy(self) -> pb.GetExecutablePolicyReply:
        """Returns the graph of the run.

        Raises:
          Refused: the learner has none.
        """
        while True:
            try:
                request = pb.GetExecutablePolicyRequest()
                return self.stub.GetExecutablePolicy(request, timeout=GRAPH_SECONDS)
            except grpc.RpcError as error:
                self.lost(error)

    def lost(self, error: grpc.RpcError) -> None:
        """Waits a moment after a call that failed. Joins again if the learner does not know us.

        Raises:
          Refused: it would fail again.
        """
        if error.code() in REFUSALS:
            raise Refused(f"{self._learner}: {error.details()}")
        if error.code() == grpc.StatusCode.NOT_FOUND:
            with self._changed:
                self._leave()
        self._wait(lambda: False, seconds=1.0)

    def close(self) -> None:
        """Ends the session."""
        with self._changed:
            self._finished = True
            self._leave()
        self._channel.close()

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: condition() or self._finished or self._error is not None, seconds
            )
            if self._error is not None:
                raise self._error
            if self._finished:
                raise Finished

    # The thread that keeps the connection.

    def _run(self) -> None:
        try:
            self._keep_connected()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _keep_connected(self) -> None:
        backoff, last_seen, told = FIRST_BACKOFF, time.monotonic(), ""
        while self._goes_on():
            began, status, why, has_joined = time.monotonic(), None, "", False
            try:
                self._join()
                has_joined = True
                self._exchange()
            except grpc.RpcError as error:
                status, why = error.code(), f"{error.code().name}: {error.details()}"
            if not self._goes_on():
                return
            if status in REFUSALS:
                raise Refused(f"{self._learner} refused {self.name}: {why}")
            # A learner that asks to wait is there. A session was good if it outlasted the wait.
            now = time.monotonic()
            if has_joined or status == grpc.StatusCode.RESOURCE_EXHAUSTED:
                last_seen = now
            if has_joined and (status is None or now - began > backoff):
                backoff = FIRST_BACKOFF
            if why and why != told:
                print(f"{self.name} waits for {self._learner}: {why}", file=sys.stderr)
            told = why
            if now - last_seen > self._reconnect_seconds:
                raise Refused(f"No learner at {self._learner} for {self._reconnect_seconds:g} s.")
            time.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2.0 * backoff, LONGEST_BACKOFF)

    def _goes_on(self) -> bool:
        return not self._finished and self._error is None

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
        reply = self.stub.Join(request, timeout=JOIN_SECONDS)
        if reply.protocol.major != PROTOCOL.major:
            raise Refused(f"The learner speaks protocol {reply.protocol.major}, this actor 2.")
        with self._changed:
            if self.reply.fingerprint and reply.fingerprint != self.reply.fingerprint:
                self._forget()  # another run
            if reply.learner_incarnation != self._newest[0]:
                self._newest = (reply.learner_incarnation, 0)
            self.reply = reply
            self._finished |= reply.finished
            self._changed.notify_all()

    def _exchange(self) -> None:
        """Sends what has no receipt, and what comes, until the stream ends."""
        with self._changed:
            if self._finished:
                return
            self._sent = 0
            ended = threading.Event()
            stream = self._stream = self.stub.StreamUnrolls(self._messages(ended))
        try:
            for receipt in stream:
                with self._changed:
                    if self._stream is stream:  # otherwise it has been left
                        self._receive(receipt)
                        self._changed.notify_all()
        except grpc.RpcError:
            if self._stream is stream:
                raise
        finally:
            with self._changed:
                ended.set()
                self._stream = None
                self._changed.notify_all()

    def _messages(self, ended: threading.Event) -> Iterator[pb.Unrolls]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: ended.is_set() or self._sent < len(self._outbox))
                if ended.is_set():
                    return
                message = self._outbox[self._sent]
                self._sent += 1
            yield message

    def _receive(self, receipt: pb.Receipt) -> None:
        self._heard(receipt.learner_incarnation, receipt.newest_version)
        if receipt.reason == pb.REASON_UNKNOWN_ACTOR:
            self._leave()  # the message keeps its place and its number
            return
        if not self._sent or self._outbox[0].sequence != receipt.sequence:
            raise RuntimeError(f"A receipt of message {receipt.sequence} came, which is not due.")
        self._outbox.popleft()
        self._sent -= 1
        self._acknowledged = (receipt.sequence, receipt.acknowledged_unrolls, receipt.proof)
        if receipt.status == pb.STATUS_FINISHED:
            self._finished = True
            self._leave()
        elif receipt.status not in (pb.STATUS_ACCEPTED, pb.STATUS_DUPLICATE):
            print(f"Message {receipt.sequence} was rejected: {receipt.detail}", file=sys.stderr)
            if receipt.reason == pb.REASON_VERSION:
                self._pulled = -math.inf
            if receipt.reason in REASONS_TO_JOIN:
                self._leave()

    def _heard(self, incarnation: int, version: int) -> None:
        """Notes what parameters there are. Another incarnation is another learner: join first."""
        if incarnation != self._newest[0] or version > self._newest[1]:
            self._newest = (incarnation, version)
        if incarnation != self.reply.learner_incarnation:
            self._leave()

    def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()
        self._changed.notify_all()

    def _pull(self) -> None:
        held, joined = self._parameters, self.reply
        request = pb.GetParametersRequest()
        if held is not None:
            request.learner_incarnation, request.newer_than = held.incarnation, held.version
        try:
            reply = self.stub.GetParameters(request, timeout=PULL_SECONDS)
            arrays = _decoded(reply.parameters.tensors, joined.parameter_specs)
        except (grpc.RpcError, ValueError) as error:
            reply = None  # the old ones are kept
            if isinstance(error, ValueError):
                self._error = error
        with self._changed:
            self._pulling = False
            if reply is not None and reply.HasField("parameters"):
                told = reply.parameters
                self._heard(told.learner_incarnation, told.version)
                is_same = joined.fingerprint == self.reply.fingerprint
                if is_same and told.learner_incarnation == self.reply.learner_incarnation:
                    self._parameters = Parameters(told.learner_incarnation, told.version, arrays)
            if reply is not None and reply.finished:
                self._finished = True
                self._leave()
            self._changed.notify_all()

    def _forget(self) -> None:
        """Forgets what has no receipt: the numbers go on after the last one that has."""
        self._outbox.clear()
        self._sent, self._sequence = 0, self._acknowledged[0]
        self._parameters = None


def _decoded(tensors: Any, specs: Any) -> list[np.ndarray]:
    """Returns tensors as arrays."""
    arrays = []
    for tensor, spec in zip(tensors, specs, strict=False):
        array = np.frombuffer(tensor, DTYPES[spec.dtype])
        if array.size != math.prod(spec.shape):
            raise ValueError(
                f"Parameter {spec.name} has {len(tensor)} bytes, not {list(spec.shape)}."
            )
        arrays.append(array.reshape(tuple(spec.shape)))
    return arrays
