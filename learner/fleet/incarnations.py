"""The incarnations of a run's learners, and which versions each can have published.

An unroll or an evaluation names the learner whose parameters were used. LOGDIR/incarnations.json
holds every incarnation with an upper bound of its versions. Versions are reserved in blocks, so
the file is written rarely and is valid after any crash.
"""

import json
import logging
import pathlib

from impala.logdir import atomic

_log = logging.getLogger(__name__)

_BLOCK = 1000  # versions reserved at once
_KEPT = 10_000  # incarnations; beyond it, the oldest is forgotten
_MOST = 2**63 - 1  # largest incarnation or version in a batch


class Incarnations:
    """The incarnations of this run. Not thread-safe.

    Args:
      path: of the file; a damaged one counts as empty, with a log message.
      own: this learner's incarnation.
    """

    def __init__(self, path: pathlib.Path, own: int) -> None:
        self._path = path
        self.own = own
        self._reserved = -1
        self._is_writable = True
        self.earlier = self._read()
        """Incarnation -> the highest version that it can have published."""

    def reserve(self, version: int) -> None:
        """Records, for later learners, a version that is about to be published."""
        if version <= self._reserved:
            return
        reserved = version + _BLOCK
        kept = [*self.earlier.items(), (self.own, reserved)][-_KEPT:]
        try:
            atomic.write(self._path, json.dumps(kept).encode())
        except OSError as error:  # such as a full disk: no reason to end the run
            if self._is_writable:
                _log.warning(
                    "%s cannot be written (%s). It is tried again with each version; until then, "
                    "unrolls that are under way when this learner is restarted may be refused.",
                    self._path,
                    error.strerror,
                )
            self._is_writable = False
        else:
            self._reserved = reserved
            self._is_writable = True

    def _read(self) -> dict[int, int]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
            earlier = {int(incarnation): int(version) for incarnation, version in entries}
            if not all(0 <= number <= _MOST for entry in earlier.items() for number in entry):
                raise ValueError("a number is out of range")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            _log.warning(
                "%s is damaged (%s): unrolls made with the parameters of earlier learners are "
                "refused.",
                self._path,
                error,
            )
            return {}
        earlier.pop(self.own, None)
        return dict(list(earlier.items())[-_KEPT:])
