"""Selects the numbers of episodes' `info` to record, by a bounded number of valid names.

Each name becomes a line of telemetry, a TensorBoard tag and a label of a metric, and is printed on
terminals, so its characters and the number of names are limited.
"""

import logging
import re
import threading
from collections.abc import Mapping
from typing import TypeVar

from impala.types import Episode
from learner.data.bounds import MOST_NAMES

T = TypeVar("T")

_log = logging.getLogger(__name__)

PATTERN = r"[A-Za-z0-9][A-Za-z0-9_./-]{0,63}"
_GOOD = re.compile(PATTERN)


class InfoNames:
    """The recorded names. Thread-safe.

    The first names are kept until the learner stops. A resumed learner starts with none, so names
    that should not have got in do not stay for ever.
    """

    def __init__(self, most: int = MOST_NAMES):
        """Starts with no names.

        Args:
          most: largest number of recorded names, over all tasks.
        """
        self._most = most
        self._kept: set[str] = set()
        self._lock = threading.Lock()
        self.dropped = 0
        """Numbers not recorded: one for each name of each episode, or message."""

    def keep(self, episode: Episode) -> Episode:
        """Returns the episode with only the recorded numbers, and counts the others."""
        return episode._replace(info=self.recorded(episode.info)) if episode.info else episode

    def recorded(self, info: Mapping[str, T]) -> dict[str, T]:
        """Returns what is recorded of an info, by name, and counts the rest."""
        with self._lock:
            kept = {name: value for name, value in info.items() if self._is_kept(name)}
            left_out = len(info) - len(kept)
            first, self.dropped = left_out and not self.dropped, self.dropped + left_out
        if first:
            name = next(name for name in info if name not in kept)
            _log.warning(
                "An environment's info has %s, which is not recorded: names are 1 to 64 letters, "
                "digits and _ . / -, and a run has at most %d of them. "
                "Further ones are only counted.",
                ascii(name[:80]),
                self._most,
            )
        return kept

    def _is_kept(self, name: str) -> bool:
        if name in self._kept:
            return True
        if len(self._kept) >= self._most or not _GOOD.fullmatch(name):
            return False
        self._kept.add(name)
        return True
