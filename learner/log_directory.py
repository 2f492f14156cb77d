"""The log directory of a run: who may write it, and starting over without deleting anything."""

import datetime
import fcntl
import logging
import os
import pathlib
from types import TracebackType
from typing import Self

_log = logging.getLogger(__name__)


class LogDirectoryBusy(RuntimeError):
    """Another learner writes this log directory."""


class LogDirectory:
    """An exclusive claim on LOGDIR; the kernel releases it when the process ends, however."""

    def __init__(self, path: pathlib.Path, fresh: bool = False):
        """Claims the directory, made if needed.

        Args:
          path: LOGDIR.
          fresh: move what an earlier run left into a sibling directory.

        Raises:
          LogDirectoryBusy: another learner holds the claim.
        """
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open(path / "lock", "a+", encoding="utf-8")  # noqa: SIM115 - held for life
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise LogDirectoryBusy(
                f"{path} is written by another learner (process {holder}). Stop it, or give this "
                "one another --logdir."
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        if fresh:
            self._move_aside()

    def _move_aside(self) -> None:
        old = [entry for entry in self.path.iterdir() if entry.name != "lock"]
        if not old:
            return
        aside = _aside(self.path)
        aside.mkdir()
        for entry in old:
            entry.rename(aside / entry.name)
        _log.info("Moved the run in %s to %s.", self.path, aside)

    def move_replay_aside(self) -> None:
        """Lets the run go on with an empty replay."""
        if self.replay.exists():
            aside = self.replay.rename(_aside(self.replay))
            _log.info("Moved %s to %s.", self.replay, aside)

    @property
    def replay(self) -> pathlib.Path:
        """Where the replay lies."""
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


def _aside(path: pathlib.Path) -> pathlib.Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return path.with_name(f"{path.name}.before-{now}")
