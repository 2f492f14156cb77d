"""What happens when an environment hangs that shares the actor's process: the actor ends."""

import contextlib
import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

_log = logging.getLogger(__name__)


class HangWatch:
    """Ends the process with status 1 if something takes too long.

    Whoever started it starts it again. Shortly before, it logs which group and, if it is known,
    which environment it waits for; then what each thread is doing goes to standard error. It is no
    exception, because nothing can interrupt an environment that does not come back. Use it as a
    context manager.

    Args:
      seconds: that something may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
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
        """What is done in here, in the thread that made this, may not take longer."""
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        """Says where it hangs, once. It cannot where the interpreter's lock is held meanwhile."""
        pause = min(1.0, self._seconds / 10.0)
        told: float | None = None
        while not self._over.wait(pause):
            since = self._since
            if since is None or since == told:
                continue
            waited = time.monotonic() - since
            if waited >= self._seconds - 2.0 * pause:
                told = since
                where = ", ".join(doing(self._thread)) or "it is not known where"
                _log.error(
                    "no unroll for %.1f s, actor.hang_seconds is %g: %s",
                    *(waited, self._seconds, where),
                )


def doing(thread: int) -> list[str]:
    """What the objects on a thread's stack say that they are `doing()`, the outermost first."""
    said: list[str] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if hasattr(type(owner), "doing") and (what := owner.doing()) not in said:
            said.insert(0, what)
        frame = frame.f_back
    return said
