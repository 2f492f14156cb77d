"""Accounts: every acknowledged unroll is learned from, queued or dropped.

This identity holds exactly at every moment, also across crashes of the learner:

    received = learned + queued + dropped

A checkpoint holds the counts at the time it was written. Unrolls acknowledged after that are lost
with the learner's memory. They are counted as received and as dropped (`learner_crash`) when the
actor joins again and proves how far its receipts went. Unacknowledged messages are sent again.
"""

import dataclasses
import heapq
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

LEARNER_CRASH = "learner_crash"
MOST = 2**63 - 1  # largest count that telemetry and the wire can hold
_KEPT = 4  # incarnations of each name that other names cannot evict

_Key = tuple[str, int]  # actor name, incarnation


class Superseded(ValueError):
    """An incarnation of an actor joins after a newer one has joined."""


class Totals(NamedTuple):
    """Totals of a run so far: unrolls in the first three, messages in the others."""

    received: int
    learned: int
    dropped: Mapping[str, int]  # by reason
    duplicates: int
    rejected: Mapping[str, int]  # by reason

    @property
    def queued(self) -> int:
        """Returns the unrolls received and neither learned from nor dropped yet."""
        return max(0, self.received - self.learned - sum(self.dropped.values()))


class Admission(NamedTuple):
    """What to do with a message."""

    verdict: Literal["accepted", "duplicate", "skipped", "unknown"]
    offset: int = 0  # unrolls at the front of an accepted message that are already accounted for
    expected_sequence: int = 0  # the sequence number that would have been accepted


class _Part(NamedTuple):
    """What became of some unrolls of a message."""

    unrolls: int
    dropped: str | None  # why they were not learned from


