"""Every acknowledged unroll is learned from, queued or dropped, whatever crashes and gets lost."""

import contextlib
import dataclasses
import itertools
import json
import random
from collections import deque

import pytest

from learner.fleet.accounts import LEARNER_CRASH, Accounts, Superseded


def _crash(accounts: Accounts, checkpoint: dict) -> Accounts:
    """The accounts of a learner that starts again from a checkpoint."""
    restored = Accounts()
    restored.restore(json.loads(json.dumps(checkpoint)))
    return restored


def test_sequence_numbers_are_taken_once_and_in_order() -> None:
    accounts = Accounts()
    accounts.join("a", 1, 0, 0)

    def verdict(sequence: int) -> str:
        return accounts.receive("a", 1, sequence, 4).verdict

    assert verdict(0) == "skipped"
    assert verdict(2) == "skipped"
    assert verdict(1) == "accepted"
    assert verdict(1) == "duplicate"
    assert verdict(2) == "accepted"
    totals = accounts.totals()
    assert (totals.received, totals.queued, totals.duplicates) == (8, 8, 1)


def test_a_refused_message_uses_its_sequence_number_up() -> None:
    accounts = Accounts()
    accounts.join("a", 1, 0, 0)
    accounts.rejected("range", "a", 1, sequence=1)
    accounts.rejected("range", "a", 1, sequence=7)  # not the next one: skipped is skipped
    assert accounts.receive("a", 1, 2, 4).verdict == "accepted"
    assert accounts.totals().rejected == {"range": 2}


def test_only_the_incarnation_that_joined_last_may_send() -> None:
    accounts = Accounts()
    index = accounts.join("a", 1, 0, 0)
    assert accounts.receive("a", 1, 1, 4).verdict == "accepted"
    assert accounts.join("b", 5, 0, 0) != index
    assert accounts.join("a", 2, 0, 0) == index
    assert not accounts.may_send("a", 1)
    assert accounts.receive("a", 1, 2, 4).verdict == "unknown"
    assert accounts.receive("a", 2, 1, 4).verdict == "accepted"
    accounts.settle("a", 1, 1, 4)  # what the old one sent before is still learned from
    assert (accounts.totals().learned, accounts.totals().queued) == (4, 4)


def _is_told_to_end(
    accounts: Accounts, incarnation: int, sequence: int = 0, unrolls: int = 0
) -> None:
    with pytest.raises(Superseded, match=r"another process has joined as a since: give each actor"):
        accounts.join("a", incarnation, sequence, unrolls)


def test_superseded_incarnations_never_take_the_name_back() -> None:
    """Given two processes by one name, of which each joins again whenever it may not send."""
    accounts = Accounts()
    accounts.join("a", 1, 0, 0)
    accounts.receive("a", 1, 1, 4)
    accounts.join("a", 2, 0, 0)
    _is_told_to_end(accounts, 1, 1, 4)
    assert accounts.may_send("a", 2)
    accounts.join("a", 2, 0, 0)  # its own stream broke: it may come back
    assert accounts.may_send("a", 2)

    accounts = _crash(accounts, accounts.state())
    _is_told_to_end(accounts, 1)
    assert not accounts.may_send("a", 2)  # it has to join this learner too
    accounts.join("a", 2, 0, 0)
    accounts.join("a", 3, 0, 0)  # a restart
    _is_told_to_end(accounts, 2)
    assert accounts.may_send("a", 3)


def test_receipts_of_a_superseded_incarnation_count() -> None:
    """Given 4 unrolls with a receipt that no checkpoint has, and a namesake that joins first."""
    accounts = Accounts()
    accounts.join("a", 1, 0, 0)
    checkpoint = accounts.state()
    accounts.receive("a", 1, 1, 4)
    accounts = _crash(accounts, checkpoint)
    accounts.join("a", 2, 0, 0)
    for _ in range(2):
        _is_told_to_end(accounts, 1, 1, 4)
        assert accounts.totals().dropped == {LEARNER_CRASH: 4}
    assert accounts.totals().received == 4


