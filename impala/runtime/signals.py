"""Graceful termination by SIGTERM, SIGINT and SIGHUP.

Such signals often come in pairs: `timeout` and `make` both send one to the same process, and a
cancelled CI job sends SIGINT and then SIGTERM. Any number of them is one request. Only a second
SIGINT, a second or more after the first, demands an immediate end.
"""

import contextlib
import itertools
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INSIST_SECONDS = 1.0
_WAKE_SECONDS = 0.05


def exits_by_signal(error: BaseException) -> bool:
    """Returns whether a signal handler has raised it to exit, not the code that was interrupted."""
    if not isinstance(error, SystemExit):
        return False
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def is_ignored(number: signal.Signals) -> bool:
    """Returns whether a signal is to stay ignored, as under `nohup`."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


class EndRequest:
    """A context in which the signals above are recorded instead of ending the process.

    Signals reach only the main thread; in another one the context has no effect. The handler only
    assigns, so it may interrupt anything, including itself: a lock (such as that of a
    `threading.Event`) could deadlock with the interrupted thread.
    """

    def __init__(
        self,
        on_first: Callable[[], None] | None = None,
        *,
        passes_on: bool = False,
        interrupts: bool = False,
        asked: threading.Event | None = None,
    ) -> None:
        """Installs nothing yet.

        Args:
          on_first: called in the signal handler, by the first signal only.
          passes_on: for a process that goes on afterwards: on leaving the context, the earlier
            handlers are restored, and the first signal received is raised again.
          interrupts: raise KeyboardInterrupt where the process is, when the user insists.
          asked: counts as a signal when it is set.
        """
        self._on_first = on_first
        self._passes_on = passes_on
        self._interrupts = interrupts
        self._asked = asked or threading.Event()
        self._handlers: dict[signal.Signals, Any] = {}
        self._count = itertools.count()
        self._interrupted_at: float | None = None
        self.received: signal.Signals | None = None
        """The first signal."""
        self.insists = False
        """Whether SIGINT was received again, `INSIST_SECONDS` or more after the first SIGINT."""

    def is_set(self) -> bool:
        """Returns whether a signal was received."""
        return self.received is not None or self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for a signal. Returns whether one was received in time."""
        end = time.monotonic() + seconds
        while not self.is_set() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _WAKE_SECONDS))
        return self.is_set()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Returns a context in which a library may install handlers: these replace them again.

        A signal that comes meanwhile is received when the context ends.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
        try:
            yield
        finally:
            for number in self._handlers:
                signal.signal(number, self._on_signal)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)

    @property
    def is_interrupted(self) -> bool:
        """Returns whether one of the signals was SIGINT."""
        return self._interrupted_at is not None

    @property
    def cause(self) -> str:
        """Returns what was received, in words for the log."""
        if self.received is None:
            return "asked to stop" if self._asked.is_set() else "no signal received"
        return f"{self.received.name} received"

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in NUMBERS:
            if not is_ignored(number):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            # The process ends now: further signals must not change its exit status.
            ends = self.is_set() and not self._passes_on
            signal.signal(number, signal.SIG_IGN if ends else handler)
        if self.received is not None and self._passes_on:
            signal.raise_signal(self.received)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= INSIST_SECONDS:
                self.insists = True
                if self._interrupts:
                    raise KeyboardInterrupt
        if next(self._count) == 0:  # atomic: no other signal can come in between
            self.received = signal.Signals(number)
            if self._on_first is not None:
                self._on_first()
