"""Quarantine: temporarily refuses an actor that was blamed repeatedly.

Actors are blamed for contents that no honest actor sends, and as culprits of an update that is not
finite; never for effects of restarts. They are identified by name, so a restart does not help.
Nothing is saved: a restarted learner starts with no blames. Where all actors are the run's own,
contents that would be refused again and again end the run instead.
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from impala.config.schema import QuarantineConfig
from impala.runtime.backoff import Backoff

_log = logging.getLogger(__name__)

_MOST = 10_000  # actors; beyond it, the one blamed the longest ago is forgotten
_WINDOW_SECONDS = 600.0  # in which blames are counted
_BACKOFF = Backoff(60.0, 3600.0)  # durations of quarantines
_GOOD_SECONDS = 3600.0  # after a quarantine's end; one that begins later lasts a minute again
_MAX_WHY = 500  # characters


class Standing(NamedTuple):
    """An actor's blames and quarantine."""

    blamed: int = 0  # times
    seconds_left: float = 0.0  # of its quarantine; 0.0 if it has none
    why: str = ""  # the last blame


@dataclasses.dataclass
class _Record:
    recent: collections.deque[float]  # times of the blames that count towards the next quarantine
    blamed: int = 0
    why: str = ""
    until: float = 0.0  # end of the last quarantine
    quarantines: int = 0  # consecutive, without a long good time between


class Quarantine:
    """Tracks who was blamed, and who is refused. Every method is thread-safe."""

    def __init__(
        self,
        config: QuarantineConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        own_actors: bool = False,
    ) -> None:
        """Starts with no blames.

        Args:
          config: number of blames before a quarantine.
          clock: monotonic, in seconds.
          own_actors: all actors are the run's own, so that a quarantine is to end it, but for
            culprits: what is learned in between may be worth the wait.
        """
        self._config = config
        self._own_actors = own_actors
        self.ends_run = ""
        """Why the run is to end; empty if it may go on."""
        self._clock = clock
        self._lock = threading.Lock()
        self._records: collections.OrderedDict[str, _Record] = collections.OrderedDict()

    def blame(self, actor: str, why: str, *, is_culprit: bool = False) -> None:
        """Notes that an actor sent what no honest actor sends.

        Args:
          actor: its name. It may have left the fleet.
          why: for messages; names what was found.
          is_culprit: what it sent was accepted, and spoilt an update.
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
            if not config.blames or now < record.until:  # sent before the quarantine
                return
            record.recent.append(now)
            blames, since = len(record.recent), now - record.recent[0]
            if blames < config.blames or since > _WINDOW_SECONDS:
                return
            if now > record.until + _GOOD_SECONDS:
                record.quarantines = 0
            seconds = _BACKOFF.pause(record.quarantines + 1)
            record.recent.clear()
            record.until = now + seconds
            record.quarantines += 1
            blame = f"{actor} is to blame for {record.why.rstrip('.')}."
            if self._own_actors and not is_culprit:
                self.ends_run = f"{blame} It was blamed {blames} times in {since:.0f} s."
                return
        _log.warning(
            "%s It is quarantined for %.0f s after %d blames in %.0f s: check its environment, "
            "host and version, or refuse it for good with --security.revoked-file.",
            *(blame, seconds, blames, since),
        )

    def standing(self, actor: str) -> Standing:
        """Returns an actor's blames, and how long it is refused."""
        with self._lock:
            record = self._records.get(actor)
            if record is None:
                return Standing()
            return Standing(record.blamed, max(0.0, record.until - self._clock()), record.why)

    def count(self) -> int:
        """Returns how many actors are quarantined now."""
        with self._lock:
            now = self._clock()
            return sum(now < record.until for record in self._records.values())