def test_a_forgetful_learner_takes_whoever_comes_first() -> None:
    """Given a checkpoint from before either joined."""
    accounts = Accounts()
    accounts.join("a", 2, 0, 0)
    accounts.join("a", 1, 0, 0)  # never seen before: newer, whatever its number
    _is_told_to_end(accounts, 2)


def test_a_crash_gap_is_counted_when_the_actor_returns() -> None:
    """Given 3 messages of 4 unrolls with receipts, of which the checkpoint knows 6 unrolls."""
    accounts = Accounts()
    index = accounts.join("a", 1, 0, 0)
    for sequence in (1, 2, 3):
        accounts.receive("a", 1, sequence, 4)
    accounts.settle("a", 1, 1, 4)
    accounts.settle("a", 1, 2, 2)
    accounts = _crash(accounts, accounts.state())
    assert (accounts.totals().received, accounts.totals().learned) == (6, 6)
    assert accounts.receive("a", 1, 4, 4).verdict == "unknown"  # it has to say first how far it is

    assert accounts.join("a", 1, acknowledged_sequence=3, acknowledged_unrolls=12) == index
    assert accounts.totals().dropped == {LEARNER_CRASH: 6}
    assert accounts.totals().received == 12
    assert accounts.receive("a", 1, 4, 4) == ("accepted", 0, 4)


def test_a_message_that_was_half_learned_goes_on_where_it_was() -> None:
    """Given a message of 4 unrolls whose receipt was lost, with 3 learned at the checkpoint."""
    accounts = Accounts()
    accounts.join("a", 1, 0, 0)
    accounts.receive("a", 1, 1, 4)
    accounts.settle("a", 1, 1, 3)
    accounts = _crash(accounts, accounts.state())

    accounts.join("a", 1, 0, 0)
    assert accounts.receive("a", 1, 1, 4) == ("accepted", 3, 1)
    accounts.settle("a", 1, 1, 1)
    assert accounts.totals()[:3] == (4, 4, {})
    assert accounts.receive("a", 1, 2, 4).offset == 0


def test_queued_unrolls_are_dropped_by_reason_and_only_once() -> None:
    accounts = Accounts()
    accounts.join("a", 1, 0, 0)
    accounts.receive("a", 1, 1, 4)
    accounts.receive("a", 1, 2, 4)
    accounts.settle("a", 1, 1, 1)
    accounts.drop_queued("learner_stop")
    assert (accounts.totals().dropped, accounts.totals().queued) == ({"learner_stop": 7}, 0)
    accounts = _crash(accounts, accounts.state())
    accounts.join("a", 1, 2, 8)
    assert accounts.totals().dropped == {"learner_stop": 7}


def test_actors_that_restart_for_ever_do_not_fill_the_memory() -> None:
    accounts = Accounts(max_ledgers=10)
    accounts.join("steady", 1, 0, 0)
    accounts.receive("steady", 1, 1, 2)  # in the queue: cannot be forgotten
    for i in range(200):
        index = accounts.join(f"host-{i}-0", i + 1, 0, 0)
        assert index <= 10  # and indices stay small
        accounts.receive(f"host-{i}-0", i + 1, 1, 2)
        accounts.settle(f"host-{i}-0", i + 1, 1, 2)
    assert len(accounts.state()["ledgers"]) == 10
    assert not accounts.may_send("host-0-0", 1)
    accounts.settle("steady", 1, 1, 2)
    assert (accounts.totals().received, accounts.totals().learned) == (402, 402)


def test_ledgers_are_forgotten_a_hundredth_at_a_time() -> None:
    """As each time looks at all of them."""
    accounts, held = Accounts(max_ledgers=1000), []
    for number in range(1100):
        accounts.join(f"host-{number}", 1, 0, 0)
        held.append(len(accounts.state()["ledgers"]))
    assert 990 <= held[-1] <= max(held) == 1000
    assert 1 <= sum(now < before for before, now in itertools.pairwise(held)) <= 11


