"""The log directory of a run: exclusive access, and starting over without deleting anything."""

import contextlib
import datetime
import errno
import fcntl
import itertools
import logging
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Literal, Self, TextIO

from impala.logdir import atomic

_log = logging.getLogger(__name__)

OF_DISKS = (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC, errno.EROFS)
_STAYS = re.compile(r"lock$|before-")  # in a log directory when a run is moved aside
# File of a run's key, by which its learners prove what they have acknowledged, and its size.
RECEIPT_KEY, RECEIPT_KEY_BYTES = "receipt.key", 32
# What a run has kept of its agents and data, which a new run in the same directory must not use.
_KEPT = re.compile(
    r"(snapshots|best|milestones|replay(\.new)?|teachers)$|evaluations(\.\d+)?\.jsonl$"
)


class LogDirectoryError(RuntimeError):
    """A log directory cannot be used; the message explains why."""


class StorageError(RuntimeError):
    """A checkpoint or a replay cannot be opened, written or read; the message says what to do."""


class LogDirectoryBusy(LogDirectoryError):
    """Another learner uses this log directory, or another sweep this output."""


@contextlib.contextmanager
def opening(path: pathlib.Path) -> Iterator[None]:
    """Turns system errors on files of a log directory into LogDirectoryError."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno not in OF_DISKS:  # of a socket, for instance
            raise
        file = error.filename2 or error.filename
        where = "" if file in (None, str(path)) else f"{file}: "
        raise LogDirectoryError(
            f"{path} cannot be used as a log directory ({where}{error.strerror}). Give this run "
            "one that it can write with --logdir."
        ) from error


def lock(directory: pathlib.Path, who: str, flag: str) -> TextIO:
    """Locks a directory that exists, until the returned file is closed or the process ends.

    Args:
      directory: to write in.
      who: writes it, for the error message.
      flag: that names another directory.

    Raises:
      LogDirectoryBusy: another process holds the lock.
      LogDirectoryError: the file system has no locks.
      OSError: the directory cannot be written.
    """
    file = open(directory / "lock", "a+", encoding="ascii", errors="replace")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(100).strip()
        file.close()
        raise LogDirectoryBusy(
            f"{directory} is written by another {who} (process {holder}). Stop it, or give this "
            f"one another {flag}."
        ) from None
    except OSError as error:
        file.close()
        raise LogDirectoryError(
            f"{directory} cannot be locked ({error.strerror}): its file system has no flock. Mount "
            f"it with locks, or give this {who} another {flag}."
        ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


class LogDirectory:
    """An exclusive lock on LOGDIR, which the kernel releases when the process ends."""

    def __init__(self, path: pathlib.Path):
        """Locks the directory, made if needed.

        Args:
          path: LOGDIR.

        Raises:
          LogDirectoryBusy: another learner holds the lock.
          LogDirectoryError: it cannot be made or written.
        """
        self.path = path
        with opening(path):
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            self._lock = lock(path, "learner", "--logdir")

    def move_run_aside(self) -> None:
        """Moves an earlier run to LOGDIR.before-TIME, or to LOGDIR/before-TIME where that is not
        possible: LOGDIR is a mount point, for instance, or its parent cannot be written.

        Raises:
          LogDirectoryError: it cannot be moved; then nothing is.
        """
        with opening(self.path):
            path = self.path.resolve()  # neither "." nor a link to another disk
            old = [entry for entry in path.iterdir() if not _STAYS.match(entry.name)]
            if old and path in pathlib.Path.cwd().parents:
                raise LogDirectoryError(
                    f"--fresh would move the working directory, which is in {path}. Give this run "
                    "a log directory of its own with --logdir."
                )
            if old:
                _log.info("Moved the run in %s to %s.", self.path, _aside(path, old))

    def move_kept_aside(self) -> None:
        """Moves aside what a run without a checkpoint has kept, from which no run can go on.

        The new run has other snapshots, another best agent and another replay. The key and the
        incarnations stay, by which actors prove what that run had acknowledged.
        """
        path = self.path.resolve()
        there = [entry for entry in path.iterdir() if _KEPT.match(entry.name)]
        if old := [entry for entry in there if entry.is_dir() or entry.stat().st_size]:
            aside = _aside(path, old)
            _log.info(
                "%s has no checkpoint. Moved what an earlier run has kept there to %s.",
                *(self.path, aside),
            )

    def move_replay_aside(self, why: Literal["before", "damaged"] = "before") -> None:
        """Moves the replay aside, so that the run continues with an empty one.

        Args:
          why: part of the new name.
        """
        if why == "before":  # an empty one, which was to replace a damaged one
            shutil.rmtree(self.path / "replay.new", ignore_errors=True)
        if self.replay.exists():
            aside = self.replay.rename(_unused(f"{self.replay}.{why}"))
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

    def __exit__(self, *error: object) -> None:
        self._lock.close()


def _aside(path: pathlib.Path, entries: Sequence[pathlib.Path]) -> pathlib.Path:
    """Moves entries of a log directory to PATH.before-TIME, or else to PATH/before-TIME."""
    try:
        return _move(entries, _unused(f"{path}.before"))
    except OSError:
        return _move(entries, _unused(f"{path}/before"))


def _move(entries: Sequence[pathlib.Path], aside: pathlib.Path) -> pathlib.Path:
    """Moves all entries of a directory to a new one, which is returned, or none of them."""
    aside.mkdir()
    moved: list[pathlib.Path] = []
    try:
        for entry in entries:
            moved.append(entry.rename(aside / entry.name))
    except OSError:
        for new, old in zip(moved, entries, strict=False):
            new.rename(old)
        aside.rmdir()
        raise
    return aside


def _unused(prefix: str) -> pathlib.Path:
    """Returns an unused path, PREFIX-TIME."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([now], (f"{now}-{n}" for n in itertools.count(2)))
    paths = (pathlib.Path(f"{prefix}-{name}") for name in names)
    return next(path for path in paths if not path.exists())
