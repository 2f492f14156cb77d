"""The demand for parameters: whether somebody waits for what is learned and not yet published."""

import asyncio
import contextlib
import threading

_SECONDS = 0.5  # that a caller waits at most; it gets what is published then


class Demand:
    """Between the threads of the service, which ask, and the learner, which publishes."""

    def __init__(self) -> None:
        """Starts with nothing learned, and nobody asking."""
        self._lock = threading.Lock()
        self._is_behind = False
        self._published: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.is_asked = False
        """Whether somebody has asked since something was learned that is not published."""

    def ask(self) -> None:
        """Asks for the newest parameters, and does not wait for them."""
        with self._lock:
            self.is_asked |= self._is_behind

    async def wait(self) -> None:
        """Asks for the newest parameters, and waits until they are published, but not for long."""
        with self._lock:
            if not self._is_behind:
                return
            self.is_asked = True
            if self._published is None:
                self._published = asyncio.get_running_loop(), asyncio.Event()
            _, published = self._published
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS):
                await published.wait()

    def fall_behind(self) -> None:
        """Notes that something was learned and is not published."""
        with self._lock:
            self._is_behind = True

    def meet(self) -> None:
        """Notes that all that was learned is published."""
        with self._lock:
            self._is_behind = self.is_asked = False
            waiting, self._published = self._published, None
        if waiting is not None:
            loop, published = waiting
            with contextlib.suppress(RuntimeError):  # the loop has ended with all its waiters
                loop.call_soon_threadsafe(published.set)