@dataclasses.dataclass
class _Actor:
    """What an actor knows: which messages got no receipt yet, and how far its receipts went."""

    name: str
    incarnation: int
    connected: bool = False
    sent: int = 0
    without_receipt: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    acknowledged_sequence: int = 0
    acknowledged_unrolls: int = 0


class _Fleet:
    """Actors, a learner that crashes and receipts that get lost. Maybe two processes share a name;
    whoever is told to end is started again.
    """

    def __init__(self, namesakes: bool) -> None:
        self.actors = [_Actor("a", 1), _Actor("a" if namesakes else "c", 2), _Actor("b", 3)]
        self.ended: list[_Actor] = []
        self.accounts = Accounts()
        # The newest and the one before, each with what was learned and dropped by then.
        self.checkpoints: deque[tuple[dict, set, set]] = deque(maxlen=2)
        self.queue: deque[list] = deque()  # [actor, sequence, next unroll, unrolls]
        self.learned: set[tuple] = set()  # (incarnation, sequence, number of the unroll)
        self.dropped: set[tuple] = set()
        self.save()

    def step(self, rng: random.Random) -> None:
        """One thing happens."""
        actor = rng.choice(self.actors)
        happening = rng.choices(
            ["act", "learn", "save", "crash", "disconnect", "stop"], [30, 20, 8, 8, 8, 2]
        )[0]
        if happening == "act":
            # Some messages have bad contents, which is written as 0 unrolls here.
            self.act(actor, rng.choice([0, 2, 3, 4, 5]), lost=rng.random() < 0.4)
        elif happening == "learn":
            self.learn(rng.randint(1, 5), "policy_lag" if rng.random() < 0.3 else None)
        elif happening == "save":
            self.save()
        elif happening == "crash":
            self.crash(is_damaged=rng.random() < 0.2)
        elif happening == "disconnect":
            actor.connected = False
        else:
            self.stop_in_good_order()
        self.the_identity_holds()

    def act(self, actor: _Actor, unrolls: int, lost: bool) -> None:
        """An actor makes a message and sends what has no receipt, until a receipt is lost."""
        actor.sent += 1
        actor.without_receipt.append((actor.sent, unrolls))
        self._send(actor, lost)

    def learn(self, unrolls: int, dropped: str | None) -> None:
        while self.queue and unrolls:
            actor, sequence, start, end = self.queue[0]
            take = min(unrolls, end - start)
            self.accounts.settle(actor.name, actor.incarnation, sequence, take, dropped)
            for i in range(start, start + take):
                assert (actor.incarnation, sequence, i) not in self.learned | self.dropped
                done = self.learned if dropped is None else self.dropped
                done.add((actor.incarnation, sequence, i))
            self.queue[0][2] += take
            unrolls -= take
            if self.queue[0][2] == end:
                self.queue.popleft()

    def save(self) -> None:
        self.checkpoints.append((self.accounts.state(), set(self.learned), set(self.dropped)))

    def crash(self, is_damaged: bool = False) -> None:
        """Goes on from the newest checkpoint, or from the one before if that is damaged."""
        if is_damaged and len(self.checkpoints) > 1:
            self.checkpoints.pop()
        checkpoint, learned, dropped = self.checkpoints[-1]
        self.accounts = _crash(self.accounts, checkpoint)
        self.learned, self.dropped = set(learned), set(dropped)
        self.queue.clear()
        for actor in self.actors:
            actor.connected = False

    def stop_in_good_order(self) -> None:
        self.accounts.drop_queued("learner_stop")
        self.queue.clear()
        self.save()
        self.crash()

    def the_identity_holds(self) -> None:
        totals = self.accounts.totals()
        assert totals.queued == sum(end - start for _, _, start, end in self.queue)
        assert totals.learned == len(self.learned)
        assert totals.dropped.get("policy_lag", 0) == len(self.dropped)

    def all_come_back(self) -> None:
        """When all have come back, what they got receipts for is what was received.

        Who was told to end forgot what it had no receipt for; some of it may have been received.
        """
        for actor in list(self.actors):
            actor.connected = False
            self._send(actor, lost=False)
            assert not actor.without_receipt or actor in self.ended
        for actor in self.ended:
            with contextlib.suppress(Superseded):  # a learner that crashed may not know it
                self._join(actor)
        everyone = self.actors + self.ended
        acknowledged = sum(actor.acknowledged_unrolls for actor in everyone)
        forgotten = sum(unrolls for actor in self.ended for _, unrolls in actor.without_receipt)
        assert acknowledged <= self.accounts.totals().received <= acknowledged + forgotten
        self.the_identity_holds()

    def _send(self, actor: _Actor, lost: bool) -> None:
        if not actor.connected:
            try:
                self._join(actor)
            except Superseded:
                newer = _Actor(actor.name, 4 + len(self.ended))
                self.actors[self.actors.index(actor)] = newer
                self.ended.append(actor)
                return None
            actor.connected = True
        for sequence, unrolls in list(actor.without_receipt):
            if not self.accounts.may_send(actor.name, actor.incarnation):
                actor.connected = False  # its namesake has joined
                return self._send(actor, lost)
            if not unrolls:
                self.accounts.rejected("range", actor.name, actor.incarnation, sequence)
            else:
                self._receive(actor, sequence, unrolls)
            if lost:
                actor.connected = False
                return None
            actor.without_receipt.popleft()
            actor.acknowledged_sequence = sequence
            actor.acknowledged_unrolls += unrolls
            whose = actor.name, actor.incarnation, sequence
            assert self.accounts.acknowledged(*whose) == actor.acknowledged_unrolls
        return None

    def _join(self, actor: _Actor) -> None:
        self.accounts.join(
            actor.name,
            actor.incarnation,
            actor.acknowledged_sequence,
            actor.acknowledged_unrolls,
        )

    def _receive(self, actor: _Actor, sequence: int, unrolls: int) -> None:
        answer = self.accounts.receive(actor.name, actor.incarnation, sequence, unrolls)
        assert answer.verdict in ("accepted", "duplicate")
        if answer.verdict == "accepted":
            self.queue.append([actor, sequence, answer.offset, unrolls])


