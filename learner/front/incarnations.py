"""The learners of a run: which incarnations there were, and which versions each can have published.

An unroll or an evaluation names the learner whose parameters it was made with. LOGDIR holds, in
`incarnations.json`, every incarnation and a version that it had not passed. Versions are reserved
ahead in blocks, so that the file is written once in a while and is right after any crash.
"""

import json
import logging
import pathlib

from impala.logdir import atomic

_log = logging.getLogger(__name__)

_BLOCK = 1000  # versions reserved at once
_KEPT = 100  # incarnations; beyond it, the oldest is forgotten
_MOST = 2**63 - 1  # an incarnation or a version, as it travels in a batch


class Incarnations:
    """What a learner knows of those before it, and leaves to those after it. Not thread-safe.

    Args:
      path: of the file; one that is damaged counts as empty, and the log says so.
      own: the incarnation of this learner.
    """

    def __init__(self, path: pathlib.Path, own: int) -> None:
        self._path = path
        self.own = own
        self._reserved = -1
        self.earlier = self._read()
        """Incarnation -> the highest version that it can have published."""

    def reserve(self, version: int) -> None:
        """Makes sure that later learners know of a version that is about to be published."""
        if version <= self._reserved:
            return
        self._reserved = version + _BLOCK
        kept = [*self.earlier.items(), (self.own, self._reserved)][-_KEPT:]
        try:
            atomic.write(self._path, json.dumps(kept).encode())
        except OSError as error:  # such as a full disk: nothing that a run would have to end for
            _log.warning(
                "%s cannot be written (%s). Unrolls that are under way when this learner is "
                "restarted may be refused.",
                self._path,
                error.strerror,
            )

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
