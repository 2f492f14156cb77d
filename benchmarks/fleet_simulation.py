"""Simulates up to ten thousand actors of one learner in virtual time: joins, pulls, a restart.

Each actor is a real `actors.session.Session`, which decides what it asks for, how long it waits
before it joins again and what it keeps; the intervals of pulls are those of `actors.client` and
`actors.shared`. Simulated are time, the learner and the network.

The learner is two queues. Its front (an event loop, so at most one core) serves joins, pulls and
messages in the order in which they come. Its update learns from messages with the cores that the
front leaves, and gives the receipts. Costs are CPU seconds that were measured.
"""

import collections
import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from actors import client, shared
from actors.session import Failure, Pull, Session
from protos.impala.v1 import learner_pb2 as pb

_DOWN = Failure("UNAVAILABLE", "connection refused")
_LATE = Failure("DEADLINE_EXCEEDED", "the call took too long")
_BUSY_SECONDS = 1.0  # over which the front's share of the cores is taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """Actors, a learner, and what happens to it. Seconds, and CPU seconds for costs."""

    actors: int
    per_host: int = 1
    """Actors of a host, which share pulls."""
    seconds: float = 40.0
    """Simulated time."""
    warm_up: float = 10.0
    """Time that is not measured."""
    down: tuple[float, float] | None = None
    """When the learner ends, and when it is back."""
    round_seconds: float = 0.37
    """In which an actor makes a message, if it need not wait."""
    unrolls: int = 32
    """In a message."""
    in_flight: int = 2
    """Messages that an actor may have without a receipt."""
    is_synthetic: bool = False
    """As those of `benchmarks.fleet`: they make nothing, and pull after a receipt, at most once a
    second."""
    cores: float = 4.0
    """For the learner's front and its update."""
    unroll_cpu: float = 0.4e-3
    """To learn from an unroll."""
    batch: int = 32
    """Unrolls of an update."""
    join_cpu: float = 0.6e-3
    status_cpu: float = 0.25e-3
    """Of a pull that finds nothing newer, too."""
    pull_cpu: float = 2.0e-3
    message_cpu: float = 1.0e-3
    """Of the front."""
    parameter_bytes: float = 2.71e6
    link: float = 1.25e9
    """Bytes that leave the learner's host in a second."""
    seed: int = 1


class Report(NamedTuple):
    """What was seen after the warm-up."""

    unrolls_per_second: float
    pulls_per_second: float  # answered with parameters
    pull_megabytes_per_second: float
    pull_seconds: float  # median
    slowest_pull_seconds: float  # 99th percentile
    receipt_seconds: float  # median, from a message to its receipt
    slowest_receipt_seconds: float  # 99th percentile
    age_updates: float  # of the parameters that a round begins with; mean
    front_load: float  # work of the front in a second; above 1 it cannot keep up
    joined_seconds: float  # until the last had joined at the start
    rejoined_seconds: float  # from when the learner is back until the last has joined; nan: never
    failed_joins: int  # that took too long


def simulate(scenario: Scenario) -> Report:
    """Runs a scenario. Equal scenarios have equal reports."""
    return _Simulation(scenario).run()