@pytest.mark.parametrize("seed", range(10))
def test_the_identity_holds_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    for i in range(150):
        fleet = _Fleet(namesakes=i % 3 == 0)
        for _ in range(rng.randint(10, 80)):
            fleet.step(rng)
        fleet.all_come_back()
        assert fleet.ended == [] or i % 3 == 0


def test_messages_settled_out_of_order_count_in_order() -> None:
    accounts = Accounts()
    accounts.join("a", 1, 0, 0)
    for sequence in (1, 2, 3):
        accounts.receive("a", 1, sequence, 4)
    accounts.settle("a", 1, 3, 4)
    accounts.settle("a", 1, 2, 1, dropped="lapsed")
    accounts.settle("a", 1, 1, 2)
    totals = accounts.totals()
    assert (totals.learned, totals.dropped, totals.queued) == (2, {}, 10)
    # A checkpoint holds what is accounted for in order: after a crash, the rest is sent again.
    (ledger,) = accounts.state()["ledgers"]
    assert ledger[2:5] == [2, 0, 2]
    accounts.settle("a", 1, 1, 2)
    totals = accounts.totals()
    assert (totals.learned, totals.dropped, totals.queued) == (4, {"lapsed": 1}, 7)
    with pytest.raises(ValueError, match="only 0 of it are queued"):
        accounts.settle("a", 1, 3, 1)
    # At the end, what was learned from counts as that, and the rest as dropped.
    accounts.drop_queued("run_finished")
    totals = accounts.totals()
    assert (totals.learned, totals.dropped) == (8, {"lapsed": 1, "run_finished": 3})
    assert totals.received == 12 and totals.queued == 0
