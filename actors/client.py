"""An actor's client of the learner: the threads and gRPC calls around a `Session`.

The caller joins, sends unrolls, and reads the newest parameters, which never waits after the first.
One thread maintains the session (join, stream, receipts), another pulls parameters.
"""

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from actors import messages
from actors.channel import failure
from actors.connection import POLL_SECONDS, PULL_SECONDS, Connection
from actors.session import BACKOFF, Pull
from actors.shared import SharedPulls
from impala.types import ActorUnrolls, Parameters
from protos.impala.v1 import learner_pb2 as pb

RETRY_POLL_SECONDS = 0.05
_FIRST_PID_SPACE = 0xEFFFFFFC  # inode of the host's own PID namespace

_log = logging.getLogger(__name__)


def actor_name(index: int) -> str:
    """Returns a name that is unique in a fleet: host, process id and index.

    In a container the number of its PID namespace is put before the process id: containers may
    share their host's name, and each has a process 1.
    """
    space = _FIRST_PID_SPACE
    with contextlib.suppress(OSError):  # no Linux, or no /proc
        space = os.stat("/proc/self/ns/pid").st_ino
    process = f"{os.getpid()}" if space == _FIRST_PID_SPACE else f"{space}-{os.getpid()}"
    return f"{socket.gethostname()}-{process}-{index}"


def new_incarnation() -> int:
    """Returns a random number, 1 to 2^63 - 1, that identifies one start of an actor."""
    return secrets.randbelow(2**63 - 1) + 1


