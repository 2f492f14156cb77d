"""The session as a state machine, against a learner that is written from the protocol alone.

`Story` lets anything happen that a network, a learner and an actor may do, in any order, and checks
after every step what docs/wire-protocol.md promises. At its end the network heals, and everything
has to come to rest.
"""

import collections
import dataclasses
import enum
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_learner import GOOD, OF_A_NEWER_VERSION, CallFailed, ModelLearner, Run

from actors import session as real
from protos.impala.v1 import learner_pb2 as pb

NAME = "a"
PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN")
REFUSALS = (
    *("FAILED_PRECONDITION", "INVALID_ARGUMENT", "UNIMPLEMENTED"),
    *("PERMISSION_DENIED", "UNAUTHENTICATED"),
)
REASONS = (
    *(pb.REASON_NUM_ENVS, pb.REASON_TENSOR_COUNT, pb.REASON_TENSOR_SIZE, pb.REASON_NOT_FINITE),
    *(pb.REASON_RANGE, pb.REASON_VERSION, OF_A_NEWER_VERSION),
)


class Step(enum.IntFlag):
    """What may go on, in the order in which it would without any trouble."""

    PULL = 1
    MAKE = 2
    SEND = 4
    ARRIVE = 8
    RECEIPT = 16
    LEARN = 32
    SAVE = 64


def mostly(usual: tuple[Any, ...], times: int, *others: Any) -> st.SearchStrategy[Any]:
    """One of `usual`, each `times` as likely as one of the others.

    The usual ones stand at both ends, because hypothesis tries the ends of a range more often.
    """
    return st.sampled_from((*usual * times, *others, *usual * times))


TROUBLES = mostly(
    ("none", "none", "none", "connection breaks", "learner crashes"),
    5,
    *("learner crashes behind a proxy",) * 6,
    *("learner stops", "learner stops", *("quarantine",) * 4),
    *("fresh run", "run of something else", "learner finishes", "actor dies"),
)


@dataclasses.dataclass
class Stream:
    """One stream of a connection, and what is on its way."""

    connection: int
    most: int  # messages without a receipt
    first: int  # number of the message that has to come first
    up: collections.deque[pb.Unrolls] = dataclasses.field(default_factory=collections.deque)
    down: collections.deque[pb.Receipt] = dataclasses.field(default_factory=collections.deque)
    sent: int = 0
    receipted: int = 0
    ended: bool = False  # by the learner


