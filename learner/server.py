"""The learner's gRPC server: an asyncio server in a thread of its own, with its own event loop.

All that it knows of gRPC stays here; what requests mean is in `learner.service`.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from learner.service import (
    IncompatibleProtocol,
    InvalidRequest,
    LearnerService,
    Unavailable,
)
from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

SERVICE_NAME = "impala.v1.Learner"

_MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path, a limit of Linux

_T = TypeVar("_T")


class Server:
    """Serves a `LearnerService` on one address until it is stopped."""

    def __init__(self, service: LearnerService, listen: str):
        """Binds nothing yet.

        Args:
          service: what is served.
          listen: HOST:PORT (port 0: any free one) or unix:PATH.
        """
        self._service = service
        self._listen = listen
        self._bound: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Future[float] | None = None  # the grace, in seconds
        self._stop_called = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="grpc-server", daemon=True)

    def start(self) -> str:
        """Binds the address and serves.

        Returns:
          The bound address, HOST:PORT or unix:PATH, as a client would give it.

        Raises:
          OSError: the address cannot be bound.
        """
        self._thread.start()
        return self._bound.result()

    def stop(self, grace: float) -> None:
        """Says NOT_SERVING, refuses new calls, ends streams after the receipt at hand, and returns.

        Args:
          grace: seconds that calls in flight may still take. Messages that wait for room in the
            ingest do not wait for it: they are not taken and their streams end at once.
        """
        self._stop_called = True
        if self._loop is not None and self._stopping is not None:
            stopping = self._stopping
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself: see check()
                self._loop.call_soon_threadsafe(_resolve, stopping, grace)
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Raises RuntimeError if the server has ended without being stopped."""
        if self._error is not None or (not self._thread.is_alive() and not self._stop_called):
            raise RuntimeError(
                f"The gRPC server on {self._listen} has died; the log says why."
            ) from self._error

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
        server = grpc.aio.server(options=_options(self._service.max_message_bytes))
        calls = _Calls(self._service, self._stopping)
        server.add_generic_rpc_handlers((_handlers(calls),))
        probes = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(probes, server)
        grace = 0.0
        try:
            address = _bind(server, self._listen)
            await server.start()
            for name in ("", SERVICE_NAME):
                await probes.set(name, health_pb2.HealthCheckResponse.SERVING)
            self._bound.set_result(address)
            grace = await self._stopping
            await probes.enter_graceful_shutdown()
        finally:
            await server.stop(grace)


def _resolve(stopping: asyncio.Future[float], grace: float) -> None:
    if not stopping.done():
        stopping.set_result(grace)


class _Stopping(Exception):
    """The server stops while a stream waits."""


class _Calls:
    """The methods of the service as gRPC calls them. No exception of theirs ends the server."""

    def __init__(self, service: LearnerService, stopping: asyncio.Future[float]):
        self._service = service
        self._stopping = stopping

    async def join(
        self, request: pb.JoinRequest, context: grpc.aio.ServicerContext
    ) -> pb.JoinReply:
        async with _statuses(context):
            return self._service.join(request)
        raise AssertionError  # _statuses lets nothing pass

    async def get_parameters(
        self, request: pb.GetParametersRequest, context: grpc.aio.ServicerContext
    ) -> bytes:
        async with _statuses(context):
            return self._service.get_parameters(request)
        raise AssertionError

    async def report_evaluation(
        self, request: pb.Evaluation, context: grpc.aio.ServicerContext
    ) -> pb.EvaluationReceipt:
        async with _statuses(context):
            return self._service.report_evaluation(request)
        raise AssertionError

    async def stream_unrolls(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        """One message at a time: what is sent beyond waits in the transport, not in memory."""
        async with _statuses(context):
            while (message := await self._unless_stopping(context.read())) is not grpc.aio.EOF:
                receipt = await self._unless_stopping(self._service.submit(message))
                await context.write(receipt)

    async def _unless_stopping(self, awaitable: Awaitable[_T]) -> _T:
        """What `awaitable` gives; it is cancelled when the server stops first."""
        task = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait(
                {task, self._stopping},  # type: ignore[type-var]
                return_when=asyncio.FIRST_COMPLETED,
            )
            if task.done():
                return task.result()
            raise _Stopping
        finally:
            task.cancel()


@contextlib.asynccontextmanager
async def _statuses(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Answers with a gRPC status for every exception of the service."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except IncompatibleProtocol as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except InvalidRequest as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except (Unavailable, _Stopping):
        await context.abort(
            grpc.StatusCode.UNAVAILABLE, "The learner is stopping: connect again later."
        )
    except Exception:
        _log.exception("A call from %s failed.", context.peer())
        await context.abort(
            grpc.StatusCode.INTERNAL,
            "The learner failed to answer this call; its log says why.",
        )


def _handlers(calls: _Calls) -> grpc.GenericRpcHandler:
    """The service's methods. Parameters go out as bytes that were serialised once for all."""
    return grpc.method_handlers_generic_handler(
        SERVICE_NAME,
        {
            "Join": grpc.unary_unary_rpc_method_handler(
                calls.join,
                request_deserializer=pb.JoinRequest.FromString,
                response_serializer=pb.JoinReply.SerializeToString,
            ),
            "StreamUnrolls": grpc.stream_stream_rpc_method_handler(
                calls.stream_unrolls,
                request_deserializer=pb.Unrolls.FromString,
                response_serializer=pb.Receipt.SerializeToString,
            ),
            "GetParameters": grpc.unary_unary_rpc_method_handler(
                calls.get_parameters,
                request_deserializer=pb.GetParametersRequest.FromString,
                response_serializer=None,
            ),
            "ReportEvaluation": grpc.unary_unary_rpc_method_handler(
                calls.report_evaluation,
                request_deserializer=pb.Evaluation.FromString,
                response_serializer=pb.EvaluationReceipt.SerializeToString,
            ),
        },
    )


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Limits and keepalive; actors ping every 30 s, also between calls."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second learner on this port is an error
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),  # streams of hosts that vanished end
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _bind(server: grpc.aio.Server, listen: str) -> str:
    """Binds `listen` and returns the address that clients dial."""
    path = listen.removeprefix("unix:")
    if path != listen and len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise OSError(
            f"The socket path {path} has {len(os.fsencode(path))} bytes, at most "
            f"{_MAX_SOCKET_PATH} are possible: choose a shorter one."
        )
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(
            f"Cannot listen on {listen!r} ({error}): give HOST:PORT of this machine with a port "
            "that is free (0 finds one), or unix:PATH."
        ) from error
    if path != listen:
        return listen
    return f"{listen.rpartition(':')[0]}:{port}"