class LearnerClient(Connection):
    """An actor's session with the learner. `join`, `parameters` and `send` wait as `Connection`.

    Args:
      learner: as for `Connection`, like all others but `shared`.
      shared: pulls of the host's actors, to share with them; None: it pulls alone.
    """

    def __init__(self, learner: str, *, shared: SharedPulls | None = None, **others: Any):
        self._shared = shared
        self.players = 1
        """How many threads play, each of which may wait."""
        self._waited = 0.0  # seconds since the last message, on average over players
        self._permit = 0  # number of that of the round that is being made
        self._round_unrolls = 0  # of a round
        self._unrolls_left = 0  # of this round, still to be sent
        super().__init__(learner, **others)  # which starts the session's thread
        self._start(self._keep_pulling)

    # What the caller's thread uses.

    def await_turn(self, unrolls: int) -> None:
        """Waits for the first parameters and, if rounds of unrolls need permits, for the next one.

        Returns at once within a round.

        Args:
          unrolls: of a round, in all its messages.
        """
        with self._lock:
            session = self._session
            if not session.needs_permits:
                self._await(lambda: session.parameters is not None)
            elif self._unrolls_left <= 0:
                self._round_unrolls = unrolls
                session.want_permit(unrolls)
                self._wake()
                self._await(lambda: session.permit is not None)

    def parameters(self) -> Parameters:
        """Returns the newest parameters pulled. Waits only for the first ones.

        If a round of unrolls needs a permit, it begins now, and these are its parameters.
        """
        with self._lock:
            self._await(lambda: self._session.parameters is not None)
            self._look()
            if self._session.needs_permits:
                self._await(lambda: self._session.permit is not None)
                self._permit = self._session.begin_round().number
                self._unrolls_left = self._round_unrolls
            assert self._session.parameters is not None
            return self._session.parameters

    def prefetch(self) -> None:
        """Requests newer parameters, or a permit, in the background."""
        with self._lock:
            if self._session.needs_permits:
                self._session.want_permit(self._round_unrolls)
            else:
                self._session.wants_parameters = True
            self._wake()

    def task(self) -> int:
        """Returns the task that the learner last named."""
        return self._session.task

    def send(self, unrolls: ActorUnrolls) -> None:
        """Copies unrolls into a message and queues it. Waits while too many have no receipt.

        Raises:
          ValueError: the message is larger than the learner accepts.
        """
        with self._lock:
            reply = self._session.reply
            assert reply is not None
            self._await(self._session.has_room)
        message, tensors = messages.unrolls(
            self._session.name, self._session.incarnation, reply, unrolls
        )
        size = message.ByteSize() + sum(map(len, tensors))
        if size > reply.max_message_bytes:
            raise ValueError(
                f"the unrolls of {message.num_envs} environments make a message of {size} bytes, "
                f"the learner takes {reply.max_message_bytes}: use fewer environments per group"
            )
        message.permit = self._permit
        with self._lock:
            self._unrolls_left -= message.num_envs
            self._session.append(message, time.monotonic(), self._waited, tensors)
            self._waited = 0.0
            self._changed()
        self._metrics.frames.inc(sum(message.frames))
        self._metrics.episodes.inc(len(message.episodes))
        for fault in unrolls.faults:
            self._metrics.environment_faults.labels(fault.kind).inc()
        self._metrics.sent_bytes.inc(size)
        self._metrics.wait_seconds.inc(message.waited_seconds)
        self._metrics.environment_seconds.inc(message.environment_seconds)
        self._metrics.steps.inc(message.num_envs * reply.unroll_length)

    def close(self) -> None:
        """As `Connection.close`; deletes what was shared."""
        super().close()
        if self._shared is not None:
            self._shared.leave()

    def _await(self, ready: Callable[[], bool]) -> None:
        """Waits, with the lock held, and counts the seconds."""
        waited = self._wait(ready)  # meanwhile what others have waited changes
        self._waited += waited / self.players

    # What the threads do.

    def _serve(self, connection: int) -> None:
        """Sends unrolls and receives receipts until the connection ends."""
        shown = self._channel.metadata()
        stream = self._channel.stream_of_bytes(self._messages(connection), metadata=shown)
        with self._lock:
            self._stream = stream
            self._changed()  # a pull may have ended the connection already
        try:
            for receipt in stream:
                self._receive(receipt)
                if not self._goes_on(connection):
                    return
        except grpc.RpcError as error:
            is_unknown = error.code() == grpc.StatusCode.UNAUTHENTICATED
            if is_unknown and shown != self._channel.metadata():
                _log.info("%s joins with the token that its file has now", self._session.name)
            elif error.code() != grpc.StatusCode.CANCELLED or self._goes_on(connection):
                raise
        finally:
            with self._lock:
                self._stream = None
            stream.cancel()

    def _messages(self, connection: int) -> Iterator[bytes]:
        """Yields the messages to send over a connection until the connection ends."""
        while True:
            with self._lock:
                self._wait_for(
                    lambda: self._session.has_message(connection) or not self._goes_on(connection)
                )
                message = self._session.next_message(connection)
            if message is None:
                return
            yield message

    def _receive(self, receipt: pb.Receipt) -> None:
        with self._lock:
            said = self._session.receive(receipt, time.monotonic())
            self._changed()
        if said is not None:
            self._metrics.unrolls.labels(said.status).inc(said.num_unrolls)
            self._metrics.rpc_seconds.labels("StreamUnrolls").observe(said.seconds)

    def _keep_pulling(self) -> None:
        """Pulls newer parameters for ever; after a failed pull the old ones stay in use."""
        self._sleep(None, until=lambda: self._session.reply is not None)
        while not self._ended():
            connection = self._session.connection
            try:
                pulled = self._pull()
            except grpc.RpcError as error:  # the session is lost too, and logs it
                self._session.raise_if_refused(failure(error))
                if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                    # This actor is quarantined: its host's others suffer if it asks at once.
                    self._sleep(BACKOFF.longest)
                if error.code() == grpc.StatusCode.NOT_FOUND:  # who asks for a permit has to join
                    with self._lock:
                        self._session.forgotten(connection)
                        self._changed()
                pulled = False
            if not pulled:
                self._sleep(RETRY_POLL_SECONDS, until=lambda: self._session.wants_parameters)
            self._sleep(POLL_SECONDS, until=self._session.must_pull)
            # Without a session they could not be used: another learner's are known after the Join.
            self._sleep(None, until=lambda: self._session.is_open)

    def _look(self) -> None:
        """Takes, with the lock held, what another actor of this host has pulled meanwhile."""
        held, joined = self._session.parameters, self._session.reply
        if self._shared is None or held is None or self._session.needs_permits:
            return
        if joined is None or held.incarnation != joined.learner_incarnation:
            return  # those of the learner before, which has no newer ones to offer
        if (reply := self._shared.newer(held.incarnation, held.version)) is not None:
            self._pulled(Pull(self._session.connection, pb.GetParametersRequest()), reply)

    def _pull(self) -> bool:
        """Asks for newer parameters. Returns whether this session could use any."""
        with self._lock:
            pull = self._session.pull()
            joined = self._session.reply
            shared = None if self._session.needs_permits else self._shared

        def call(request: pb.GetParametersRequest) -> pb.GetParametersReply:
            with self._metrics.rpc_seconds.labels("GetParameters").time():
                reply: pb.GetParametersReply = self._channel.stub.GetParameters(
                    request, timeout=PULL_SECONDS, metadata=self._channel.metadata()
                )
            return reply

        if shared is None or joined is None:
            reply = call(pull.request)
        elif (answer := shared.pull(joined.learner_incarnation, pull.request, call)) is not None:
            reply = answer
        elif pull.request.learner_incarnation == joined.learner_incarnation:
            return True  # what another actor has pulled is taken at the boundary of an unroll
        elif (first := shared.newer(joined.learner_incarnation, -1)) is not None:
            reply = first
        else:
            return False
        with self._lock:
            pulled = self._pulled(pull, reply)
            self._changed()
        return pulled

    def _pulled(self, pull: Pull, reply: pb.GetParametersReply) -> bool:
        """Takes, with the lock held, a reply. Returns whether this session could use any of it."""
        pulled = self._session.pulled(pull, reply)
        if self._session.parameters is not None:
            self._metrics.parameter_version.set(self._session.parameters.version)
        return pulled
