"""The client against a real gRPC learner that comes, goes, refuses, rejects and finishes."""

import collections
import contextlib
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import services
from fake_learner import FakeLearner
from scripted import Counter, Script, check_episodes, check_group

from actors import client as client_module
from actors.actor import Actor
from actors.channel import StatusClient
from actors.client import (
    LearnerAway,
    LearnerChanged,
    LearnerClient,
    LearnerError,
    LearnerRefused,
    RunFinished,
    Stopped,
    actor_name,
    new_incarnation,
)
from actors.policy import Compiled
from actors.session import Session
from actors.shared import SharedPulls
from impala.types import (
    ActorUnrolls,
    AgentOutput,
    EnvironmentFault,
    Episode,
    TimeStep,
    Unroll,
)
from protos.impala.v1 import learner_pb2 as pb

INCARNATION = 77
PATIENCE = 60.0  # seconds for anything that takes an instant on a machine without other load


@pytest.fixture
def learner() -> Iterator[FakeLearner]:
    with FakeLearner() as learner:
        yield learner


def connect(learner: FakeLearner, **options: Any) -> LearnerClient:
    return LearnerClient(learner.address, name="a", incarnation=INCARNATION, **options)


def unrolls(number: int = 0, num_envs: int = 2) -> ActorUnrolls:
    """Unrolls whose observations are `number`."""
    shape = (5, num_envs)
    return ActorUnrolls(
        Unroll(
            TimeStep(
                np.full((*shape, 3), number, np.uint8),
                np.zeros(shape, np.float32),
                np.ones(shape, np.float32),
                np.ones(shape, np.int8),
            ),
            AgentOutput(
                np.zeros(shape, np.int64), np.zeros((*shape, 2), np.float32), np.zeros(shape)
            ),
            core_state=(np.full((num_envs, 4), number, np.float32),),
            frames=np.full(num_envs, 4, np.int32),
            parameter_version=9,
        ),
        task=2,
        incarnation=5,
        episodes=[Episode(1.5, 3, 12, {"lives": 2.0})],
    )


def raises_within(
    error: type[Exception],
    act: Callable[[], object],
    match: str | None = None,
    seconds: float = PATIENCE,
) -> None:
    """Repeats `act` until it raises, as a thread of the client finds out on its own time."""

    def repeat() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            act()
            time.sleep(0.01)

    with pytest.raises(error, match=match):
        repeat()


def test_a_message_says_all(learner: FakeLearner) -> None:
    with connect(learner) as client:
        reply = client.join()
        assert reply.actor_index == 3
        client.send(unrolls(7))
        assert client.drain(PATIENCE)

    [join] = learner.joins
    assert (join.actor, join.incarnation, join.role) == ("a", INCARNATION, pb.ROLE_ACTOR)
    assert (join.acknowledged_sequence, join.acknowledged_unrolls) == (0, 0)
    [message] = learner.messages
    assert (message.actor, message.incarnation, message.sequence) == ("a", INCARNATION, 1)
    assert (message.fingerprint, message.learner_incarnation) == ("print", 5)
    assert (message.parameter_version, message.num_envs) == (9, 2)
    assert list(message.frames) == [4, 4]
    assert message.tensors[0] == bytes([7]) * 30  # the observation is the first leaf
    assert message.tensors[-1] == np.full((2, 4), 7, np.float32).tobytes()  # the core the last
    assert len(message.tensors) == 8
    [episode] = message.episodes
    assert (episode.episode_return, episode.length, episode.frames) == (1.5, 3, 12)
    assert dict(episode.info) == {"lives": 2.0}
    assert message.elapsed_seconds >= message.waited_seconds >= 0


