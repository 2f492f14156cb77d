"""Who is let in: every method with no, wrong, good and revoked credentials, over connections."""

import logging
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc
import messages
import pytest
import services
import trustme
from callers import (
    ACTOR,
    EVALUATOR,
    OK,
    READER,
    TOKENS,
    calls,
    certificate,
    mutual_tls,
    only,
    secure_channel,
    serving,
    status,
    token_file,
    write,
)
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services import WAIT

from actors.client import LearnerClient, new_incarnation
from actors.session import LearnerRefused
from impala.runtime import credentials
from impala.runtime import listen as addresses
from impala.runtime.credentials import SecurityError
from impala.runtime.security import ClientSecurity, Gate, ServerSecurity
from learner.service import server as server_module
from learner.service.server import Server
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

# Tokens.


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (None, only((), "UNAUTHENTICATED")),
        ("", only((), "UNAUTHENTICATED")),
        ("a-wrong-token-0123456789", only((), "UNAUTHENTICATED")),
        (TOKENS["actor"][:-1], only((), "UNAUTHENTICATED")),
        (TOKENS["actor"], only(ACTOR, "PERMISSION_DENIED")),
        (TOKENS["evaluator"], only(EVALUATOR, "PERMISSION_DENIED")),
        (TOKENS["reader"], only(READER, "PERMISSION_DENIED")),
    ],
)
def test_a_token_opens_what_its_role_may_do(
    tmp_path: pathlib.Path, token: str, expected: dict[str, str]
) -> None:
    tokens = token_file(tmp_path / "tokens", *TOKENS)
    with serving(token_file=tokens) as address, grpc.insecure_channel(address) as channel:
        assert calls(channel, token) == expected


def test_without_credentials_a_local_learner_lets_everyone_in() -> None:
    with serving() as address, grpc.insecure_channel(address) as channel:
        assert calls(channel) == only([*ACTOR, *EVALUATOR, *READER], "")


def test_tokens_are_replaced_and_revoked_ones_end_streams(
    tmp_path: pathlib.Path,
) -> None:
    tokens = tmp_path / "tokens"
    token_file(tokens, "actor")
    old, new = TOKENS["actor"], TOKENS["actor"] + "-new"
    with serving(token_file=tokens) as address, grpc.insecure_channel(address) as channel:
        stub = pb_grpc.LearnerStub(channel)
        fingerprint = stub.Join(
            messages.join_request(), metadata=[("authorization", f"Bearer {old}")]
        ).fingerprint
        go_on = threading.Semaphore(1)

        def unrolls() -> Iterator[pb.Unrolls]:
            for sequence in (1, 2, 3):
                go_on.acquire()
                yield messages.message(sequence, fingerprint=fingerprint)

        stream = stub.StreamUnrolls(
            unrolls(), timeout=WAIT, metadata=[("authorization", f"Bearer {old}")]
        )
        assert next(stream).status == pb.STATUS_ACCEPTED

        write(tokens, f"actor {old}\nactor {new}\n")  # both are good
        go_on.release()
        assert next(stream).status == pb.STATUS_ACCEPTED
        assert calls(channel, new)["parameters"] == OK

        write(tokens, f"actor {new}\n")  # the old one is not
        go_on.release()
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert calls(channel, old) == only((), "UNAUTHENTICATED")