@dataclasses.dataclass
class _Ledger:
    """One incarnation of one actor. Checkpoints do not hold what is queued."""

    accounted: int = 0  # unrolls learned from or dropped
    accounted_sequence: int = 0  # every message up to this one is fully accounted for...
    partial: int = 0  # ...and this many unrolls of the next one
    received_sequence: int = 0  # accepted, or refused for good
    queued: dict[int, int] = dataclasses.field(default_factory=dict)  # sequence -> unrolls left
    # Of the last messages that were accepted or refused: sequence -> unrolls accepted up to it.
    recent: dict[int, int] = dataclasses.field(default_factory=dict)
    # What became of messages before it was known of one that came earlier: it is accounted for
    # after that one. Until then they count as queued.
    early: dict[int, list[_Part]] = dataclasses.field(default_factory=dict)
    of_earlier: bool = False  # whether it includes receipts of an earlier learner

    @property
    def accepted(self) -> int:
        """Returns the unrolls accepted so far."""
        return self.accounted + sum(self.queued.values())

    @classmethod
    def restored(
        cls, accounted: int, accounted_sequence: int, partial: int, recent: Any
    ) -> "_Ledger":
        """Returns the ledger of a `state`."""
        return cls(accounted, accounted_sequence, partial, recent=dict(recent), of_earlier=True)

    def state(self) -> list[Any]:
        """Returns what is accounted for, as data for JSON."""
        recent = [[at, n] for at, n in self.recent.items() if at <= self.accounted_sequence]
        return [self.accounted, self.accounted_sequence, self.partial, recent]

    def acknowledged(self, sequence: int) -> int | None:
        """Returns the unrolls accepted up to and including a message; None if too long ago."""
        if sequence >= self.received_sequence:
            return self.accepted
        return self.recent.get(sequence)

    def use_up(self, sequence: int, remembered: int) -> None:
        """Remembers how much was accepted up to a message that is now queued or refused."""
        self.received_sequence = sequence
        self.recent[sequence] = self.accepted
        while len(self.recent) > remembered:
            del self.recent[next(iter(self.recent))]

    def join(self, acknowledged_sequence: int, acknowledged_unrolls: int) -> int:
        """Continues where the actor's receipts end. Returns how many unrolls were lost."""
        lost = max(0, acknowledged_unrolls - self.accepted)
        self.accounted += lost
        self.of_earlier |= lost > 0
        self.received_sequence = max(
            self.received_sequence, self.accounted_sequence, acknowledged_sequence
        )
        return lost

    def judge(self, sequence: int) -> Admission:
        """Decides about a message by its number alone: it is accepted if it is the next one."""
        expected = self.received_sequence + 1
        if sequence == 0 or sequence > expected:
            return Admission("skipped", expected_sequence=expected)
        if sequence < expected:
            return Admission("duplicate", expected_sequence=expected)
        return Admission("accepted", expected_sequence=expected)

    def receive(self, sequence: int, unrolls: int, remembered: int) -> Admission:
        """Decides about a message, and queues it if accepted."""
        judged = self.judge(sequence)
        if judged.verdict != "accepted":
            return judged
        expected = judged.expected_sequence
        offset = self.partial if sequence == self.accounted_sequence + 1 else 0
        if offset >= unrolls > 0:  # only if the actor has changed the message
            self.accounted_sequence, self.partial = sequence, 0
            self.use_up(sequence, remembered)
            return Admission("duplicate", expected_sequence=expected)
        self.queued[sequence] = unrolls - offset
        self.use_up(sequence, remembered)
        return Admission("accepted", offset, expected)

    def account(self, sequence: int, unrolls: int, dropped: str | None) -> list[_Part]:
        """Moves unrolls of a message from queued to accounted, once all before it are.

        Returns:
          What is accounted for now.
        """
        parts = self.early.setdefault(sequence, [])
        left = self.queued[sequence] - sum(part.unrolls for part in parts) - unrolls
        if left < 0:
            raise ValueError(
                f"{unrolls} unrolls of message {sequence} are accounted for, but only "
                f"{left + unrolls} of it are queued: count each unroll once."
            )
        parts.append(_Part(unrolls, dropped))
        accounted = []
        while parts := self.early.pop(next(iter(self.queued), 0), []):
            oldest = next(iter(self.queued))
            for part in parts:
                self._account(oldest, part.unrolls)
            accounted += parts
        return accounted

    def _account(self, sequence: int, unrolls: int) -> None:
        left = self.queued[sequence] - unrolls
        self.accounted += unrolls
        if sequence > self.accounted_sequence + 1:  # messages between were refused or lost
            self.accounted_sequence, self.partial = sequence - 1, 0
        if left:
            self.queued[sequence] = left
            self.partial += unrolls
        else:
            del self.queued[sequence]
            self.accounted_sequence, self.partial = sequence, 0


