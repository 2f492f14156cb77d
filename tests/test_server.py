"""The gRPC server: addresses, back-pressure, health, and an end without losses."""

import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Self

import grpc
import messages
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services import WAIT

from impala.runtime import listen
from impala.types import Parameters
from learner.data.ingest import Arrival, Ingest
from learner.fleet.accounts import Accounts
from learner.service import calls, server
from learner.service.probes import Probes
from learner.service.server import SERVICE_NAME, Server
from learner.service.service import LearnerService
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc


def _taken(ingest: Ingest) -> Arrival:
    arrival = ingest.get(timeout=WAIT)
    assert arrival is not None
    return arrival


class _Served:
    """A server on a free port of loopback, and a client of it."""

    def __init__(self, service: LearnerService, listen: str = "127.0.0.1:0") -> None:
        self.server = Server(service, listen, health_listen="127.0.0.1:0")
        self.address = self.server.start()
        self.channel = grpc.insecure_channel(self.address)
        self.stub = learner_pb2_grpc.LearnerStub(self.channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.server.stop(grace=0.0)

    def join(self, **kw: Any) -> str:
        return self.stub.Join(messages.join_request(**kw), timeout=WAIT).fingerprint


def _parameters() -> Parameters:
    return Parameters(messages.LEARNER, 3, 0.5, 10, [np.ones((2, 3), np.float32)])


@pytest.mark.parametrize("kind", ["port", "socket"])
def test_an_actor_joins_streams_and_pulls(kind: str, tmp_path: pathlib.Path) -> None:
    accounts, ingest = Accounts(), Ingest(capacity=64)
    service = messages.service(accounts, ingest)
    service.publish(_parameters())
    listen = "127.0.0.1:0" if kind == "port" else f"unix:{tmp_path}/learner.sock"
    with _Served(service, listen) as served:
        assert served.address.startswith("127.0.0.1:" if kind == "port" else "unix:/")
        assert not served.address.endswith(":0")
        fingerprint = served.join()
        stream = served.stub.StreamUnrolls(
            iter([messages.message(i, fingerprint=fingerprint) for i in (1, 2, 2)]), timeout=WAIT
        )
        assert [(receipt.sequence, receipt.status) for receipt in stream] == [
            (1, pb.STATUS_ACCEPTED),
            (2, pb.STATUS_ACCEPTED),
            (2, pb.STATUS_DUPLICATE),
        ]
        reply = served.stub.GetParameters(pb.GetParametersRequest(), timeout=WAIT)
        assert reply.parameters.version == 3
        evaluation = pb.Evaluation(
            actor="e",
            learner_incarnation=messages.LEARNER,
            frames=10,
            episodes=[pb.Episode(length=1)],
        )
        served.stub.ReportEvaluation(evaluation, timeout=WAIT)
        assert service.evaluators.reports.get(timeout=WAIT).actor == "e"
        served.server.check()
    assert accounts.totals().queued == 4


def test_a_request_that_is_parsed_as_a_whole_is_not_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "_MOST_REQUEST_BYTES", 1000)
    with _Served(messages.service()) as served:
        empty = pb.Evaluation(actor="e", episodes=[pb.Episode()] * 1000)
        with pytest.raises(grpc.RpcError) as refused:
            served.stub.ReportEvaluation(empty, timeout=WAIT)
        assert "Evaluation has 2003 bytes, at most 1000 are read" in refused.value.details()


