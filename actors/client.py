"""An actor's side of the wire: joins, streams unrolls, pulls parameters, and survives the learner.

The caller joins, sends unrolls, and asks for parameters, which are there at once. One thread keeps
the session (join, stream, receipts; and again from the start when the learner is lost), another
pulls parameters. What goes wrong in either is raised in the caller's thread.
"""

import collections
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Self

import grpc
import tree

from actors.metrics import ActorMetrics
from impala.runtime.credentials import first_token
from impala.runtime.security import ClientSecurity, Watched
from impala.types import ActorUnrolls, EnvironmentFault, Episode, Parameters
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_log = logging.getLogger(__name__)

_WAKE_SECONDS = 0.2  # how often a waiting caller looks whether it was told to stop
_JOIN_SECONDS = 10.0
_PULL_SECONDS = 60.0
_POLL_SECONDS = 1.0  # between questions for newer parameters, when nobody wants any
_RETRY_POLL_SECONDS = 0.05
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.1, 10.0

_NO_SECURITY = ClientSecurity()
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", -1),  # JoinReply.max_message_bytes is checked in `send`
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # the backoff that counts is this file's
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

# Another attempt would be answered alike.
_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
}

_FAULT_KINDS: dict[str, "pb.FaultKind"] = {
    "crashed": pb.FAULT_KIND_CRASHED,
    "hung": pb.FAULT_KIND_HUNG,
}
_MAX_FAULT_DETAIL = 200  # characters, as learner.proto says

_STATUSES = {number: name.removeprefix("STATUS_").lower() for name, number in pb.Status.items()}


class Stopped(Exception):
    """`stop` was called."""


class RunFinished(Exception):
    """The learner says that training has ended."""


class LearnerError(Exception):
    """The learner cannot be worked with; the message says why."""


class LearnerRefused(LearnerError):
    """It refused the join, with its own message."""


class LearnerChanged(LearnerError):
    """Another run answers at the same address, with other environments or another agent."""


class LearnerAway(LearnerError):
    """It did not come back within `reconnect_timeout`."""


def actor_name(index: int) -> str:
    """A name that is unique in a fleet: host, process and index."""
    return f"{socket.gethostname()}-{os.getpid()}-{index}"


def new_incarnation() -> int:
    """A random number, 1 to 2^63 - 1, for an actor that starts."""
    return secrets.randbelow(2**63 - 1) + 1


