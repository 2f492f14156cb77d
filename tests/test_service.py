"""What the service answers, without gRPC."""

import asyncio
import collections
import pathlib
import time
from collections.abc import Sequence
from typing import Any, cast

import gymnasium as gym
import messages
import numpy as np
import pytest

from impala.config.schema import Config, QuarantineConfig, TasksConfig
from impala.config.values import OptionError
from impala.environments.spaces import leaves
from impala.finite import NotFiniteError
from impala.logdir import checkpoint
from impala.types import Parameters
from learner.data.ingest import Arrival, Ingest
from learner.evaluation.snapshots import Snapshot, Snapshots
from learner.fleet.accounts import Accounts
from learner.fleet.quarantine import Quarantine
from learner.fleet.records import RefusedOutput
from learner.fleet.refusals import InvalidRequest, Unavailable
from learner.service import terms
from learner.service.executable import Executable, ExecutablePolicy
from learner.service.service import LearnerService
from protos import codec
from protos.impala.v1 import learner_pb2 as pb


def _parameters(version: int, incarnation: int = messages.LEARNER) -> Parameters:
    values = [np.full((2, 3), version, np.float32)]
    return Parameters(incarnation, version, progress=0.5, frames=1000, values=values)


def _taken(ingest: Ingest) -> Arrival:
    arrival = ingest.get(0.0)
    assert arrival is not None
    return arrival


def _joined(**kw: Any) -> tuple[LearnerService, str]:
    """A service that actor `a` has joined, and the fingerprint it was told."""
    service = messages.service(**kw)
    return service, service.join(messages.join_request()).fingerprint


def _get(service: LearnerService, incarnation: int, newer_than: int) -> pb.GetParametersReply:
    request = pb.GetParametersRequest(learner_incarnation=incarnation, newer_than=newer_than)
    return pb.GetParametersReply.FromString(service.get_parameters(request))


