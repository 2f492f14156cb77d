"""An actor's client of the learner: the threads and gRPC calls around a `Session`.

The caller joins, sends unrolls, and reads the newest parameters, which never waits after the first.
One thread maintains the session (join, stream, receipts, reconnection), another pulls parameters.
Errors in either are raised in the caller's thread. `actors.session` decides what to send, resend,
log and give up.
"""

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Self

import grpc

from actors import messages
from actors.channel import NO_SECURITY, LearnerChannel, failure
from actors.metrics import ActorMetrics
from actors.session import (
    LONGEST_BACKOFF_SECONDS,
    Assignment,
    LearnerAway,
    LearnerChanged,
    LearnerError,
    LearnerRefused,
    Pull,
    Session,
)
from actors.shared import SharedPulls
from impala.runtime.security import ClientSecurity
from impala.types import ActorUnrolls, Episode, Parameters
from protos.impala.v1 import learner_pb2 as pb

__all__ = [
    "Assignment",
    "LearnerAway",
    "LearnerChanged",
    "LearnerClient",
    "LearnerError",
    "LearnerRefused",
    "RunFinished",
    "Stopped",
    "actor_name",
    "new_incarnation",
]

_log = logging.getLogger(__name__)

_WAKE_SECONDS = 0.2  # how often a waiting caller checks whether it was stopped
CALL_SECONDS = 10.0
_PULL_SECONDS = 60.0
POLL_SECONDS = 1.0  # between pulls of parameters that nobody has asked for
_SIGN_OF_LIFE_SECONDS = 10.0  # between those of an evaluator at work
RETRY_POLL_SECONDS = 0.05
_RETRY_PULL_SECONDS = 0.1  # after a failed pull


class Stopped(Exception):
    """`stop` was called."""


class RunFinished(Exception):
    """The learner has reported the end of training."""


def actor_name(index: int) -> str:
    """Returns a name that is unique in a fleet: host, process id and index."""
    return f"{socket.gethostname()}-{os.getpid()}-{index}"


def new_incarnation() -> int:
    """Returns a random number, 1 to 2^63 - 1, that identifies one start of an actor."""
    return secrets.randbelow(2**63 - 1) + 1


