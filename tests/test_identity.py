"""Who is who, on a live port: namesakes, names bound to credentials, quarantine, revocation."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import grpc
import messages
import numpy as np
import pytest
import trustme
from callers import OK, STREAM_METHOD, Clock, certificate, secure_channel, status, write
from cryptography import x509
from services import WAIT

from actors.client import LearnerClient, new_incarnation
from actors.session import LearnerRefused
from impala.config.schema import QuarantineConfig
from impala.runtime.security import ClientSecurity, ServerSecurity
from impala.types import ActorUnrolls, Parameters
from learner.data.ingest import Ingest
from learner.fleet.accounts import Accounts
from learner.fleet.quarantine import Quarantine
from learner.fleet.refusals import Quarantined
from learner.service.server import Server
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc


class _Served:
    """A learner on a free port that learns from nothing and has room for everything."""

    def __init__(self, **security: Any) -> None:
        self.accounts = Accounts()
        self.clock = Clock()
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
    served: _Served, name: str = "a", reconnect_timeout: float | None = None, **security: Any
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


# Quarantine.


def test_a_quarantined_actor_comes_back_and_loses_one_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an actor with a spell of NaN rewards, which gives up after 0.1 s without a learner."""
    with _Served() as served, _actor(served, "b") as other:
        refused = []
        join = served.service.join

        def count(request: pb.JoinRequest) -> pb.JoinReply:
            try:
                return join(request)
            except Quarantined as error:
                refused.append(str(error))
                raise

        monkeypatch.setattr(served.service, "join", count)
        with _actor(served, "a", reconnect_timeout=0.1) as actor:
            for _ in range(3):
                _send(actor, reward=np.nan)
            assert served.member("a").quarantined_seconds == 60.0
            _send(actor)  # refused unseen, although good
            _send(actor, seconds=0.0)  # waits until messages are taken again
            deadline = time.monotonic() + WAIT
            while len(refused) < 4:  # after 0.1, 0.2 and 0.4 s, or half of each
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
    assert sum("It is quarantined for 60 s after 3 blames" in line for line in told) == 1
    assert any("a waits for the learner" in line and "last for not_finite" in line for line in told)