def test_join_tells_an_actor_all_that_it_needs() -> None:
    service = messages.service()
    reply = service.join(messages.join_request("a"))
    assert (reply.protocol.major, reply.learner_incarnation) == (1, messages.LEARNER)
    assert reply.settings == messages.SETTINGS
    assert reply.unroll_length == messages.UNROLL_LENGTH
    names = [spec.name for spec in reply.unroll_specs]
    assert names[:2] == ["timestep/observation/flag", "timestep/observation/image"]
    assert reply.num_core_state_specs == 1
    assert names[-1] == "core_state"
    assert list(reply.parameter_specs[0].shape) == [2, 3]
    assert reply.max_unrolls_in_flight == 2
    assert reply.max_message_bytes == service.max_message_bytes
    assert reply.fingerprint
    assert not reply.finished
    other = service.join(messages.join_request("b"))
    again = service.join(messages.join_request("a"))
    assert again.seed == reply.seed != other.seed


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"actor": ""}, "1 to 200"),
        ({"actor": "x" * 201}, "201 characters"),
        ({"actor": "a\nb"}, "printable"),
        ({"incarnation": 0}, "incarnation is 0"),
        ({"role": pb.ROLE_UNSPECIFIED}, "ROLE_ACTOR or ROLE_EVALUATOR"),
    ],
)
def test_an_impossible_join_is_refused(field: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        messages.service().join(messages.join_request(**field))


def test_receipts_say_what_became_of_a_message() -> None:
    accounts, ingest = Accounts(), Ingest(capacity=64)
    service, fingerprint = _joined(accounts=accounts, ingest=ingest)
    service.publish(_parameters(version=3))

    def receipt(sequence: int, **kw: Any) -> tuple[int, int]:
        answer = messages.submit(service, messages.message(sequence, fingerprint=fingerprint, **kw))
        assert answer.sequence == sequence
        assert (answer.learner_incarnation, answer.newest_version) == (messages.LEARNER, 3)
        assert bool(answer.detail) == (answer.status == pb.STATUS_REJECTED)
        return answer.status, answer.reason

    assert receipt(1, parameter_version=3) == (pb.STATUS_ACCEPTED, 0)
    assert receipt(1) == (pb.STATUS_DUPLICATE, 0)
    assert receipt(3) == (pb.STATUS_REJECTED, pb.REASON_SEQUENCE)
    assert receipt(2, parameter_version=4) == (pb.STATUS_REJECTED, pb.REASON_VERSION)
    assert receipt(3) == (pb.STATUS_ACCEPTED, 0)  # the refused one used number 2 up
    assert receipt(4, incarnation=9) == (pb.STATUS_REJECTED, pb.REASON_UNKNOWN_ACTOR)
    assert receipt(4) == (pb.STATUS_ACCEPTED, 0)

    totals = accounts.totals()
    assert (totals.received, totals.duplicates, totals.queued) == (6, 1, 6)
    assert totals.rejected == {"sequence": 1, "version": 1, "unknown_actor": 1}
    assert [_taken(ingest).sequence for _ in range(3)] == [1, 3, 4]


def test_a_full_ingest_keeps_the_receipt() -> None:
    async def story() -> None:
        accounts, ingest = Accounts(), Ingest(capacity=2)
        service, fingerprint = _joined(accounts=accounts, ingest=ingest)
        await service.submit(messages.message(1, fingerprint=fingerprint))
        second = messages.message(2, fingerprint=fingerprint)
        waiting = asyncio.create_task(service.submit(second))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert accounts.totals().received == 2

        # The stream broke, so the same message comes again, while the first copy still waits: the
        # newest goes on waiting alone, since each holds all its bytes.
        copies = [asyncio.create_task(service.submit(second)) for _ in range(20)]
        await asyncio.wait(copies[:-1])
        assert not copies[-1].done()
        for copy in copies[:-1]:
            with pytest.raises(Unavailable, match="keep one stream open"):
                copy.result()
        assert _taken(ingest).sequence == 1
        has_room = time.monotonic()
        assert (await copies[-1]).status == pb.STATUS_ACCEPTED
        arrival = _taken(ingest)
        assert arrival.sequence == 2 and arrival.queued >= has_room
        assert accounts.totals().received == 4
        assert (await service.submit(second)).status == pb.STATUS_DUPLICATE

    asyncio.run(story())


def test_parameters_come_if_newer_or_of_another_learner() -> None:
    service = messages.service()
    assert not _get(service, 0, 0).HasField("parameters")  # nothing is published yet
    service.publish(_parameters(version=0))
    assert _get(service, 0, 0).parameters.version == 0  # the caller held none
    assert not _get(service, messages.LEARNER, 0).HasField("parameters")
    service.publish(_parameters(version=2))
    reply = _get(service, messages.LEARNER, 1).parameters
    assert (reply.version, reply.progress, reply.frames) == (2, 0.5, 1000)
    assert np.frombuffer(reply.tensors[0], np.float32).tolist() == [2.0] * 6
    # An incarnation that is gone may have published higher versions: pull whatever the version.
    assert _get(service, 1, 10).parameters.version == 2


def test_parameters_are_serialised_once_on_demand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    encode = codec.encode

    def counted(values: Sequence[np.ndarray]) -> list[bytes]:
        calls.append(0)
        return encode(values)

    monkeypatch.setattr(codec, "encode", counted)
    service = messages.service()
    for version in range(5):
        service.publish(_parameters(version))
    assert not calls
    replies = [service.get_parameters(pb.GetParametersRequest()) for _ in range(10)]
    assert len(calls) == 1
    assert all(reply is replies[0] for reply in replies)


def test_everyone_hears_of_the_end_and_parameters_stay() -> None:
    async def story() -> None:
        ingest = Ingest(capacity=2)
        service, fingerprint = _joined(ingest=ingest)
        service.publish(_parameters(version=7))
        assert not _get(service, 0, 0).finished
        await service.submit(messages.message(1, fingerprint=fingerprint))
        waiting = asyncio.create_task(service.submit(messages.message(2, fingerprint=fingerprint)))
        await asyncio.sleep(0.01)
        ingest.close()  # the last batch is made, and the result is being written
        await asyncio.sleep(0.3)
        assert not (waiting.done() or _get(service, 0, 0).finished)
        service.finish()
        assert (await waiting).status == pb.STATUS_FINISHED
        third = await service.submit(messages.message(2, fingerprint=fingerprint))
        assert third.status == pb.STATUS_FINISHED
        reply = _get(service, 0, 0)
        assert (reply.finished, reply.parameters.version) == (True, 7)
        assert _get(service, messages.LEARNER, 7).finished
        assert service.join(messages.join_request("late")).finished

    asyncio.run(story())


def test_evaluations_are_kept_for_the_learner_and_checked() -> None:
    service = messages.service()
    service.publish(_parameters(version=2)._replace(frames=99))
    service.publish(_parameters(version=3))
    good = pb.Evaluation(
        actor="e",
        learner_incarnation=messages.LEARNER,
        parameter_version=3,
        frames=99,
        episodes=[pb.Episode(episode_return=21, length=5)],
    )
    service.evaluators.report(good)
    report = service.evaluators.reports.get_nowait()
    assert (report.actor, report.parameter_version, report.frames) == ("e", 3, 99)
    assert report.episodes[0].episode_return == 21
    with pytest.raises(InvalidRequest, match="episode_return is nan"):
        nan = pb.Episode(episode_return=float("nan"))
        service.evaluators.report(_with(good, episodes=[nan]))
    with pytest.raises(InvalidRequest, match="no episodes"):
        service.evaluators.report(pb.Evaluation(actor="e"))
    with pytest.raises(InvalidRequest, match="task is 1, the run has 1"):
        service.evaluators.report(pb.Evaluation(actor="e", task=1, episodes=good.episodes))
    with pytest.raises(InvalidRequest, match="1 to 200 printable characters"):
        service.evaluators.report(pb.Evaluation(actor="\x1b[2J", episodes=good.episodes))
    with pytest.raises(InvalidRequest, match=r"parameter_version is 4 of .* 77, which this run"):
        service.evaluators.report(_with(good, parameter_version=4))
    with pytest.raises(InvalidRequest, match="of the learner incarnation 5, which this run never"):
        service.evaluators.report(_with(good, learner_incarnation=5))
    with pytest.raises(InvalidRequest, match=r"There are 1001 episodes, at most 1000"):
        service.evaluators.report(_with(good, episodes=[pb.Episode(length=1)] * 1001))
    with pytest.raises(InvalidRequest, match=r"Raise limits\.reward"):
        large = pb.Episode(episode_return=1e30, length=5)
        service.evaluators.report(_with(good, episodes=[large]))
    assert service.evaluators.reports.empty()
    of_the_learner_before = {"learner_incarnation": messages.EARLIER, "parameter_version": 1000}
    service.evaluators.report(_with(good, **of_the_learner_before))
    assert service.evaluators.reports.get_nowait().parameter_version == 1000


def _snapshots(logdir: pathlib.Path, *frames: int, num_tasks: int = 1) -> Snapshots:
    """Snapshots that wait, whose variables are their frames."""
    snapshots = Snapshots(num_tasks, "auto")
    for number in frames:
        values = {"agent/000/w:0": np.full((2, 3), number, np.float32)}
        made = checkpoint.Checkpoint(Config(), checkpoint.Counters(frames=number), values, {})
        path = checkpoint.save(logdir, made, keep=None, kind="snapshots")
        snapshots.add(Snapshot(path, messages.LEARNER, number // 10, number, 0.25))
    return snapshots


def _assigned(service: LearnerService, **kw: Any) -> pb.GetSnapshotReply:
    service.join(messages.join_request("e", role=pb.ROLE_EVALUATOR))
    request = pb.GetSnapshotRequest(actor="e", **kw)
    return pb.GetSnapshotReply.FromString(service.evaluators.get_snapshot(request))


def test_evaluators_get_snapshots_task_by_task(tmp_path: pathlib.Path) -> None:
    snapshots = _snapshots(tmp_path, 10, 20, num_tasks=2)
    service = messages.service(snapshots=snapshots)
    assert not _assigned(service, busy=True).HasField("parameters")
    first = _assigned(service)
    sent = first.parameters
    assert (sent.learner_incarnation, sent.version, sent.frames) == (messages.LEARNER, 1, 10)
    assert (sent.progress, first.task, first.finished) == (0.25, 0, False)
    assert sent.tensors == [np.full((2, 3), 10, np.float32).tobytes()]
    held = {"learner_incarnation": messages.LEARNER, "frames": 10}
    second = _assigned(service, **held)
    assert (second.parameters.frames, second.task) == (10, 1)
    assert not second.parameters.tensors  # it holds them
    third = _assigned(service, **held)
    assert (third.parameters.frames, len(third.parameters.tensors)) == (20, 1)
    assert first.seed == second.seed == third.seed != 0
    assert service.get_status().waiting_snapshots == 2
    assert [member.name for member in service.get_status().members] == ["e"]


def test_evaluators_go_when_all_is_evaluated(tmp_path: pathlib.Path) -> None:
    snapshots = _snapshots(tmp_path, 10)
    service = messages.service(snapshots=snapshots)
    service.finish()
    assert not service.join(messages.join_request("e", role=pb.ROLE_EVALUATOR)).finished
    snapshots.end()
    assert not _assigned(service).finished
    snapshots.settle(messages.LEARNER, 10, 0, 1.0)
    assert _assigned(service).finished
    assert service.join(messages.join_request("e", role=pb.ROLE_EVALUATOR)).finished


def test_a_run_without_snapshots_refuses_evaluators() -> None:
    service = messages.service(snapshots=Snapshots(1, "never"))
    with pytest.raises(InvalidRequest, match="of several --peers, evaluators join the first"):
        service.join(messages.join_request("e", role=pb.ROLE_EVALUATOR))


def test_a_report_is_not_looked_at_while_too_many_wait() -> None:
    service = messages.service()
    report = pb.Evaluation(
        actor="e", learner_incarnation=messages.LEARNER, episodes=[pb.Episode(length=1)]
    )
    for _ in range(service.evaluators.reports.maxsize):
        service.evaluators.report(report)
    for flood in (report, _with(report, episodes=[pb.Episode()] * 100_000)):
        with pytest.raises(Unavailable, match="64 evaluations wait"):
            service.evaluators.report(flood)
    service.evaluators.reports.get_nowait()
    service.evaluators.report(report)


def _with(evaluation: pb.Evaluation, **kw: Any) -> pb.Evaluation:
    fields = {field.name: value for field, value in evaluation.ListFields()}
    return pb.Evaluation(**{**fields, **kw})


def test_too_large_messages_are_refused_at_the_start() -> None:
    what = r"learner\.max_envs_per_message is \d+ and learner\.unroll_length 4: .* Lower one"
    with pytest.raises(OptionError, match=what):
        messages.service(max_envs=10**6)


def test_environment_faults_reach_the_status_printable() -> None:
    service, fingerprint = _joined()
    crashed = pb.EnvironmentFault(environment=4, kind=pb.FAULT_KIND_CRASHED, detail="OSError: 5")
    hung = pb.EnvironmentFault(environment=1, kind=pb.FAULT_KIND_HUNG, detail="\x1b[2J" + "x" * 500)
    newer = pb.EnvironmentFault(
        environment=1, kind=cast(pb.FaultKind, 9), detail="of a protocol that is to come"
    )
    message = messages.message(fingerprint=fingerprint, environment_faults=[crashed, hung])
    assert messages.submit(service, message).status == pb.STATUS_ACCEPTED
    assert messages.submit(service, message).status == pb.STATUS_DUPLICATE
    message = messages.message(2, fingerprint=fingerprint, environment_faults=[newer])
    assert messages.submit(service, message).status == pb.STATUS_ACCEPTED
    (member,) = service.get_status().members
    assert member.environment_faults == 2
    assert member.last_fault == "environment 1 hung: ?[2J" + "x" * 196


def test_the_info_of_steps_reaches_the_ingest() -> None:
    ingest = Ingest(64)
    service = messages.service(ingest=ingest)
    fingerprint = service.join(messages.join_request()).fingerprint
    told = [pb.StepInfo(name=name, values=[1.0, 2.5]) for name in ("speed", "\x1b[2J")]
    message = messages.message(fingerprint=fingerprint, step_info=told)
    assert messages.submit(service, message).status == pb.STATUS_ACCEPTED
    arrival = ingest.get(0.0)
    assert arrival is not None
    assert {name: list(values) for name, values in arrival.step_info.items()} == {
        "speed": [1.0, 2.5]
    }
    assert service.get_status().dropped_info_names == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.0] * (2 * messages.UNROLL_LENGTH + 1), "numbers of speed, at most"),
        ([1.0, float("nan")], "a number of speed that is not finite"),
    ],
)
def test_info_of_too_many_steps_or_not_finite_is_refused(values: list[float], said: str) -> None:
    service, fingerprint = _joined()
    told = [pb.StepInfo(name="speed", values=values)]
    receipt = messages.submit(service, messages.message(fingerprint=fingerprint, step_info=told))
    assert receipt.reason == pb.REASON_RANGE and said in receipt.detail


