"""Serves a registry of Prometheus metrics over HTTP.

One thread serves all connections, which are limited in number and duration, so clients that send or
read nothing block nobody. Metrics are formatted for at most a tenth of the time; requests that
arrive meanwhile get the same page.
"""

import asyncio
import importlib.metadata
import threading
import time

import prometheus_client as prometheus

from impala.runtime import installation, listen

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Buckets of histograms of durations."""

_MAX_CONNECTIONS = 32  # beyond it, the oldest is closed...
_ACCEPTS = 4  # ...after some turns of the event loop, each of which accepts at most this many
_SECONDS = 5.0  # longest duration of a connection
_MAX_REQUEST = 8192  # bytes
_SHARE = 0.1  # of the time, at most, for formatting metrics
_PATHS = ("/metrics", "/")
_HEAD = (
    "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    "Content-Length: {length}\r\nConnection: close\r\n\r\n"
)


class Exporter:
    """Serves the metrics of a registry until it is closed."""

    def __init__(self, address: str, registry: prometheus.CollectorRegistry) -> None:
        """Binds the address.

        Args:
          address: HOST:PORT; port 0 is any free one.
          registry: the metrics to serve.

        Raises:
          OSError: the address cannot be bound.
        """
        build = prometheus.Info("impala_build", "Versions of what runs.", registry=registry)
        tensorflow = importlib.metadata.version("tensorflow")
        build.info({"impala": installation.VERSION, "tensorflow": tensorflow})
        sockets = listen.bind("Metrics", address)
        self.address = listen.bound(address, sockets)
        self._registry = registry
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._rested = 0.0  # when metrics may be formatted again
        self._page: asyncio.Task[bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._servers = [
            self._loop.run_until_complete(
                asyncio.start_server(self._serve, sock=each, limit=_MAX_REQUEST, backlog=_ACCEPTS)
            )
            for each in sockets
        ]
        for each in sockets:
            each.listen(listen.BACKLOG)  # the others wait in the kernel
        self._thread = threading.Thread(target=self._loop.run_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = [*self._connections, *([self._page] if self._page is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection: request, response, close."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            oldest.cancel()
            del self._connections[oldest]
        self._connections[task] = None
        try:
            async with asyncio.timeout(_SECONDS):
                writer.write(await self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (
            *(TimeoutError, OSError, asyncio.CancelledError),  # cancelled to make room, too
            *(asyncio.IncompleteReadError, asyncio.LimitOverrunError),
        ):
            pass
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    async def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            status, body = "405 Method Not Allowed", b"Metrics are read with GET.\n"
        elif path not in _PATHS:
            status, body = "404 Not Found", b"Metrics are at /metrics.\n"
        else:
            status, body = "200 OK", await self._newest()
        return _HEAD.format(status=status, length=len(body)).encode() + body

    async def _newest(self) -> bytes:
        """Returns the formatted metrics of now or shortly after."""
        if self._page is None:
            self._page = asyncio.create_task(self._write_out())
        return await asyncio.shield(self._page)

    async def _write_out(self) -> bytes:
        await asyncio.sleep(max(0.0, self._rested - time.monotonic()))
        self._page = None  # later requests need a newer one
        begun = time.monotonic()
        page = prometheus.generate_latest(self._registry)
        end = time.monotonic()
        self._rested = end + (end - begun) * (1.0 / _SHARE - 1.0)
        return page