def test_quarantined_callers_cannot_change_the_accounts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given a caller that opens stream after stream, of messages that it never was to send."""
    with _Served() as served, grpc.insecure_channel(served.address) as channel:
        stub = pb_grpc.LearnerStub(channel)
        fingerprint = stub.Join(messages.join_request()).fingerprint
        for _ in range(3):
            served.quarantine.blame("a", "the culprit of an update that was not finite")
        checks: list[pb.Unrolls] = []
        monkeypatch.setattr(served.service._validator, "check", checks.append)
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
        assert served.server.refusals() == {"quarantined": 40}
        totals = served.accounts.totals()
        assert (totals.received, totals.rejected) == (0, {"quarantined": 20})
        member = served.member("a")
        assert (member.joins, member.blamed) == (1, 3)
        assert "last for the culprit of an update" in member.last_rejection


def test_unreadable_bytes_are_blamed_on_their_sender_alone() -> None:
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
        assert "2 bytes are not a valid Unrolls" in served.member("a").last_rejection


# Names that belong to credentials.

PONG, OTHERS, EVALUATOR = (f"{name}-token-0123456789" for name in ("pong", "others", "eval"))
LINES = f"actor {PONG} pong-a,pong-a-*\nactor {OTHERS}\nevaluator {EVALUATOR} eval-*\n"


def _bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def _evaluation(actor: str) -> pb.Evaluation:
    return pb.Evaluation(
        actor=actor,
        learner_incarnation=messages.LEARNER,
        parameter_version=3,
        frames=10,
        episodes=[pb.Episode(length=1)],
    )


def test_nobody_with_a_good_token_can_take_anothers_name(tmp_path: pathlib.Path) -> None:
    """Given an actor whose name a token is for, and callers with the other good tokens."""
    tokens = write(tmp_path / "tokens", LINES)
    mine = write(tmp_path / "mine", f"actor {PONG} pong-a,pong-a-*\n")
    with (
        _Served(token_file=tokens) as served,
        _actor(served, "pong-a-1", token_file=mine) as honest,
        grpc.insecure_channel(served.address) as channel,
    ):
        stub = pb_grpc.LearnerStub(channel)
        _send(honest)

        def join(name: str, token: str, role: int = pb.ROLE_ACTOR) -> str:
            request = messages.join_request(name, 9, role=role)
            return status(lambda: stub.Join(request, metadata=_bearer(token)))

        assert join("pong-a-1", OTHERS) == "PERMISSION_DENIED"
        assert join("pong-a-1", EVALUATOR, pb.ROLE_EVALUATOR) == "PERMISSION_DENIED"
        assert join("eval-1", EVALUATOR, pb.ROLE_EVALUATOR) == OK
        assert join("pong-b", PONG) == "PERMISSION_DENIED"
        assert join("pong-b", OTHERS) == OK

        fingerprint = honest.join().fingerprint
        incarnation = honest._session.incarnation  # even if they knew it

        def stream(*names: str) -> list[pb.Receipt]:
            calls = stub.StreamUnrolls(
                (
                    messages.message(
                        i + 2, actor=name, incarnation=incarnation, fingerprint=fingerprint
                    )
                    for i, name in enumerate(names)
                ),
                metadata=_bearer(OTHERS),
            )
            return list(calls)

        with pytest.raises(grpc.RpcError, match="is for any name that is not reserved") as error:
            stream("pong-a-1")
        assert error.value.code() == grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.RpcError, match="may not be used by the name pong-a-1"):
            stream("pong-b", "pong-a-1")  # not only its first message is looked at

        def report(name: str, token: str) -> str:
            call = lambda: stub.ReportEvaluation(_evaluation(name), metadata=_bearer(token))  # noqa: E731
            return status(call)

        assert report("eval-2", EVALUATOR) == OK
        assert report("pong-a-1", EVALUATOR) == "PERMISSION_DENIED"
        assert [served.service.evaluators.reports.get().actor] == ["eval-2"]
        assert served.service.evaluators.reports.empty()

        _send(honest)  # and nobody has disturbed it
        member = served.member("pong-a-1")
        assert (member.joins, member.unrolls, member.rejected) == (1, 4, 0)


def test_a_certificate_is_for_its_name_and_its_trust_domain(tmp_path: pathlib.Path) -> None:
    ca = trustme.CA()
    authority = write(tmp_path / "ca.crt", ca.cert_pem.bytes())
    files = {**certificate(ca, tmp_path, "localhost"), "tls_client_ca": authority}

    def joins(served: _Served, name: str, kind: type[x509.DNSName] | None = None) -> dict[str, str]:
        with secure_channel(served.address, ca, certificate(ca, tmp_path, name, kind)) as channel:
            stub = pb_grpc.LearnerStub(channel)
            return {
                name: status(
                    functools.partial(stub.Join, messages.join_request(name), timeout=WAIT)
                )
                for name in ("x", "x-7", "y")
            }

    everyone, nobody = dict.fromkeys(("x", "x-7", "y"), OK), "UNAUTHENTICATED"
    with _Served(**files) as served:
        bound = joins(served, "spiffe://cluster.local/impala/actor/x")
        assert bound == {"x": OK, "x-7": OK, "y": "PERMISSION_DENIED"}
        assert joins(served, "spiffe://cluster.local/impala/actor") == everyone
        for foreign in ("spiffe://elsewhere/impala/actor", "spiffe://elsewhere/actor/x"):
            assert joins(served, foreign) == dict.fromkeys(everyone, nobody)
        # A name of another kind, which authorities may let a holder choose.
        host = joins(served, "spiffe://cluster.local/impala/actor", x509.DNSName)
        assert host == dict.fromkeys(everyone, nobody)
    with _Served(**files, trust_domain="elsewhere") as served:
        assert joins(served, "spiffe://elsewhere/impala/actor") == everyone
        assert joins(served, "spiffe://cluster.local/impala/actor") == dict.fromkeys(
            everyone, nobody
        )


# Revocation.


def test_one_actor_is_revoked_while_the_rest_goes_on(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Given actors that share a token, of which one is to go, and comes back once it may."""
    tokens = write(tmp_path / "tokens", f"actor {PONG}\n")
    revoked = write(tmp_path / "revoked", "# nobody\n")
    with (
        _Served(token_file=tokens, revoked_file=revoked) as served,
        _actor(served, "good", token_file=tokens) as good,
        _actor(served, "bad-1", token_file=tokens) as bad,
    ):
        _send(bad)
        write(revoked, "bad-*\n")
        with pytest.raises(LearnerRefused, match="The name bad-1 has been revoked at this learner"):
            for _ in range(3):
                _send(bad)
        with (
            pytest.raises(LearnerRefused, match="The name bad-1 has been revoked"),
            _actor(served, "bad-1", token_file=tokens),
        ):
            pass
        _send(good)
        assert served.member("bad-1").last_rejection == (
            "The name bad-1 has been revoked at this learner."
        )
        write(revoked, b"\xff\xff")  # nonsense: the last good state stays
        with (
            pytest.raises(LearnerRefused, match="The name bad-1 has been revoked"),
            _actor(served, "bad-1", token_file=tokens),
        ):
            pass
        assert "revoked changed and cannot be used, going on as before" in caplog.text
        write(revoked, "")
        with _actor(served, "bad-1", token_file=tokens) as again:
            _send(again)
        assert (served.member("bad-1").unrolls, served.member("good").unrolls) == (4, 2)
        assert (served.accounts.totals().received, served.accounts.totals().rejected) == (6, {})


def test_an_actor_goes_on_when_its_token_is_replaced(tmp_path: pathlib.Path) -> None:
    """Given the learner's file with both tokens, the actor's with the new, and the old one gone."""
    old, new = "actor an-old-token-0123456789\n", "actor a-new-token-0123456789\n"
    tokens, mine = tmp_path / "tokens", write(tmp_path / "mine", old.encode())
    served = _Served(token_file=write(tokens, old.encode()))
    with served, _actor(served, token_file=mine) as actor:
        _send(actor)
        for path, lines in ((tokens, old + new), (mine, new), (tokens, new)):
            write(path, lines.encode())
            time.sleep(0.02)  # files of another time are read again
        _send(actor)
        _send(actor)
        member = served.member("a")
        assert (member.joins, member.unrolls) == (2, 6)
