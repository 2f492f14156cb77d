"""When the rounds of an actor begin that waits before them, on a clock of the test's own."""

import itertools
import math

import pytest
from page import says

from actors.just_in_time import JustInTime
from protos.impala.v1 import learner_pb2 as pb

UNROLLS = 1000  # in a message


class Learner:
    """Takes messages one after another, each for some seconds, and queues one.

    A receipt comes when its message is queued, which is when the one before is taken.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.idle = 0.0
        self._taken = -math.inf  # when it takes the last message

    def receives(self, sent: float) -> tuple[float, float]:
        """Returns when a message has its receipt, and when it is taken."""
        receipt = max(sent, self._taken)
        free = self._taken + self.seconds
        self.idle += max(0.0, receipt - free) if math.isfinite(free) else 0.0
        self._taken = max(receipt, free)
        return receipt, self._taken

    def receipt(self, at: float) -> pb.Receipt:
        """The receipt of the last message."""
        ahead = (self._taken - at) / self.seconds + 1.0
        return pb.Receipt(
            unrolls_ahead=round(UNROLLS * ahead), unrolls_per_second=UNROLLS / self.seconds
        )


class Run:
    """Rounds of `groups` messages each, of which `in_flight` may be without a receipt."""

    def __init__(self, seconds: float, groups: int, in_flight: int = 1, waits: bool = True) -> None:
        self.production = 1.0  # seconds to make a round
        self.now = 0.0
        self.learner = Learner(seconds / groups)
        self.pace = JustInTime(clock=lambda: self.now)
        self._groups, self._in_flight, self._waits = groups, in_flight, waits
        self._receipts: list[tuple[float, pb.Receipt]] = []  # to come
        self._last: list[float] = []

    def _pass(self, until: float) -> None:
        """Lets time pass, in which receipts come."""
        while self._receipts and self._receipts[0][0] <= until:
            self.now, receipt = max(self.now, self._receipts[0][0]), self._receipts.pop(0)[1]
            self.pace.told(receipt)
        self.now = max(self.now, until)

    def round(self) -> list[float]:
        """Returns the ages at which the messages of a round are taken."""
        wait = self.pace.begin(UNROLLS * len(self._receipts)) if self._waits else 0.0
        self._pass(self.now + wait)
        self.pace.waited(wait)
        began = self.now
        self._pass(self.now + self.production)
        ages = []
        for _ in range(self._groups):
            room = self._last[-self._in_flight] if len(self._last) >= self._in_flight else 0.0
            self.pace.waited(max(0.0, room - self.now))
            self._pass(room)
            receipt, taken = self.learner.receives(self.now)
            self._receipts.append((receipt, self.learner.receipt(receipt)))
            self._last.append(receipt)
            ages.append(taken - began)
        return ages

    def rounds(self, count: int) -> tuple[float, float]:
        """Returns the mean age in these rounds, and for how long the learner was idle in each."""
        self.learner.idle = 0.0
        ages = list(itertools.chain.from_iterable(self.round() for _ in range(count)))
        return sum(ages) / len(ages), self.learner.idle / count


@says(
    "An actor can then wait before it makes unrolls rather than with them in its hands: ours "
    "begins an unroll of its environments when what is ahead, its own messages without a receipt "
    "included, lasts as long as its slowest of the last three took, and a tenth more.",
)
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_a_round_is_ready_when_the_learner_needs_it(groups: int, in_flight: int) -> None:
    """Given an actor that makes a round in a third of the time that the learner takes for it."""
    usual = Run(3.0, groups, in_flight, waits=False)
    usual.rounds(10)
    run = Run(3.0, groups, in_flight)
    run.rounds(10)
    age, idle = run.rounds(20)
    own = (groups - 1) / 2 * (3.0 / groups)  # while the messages before it are learned from
    assert idle < 0.01
    assert age <= min(1.0 + own + 3.0 / groups, usual.rounds(20)[0])


@pytest.mark.parametrize("groups", [1, 2])
def test_nothing_is_waited_for_where_the_learner_is_faster(groups: int) -> None:
    run = Run(0.5, groups)
    run.rounds(10)
    assert run.pace.seconds == 0.0


def test_nothing_is_waited_for_as_long_as_the_learner_does_not_tell_its_speed() -> None:
    pace = JustInTime(clock=iter(range(100)).__next__)
    for _ in range(3):
        assert pace.begin(in_flight=50) == 0.0
        pace.told(pb.Receipt())


def test_a_learner_that_becomes_faster_has_the_next_rounds_at_once() -> None:
    run = Run(3.0, 2)
    run.rounds(10)
    assert run.pace.seconds > 1.0
    run.learner.seconds /= 10.0
    run.rounds(3)
    assert run.pace.seconds == 0.0


def test_the_slowest_of_the_last_rounds_counts() -> None:
    run = Run(3.0, 2)
    run.rounds(10)
    usual = run.pace.seconds
    run.production = 1.5
    run.rounds(1)
    run.production = 1.0
    run.rounds(1)
    assert run.pace.seconds == pytest.approx(usual - 0.5 * 1.1, abs=0.3)


def test_time_that_the_learner_was_away_is_no_time_to_make_a_round() -> None:
    run = Run(3.0, 2)
    run.rounds(10)
    usual = run.pace.seconds
    run.now += 300.0
    run.pace.waited(300.0)
    run.rounds(3)
    assert run.pace.seconds == pytest.approx(usual, abs=0.3)
