"""What processes with environments report to `impala train` through a file.

They append a line for each failure, of which `impala train` logs each kind once, and for each
notice, such as of an environment that is slow.
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

    def __str__(self) -> str:
        return self.error + (f" ({self.where})" if self.where else "")


def note(path: pathlib.Path, what: Failure | str) -> None:
    """Appends a failure, or a notice, to a file, if it can be written.

    Several processes may do so at once.
    """
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write(json.dumps(what).encode() + b"\n")


class Shown:
    """Logs the failures appended to a file: each once, and again the 10th, 100th, ... time.

    Failures are the same if type and place are. Each notice is logged once.

    Args:
      path: of the file, which need not exist yet.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._read = 0  # bytes
        self._counts: dict[tuple[str, str], int] = {}
        self._notices: set[str] = set()
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
                    match json.loads(line):
                        case str() as notice:
                            if notice not in self._notices:
                                _log.warning("%s", notice)
                            self._notices.add(notice)
                        case failure:
                            self._show(Failure(*failure))

    def _show(self, failure: Failure) -> None:
        key = failure.error.partition(":")[0], failure.where
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self.last = str(failure)
        if count == 1:
            _log.error("An %s has failed: %s.", failure.of, self.last)
        elif str(count).strip("0") == "1":
            what = f"{failure.of.capitalize()}s"
            _log.error("%s keep failing, %d times so far: %s.", what, count, self.last)
