"""Culprits: unrolls that make an update not finite."""

import collections
import logging
import pathlib
import time
from collections.abc import Callable, Iterable

from learner.data.mix import Prepared
from learner.data.replay import Replay
from learner.update.bad_updates import hint
from learner.update.learner import Refusal

_log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0  # between two log messages
_REMEMBERED = 4096  # unrolls removed from replay that may still be in prepared batches


class Culprits:
    """Removes culprits from replay and has their actors blamed."""

    def __init__(self, replay: Replay | None, blame: Callable[[str, str], None]):
        """Starts without culprits.

        Args:
          replay: culprits are removed from it.
          blame: called with the actor of a culprit, and the reason.
        """
        self._replay = replay
        self._blame = blame
        self._removed: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        self._logged = -_LOG_SECONDS
        self.count = 0
        """Number of culprits, each counted as often as it was found."""

    def forget(self, prepared: Prepared) -> None:
        """Removes a whole batch from replay, where it would be met again. Blames nobody."""
        if self._replay is not None:
            self._replay.remove(each.number for each in prepared.origins if each.number is not None)

    def punish(
        self, prepared: Prepared, refusal: Refusal, update: int, written: pathlib.Path | None
    ) -> None:
        """Removes a batch's culprits from replay, and blames their actors once per replayed unroll.

        Args:
          prepared: the batch.
          refusal: names the culprits.
          update: the number of the update.
          written: the file that the batch was written to.
        """
        origins = [prepared.origins[i] for i in refusal.culprits]
        self.count += len(origins)
        fresh = [each for each in origins if each.number not in self._removed]
        numbers = [each.number for each in origins if each.number is not None]
        if self._replay is not None:
            self._replay.remove(numbers)
            self._removed.extend(numbers)
        what = ", ".join(refusal.not_finite[:2])
        actors = [] if prepared.is_demonstrated else [each.actor for each in fresh]
        for actor, count in collections.Counter(actors).items():
            self._blame(
                actor, f"{count} unrolls with which update {update} is not finite in {what}"
            )
        if time.monotonic() - self._logged >= _LOG_SECONDS:
            self._logged = time.monotonic()
            _log.warning(
                "Update %d is not finite in %s because of %d unrolls of %s: left out. %d were in "
                "all.%s",
                *(update, what, len(origins), names(each.actor for each in origins)),
                *(self.count, hint(written)),
            )


def names(actors: Iterable[str]) -> str:
    """Returns names with their counts, the most frequent first: "a (3), b (1)"."""
    return ", ".join(f"{name} ({n})" for name, n in collections.Counter(actors).most_common(10))
