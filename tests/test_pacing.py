"""Pacing: nothing is dropped for its age, nothing is older than promised, nobody waits for ever.

`Play` lets anything happen that actors and a learner may do, in a random order, against the real
`Pacing`. If nothing can happen any more before the last batch, it fails: that would be a hang.
"""

import asyncio
import contextlib
import heapq
import json
import random
import time
from collections import Counter
from typing import Any

import messages
import numpy as np
import pytest

from impala.config import rules, values
from impala.config.presets import PRESETS
from impala.config.schema import Config, MixConfig
from impala.config.values import OptionError
from impala.schedule.tasks import Schedule
from impala.types import Parameters
from learner.data.ingest import Ingest
from learner.data.mix import Mix, Prepared
from learner.data.pacing import (
    LAPSED,
    LEASE_SECONDS,
    LEFT_SECONDS,
    Budget,
    ExactLag,
    Key,
    Pacing,
    Permit,
    make_pacing,
)
from learner.data.rows import Layout
from learner.fleet.accounts import Accounts
from learner.fleet.refusals import InvalidRequest, UnknownActor
from learner.service import service as service_module
from learner.service.parameters import PublishedParameters
from learner.service.service import LearnerService
from protos.impala.v1 import learner_pb2 as pb

FRESH = 8


class Player:
    """An actor of the play: it asks, makes a round in two messages, sends them."""

    def __init__(self, name: str, unrolls: int, speed: float) -> None:
        self.key: Key = (name, 1)
        self.unrolls = unrolls
        self.speed = speed  # probability that it does what it can do
        self.round = 0
        self.next: Permit | None = None  # of the next round
        self.now: Permit | None = None  # of the one that is being made
        self.parts = 0  # of it that were sent
        self.is_dead = False
        self.batches: Counter[int] = Counter()  # that it contributed to


class Play:
    """Actors and a learner, one step after another."""

    def __init__(self, pacing: Pacing, players: list[Player], seed: int, ahead: int = 2) -> None:
        self.pacing = pacing
        self.players = players
        self.random = random.Random(seed)
        self.ahead = ahead  # batches that are made before the update
        self.time = 0.0
        self.learned = 0
        self.made = 0
        self.batch: list[tuple[Key, int]] = []  # of whom, and with which parameters
        self.batches: list[list[tuple[Key, int]]] = []
        self.waiting: list[tuple[int, int, Key, int]] = []  # due, number, of whom, parameters
        self.arriving: list[tuple[int, int, Key, int]] = []  # alike, still in the ingest
        self.came = 0
        self.lapsed = 0

    def run(self, batches: int) -> None:
        while self.learned < batches:
            before = self._progress()
            for _ in range(1000):
                self._step()
                if self._progress() != before:
                    break
            else:
                raise AssertionError(f"nothing happens after {self.learned} batches")

    def _progress(self) -> tuple[Any, ...]:
        rounds = [(player.round, player.parts) for player in self.players]
        return self.learned, self.made, len(self.batch), self.came, rounds

    def _step(self) -> None:
        self.time += 0.1
        player = self.random.choice(self.players)
        choice = self.random.random()
        if choice < 0.3:
            self._take()
        elif choice < 0.5 and self.made > self.learned:
            self.learned += 1
            self.pacing.learned()
        elif not player.is_dead:
            self.pacing.heard(player.key)
            if self.random.random() < player.speed:
                self._play(player)
        self.pacing.expire()

    def _play(self, player: Player) -> None:
        if player.next is None and (
            player.now is None or player.parts or self.random.random() < 0.5
        ):
            player.next = self.pacing.ask(
                player.key, player.round + 1, player.unrolls, lambda: None
            )
            player.round += player.next is not None
        if player.now is None:
            player.now, player.next, player.parts = player.next, None, 0
        else:
            half = player.unrolls // 2
            count = half if player.parts == 0 else player.unrolls - half
            self._send(player, count)
            player.parts += 1
            if player.parts == 2:
                player.now = None

    def _send(self, player: Player, count: int) -> None:
        assert player.now is not None
        admitted = self.pacing.came(player.key, player.now.number, count)
        self.lapsed += count - admitted.unrolls
        for _ in range(admitted.unrolls):
            self.came += 1
            item = (admitted.due, self.came, player.key, player.now.learned)
            self.arriving.append(item)

    def _take(self) -> None:
        while self.arriving and self.random.random() < 0.5:
            item = self.arriving.pop(0)
            heapq.heappush(self.waiting, item)
            self.pacing.fetched(item[0], 1)
        if self.made - self.learned >= self.ahead or not self.waiting:
            return
        due, _, key, learned = self.waiting[0]
        if self.pacing.most(due) <= 0:
            return
        heapq.heappop(self.waiting)
        self.pacing.taken(1)
        self.batch.append((key, learned))
        if len(self.batch) == FRESH:
            self.batches.append(self.batch)
            self.batch = []
            self.made += 1


