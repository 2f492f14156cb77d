"""A network that can be broken: forwards TCP connections to the learner until it is told not to."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


class Proxy:
    """Listens on a free port of loopback and forwards to another. Use it as a context manager."""

    def __init__(self, port: int) -> None:
        """Args: port: of loopback, where the learner listens."""
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._open: asyncio.Event
        self._delay = 0.0
        self._refuses = False
        self.port = 0

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        self._loop.close()

    def partition(self) -> None:
        """Nothing passes any more, and nobody is told; connections stay open."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def cut(self) -> None:
        """Every connection is reset, and new ones are refused."""
        self._call(self._cut())

    def delay(self, seconds: float) -> None:
        """What passes takes so much longer."""
        self._delay = seconds

    def heal(self) -> None:
        """All is well again."""
        self._delay, self._refuses = 0.0, False
        self._loop.call_soon_threadsafe(self._open.set)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10.0)

    async def _start(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        await self._cut()

    async def _cut(self) -> None:
        self._refuses = True
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            if self._refuses:
                return
            onwards, there = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(there)
            ends = [
                asyncio.create_task(self._forward(reader, there)),
                asyncio.create_task(self._forward(onwards, writer)),
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the learner is away, or the connection is cut
        finally:
            self._connections.discard(task)
            for each in writers:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await asyncio.sleep(self._delay)
            await self._open.wait()
            writer.write(data)
            await writer.drain()
