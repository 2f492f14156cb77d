"""The gRPC health service: what probes and load balancers ask for.

gRPC's own one lets a watcher that reads nothing hold up everyone: whoever changes a status waits
until all watchers have been told. Here nobody waits for them.
"""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Response = health_pb2.HealthCheckResponse


class Probes(health_pb2_grpc.HealthServicer):
    """Statuses by name, of one event loop."""

    def __init__(self) -> None:
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
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _Response.SERVICE_UNKNOWN)
            if status != told:
                await context.write(_Response(status=status))
                told = status
            await changed.wait()
