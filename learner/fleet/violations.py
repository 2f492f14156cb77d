"""Counts the violations of actors, by name."""

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from learner.checks.violations import Kind, ProtocolViolation
from learner.fleet.rates import Bucket

_log = logging.getLogger(__name__)

_MOST = 10_000  # actors; beyond it, the one whose last violation is the oldest is forgotten
# A restarted run refuses a few versions of an honest actor, until it has pulled parameters.
_VERSIONS, _VERSIONS_SECONDS = 32, 60.0
_LINES, _LINES_PER_SECOND = 32, 0.1  # of the log: at once, and in the long run


class Made(NamedTuple):
    """The violations of an actor."""

    counts: Mapping[str, int] = {}  # by kind
    last: str = ""


class Violations:
    """Violations by actor and kind. Every method is thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts with none."""
        self._clock = clock
        self._lock = threading.Lock()
        self._made: collections.OrderedDict[str, Made] = collections.OrderedDict()
        self._totals: collections.Counter[str] = collections.Counter()
        # Messages in a row whose version was refused, and since when.
        self._versions: dict[str, tuple[int, float]] = {}
        self._lines = Bucket(_LINES, _LINES_PER_SECOND, clock())

    def add(self, actor: str, violation: ProtocolViolation) -> None:
        """Counts a violation, and logs the 1st, 2nd, 4th, 8th, ... of each kind, some a minute."""
        with self._lock:
            made = self._made.get(actor, Made())
            counts = collections.Counter(made.counts)
            counts[violation.kind] += 1
            count = counts[violation.kind]
            self._made[actor] = Made(counts, str(violation))
            self._made.move_to_end(actor)
            if len(self._made) > _MOST:
                self._made.popitem(last=False)
            self._totals[violation.kind] += 1
            is_told = not count & (count - 1) and self._lines.take(self._clock())
        if is_told:
            _log.warning(
                "%s makes a violation (%s, number %d): %s",
                *(actor, violation.kind, count, violation.detail),
            )

    def refused_version(self, actor: str, detail: str) -> None:
        """Notes a message with an unknown version: a violation, if it goes on for long."""
        now = self._clock()
        with self._lock:
            count, since = self._versions.get(actor, (0, now))
            if len(self._versions) > _MOST:
                self._versions.clear()
            self._versions[actor] = count + 1, since
        if count >= _VERSIONS and now - since >= _VERSIONS_SECONDS:
            self.add(actor, ProtocolViolation(Kind.VERSION, detail))

    def accepted(self, actor: str) -> None:
        """Notes a message that was accepted."""
        if self._versions:
            self._versions.pop(actor, None)

    def of(self, actor: str) -> Made:
        """Returns the violations of an actor."""
        with self._lock:
            return self._made.get(actor, Made())

    def totals(self) -> Mapping[str, int]:
        """Returns how many there were of each kind."""
        with self._lock:
            return dict(self._totals)