class LearnerClient:
    """A session with the learner that survives the learner's restarts.

    Use it as a context manager. `join`, `parameters` and `send` raise `Stopped` after `stop`,
    `RunFinished` when training has ended, and `LearnerError` or any error of a thread.

    Args:
      learner: host:port or unix:PATH.
      name: unique in the fleet, 1 to 200 characters.
      incarnation: from `new_incarnation`.
      role: an actor streams unrolls; an evaluator gets assignments and reports evaluations.
      reconnect_timeout: seconds without a learner after which to give up; None: never.
      security: the credentials to present, and how to verify the learner.
      metrics: the instruments to update; None: private ones.
      gives_signs_of_life: whether the learner is to count an actor as active that sends nothing for
        long.
      shared: pulls of the host's actors, to share with them; None: it pulls alone.

    Raises:
      SecurityError: the files of `security` cannot be used.
    """

    def __init__(
        self,
        learner: str,
        *,
        name: str,
        incarnation: int,
        role: Literal["actor", "evaluator"] = "actor",
        reconnect_timeout: float | None = None,
        security: ClientSecurity = NO_SECURITY,
        metrics: ActorMetrics | None = None,
        gives_signs_of_life: bool = False,
        shared: SharedPulls | None = None,
    ):
        self._learner, self._name, self._incarnation = learner, name, incarnation
        self._metrics = metrics or ActorMetrics()
        self._channel = LearnerChannel(learner, security)

        # This lock guards everything below except `_stopping`, which a signal handler sets:
        # waiting callers check it a few times a second.
        self._lock = threading.RLock()
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}  # and what for
        self._session = Session(
            learner,
            name=name,
            incarnation=incarnation,
            role=pb.ROLE_ACTOR if role == "actor" else pb.ROLE_EVALUATOR,
            reconnect_timeout=reconnect_timeout,
            gives_signs_of_life=gives_signs_of_life,
            now=time.monotonic(),
        )
        self._shared = None if gives_signs_of_life else shared  # a pull is such a sign
        self._stream: grpc.Call | None = None
        self._waited = 0.0  # seconds, since the last message
        self._permit = 0  # number of that of the round that is being made
        self._round_unrolls = 0  # of a round
        self._unrolls_left = 0  # of this round, still to be sent
        self._stopping = False
        self._closed = False
        self._error: BaseException | None = None

        self._serve = self._exchange if role == "actor" else self._poll
        targets = [self._keep_session] + ([self._keep_pulling] if role == "actor" else [])
        self._threads = [
            threading.Thread(target=self._guard, args=(target,), name=target.__name__, daemon=True)
            for target in targets
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the caller's thread uses.

    def join(self) -> pb.JoinReply:
        """Waits for the learner. Returns its reply, with everything that an actor needs to act."""
        with self._lock:
            self._wait(lambda: self._session.reply is not None)
            assert self._session.reply is not None
            return self._session.reply

    def await_turn(self, unrolls: int) -> None:
        """Waits for the first parameters and, if rounds of unrolls need permits, for the next one.

        Returns at once within a round.

        Args:
          unrolls: of a round, in all its messages.
        """
        with self._lock:
            session = self._session
            if not session.needs_permits:
                self._waited += self._wait(lambda: session.parameters is not None)
            elif self._unrolls_left <= 0:
                self._round_unrolls = unrolls
                session.want_permit(unrolls)
                self._wake()
                self._waited += self._wait(lambda: session.permit is not None)

    def parameters(self) -> Parameters:
        """Returns the newest parameters pulled. Waits only for the first ones.

        If a round of unrolls needs a permit, it begins now, and these are its parameters.
        """
        with self._lock:
            self._waited += self._wait(lambda: self._session.parameters is not None)
            self._look()
            if self._session.needs_permits:
                self._waited += self._wait(lambda: self._session.permit is not None)
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
                self._session.want_parameters()
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
            if reply is None:
                raise RuntimeError("send before join")
            self._waited += self._wait(self._session.has_room)
        message = messages.unrolls(self._name, self._incarnation, reply.fingerprint, unrolls)
        size = message.ByteSize()
        if size > reply.max_message_bytes:
            raise ValueError(
                f"the unrolls of {message.num_envs} environments make a message of {size} bytes, "
                f"the learner takes {reply.max_message_bytes}: use fewer environments per group"
            )
        message.permit = self._permit
        with self._lock:
            self._unrolls_left -= message.num_envs
            self._session.append(message, time.monotonic(), self._waited)
            self._waited = 0.0
            self._told()
        self._metrics.frames.inc(sum(message.frames))
        self._metrics.episodes.inc(len(message.episodes))
        for fault in unrolls.faults:
            self._metrics.environment_faults.labels(fault.kind).inc()
        self._metrics.sent_bytes.inc(size)
        self._metrics.wait_seconds.inc(message.waited_seconds)

    def next_assignment(self) -> Assignment:
        """Waits for something to evaluate. The assignment before counts as done."""
        with self._lock:
            self._session.want_assignment()
            self._wake()
            self._wait(lambda: self._session.assignment is not None)
            return self._session.begin_assignment()

    def report_evaluation(self, assignment: Assignment, episodes: Sequence[Episode]) -> None:
        """Reports an assignment's episodes. If the learner cannot be reached, it is logged: the
        learner will assign them again.

        Raises:
          LearnerRefused: the learner would refuse this report again.
        """
        task, parameters = assignment.task, assignment.parameters
        evaluation = messages.evaluation(self._name, self._incarnation, task, parameters, episodes)
        try:
            self._channel.stub.ReportEvaluation(
                evaluation, timeout=CALL_SECONDS, metadata=self._channel.metadata()
            )
        except grpc.RpcError as error:
            self._session.raise_if_refused(failure(error))
            _log.warning("%s could not report an evaluation: %s", self._name, failure(error))

    def stop(self) -> None:
        """Makes the caller's current or next wait raise `Stopped`. Safe in a signal handler."""
        self._stopping = True

    def drain(self, seconds: float) -> bool:
        """Waits for the outstanding receipts. Returns whether all came within `seconds`."""
        with self._lock:
            return self._wait_for(
                lambda: not self._session.outbox or self._error is not None, seconds
            )

    def close(self) -> None:
        """Ends the session and its threads. Messages without a receipt are dropped."""
        with self._lock:
            self._closed = True
            self._wake()
        self._channel.close()  # ends the calls in progress
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _wait(self, ready: Callable[[], bool], seconds: float = math.inf) -> float:
        """Waits, with the lock held, until `ready`, or so long. Returns the seconds waited."""
        start = time.monotonic()
        while True:
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise Stopped
            if self._session.finished:
                raise RunFinished
            waited = time.monotonic() - start
            if ready() or waited >= seconds:
                return waited
            self._wait_for(
                lambda: self._error is not None or self._session.finished or ready(),
                min(_WAKE_SECONDS, seconds - waited),
            )

    # What the threads do.

    def _wait_for(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits, with the lock held, at most `seconds`. Returns the last value of `until`."""
        woken = threading.Condition(self._lock)
        self._waiting[woken] = until
        try:
            return woken.wait_for(until, seconds)
        finally:
            del self._waiting[woken]

    def _wake(self) -> None:
        """Wakes, with the lock held, the threads for which a change was what they wait for."""
        for woken, until in self._waiting.items():
            if until():
                woken.notify()

    def _guard(self, target: Callable[[], None]) -> None:
        """Runs a thread's target and passes its error on to the caller's thread."""
        try:
            target()
        except BaseException as error:
            with self._lock:
                if self._error is None and not self._closed:
                    self._error = error
                self._wake()

    def _ended(self) -> bool:
        return self._closed or self._session.finished or self._error is not None

    def _goes_on(self, connection: int) -> bool:
        return not self._ended() and self._session.is_connected(connection)

    def _told(self) -> None:
        """Propagates, with the lock held, a change of the session's state."""
        self._metrics.pending.set(len(self._session.outbox))
        if self._stream is not None and not self._goes_on(self._session.connection):
            self._stream.cancel()
        self._wake()

    def _sleep(self, seconds: float | None, until: Callable[[], bool] = lambda: False) -> None:
        with self._lock:
            self._wait_for(lambda: self._ended() or until(), seconds)

    def _keep_session(self) -> None:
        """Joins, serves the session, and joins again with backoff whenever it is lost."""
        while not self._ended():
            self._channel.renew()
            why = None
            try:
                self._join()
            except grpc.RpcError as error:
                why = failure(error)
            if self._ended():
                break
            with self._lock:
                retry = self._session.lost(why, time.monotonic())
                self._told()
            if retry.warning:
                _log.warning(retry.warning)
            self._sleep(retry.pause())
        if self._session.finished:
            _log.info("%s: the learner at %s has finished", self._name, self._learner)

    def _join(self) -> None:
        """Joins, and serves the connection until it ends; raises RpcError if it fails."""
        with self._lock:
            request = self._session.join_request()
        reply = self._channel.stub.Join(
            request, timeout=CALL_SECONDS, metadata=self._channel.metadata()
        )
        with self._lock:
            self._session.joined(reply, time.monotonic())
            connection = self._session.connection
            self._told()
        if self._ended():
            return
        if connection == 1:
            _log.info("%s joined %s as actor %d", self._name, self._learner, reply.actor_index)
        else:
            _log.info("%s joined %s again", self._name, self._learner)
        self._metrics.joins.inc()
        self._metrics.connected.set(1)
        try:
            self._serve(connection)
        finally:
            self._metrics.connected.set(0)

    def _exchange(self, connection: int) -> None:
        """Sends unrolls and receives receipts until the connection ends."""
        stream = self._channel.stub.StreamUnrolls(
            self._messages(connection), metadata=self._channel.metadata()
        )
        with self._lock:
            self._stream = stream
            self._told()  # a pull may have ended the connection already
        try:
            for receipt in stream:
                self._receive(receipt)
                if not self._goes_on(connection):
                    return
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.CANCELLED or self._goes_on(connection):
                raise
        finally:
            with self._lock:
                self._stream = None
            stream.cancel()

    def _messages(self, connection: int) -> Iterator[pb.Unrolls]:
        """Yields the messages to send over a connection until the connection ends."""
        while True:
            with self._lock:
                while (message := self._session.next_message(connection)) is None:
                    if not self._goes_on(connection):
                        return
                    self._wait_for(
                        lambda: (
                            self._session.has_message(connection) or not self._goes_on(connection)
                        )
                    )
            yield message

    def _receive(self, receipt: pb.Receipt) -> None:
        with self._lock:
            said = self._session.receive(receipt, time.monotonic())
            self._told()
        if said is not None:
            self._metrics.unrolls.labels(said.status).inc(said.num_unrolls)
            self._metrics.rpc_seconds.labels("StreamUnrolls").observe(said.seconds)
            if said.warning:
                _log.warning(said.warning)

    def _keep_pulling(self) -> None:
        """Pulls newer parameters for ever; after a failed pull the old ones stay in use."""
        self._sleep(None, until=lambda: self._session.reply is not None)
        while not self._ended():
            try:
                pulled = self._pull()
            except grpc.RpcError as error:  # the session is lost too, and logs it
                self._session.raise_if_refused(failure(error))
                # This actor is quarantined: its host's others suffer if it asks at once.
                is_to_wait = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                self._sleep(LONGEST_BACKOFF_SECONDS if is_to_wait else _RETRY_PULL_SECONDS)
                pulled = False
            if not pulled:
                self._sleep(RETRY_POLL_SECONDS, until=lambda: self._session.wants_parameters)
            self._sleep(POLL_SECONDS, until=self._session.must_pull)
            # Without a session they could not be used: another learner's are known after the Join.
            self._sleep(None, until=lambda: self._session.is_open)

    def _poll(self, connection: int) -> None:
        """Asks for assignments, and gives signs of life, until the connection ends."""
        while self._goes_on(connection):
            with self._lock:
                request = self._session.snapshot_request()
            with self._metrics.rpc_seconds.labels("GetSnapshot").time():
                reply = self._channel.stub.GetSnapshot(
                    request, timeout=_PULL_SECONDS, metadata=self._channel.metadata()
                )
            with self._lock:
                self._session.assigned(connection, request, reply)
                self._told()
                is_idle = self._session.wants_assignment
            if is_idle:
                self._sleep(POLL_SECONDS, until=lambda: not self._goes_on(connection))
            else:
                self._sleep(
                    _SIGN_OF_LIFE_SECONDS,
                    until=lambda: self._session.wants_assignment or not self._goes_on(connection),
                )

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
                    request, timeout=_PULL_SECONDS, metadata=self._channel.metadata()
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
            self._told()
        return pulled

    def _pulled(self, pull: Pull, reply: pb.GetParametersReply) -> bool:
        """Takes, with the lock held, a reply. Returns whether this session could use any of it."""
        pulled = self._session.pulled(pull, reply)
        if self._session.parameters is not None:
            self._metrics.parameter_version.set(self._session.parameters.version)
        return pulled
