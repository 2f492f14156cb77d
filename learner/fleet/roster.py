"""The roster: the members of the fleet and their state, as the learner sees them."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from impala.runtime.credentials import Role
from impala.types import EnvironmentFault

_SILENT_SECONDS = 60.0  # without a message, a member counts as silent...
_GONE_SECONDS = 3600.0  # ...and then as gone
_RATE_SECONDS = 30.0  # window of the speeds
_EPISODES = 100  # whose mean return is shown
_MESSAGES = 100  # whose mean reward of a step is shown
_MOST = 10_000  # members; beyond it, the one silent the longest is forgotten


class Member(NamedTuple):
    """An actor or evaluator, by name; its counts continue across its restarts."""

    name: str
    role: Role
    joins: int  # with this learner: the first, and each after a restart or a broken stream
    unrolls: int  # accepted
    frames: int  # environment frames in them
    frames_per_second: float  # recent
    parameter_version: int  # that it last acted with
    silent_seconds: float  # since its last message
    active: bool  # not silent, and has not left
    rejected: int  # messages
    last_rejection: str  # the reason, for messages
    environment_faults: int  # its environments that crashed or hung
    last_fault: str  # which and why, for messages
    version: str  # of its program, from its last join
    recent_return: float | None  # of the last 100 episodes that an actor ended; None: there is none
    reward_per_step: float | None  # of the last 100 messages of an actor; None: there is none
    step_seconds: float | None  # of its environments, in those messages; None: not known


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
    streams: int = 0  # of an actor, currently open
    left: bool = False  # the last stream has ended, without a message since
    recent: collections.deque[tuple[float, int]] = dataclasses.field(
        default_factory=collections.deque
    )  # when frames came, and how many

    returns: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_EPISODES)
    )

    rewards: collections.deque[tuple[float, int]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_MESSAGES)
    )  # their sum in a message, and in how many steps

    paces: collections.deque[tuple[float, int]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_MESSAGES)
    )  # seconds in environments in a message, and in how many steps

    def is_active(self, now: float) -> bool:
        patience = _GONE_SECONDS if self.streams else _SILENT_SECONDS
        return not self.left and now - self.seen <= patience

    def recent_return(self) -> float | None:
        return sum(self.returns) / len(self.returns) if self.returns else None

    def forget(self, now: float) -> None:
        while len(self.recent) > 2 and self.recent[0][0] < now - _RATE_SECONDS:
            self.recent.popleft()

    def frames_per_second(self, now: float) -> float:
        self.forget(now)
        if len(self.recent) < 2:
            return 0.0
        # The first frames were played before they arrived.
        frames = sum(frames for _, frames in self.recent) - self.recent[0][1]
        (before, _), (last, _) = self.recent[-2], self.recent[-1]
        between = last - before  # messages of slow environments are minutes apart
        if now - last > max(_RATE_SECONDS, 2 * between):
            return 0.0
        until = max(last, now - between)  # so long the next ones are not late
        return frames / max(until - self.recent[0][0], 1e-9)


class Roster:
    """Members with an open stream or heard of in the last hour, at most 10,000. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._forgot = 0.0  # when members were last removed
        self.received_bytes = 0  # of unrolls that were accepted
        self.joins = 0
        self.faults = {"crashed": 0, "hung": 0}  # of actors' environments, by kind

    def joined(self, name: str, role: Role, version: str = "") -> None:
        """Notes a join, and the version of the program that joined."""
        with self._lock:
            entry = self._seen(name, role)
            entry.joins += 1
            entry.version = version
            self.joins += 1

    def sent(
        self,
        name: str,
        *,
        unrolls: int,
        frames: int,
        version: int,
        size: int,
        returns: Sequence[float] = (),
        rewards: tuple[float, int] = (0.0, 0),
        pace: tuple[float, int] = (0.0, 0),
    ) -> None:
        """Notes an accepted message of an actor.

        Args:
          name: of the actor.
          unrolls: in the message.
          frames: in them.
          version: of the parameters that acted in them.
          size: in bytes.
          returns: of the episodes that ended in them.
          rewards: the sum of all, and in how many steps.
          pace: seconds in environments, and in how many steps; zeros: not known.
        """
        with self._lock:
            self.received_bytes += size
            entry = self._seen(name, "actor")
            entry.unrolls += unrolls
            entry.frames += frames
            entry.parameter_version = version
            entry.recent.append((entry.seen, frames))
            entry.returns.extend(returns)
            entry.rewards.append(rewards)
            entry.paces.append(pace)
            entry.forget(entry.seen)

    def began(self, name: str) -> None:
        """Notes that an actor has opened a stream."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.streams += 1

    def ended(self, name: str) -> bool:
        """Notes the end of a stream. Returns whether it was the actor's last: it has left."""
        with self._lock:
            if (entry := self._entries.get(name)) is None:
                return True
            entry.streams = max(0, entry.streams - 1)
            entry.left = not entry.streams
            return entry.left

    def has_joined(self, name: str) -> bool:
        """Returns whether a member has joined this learner."""
        with self._lock:
            return name in self._entries and self._entries[name].joins > 0

    def heard(self, name: str, role: Role) -> None:
        """Notes a sign of life."""
        with self._lock:
            self._seen(name, role)

    def reported(self, name: str, version: int) -> None:
        """Notes an evaluator's report."""
        with self._lock:
            self._seen(name, "evaluator").parameter_version = version

    def failed(self, name: str, faults: Sequence[EnvironmentFault]) -> None:
        """Notes an actor's environments that crashed or hung."""
        with self._lock:
            for fault in faults:
                self.faults[fault.kind] += 1
                entry = self._seen(name, "actor")
                entry.environment_faults += 1
                entry.last_fault = f"environment {fault.environment} {fault.kind}: {fault.detail}"

    def refused(self, name: str, why: str, *, is_message: bool = False) -> None:
        """Notes that a message, or something else, was refused; who sent it may give any name."""
        with self._lock:
            if (entry := self._entries.get(name)) is not None:
                entry.seen = self._clock()
                entry.rejected += is_message
                entry.last_rejection = why

    def members(self) -> list[Member]:
        """Returns all members, by name."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            return [
                Member(
                    *(name, entry.role, entry.joins, entry.unrolls, entry.frames),
                    *(entry.frames_per_second(now), entry.parameter_version),
                    now - entry.seen,
                    entry.is_active(now),
                    *(entry.rejected, entry.last_rejection),
                    entry.environment_faults,
                    *(entry.last_fault, entry.version),
                    entry.recent_return(),
                    *(_mean(entry.rewards), _mean(entry.paces)),
                )
                for name, entry in sorted(self._entries.items())
            ]

    def actors(self) -> tuple[int, int]:
        """Returns the numbers of active and of silent actors."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            active = [x.is_active(now) for x in self._entries.values() if x.role == "actor"]
        return sum(active), len(active) - sum(active)

    def _seen(self, name: str, role: Role) -> _Entry:
        """Returns the entry of a member that has just sent something."""
        now = self._clock()
        if name not in self._entries:
            if now - self._forgot >= 1.0:  # not for each of many that join
                self._forget(now)
            if len(self._entries) >= _MOST:
                del self._entries[min(self._entries, key=lambda other: self._entries[other].seen)]
            self._entries[name] = _Entry(role, now)
        entry = self._entries[name]
        entry.role, entry.seen, entry.left = role, now, False
        return entry

    def _forget(self, now: float) -> None:
        """Removes members that have been silent for too long."""
        self._forgot = now
        for name, entry in [*self._entries.items()]:
            if not entry.streams and now - entry.seen >= _GONE_SECONDS:
                del self._entries[name]


def _mean(messages: Iterable[tuple[float, int]]) -> float | None:
    """Returns the mean in a step of what messages hold together; None if they have no steps."""
    total, steps = map(sum, zip((0.0, 0), *messages, strict=True))
    return total / steps if steps else None