def test_only_contents_that_no_honest_actor_sends_are_blamed() -> None:
    """What a restart of either side causes, or another version of it, is nobody's fault."""
    quarantine = Quarantine(QuarantineConfig())
    service, fingerprint = _joined(quarantine=quarantine)
    good = messages.message(fingerprint=fingerprint)
    nan = messages.unroll(2)
    nan.timestep.reward[1, 0] = np.nan
    sent: dict[str, dict[str, Any]] = {
        "unknown_actor": {"incarnation": 9},
        "fingerprint": {"fingerprint": "another"},
        "version": {"parameter_version": 99},
        "sequence": {"sequence": 7},
        "num_envs": {"num_envs": 0},
        "tensor_count": {"tensors": good.tensors[1:]},
        "tensor_size": {"tensors": [b"", *good.tensors[1:]]},
        "not_finite": {"arrays": nan},
        "range": {"task": 9},
    }
    blamed, following = {}, 1
    for name, fields in sent.items():
        quarantine._records.clear()
        told = {"fingerprint": fingerprint, "sequence": following, **fields}
        receipt = messages.submit(service, messages.message(**told))
        following += name not in ("unknown_actor", "sequence")  # the others use a number up
        assert pb.Reason.Name(receipt.reason) == f"REASON_{name.upper()}"
        blamed[name] = quarantine.standing("a").blamed
        (member,) = service.get_status().members
        assert (member.blamed, member.quarantined_seconds) == (blamed[name], 0.0)
        assert member.last_rejection.startswith(f"{name}: ") or name == "unknown_actor"
    assert blamed == {name: int(i >= 4) for i, name in enumerate(sent)}
    # Another limit of environments may have held when a message was made.
    quarantine._records.clear()
    large = messages.message(following, 99, fingerprint=fingerprint)
    assert messages.submit(service, large).reason == pb.REASON_NUM_ENVS
    assert quarantine.standing("a").blamed == 0


