"""The log directory of a run: exclusive access, and starting over without deleting anything."""

import contextlib
import datetime
import errno
import fcntl
import itertools
import logging
import os
import pathlib
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Literal, Self

from impala.logdir import atomic

_log = logging.getLogger(__name__)

_OF_DISKS = (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS)


class LogDirectoryError(RuntimeError):
    """A log directory cannot be used; the message explains why."""


class StorageError(RuntimeError):
    """A checkpoint or a replay cannot be opened, written or read; the message says what to do."""


class LogDirectoryBusy(LogDirectoryError):
    """Another learner uses this log directory."""


@contextlib.contextmanager
def opening(path: pathlib.Path) -> Iterator[None]:
    """Turns system errors on files of a log directory into LogDirectoryError."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno not in _OF_DISKS:  # of a socket, for instance
            raise
        file = error.filename2 or error.filename
        where = "" if file in (None, str(path)) else f"{file}: "
        raise LogDirectoryError(
            f"{path} cannot be used as a log directory ({where}{error.strerror}). Give this run "
            "one that it can write with --logdir."
        ) from error


def make(path: pathlib.Path) -> None:
    """Makes a log directory if there is none, and checks that it can be written.

    Raises:
      LogDirectoryError: it cannot be made or written.
    """
    with opening(path):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


class LogDirectory:
    """An exclusive lock on LOGDIR, which the kernel releases when the process ends."""

    def __init__(self, path: pathlib.Path, fresh: bool = False):
        """Locks the directory, made if needed.

        Args:
          path: LOGDIR.
          fresh: move an earlier run into a sibling directory.

        Raises:
          LogDirectoryBusy: another learner holds the lock.
          LogDirectoryError: it cannot be made or written.
        """
        self.path = path
        make(path)
        with opening(path):
            self._claim()
            if fresh:
                self._move_aside()

    def _claim(self) -> None:
        path = self.path
        self._lock = open(path / "lock", "a+", encoding="ascii", errors="replace")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read(100).strip()
            holder = holder if holder.isdecimal() else "unknown"
            self._lock.close()
            raise LogDirectoryBusy(
                f"{path} is written by another learner (process {holder}). Stop it, or give this "
                "one another --logdir."
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()

    def _move_aside(self) -> None:
        old = [entry for entry in self.path.iterdir() if entry.name != "lock"]
        if not old:
            return
        aside = _aside(self.path, "before")
        aside.mkdir()
        for entry in old:
            entry.rename(aside / entry.name)
        _log.info("Moved the run in %s to %s.", self.path, aside)

    def move_replay_aside(self, why: Literal["before", "damaged"] = "before") -> None:
        """Moves the replay aside, so that the run continues with an empty one.

        Args:
          why: part of the new name.
        """
        if self.replay.exists():
            aside = self.replay.rename(_aside(self.replay, why))
            _log.info("Moved %s to %s.", self.replay, aside)

    def write(self, name: str, text: str) -> None:
        """Writes a small file atomically.

        Raises:
          LogDirectoryError: it cannot be written.
        """
        with opening(self.path):
            atomic.write(self.path / name, text.encode())

    @property
    def replay(self) -> pathlib.Path:
        """Returns the path of the replay."""
        return self.path / "replay"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.close()


def _aside(path: pathlib.Path, why: str) -> pathlib.Path:
    """Returns an unused name."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([now], (f"{now}-{n}" for n in itertools.count(2)))
    asides = (path.with_name(f"{path.name}.{why}-{name}") for name in names)
    return next(aside for aside in asides if not aside.exists())
