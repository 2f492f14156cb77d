"""Quarantine: refuses for a while an actor that is blamed repeatedly.

Blame is for contents that no honest actor sends, and for the culprits of an update that is not
finite; never for what restarts cause. An actor is known by its name, so a restart does not help it.
Nothing of this is saved: a learner that starts again has blamed nobody.
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from impala.config.schema import QuarantineConfig

_log = logging.getLogger(__name__)

_MOST = 10_000  # actors; beyond that, who was blamed the longest ago is forgotten
_LONGEST_SECONDS = 3600.0  # of one quarantine
_GOOD_SECONDS = 3600.0  # without blame after a quarantine; then the next is a first one again
_MAX_WHY = 500  # characters


class Standing(NamedTuple):
    """What an actor was blamed for."""

    blamed: int = 0  # times
    seconds_left: float = 0.0  # until its messages are taken again; 0.0 if they are
    why: str = ""  # it was blamed last


@dataclasses.dataclass
class _Record:
    recent: collections.deque[float]  # times of the blames that count towards the next quarantine
    blamed: int = 0
    why: str = ""
    until: float = 0.0  # end of the last quarantine
    quarantines: int = 0  # one after another, without a long good time between


class Quarantine:
    """Who was blamed, and who is refused. Every method is thread-safe."""

    def __init__(
        self, config: QuarantineConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts with nobody blamed.

        Args:
          config: how many blames are too many, and how long a quarantine lasts.
          clock: gives seconds that never go back.
        """
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._records: collections.OrderedDict[str, _Record] = collections.OrderedDict()

    def blame(self, actor: str, why: str) -> None:
        """Takes note that an actor sent what no honest actor sends.

        Args:
          actor: its name. It may have left the fleet.
          why: for people; names what was seen.
        """
        config, now = self._config, self._clock()
        with self._lock:
            record = self._records.setdefault(
                actor, _Record(collections.deque(maxlen=max(1, config.blames)))
            )
            self._records.move_to_end(actor)
            if len(self._records) > _MOST:
                self._records.popitem(last=False)
            record.blamed += 1
            record.why = why[:_MAX_WHY]
            if not config.blames or now < record.until:  # what it had sent before
                return
            record.recent.append(now)
            blames, since = len(record.recent), now - record.recent[0]
            if blames < config.blames or since > config.window_seconds:
                return
            if now > record.until + _GOOD_SECONDS:
                record.quarantines = 0
            seconds = min(config.seconds * 2**record.quarantines, _LONGEST_SECONDS)
            record.recent.clear()
            record.until = now + seconds
            record.quarantines = min(record.quarantines + 1, 64)
        _log.warning(
            "%s is quarantined for %.0f s after %d blames in %.0f s: check its host and version, "
            "or refuse it for good with --security.revoked-file. The last blame: %s",
            *(actor, seconds, blames, since, record.why),
        )

    def standing(self, actor: str) -> Standing:
        """What an actor was blamed for, and for how long it is refused."""
        with self._lock:
            record = self._records.get(actor)
            if record is None:
                return Standing()
            return Standing(record.blamed, max(0.0, record.until - self._clock()), record.why)

    def count(self) -> int:
        """How many actors are quarantined now."""
        with self._lock:
            now = self._clock()
            return sum(now < record.until for record in self._records.values())
