"""Pacing: permits to begin unrolls, which bound how old their parameters are when learned from.

An actor asks for a permit before each round: an unroll of each of its environments. The permit says
with which parameters they are made, and its unrolls are due with a batch. Batches of fresh unrolls
are counted from 0 since the learner has started, and `lag` is counted in them.

* `Budget`: a round begins with the newest parameters, of which c batches are learned, and its
  unrolls are due with batch c + lag at the latest. It may begin if there is room for all that is
  in progress in the batches up to that one. Actors are served in the order in which they ask.
* `ExactLag`: batch b is made of unrolls of the parameters of which b - lag batches are learned (0
  before there are any), and of nothing else. Its rounds are dealt to the actors in turn. A new
  actor is first if nobody waits, else last; one that joins again has the turn that it had.

In both cases the learner waits for unrolls that are due, and what is not due yet waits for them:
this is the bounded staleness of Ho et al. 2013, "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", with the rounds of actors for the iterations of workers.
The permit of an actor that is silent for too long lapses, so that the learner does not wait for it.
"""

import abc
import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from impala.config.schema import Config

_log = logging.getLogger(__name__)

LAPSED = "lapsed"  # why unrolls without a permit, or of one that has lapsed, are dropped
LEASE_SECONDS = 30.0  # without a sign of its actor, after which a permit lapses...
LEFT_SECONDS = 10.0  # ...and if its stream has ended

Key = tuple[str, int]  # an actor's name and incarnation


class Permit(NamedTuple):
    """Leave to make one round of unrolls."""

    number: int
    learned: int  # batches that its parameters have learned from
    due: int  # the batch with which its unrolls are learned from, or at the latest, by a budget


class Admitted(NamedTuple):
    """How much of a message has a permit."""

    unrolls: int  # its first ones
    due: int


@dataclasses.dataclass
class _Open:
    """A permit of which not all unrolls have come."""

    permit: Permit
    key: Key
    missing: int  # of its unrolls
    wanted: int  # of these: as many as its batch lacks
    given: float  # when


@dataclasses.dataclass
class _Actor:
    seen: float  # any sign of it
    acted: float  # it asked or sent
    round: int = 0  # that was permitted last
    open: list[_Open] = dataclasses.field(default_factory=list)


class _Asked(NamedTuple):
    round: int
    unrolls: int
    wake: Callable[[], None]


