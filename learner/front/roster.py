"""The roster: who takes part in a run, and how each of them is doing, as the learner sees it."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from impala.runtime.credentials import Role
from impala.types import EnvironmentFault

_SILENT_SECONDS = 60.0  # without a sign of it, a member counts as silent...
_GONE_SECONDS = 3600.0  # ...and then as gone
_RATE_SECONDS = 30.0  # over which speeds are taken
_MOST = 10_000  # members; beyond that, who was heard of the longest ago is forgotten


class Member(NamedTuple):
    """One actor or evaluator, by name: its restarts go on where it stopped."""

    name: str
    role: Role
    joins: int  # with this learner: the first, and each after a restart or a broken stream
    unrolls: int  # accepted
    frames: int  # environment frames in them
    frames_per_second: float  # lately
    parameter_version: int  # that it acted with last
    silent_seconds: float  # since it was heard of
    active: bool  # it was heard of lately, and has not left
    rejected: int  # messages
    last_rejection: str  # why, for people
    environment_faults: int  # environments of it that crashed or hung
    last_fault: str  # which and why, for people
    version: str  # of its program, as its last join said


@dataclasses.dataclass
class _Entry:
    role: Role
    seen: float
    version: str = ""
    joins: int = 0
    unrolls: int = 0
    frames: int = 0
    parameter_version: int = 0
    rejected: int = 0
    last_rejection: str = ""
    environment_faults: int = 0
    last_fault: str = ""
    streams: int = 0  # of an actor, open now
    left: bool = False  # the last of them has ended, and it was not heard of since
    recent: collections.deque[tuple[float, int]] = dataclasses.field(
        default_factory=collections.deque
    )  # when frames came, and how many

    def forget(self, now: float) -> None:
        while self.recent and self.recent[0][0] < now - _RATE_SECONDS:
            self.recent.popleft()

    def frames_per_second(self, now: float) -> float:
        self.forget(now)
        if not self.recent:
            return 0.0
        # The first frames were played before they came.
        frames = sum(frames for _, frames in self.recent) - self.recent[0][1]
        return frames / max(now - self.recent[0][0], 1e-9)


class Roster:
    """Who was heard of in the last hour, 10,000 at most. Every method is thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self.received_bytes = 0  # of unrolls that were accepted
        self.joins = 0
        self.faults = {"crashed": 0, "hung": 0}  # of actors' environments, by kind

    def joined(self, name: str, role: Role, version: str = "") -> None:
        """Takes note of a join, and of the version of the program that joined."""
        with self._lock:
            entry = self._seen(name, role)
            entry.joins += 1
            entry.version = version
            self.joins += 1

    def sent(self, name: str, *, unrolls: int, frames: int, version: int, size: int) -> None:
        """Takes note of an accepted message of an actor, `size` in bytes."""
        with self._lock:
            self.received_bytes += size
            entry = self._seen(name, "actor")
            entry.unrolls += unrolls
            entry.frames += frames
            entry.parameter_version = version
            entry.recent.append((entry.seen, frames))
            entry.forget(entry.seen)

    def began(self, name: str) -> None:
        """Takes note of a stream that an actor sends on."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.streams += 1

    def ended(self, name: str) -> None:
        """Takes note of the end of such a stream: an actor without another one has left."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.streams = max(0, entry.streams - 1)
                entry.left = not entry.streams

    def reported(self, name: str, version: int) -> None:
        """Takes note of an evaluator's report."""
        with self._lock:
            self._seen(name, "evaluator").parameter_version = version

    def failed(self, name: str, faults: Sequence[EnvironmentFault]) -> None:
        """Takes note of an actor's environments that crashed or hung."""
        with self._lock:
            for fault in faults:
                self.faults[fault.kind] += 1
                entry = self._seen(name, "actor")
                entry.environment_faults += 1
                entry.last_fault = f"environment {fault.environment} {fault.kind}: {fault.detail}"

    def rejected(self, name: str, why: str) -> None:
        """Takes note of a message that was refused; whoever sent it may say any name."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.seen = self._clock()
                entry.rejected += 1
                entry.last_rejection = why

    def refused(self, name: str, why: str) -> None:
        """Takes note that a member was refused something other than a message."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.seen = self._clock()
                entry.last_rejection = why

    def members(self) -> list[Member]:
        """Everyone, by name."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            return [
                Member(
                    *(name, entry.role, entry.joins, entry.unrolls, entry.frames),
                    *(entry.frames_per_second(now), entry.parameter_version),
                    now - entry.seen,
                    now - entry.seen <= _SILENT_SECONDS and not entry.left,
                    *(entry.rejected, entry.last_rejection),
                    entry.environment_faults,
                    *(entry.last_fault, entry.version),
                )
                for name, entry in sorted(self._entries.items())
            ]

    def actors(self) -> tuple[int, int]:
        """How many actors are active, and how many were heard of but are silent now."""
        active = [member.active for member in self.members() if member.role == "actor"]
        return sum(active), len(active) - sum(active)

    def _seen(self, name: str, role: Role) -> _Entry:
        """Who is heard of now."""
        now = self._clock()
        if name not in self._entries:
            self._forget(now)
            if len(self._entries) >= _MOST:
                del self._entries[min(self._entries, key=lambda other: self._entries[other].seen)]
            self._entries[name] = _Entry(role, now)
        entry = self._entries[name]
        entry.role, entry.seen, entry.left = role, now, False
        return entry

    def _forget(self, now: float) -> None:
        """Leaves out who has been silent for long."""
        gone = [name for name, entry in self._entries.items() if now - entry.seen >= _GONE_SECONDS]
        for name in gone:
            del self._entries[name]
