"""A connection to the learner that survives the learner's restarts: the part of all clients.

A thread joins, serves the session, and joins again whenever it is lost. Errors in a client's
threads are raised in the caller's thread. `actors.session` decides what to send, log and give up.
"""

import abc
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Self

import grpc

from actors.channel import NO_SECURITY, LearnerChannel, failure
from actors.metrics import ActorMetrics
from actors.session import Session
from impala.runtime.security import ClientSecurity
from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

_WAKE_SECONDS = 0.2  # how often a waiting caller checks whether it was stopped
CALL_SECONDS = 10.0
PULL_SECONDS = 60.0
POLL_SECONDS = 1.0  # between pulls that nobody has asked for


class Stopped(Exception):
    """`stop` was called."""


class RunFinished(Exception):
    """The learner has reported the end of training."""


class Connection(abc.ABC):
    """A session with the learner and the thread that maintains it.

    Use it as a context manager. Whatever waits raises `Stopped` after `stop`, `RunFinished` when
    training has ended, and `LearnerError` or any error of a thread.

    Args:
      learner: host:port or unix:PATH.
      name: unique in the fleet, 1 to 200 characters.
      incarnation: from `actors.client.new_incarnation`.
      reconnect_timeout: seconds without a learner after which to give up; None: never.
      security: the credentials to present, and how to verify the learner.
      metrics: the instruments to update; None: private ones.
      gives_signs_of_life: whether the learner is to count an actor as active that sends nothing for
        long.

    Raises:
      SecurityError: the files of `security` cannot be used.
    """

    _role: "pb.Role" = pb.ROLE_ACTOR

    def __init__(
        self,
        learner: str,
        *,
        name: str,
        incarnation: int,
        reconnect_timeout: float | None = None,
        security: ClientSecurity = NO_SECURITY,
        metrics: ActorMetrics | None = None,
        gives_signs_of_life: bool = False,
    ):
        self._learner = learner
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
            role=self._role,
            reconnect_timeout=reconnect_timeout,
            gives_signs_of_life=gives_signs_of_life,
            now=time.monotonic(),
        )
        self._stream: grpc.Call | None = None
        self._stopping = False
        self._closed = False
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._start(self._keep_session)

    def _start(self, target: Callable[[], None]) -> None:
        """Starts a thread, which `close` ends."""
        thread = threading.Thread(
            target=self._guard, args=(target,), name=target.__name__, daemon=True
        )
        self._threads.append(thread)
        thread.start()

    @abc.abstractmethod
    def _serve(self, connection: int) -> None:
        """Makes the session's calls until the connection ends; raises RpcError if it fails."""

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

    def _wait(self, ready: Callable[[], bool]) -> float:
        """Waits, with the lock held, until `ready`. Returns the seconds waited."""
        start = time.monotonic()
        while True:
            if self._error is not None:
                raise self._error
            if self._stopping:
                raise Stopped
            if self._session.finished:
                raise RunFinished
            if ready():
                return time.monotonic() - start
            self._wait_for(
                lambda: self._error is not None or self._session.finished or ready(),
                _WAKE_SECONDS,
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

    def _changed(self) -> None:
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
        why = None
        while not self._ended():
            self._channel.renew(is_lost=why is not None and why.code == "UNAVAILABLE")
            why = None
            try:
                self._join()
            except grpc.RpcError as error:
                why = failure(error)
            if self._ended():
                break
            with self._lock:
                seconds = self._session.lost(why, time.monotonic())
                self._changed()
            self._sleep(seconds * random.uniform(0.5, 1.0))  # actors are not to join together

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
            self._changed()
        if self._ended():
            return
        again = " again" if connection > 1 else ""
        _log.info("%s joined %s%s", self._session.name, self._learner, again)
        self._metrics.joins.inc()
        self._metrics.connected.set(1)
        try:
            self._serve(connection)
        finally:
            self._metrics.connected.set(0)