def test_a_message_says_which_environments_failed(learner: FakeLearner) -> None:
    faults = [EnvironmentFault(i, "crashed", "KeyError: 'gear'") for i in range(3)]
    faults.append(EnvironmentFault(1, "hung", "x" * 1000))
    with connect(learner) as client:
        client.join()
        client.send(unrolls()._replace(faults=faults))
        assert client.drain(PATIENCE)

    [message] = learner.messages
    crashed, hung = message.environment_faults  # as many as environments, the newest
    assert (crashed.environment, crashed.kind) == (2, pb.FAULT_KIND_CRASHED)
    assert crashed.detail == "KeyError: 'gear'"
    assert (hung.environment, hung.kind, hung.detail) == (1, pb.FAULT_KIND_HUNG, "x" * 200)


def test_a_message_has_the_info_of_every_step(learner: FakeLearner) -> None:
    speeds = np.array([0.5, -1.0, 7.0], np.float32)
    with connect(learner) as client:
        client.join()
        client.send(unrolls()._replace(step_info={"speed": speeds}))
        assert client.drain(PATIENCE)

    [message] = learner.messages
    assert [(each.name, list(each.values)) for each in message.step_info] == [
        ("speed", [0.5, -1.0, 7.0])
    ]


def test_a_message_wakes_no_thread_that_it_does_not_concern(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: collections.Counter[str] = collections.Counter()
    must_pull = Session.must_pull

    def watched(session: Session) -> bool:
        looked[threading.current_thread().name] += 1
        return must_pull(session)

    monkeypatch.setattr(Session, "must_pull", watched)
    monkeypatch.setattr(client_module, "POLL_SECONDS", 3600.0)
    with connect(learner) as client:
        client.join()
        client.parameters()
        wait_until(lambda: looked["_keep_pulling"] > 0)  # from here on, it waits
        start = time.monotonic()
        for number in range(100):
            client.send(unrolls(number))
        assert client.drain(PATIENCE)
        seconds = time.monotonic() - start
    assert len(learner.messages) == 100
    assert looked.total() > 200  # at each message and each receipt, by who brings it
    assert looked["_keep_pulling"] < 20 + 10 * seconds  # of its own accord, which is seldom


def test_the_buffers_may_be_written_again_after_send(learner: FakeLearner) -> None:
    learner.receipts.clear()
    with connect(learner) as client:
        client.join()
        sent = unrolls(1)
        client.send(sent)
        sent.unroll.timestep.observation[:] = 2
        learner.receipts.set()
        assert client.drain(PATIENCE)
    assert learner.messages[0].tensors[0] == bytes([1]) * 30


def test_no_more_messages_in_flight_than_allowed(learner: FakeLearner) -> None:
    learner.receipts.clear()
    with connect(learner) as client:
        client.join()
        client.send(unrolls(1))
        client.send(unrolls(2))
        begun = threading.Event()

        def send() -> None:
            begun.set()
            client.send(unrolls(3))

        third = threading.Thread(target=send, daemon=True)
        third.start()
        assert begun.wait(PATIENCE)
        third.join(0.6)
        assert third.is_alive(), "the third message had to wait for a receipt"
        learner.receipts.set()
        third.join(PATIENCE)
        assert client.drain(PATIENCE)
    assert [m.sequence for m in learner.messages] == [1, 2, 3]
    assert learner.messages[2].waited_seconds > 0.2
    assert learner.messages[2].elapsed_seconds >= learner.messages[2].waited_seconds


def test_newer_parameters_arrive_by_themselves(learner: FakeLearner) -> None:
    with connect(learner) as client:
        client.join()
        assert client.parameters().version == 0
        learner.publish(3)
        wait_until(lambda: client.parameters().version == 3)
        parameters = client.parameters()
        assert parameters.incarnation == 5
        np.testing.assert_array_equal(parameters.values[0], [3.0])
    assert (learner.pulls[0].learner_incarnation, learner.pulls[0].newer_than) == (0, 0)
    assert (learner.pulls[-1].learner_incarnation, learner.pulls[-1].newer_than) in {(5, 0), (5, 3)}


def test_parameters_are_prefetched(learner: FakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.client.POLL_SECONDS", 3600.0)
    with connect(learner) as client:
        client.join()
        assert client.parameters().version == 0
        for version in (1, 2, 3):
            learner.publish(version)
            client.prefetch()
            wait_until(lambda: client.parameters().version == version)  # noqa: B023
    assert [pull.newer_than for pull in learner.pulls] == [0, 0, 1, 2]


def test_what_is_wanted_during_a_pull_is_pulled_after_it(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.client.POLL_SECONDS", 3600.0)
    learner.replies.clear()
    with connect(learner) as client:
        client.join()
        learner.wait_for(lambda: len(learner.pulls) == 1)
        client.prefetch()
        learner.replies.set()
        learner.wait_for(lambda: len(learner.pulls) == 2)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_learner_that_starts_later_is_waited_for() -> None:
    with FakeLearner() as gone:
        port = gone.port
    with LearnerClient(f"127.0.0.1:{port}", name="a", incarnation=1) as client:
        time.sleep(0.3)
        with FakeLearner(port=port):
            assert client.join().actor_index == 3


def test_after_a_restart_what_has_no_receipt_is_sent_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("actors.client.POLL_SECONDS", 3600.0)  # another learner is asked at once
    with FakeLearner() as first:
        client = connect(first)
        client.join()
        client.parameters()
        client.send(unrolls(1))
        assert client.drain(PATIENCE)
        first.receipts.clear()
        client.send(unrolls(2))
        client.send(unrolls(3))
        first.wait_for(lambda: len(first.messages) == 2)
        first.answer = lambda message: pytest.fail("the learner had died")
    with client, FakeLearner(incarnation=6, port=first.port) as second:
        second.publish(2)
        assert client.parameters().version == 0, "the old parameters are kept"
        assert client.drain(PATIENCE)
        wait_until(lambda: client.parameters().incarnation == 6)
        assert client.parameters().version == 2
        client.send(unrolls(4))
        assert client.drain(PATIENCE)
        lines = [record.message for record in caplog.records if record.name == "actors.client"]
        assert len(lines) == 3, "one line per event, not per attempt"
        assert "joined" in lines[0]
        assert "lost" in lines[1]
        assert "again" in lines[2]
    assert [(m.sequence, m.tensors[0][0]) for m in second.messages] == [(2, 2), (3, 3), (4, 4)]
    assert all(m.incarnation == INCARNATION for m in second.messages)
    join = second.joins[0]
    assert (join.incarnation, join.acknowledged_sequence) == (INCARNATION, 1)
    assert join.acknowledged_unrolls == 2


class _Starting(FakeLearner):
    """A learner that gives parameters, but lets nobody join before `is_up` is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_up = False

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        if not self.is_up:
            self._hear(self.joins, request)
            context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return super().Join(request, context)


def test_parameters_are_not_pulled_again_and_again_before_the_actor_has_joined() -> None:
    with FakeLearner() as first:
        client = connect(first)
        client.join()
        client.parameters()
    with client, _Starting(incarnation=6, port=first.port) as second:
        second.publish(2)
        second.wait_for(lambda: len(second.joins) > 3)
        assert len(second.pulls) <= 2  # one may have been under way, and one learns that it is new
        second.is_up = True
        wait_until(lambda: client.parameters().incarnation == 6)


def test_the_proxy_for_web_pages_is_not_asked_for_the_learner(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{services.free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with connect(learner) as client:
        assert client.join().actor_index == 3


def test_what_the_last_receipt_said_is_given_back_when_joining(learner: FakeLearner) -> None:
    """A duplicate of 2 unrolls of which the learner took none: it had rejected them before."""
    answers = {
        1: (pb.STATUS_ACCEPTED, 2),
        2: (pb.STATUS_DUPLICATE, 2),
        3: (pb.STATUS_REJECTED, 2),
        4: (pb.STATUS_DUPLICATE, 4),
    }

    def answer(message: pb.Unrolls) -> pb.Receipt:
        status, unrolls = answers[message.sequence]
        return learner.receipt(
            message, status, acknowledged_unrolls=unrolls, proof=b"of %d" % message.sequence
        )

    learner.answer = answer
    with connect(learner) as client:
        client.join()
        for sequence, (_, unrolls_acknowledged) in answers.items():
            client.send(unrolls())
            assert client.drain(PATIENCE)
            acknowledged = client._session.outbox.acknowledged
            assert acknowledged == (sequence, unrolls_acknowledged, b"of %d" % sequence)
        learner.answer = lambda message: learner.receipt(message, pb.STATUS_REJECTED, reason=1)
        client.send(unrolls())  # the learner does not know the actor: it joins again
        learner.wait_for(lambda: len(learner.joins) > 1)
    join = learner.joins[1]
    assert (join.acknowledged_sequence, join.acknowledged_unrolls) == (4, 4)
    assert join.proof == b"of 4"


def test_a_duplicate_is_forgotten(learner: FakeLearner) -> None:
    learner.answer = lambda message: learner.receipt(message, pb.STATUS_DUPLICATE)
    with connect(learner) as client:
        client.join()
        client.send(unrolls())
        assert client.drain(PATIENCE)
    assert len(learner.messages) == 1


def test_an_unknown_actor_joins_again_and_sends_again(learner: FakeLearner) -> None:
    unknown = iter([True, True])

    def answer(message: pb.Unrolls) -> pb.Receipt:
        if next(unknown, False):
            return learner.receipt(message, pb.STATUS_REJECTED, reason=pb.REASON_UNKNOWN_ACTOR)
        return learner.accepted(message)

    learner.answer = answer
    with connect(learner) as client:
        client.join()
        client.send(unrolls())
        assert client.drain(PATIENCE)
    assert [m.sequence for m in learner.messages] == [1, 1, 1]
    assert len(learner.joins) == 3


def test_a_rejected_message_is_logged_and_forgotten(
    learner: FakeLearner, caplog: pytest.LogCaptureFixture
) -> None:
    learner.answer = lambda message: learner.receipt(
        message, pb.STATUS_REJECTED, reason=pb.REASON_NOT_FINITE, detail="reward holds nan"
    )
    with connect(learner) as client:
        client.join()
        for _ in range(5):
            client.send(unrolls())
        assert client.drain(PATIENCE)
        assert [m.sequence for m in learner.messages] == [1, 2, 3, 4, 5]
        lines = [record.message for record in caplog.records if "rejected" in record.message]
        assert "REASON_NOT_FINITE" in lines[0]
        assert "reward holds nan" in lines[0]
        assert len(lines) == 3  # the first, second and fourth
        learner.incarnation = 6
    with connect(learner) as client:
        client.join()
    assert learner.joins[-1].acknowledged_unrolls == 0


def test_finished_ends_the_actor(learner: FakeLearner) -> None:
    with connect(learner) as client:
        client.join()
        learner.answer = lambda message: learner.receipt(message, pb.STATUS_FINISHED)
        raises_within(RunFinished, lambda: client.send(unrolls()))
    learner.finished = True
    with connect(learner) as client:
        raises_within(RunFinished, client.join)


def test_an_evaluator_gets_snapshots_and_reports_until_all_are_evaluated(
    learner: FakeLearner,
) -> None:
    learner.publish(3)
    learner.snapshot(100, task=1, seed=9)
    learner.snapshot(100, task=2)
    with connect(learner, role="evaluator") as client:
        client.join()
        first = client.next_assignment()
        assert (first.parameters.version, first.parameters.frames) == (3, 100)
        assert (first.task, first.seed) == (1, 9)
        client.report_evaluation(first, [Episode(2.0, 1, 4, {})])
        second = client.next_assignment()  # of the same snapshot, which is not sent again
        assert second.task == 2
        np.testing.assert_array_equal(second.parameters.values, first.parameters.values)
        assert (learner.asked[-1].learner_incarnation, learner.asked[-1].frames) == (5, 100)
        learner.finished = True
        raises_within(RunFinished, client.next_assignment)
    assert learner.joins[0].role == pb.ROLE_EVALUATOR
    [evaluation] = learner.evaluations
    assert (evaluation.actor, evaluation.learner_incarnation) == ("a", 5)
    assert (evaluation.frames, evaluation.task) == (100, 1)
    assert [episode.episode_return for episode in evaluation.episodes] == [2.0]
    assert not learner.messages


def test_an_evaluator_at_work_gives_signs_of_life(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_SIGN_OF_LIFE_SECONDS", 0.05)
    learner.snapshot(0)
    with connect(learner, role="evaluator") as client:
        client.next_assignment()
        learner.wait_for(lambda: sum(request.busy for request in learner.asked) >= 3)
        learner.snapshot(10)
        assert client.next_assignment().parameters.frames == 10


def test_a_report_that_is_refused_ends_the_evaluator(learner: FakeLearner) -> None:
    learner.snapshot(0)
    with connect(learner, role="evaluator") as client:
        assignment = client.next_assignment()
        learner.refusal = "task is 7, the run has 1"
        with pytest.raises(LearnerRefused, match="task is 7, the run has 1"):
            client.report_evaluation(assignment, [Episode(2.0, 1, 4, {})])


def test_a_report_that_does_not_arrive_is_logged(
    learner: FakeLearner, caplog: pytest.LogCaptureFixture
) -> None:
    learner.snapshot(0)
    with connect(learner, role="evaluator") as client:
        assignment = client.next_assignment()
        learner.__exit__()
        client.report_evaluation(assignment, [Episode(2.0, 1, 4, {})])
    assert any("could not report an evaluation" in message for message in caplog.messages)


def test_a_receipt_after_a_pull_has_said_that_training_ended_is_no_error(
    learner: FakeLearner,
) -> None:
    with connect(learner) as client:
        client.join()
        learner.receipts.clear()
        client.send(unrolls())
        learner.wait_for(lambda: len(learner.messages) == 1)
        learner.finished = True
        raises_within(RunFinished, client.parameters)
        learner.receipts.set()
        for thread in client._threads:
            thread.join(timeout=PATIENCE)
        with pytest.raises(RunFinished):
            client.parameters()


def test_what_its_host_has_of_the_learner_before_is_not_another_learners(
    tmp_path: pathlib.Path,
) -> None:
    shared = SharedPulls("host:1", tmp_path / "shared")
    newer = pb.GetParametersReply(parameters=pb.Parameters(learner_incarnation=5, version=9))
    with FakeLearner() as first:
        client = connect(first, shared=shared)
        assert client.parameters().version == 0
        held = pb.GetParametersRequest(learner_incarnation=5)
        assert shared.pull(5, held, lambda request: newer) is newer  # for another actor
    with client, FakeLearner(incarnation=6, port=first.port) as second:
        second.replies.clear()  # its parameters take long
        second.wait_for(lambda: client.join().learner_incarnation == 6)
        assert client.parameters().incarnation == 5
        second.replies.set()
        client.send(unrolls())
        assert client.drain(PATIENCE)
        assert len(second.joins) == 1


def test_an_evaluator_follows_a_restarted_learner() -> None:
    with FakeLearner() as first:
        first.snapshot(10)
        client = connect(first, role="evaluator")
        client.next_assignment()
    with client, FakeLearner(incarnation=6, port=first.port) as second:
        second.snapshot(20)
        assert client.next_assignment().parameters.incarnation == 6


def test_a_refused_join_says_why(learner: FakeLearner) -> None:
    learner.refusal = "protocol 1 is spoken here, not 2"
    with connect(learner) as client:
        raises_within(LearnerRefused, client.join, match="protocol 1 is spoken here, not 2")


def test_another_run_at_the_same_address_is_an_error_that_names_both() -> None:
    with FakeLearner(fingerprint="old") as first:
        client = connect(first)
        client.join()
        client.parameters()
        client.send(unrolls())
        assert client.drain(PATIENCE)
    with client, FakeLearner(fingerprint="new", incarnation=6, port=first.port):
        raises_within(LearnerChanged, client.join, match="old.*new")


def test_giving_up_is_optional() -> None:
    with FakeLearner() as gone:
        pass
    with connect(gone, reconnect_timeout=0.2) as client:
        raises_within(LearnerAway, client.join, match="0.2 s")


def test_a_message_too_large_is_refused_before_it_is_sent() -> None:
    with FakeLearner(max_message_bytes=100) as learner, connect(learner) as client:
        client.join()
        with pytest.raises(ValueError, match="the learner takes 100: use fewer environments"):
            client.send(unrolls())


def test_an_error_in_a_thread_is_raised_to_the_caller(learner: FakeLearner) -> None:
    learner.answer = lambda message: pb.Receipt(sequence=99, status=pb.STATUS_ACCEPTED)
    with connect(learner) as client:
        client.join()
        raises_within(Exception, lambda: client.send(unrolls()), match="receipt for message 99")


def test_stop_ends_every_wait(learner: FakeLearner) -> None:
    learner.receipts.clear()
    with connect(learner) as client:
        client.join()
        client.send(unrolls(1))
        client.send(unrolls(2))
        threading.Timer(0.2, client.stop).start()
        with pytest.raises(Stopped):
            client.send(unrolls(3))
        with pytest.raises(Stopped):
            client.parameters()
        assert not client.drain(0.1), "no receipt has come"
        learner.receipts.set()
        assert client.drain(PATIENCE)
    assert len(learner.messages) == 2


def test_the_status_can_be_asked_again_after_the_learner_was_away() -> None:
    def frames() -> int | None:
        with contextlib.suppress(LearnerError):
            return client.get().frames
        return None

    with FakeLearner() as first:
        client = StatusClient(first.address)
        assert client.get().frames == 0
    with client:
        for _ in range(2):
            with pytest.raises(LearnerError, match=first.address) as raised:
                client.get()
            assert not isinstance(raised.value, LearnerRefused)  # a later attempt may succeed
        with FakeLearner(port=first.port) as second:
            second.status.frames = 9
            wait_until(lambda: frames() == 9)
            second.refusal = "a reader may not ask here"
            with pytest.raises(LearnerRefused, match="a reader may not ask here"):
                client.get()


def test_names_and_incarnations_differ() -> None:
    assert actor_name(0) != actor_name(1)
    drawn = {new_incarnation() for _ in range(100)}
    assert len(drawn) == 100
    assert all(0 < number < 2**63 for number in drawn)


# The actor and the client together.


@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)])
def test_rows_arrive_as_they_were_played(order: tuple[int, ...]) -> None:
    """The counting environments and agent once more, through gRPC, with versions that change."""
    num_envs, unroll_length, rounds = 3, 4, 20
    with FakeLearner(unroll_length=unroll_length) as learner:

        def publish_and_accept(message: pb.Unrolls) -> pb.Receipt:
            learner.publish(message.sequence)
            return learner.accepted(message)

        learner.answer = publish_and_accept
        environments = [Script(num_envs, 10 * group) for group in order]
        agent = Counter()
        with connect(learner) as client:
            reply = client.join()
            actor = Actor(lambda task: environments, Compiled(agent), reply.unroll_length, seed=1)
            stream = actor.run(client.parameters)
            for number in range(rounds * len(order)):
                client.send(next(stream))
                if number % 7 == 0:  # in the middle of a round, too
                    assert client.drain(PATIENCE)
                    wait_until(lambda: client.parameters().version == learner.version)
            assert client.drain(PATIENCE)

    groups = [learner.messages[i :: len(order)] for i in range(len(order))]
    for group, messages in zip(order, groups, strict=True):
        received = [decoded(m, unroll_length, num_envs) for m in messages]
        check_group(received, unroll_length, num_envs, first=10 * group)
        check_episodes(received)
    versions = [m.parameter_version for m in learner.messages]
    assert versions == sorted(versions)
    assert len(set(versions)) > 2


def test_a_round_is_sent_as_a_whole_before_the_next_one_is_permitted() -> None:
    """Given a learner that permits a round once it has all unrolls of the one before."""
    num_envs, rounds, groups = 3, 6, 2
    with FakeLearner() as learner:

        def permit(request: pb.GetParametersRequest) -> int:
            begun = len(learner.messages) == (request.round - 1) * groups
            return 100 + request.round if request.round and begun else 0

        learner.permit = permit
        learner.answer = lambda message: learner.receipt(message, pb.STATUS_ACCEPTED, task=1)
        environments = [Script(num_envs, 10 * group) for group in range(groups)]
        with connect(learner) as client:
            reply = client.join()
            actor = Actor(
                lambda task: environments, Compiled(Counter()), reply.unroll_length, seed=1
            )
            stream = actor.run(client.parameters, client.task, whole_rounds=reply.needs_permits)
            for number in range(rounds * groups):
                client.await_turn(groups * num_envs)
                client.send(next(stream))
                if number % groups == 0:
                    learner.publish(number + 1)  # which no permit of this round is for
            assert client.drain(PATIENCE)
    assert [m.permit for m in learner.messages] == [101 + i // 2 for i in range(rounds * groups)]
    assert {m.task for m in learner.messages} == {7}  # as the permits say, not the receipts
    asked = [pull for pull in learner.pulls if pull.round]
    assert {(pull.actor, pull.incarnation, pull.unrolls) for pull in asked} == {
        ("a", INCARNATION, groups * num_envs)
    }
    versions = [m.parameter_version for m in learner.messages]
    assert versions[0::2] == versions[1::2] == sorted(versions[0::2]) and len(set(versions)) > 2


def test_who_is_quarantined_waits_before_it_asks_for_a_permit_again(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.permit = lambda request: 0
    learner.quarantine = "quarantined for 60 s"
    monkeypatch.setattr(client_module, "LONGEST_BACKOFF_SECONDS", 3600.0)
    with connect(learner) as client:
        client.join()
        threading.Timer(2.0, client.stop).start()
        with pytest.raises(Stopped):
            client.await_turn(2)
    assert sum(bool(pull.round) for pull in learner.pulls) == 1


def decoded(message: pb.Unrolls, unroll_length: int, num_envs: int) -> ActorUnrolls:
    """What an independent reader makes of a message: the specs are written out by hand."""
    rows = (unroll_length + 1, num_envs)
    specs = [
        (np.int32, (*rows, 4)),
        *[(np.float32, rows)] * 2,
        (np.int8, rows),
        (np.int64, rows),
        (np.float32, (*rows, 2)),
        (np.float32, rows),
        (np.int32, (num_envs,)),
    ]
    observation, reward, discount, step_type, action, policy, baseline, core_state = (
        np.frombuffer(data, dtype).reshape(shape)
        for data, (dtype, shape) in zip(message.tensors, specs, strict=True)
    )
    return ActorUnrolls(
        Unroll(
            TimeStep(observation, reward, discount, step_type),
            AgentOutput(action, policy, baseline),
            core_state,
            np.array(message.frames),
            message.parameter_version,
        ),
        message.task,
        message.learner_incarnation,
        [Episode(e.episode_return, e.length, e.frames, dict(e.info)) for e in message.episodes],
    )