def test_the_status_names_the_fleet_and_what_it_sent() -> None:
    service = messages.service()
    service.publish(_parameters())
    observed = []
    server = Server(
        service, "127.0.0.1:0", observe=lambda method, seconds: observed.append((method, seconds))
    )
    address = server.start()
    with grpc.insecure_channel(address) as channel:
        stub = learner_pb2_grpc.LearnerStub(channel)
        fingerprint = stub.Join(messages.join_request(), timeout=WAIT).fingerprint
        evaluator = messages.join_request(actor="e", role=pb.ROLE_EVALUATOR)
        stub.Join(evaluator, timeout=WAIT)
        good = messages.message(1, fingerprint=fingerprint, parameter_version=3)
        wrong = messages.message(2, fingerprint="other")
        list(stub.StreamUnrolls(iter([good, wrong]), timeout=WAIT))
        evaluation = pb.Evaluation(
            actor="e",
            learner_incarnation=messages.LEARNER,
            parameter_version=2,
            frames=10,
            episodes=[pb.Episode(length=1)],
        )
        stub.ReportEvaluation(evaluation, timeout=WAIT)
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=WAIT)
    server.stop(0.0)
    assert (status.frames, status.progress, status.parameter_version) == (10, 0.5, 3)
    assert (status.received, status.learned, status.queued) == (2, 0, 2)
    assert dict(status.rejected) == {"fingerprint": 1}
    actor, evaluator = status.members
    assert (actor.name, actor.role, actor.joins) == ("a", pb.ROLE_ACTOR, 1)
    assert (actor.unrolls, actor.frames, actor.parameter_version) == (2, 32, 3)
    assert actor.rejected == 1
    assert actor.last_rejection.startswith("fingerprint: ")
    assert (evaluator.name, evaluator.role) == ("e", pb.ROLE_EVALUATOR)
    assert evaluator.parameter_version == 2
    methods = [method for method, _ in observed]
    assert methods == ["Join", "Join", *["StreamUnrolls"] * 2, "ReportEvaluation", "GetStatus"]
    assert all(0.0 <= seconds < WAIT for _, seconds in observed)


def test_an_evaluator_joins_each_learner_before_it_asks_for_snapshots() -> None:
    with _Served(messages.service()) as served:
        for busy in (True, False):
            with pytest.raises(grpc.RpcError) as error:
                served.stub.GetSnapshot(pb.GetSnapshotRequest(actor="e", busy=busy), timeout=WAIT)
            assert error.value.code() == grpc.StatusCode.NOT_FOUND
            assert "No Join for evaluator 'e'" in error.value.details()
        assert not served.stub.GetStatus(pb.GetStatusRequest(), timeout=WAIT).members
        served.join(actor="e", role=pb.ROLE_EVALUATOR)
        served.stub.GetSnapshot(pb.GetSnapshotRequest(actor="e"), timeout=WAIT)


def test_service_errors_become_statuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = messages.service()
    with _Served(service) as served:
        version = pb.ProtocolVersion(major=3)
        with pytest.raises(grpc.RpcError) as error:
            served.stub.Join(messages.join_request(protocol=version), timeout=WAIT)
        assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "speaks protocol 3.0" in error.value.details()
        with pytest.raises(grpc.RpcError) as error:
            served.join(actor="")
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "1 to 200" in error.value.details()

        with monkeypatch.context() as broken:
            broken.setattr(service, "join", lambda request: 1 / 0)
            with pytest.raises(grpc.RpcError) as error:
                served.join()
        assert error.value.code() == grpc.StatusCode.INTERNAL
        served.server.check()
        assert served.join()


def test_a_receipt_that_waits_is_back_pressure() -> None:
    """Given room for one message of two, the third is not taken before the first leaves."""
    accounts, ingest = Accounts(), Ingest(capacity=4)
    with _Served(messages.service(accounts, ingest)) as served:
        fingerprint = served.join()
        stream = served.stub.StreamUnrolls(
            iter([messages.message(i, fingerprint=fingerprint) for i in (1, 2, 3)]), timeout=WAIT
        )
        assert [next(stream).sequence for _ in range(2)] == [1, 2]
        served.join(actor="b")  # the server answers others meanwhile
        assert accounts.totals().received == 4
        assert _taken(ingest).sequence == 1
        assert next(stream).sequence == 3
        assert list(stream) == []


def _health(served: _Served, name: str) -> str:
    with grpc.insecure_channel(served.server.health_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def _until_health(served: _Served, name: str, wanted: str) -> None:
    deadline = time.monotonic() + WAIT
    while (seen := _health(served, name)) != wanted:
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)


def test_a_learner_that_hangs_is_no_longer_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LOOK_SECONDS", 0.05)
    with _Served(messages.service()) as served:
        assert _health(served, server.LIVENESS) == "SERVING"
        monkeypatch.setattr(server, "_HANGS_SECONDS", 0.5)
        _until_health(served, server.LIVENESS, "NOT_SERVING")
        assert _health(served, SERVICE_NAME) == "SERVING"
        served.server._checked -= 3600.0
        monkeypatch.setattr(server, "_HANGS_SECONDS", 600.0)
        served.server.check()
        _until_health(served, server.LIVENESS, "SERVING")