def _lags(play: Play) -> list[set[int]]:
    """The lags in each batch."""
    return [{b - learned for _, learned in batch} for b, batch in enumerate(play.batches)]


def _pacing(play: list[Play], lag: int, exact: bool) -> Pacing:
    """Pacing whose clock is that of the play which will be in the list."""
    kind = ExactLag if exact else Budget
    return kind(FRESH, lag, max_seconds=1e6, clock=lambda: play[0].time if play else 0.0)


def _play(lag: int, exact: bool, players: list[Player], seed: int, ahead: int = 2) -> Play:
    made: list[Play] = []
    made.append(Play(_pacing(made, lag, exact), players, seed, ahead))
    return made[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_under_a_budget_nothing_lapses_or_is_older(lag: int, seed: int) -> None:
    """Given actors of which one is twenty times slower, and makes the largest rounds."""
    players = [Player("slow", FRESH * lag, 0.05), Player("a", 2, 1.0), Player("b", 3, 1.0)]
    play = _play(lag, exact=False, players=players, seed=seed)
    play.run(100)
    assert play.lapsed == 0
    assert all(max(lags) <= lag for lags in _lags(play))
    assert max(map(max, _lags(play))) == lag  # which is used
    # What is played is learned from, or under way.
    learned = Counter(key[0] for batch in play.batches for key, _ in batch)
    there = [key for *_, key, _ in (*play.arriving, *play.waiting)]
    waiting = Counter(name for name, _ in (*there, *(key for key, _ in play.batch)))
    rounds = {player.key[0]: player.unrolls * player.round for player in players}
    for player in players:
        name = player.key[0]
        assert learned[name] + waiting[name] >= rounds[name] - 2 * player.unrolls
        assert learned[name] > 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_an_exact_lag_is_exact_and_dealt_in_turn(num_actors: int, lag: int, seed: int) -> None:
    rng = random.Random(seed)
    players = [Player(f"a{i}", 2, rng.choice([0.1, 1.0])) for i in range(num_actors)]
    play = _play(lag, exact=True, players=players, seed=seed)
    play.run(60)
    assert play.lapsed == 0
    assert _lags(play) == [{min(b, lag)} for b in range(len(play.batches))]
    # Once all are there, each has its share of every batch, however slow it is.
    for batch in play.batches[20:]:
        assert set(Counter(key for key, _ in batch).values()) == {FRESH // num_actors}


def _ask(pacing: Pacing, name: str, incarnation: int = 1) -> Permit | None:
    return pacing.ask((name, incarnation), 1, FRESH // 4, lambda: None)


def test_joining_again_brings_no_turn_of_others() -> None:
    """Given an actor that joins again after each round and asks before anybody else may begin."""
    pacing = ExactLag(FRESH, 0)
    keys: dict[str, Key] = {name: (name, 1) for name in ("restless", "a", "b")}
    rounds, learned = Counter[Key](), Counter[str]()
    for batch in range(30):
        asked = {
            name: pacing.ask(key, rounds[key] + 1, FRESH, lambda: None)
            for name, key in keys.items()
        }
        ((name, permit),) = [(name, permit) for name, permit in asked.items() if permit is not None]
        rounds[keys[name]] += 1
        assert pacing.came(keys[name], permit.number, FRESH).unrolls == FRESH
        pacing.taken(FRESH)
        learned[name] += 1
        if name == "restless":
            keys[name] = (name, 2 + batch)
            pacing.replaced(keys[name])
            assert pacing.ask(keys[name], 1, FRESH, lambda: None) is None
        pacing.learned()
    assert all(learned[name] >= 9 for name in keys), learned


def test_what_was_rolled_back_is_played_by_nobody() -> None:
    """Its rounds would be refused, and asked for again for ever."""
    pacing, wanted = ExactLag(FRESH, 0), pb.GetParametersRequest(actor="a")
    published = PublishedParameters(Schedule(Config()), pacing)

    def publish(version: int, rollbacks: int) -> None:
        published.publish(Parameters(1, version, 0.0, 0, []), {"rollbacks": rollbacks})

    def version_of(permit: Permit | None) -> int:
        reply = pb.GetParametersReply.FromString(published.reply(wanted, permit))
        return reply.permit.version

    publish(0, 0)
    permit = pacing.ask(("a", 1), 1, FRESH, lambda: None)
    assert permit is not None and version_of(permit) == 0
    pacing.came(("a", 1), permit.number, FRESH)
    pacing.taken(FRESH)
    publish(1, 0)
    published.learned()
    permit = pacing.ask(("a", 1), 2, FRESH, lambda: None)
    assert version_of(permit) == 1
    publish(2, 1)
    assert version_of(permit) == 2


def test_a_rejoining_actor_keeps_its_turn() -> None:
    pacing = ExactLag(FRESH, 0)
    assert _ask(pacing, "a") and _ask(pacing, "b")
    pacing.replaced(("a", 2))
    permit = _ask(pacing, "a", 2)
    assert permit is not None  # it is its turn...
    pacing.came(("a", 2), permit.number, FRESH // 4)
    pacing.replaced(("a", 3))
    assert _ask(pacing, "a", 3) is None  # ...and then that of b
    pacing.replaced(("b", 2))
    assert _ask(pacing, "a", 3) is not None  # which has joined and does not ask yet


def test_a_new_actor_does_not_begin_before_those_that_wait() -> None:
    pacing = ExactLag(FRESH, 0)
    assert all(_ask(pacing, name) for name in "abcd")  # nobody waits, until the batch is full
    assert not any(_ask(pacing, name) for name in "ef")
    pacing.replaced(("b", 2))  # then there is room for one
    assert _ask(pacing, "f") is None and _ask(pacing, "e") is not None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("lag", "exact"), [(2, False), (0, True), (2, True)])
def test_a_dead_actor_holds_nobody_up(lag: int, exact: bool, seed: int) -> None:
    players = [Player("a", 4, 1.0), Player("b", 4, 1.0), Player("c", 2, 0.3)]
    play = _play(lag, exact=exact, players=players, seed=seed)
    play.run(20)
    players[seed % 3].is_dead = True
    play.run(60)
    alive = {player.key for player in players if not player.is_dead}
    assert {key for batch in play.batches[40:] for key, _ in batch} <= alive
    most = {b - learned for b, batch in enumerate(play.batches) for _, learned in batch}
    assert max(most) <= lag
    if exact:
        assert _lags(play)[lag:] == [{lag}] * (len(play.batches) - lag)


def test_a_permit_lapses_without_a_sign_of_life() -> None:
    now = [0.0]
    pacing = Budget(FRESH, 1, max_seconds=1e6, clock=lambda: now[0])
    permits = [pacing.ask((name, 1), 1, 2, lambda: None) for name in "ab"]
    assert pacing.making == 4
    pacing.left(("b", 1))
    now[0] = LEFT_SECONDS + 0.1
    pacing.heard(("a", 1))
    pacing.expire()
    assert pacing.making == 2
    assert permits[1] is not None and pacing.came(("b", 1), permits[1].number, 2).unrolls == 0
    now[0] += LEASE_SECONDS + 0.1
    pacing.expire()
    assert pacing.making == 0


def test_a_pretending_actor_holds_its_permit_briefly() -> None:
    now = [0.0]
    pacing = ExactLag(FRESH, 0, max_seconds=100.0, clock=lambda: now[0])
    assert pacing.ask(("idle", 1), 1, FRESH, lambda: None) is not None
    assert pacing.ask(("honest", 1), 1, FRESH, lambda: None) is None
    for _ in range(15):
        now[0] += 10.0
        pacing.heard(("idle", 1))
        pacing.heard(("honest", 1))
        pacing.expire()
    permit = pacing.ask(("honest", 1), 1, FRESH, lambda: None)
    assert permit is not None and permit.due == 0


def test_permits_are_neither_taken_nor_exceeded() -> None:
    pacing = Budget(FRESH, 1)
    permit = pacing.ask(("a", 1), 1, 4, lambda: None)
    assert permit is not None
    assert pacing.came(("b", 1), permit.number, 4).unrolls == 0
    assert pacing.came(("a", 2), permit.number, 4).unrolls == 0
    assert pacing.came(("a", 1), permit.number, 100).unrolls == 4
    assert pacing.came(("a", 1), permit.number, 4).unrolls == 0
    with pytest.raises(ValueError, match="round is 1, but unrolls of round 1 have come"):
        pacing.ask(("a", 1), 1, 4, lambda: None)
    # An actor has two permits at most, however often it asks.
    assert pacing.ask(("a", 1), 2, 1, lambda: None) and pacing.ask(("a", 1), 3, 1, lambda: None)
    assert pacing.ask(("a", 1), 4, 1, lambda: None) is None


@pytest.mark.parametrize("kind", [Budget, ExactLag])
def test_asking_again_gives_the_same_permit(kind: type[Pacing]) -> None:
    pacing = kind(FRESH, 1)
    first = pacing.ask(("a", 1), 1, 4, lambda: None)
    pacing.learned()
    assert pacing.ask(("a", 1), 1, 4, lambda: None) == first
    assert pacing.making == 4


@pytest.mark.parametrize(
    ("mix", "num_envs", "says"),
    [
        ({"lag_budget": 2, "fresh": 8}, 32, "actor.num_envs is 32, .* leave room for 16"),
        ({"exact_lag": 0, "fresh": 8}, 6, "the first must divide the second"),
        ({"exact_lag": 0, "lag_budget": 4}, 32, "mix.lag_budget and mix.exact_lag are set"),
        ({"max_policy_lag": 3, "lag_budget": 4}, 32, "mix.max_policy_lag and mix.lag_budget are"),
        (
            {"lag_budget": 4, "updates": 2, "learn_from_fresh": False, "replayed": 8},
            32,
            "mix.updates is 2",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(mix: dict[str, Any], num_envs: int, says: str) -> None:
    config = values.overlay(PRESETS["catch"][1], {"mix": mix, "actor": {"num_envs": num_envs}})
    with pytest.raises(OptionError, match=says):
        rules.validate(config)


@pytest.mark.parametrize(
    ("across_phases", "lag", "is_kept"), [(False, 1, False), (True, 1, True), (False, 0, True)]
)
def test_deterministic_runs_empty_replay_only_at_fixed_times(
    across_phases: bool, lag: int, is_kept: bool
) -> None:
    settings = {
        "deterministic": True,
        "phases": ("critic:100000", "impala"),
        "mix": {"exact_lag": lag, "fresh": 32, "replayed": 32},
        "replay": {"across_phases": across_phases},
    }
    config = values.overlay(PRESETS["catch"][1], settings)
    refused = pytest.raises(OptionError, match=r"Set replay\.across_phases")
    with contextlib.nullcontext() if is_kept else refused:
        rules.validate(config)


# ------------------------------------------------------------- with the service and the mix


class Learner:
    """A service, its accounts, and the mix that makes batches of what it takes."""

    def __init__(self, lag: int, exact: bool) -> None:
        self.pacing = (ExactLag if exact else Budget)(FRESH, lag)
        self.ingest = Ingest(self.pacing.capacity)
        self.accounts = Accounts()
        self.service = messages.service(
            accounts=self.accounts, ingest=self.ingest, pacing=self.pacing
        )
        self.mix = Mix(
            self.ingest, MixConfig(fresh=FRESH), Layout(messages.spec()), pacing=self.pacing
        )
        self.version = 0
        self.publish()

    def publish(self) -> None:
        values = [np.full((2, 3), self.version, np.float32)]
        self.service.publish(Parameters(messages.LEARNER, self.version, 0.5, 1000, values))

    def learn(self) -> Prepared:
        """Learns from what comes next: a batch, or something to be dropped."""
        prepared = self.mix.get(timeout=20.0)
        assert prepared is not None
        for part in prepared.provenance:
            self.accounts.settle(*part.account)
        if prepared.is_whole:
            self.version += 1
            self.publish()
            self.service.learned()
        return prepared


class Caller:
    """An actor that calls the service as a client does."""

    def __init__(self, service: LearnerService, name: str) -> None:
        self.service, self.name = service, name
        self.fingerprint = service.join(messages.join_request(name)).fingerprint
        self.round = self.sequence = 0

    def ask(self, unrolls: int = 4) -> pb.GetParametersReply:
        """Asks for a permit, and does not wait for long."""
        request = pb.GetParametersRequest(
            actor=self.name, incarnation=1, round=self.round + 1, unrolls=unrolls
        )

        async def ask() -> bytes:
            try:
                permit = await asyncio.wait_for(self.service.permit(request), 0.05)
            except TimeoutError:
                permit = None
            return self.service.get_parameters(request, permit)

        reply = pb.GetParametersReply.FromString(asyncio.run(ask()))
        self.round += reply.HasField("permit")
        return reply

    def send(
        self,
        reply: pb.GetParametersReply,
        unrolls: int = 4,
        submit: Any = None,
        **kw: Any,
    ) -> pb.Receipt:
        self.sequence += 1
        message = messages.message(
            self.sequence,
            unrolls,
            actor=self.name,
            fingerprint=self.fingerprint,
            **{
                "permit": reply.permit.number,
                "parameter_version": reply.permit.version,
                **kw,
            },
        )
        return asyncio.run((submit or self.service.submit)(message))


@pytest.mark.parametrize("lag", [0, 2])
def test_a_batch_is_learned_from_with_the_lag_that_was_asked_for(lag: int) -> None:
    learner = Learner(lag, exact=True)
    try:
        callers = [Caller(learner.service, name) for name in "ab"]
        for caller in callers:
            assert caller.service.join(messages.join_request(caller.name)).needs_permits
        for batch in range(6):
            for caller in callers:
                reply = caller.ask()
                assert reply.permit.version == max(0, batch - lag)
                assert reply.parameters.version == reply.permit.version
                assert caller.send(reply).status == pb.STATUS_ACCEPTED
            prepared = learner.learn()
            assert prepared.batch is not None
            versions = prepared.batch.unroll.parameter_version
            np.testing.assert_array_equal(versions, max(0, batch - lag))
            assert {part.lag for part in prepared.provenance} == {min(batch, lag)}
        totals = learner.accounts.totals()
        assert totals.received == totals.learned == 6 * FRESH
    finally:
        learner.mix.close()


def test_what_has_no_permit_is_dropped_and_counted() -> None:
    learner = Learner(2, exact=False)
    try:
        good, bad = (Caller(learner.service, name) for name in ("good", "bad"))
        reply = good.ask()
        for kw in (
            {"permit": 0},
            {"permit": reply.permit.number},  # of another actor
            {"permit": 1, "learner_incarnation": messages.EARLIER},
        ):
            assert bad.send(reply, **kw).status == pb.STATUS_ACCEPTED
            prepared = learner.learn()
            assert {part.dropped for part in prepared.provenance} == {LAPSED}
            assert not prepared.is_whole
        good.send(reply)
        good.send(good.ask())
        assert {part.dropped for part in learner.learn().provenance} == {None}
        totals = learner.accounts.totals()
        assert totals.received == 5 * 4
        assert (totals.learned, totals.dropped, totals.queued) == (8, {LAPSED: 12}, 0)
    finally:
        learner.mix.close()


def test_an_actor_that_waits_for_its_turn_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(1, exact=False)
    try:
        caller = Caller(learner.service, "a")
        while caller.ask(8).HasField("permit"):
            pass
        roster, now = learner.service._records.roster, time.monotonic()
        monkeypatch.setattr(roster, "_clock", lambda: now + 61.0)
        assert roster.actors() == (0, 1)  # silent
        assert not caller.ask(8).HasField("permit")
        assert roster.actors() == (1, 0)
    finally:
        learner.mix.close()


def test_the_late_end_of_a_broken_stream_lapses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an actor whose network broke, and which is back before the learner notices."""
    learner = Learner(1, exact=False)
    try:
        caller = Caller(learner.service, "a")
        with contextlib.ExitStack() as old:
            broken = old.enter_context(learner.service.stream())
            caller.send(caller.ask(), submit=broken)
            with learner.service.stream() as new:
                caller.send(caller.ask(), submit=new)
                learner.learn()
                assert caller.ask().HasField("permit") and learner.pacing.making == 4
                now = time.monotonic()
                old.close()
                monkeypatch.setattr(learner.pacing, "_clock", lambda: now + LEFT_SECONDS + 1.0)
                learner.pacing.expire()
                assert learner.pacing.making == 4
            learner.pacing.expire()
            monkeypatch.setattr(learner.pacing, "_clock", lambda: now + 2 * LEFT_SECONDS + 2.0)
            learner.pacing.expire()
            assert learner.pacing.making == 0  # its last stream has ended
    finally:
        learner.mix.close()


def test_who_waits_for_a_permit_keeps_the_one_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an actor that joined again, and whose old stream ends before its new one begins."""
    learner = Learner(1, exact=False)
    try:
        caller = Caller(learner.service, "a")
        with learner.service.stream() as old:
            for _ in range(2):
                caller.send(caller.ask(), submit=old)
            learner.learn()
            while caller.ask().HasField("permit"):  # the last call waits when the stream ends
                pass
        now = time.monotonic()
        for calls in range(1, 4):  # each as long as one waits at most
            seconds = calls * service_module._PERMIT_SECONDS
            monkeypatch.setattr(learner.pacing, "_clock", lambda at=now + seconds: at)
            learner.pacing.expire()
            assert learner.pacing.making >= 4
            caller.ask()
    finally:
        learner.mix.close()


def test_no_parameters_before_a_turn_or_for_misfit_rounds() -> None:
    learner = Learner(1, exact=False)
    try:
        caller = Caller(learner.service, "a")
        for _ in range(2):
            reply = caller.ask(8)
            assert reply.parameters.version == reply.permit.version == 0
        assert not caller.ask(8).HasField("parameters")  # two rounds are under way
        with pytest.raises(InvalidRequest, match="leave room for 1 to 8: use fewer"):
            caller.ask(9)
        stranger = pb.GetParametersRequest(actor="x", incarnation=1, round=1, unrolls=4)
        with pytest.raises(UnknownActor, match="join again"):
            asyncio.run(learner.service.permit(stranger))
        # An evaluator, which names nobody, has them as ever.
        anyone = learner.service.get_parameters(pb.GetParametersRequest())
        assert pb.GetParametersReply.FromString(anyone).HasField("parameters")
    finally:
        learner.mix.close()


def test_a_message_that_is_refused_gives_its_permit_back() -> None:
    learner = Learner(0, exact=True)
    try:
        caller = Caller(learner.service, "a")
        refused = caller.send(caller.ask(8), 8, task=7)
        assert refused.reason == pb.REASON_RANGE
        caller.send(caller.ask(8), 8)
        assert learner.learn().is_whole
    finally:
        learner.mix.close()


def test_a_replaced_waiting_incarnation_gets_no_permit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.service.service._PERMIT_SECONDS", 0.1)
    learner = Learner(0, exact=True)
    try:
        Caller(learner.service, "b").ask(8)  # the whole batch
        Caller(learner.service, "a")
        request = pb.GetParametersRequest(actor="a", incarnation=1, round=1, unrolls=4)

        async def story() -> Permit | None:
            waiting = asyncio.create_task(learner.service.permit(request))
            await asyncio.sleep(0.01)
            learner.service.join(messages.join_request("a", 2))
            learner.service.join(messages.join_request("b", 2))  # so there is room
            return await waiting

        assert asyncio.run(story()) is None
        assert learner.pacing.making == 0
        with pytest.raises(UnknownActor, match="join again"):  # no message of it would tell
            asyncio.run(learner.service.permit(request))
    finally:
        learner.mix.close()


def test_older_actors_are_told_they_lack_permits() -> None:
    from impala.schedule import tasks
    from learner.service import settings

    config = values.overlay(PRESETS["catch"][1], {"mix": {"lag_budget": 2}})
    played = tasks.make(config.environment, config.tasks)
    assert "mix.lag_budget" in json.loads(settings.for_actors(config, played))["needs"]
    plain = PRESETS["catch"][1]
    assert "mix.lag_budget" not in json.loads(settings.for_actors(plain, played))["needs"]
    assert settings.agreed(config, played) != settings.agreed(plain, played)
    assert make_pacing(Config()) is None
