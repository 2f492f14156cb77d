"""The client against a real gRPC learner that comes, goes, refuses, rejects and finishes."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import services
from fake_learner import FakeLearner
from scripted import Counter, Script, check_episodes, check_group

from actors.actor import Actor
from actors.channel import StatusClient
from actors.client import LearnerClient, actor_name
from actors.connection import RunFinished, Stopped
from actors.evaluator import EvaluatorClient
from actors.policy import Compiled
from actors.session import LearnerError, LearnerRefused
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


def evaluator(learner: FakeLearner) -> EvaluatorClient:
    return EvaluatorClient(learner.address, name="a", incarnation=INCARNATION)


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


def test_names_differ_where_containers_share_the_name_of_their_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def named(space: int | None) -> str:
        def stat(path: str) -> SimpleNamespace:
            if space is None:
                raise FileNotFoundError(path)
            return SimpleNamespace(st_ino=space)

        monkeypatch.setattr("actors.client.os", SimpleNamespace(getpid=lambda: 1, stat=stat))
        return actor_name(2).removeprefix(socket.gethostname())

    assert (named(41), named(42)) == ("-41-1-2", "-42-1-2")
    assert named(0xEFFFFFFC) == named(None) == "-1-2"  # no container; no Linux


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
        assert reply.seed == 1
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


def test_a_message_has_one_more_info_than_is_recorded(learner: FakeLearner) -> None:
    """Hundreds would be more bytes than the learner takes; one tells it that there are more."""
    numbers = {f"lane {i:03d}": float(i) for i in range(200)}
    steps = {name: np.array([x], np.float32) for name, x in numbers.items()}
    with connect(learner) as client:
        client.join()
        client.send(unrolls()._replace(step_info=steps, episodes=[Episode(1.0, 4, 4, numbers)]))
        assert client.drain(PATIENCE)
    [message] = learner.messages
    wanted = list(numbers)[:65]
    assert [each.name for each in message.step_info] == wanted
    assert sorted(message.episodes[0].info) == wanted


def test_an_actor_that_another_has_replaced_does_not_wait_for_a_permit() -> None:
    with FakeLearner() as learner:
        learner.permit = lambda request: -bool(request.round)
        with connect(learner) as client:
            client.join()
            learner.refusal = "another incarnation has joined"
            timer = threading.Timer(PATIENCE, client.stop)
            timer.start()
            with pytest.raises(LearnerRefused, match="another incarnation"):
                client.await_turn(1)
            timer.cancel()


def test_parameters_are_prefetched(learner: FakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.client.POLL_SECONDS", 3600.0)
    with connect(learner) as client:
        client.join()
        assert client.parameters().version == 0
        for version in (1, 2, 3):
            learner.publish(version)
            client.prefetch()
            services.wait_for("the version", lambda: client.parameters().version == version)  # noqa: B023
    assert [pull.newer_than for pull in learner.pulls] == [0, 0, 1, 2]


def test_a_learner_that_starts_later_is_waited_for() -> None:
    with FakeLearner() as gone:
        port = gone.port
    with LearnerClient(f"127.0.0.1:{port}", name="a", incarnation=1) as client:
        time.sleep(0.3)
        with FakeLearner(port=port):
            assert client.join().seed == 1


def test_the_proxy_for_web_pages_is_not_asked_for_the_learner(
    learner: FakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{services.free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("no_grpc_proxy", raising=False)
    with connect(learner) as client:
        assert client.join().seed == 1


def test_finished_ends_the_actor(learner: FakeLearner) -> None:
    with connect(learner) as client:
        client.join()
        learner.answer = lambda message: learner.receipt(message, pb.STATUS_FINISHED)
        raises_within(RunFinished, lambda: client.send(unrolls()))
    learner.finished = True
    with connect(learner) as client:
        raises_within(RunFinished, client.join)


def test_an_evaluator_plays_snapshots_until_all_are_evaluated(
    learner: FakeLearner,
) -> None:
    learner.publish(3)
    learner.snapshot(100, task=1, seed=9)
    learner.snapshot(100, task=2)
    with evaluator(learner) as client:
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


def test_an_evaluator_joins_a_learner_that_does_not_know_it(learner: FakeLearner) -> None:
    learner.snapshot(0)
    with evaluator(learner) as client:
        client.next_assignment()
        learner.joins.clear()  # another one has its address
        learner.snapshot(100)
        assert client.next_assignment().parameters.frames == 100
    assert len(learner.joins) == 1


def test_a_report_that_is_refused_ends_the_evaluator(learner: FakeLearner) -> None:
    learner.snapshot(0)
    with evaluator(learner) as client:
        assignment = client.next_assignment()
        learner.refusal = "task is 7, the run has 1"
        with pytest.raises(LearnerRefused, match="task is 7, the run has 1"):
            client.report_evaluation(assignment, [Episode(2.0, 1, 4, {})])


def test_a_report_that_does_not_arrive_is_logged(
    learner: FakeLearner, caplog: pytest.LogCaptureFixture
) -> None:
    learner.snapshot(0)
    with evaluator(learner) as client:
        assignment = client.next_assignment()
        learner.__exit__()
        client.report_evaluation(assignment, [Episode(2.0, 1, 4, {})])
    assert any("could not report an evaluation" in message for message in caplog.messages)


def test_a_receipt_after_the_end_of_training_is_no_error(
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


def test_a_refused_join_says_why(learner: FakeLearner) -> None:
    learner.refusal = "protocol 1 is spoken here, not 2"
    with connect(learner) as client:
        raises_within(LearnerRefused, client.join, match="protocol 1 is spoken here, not 2")


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


def test_a_learner_that_is_away_is_looked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old channel would ask for the address of its name after up to two minutes."""
    monkeypatch.setattr("actors.channel._STALE_SECONDS", 0.3)
    with FakeLearner() as gone:
        client = connect(gone)
    with client:
        first = client._channel._channel
        services.wait_for("another channel", lambda: client._channel._channel is not first)
        with FakeLearner(port=gone.port):
            client.join()


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