def test_actors_are_told_to_play_different_tasks() -> None:
    names = TasksConfig(environments=("x", "y"), order="simultaneous")
    service = messages.service(config=Config(tasks=names))
    joined = [service.join(messages.join_request(actor)) for actor in ("a", "b")]
    assert [reply.task for reply in joined] == [0, 1]
    first = messages.message(1, actor="a", fingerprint=joined[0].fingerprint)
    assert messages.submit(service, first).task == 0  # b has not sent yet what it plays


@pytest.mark.parametrize("value", [np.nan, 3e38])
def test_outputs_are_not_blamed_before_they_are_judged(value: float) -> None:
    quarantine = Quarantine(QuarantineConfig())
    refused: collections.deque[RefusedOutput] = collections.deque()
    service, fingerprint = _joined(quarantine=quarantine, refused_outputs=refused)
    for i, name in enumerate(("policy", "baseline")):
        bad = messages.unroll(2)
        getattr(bad.output, name)[1, 0] = value
        incarnation = (messages.LEARNER, messages.EARLIER)[i]
        fields: dict[str, Any] = {
            "learner_incarnation": incarnation,
            "parameter_version": 0 if not i else 9,
        }
        bad_one = messages.message(i + 1, arrays=bad, fingerprint=fingerprint, **fields)
        receipt = messages.submit(service, bad_one)
        assert receipt.status == pb.STATUS_REJECTED
        each = refused.pop()
        assert (each.actor, each.version) == ("a", None if i else 0)
        assert f"output/{name} holds" in each.why
    assert quarantine.standing("a").blamed == 0
    bad.timestep.reward[1, 0] = value  # which comes before the outputs, and from no network
    messages.submit(service, messages.message(3, arrays=bad, fingerprint=fingerprint))
    assert (quarantine.standing("a").blamed, len(refused)) == (1, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_never_published(bad: float) -> None:
    service = messages.service()
    service.publish(_parameters(version=3))
    spoilt = _parameters(version=4)
    spoilt.values[0][1, 2] = bad
    with pytest.raises(NotFiniteError, match=rf"version 4 are not published: tensor 0 .* {bad}"):
        service.publish(spoilt)
    assert _get(service, messages.LEARNER, 2).parameters.version == 3


class _Policy(ExecutablePolicy):
    """One that is made already."""

    def __init__(self) -> None:
        super().__init__(Config(), messages.SPACES)

    async def get(self) -> Executable:
        return Executable("d1", b"graph")


def test_an_executable_policy_is_fetched_once() -> None:
    service = messages.service(executable=_Policy())

    def got(held: str) -> pb.GetExecutablePolicyReply:
        request = pb.GetExecutablePolicyRequest(digest=held)
        return asyncio.run(service.get_executable_policy(request))

    assert got("") == pb.GetExecutablePolicyReply(digest="d1", onnx=b"graph")
    assert got("d1") == pb.GetExecutablePolicyReply(digest="d1")
    assert got("d0").onnx == b"graph"
    service.close()


def test_actors_are_told_the_leaves_of_spaces_in_wire_order() -> None:
    box = gym.spaces.Box(np.array([0.0, -1.0]), np.array([np.inf, 1.0]), (2,), np.float64)
    choices = gym.spaces.MultiDiscrete([2, 3], start=[0, 5])
    pair = gym.spaces.Tuple([gym.spaces.Discrete(4, start=-1), gym.spaces.MultiBinary(2)])
    space = gym.spaces.Dict(collections.OrderedDict(z=box, m=choices, a=pair))
    assert terms.described(space, "x") == [
        pb.Space(name="x/a/0", kind=pb.Space.KIND_DISCRETE, start=[-1], n=[4]),
        pb.Space(name="x/a/1", kind=pb.Space.KIND_MULTI_BINARY, start=[0, 0], n=[2, 2]),
        pb.Space(name="x/m", kind=pb.Space.KIND_MULTI_DISCRETE, start=[0, 5], n=[2, 3]),
        pb.Space(name="x/z", kind=pb.Space.KIND_BOX, low=[0.0, -1.0], high=[np.inf, 1.0]),
    ]
    of_network = [name for name, _ in leaves(space, "x", is_sorted=False)]
    assert of_network == ["x/z", "x/m", "x/a/0", "x/a/1"]  # the order of policy parameters
    image = gym.spaces.Box(0, 255, (3,), np.uint8)
    assert terms.described(image, "y")[0] == pb.Space(
        name="y", kind=pb.Space.KIND_BOX, low=[0.0], high=[255.0]
    )
