"""The learner's gRPC server: an asyncio server in its own thread, with its own event loop.

The meaning of requests is in `learner.service.service`.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from impala.runtime import listen as addresses
from impala.runtime.credentials import Revoked, Role
from impala.runtime.security import Gate, ServerSecurity, Watched
from learner.fleet.rates import Rate, host_of
from learner.fleet.refusals import InvalidRequest, Unavailable
from learner.service import calls
from learner.service.probes import Probes
from learner.service.service import LearnerService
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

SERVICE_NAME = "impala.v1.Learner"
LIVENESS = "alive"  # health service: SERVING while `Server.check` is called regularly

_NO_SECURITY = ServerSecurity()
_MAX_PROBES = 64  # at once
_HANDSHAKE_SECONDS = 10.0  # for a new connection to speak HTTP/2...
_IDLE_SECONDS = 60.0  # ...and to be without a call
_PING_SECONDS = 10.0  # between the pings of a connection without data
_HEALTH_HANDSHAKE_SECONDS = 2.0  # of the health port, which has fewer connections
_HEALTH_IDLE_SECONDS = 5.0
_MAX_CONNECTIONS = 10_000
_HEALTH_CONNECTIONS = 64
# File descriptors that callers cannot use up: of checkpoints, replay and telemetry; of metrics;
# and of health.
_TRAINING_FILES = 64
_METRICS_FILES = 64
_RESERVED_FILES = _TRAINING_FILES + _METRICS_FILES + _HEALTH_CONNECTIONS
_MIN_CONNECTIONS = 4  # with fewer, serving is impossible
_HANGS_SECONDS = 600.0  # without a check; the first update of a large network compiles for minutes
_LOOK_SECONDS = 1.0  # between two checks of that
_KEPT: list[grpc.ServerCredentials] = []  # gRPC calls them for certificates without owning them
# Per host. When a learner comes back, all actors of a host join at once, possibly twice.
_MAX_JOINS_PER_MINUTE = 2000
_MAX_STREAMS = 1000
_MAX_STREAMS_OF_CONNECTION = 64

_T = TypeVar("_T")


class Server:
    """Serves a `LearnerService` on one address until it is stopped."""

    def __init__(
        self,
        service: LearnerService,
        listen: str,
        security: ServerSecurity = _NO_SECURITY,
        health_listen: str | None = None,
        observe: Callable[[str, float], None] = lambda method, seconds: None,
    ):
        """Binds nothing yet.

        Args:
          service: answers the calls.
          listen: HOST:PORT (port 0: any free one) or unix:PATH.
          security: which credentials callers need, and the server's own.
          health_listen: HOST:PORT of the health service, in plain text; None: it is not served.
          observe: called with the method and duration in seconds of each answer.

        Raises:
          SecurityError: its files cannot be used, or do not suffice for this address.
          OSError: an address is invalid.
        """
        security.check(listen, health=health_listen)
        self._service = service
        self._listen = listen
        self._security = security
        self._health_listen = health_listen
        self._refused = calls.Refused()
        self._observe = observe
        self._bound: concurrent.futures.Future[tuple[str, str | None]] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Future[float] | None = None  # the grace, in seconds
        self._stop_called = False
        self._checked = time.monotonic()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="grpc-server", daemon=True)

    def start(self) -> str:
        """Binds the address and serves.

        Returns:
          The bound address for clients, HOST:PORT or unix:PATH.

        Raises:
          OSError: the address cannot be bound.
        """
        self._connections = _room_for_connections(self._listen)
        self._thread.start()
        address, self.health_address = self._bound.result()
        return address

    def stop(self, grace: float) -> None:
        """Reports NOT_SERVING, refuses new calls, ends streams after the current receipt; stops.

        Args:
          grace: seconds that calls in flight may still take. Messages waiting for room in the
            ingest are not accepted, and their streams end at once.
        """
        self._stop_called = True
        if self._loop is not None and self._stopping is not None:
            stopping = self._stopping
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself: see check()
                self._loop.call_soon_threadsafe(_resolve, stopping, grace)
        if self._thread.is_alive():
            self._thread.join()

    def refusals(self) -> Mapping[str, int]:
        """Returns how many calls were refused, by reason."""
        return self._refused.counts()

    def check(self) -> None:
        """Raises RuntimeError if the server has ended by itself.

        The training loop must call it regularly, also while it waits for data: otherwise the server
        reports to health probes that the learner hangs.
        """
        self._checked = time.monotonic()
        if self._error is not None or (not self._thread.is_alive() and not self._stop_called):
            raise RuntimeError(
                f"The gRPC server on {self._listen} has died; the log says why."
            ) from self._error
        self._service.check()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if not self._bound.done():
                self._bound.set_exception(error)
            else:
                self._error = error
                _log.exception("The gRPC server has died.")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = self._loop.create_future()
        server = grpc.aio.server(
            options=_options(self._service.max_message_bytes, self._connections)
        )
        methods = _Calls(
            self._service, Gate(self._security), self._stopping, self._observe, self._refused
        )
        probes = Probes(self._refused)
        server.add_generic_rpc_handlers((_handlers(methods),))
        for_probes = health_address = None
        grace = 0.0
        try:
            address = bind(server, self._listen, self._security)
            await server.start()
            if self._health_listen is not None:
                for_probes = grpc.aio.server(
                    maximum_concurrent_rpcs=_MAX_PROBES, options=_HEALTH_OPTIONS
                )
                for_probes.add_generic_rpc_handlers((probes.handlers(),))
                health_address = bind(for_probes, self._health_listen, _NO_SECURITY)
                await for_probes.start()
            for name in ("", SERVICE_NAME, LIVENESS):
                probes.set(name, serving=True)
            self._bound.set_result((address, health_address))
            while not (await asyncio.wait({self._stopping}, timeout=_LOOK_SECONDS))[0]:
                probes.set(LIVENESS, serving=time.monotonic() - self._checked <= _HANGS_SECONDS)
            grace = self._stopping.result()
            for name in ("", SERVICE_NAME, LIVENESS):
                probes.set(name, serving=False)
        finally:
            await server.stop(grace)
            if for_probes is not None:
                await for_probes.stop(0.0)


def _resolve(stopping: asyncio.Future[float], grace: float) -> None:
    if not stopping.done():
        stopping.set_result(grace)


class _Calls:
    """The methods of the service for gRPC. None of their exceptions ends the server."""

    def __init__(
        self,
        service: LearnerService,
        gate: Gate,
        stopping: asyncio.Future[float],
        observe: Callable[[str, float], None],
        refused: calls.Refused,
    ):
        self._service = service
        self._gate = gate
        self._observe = observe
        self._refused = refused
        self._limits = _Limits()
        self._waiting: set[asyncio.Timeout] = set()  # expire when the server stops
        self._stopping = stopping
        stopping.add_done_callback(self._end_waiting)

    async def join(self, _: object, context: grpc.aio.ServicerContext) -> pb.JoinReply:
        async with calls.statuses(context, self._refused):
            self._admit(context, "actor", "evaluator")
            self._limits.joins(host_of(context.peer()))
            request = await calls.request(context, pb.JoinRequest)
            role: Role = "evaluator" if request.role == pb.ROLE_EVALUATOR else "actor"
            self._admit(context, role, actor=request.actor)
            with self._timed("Join"):
                return self._service.join(request)
        raise AssertionError  # _statuses lets nothing pass

    async def get_parameters(self, _: object, context: grpc.aio.ServicerContext) -> bytes:
        async with calls.statuses(context, self._refused):
            self._admit(context, "actor", "evaluator", "reader")
            request = await calls.request(context, pb.GetParametersRequest)
            if request.actor:
                self._admit(context, "actor", actor=request.actor)
            permit = await self._unless_stopping(self._service.permit(request))
            await self._unless_stopping(self._service.newest_parameters())
            with self._timed("GetParameters"):
                return self._service.get_parameters(request, permit)
        raise AssertionError

    async def get_executable_policy(
        self, _: object, context: grpc.aio.ServicerContext
    ) -> pb.GetExecutablePolicyReply:
        async with calls.statuses(context, self._refused):
            self._admit(context, "actor", "evaluator")
            request = await calls.request(context, pb.GetExecutablePolicyRequest)
            with self._timed("GetExecutablePolicy"):
                return await self._unless_stopping(self._service.get_executable_policy(request))
        raise AssertionError

    async def act(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Handles one row at a time, as `stream_unrolls` does messages."""
        host = host_of(context.peer())
        async with calls.statuses(context, self._refused), self._limits.stream(host):
            self._admit(context, "actor")
            with self._service.acting() as act:
                began = time.monotonic()
                while (
                    data := await self._unless_stopping(self._in_time(context.read(), began))
                ) is not grpc.aio.EOF:
                    request = calls.parsed(pb.ActRequest, data)
                    self._admit(context, "actor", actor=request.actor)
                    with self._timed("Act"):
                        reply = await self._unless_stopping(act(request))
                    if request.begins:
                        began = time.monotonic()
                    await self._in_time(context.write(reply), began)
                    if reply.finished:
                        return

    async def _in_time(self, awaitable: Awaitable[_T], began: float) -> _T:
        """Returns a result of a caller of `Act`, for whom parameters are held since `began`."""
        seconds = self._service.hang_seconds
        held = time.monotonic() - began
        try:
            async with asyncio.timeout(min(seconds, 2.0 * seconds - held)):
                return await awaitable
        except TimeoutError:
            raise calls.TooSlow(
                f"No row came, or no reply was taken, for {seconds:g} s (actor.hang_seconds), or "
                "an unroll took twice as long, for which parameters were held: open another stream."
            ) from None

    async def get_snapshot(self, _: object, context: grpc.aio.ServicerContext) -> bytes:
        async with calls.statuses(context, self._refused):
            self._admit(context, "evaluator")
            request = await calls.request(context, pb.GetSnapshotRequest)
            self._admit(context, "evaluator", actor=request.actor)
            with self._timed("GetSnapshot"):
                return await asyncio.to_thread(self._service.evaluators.get_snapshot, request)
        raise AssertionError

    async def report_evaluation(
        self, _: object, context: grpc.aio.ServicerContext
    ) -> pb.EvaluationReceipt:
        async with calls.statuses(context, self._refused):
            self._admit(context, "evaluator")
            request = await calls.request(context, pb.Evaluation)
            self._admit(context, "evaluator", actor=request.actor)
            with self._timed("ReportEvaluation"):
                return self._service.evaluators.report(request)
        raise AssertionError

    async def get_status(self, _: object, context: grpc.aio.ServicerContext) -> pb.RunStatus:
        async with calls.statuses(context, self._refused):
            self._admit(context, "reader")
            await calls.request(context, pb.GetStatusRequest)
            await self._unless_stopping(self._service.newest_parameters())  # whose state is told
            with self._timed("GetStatus"):
                status = self._service.get_status()
                status.refused.update(self._refused.counts())
                return status
        raise AssertionError

    async def stream_unrolls(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Handles one message at a time: further ones wait in the transport, not in memory."""
        host = host_of(context.peer())
        async with calls.statuses(context, self._refused), self._limits.stream(host):
            self._admit(context, "actor")
            actor = ""  # the stream's, once known
            with self._service.stream() as submit:
                while (data := await self._unless_stopping(context.read())) is not grpc.aio.EOF:
                    tensors, rest = codec.split(data)
                    try:
                        self._service.check_bytes_beside_tensors(len(rest))
                        message = calls.parsed(pb.Unrolls, rest)
                    except InvalidRequest as error:
                        if actor:
                            self._service.blame(actor, str(error))
                        raise
                    # Again: the token may have been removed, or the actor revoked.
                    self._admit(context, "actor", actor=message.actor)
                    with self._timed("StreamUnrolls"):
                        receipt = await self._unless_stopping(submit(message, tensors))
                    del data, tensors  # may be megabytes, which nobody needs while this waits
                    await context.write(receipt)
                    if receipt.reason == pb.REASON_QUARANTINED:
                        self._refused.add("quarantined")
                        return
                    if receipt.reason != pb.REASON_UNKNOWN_ACTOR:
                        actor = message.actor

    def _admit(
        self, context: grpc.aio.ServicerContext, *roles: Role, actor: str | None = None
    ) -> None:
        """Checks that a caller has a credential for one of the roles and for its name."""
        metadata = dict(context.invocation_metadata() or ())
        names = context.auth_context().get("peer_uri", ())  # not DNS or e-mail names like them
        try:
            self._gate.admit(
                roles,
                str(metadata.get("authorization", "")),
                [name.decode(errors="replace") for name in names],
                actor,
            )
        except Revoked as revoked:
            if actor is not None:
                self._service.refused(actor, str(revoked))
            raise

    @contextlib.contextmanager
    def _timed(self, method: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._observe(method, time.monotonic() - start)

    async def _unless_stopping(self, awaitable: Awaitable[_T]) -> _T:
        """Returns the result of `awaitable`, which is cancelled if the server stops first."""
        waiting = asyncio.timeout(0.0 if self._stopping.done() else None)
        try:
            async with waiting:
                self._waiting.add(waiting)
                return await awaitable
        except TimeoutError:
            if waiting.expired():
                raise Unavailable("The learner is stopping: connect again later.") from None
            raise
        finally:
            self._waiting.discard(waiting)

    def _end_waiting(self, _: object) -> None:
        for waiting in self._waiting:
            waiting.reschedule(0.0)


class _Limits:
    """Limits per host, so that no host can lock out the others. Of one event loop."""

    def __init__(self) -> None:
        self._joins = Rate(_MAX_JOINS_PER_MINUTE, _MAX_JOINS_PER_MINUTE / 60.0)
        self._streams: collections.Counter[str] = collections.Counter()

    def joins(self, host: str) -> None:
        """Counts a join. Raises calls.TooMany if there are too many."""
        if not self._joins.take(host):
            raise calls.TooMany(
                f"{_MAX_JOINS_PER_MINUTE} joins a minute from {host} are the most: wait."
            )

    @contextlib.asynccontextmanager
    async def stream(self, host: str) -> AsyncIterator[None]:
        """Counts a stream while it is open. Raises calls.TooMany if there are too many."""
        if self._streams[host] >= _MAX_STREAMS:
            raise calls.TooMany(f"{_MAX_STREAMS} streams from {host} are the most.")
        self._streams[host] += 1
        try:
            yield
        finally:
            self._streams[host] -= 1
            if not self._streams[host]:
                del self._streams[host]


def _handlers(methods: _Calls) -> grpc.GenericRpcHandler:
    """Returns the handlers of the service's methods.

    Unary calls are handled as streams, which look the same on the wire: otherwise gRPC would read a
    request before the caller is known. Parameters are sent as bytes, serialised once for all
    callers.
    """
    one_request = grpc.stream_unary_rpc_method_handler
    return grpc.method_handlers_generic_handler(
        SERVICE_NAME,
        {
            "Join": one_request(methods.join, response_serializer=pb.JoinReply.SerializeToString),
            "StreamUnrolls": grpc.stream_stream_rpc_method_handler(
                methods.stream_unrolls, response_serializer=pb.Receipt.SerializeToString
            ),
            "GetParameters": one_request(methods.get_parameters),
            "GetExecutablePolicy": one_request(
                methods.get_executable_policy,
                response_serializer=pb.GetExecutablePolicyReply.SerializeToString,
            ),
            "Act": grpc.stream_stream_rpc_method_handler(
                methods.act, response_serializer=pb.ActReply.SerializeToString
            ),
            "GetSnapshot": one_request(methods.get_snapshot),
            "ReportEvaluation": one_request(
                methods.report_evaluation,
                response_serializer=pb.EvaluationReceipt.SerializeToString,
            ),
            "GetStatus": one_request(
                methods.get_status, response_serializer=pb.RunStatus.SerializeToString
            ),
        },
    )


def _room_for_connections(listen: str) -> int:
    """Returns how many connections each of an address's sockets may have.

    Raises:
      OSError: so few file descriptors are left that serving is impossible.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd" if sys.platform.startswith("linux") else "/dev/fd"))
    room = (most if most != resource.RLIM_INFINITY else sys.maxsize) - taken - _RESERVED_FILES
    if room < _MIN_CONNECTIONS:
        raise OSError(
            f"This process may open {most} files, has {taken} open and needs {_RESERVED_FILES} "
            f"for training, metrics and health, which leaves {max(0, room)} for connections: "
            f"allow it {taken + _RESERVED_FILES + 64} or more (ulimit -n)."
        )
    sockets = 2 if listen.startswith("localhost:") else 1  # of IPv4 and IPv6
    return min(room, _MAX_CONNECTIONS) // sockets


def pings() -> list[tuple[str, int]]:
    """Returns the options by which actors may ping every ten seconds, also between calls."""
    return [
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * _PING_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _options(max_message_bytes: int, connections: int) -> list[tuple[str, int]]:
    """Returns limits and keepalive options; actors ping every 30 s, also between calls."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second learner on this port must fail
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", _MAX_STREAMS_OF_CONNECTION),
        *pings(),
        ("grpc.keepalive_time_ms", 60_000),  # streams of hosts that vanished end
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_SECONDS)),
        ("grpc.max_connection_idle_ms", int(1000 * _IDLE_SECONDS)),
    ]


_HEALTH_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", _HEALTH_CONNECTIONS),
    ("grpc.server_handshake_timeout_ms", int(1000 * _HEALTH_HANDSHAKE_SECONDS)),
    ("grpc.max_connection_idle_ms", int(1000 * _HEALTH_IDLE_SECONDS)),
]


def _credentials(security: ServerSecurity) -> grpc.ServerCredentials:
    """Returns credentials that read the files again for new connections; open ones are kept."""
    cert, key, authorities = security.tls_cert, security.tls_key, security.tls_client_ca
    assert cert is not None and key is not None

    def read(contents: Sequence[bytes]) -> Any:
        cert_chain, private_key, *roots = contents
        return grpc.ssl_server_certificate_configuration(
            [(private_key, cert_chain)], root_certificates=roots[0] if roots else None
        )

    files = Watched([cert, key, *([authorities] if authorities is not None else [])], read)
    held = first = files.get()

    def newest() -> Any:
        nonlocal held
        before, held = held, files.get()
        return None if held is before else held

    credentials = grpc.dynamic_ssl_server_credentials(
        first, newest, require_client_authentication=authorities is not None
    )
    _KEPT.append(credentials)
    return credentials


def bind(server: grpc.aio.Server, listen: str, security: ServerSecurity) -> str:
    """Binds `listen`. Returns the address for clients."""
    path = addresses.socket_path(listen)
    if path is None:
        addresses.parse("gRPC", listen)
    try:
        if security.tls_cert is not None:
            port = server.add_secure_port(listen, _credentials(security))
        else:
            port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(
            f"Cannot listen on {listen!r} ({error}): give HOST:PORT of this machine with a port "
            "that is free (0 finds one), or unix:PATH."
        ) from error
    if path is not None:
        return listen
    return f"{listen.rpartition(':')[0]}:{port}"