class Accounts:
    """Counts received unrolls by actor and by what became of them. Every method is thread-safe."""

    def __init__(self, max_ledgers: int = 10_000, max_in_flight: int = 64):
        """Makes empty accounts.

        Args:
          max_ledgers: number of actor incarnations to remember. Beyond it, ledgers with nothing in
            the queue are forgotten: first superseded ones of the names that have the most, then
            those idle the longest; totals are kept. If a forgotten actor returns with receipts of
            an earlier learner, their unrolls are counted a second time, as received and dropped,
            at most once per restart.
          max_in_flight: messages without a receipt that an actor may have.
        """
        self._max_ledgers = max_ledgers
        self._max_in_flight = max_in_flight
        self._lock = threading.Lock()
        self._indices: dict[str, int] = {}  # actor name -> index
        self._free: list[int] = []  # heap of indices that were given back
        self._newest: dict[str, int] = {}  # actor name -> incarnation that appeared last
        self._joined: set[str] = set()  # actors that joined since this learner started
        self._ledgers: OrderedDict[_Key, _Ledger] = OrderedDict()  # idle the longest first
        self._forgotten: set[_Key] = set()  # ledgers whose losses are counted; bounded likewise
        self._received = 0
        self._learned = 0
        self._dropped: Counter[str] = Counter()
        self._duplicates = 0
        self._rejected: Counter[str] = Counter()

    def join(
        self,
        actor: str,
        incarnation: int,
        acknowledged_sequence: int,
        acknowledged_unrolls: int,
    ) -> int:
        """Admits an incarnation of an actor, unless a newer one has joined.

        The newest is the one that first appeared last. It owns the name permanently, also across
        restarts of the learner, so two processes cannot take it from each other repeatedly.

        Args:
          actor: name, unique in the fleet.
          incarnation: of the actor.
          acknowledged_sequence: last message of this incarnation that got a receipt, 0 for none.
          acknowledged_unrolls: accepted up to that message according to an earlier learner's
            receipt; 0 if the actor cannot prove it.

        Returns:
          The actor's index: small, and the same for the same name until it is forgotten.

        Raises:
          Superseded: a newer incarnation has joined. This one's receipts are counted nevertheless.
        """
        with self._lock:
            is_new = (actor, incarnation) not in self._ledgers
            if (actor, incarnation) in self._forgotten:
                acknowledged_unrolls = 0
            ledger = self._ledgers.setdefault((actor, incarnation), _Ledger())
            if lost := ledger.join(min(acknowledged_sequence, MOST), acknowledged_unrolls):
                self._received += lost
                self._dropped[LEARNER_CRASH] += lost
            if not is_new and self._newest.get(actor, incarnation) != incarnation:
                raise Superseded(
                    f"another process has joined as {actor} since: give each actor its own name"
                )
            if actor not in self._indices:
                self._indices[actor] = self._free_index()
            self._newest[actor] = incarnation
            self._joined.add(actor)
            self._ledgers.move_to_end((actor, incarnation))
            self._forget()
            return self._indices[actor]

    def lives(self, actor: str) -> int:
        """How many incarnations of an actor are remembered, of this learner and of earlier ones."""
        with self._lock:
            return sum(name == actor for name, _ in self._ledgers)

    def may_send(self, actor: str, incarnation: int) -> bool:
        """Returns whether this incarnation is the actor's newest and has joined this learner."""
        with self._lock:
            return self._may_send(actor, incarnation)

    def judge(self, actor: str, incarnation: int, sequence: int) -> Admission:
        """Decides about a message by its number, before its contents are looked at.

        Only a duplicate is counted.

        Args:
          actor: its sender.
          incarnation: of the actor.
          sequence: of the message.
        """
        with self._lock:
            ledger = self._ledgers.get((actor, incarnation))
            if ledger is None or not self._may_send(actor, incarnation):
                return Admission("unknown")
            admission = ledger.judge(sequence)
            self._duplicates += admission.verdict == "duplicate"
            return admission

    def receive(self, actor: str, incarnation: int, sequence: int, unrolls: int) -> Admission:
        """Decides about a valid message, and counts it.

        Args:
          actor: its sender.
          incarnation: of the actor.
          sequence: of the message; accepted if it follows the last one.
          unrolls: in the message, E.
        """
        with self._lock:
            ledger = self._ledgers.get((actor, incarnation))
            if ledger is None or not self._may_send(actor, incarnation):
                return Admission("unknown")
            self._ledgers.move_to_end((actor, incarnation))
            admission = ledger.receive(sequence, unrolls, self._max_in_flight)
            if admission.verdict == "accepted":
                self._received += unrolls - admission.offset
            elif admission.verdict == "duplicate":
                self._duplicates += 1
            return admission

    def rejected(
        self, reason: str, actor: str = "", incarnation: int = 0, sequence: int = 0
    ) -> None:
        """Counts a refused message. If its sequence number was the next one, it is used up."""
        with self._lock:
            self._rejected[reason] += 1
            ledger = self._ledgers.get((actor, incarnation))
            if (
                ledger is not None
                and self._may_send(actor, incarnation)
                and sequence == ledger.received_sequence + 1
            ):
                ledger.use_up(sequence, self._max_in_flight)

    def acknowledged(self, actor: str, incarnation: int, sequence: int) -> int | None:
        """Returns how many unrolls were accepted up to and including a message.

        None if the actor is not known, or had `max_in_flight` messages after that one.
        """
        with self._lock:
            ledger = self._ledgers.get((actor, incarnation))
            return None if ledger is None else ledger.acknowledged(sequence)

    def settle(
        self, actor: str, incarnation: int, sequence: int, unrolls: int, dropped: str | None = None
    ) -> None:
        """Counts unrolls of an accepted message.

        What became of messages is counted in their order: one that is settled before one that came
        earlier stays queued until then.

        Args:
          actor: its sender.
          incarnation: of the actor.
          sequence: of the message.
          unrolls: how many of its unrolls.
          dropped: why they were dropped; None if they were learned from.
        """
        with self._lock:
            self._count(self._ledgers[actor, incarnation].account(sequence, unrolls, dropped))

    def drop_queued(self, reason: str) -> None:
        """Counts everything queued as dropped."""
        with self._lock:
            for ledger in self._ledgers.values():
                while ledger.queued:
                    self._count(ledger.account(*next(iter(ledger.queued.items())), reason))

    def totals(self) -> Totals:
        """Returns a consistent copy of the run's totals."""
        with self._lock:
            return self._totals()

    def state(self) -> dict[str, Any]:
        """Returns the contents for a checkpoint, as data for JSON, without what is queued."""
        with self._lock:
            totals = self._totals()
            return {
                "learned": totals.learned,
                "dropped": totals.dropped,
                "duplicates": totals.duplicates,
                "rejected": totals.rejected,
                "indices": dict(self._indices),
                "newest": dict(self._newest),
                "ledgers": [[*key, *ledger.state()] for key, ledger in self._ledgers.items()],
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state()`. Every actor has to join again.

        Raises:
          KeyError, TypeError, ValueError: the state is invalid.
        """
        with self._lock:
            self._learned = state["learned"]
            self._dropped = Counter(state["dropped"])
            self._received = self._learned + sum(self._dropped.values())
            self._duplicates = state["duplicates"]
            self._rejected = Counter(state["rejected"])
            self._indices = dict(state["indices"])
            used = set(self._indices.values())
            self._free = [i for i in range(max(used, default=-1)) if i not in used]
            self._newest = dict(state["newest"])
            self._joined = set()
            self._ledgers = OrderedDict(
                ((str(actor), int(incarnation)), _Ledger.restored(*numbers))
                for actor, incarnation, *numbers in state["ledgers"]
            )

    def _count(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            if part.dropped is None:
                self._learned += part.unrolls
            else:
                self._dropped[part.dropped] += part.unrolls

    def _totals(self) -> Totals:
        return Totals(
            min(self._received, MOST),
            min(self._learned, MOST),
            {reason: min(count, MOST) for reason, count in self._dropped.items()},
            min(self._duplicates, MOST),
            {reason: min(count, MOST) for reason, count in self._rejected.items()},
        )

    def _may_send(self, actor: str, incarnation: int) -> bool:
        return actor in self._joined and self._newest[actor] == incarnation

    def _free_index(self) -> int:
        """Returns the smallest index that no remembered actor has."""
        return heapq.heappop(self._free) if self._free else len(self._indices)

    def _forget(self) -> None:
        """Forgets ledgers with nothing in the queue until there are few enough.

        Superseded incarnations of the names that have the most go first, so no name can evict
        another. The current incarnation of a name is the last of it to be forgotten.
        """
        excess = len(self._ledgers) - self._max_ledgers
        if excess <= 0:
            return
        excess += self._max_ledgers // 100  # so that not each join looks at all of them
        incarnations: dict[str, list[_Key]] = {}
        for key in self._ledgers:
            incarnations.setdefault(key[0], []).append(key)
        busy = {key[0] for key, ledger in self._ledgers.items() if ledger.queued}
        surplus = [
            key
            for actor, keys in sorted(incarnations.items(), key=lambda each: -len(each[1]))
            for key in keys[: max(0, len(keys) - _KEPT)]
            if not self._ledgers[key].queued and key[1] != self._newest.get(actor)
        ]
        idle = [key for key in self._ledgers if key[0] not in busy]
        for key in list(dict.fromkeys(surplus + idle))[:excess]:
            if self._ledgers.pop(key).of_earlier:
                self._forgotten.add(key)
        names = {actor for actor, _ in self._ledgers}
        for actor in self._indices.keys() - names:
            heapq.heappush(self._free, self._indices.pop(actor))
            self._newest.pop(actor, None)
            self._joined.discard(actor)