def test_nonsense_in_a_token_file_leaves_the_old_ones(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = token_file(tmp_path / "tokens", "actor")
    gate = Gate(ServerSecurity(token_file=tokens))
    for text in ("boss a-very-long-token-indeed\n", "", "actor short\n", b"\xff\xfe"):
        write(tokens, text)
        gate.admit(["actor"], f"Bearer {TOKENS['actor']}", ())
    tokens.unlink()
    gate.admit(["actor"], f"Bearer {TOKENS['actor']}", ())
    assert caplog.text.count("going on as before") == 4
    assert "token-indeed" not in caplog.text
    assert "short" not in caplog.text


# TLS.


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def test_a_certificate_opens_what_its_role_may_do(tmp_path: pathlib.Path, ca: trustme.CA) -> None:
    files = mutual_tls(ca, tmp_path)
    clients = {
        role: certificate(ca, tmp_path, f"spiffe://cluster.local/impala/{role}")
        for role in ("actor", "evaluator", "reader", "operator", "expired")
    }
    foreign = certificate(
        trustme.CA(), tmp_path / _made(tmp_path), "spiffe://cluster.local/impala/actor"
    )
    expected = {
        "actor": only(ACTOR, "PERMISSION_DENIED"),
        "evaluator": only(EVALUATOR, "PERMISSION_DENIED"),
        "reader": only(READER, "PERMISSION_DENIED"),
        "operator": only((), "UNAUTHENTICATED"),
        "expired": only((), "UNAVAILABLE"),
    }
    with serving(**files) as address:
        for name, client in clients.items():
            with secure_channel(address, ca, client) as channel:
                assert calls(channel) == expected[name], name
        for other in (None, foreign):
            with secure_channel(address, ca, other) as channel:
                assert calls(channel) == only((), "UNAVAILABLE")
        with secure_channel(address, trustme.CA(), clients["actor"]) as channel:
            assert calls(channel) == only((), "UNAVAILABLE")  # the caller does not trust it
        with grpc.insecure_channel(address) as channel:
            assert calls(channel) == only((), "UNAVAILABLE")


def _made(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "foreign").mkdir()
    return pathlib.Path("foreign")


def test_a_certificate_and_a_token_must_both_allow_it(
    tmp_path: pathlib.Path, ca: trustme.CA
) -> None:
    files = mutual_tls(ca, tmp_path)
    files["token_file"] = token_file(tmp_path / "tokens", *TOKENS)
    actor = certificate(ca, tmp_path, "spiffe://cluster.local/impala/actor")
    with serving(**files) as address, secure_channel(address, ca, actor) as channel:
        assert calls(channel, TOKENS["actor"]) == only(ACTOR, "PERMISSION_DENIED")
        both = "parameters", "executable"  # are for actors and for evaluators
        assert calls(channel, TOKENS["evaluator"]) == only(both, "PERMISSION_DENIED")
        assert calls(channel) == only((), "UNAUTHENTICATED") | dict.fromkeys(
            ("snapshot", "report", "status"), "PERMISSION_DENIED"
        )


def test_new_certificates_are_taken_without_dropping_streams(tmp_path: pathlib.Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    files = certificate(old, tmp_path, "localhost")
    with serving(**files) as address, secure_channel(address, old) as channel:
        stub = pb_grpc.LearnerStub(channel)
        fingerprint = stub.Join(messages.join_request(), timeout=WAIT).fingerprint
        go_on = threading.Semaphore(1)

        def unrolls() -> Iterator[pb.Unrolls]:
            for sequence in (1, 2):
                go_on.acquire()
                yield messages.message(sequence, fingerprint=fingerprint)

        stream = stub.StreamUnrolls(unrolls(), timeout=WAIT)
        assert next(stream).status == pb.STATUS_ACCEPTED

        certificate(new, tmp_path, "localhost")  # in the same files

        with secure_channel(address, new) as other:
            assert calls(other)["parameters"] == OK
        with secure_channel(address, old) as other:
            assert calls(other)["parameters"] == "UNAVAILABLE"
        go_on.release()
        assert next(stream).status == pb.STATUS_ACCEPTED


@contextmanager
def client(address: str, files: ClientSecurity) -> Iterator[LearnerClient]:
    _, _, port = address.rpartition(":")
    with LearnerClient(
        f"localhost:{port}", name="a", incarnation=new_incarnation(), security=files
    ) as made:
        yield made


def test_an_actor_shows_its_credentials_and_takes_new_ones(
    tmp_path: pathlib.Path, ca: trustme.CA
) -> None:
    """After a rotation of both sides it comes back by itself."""
    both = mutual_tls(ca, tmp_path)
    authority = both["tls_client_ca"]
    tokens = token_file(tmp_path / "tokens", "actor")
    shown = token_file(tmp_path / "shown", "actor")
    files = ClientSecurity(
        **certificate(ca, tmp_path, "spiffe://cluster.local/impala/actor"),
        tls_ca=authority,
        token_file=shown,
    )
    both["token_file"] = tokens
    with ExitStack() as stack:
        with serving(**both) as address:
            actor = stack.enter_context(client(address, files))
            assert actor.join().learner_incarnation == messages.LEARNER
            assert actor.parameters().version == 3
            other = trustme.CA()
            write(authority, other.cert_pem.bytes())
            certificate(other, tmp_path, "localhost")
            certificate(other, tmp_path, "spiffe://cluster.local/impala/actor")
        token_file(tokens, "actor", suffix="-new")
        token_file(shown, "actor", suffix="-new")
        with serving(address, **both):
            services.wait_for("it joins again", lambda: actor._session.connection > 1)


def test_an_actor_without_the_right_token_is_refused_in_words(tmp_path: pathlib.Path) -> None:
    tokens = token_file(tmp_path / "tokens", "evaluator")
    files = ClientSecurity(token_file=token_file(tmp_path / "mine", "evaluator"))
    with (
        serving(token_file=tokens) as address,
        client(address, files) as actor,
        pytest.raises(LearnerRefused) as error,
    ):
        actor.join()
    assert "This token is for evaluator; here actor is needed" in str(error.value)
    assert TOKENS["evaluator"] not in str(error.value)


# What is refused at the start.


@pytest.mark.parametrize(
    ("listen", "local"),
    [
        ("127.0.0.1:0", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("learner:50051", False),
        ("10.0.0.7:50051", False),
    ],
)
def test_what_is_local(listen: str, local: bool) -> None:
    assert addresses.is_local(listen) == local


def test_beyond_this_host_credentials_are_needed(tmp_path: pathlib.Path, ca: trustme.CA) -> None:
    pair = certificate(ca, tmp_path, "localhost")
    tokens = token_file(tmp_path / "tokens", "actor")
    authority = write(tmp_path / "ca.crt", ca.cert_pem.bytes())
    listen = "0.0.0.0:0"
    for files, message in (
        (ServerSecurity(), "listens on this host only"),
        (ServerSecurity(**pair), "listens on this host only"),
        (ServerSecurity(token_file=tokens), "in the clear: give --security.tls-cert and"),
    ):
        with pytest.raises(SecurityError, match=message):
            files.check(listen)
    for good in (
        ServerSecurity(insecure=True),
        ServerSecurity(token_file=tokens, insecure=True),
        ServerSecurity(**pair, token_file=tokens),
        ServerSecurity(**pair, tls_client_ca=authority),
    ):
        good.check(listen)


def test_files_that_do_not_fit_are_named(tmp_path: pathlib.Path, ca: trustme.CA) -> None:
    pair = certificate(ca, tmp_path, "localhost")
    (tmp_path / "other").mkdir()
    other = certificate(ca, tmp_path / "other", "localhost")
    authority = write(tmp_path / "ca.crt", ca.cert_pem.bytes())
    key = serialization.load_pem_private_key(pair["tls_key"].read_bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    cases: Sequence[tuple[dict[str, Any], str]] = (
        ({"tls_cert": pair["tls_cert"]}, "--security.tls-cert is given without --security.tls-key"),
        ({"tls_key": pair["tls_key"]}, "--security.tls-key is given without --security.tls-cert"),
        ({"tls_client_ca": authority}, "without --security.tls-cert and --security.tls-key"),
        ({**pair, "tls_key": other["tls_key"]}, "cannot be used together: KEY_VALUES_MISMATCH"),
        ({**pair, "tls_key": write(tmp_path / "encrypted", encrypted)}, "without a passphrase"),
        ({**pair, "tls_client_ca": pair["tls_key"]}, "holds no certificates"),
        ({"token_file": tmp_path / "nothing"}, "nothing cannot be read"),
        ({"revoked_file": tmp_path / "nothing"}, "nothing cannot be read"),
        ({"revoked_file": write(tmp_path / "bytes", b"\xff")}, "revoked names is not plain text"),
        ({"trust_domain": "spiffe://impala"}, "--security.trust-domain is 'spiffe://impala'"),
        ({"token_file": authority}, "begins with no role"),
    )
    for files, message in cases:
        with pytest.raises(SecurityError, match=message):
            ServerSecurity(**files).check("127.0.0.1:0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("# nothing\n", "holds no token"),
        ("actor\n", "line 1 of the token file has 0 characters"),
        ("\nactor tiny\n", "line 2 of the token file has 4 characters"),
        ("king 0123456789abcdef\n", "Line 1 of the token file begins with no role"),
    ],
)
def test_token_files_are_checked_without_telling_what_is_in_them(text: str, message: str) -> None:
    with pytest.raises(SecurityError, match=message) as error:
        credentials.read_tokens(text.encode())
    assert "0123456789abcdef" not in str(error.value)


# Limits, health, silence.


def test_one_host_may_join_and_stream_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_JOINS_PER_MINUTE", 3)
    monkeypatch.setattr(server_module, "_MAX_STREAMS", 2)
    with serving() as address, grpc.insecure_channel(address) as channel:
        stub = pb_grpc.LearnerStub(channel)
        joins = [status(lambda: stub.Join(messages.join_request(), timeout=WAIT)) for _ in range(5)]
        assert joins == [OK] * 3 + ["RESOURCE_EXHAUSTED"] * 2
        end = threading.Event()

        def nothing() -> Iterator[pb.Unrolls]:
            end.wait(WAIT)
            yield from ()

        open_ones = [stub.StreamUnrolls(nothing(), timeout=WAIT) for _ in range(2)]
        deadline = time.monotonic() + WAIT
        while (
            seen := status(lambda: next(stub.StreamUnrolls(iter([]), timeout=WAIT), None))
        ) == OK:
            assert time.monotonic() < deadline
        assert seen == "RESOURCE_EXHAUSTED"
        end.set()
        assert [list(stream) for stream in open_ones] == [[], []]
        assert status(lambda: list(stub.StreamUnrolls(iter([]), timeout=WAIT))) == OK


def test_health_has_a_plain_port_of_its_own(tmp_path: pathlib.Path, ca: trustme.CA) -> None:
    service = messages.service()
    files = ServerSecurity(
        **certificate(ca, tmp_path, "localhost"),
        tls_client_ca=write(tmp_path / "ca.crt", ca.cert_pem.bytes()),
    )
    server = Server(service, "127.0.0.1:0", files, health_listen="127.0.0.1:0")
    address = server.start()
    try:
        with closing(grpc.insecure_channel(server.health_address)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            join = pb_grpc.LearnerStub(channel).Join
            assert status(lambda: join(messages.join_request(), timeout=WAIT)) == "UNIMPLEMENTED"
        own = certificate(ca, tmp_path, "spiffe://cluster.local/impala/actor")
        with secure_channel(address, ca, own) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            asked = health_pb2.HealthCheckRequest()
            assert status(lambda: check(asked, timeout=WAIT)) == "UNIMPLEMENTED"
    finally:
        server.stop(0.0)


def test_no_secret_is_logged(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = token_file(tmp_path / "tokens", *TOKENS)
    with caplog.at_level(logging.DEBUG), serving(token_file=tokens) as address:
        with grpc.insecure_channel(address) as channel:
            for token in (None, "a-wrong-token-0123456789", *TOKENS.values()):
                calls(channel, token)
        with client(address, ClientSecurity(token_file=tokens)) as actor:
            actor.join()
    assert not any(token in caplog.text for token in (*TOKENS.values(), "a-wrong-token"))