class LearnerClient:
    """A session with the learner that outlives the learner's restarts.

    Use it as a context manager. `join`, `parameters` and `send` raise `Stopped` after `stop`,
    `RunFinished` when training has ended, and `LearnerError` or whatever went wrong in a thread.

    Args:
      learner: host:port or unix:PATH.
      name: unique in the fleet, 1 to 200 characters.
      incarnation: from `new_incarnation`.
      role: an actor streams unrolls; an evaluator only pulls parameters and reports.
      reconnect_timeout: seconds without a learner after which to give up; None is never.
      security: what is shown to the learner, and asked of it.
      metrics: where is counted what happens; nowhere else if None.

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
        security: ClientSecurity = _NO_SECURITY,
        metrics: ActorMetrics | None = None,
    ):
        self._metrics = metrics or ActorMetrics()
        self._learner = learner
        self._name = name
        self._incarnation = incarnation
        self._role = pb.ROLE_ACTOR if role == "actor" else pb.ROLE_EVALUATOR
        self._reconnect_timeout = reconnect_timeout
        self._dialler = _Dialler(learner, security)
        self._channel = self._dialler.dial()
        self._stub = pb_grpc.LearnerStub(self._channel)

        # All of the following is guarded by this lock, but for `_stopping`, which a signal handler
        # sets: waiting callers look at it a few times a second.
        self._lock = threading.Condition()
        self._stopping = False
        self._closed = False
        self._finished = False
        self._error: BaseException | None = None
        self._reply: pb.JoinReply | None = None
        self._parameters: Parameters | None = None
        self._task = 0
        self._learner_incarnation = 0  # as the learner last said
        self._wanted = False  # newer parameters, since the last pull began
        self._session = 0  # counts the beginnings and ends of streams
        self._call: grpc.Call | None = None  # the stream
        self._pending: collections.deque[pb.Unrolls] = collections.deque()  # without a receipt
        self._made: collections.deque[float] = collections.deque()  # when each of those was
        self._num_sent = 0  # of pending, from the left, given to the current stream
        self._sequence = 0
        self._acknowledged_sequence = 0
        self._acknowledged_unrolls = 0  # of this incarnation, up to that message
        self._proof = b""  # of both, by the learner
        self._rejected: collections.Counter[int] = collections.Counter()  # by reason
        self._last_message = time.monotonic()
        self._waited = 0.0  # seconds, since the last message

        targets = [self._keep_session]
        if role == "actor":
            targets.append(self._keep_pulling)
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
        """Waits for the learner; everything that an actor needs to act."""
        with self._lock:
            self._wait(lambda: self._reply is not None)
            assert self._reply is not None
            return self._reply

    def parameters(self) -> Parameters:
        """The newest parameters that were pulled, at once; only for the very first it waits."""
        with self._lock:
            self._waited += self._wait(lambda: self._parameters is not None)
            assert self._parameters is not None
            return self._parameters

    def prefetch(self) -> None:
        """Has newer parameters pulled, in the background, if there are any."""
        with self._lock:
            self._wanted = True
            self._lock.notify_all()

    def newest(self) -> Parameters | None:
        """The newest parameters that were pulled, also after the run has finished."""
        return self._parameters

    def task(self) -> int:
        """What the learner last said is to be played."""
        return self._task

    def send(self, unrolls: ActorUnrolls) -> None:
        """Copies unrolls into a message and queues it; waits while too many have no receipt.

        ValueError if the message is larger than the learner takes.
        """
        with self._lock:
            reply = self._reply
            if reply is None:
                raise RuntimeError("send before join")
            room = max(1, reply.max_unrolls_in_flight)
            self._waited += self._wait(lambda: len(self._pending) < room)
        message = self._encode(unrolls, reply.fingerprint)
        size = message.ByteSize()
        if size > reply.max_message_bytes:
            raise ValueError(
                f"the unrolls of {message.num_envs} environments make a message of {size} bytes, "
                f"the learner takes {reply.max_message_bytes}: use fewer environments per group"
            )
        with self._lock:
            self._sequence += 1
            message.sequence = self._sequence
            now = time.monotonic()
            message.elapsed_seconds = now - self._last_message
            message.waited_seconds = self._waited
            self._last_message, self._waited = now, 0.0
            self._pending.append(message)
            self._made.append(now)
            self._metrics.pending.set(len(self._pending))
            self._lock.notify_all()
        self._metrics.frames.inc(sum(message.frames))
        self._metrics.episodes.inc(len(message.episodes))
        for fault in unrolls.faults:
            self._metrics.environment_faults.labels(fault.kind).inc()
        self._metrics.sent_bytes.inc(size)
        self._metrics.wait_seconds.inc(message.waited_seconds)

    def report_evaluation(
        self, task: int, parameters: Parameters, episodes: Sequence[Episode]
    ) -> bool:
        """Reports what frozen parameters achieved; False if the learner could not be reached."""
        evaluation = pb.Evaluation(
            actor=self._name,
            incarnation=self._incarnation,
            learner_incarnation=parameters.incarnation,
            parameter_version=parameters.version,
            frames=parameters.frames,
            task=task,
            episodes=_episodes(episodes),
        )
        try:
            self._stub.ReportEvaluation(
                evaluation, timeout=_JOIN_SECONDS, metadata=self._dialler.metadata()
            )
        except grpc.RpcError as error:
            _log.warning("%s could not report an evaluation: %s", self._name, _describe(error))
            return False
        return True

    def stop(self) -> None:
        """Makes the caller's next or present wait raise `Stopped`. Safe in a signal handler."""
        self._stopping = True

    def drain(self, seconds: float) -> bool:
        """Waits for the receipts of what was sent; False if some had not come in time."""

        def drained() -> bool:
            return not self._pending or self._finished or self._error is not None

        with self._lock:
            return self._lock.wait_for(drained, seconds)

    def close(self) -> None:
        """Ends the session and its threads. What has no receipt is forgotten."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._channel.close()  # ends the calls in progress
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _wait(self, ready: Callable[[], bool]) -> float:
        """Waits, with the lock held, until `ready`; the seconds that it took."""
        start = time.monotonic()
        while True:
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise Stopped
            if self._finished:
                raise RunFinished
            if ready():
                return time.monotonic() - start
            self._lock.wait(_WAKE_SECONDS)

    def _encode(self, unrolls: ActorUnrolls, fingerprint: str) -> pb.Unrolls:
        unroll = unrolls.unroll
        leaves = tree.flatten((unroll.timestep, unroll.output, unroll.core_state))
        return pb.Unrolls(
            actor=self._name,
            incarnation=self._incarnation,
            fingerprint=fingerprint,
            learner_incarnation=unrolls.incarnation,
            parameter_version=int(unroll.parameter_version),
            num_envs=len(unroll.frames),
            frames=unroll.frames.tolist(),
            task=unrolls.task,
            tensors=codec.encode(leaves),
            episodes=_episodes(unrolls.episodes),
            # The learner takes no more than environments; the newest say most.
            environment_faults=[_fault(fault) for fault in unrolls.faults[-len(unroll.frames) :]],
        )

    # What the threads do.

    def _guard(self, target: Callable[[], None]) -> None:
        """Runs a thread so that it cannot die silently."""
        try:
            target()
        except BaseException as error:
            with self._lock:
                if self._error is None and not self._closed:
                    self._error = error
                self._lock.notify_all()

    def _ended(self) -> bool:
        return self._closed or self._finished or self._error is not None

    def _sleep(self, seconds: float | None, until: Callable[[], bool] = lambda: False) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._ended() or until(), seconds)

    def _keep_session(self) -> None:
        """Joins and serves the session, and joins again with backoff whenever it is lost."""
        serve = self._stream if self._role == pb.ROLE_ACTOR else self._poll
        backoff = _FIRST_BACKOFF_SECONDS
        away_since, away = time.monotonic(), False
        while not self._ended():
            if self._dialler.has_changed():
                old, self._channel = self._channel, self._dialler.dial()
                self._stub = pb_grpc.LearnerStub(self._channel)
                old.close()  # last: the other thread may not call through a closed channel
            try:
                reply = self._join()
                if self._ended():
                    return
                away = False
                joined = time.monotonic()
                self._metrics.joins.inc()
                self._metrics.connected.set(1)
                try:
                    serve(reply)
                finally:
                    self._metrics.connected.set(0)
                    away_since = time.monotonic()
                    if away_since - joined > backoff:  # that session was a good one
                        backoff = _FIRST_BACKOFF_SECONDS
            except grpc.RpcError as error:
                if self._ended():
                    return
                self._raise_if_refused(error)
                # It is there and wants to be asked again: this actor is quarantined, or others
                # have just asked too often.
                is_there = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                if is_there:
                    away_since = time.monotonic()
                if not away:
                    away = True
                    what = "waits for" if self._reply is None or is_there else "lost"
                    _log.warning(
                        "%s %s the learner at %s: %s",
                        self._name,
                        what,
                        self._learner,
                        _describe(error),
                    )
            waited = time.monotonic() - away_since
            if self._reconnect_timeout is not None and waited > self._reconnect_timeout:
                raise LearnerAway(
                    f"no learner at {self._learner} for {waited:.1f} s, "
                    f"over the reconnect timeout of {self._reconnect_timeout:g} s"
                )
            self._sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)

    def _raise_if_refused(self, error: grpc.RpcError) -> None:
        if error.code() in _REFUSALS:
            raise LearnerRefused(
                f"the learner at {self._learner} refused {self._name}: {_describe(error)}"
            ) from None

    def _join(self) -> pb.JoinReply:
        with self._lock:
            request = pb.JoinRequest(
                protocol=codec.PROTOCOL_VERSION,
                actor=self._name,
                incarnation=self._incarnation,
                role=self._role,
                acknowledged_sequence=self._acknowledged_sequence,
                acknowledged_unrolls=self._acknowledged_unrolls,
                proof=self._proof,
            )
        reply = self._stub.Join(request, timeout=_JOIN_SECONDS, metadata=self._dialler.metadata())
        with self._lock:
            if reply.finished:
                self._finish()
                return reply
            before, self._reply = self._reply, reply
            self._task = reply.task
            self._learner_incarnation = reply.learner_incarnation
            self._lock.notify_all()
        if before is None:
            _log.info("%s joined %s as actor %d", self._name, self._learner, reply.actor_index)
        elif before.fingerprint != reply.fingerprint:
            raise LearnerChanged(
                f"the learner at {self._learner} came back with another environment, agent or "
                f"unroll length: this actor was built for fingerprint {before.fingerprint}, the "
                f"learner now has {reply.fingerprint}; start the actor again"
            )
        else:
            _log.info("%s joined %s again", self._name, self._learner)
        return reply

    def _finish(self) -> None:
        """Notes, with the lock held, that training has ended."""
        if not self._finished:
            _log.info("%s: the learner at %s has finished", self._name, self._learner)
        self._finished = True
        self._pending.clear()
        self._made.clear()
        self._metrics.pending.set(0)
        self._lock.notify_all()

    def _stream(self, reply: pb.JoinReply) -> None:
        """One stream of unrolls, until it breaks (RpcError) or the learner wants another join."""
        del reply
        with self._lock:
            self._session += 1
            self._num_sent = 0  # what has no receipt is sent again, in order
            session = self._session
        call = self._call = self._stub.StreamUnrolls(
            self._messages(session), metadata=self._dialler.metadata()
        )
        try:
            for receipt in call:
                if not self._take_receipt(receipt):
                    return
        finally:
            with self._lock:
                self._session += 1  # ends `_messages`
                self._call = None
                self._lock.notify_all()
            call.cancel()

    def _messages(self, session: int) -> Iterator[pb.Unrolls]:
        def over() -> bool:
            return self._ended() or self._session != session

        while True:
            with self._lock:
                self._lock.wait_for(lambda: over() or self._num_sent < len(self._pending))
                if over():
                    return
                message = self._pending[self._num_sent]
                self._num_sent += 1
            yield message

    def _take_receipt(self, receipt: pb.Receipt) -> bool:
        """Accounts for a receipt; False when the session has to begin again or has ended."""
        with self._lock:
            if self._finished or receipt.reason == pb.REASON_UNKNOWN_ACTOR:
                return False  # a pull may have said first that training has ended
            if not self._num_sent or receipt.sequence != self._pending[0].sequence:
                raise LearnerError(
                    f"the learner at {self._learner} sent a receipt for message "
                    f"{receipt.sequence}; those without one are "
                    f"{[message.sequence for message in self._pending]}"
                )
            message = self._pending.popleft()
            self._num_sent -= 1
            status = _STATUSES.get(receipt.status, "unknown")  # of a newer minor version
            self._metrics.unrolls.labels(status).inc(message.num_envs)
            seconds = time.monotonic() - self._made.popleft()
            self._metrics.rpc_seconds.labels("StreamUnrolls").observe(seconds)
            self._metrics.pending.set(len(self._pending))
            self._acknowledged_sequence = receipt.sequence
            self._learner_incarnation = receipt.learner_incarnation
            self._task = receipt.task
            self._proof = receipt.proof
            is_taken = receipt.status in (pb.STATUS_ACCEPTED, pb.STATUS_DUPLICATE)
            if receipt.proof:
                self._acknowledged_unrolls = receipt.acknowledged_unrolls
            elif is_taken:  # a learner before protocol 1.3 leaves the counting to the actor
                self._acknowledged_unrolls += message.num_envs
            if receipt.status == pb.STATUS_FINISHED:
                self._finish()
            elif not is_taken:
                self._log_rejection(receipt)
            self._lock.notify_all()
            # When this actor is quarantined the stream ends, and the learner says at the next join
            # for how long. What has no receipt stays pending.
            return not self._finished and receipt.reason != pb.REASON_QUARANTINED

    def _log_rejection(self, receipt: pb.Receipt) -> None:
        self._rejected[receipt.reason] += 1
        count = self._rejected[receipt.reason]
        if count & (count - 1) == 0:  # the first, second, fourth, eighth, ...
            _log.warning(
                "%s: message %d was rejected (%s, number %d): %s",
                self._name,
                receipt.sequence,
                pb.Reason.Name(receipt.reason),
                count,
                receipt.detail,
            )

    def _keep_pulling(self) -> None:
        """Pulls newer parameters for ever; when it cannot, the old ones stay."""
        self._sleep(None, until=lambda: self._reply is not None)
        while not self._ended():
            with self._lock:
                self._wanted = False
            try:
                pulled = self._pull()
            except grpc.RpcError as error:  # the session is lost as well and speaks about it
                self._raise_if_refused(error)
                self._sleep(_FIRST_BACKOFF_SECONDS)
                pulled = False
            if not pulled:
                self._sleep(_RETRY_POLL_SECONDS, until=lambda: self._wanted)
            self._sleep(_POLL_SECONDS, until=self._must_pull)

    def _must_pull(self) -> bool:
        held = self._parameters
        is_of_another = held is not None and held.incarnation != self._learner_incarnation
        return self._wanted or held is None or is_of_another

    def _poll(self, reply: pb.JoinReply) -> None:
        """An evaluator's session: pulls until the learner is lost (RpcError) or another one."""
        while not self._ended():
            if not self._pull() and self._learner_incarnation != reply.learner_incarnation:
                return
            self._sleep(_POLL_SECONDS)

    def _pull(self) -> bool:
        """Asks for newer parameters; whether there were any that this session can use."""
        with self._lock:
            held = self._parameters
        with self._metrics.rpc_seconds.labels("GetParameters").time():
            reply = self._stub.GetParameters(
                pb.GetParametersRequest(
                    learner_incarnation=0 if held is None else held.incarnation,
                    newer_than=0 if held is None else held.version,
                ),
                timeout=_PULL_SECONDS,
                metadata=self._dialler.metadata(),
            )
        newest = reply.parameters if reply.HasField("parameters") else None
        with self._lock:
            joined = self._reply
            assert joined is not None
            if newest is not None and newest.learner_incarnation != joined.learner_incarnation:
                # Another learner, whose specs are not known before the session has joined it. A
                # stream that still seems open leads nowhere.
                self._learner_incarnation = newest.learner_incarnation
                if self._call is not None:
                    self._call.cancel()
                return False
        parameters = None if newest is None else _parameters(newest, joined.parameter_specs)
        with self._lock:
            if parameters is not None:
                self._parameters = parameters
                self._metrics.parameter_version.set(parameters.version)
                self._lock.notify_all()
            if reply.finished:
                self._finish()
        return parameters is not None


