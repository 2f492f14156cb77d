"""Ends a process in which an environment hangs."""

import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

_log = logging.getLogger(__name__)

_SLOW_SECONDS = 10.0


class HangWatch:
    """Ends the process with status 1 if an operation takes too long.

    Shortly before, it logs the group and, if known, the environment waited for, and dumps the stack
    of each thread to standard error. It raises no exception, because nothing can interrupt an
    environment that does not return. Use it as a context manager.

    Args:
      seconds: time limit of an operation.
      what: the operation yields, for the log: an unroll or a step.
      limit: the name of the time limit, for the log.
      slow: called in another thread about every second after the first ten of an operation, with
        its time so far, until it returns true once.
    """

    def __init__(
        self,
        seconds: float,
        what: str,
        limit: str = "actor.hang_seconds",
        slow: Callable[[float], bool] = lambda seconds: True,
    ) -> None:
        self._seconds, self._what, self._limit, self._slow = seconds, what, limit, slow
        self._since: float | None = None
        self._thread = threading.get_ident()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="hang", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Limits the time of the body, which runs in the thread that made this object."""
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def closing(self, close: Callable[[], object]) -> Iterator[None]:
        """Calls `close` after the body, and limits its time."""
        try:
            yield
        finally:
            with self.watched():
                close()

    def _watch(self) -> None:
        """Logs where it hangs, once. Not possible while the interpreter's lock is held."""
        pause = min(1.0, self._seconds / 10.0)
        told: float | None = None
        is_slow = False
        while not self._over.wait(pause):
            since = self._since
            if since is None or since == told:
                continue
            waited = time.monotonic() - since
            if waited >= _SLOW_SECONDS and not is_slow:
                is_slow = self._slow(waited)
            if waited >= self._seconds - 2.0 * pause:
                told = since
                where = ", ".join(doing(self._thread)) or "it is not known where"
                _log.error(
                    "no %s for %.1f s, %s is %g: %s",
                    *(self._what, waited, self._limit, self._seconds, where),
                )


@contextlib.contextmanager
def making_environments(seconds: float) -> Iterator[None]:
    """Limits the time of the body, in which the environments of all tasks are made and closed.

    Args:
      seconds: time limit, actor.hang_seconds for each task.
    """
    limit = "actor.hang_seconds times tasks"
    with HangWatch(seconds, "end of making the environments", limit) as hang, hang.watched():
        yield


def doing(thread: int) -> list[str]:
    """Returns what objects on a thread's stack return from `doing()`, outermost first."""
    said: list[str] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if hasattr(type(owner), "doing") and (what := owner.doing()) not in said:
            said.insert(0, what)
        frame = frame.f_back
    return said