def test_it_is_healthy_while_it_serves_and_says_so_when_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, set_status = {}, Probes.set

    def noted(probes: Probes, name: str, *, serving: bool) -> None:
        said[name] = serving
        set_status(probes, name, serving=serving)

    monkeypatch.setattr(Probes, "set", noted)
    with _Served(messages.service()) as served:
        assert [_health(served, name) for name in ("", SERVICE_NAME)] == ["SERVING", "SERVING"]
        served.server.stop(grace=1.0)
        assert not said[""] and not said[SERVICE_NAME]
        served.server.check()  # it was stopped: nothing is wrong


def test_stop_ends_idle_and_waiting_streams_at_once() -> None:
    accounts, ingest = Accounts(), Ingest(capacity=2)
    with _Served(messages.service(accounts, ingest)) as served:
        fingerprint = served.join()
        hold = threading.Event()

        def actor(count: int) -> Iterator[pb.Unrolls]:
            yield from (messages.message(i + 1, fingerprint=fingerprint) for i in range(count))
            hold.wait(WAIT)

        waiting = served.stub.StreamUnrolls(actor(2), timeout=WAIT)
        assert next(waiting).status == pb.STATUS_ACCEPTED  # the next one finds no room
        idle = served.stub.StreamUnrolls(actor(1), timeout=WAIT)
        assert next(idle).status == pb.STATUS_DUPLICATE
        threading.Timer(0.0, served.server.stop, (WAIT,)).start()
        for stream in (waiting, idle):
            with pytest.raises(grpc.RpcError) as error:
                list(stream)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "stopping" in error.value.details()
        hold.set()
        served.server.stop(WAIT)  # a second time does no harm
        assert accounts.totals().received == 2


def test_an_address_that_cannot_be_had_is_named(tmp_path: pathlib.Path) -> None:
    with _Served(messages.service()) as served:
        second = Server(messages.service(), served.address)
        with pytest.raises(OSError, match=f"Cannot listen on '{served.address}'"):
            second.start()
    with pytest.raises(OSError, match="at most 107"):
        Server(messages.service(), f"unix:{tmp_path}/{'x' * 120}").start()


def test_a_socket_is_not_taken_from_who_listens_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Server(messages.service(), "unix:socket")
    address = first.start()
    try:
        assert listen.from_anywhere(address) == f"unix:{tmp_path}/socket"
        monkeypatch.setattr(listen, "_LINGER_SECONDS", 0.0)
        with pytest.raises(OSError, match="'unix:socket': another process listens there"):
            listen.check_free("The learner", "unix:socket")
    finally:
        first.stop(0.0)
    listen.check_free("The learner", "unix:socket")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind("socket")  # leaves its file behind
    listen.check_free("The learner", "unix:socket")


def test_a_server_that_dies_is_reported_to_its_owner() -> None:
    with _Served(messages.service()) as served:
        assert served.server._loop is not None and served.server._stopping is not None
        served.server._loop.call_soon_threadsafe(
            served.server._stopping.set_exception, MemoryError("no memory")
        )
        served.server._thread.join(WAIT)
        with pytest.raises(RuntimeError, match="has died"):
            served.server.check()


def test_oversized_messages_are_refused_before_parsing() -> None:
    service = messages.service()
    most = service._validator.max_bytes_beside_tensors()
    large = pb.Unrolls(actor="a", incarnation=1, fingerprint="x" * (most + 1))
    service.join(messages.join_request("a", 1))
    server = Server(service, "127.0.0.1:0")
    try:
        with grpc.insecure_channel(server.start()) as channel:
            stub = learner_pb2_grpc.LearnerStub(channel)
            receipts = stub.StreamUnrolls(iter([messages.message(1), large]), timeout=WAIT)
            assert next(receipts).sequence == 1
            with pytest.raises(grpc.RpcError) as error:
                next(receipts)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert f"at most {most} are possible" in error.value.details()
    finally:
        server.stop(0.0)
    (member,) = service.get_status().members
    assert member.blamed == 1


def test_the_status_is_that_of_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a learner that publishes when somebody asks."""
    service = messages.service()

    async def publish() -> None:
        service.publish(Parameters(messages.LEARNER, 5, 0.5, 10, []))

    monkeypatch.setattr(service, "newest_parameters", publish)
    with _Served(service) as served:
        stub = learner_pb2_grpc.LearnerStub(served.channel)
        assert stub.GetStatus(pb.GetStatusRequest(), timeout=WAIT).parameter_version == 5