class Story(RuleBasedStateMachine):
    """An actor's session, a network that loses what it likes, and learners one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.retry_at = 0.0
        self.incarnations = 100  # drawn so far
        self.runs = 0
        self.learner: ModelLearner | None = None  # None: it is away
        self.session: Any
        self.stream: Stream | None = None
        self.late: Stream | None = None  # one that ended, which the learner may still read from
        self.pull: tuple[Any, pb.GetParametersReply | None] | None = None
        self.made: dict[int, bytes] = {}  # number -> message, as it was made
        self.acknowledged = 0  # number of the last message with a receipt
        self.fingerprint: str | None = None  # that the actor was built for
        # Of each message of the actor: how many of its unrolls this run has accepted.
        self.counted: dict[int, int] = {}
        self._new_run("print")
        self._start_actor()

    @initialize(limit=st.integers(1, 3))
    def first_learner(self, limit: int) -> None:
        self._start_learner(limit)

    # What may happen.

    @rule(
        rounds=st.lists(st.integers(0, sum(Step)), min_size=4, max_size=10),
        num_envs=st.integers(1, 3),
        kind=mostly((GOOD,), 10, *REASONS),
        seconds=st.sampled_from([0.0, 0.05, 1.0]),
    )
    def work_goes_on(self, rounds: list[int], num_envs: int, kind: int, seconds: float) -> None:
        for steps in map(Step, rounds):
            self.now += seconds
            if Step.PULL in steps:
                self._pull()
            if Step.MAKE in steps and self.session.parameters and self.session.has_room():
                self._make(num_envs, kind)
            if Step.SEND in steps:
                self._send()
            if Step.ARRIVE in steps:
                self._arrive()
            if Step.RECEIPT in steps:
                self._take_receipt()
            if self.learner is not None:
                if Step.LEARN in steps:
                    self.learner.learn(num_envs)
                if Step.SAVE in steps:
                    self.learner.save()

    @precondition(lambda self: self.learner is not None)
    @rule(what=TROUBLES, code=st.sampled_from(PASSING), limit=st.integers(0, 3))
    def trouble_comes(self, what: str, code: str, limit: int) -> None:
        learner = self.learner
        assert learner is not None
        match what:
            case "connection breaks" if self._goes_on():
                self._close(code)
            case "learner crashes":
                self._end_learner()
            case "learner crashes behind a proxy":  # the stream leads to the next learner
                self._start_learner(max(1, limit))
            case "learner stops":
                learner.stop()
                self._end_learner()
            case "learner finishes":
                learner.finish()
            case "quarantine":
                learner.quarantined = not learner.quarantined
            case "fresh run":  # in the same place, of the same environment and agent
                self._end_learner()
                self._new_run(self.run.fingerprint)
            case "run of something else":
                self._end_learner()
                self._new_run(self.run.fingerprint + "'")
            case "actor dies":
                self._start_actor()
        if self.learner is None and limit:
            self._start_learner(limit)

    @precondition(lambda self: self.stream is None and not self.session.finished)
    @rule(fate=mostly(("goes through",), 40, "reply is lost", *PASSING, *REFUSALS))
    def actor_joins(self, fate: str) -> None:
        self._join(fate)

    @precondition(lambda self: self.stream is not None and not self._goes_on())
    @rule()
    def client_closes_its_side(self) -> None:
        """The session has ended the connection."""
        self._close(None)

    @precondition(lambda self: self.learner is None)
    @rule(limit=st.integers(1, 3))
    def learner_starts(self, limit: int) -> None:
        self._start_learner(limit)

    @precondition(lambda self: self.late is not None)
    @rule(is_lost=st.booleans())
    def old_stream_comes_through(self, is_lost: bool) -> None:
        """The learner reads on from a stream that the actor has given up."""
        assert self.late is not None
        message = self.session.next_message(self.late.connection)
        assert message is None, "a message was given to a stream that has ended"
        if is_lost or not self.late.up or self.learner is None:
            self.late = None
        elif self._read(self.late.up[0]) is not None:
            self.late.up.popleft()

    @precondition(lambda self: self.session.finished)
    @rule()
    def next_run_starts(self) -> None:
        self._end_learner()
        self._new_run("print")
        self._start_learner(2)
        self._start_actor()

    # What holds at every moment.

    @invariant()
    def what_has_no_receipt_is_kept_and_nothing_else(self) -> None:
        numbers = self.session.outbox.numbers()
        if self.session.finished:
            assert not numbers and not self.session.is_connected(self.session.connection)
        else:
            assert numbers == [number for number in self.made if number > self.acknowledged]

    @invariant()
    def every_unroll_is_counted_once(self) -> None:
        """Whenever nothing is without a receipt, once this learner has been joined."""
        if self.learner is None or self.learner.joined.get(NAME) != self.incarnation:
            return
        if self._goes_on() and not self.session.outbox:
            account = self.learner.state.accounts[NAME, self.incarnation]
            assert account.received == sum(self.counted.values())

    @invariant()
    def parameters_of_another_learner_are_pulled(self) -> None:
        held = self.session.parameters
        if self._goes_on() and held and held.incarnation != self.session.reply.learner_incarnation:
            assert self.session.must_pull()

    # What has to come in the end.

    def teardown(self) -> None:
        if self.learner is None:
            self._start_learner(2)
        assert self.learner is not None
        self._come_to_rest()
        if not self.session.finished:
            self.learner.finish()
            match self.incarnations % 3:  # where the end is heard: in a receipt, a join, a pull
                case 0:
                    while self.session.has_room():
                        self._make(2, GOOD)
                case 1:
                    self._close("UNAVAILABLE")
            self._come_to_rest()
        assert self.session.finished
        if self.session.parameters is not None:
            self._make(1, GOOD)  # as if it had been encoded meanwhile
        self.what_has_no_receipt_is_kept_and_nothing_else()

    def _come_to_rest(self) -> None:
        """Lets everything go through until nothing is left to do."""
        assert self.learner is not None
        self.learner.quarantined = False
        for _ in range(100):
            if self.session.finished:
                self.stream = None
                return
            self.now += 0.1
            if self.stream is not None and self.stream.up:
                self.learner.learn(3)  # makes room
            if self.stream is None:
                self._join()
            elif not self._goes_on() or (self.stream.ended and not self.stream.down):
                self._close(None)
            moved = [self._send(), self._arrive(), self._take_receipt()]
            while self.pull is not None:
                self._pull()
            before = self.session.parameters
            if self.session.reply is not None and (self.session.must_pull() or not any(moved)):
                for _ in range(3):
                    self._pull()
            is_newest = before is not None and before is self.session.parameters
            if is_newest and not any(moved) and self._goes_on() and not self.learner.finished:
                assert not self.session.outbox
                assert self.session.parameters.incarnation == self.learner.incarnation
                self.every_unroll_is_counted_once()
                return
        raise AssertionError("it does not come to rest")

    # Learners and actors come and go.

    def _draw(self) -> int:
        self.incarnations += 1
        return self.incarnations

    def _new_run(self, fingerprint: str) -> None:
        self.runs += 1
        self.run = Run(b"run %d" % self.runs, fingerprint)
        self.counted = {}

    def _start_learner(self, limit: int) -> None:
        self.learner = ModelLearner(self.run, self._draw(), limit)

    def _end_learner(self) -> None:
        self.learner = None
        if self.stream is not None:
            self._close("UNAVAILABLE")
        self.late = None

    def _start_actor(self) -> None:
        self.incarnation = self._draw()
        self.session = real.Session("host:1", name=NAME, incarnation=self.incarnation, now=self.now)
        self.stream = self.late = self.pull = self.fingerprint = None
        self.made, self.counted = {}, {}
        self.acknowledged = 0

    # Connections.

    def _goes_on(self) -> bool:
        return self.stream is not None and self.session.is_connected(self.stream.connection)

    def _join(self, fate: str = "goes through") -> None:
        self.now = max(self.now, self.retry_at)
        request = self.session.join_request()
        assert (request.actor, request.incarnation) == (NAME, self.incarnation)
        assert request.acknowledged_sequence == self.acknowledged
        try:
            if self.learner is None:
                raise CallFailed("UNAVAILABLE")
            if fate in (*PASSING, *REFUSALS):
                raise CallFailed(fate)
            reply = self.learner.join(request)
            if fate == "reply is lost":
                raise CallFailed("DEADLINE_EXCEEDED")
        except CallFailed as failed:
            self._lost(failed.code)
            return
        if not reply.finished and self.fingerprint not in (None, reply.fingerprint):
            with pytest.raises(real.LearnerChanged, match=reply.fingerprint):
                self.session.joined(reply, self.now)
            self._start_actor()  # as its fleet does
            return
        self.session.joined(reply, self.now)
        if reply.finished:
            assert self.session.finished
            return
        self.fingerprint = reply.fingerprint
        assert self.session.is_connected(self.session.connection)
        assert self.session.task == reply.task
        self.stream = Stream(
            self.session.connection,
            most=reply.max_unrolls_in_flight,
            first=self.acknowledged + 1,
        )

    def _close(self, code: str | None) -> None:
        """The stream ends; what was sent may still reach the learner, receipts are lost."""
        self.late, self.stream = self.stream, None
        if not self.session.finished:
            self._lost(code)

    def _lost(self, code: str | None) -> None:
        """A join failed, or the connection has ended."""
        failure = None if code is None else real.Failure(code, "for a reason")
        if code in REFUSALS:
            with pytest.raises(real.LearnerRefused, match="for a reason"):
                self.session.lost(failure, self.now)
            self._start_actor()
            return
        seconds = self.session.lost(failure, self.now)
        assert 0.1 <= seconds <= 10.0
        self.retry_at = self.now + seconds
        assert not self.session.is_connected(self.session.connection)

    # Unrolls and receipts. These return whether anything has moved.

    def _make(self, num_envs: int, kind: int) -> None:
        held = self.session.parameters
        message = pb.Unrolls(
            actor=NAME,
            incarnation=self.incarnation,
            fingerprint=self.session.reply.fingerprint,
            learner_incarnation=held.incarnation,
            parameter_version=held.version,
            num_envs=num_envs,
            tensors=[bytes([kind])],
        )
        self.session.append(message, self.now, waited=0.0)
        if not self.session.finished:  # else it came too late, and is forgotten
            assert len(self.session.outbox) <= self.session.reply.max_unrolls_in_flight
            self.made[len(self.made) + 1] = message.SerializeToString()

    def _send(self) -> bool:
        if self.stream is None:
            return False
        sent = self.session.next_message(self.stream.connection)
        if sent is None:
            return False
        message = pb.Unrolls.FromString(sent)
        assert message.sequence > self.acknowledged, "it has its receipt"
        assert message.sequence == self.stream.first + self.stream.sent, "out of order"
        assert sent == self.made[message.sequence], "it was changed"
        self.stream.sent += 1
        assert self.stream.sent - self.stream.receipted <= self.stream.most, "too many in flight"
        self.stream.up.append(message)
        return True

    def _arrive(self) -> bool:
        if self.stream is None or self.stream.ended or not self.stream.up:
            return False
        receipt = self._read(self.stream.up[0])
        if receipt is None:  # it waits for room
            return False
        # On an old stream the rest of what an unknown actor had sent may come after the next join.
        assert receipt.reason != pb.REASON_SEQUENCE, "a number was left out"
        self.stream.up.popleft()
        self.stream.down.append(receipt)
        self.stream.ended = receipt.reason == pb.REASON_QUARANTINED
        return True

    def _read(self, message: pb.Unrolls) -> pb.Receipt | None:
        """Gives a message to the learner, and keeps books of our own about it."""
        assert self.learner is not None
        account = self.learner.state.accounts.get((message.actor, message.incarnation))
        known = account.partial if account and message.sequence == account.last + 1 else 0
        receipt = self.learner.receive(message)
        if receipt is not None and message.incarnation == self.incarnation:
            if receipt.status == pb.STATUS_ACCEPTED:
                self.counted[message.sequence] = message.num_envs
            elif receipt.reason not in (0, pb.REASON_UNKNOWN_ACTOR, pb.REASON_SEQUENCE):
                self.counted[message.sequence] = known
        return receipt

    def _take_receipt(self) -> bool:
        if self.stream is None or not self._goes_on() or not self.stream.down:
            return False
        receipt = self.stream.down.popleft()
        said = self.session.receive(receipt, self.now)
        if receipt.reason == pb.REASON_UNKNOWN_ACTOR:
            assert said is None and not self._goes_on()
            return True
        if receipt.status == pb.STATUS_FINISHED:
            assert self.session.finished
            return True
        self.stream.receipted += 1
        self.acknowledged = receipt.sequence
        assert self.session.task == receipt.task
        assert said.num_unrolls == pb.Unrolls.FromString(self.made[receipt.sequence]).num_envs
        if receipt.reason == pb.REASON_VERSION:
            assert self.session.must_pull()
        again = (pb.REASON_NUM_ENVS, pb.REASON_QUARANTINED)
        assert self._goes_on() == (receipt.reason not in again)
        return True

    # Parameters.

    def _pull(self) -> None:
        """Goes on with a pull: it is asked, then answered, then the answer arrives."""
        if self.session.reply is None:
            return
        if self.pull is None:
            self.session.wants_parameters = True
            assert self.session.must_pull()
            self.pull = self.session.pull(), None
        elif self.pull[1] is not None:
            self._take_answer(self.pull[0], self.pull[1])
            self.pull = None
        elif self.learner is not None:
            self.pull = self.pull[0], self.learner.parameters(self.pull[0].request)
        else:
            self.pull = None  # it failed

    def _take_answer(self, pull: Any, reply: pb.GetParametersReply) -> None:
        before, state = self.session.parameters, (self.session.finished, self._goes_on())
        pulled = self.session.pulled(pull, reply)
        after = self.session.parameters
        if pull.connection != self.session.connection:
            assert not pulled and (self.session.finished, self._goes_on()) == state
        if not pulled:
            assert after is before
            return
        assert after.incarnation == self.session.reply.learner_incarnation, "of another learner"
        np.testing.assert_array_equal(after.values[0], [after.incarnation, after.version])
        if before is not None and before.incarnation == after.incarnation:
            assert after.version > before.version


def play(machine: type[Story], examples: int, steps: int, **options: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # a story of many steps takes minutes to shrink
            report_multiple_bugs=False,
            **options,
        ),
    )


def test_a_session_comes_through_whatever_happens() -> None:
    play(Story, examples=60, steps=30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_session_comes_through_100_000_random_steps() -> None:
    steps = 0

    class Counted(Story):
        def check_invariants(self, *arguments: Any) -> None:  # after each step
            nonlocal steps
            steps += 1
            super().check_invariants(*arguments)

    while steps < 100_000:
        play(Counted, examples=1000, steps=100, derandomize=False)
    print(f"{steps} steps")


# One event at a time, where its place in a story does not matter.


def session(**options: Any) -> real.Session:
    return real.Session("host:1", name=NAME, incarnation=7, now=0.0, **options)


def reply(**fields: Any) -> pb.JoinReply:
    usual = {"learner_incarnation": 5, "fingerprint": "print", "max_unrolls_in_flight": 2}
    return pb.JoinReply(**{**usual, "max_message_bytes": 100, "limits": {"num_envs": 9}, **fields})


AWAY = real.Failure("UNAVAILABLE", "nobody listens")
BUSY = real.Failure("RESOURCE_EXHAUSTED", "quarantined for 60 s")


def test_pauses_double_until_a_good_connection() -> None:
    learner = session()
    pauses = [learner.lost(AWAY, now=float(second)) for second in range(9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    learner.joined(reply(), now=20.0)
    assert learner.lost(AWAY, now=21.0) == 10.0, "that one was lost at once"
    learner.joined(reply(), now=40.0)
    assert learner.lost(None, now=60.0) == 0.1


def test_each_absence_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    learner = session()
    for _ in range(3):
        learner.lost(AWAY, now=0.0)
    assert caplog.messages == ["a waits for the learner at host:1: UNAVAILABLE: nobody listens"]
    learner.joined(reply(), now=1.0)
    learner.lost(AWAY, now=2.0)
    assert caplog.messages[1].startswith("a lost the learner at host:1: ")
    learner.joined(reply(), now=3.0)
    learner.lost(None, now=4.0)
    assert len(caplog.messages) == 2
    learner.lost(BUSY, now=5.0)
    assert caplog.messages[2].startswith("a waits for the learner")


def test_a_learner_is_given_up_by_the_time_that_it_was_away() -> None:
    learner = session(reconnect_timeout=10.0)
    learner.lost(AWAY, now=9.0)
    learner.joined(reply(), now=9.5)
    learner.lost(AWAY, now=50.0)
    learner.lost(AWAY, now=59.0)
    learner.lost(BUSY, now=99.0)  # it is there
    learner.lost(AWAY, now=108.0)
    with pytest.raises(real.LearnerAway, match=r"for 11\.0 s, over the .* timeout of 10 s"):
        learner.lost(AWAY, now=110.0)


@pytest.mark.parametrize("reason", [pb.REASON_SEQUENCE, pb.REASON_FINGERPRINT])
def test_a_message_out_of_place_is_dropped_and_joined_again(
    reason: pb.Reason, caplog: pytest.LogCaptureFixture
) -> None:
    learner = session()
    learner.joined(reply(), now=0.0)
    for _ in range(2):
        learner.append(pb.Unrolls(num_envs=2), now=1.0, waited=0.5)
    assert learner.next_message(1) is not None
    said = learner.receive(
        pb.Receipt(sequence=1, status=pb.STATUS_REJECTED, reason=reason, detail="3 was expected"),
        now=4.0,
    )
    assert said is not None
    assert (said.status, said.num_unrolls, said.seconds) == ("rejected", 2, 3.0)
    assert "message 1 was rejected" in caplog.text and "3 was expected" in caplog.text
    assert not learner.is_connected(1)
    assert learner.join_request().acknowledged_sequence == 1
    assert learner.outbox.numbers() == [2]


def test_a_message_says_how_long_it_took_and_waited() -> None:
    learner = session()
    learner.joined(reply(), now=2.0)
    messages = [pb.Unrolls(), pb.Unrolls(), pb.Unrolls()]
    learner.append(messages[0], now=3.0, waited=0.5)
    learner.append(messages[1], now=7.0, waited=0.25)
    learner.append(messages[2], now=8.0, waited=40.0)  # some of it before
    assert [message.elapsed_seconds for message in messages] == [3.0, 4.0, 1.0]
    assert [message.waited_seconds for message in messages] == [0.5, 0.25, 1.0]


def test_a_learner_with_smaller_messages_ends_the_session() -> None:
    learner = session()
    learner.joined(reply(), now=0.0)
    learner.append(pb.Unrolls(tensors=[bytes(80)]), now=0.0, waited=0.0)
    with pytest.raises(real.LearnerChanged, match=r"takes 50 bytes, .* has \d+: start"):
        learner.joined(reply(max_message_bytes=50), now=1.0)


def test_a_learner_with_fewer_environments_ends_the_session() -> None:
    learner = session()
    learner.joined(reply(limits=pb.Limits(num_envs=8)), now=0.0)
    learner.append(pb.Unrolls(num_envs=8), now=0.0, waited=0.0)
    learner.next_message(learner.connection)
    refused = pb.Receipt(sequence=1, status=pb.STATUS_REJECTED, reason=pb.REASON_NUM_ENVS)
    assert learner.receive(refused, now=1.0) is not None and not learner.outbox
    assert not learner.is_connected(learner.connection)
    learner.joined(reply(limits=pb.Limits(num_envs=8)), now=2.0)
    with pytest.raises(real.LearnerChanged, match=r"takes up to 7 .* has sent 8: start"):
        learner.joined(reply(limits=pb.Limits(num_envs=7)), now=3.0)


def test_a_receipt_for_no_message_is_an_error() -> None:
    learner = session()
    learner.joined(reply(), now=0.0)
    learner.append(pb.Unrolls(), now=0.0, waited=0.0)
    receipt = pb.Receipt(sequence=1, status=pb.STATUS_ACCEPTED)
    with pytest.raises(real.LearnerError, match=r"for message 1; those without one are \[1\]"):
        learner.receive(receipt, now=0.0)  # it was not sent yet
    assert learner.next_message(1) is not None
    assert learner.receive(receipt, now=0.0) is not None
    with pytest.raises(real.LearnerError, match=r"those without one are \[\]"):
        learner.receive(receipt, now=0.0)


SPECS = [pb.TensorSpec(name="x", dtype=pb.DTYPE_FLOAT32)]


def permitted(number: int, incarnation: int = 5) -> pb.GetParametersReply:
    """A permit, and the parameters that it is for: version 10 * number."""
    return pb.GetParametersReply(
        permit=pb.Permit(number=number, version=10 * number, task=number),
        parameters=pb.Parameters(
            learner_incarnation=incarnation, version=10 * number, tensors=[bytes(4)]
        ),
    )


def test_a_round_begins_with_the_parameters_of_its_permit() -> None:
    learner = session()
    learner.joined(reply(needs_permits=True, parameter_specs=SPECS, task=9), now=0.0)
    # Nobody wants to play yet: a sign of life, which is answered with nothing.
    assert not learner.must_pull()
    pull = learner.pull()
    assert (pull.request.actor, pull.request.incarnation, pull.request.round) == (NAME, 7, 0)
    assert learner.pulled(pull, pb.GetParametersReply())
    learner.want_permit(8)
    for _ in range(2):  # the learner had none within its time
        assert learner.must_pull()
        pull = learner.pull()
        assert (pull.request.round, pull.request.unrolls) == (1, 8)
        assert not learner.pulled(pull, pb.GetParametersReply())
    assert learner.pulled(learner.pull(), permitted(1))
    assert not learner.must_pull() and learner.pull().request.round == 0
    assert learner.begin_round().number == 1
    assert learner.parameters is not None and learner.parameters.version == 10
    assert learner.task == 1
    # The next one is asked for while this one is being made; receipts do not change the task.
    learner.append(pb.Unrolls(num_envs=2), now=1.0, waited=0.0)
    assert learner.next_message(1) is not None
    learner.receive(pb.Receipt(sequence=1, status=pb.STATUS_ACCEPTED, task=4), now=1.0)
    assert learner.task == 1
    learner.want_permit(8)
    assert learner.pull().request.round == 2


def test_the_permit_of_a_learner_that_is_gone_is_not_used() -> None:
    learner = session()
    learner.joined(reply(needs_permits=True, parameter_specs=SPECS), now=0.0)
    learner.want_permit(8)
    learner.pulled(learner.pull(), permitted(1))
    learner.joined(reply(needs_permits=True, parameter_specs=SPECS), now=1.0)
    assert not learner.must_pull()  # the same learner, over another connection
    learner.joined(reply(needs_permits=True, parameter_specs=SPECS, learner_incarnation=6), now=2.0)
    assert learner.must_pull()
    assert learner.pull().request.round == 1
    assert learner.pulled(learner.pull(), permitted(3, incarnation=6))
    assert learner.begin_round().number == 3


def test_overtaken_parameters_are_not_taken() -> None:
    def answer(version: int) -> pb.GetParametersReply:
        parameters = pb.Parameters(learner_incarnation=5, version=version, tensors=[bytes(4)])
        return pb.GetParametersReply(parameters=parameters)

    learner = session()
    learner.joined(reply(parameter_specs=SPECS), now=0.0)
    early, late = learner.pull(), learner.pull()
    assert learner.pulled(late, answer(2))
    assert not learner.pulled(early, answer(1))
    assert learner.parameters is not None and learner.parameters.version == 2


def test_parameters_of_a_permit_are_taken_however_old() -> None:
    learner = session()
    learner.joined(reply(needs_permits=True, parameter_specs=SPECS), now=0.0)
    for number in (2, 1):
        learner.want_permit(8)
        learner.pulled(learner.pull(), permitted(number))
        assert learner.begin_round().number == number
        assert learner.parameters is not None and learner.parameters.version == 10 * number


def test_a_late_answer_is_not_the_next_rounds_permit() -> None:
    learner = session()
    learner.joined(reply(needs_permits=True, parameter_specs=SPECS), now=0.0)
    learner.want_permit(8)
    early, again = learner.pull(), learner.pull()
    assert learner.pulled(early, permitted(1))
    learner.begin_round()
    learner.pulled(again, permitted(1))
    assert learner.permit is None
