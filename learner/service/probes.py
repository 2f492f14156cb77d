"""The gRPC health service, for probes and load balancers, on a port of its own.

It needs no credentials, so the rate of its calls is limited, and its requests are as small as gRPC
takes them by default. It has no `Watch`, which probes do not call and whose watchers would have to
be limited too.
"""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from learner.fleet.rates import Rate, host_of
from learner.service import calls

_Response = health_pb2.HealthCheckResponse

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
        self._statuses: dict[str, int] = {}

    def set(self, name: str, *, serving: bool) -> None:
        """Sets a service's health status."""
        self._statuses[name] = _Response.SERVING if serving else _Response.NOT_SERVING

    def handlers(self) -> grpc.GenericRpcHandler:
        """Returns the method of the health service, which reads its own request."""
        return grpc.method_handlers_generic_handler(
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            {
                "Check": grpc.stream_unary_rpc_method_handler(
                    self.check, response_serializer=_Response.SerializeToString
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

    def _limit(self, context: grpc.aio.ServicerContext) -> None:
        """Counts a call. Raises TooMany if its host calls too often."""
        if not self._calls.take(host_of(context.peer())):
            raise calls.TooMany(
                f"{_CALLS_PER_SECOND:.0f} probes a second from one host are the most."
            )