class _Simulation:
    """Events in virtual time."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = random.Random(scenario.seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.learner = _Learner(self)
        hosts = [_Host() for _ in range(-(-scenario.actors // scenario.per_host))]
        self.actors = [
            _Actor(self, place, hosts[place // scenario.per_host])
            for place in range(scenario.actors)
        ]

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self) -> Report:
        scenario, learner = self.scenario, self.learner
        for actor in self.actors:
            self.after(self.random.uniform(0.0, 0.05), actor.join)
        if scenario.down is not None:
            self.after(scenario.down[0], learner.end)
            self.after(scenario.down[1], learner.begin)
        self.after(scenario.warm_up, learner.begin_measurement)
        while self._events and self._events[0][0] <= scenario.seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        elapsed, seen = scenario.seconds - scenario.warm_up, learner.seen
        pulls, receipts = np.array([*seen.pulls] or [0.0]), np.array([*seen.receipts] or [0.0])
        joined = [actor.joins for actor in self.actors]
        is_back = scenario.down is not None and all(
            joins and joins[-1] >= scenario.down[1] for joins in joined
        )
        return Report(
            unrolls_per_second=seen.unrolls / elapsed,
            pulls_per_second=seen.pulled / elapsed,
            pull_megabytes_per_second=seen.pulled * scenario.parameter_bytes / elapsed / 1e6,
            pull_seconds=float(np.median(pulls)),
            slowest_pull_seconds=float(np.percentile(pulls, 99)),
            receipt_seconds=float(np.median(receipts)),
            slowest_receipt_seconds=float(np.percentile(receipts, 99)),
            age_updates=float(np.mean([*seen.ages] or [0])),
            front_load=seen.front / elapsed,
            joined_seconds=max(joins[0] if joins else np.inf for joins in joined),
            rejoined_seconds=(
                max(joins[-1] for joins in joined) - scenario.down[1]
                if is_back and scenario.down is not None
                else float("nan")
            ),
            failed_joins=sum(actor.failed_joins for actor in self.actors),
        )


@dataclasses.dataclass
class _Seen:
    """What is measured."""

    unrolls: int = 0
    pulled: int = 0
    front: float = 0.0
    pulls: list[float] = dataclasses.field(default_factory=list)
    receipts: list[float] = dataclasses.field(default_factory=list)
    ages: list[int] = dataclasses.field(default_factory=list)


class _Learner:
    """The front and the update: two queues that share cores."""

    def __init__(self, simulation: _Simulation) -> None:
        self._simulation = simulation
        self._scenario = simulation.scenario
        self.incarnation = 1  # 0: it is away
        self._starts = 1
        self._unrolls = 0
        self._front_free = self._link_free = self._update_free = 0.0
        self._lately: collections.deque[tuple[float, float]] = collections.deque()
        self._busy = 0.0  # sum of `_lately`
        self.seen = _Seen()

    @property
    def version(self) -> int:
        """The newest one."""
        return self._unrolls // self._scenario.batch

    def begin_measurement(self) -> None:
        self.seen = _Seen()

    def end(self) -> None:
        self.incarnation = 0
        for actor in self._simulation.actors:
            actor.lose(_DOWN)

    def begin(self) -> None:
        self._starts += 1
        self.incarnation = self._starts
        now = self._simulation.now
        self._front_free = self._link_free = self._update_free = now

    def serve(self, cpu: float, num_bytes: float, answer: Callable[[], None]) -> None:
        """Has the front do something, and answers when its bytes are sent."""
        now = self._simulation.now
        self._front_free = max(now, self._front_free) + cpu
        self._link_free = max(self._front_free, self._link_free) + num_bytes / self._scenario.link
        self._lately.append((now, cpu))
        self._busy += cpu
        self.seen.front += cpu
        self._answer(self._link_free if num_bytes else self._front_free, answer)

    def learn(self, unrolls: int, answer: Callable[[], None]) -> None:
        """Learns from a message when it is its turn, and answers."""
        now = self._simulation.now
        while self._lately and self._lately[0][0] < now - _BUSY_SECONDS:
            self._busy -= self._lately.popleft()[1]
        cores = self._scenario.cores - min(1.0, self._busy / _BUSY_SECONDS)
        cost = unrolls * self._scenario.unroll_cpu / cores
        self._update_free = max(now, self._update_free) + cost

        def learned() -> None:
            self._unrolls += unrolls
            self.seen.unrolls += unrolls
            answer()

        self._answer(self._update_free, learned)

    def _answer(self, when: float, answer: Callable[[], None]) -> None:
        incarnation = self.incarnation

        def unless_it_has_ended() -> None:
            if self.incarnation == incarnation:
                answer()

        self._simulation.after(when - self._simulation.now, unless_it_has_ended)


class _Host:
    """What the actors of a host share, as `actors.shared` does."""

    def __init__(self) -> None:
        self.held = (0, 0)  # incarnation and version
        self.asked = -np.inf
        self.is_pulling = False
        self.waiting: list[Callable[[], None]] = []

    def end_pull(self) -> None:
        """Notes that a pull has ended, and lets go on who has waited for it."""
        self.is_pulling = False
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()


class _Actor:
    """An actor around its session, as `actors.client` and `actors.actor` are."""

    def __init__(self, simulation: _Simulation, place: int, host: _Host) -> None:
        self._simulation = simulation
        self._scenario = simulation.scenario
        self._learner = simulation.learner
        self._host = host
        self._session = Session("simulated", name=f"{place}", incarnation=1 + place, now=0.0)
        self._is_pulling = self._is_making = False
        self._asked = -np.inf
        self.joins: list[float] = []  # when it had joined
        self.failed_joins = 0

    # As in `client._keep_session`.

    def join(self) -> None:
        learner, session = self._learner, self._session
        if not learner.incarnation:
            self.lose(_DOWN)
            return
        session.join_request()
        waits = True

        def joined() -> None:
            nonlocal waits
            if not waits:
                return
            waits = False
            reply = pb.JoinReply(
                learner_incarnation=learner.incarnation,
                fingerprint="simulated",
                max_unrolls_in_flight=self._scenario.in_flight,
                max_message_bytes=1 << 30,
            )
            session.joined(reply, self._simulation.now)
            self.joins.append(self._simulation.now)
            self._pull_if_due()
            self._send()
            self._make()

        def give_up() -> None:
            nonlocal waits
            if waits:
                waits = False
                self.failed_joins += 1
                self.lose(_LATE)

        learner.serve(self._scenario.join_cpu, 0.0, joined)
        self._simulation.after(client.CALL_SECONDS, give_up)

    def lose(self, failure: Failure) -> None:
        """Notes that a join has failed, or that the connection is lost."""
        retry = self._session.lost(failure, self._simulation.now)
        self._is_pulling = self._host.is_pulling = False
        self._host.waiting.clear()
        self._simulation.after(retry.pause(self._simulation.random.uniform), self.join)

    # As in `actors.actor`: parameters are asked for when three quarters of a round are done.

    def _make(self) -> None:
        session = self._session
        if self._is_making or session.parameters is None or not session.has_room():
            return
        self._is_making = True
        if self._scenario.is_synthetic:
            self._finish()
            return
        self._take_over()
        self._learner.seen.ages.append(self._learner.version - session.parameters.version)
        seconds = self._scenario.round_seconds * self._simulation.random.uniform(0.9, 1.1)
        self._simulation.after(0.75 * seconds, self._prefetch)
        self._simulation.after(seconds, self._finish)

    def _prefetch(self) -> None:
        self._session.want_parameters()
        self._pull_if_due()

    def _finish(self) -> None:
        self._is_making = False
        session, now = self._session, self._simulation.now
        session.append(pb.Unrolls(num_envs=self._scenario.unrolls), now, 0.0)
        self._send()
        self._make()

    def _send(self) -> None:
        session, learner = self._session, self._learner
        connection = session.connection
        while (message := session.next_message(connection)) is not None:
            number, sent = message.sequence, self._simulation.now

            def received(number: int = number, sent: float = sent) -> None:
                now = self._simulation.now
                learner.seen.receipts.append(now - sent)
                receipt = pb.Receipt(
                    sequence=number,
                    status=pb.STATUS_ACCEPTED,
                    learner_incarnation=learner.incarnation,
                    newest_version=learner.version,
                )
                session.receive(receipt, now)
                if self._scenario.is_synthetic and now - self._asked >= client.POLL_SECONDS:
                    session.want_parameters()
                self._pull_if_due()
                self._send()
                self._make()

            def arrived(received: Callable[[], None] = received) -> None:
                learner.learn(self._scenario.unrolls, received)

            learner.serve(self._scenario.message_cpu, 0.0, arrived)

    # As in `client._keep_pulling` and `actors.shared`.

    def _pull_if_due(self) -> None:
        session, host, now = self._session, self._host, self._simulation.now
        if self._is_pulling or not session.is_connected(session.connection):
            return
        polls = now - self._asked >= client.POLL_SECONDS and not self._scenario.is_synthetic
        if not session.must_pull() and not polls:
            return
        pull, since = session.pull(), shared.fresh_since(now, self._asked)
        self._asked = now
        self._simulation.after(client.POLL_SECONDS, self._pull_if_due)
        has_newer = host.held > (pull.request.learner_incarnation, pull.request.newer_than)
        if self._scenario.per_host > 1 and ((has_newer and host.asked >= since) or host.is_pulling):
            if has_newer:
                self._look_again()
            else:
                host.waiting.append(self._look_again)
            return
        self._is_pulling = host.is_pulling = True
        learner, incarnation = self._learner, self._learner.incarnation
        version = learner.version
        is_newer = host.held != (incarnation, version) or self._scenario.per_host == 1

        def answered() -> None:
            self._is_pulling = False
            host.held, host.asked = max(host.held, (incarnation, version)), now
            learner.seen.pulls.append(self._simulation.now - now)
            learner.seen.pulled += is_newer
            self._hold(pull, incarnation, version)
            host.end_pull()

        if is_newer:
            learner.serve(self._scenario.pull_cpu, self._scenario.parameter_bytes, answered)
        else:
            learner.serve(self._scenario.status_cpu, 0.0, answered)

    def _look_again(self) -> None:
        held = self._session.parameters
        if held is None or held.incarnation != self._learner.incarnation:
            self._take_over()  # others take it at the boundary of their round
        self._make()

    def _take_over(self) -> None:
        """Takes what another actor of this host has pulled."""
        session = self._session
        if self._scenario.per_host > 1 and session.reply is not None:
            held = session.parameters
            known = (0, -1) if held is None else (held.incarnation, held.version)
            if self._host.held > known and self._host.held[0] == session.reply.learner_incarnation:
                pull = Pull(session.connection, pb.GetParametersRequest())
                self._hold(pull, *self._host.held)

    def _hold(self, pull: Pull, incarnation: int, version: int) -> None:
        parameters = pb.Parameters(learner_incarnation=incarnation, version=version)
        was_without = self._session.parameters is None
        self._session.pulled(pull, pb.GetParametersReply(parameters=parameters))
        if was_without:
            self._make()


_MEASURED = {  # docs/results/fleet.md: actors -> cores of the learner; its costs are those with 10
    **{1: 1.60, 10: 1.61, 100: 1.46, 500: 1.40},
}


def as_measured() -> dict[int, Report]:
    """Simulates the fleets of `benchmarks.fleet`, by their number of actors."""
    return {
        actors: simulate(
            Scenario(
                actors=actors,
                is_synthetic=True,
                unrolls=4,
                in_flight=1,
                cores=cores,
                unroll_cpu=3.84e-3,
            )
        )
        for actors, cores in _MEASURED.items()
    }


def at_scale() -> dict[tuple[int, int], tuple[Report, Report]]:
    """Simulates large fleets: by actors, and actors of a host, without and with a restart."""
    scenarios = itertools.product((100, 1_000, 10_000), (1, 100))
    return {
        (actors, per_host): (
            simulate(Scenario(actors=actors, per_host=per_host)),
            simulate(Scenario(actors=actors, per_host=per_host, seconds=150.0, down=(20.0, 35.0))),
        )
        for actors, per_host in scenarios
    }