class Pacing(abc.ABC):
    """Deals permits and tells which unrolls a batch may be made of. Every method is thread-safe.

    Args:
      fresh: unrolls of a batch.
      lag: batches between the parameters of an unroll and the batch that it is due with.
      max_seconds: for which a permit may be open.
      clock: gives seconds that never go back.
    """

    is_exact: ClassVar[bool]  # whether a permit is for the parameters of one particular batch

    def __init__(
        self,
        fresh: int,
        lag: int,
        *,
        max_seconds: float = 1200.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.lag = lag
        self._fresh = fresh
        self._max_seconds = max_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._learned = 0  # batches
        self._batch, self._room = 0, fresh  # that is being made, and the unrolls that it lacks
        self._queued = 0  # unrolls that have come, and are in no batch yet
        self._open: dict[int, _Open] = {}  # by number
        self._making: collections.Counter[int] = collections.Counter()  # wanted of these, by due
        self._arriving: collections.Counter[int] = collections.Counter()  # not fetched yet, by due
        self._actors: dict[Key, _Actor] = {}
        self._asking: dict[Key, _Asked] = {}  # in the order in which they asked

    @property
    def capacity(self) -> int:
        """The most unrolls that can have a permit and be in no batch yet."""
        return (self.lag + 1) * self._fresh

    @property
    def queued(self) -> int:
        """Unrolls with a permit that have come and are in no batch yet."""
        return self._queued

    @property
    def making(self) -> int:
        """Unrolls with a permit that have not come yet."""
        with self._lock:
            return self._making.total()

    # Actors.

    def ask(self, key: Key, round: int, unrolls: int, wake: Callable[[], None]) -> Permit | None:
        """Asks for the permit of a round. Asking again for the same one changes nothing.

        Args:
          key: who asks.
          round: its number; one more than that of the permit before, if there was one.
          unrolls: of the round.
          wake: called, from any thread, when it is worth while to ask again.

        Returns:
          The permit, or None if there is none yet: the actor keeps its place among those who wait.

        Raises:
          ValueError: such a round can never begin; says what can.
        """
        self._check(unrolls)
        with self._lock:
            now = self._clock()
            if key not in self._actors:
                self._add(key, None)
            actor = self._actors[key]
            actor.seen = actor.acted = now
            if round > actor.round:
                # A dict keeps the place of a key that it has.
                self._asking[key] = _Asked(round, unrolls, wake)
                self._deal()
            if round > actor.round:
                return None
            if round == actor.round and actor.open and actor.open[-1].missing == unrolls:
                return actor.open[-1].permit
            raise ValueError(
                f"round is {round}, but unrolls of round {actor.round} have come: number the "
                "rounds 1, 2, 3, ... and ask for each before it begins."
            )

    def heard(self, key: Key) -> None:
        """Takes note of a sign of life."""
        with self._lock:
            if (actor := self._actors.get(key)) is not None:
                actor.seen = self._clock()

    def left(self, key: Key) -> None:
        """Takes note that the stream of an actor has ended."""
        with self._lock:
            if (actor := self._actors.get(key)) is not None:
                actor.seen = self._clock() + LEFT_SECONDS - LEASE_SECONDS

    def replaced(self, key: Key) -> None:
        """Lapses the permits of an earlier incarnation by a name, whose turn passes to this one."""
        with self._lock:
            for other in [each for each in self._actors if each[0] == key[0] and each != key]:
                if key not in self._actors:
                    self._add(key, other)
                self._forget(other, "another process goes by its name")
            self._deal()

    def came(self, key: Key, number: int, unrolls: int) -> Admitted:
        """Takes note of a message.

        Args:
          key: who sent it.
          number: of the permit that it names.
          unrolls: in it.
        """
        with self._lock:
            found = self._open.get(number)
            if found is None or found.key != key:
                return Admitted(0, 0)
            actor = self._actors[key]
            actor.seen = actor.acted = self._clock()
            admitted = min(unrolls, found.wanted)
            found.wanted -= admitted
            self._making[found.permit.due] -= admitted
            found.missing -= unrolls
            self._queued += admitted
            self._arriving[found.permit.due] += admitted
            if found.missing <= 0:
                self._close(found)
                self._deal()
            return Admitted(admitted, found.permit.due)

    def invalidate(self, key: Key, number: int) -> None:
        """Lapses a permit of which a message was refused."""
        with self._lock:
            found = self._open.get(number)
            if found is not None and found.key == key:
                self._close(found)
                self._deal()

    def wake(self) -> None:
        """Wakes everyone who asks."""
        with self._lock:
            for asked in self._asking.values():
                asked.wake()

    # Batches.

    def most(self, due: int) -> int:
        """Returns how many unrolls due with a batch may be taken for the one being made."""
        with self._lock:
            return self._most(due)

    def fetched(self, due: int, unrolls: int) -> None:
        """Takes note of unrolls that have come and are among those that batches are made of."""
        with self._lock:
            self._arriving[due] -= unrolls
            self._arriving = +self._arriving  # without zeros

    def taken(self, unrolls: int) -> None:
        """Takes note of unrolls that have gone into the batch being made."""
        with self._lock:
            self._queued -= unrolls
            self._room -= unrolls
            if not self._room:
                self._batch, self._room = self._batch + 1, self._fresh
            self._deal()

    def learned(self) -> None:
        """Takes note of a batch that was learned from; the parameters after it can be had."""
        with self._lock:
            self._learned += 1
            self._deal()

    def expire(self) -> None:
        """Lapses the permits of actors that are silent for too long."""
        with self._lock:
            now = self._clock()
            for key, actor in list(self._actors.items()):
                if now - actor.seen > LEASE_SECONDS:
                    self._forget(key, "it is not heard of any more")
                elif actor.open and now - actor.open[0].given > self._max_seconds:
                    self._forget(key, f"it has not sent them within {self._max_seconds:g} s")
                elif now - actor.acted > LEASE_SECONDS and not (actor.open or key in self._asking):
                    self._forget(key, "it asks for none")
            self._deal()

    # What the two kinds decide. This and all that follows is called with the lock held.

    @abc.abstractmethod
    def _check(self, unrolls: int) -> None:
        """Raises ValueError if a round of so many unrolls can never begin. Needs no lock."""

    @abc.abstractmethod
    def _most(self, due: int) -> int:
        """See `most`."""

    @abc.abstractmethod
    def _next(self) -> Key | None:
        """Returns the actor whose round may begin now; None if none may."""

    @abc.abstractmethod
    def _begin(self, key: Key, unrolls: int) -> tuple[int, int]:
        """Returns the batch that a round is due with, and how many of its unrolls that lacks."""

    # The bookkeeping of both.

    def _deal(self) -> None:
        """Gives permits to those who ask, as long as there are any."""
        while (key := self._next()) is not None:
            asked, actor = self._asking.pop(key), self._actors[key]
            due, wanted = self._begin(key, asked.unrolls)
            permit = Permit(next(self._numbers), max(0, due - self.lag), due)
            found = _Open(permit, key, asked.unrolls, wanted, self._clock())
            self._open[permit.number] = found
            self._making[due] += wanted
            actor.open.append(found)
            actor.round = asked.round
            asked.wake()

    def _add(self, key: Key, successor_of: Key | None) -> None:
        """Adds an actor, which has the place of another."""
        now = self._clock()
        self._actors[key] = _Actor(now, now)

    def _close(self, found: _Open) -> None:
        """Forgets a permit."""
        self._making[found.permit.due] -= found.wanted
        self._making = +self._making  # without those of which all has come
        del self._open[found.permit.number]
        self._actors[found.key].open.remove(found)

    def _forget(self, key: Key, why: str) -> None:
        actor = self._actors[key]
        if lost := sum(each.wanted for each in actor.open):
            _log.warning("%s has a permit for %d unrolls, which lapses: %s.", key[0], lost, why)
        for found in list(actor.open):
            self._close(found)
        del self._actors[key]
        self._asking.pop(key, None)


class Budget(Pacing):
    """Bounds the lag: a round begins if its unrolls will be learned from in time."""

    is_exact = False

    def _check(self, unrolls: int) -> None:
        if not 1 <= unrolls <= self.lag * self._fresh:
            raise ValueError(
                f"A round has {unrolls} unrolls, but mix.lag_budget {self.lag} and mix.fresh "
                f"{self._fresh} leave room for 1 to {self.lag * self._fresh}: use fewer "
                "environments in each actor, or raise one of them."
            )

    def _most(self, due: int) -> int:
        """Leaves room, in the batches up to theirs, for those due earlier that are not there."""
        most, earlier = self._room, 0
        missing = self._making + self._arriving  # without zeros
        for before in sorted(each for each in missing if each < due):
            earlier += missing[before]
            room = self._room + (before - self._batch) * self._fresh
            most = min(most, room - earlier)
        return most

    def _next(self) -> Key | None:
        in_progress = self._queued + self._making.total()
        room = self._room + (self._learned + self.lag - self._batch) * self._fresh - in_progress
        for key, asked in self._asking.items():
            if len(self._actors[key].open) < 2:  # that which is being made, and the next one
                return key if asked.unrolls <= room else None
        return None

    def _begin(self, key: Key, unrolls: int) -> tuple[int, int]:
        return self._learned + self.lag, unrolls


class ExactLag(Pacing):
    """Fixes the lag: each batch is made of unrolls of the parameters `lag` batches before it."""

    is_exact = True
    _undealt_from = 0  # the first batch of which nobody ever had a permit

    def __init__(self, fresh: int, lag: int, **options: Any):
        super().__init__(fresh, lag, **options)
        # Unrolls of each earlier batch that nobody has a permit for.
        self._undealt: collections.Counter[int] = collections.Counter()
        # Whose turn it is, and who follows.
        self._turns: collections.deque[Key] = collections.deque()

    def _check(self, unrolls: int) -> None:
        if unrolls < 1 or self._fresh % unrolls:
            raise ValueError(
                f"A round has {unrolls} unrolls, but batches of {self._fresh} (mix.fresh) with an "
                "exact lag are made of whole rounds: use a divisor of that as the number of "
                "environments of each actor."
            )

    def _most(self, due: int) -> int:
        return self._room if due == self._batch else 0

    def _next(self) -> Key | None:
        if self._next_undealt() - self.lag > self._learned:
            return None
        for key in self._turns:
            # One at a time: what has come of a round is known when the next one is dealt.
            if key in self._asking and not self._actors[key].open:
                return key
            if self._actors[key].round:
                return None  # the others wait for it, unless it has only joined again
        return None

    def _begin(self, key: Key, unrolls: int) -> tuple[int, int]:
        due = self._next_undealt()
        if due == self._undealt_from:
            self._undealt[due], self._undealt_from = self._fresh, due + 1
        wanted = min(unrolls, self._undealt[due])
        self._undealt[due] -= wanted
        self._undealt = +self._undealt  # without those of which all is dealt
        self._turns.remove(key)
        self._turns.append(key)
        return due, wanted

    def _add(self, key: Key, successor_of: Key | None) -> None:
        super()._add(key, successor_of)
        if successor_of is not None:
            self._turns.insert(self._turns.index(successor_of), key)
        elif self._asking:
            self._turns.append(key)
        else:
            self._turns.appendleft(key)

    def _close(self, found: _Open) -> None:
        """Forgets a permit; what is still wanted of it is dealt again."""
        super()._close(found)
        self._undealt[found.permit.due] += found.wanted
        self._undealt = +self._undealt

    def _forget(self, key: Key, why: str) -> None:
        super()._forget(key, why)
        self._turns.remove(key)

    def _next_undealt(self) -> int:
        return min(self._undealt, default=self._undealt_from)


def make_pacing(config: Config) -> Pacing | None:
    """Returns the pacing of a run; None if its actors need no permits."""
    if not config.is_paced:
        return None
    fresh, exact = config.mix.fresh, config.exact_lag
    # One permit may be asked for while the round before is being made.
    seconds = 2.0 * config.actor.hang_seconds
    if exact is not None:
        return ExactLag(fresh, exact, max_seconds=seconds)
    return Budget(fresh, config.mix.lag_budget, max_seconds=seconds)
