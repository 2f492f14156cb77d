"""The gRPC health service, for probes and load balancers.

With gRPC's own implementation, a watcher that does not read blocks everyone: a change of status
waits until all watchers have been notified. Here nothing waits for watchers. As they need no
credentials, their number and duration are limited, and so is the rate of `Check`.
"""

import asyncio
import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from learner.fleet.rates import Rate, host_of
from learner.service import calls

_Response = health_pb2.HealthCheckResponse

_MAX_WATCHES = 16  # at once...
_MAX_WATCHES_OF_HOST = 4  # ...and from one host
_WATCH_SECONDS = 600.0  # after which a watch ends, and may be repeated
_MAX_CALLS = 200  # of one host at once...
_CALLS_PER_SECOND = 20.0  # ...and sustained


class Probes:
    """Health statuses by name. Of one event loop.

    Args:
      refused: counts refused calls.
    """

    def __init__(self, refused: calls.Refused) -> None:
        self._refused = refused
        self._calls = Rate(_MAX_CALLS, _CALLS_PER_SECOND)
        self._watches: collections.Counter[str] = collections.Counter()  # by host
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # replaced at each change

    def set(self, name: str, *, serving: bool) -> None:
        """Sets a service's health status and notifies watchers."""
        status = _Response.SERVING if serving else _Response.NOT_SERVING
        if self._statuses.get(name) != status:
            self._statuses[name] = status
            self._changed.set()
            self._changed = asyncio.Event()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Returns the methods of the health service, each of which reads its own request."""
        serialise = _Response.SerializeToString
        return grpc.method_handlers_generic_handler(
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            {
                "Check": grpc.stream_unary_rpc_method_handler(
                    self.check, response_serializer=serialise
                ),
                "Watch": grpc.stream_stream_rpc_method_handler(
                    self.watch, response_serializer=serialise
                ),
            },
        )

    async def check(self, _: object, context: grpc.aio.ServicerContext) -> Any:
        """Answers with the current status."""
        async with calls.statuses(context, self._refused):
            self._limit(context)
            name = (await calls.request(context, health_pb2.HealthCheckRequest)).service
            if name not in self._statuses:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no {name[:80]!r}.")
            return _Response(status=self._statuses[name])

    async def watch(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Answers now and after each change."""
        async with calls.statuses(context, self._refused):
            self._limit(context)
            with self._place(context):
                name = (await calls.request(context, health_pb2.HealthCheckRequest)).service
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_SECONDS):
                        await self._report(name, context)
                await context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    f"A watch lasts {_WATCH_SECONDS:.0f} seconds: watch again.",
                )

    def _limit(self, context: grpc.aio.ServicerContext) -> None:
        """Counts a call. Raises TooMany if its host calls too often."""
        if not self._calls.take(host_of(context.peer())):
            raise calls.TooMany(
                f"{_CALLS_PER_SECOND:.0f} probes a second from one host are the most."
            )

    async def _report(self, name: str, context: grpc.aio.ServicerContext) -> None:
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(name, _Response.SERVICE_UNKNOWN)
            if status != told:
                await context.write(_Response(status=status))
                told = status
            await changed.wait()

    @contextlib.contextmanager
    def _place(self, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Counts a watcher while it watches. Raises TooMany if there are too many."""
        host = host_of(context.peer())
        if self._watches.total() >= _MAX_WATCHES or self._watches[host] >= _MAX_WATCHES_OF_HOST:
            raise calls.TooMany(
                f"{_MAX_WATCHES} watches at once and {_MAX_WATCHES_OF_HOST} from one host are the "
                "most: ask with Check instead."
            )
        self._watches[host] += 1
        try:
            yield
        finally:
            self._watches[host] -= 1
            if not self._watches[host]:
                del self._watches[host]
