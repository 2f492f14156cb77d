"""The gRPC health service: what probes and load balancers ask for.

gRPC's own one lets a watcher that reads nothing hold up everyone: whoever changes a status waits
until all watchers have been told. Here nobody waits for them, and since they need no credentials,
there are few of them, and none for long: `Check` goes on being answered however many there are.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Response = health_pb2.HealthCheckResponse

_MAX_WATCHES = 16  # at once...
_MAX_WATCHES_OF_HOST = 4  # ...and from one host
_WATCH_SECONDS = 600.0  # after which a watcher may come again


class Probes(health_pb2_grpc.HealthServicer):
    """Statuses by name, of one event loop.

    Args:
      host: of a peer, as gRPC names it.
    """

    def __init__(self, host: Callable[[str], str]) -> None:
        self._host = host
        self._watches: collections.Counter[str] = collections.Counter()  # by host
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()  # another one after each change

    def set(self, name: str, *, serving: bool) -> None:
        """Says how something is; whoever watches it is told."""
        status = _Response.SERVING if serving else _Response.NOT_SERVING
        if self._statuses.get(name) != status:
            self._statuses[name] = status
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no {request.service!r}.")
        return _Response(status=self._statuses[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        async with self._place(context):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_SECONDS):
                    await self._tell(request.service, context)
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"A watch lasts {_WATCH_SECONDS:.0f} seconds: watch again.",
            )

    async def _tell(self, name: str, context: grpc.aio.ServicerContext) -> None:
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(name, _Response.SERVICE_UNKNOWN)
            if status != told:
                await context.write(_Response(status=status))
                told = status
            await changed.wait()

    @contextlib.asynccontextmanager
    async def _place(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Counts a watcher while it watches; it is refused if there are too many."""
        host = self._host(context.peer())
        if self._watches.total() >= _MAX_WATCHES or self._watches[host] >= _MAX_WATCHES_OF_HOST:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MAX_WATCHES} watches at once and {_MAX_WATCHES_OF_HOST} from one host are the "
                "most: ask with Check instead.",
            )
        self._watches[host] += 1
        try:
            yield
        finally:
            self._watches[host] -= 1
            if not self._watches[host]:
                del self._watches[host]