class StatusClient:
    """Asks a learner how its run is doing. Use it as a context manager.

    Args:
      learner: host:port or unix:PATH.
      security: what is shown to the learner (a reader's credentials), and asked of it.

    Raises:
      SecurityError: the files of `security` cannot be used.
    """

    def __init__(self, learner: str, security: ClientSecurity = _NO_SECURITY) -> None:
        self._learner = learner
        self._dialler = _Dialler(learner, security)
        self._channel = self._dialler.dial()
        self._stub = pb_grpc.LearnerStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def get(self) -> pb.RunStatus:
        """The status now; LearnerError if there is no answer."""
        try:
            return self._stub.GetStatus(
                pb.GetStatusRequest(), timeout=_JOIN_SECONDS, metadata=self._dialler.metadata()
            )
        except grpc.RpcError as error:
            raise LearnerError(
                f"no status of the learner at {self._learner}: {_describe(error)}"
            ) from None


class _Dialler:
    """Makes channels to the learner with the certificates that its files hold."""

    def __init__(self, learner: str, security: ClientSecurity) -> None:
        security.check()
        self._learner = learner
        self._security = security
        ca, cert, key = security.tls_ca, security.tls_cert, security.tls_key
        self._files = Watched([path for path in (ca, cert, key) if path is not None], list)
        self._dialled: list[bytes] | None = None
        self._token: Watched[str] | None = None
        if security.token_file is not None:
            self._token = Watched([security.token_file], lambda contents: first_token(*contents))

    def has_changed(self) -> bool:
        """Whether there are other certificates than when was dialled last."""
        return self._files.get() is not self._dialled

    def dial(self) -> grpc.Channel:
        """A channel, which connects when it is used first."""
        security = self._security
        self._dialled = self._files.get()
        options = list(_OPTIONS)
        if security.tls_server_name:
            options.append(("grpc.ssl_target_name_override", security.tls_server_name))
        if not security.is_encrypted:
            return grpc.insecure_channel(self._learner, options=options)
        rest = list(self._dialled)
        ca = rest.pop(0) if security.tls_ca is not None else None
        cert, key = rest if rest else (None, None)
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        return grpc.secure_channel(self._learner, credentials, options=options)

    def metadata(self) -> list[tuple[str, str]]:
        """What every call carries: a token, as its file has it then.

        Not by an interceptor: one that makes a call while its channel is closed crashes gRPC.
        """
        if self._token is None:
            return []
        return [("authorization", f"Bearer {self._token.get()}")]


def _parameters(message: pb.Parameters, specs: Sequence[pb.TensorSpec]) -> Parameters:
    return Parameters(
        incarnation=message.learner_incarnation,
        version=message.version,
        progress=message.progress,
        frames=message.frames,
        values=codec.decode(message.tensors, specs),
    )


def _episodes(episodes: Sequence[Episode]) -> list[pb.Episode]:
    return [
        pb.Episode(
            episode_return=episode.episode_return,
            length=episode.length,
            frames=episode.frames,
            info=dict(episode.info),
        )
        for episode in episodes
    ]


def _fault(fault: EnvironmentFault) -> pb.EnvironmentFault:
    return pb.EnvironmentFault(
        environment=fault.environment,
        kind=_FAULT_KINDS[fault.kind],
        detail=fault.detail[:_MAX_FAULT_DETAIL],
    )


def _describe(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
