"""Who is who, on a live port: namesakes, names bound to credentials, quarantine, revocation."""

import contextlib
import time
from collections.abc import Iterator

import grpc
import messages
import numpy as np
import pytest
from callers import OK, STREAM_METHOD, status

from actors.client import LearnerClient, LearnerRefused, new_incarnation
from impala.configs import QuarantineConfig
from impala.security import ClientSecurity, ServerSecurity
from impala.types import ActorUnrolls, Parameters
from learner.accounts import Accounts
from learner.ingest import Ingest
from learner.quarantine import Quarantine
from learner.server import Server
from learner.service import Quarantined
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

WAIT = 30.0  # seconds that nothing here should ever take
pytestmark = pytest.mark.timeout(120)


class _Clock:
    """Stands still, so that a quarantine ends when the test wants it to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Served:
    """A learner on a free port that learns from nothing and has room for everything."""

    def __init__(self, **security: object) -> None:
        self.accounts = Accounts()
        self.clock = _Clock()
        self.quarantine = Quarantine(QuarantineConfig(), self.clock)
        self.service = messages.service(
            self.accounts, Ingest(capacity=100_000), quarantine=self.quarantine
        )
        values = [np.ones((2, 3), np.float32)]
        self.service.publish(Parameters(messages.LEARNER, 3, 0.5, 10, values))
        self.server = Server(self.service, "127.0.0.1:0", ServerSecurity(**security))
        self.address = self.server.start()

    def __enter__(self) -> "_Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(0.0)

    def member(self, name: str) -> pb.Member:
        return next(each for each in self.service.get_status().members if each.name == name)


@contextlib.contextmanager
def _actor(
    served: _Served, name: str = "a", reconnect_timeout: float | None = None, **security: object
) -> Iterator[LearnerClient]:
    with LearnerClient(
        served.address,
        name=name,
        incarnation=new_incarnation(),
        reconnect_timeout=reconnect_timeout,
        security=ClientSecurity(**security),
    ) as client:
        client.join()
        yield client


def _send(client: LearnerClient, reward: float = 0.0, seconds: float = WAIT) -> None:
    """Sends the unrolls of two environments and waits for their receipt, at most so long."""
    unroll = messages.unroll(2)
    unroll.timestep.reward[:] = reward
    unroll = unroll._replace(frames=np.full(2, 16, np.int32), parameter_version=0)
    client.send(ActorUnrolls(unroll, task=0, incarnation=messages.LEARNER, episodes=[]))
    client.drain(seconds)


# Namesakes.


def test_of_two_processes_by_one_name_the_older_ends_and_never_disturbs_the_newer() -> None:
    with _Served() as served, _actor(served, "a") as older:
        _send(older)
        with _actor(served, "a") as newer:
            _send(newer)
            _send(older)  # is told that it is not known, and joins again
            with pytest.raises(
                LearnerRefused, match="another process has joined as a since: give each actor its"
            ):
                _send(older)
            for _ in range(5):
                _send(newer)
    totals = served.accounts.totals()
    assert totals.rejected == {"unknown_actor": 1}
    assert totals.received == 2 * 7
    assert served.member("a").joins == 2


# Quarantine.


def test_an_actor_that_was_quarantined_comes_back_and_loses_one_message(caplog) -> None:
    """Given an actor with a spell of NaN rewards, which gives up after 0.3 s without a learner."""
    with _Served() as served, _actor(served, "b") as other:
        refused = []
        join = served.service.join

        def count(request: pb.JoinRequest) -> pb.JoinReply:
            try:
                return join(request)
            except Quarantined as error:
                refused.append(str(error))
                raise

        served.service.join = count
        with _actor(served, "a", reconnect_timeout=0.3) as actor:
            for _ in range(3):
                _send(actor, reward=np.nan)
            assert served.member("a").quarantined_seconds == 60.0
            _send(actor)  # refused unseen, although good
            _send(actor, seconds=0.0)  # waits until messages are taken again
            deadline = time.monotonic() + WAIT
            while len(refused) < 5:  # after 0.1, 0.2, 0.4 and 0.8 s, or half of each
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert served.member("a").last_rejection == refused[-1]
            served.clock.now += 60.0
            _send(actor)
            _send(other)
        totals = served.accounts.totals()
        assert totals.rejected == {"not_finite": 3, "quarantined": 1}
        assert (totals.received, totals.queued) == (2 * 3, 2 * 3)
        member = served.member("a")
        assert (member.blamed, member.quarantined_seconds, member.unrolls) == (3, 0.0, 4)
        assert member.rejected == 4
        assert served.member("b").blamed == 0
    told = [record.getMessage() for record in caplog.records]
    assert sum("a is quarantined for 60 s after 3 blames" in line for line in told) == 1
    assert any("a waits for the learner" in line and "last for not_finite" in line for line in told)


def test_a_quarantined_caller_costs_one_message_a_stream_and_cannot_change_the_accounts() -> None:
    """Given a caller that opens stream after stream, of messages that it never was to send."""
    with _Served() as served, grpc.insecure_channel(served.address) as channel:
        stub = pb_grpc.LearnerStub(channel)
        fingerprint = stub.Join(messages.join_request()).fingerprint
        for _ in range(3):
            served.quarantine.blame("a", "the culprit of an update that was not finite")
        checks = []
        served.service._validator.check = checks.append
        for i in range(20):
            stream = stub.StreamUnrolls(
                messages.message(sequence, fingerprint=fingerprint) for sequence in range(i, i + 50)
            )
            (receipt,) = list(stream)  # and the stream has ended
            assert (receipt.status, receipt.reason) == (
                *(pb.STATUS_REJECTED, pb.REASON_QUARANTINED),
            )
            assert "last for the culprit of an update" in receipt.detail
            assert status(lambda: stub.Join(messages.join_request())) == "RESOURCE_EXHAUSTED"
            assert status(lambda: stub.Join(messages.join_request("b"))) == OK
        assert not checks  # nothing was looked at
        totals = served.accounts.totals()
        assert (totals.received, totals.rejected) == (0, {"quarantined": 20})
        member = served.member("a")
        assert (member.joins, member.blamed) == (1, 3)
        assert "last for the culprit of an update" in member.last_rejection


def test_bytes_that_are_no_message_are_blamed_on_whose_stream_it_is_and_on_nobody_else() -> None:
    with _Served() as served, grpc.insecure_channel(served.address) as channel:
        stub = pb_grpc.LearnerStub(channel)
        fingerprint = stub.Join(messages.join_request("a", 5)).fingerprint
        raw = channel.stream_stream(STREAM_METHOD, response_deserializer=pb.Receipt.FromString)

        def send(*whole: pb.Unrolls) -> None:
            packed = [message.SerializeToString() for message in whole]
            with pytest.raises(grpc.RpcError) as error:
                list(raw(iter([*packed, b"\xff\xff"])))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT

        for _ in range(3):
            send()
            send(messages.message(1, actor="a", incarnation=6, fingerprint=fingerprint))
        assert served.quarantine.standing("a").blamed == 0  # it was not proven to be a
        send(messages.message(1, actor="a", incarnation=5, fingerprint=fingerprint))
        assert served.quarantine.standing("a").blamed == 1
        assert "2 bytes are no Unrolls" in served.member("a").last_rejection
