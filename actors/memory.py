"""Limits the memory of an actor and its processes; beyond the limit the actor restarts."""

import contextlib
import multiprocessing.util
import os
import pathlib
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from impala.runtime.signals import NUMBERS

_REPLACEMENTS = "_IMPALA_ACTOR_REPLACEMENTS"  # environment variable: restarts before this one
_EVERY_SECONDS = 2.0  # between measurements
_SETTLED_SECONDS = 30.0  # after the first check; a restart cannot help an excess before that
_PROC = pathlib.Path("/proc")


class OverLimit(Exception):
    """The memory limit is exceeded; the message names the memory held and the limit."""


class LimitTooLow(Exception):
    """A restart cannot keep the limit; the message explains why and what to do."""


class MemoryLimit:
    """Checks at intervals how much memory is held.

    Args:
      limit: bytes; 0: no limit.
      held: returns the bytes held, given the limit, below which it need not be exact.
      clock: monotonic, in seconds.
    """

    def __init__(
        self,
        limit: int,
        held: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._held = held or held_bytes
        self._clock = clock
        self._began: float | None = None
        self._next = 0.0

    def check(self) -> None:
        """Measures, if the interval has passed.

        Raises:
          OverLimit: the limit is exceeded.
          LimitTooLow: it is exceeded within half a minute of the first check.
        """
        now = self._clock()
        if not self._limit or (self._began is not None and now < self._next):
            return
        if self._began is None:
            self._began = now
        self._next = now + _EVERY_SECONDS
        if (held := self._held(self._limit)) <= self._limit:
            return
        what = (
            f"the actor and its processes hold {held:,} bytes, actor.max_memory_bytes is "
            f"{self._limit:,}"
        )
        if now - self._began < _SETTLED_SECONDS:
            raise LimitTooLow(
                f"{what}, and it has only begun: raise the limit, or play fewer environments "
                "(actor.num_envs)."
            )
        raise OverLimit(what)


def held_bytes(limit: int) -> int:
    """Returns the bytes that this process and its descendants hold.

    Up to the limit this is their resident memory, which counts shared pages once per process and is
    cheap to read; beyond it, their proportional share.
    """
    processes = [os.getpid(), *_descendants(os.getpid())]
    resident = sum(map(_resident, processes))
    return resident if resident <= limit else sum(map(_proportional, processes))


def _descendants(process: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])  # a name: any bytes
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(process, ()))
    for each in found:  # grows during the loop
        found += children.get(each, ())
    return found


def _resident(process: int) -> int:
    try:
        pages = int((_PROC / str(process) / "statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _proportional(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return _resident(process)


def replacements() -> int:
    """Returns how many times the actor in this process has restarted for memory."""
    return int(os.environ.get(_REPLACEMENTS, "0"))


def block_signals() -> None:
    """Blocks signals that ask for an end; they stay pending until `settle`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)


def settle() -> None:
    """Unblocks signals, and reaps child processes that the previous image left."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
    if replacements():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def start_anew() -> NoReturn:
    """Replaces this process by a new one with the same arguments and process id."""
    # As at a normal exit: removes the temporary directory.
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
    os.environ[_REPLACEMENTS] = str(replacements() + 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
