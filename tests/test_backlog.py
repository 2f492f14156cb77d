"""What receipts tell of the unrolls that wait for the learner, and of its speed."""

import pytest
from page import says

from learner.fleet.accounts import Accounts
from learner.front.backlog import Backlog
from protos.impala.v1 import learner_pb2 as pb

SPEED = 8.0  # unrolls a second


class Learner:
    """Accounts of one actor that sends messages of 10 unrolls, on a clock of the test's own."""

    def __init__(self, in_batches: int = 0) -> None:
        self.now = 0.0
        self.accounts = Accounts()
        self.accounts.join("a", 1, 0, 0)
        self.backlog = Backlog(self.accounts, in_batches, clock=lambda: self.now)
        self._sent = self._learned = 0

    def send(self) -> None:
        self._sent += 1
        assert self.accounts.receive("a", 1, self._sent, 10).verdict == "accepted"

    def learn(self, unrolls: int) -> None:
        """Learns from unrolls, one after another, and tells of each in a receipt."""
        for _ in range(unrolls):
            self.now += 1.0 / SPEED
            self.accounts.settle("a", 1, self._learned // 10 + 1, 1)
            self._learned += 1
            self.told()

    def told(self) -> tuple[int, float]:
        receipt = pb.Receipt()
        self.backlog.tell(receipt)
        return receipt.unrolls_ahead, receipt.unrolls_per_second


@says(
    "Where `actor.just_in_time` is set, receipts say in `unrolls_ahead` how many unrolls, of all "
    "actors, have come and are in no batch yet, and in `unrolls_per_second` how fast they go into "
    "batches.",
)
def test_what_came_and_is_in_no_batch_is_ahead_of_the_next_message() -> None:
    learner = Learner(in_batches=12)
    for _ in range(4):
        learner.send()
    learner.learn(10)
    ahead, speed = learner.told()
    assert ahead == 40 - 10 - 12
    assert speed == pytest.approx(SPEED, rel=0.2)


def test_so_is_what_waits_for_room() -> None:
    learner = Learner()
    for _ in range(4):
        learner.send()
    learner.learn(10)
    with learner.backlog.waiting(64):
        assert learner.told()[0] == 30 + 64
    assert learner.told()[0] == 30


def test_the_speed_is_that_of_the_last_seconds() -> None:
    learner = Learner()
    for _ in range(20):
        learner.send()
    learner.learn(10)
    learner.now += 1000.0  # it stands, as for evaluations
    learner.learn(80)
    assert learner.told()[1] == pytest.approx(SPEED, rel=0.2)


def test_a_pause_of_the_learner_is_no_lower_speed() -> None:
    learner = Learner()
    for _ in range(20):
        learner.send()
    learner.learn(10)
    learner.now += 60.0  # it compiles
    learner.told()
    learner.learn(2)
    assert learner.told()[1] == pytest.approx(SPEED, rel=0.2)


@says("Both are 0 where the learner waits, and until it has a speed.")
def test_nothing_is_told_before_the_speed_is_known_and_when_the_learner_waits() -> None:
    learner = Learner(in_batches=12)
    learner.send()
    learner.send()
    assert learner.told() == (0, 0.0)
    learner.learn(10)
    assert learner.told() == (0, 0.0)  # all is in batches