def test_the_status_can_be_asked_after_an_absence() -> None:
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
            services.wait_for("nine frames", lambda: frames() == 9)
            second.refusal = "a reader may not ask here"
            with pytest.raises(LearnerRefused, match="a reader may not ask here"):
                client.get()


# The actor and the client together.


@pytest.mark.parametrize("order", [(0,), (1, 0)])
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
                    services.wait_for(
                        "the version", lambda: client.parameters().version == learner.version
                    )
            assert client.drain(PATIENCE)

    groups = [learner.messages[i :: len(order)] for i in range(len(order))]
    for group, messages in zip(order, groups, strict=True):
        received = [decoded(m, unroll_length, num_envs) for m in messages]
        check_group(received, unroll_length, num_envs, first=10 * group)
        check_episodes(received)
    versions = [m.parameter_version for m in learner.messages]
    assert versions == sorted(versions)
    assert len(set(versions)) > 2


def test_a_round_is_sent_before_the_next_one_is_permitted() -> None:
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


def test_players_that_wait_at_once_count_once(learner: FakeLearner) -> None:
    """Given a client whose two players wait for the same second, while a third one sends."""
    with connect(learner) as client:
        client.join()
        client.players = 2
        is_ready = False

        def wait() -> None:
            with client._lock:
                client._await(lambda: is_ready)

        threads = [threading.Thread(target=wait) for _ in range(2)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        client._waited = 30.0
        client.send(unrolls())
        time.sleep(0.5)
        with client._lock:
            is_ready = True
            client._wake()
        for thread in threads:
            thread.join()
        # A mean, without the 30 s, which the message has.
        assert 0.9 < client._waited < time.monotonic() - began
