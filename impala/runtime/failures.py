"""Failures that actors' processes report to `impala train` through a file.

Actors append a line for each failure; `impala train` logs each kind of failure once.
"""

import contextlib
import json
import logging
import pathlib
from typing import NamedTuple

_log = logging.getLogger("impala.train")


class Failure(NamedTuple):
    """An exception raised by an environment, or another one that ended an actor."""

    error: str  # type and text, such as KeyError: 'gear'
    where: str  # FILE:LINE, in FUNCTION; empty if it is not known
    of: str = "environment"  # or the role of the process: actor


def note(path: pathlib.Path, failure: Failure) -> None:
    """Appends a failure to a file, if it can be written. Several processes may do so at once."""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write(json.dumps(failure).encode() + b"\n")


class Shown:
    """Logs the failures appended to a file: each once, and again the 10th, 100th, ... time.

    Failures are the same if type and place are.

    Args:
      path: of the file, which need not exist yet.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._read = 0  # bytes
        self._counts: dict[tuple[str, str], int] = {}
        self.last = ""
        """The last failure, in words; empty if there was none."""

    def show(self) -> None:
        """Logs the failures since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return
        for line in lines:
            if line.endswith(b"\n"):  # else it is still being written
                self._read += len(line)
                with contextlib.suppress(ValueError, TypeError):  # torn by a full disk
                    self._show(Failure(*json.loads(line)))

    def _show(self, failure: Failure) -> None:
        key = failure.error.partition(":")[0], failure.where
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self.last = failure.error + (f" ({failure.where})" if failure.where else "")
        if count == 1:
            _log.error("An %s has failed: %s.", failure.of, self.last)
        elif str(count).strip("0") == "1":
            what = f"{failure.of.capitalize()}s"
            _log.error("%s keep failing, %d times so far: %s.", what, count, self.last)
