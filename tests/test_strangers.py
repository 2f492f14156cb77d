"""What callers without credentials can reach, and how little of it they can use up."""

import multiprocessing
import re
import resource
import socket
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection

import grpc
import messages
import prometheus_client as prometheus
import pytest
import services
from callers import OK, Actor, serving, status
from http2 import connect
from services import WAIT

from impala.runtime import exporter, listen
from impala.runtime.credentials import SecurityError
from impala.runtime.exporter import Exporter
from impala.runtime.security import ClientSecurity, ServerSecurity
from learner.fleet import rates
from learner.service import server as server_module
from learner.service.server import Server
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

NEW_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]

# Addresses.

NO_ADDRESSES = (
    "localhost:99999",  # gRPC takes it modulo 65536
    "127.0.0.1:65536",
    "127.0.0.1:-1",
    "127.0.0.1:http",
    "127.0.0.1:٨٠",
    "127.0.0.1:",
    "127.0.0.1",
    ":50051",
    "::1:50051",
    "ipv4:127.0.0.1:0",
    "127.0.0.1:" + "9" * 5000,
)


@pytest.mark.parametrize("address", NO_ADDRESSES, ids=lambda address: address[:20])
def test_what_is_no_address_is_refused_everywhere(address: str) -> None:
    attempts = (
        lambda: Server(messages.service(), address),
        lambda: Server(messages.service(), "127.0.0.1:0", health_listen=address),
        lambda: Exporter(address, prometheus.CollectorRegistry()),
        lambda: ServerSecurity().check("127.0.0.1:0", metrics=address),
        lambda: ClientSecurity().check(metrics=address),
    )
    for attempt in attempts:
        with pytest.raises(OSError, match="65535") as error:
            attempt()
        assert repr(address)[:20] in str(error.value)
        assert error.value.errno is None  # said as a usage error, without a traceback


def test_beyond_this_host_health_and_metrics_need_a_word() -> None:
    for address in ("0.0.0.0:9090", "[::]:0", "10.0.0.7:9090", "learner:9090"):
        for security, check in (
            (ServerSecurity, lambda s, a: s.check("127.0.0.1:0", health=a)),
            (ServerSecurity, lambda s, a: s.check("127.0.0.1:0", metrics=a)),
            (ClientSecurity, lambda s, a: s.check(metrics=a)),
        ):
            with pytest.raises(SecurityError, match="give an address of this host, or --security"):
                check(security(), address)
            check(security(open_ports=True), address)
    with pytest.raises(SecurityError, match="open-ports"):  # it is another word than this one
        ServerSecurity(insecure=True).check("0.0.0.0:0", metrics="0.0.0.0:9090")
    with pytest.raises(SecurityError, match="listens on this host only"):
        ServerSecurity(open_ports=True).check("0.0.0.0:0")


def test_an_address_in_use_is_named() -> None:
    with listen.bind("Metrics", "localhost:0") as bound:
        port = bound.getsockname()[1]
        with pytest.raises(OSError, match=re.escape(f"'localhost:{port}'")):
            listen.check_free("Metrics", f"localhost:{port}")


# The metrics port.


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT) as answer:
        return str(answer.read().decode())


def _connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT)


@pytest.fixture
def metrics() -> Iterator[Exporter]:
    registry = prometheus.CollectorRegistry()
    prometheus.Gauge("answer", "To everything.", registry=registry).set(42)
    with closing(Exporter("127.0.0.1:0", registry)) as served:
        yield served


def test_scrapes_go_on_beside_silent_connections(
    metrics: exporter.Exporter, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter._Handler, "timeout", 2 * WAIT)
    with ExitStack() as open_ones:
        for _ in range(3):
            open_ones.enter_context(_connect(metrics.address))
        assert "answer 42.0" in _scrape(metrics.address)
    monkeypatch.setattr(exporter._Handler, "timeout", 0.2)
    with _connect(metrics.address) as silent:
        assert silent.recv(1) == b""  # it is closed in the end
    metrics.close()
    assert capfd.readouterr().err == ""


# Hosts and their calls.


def test_idle_hosts_are_forgotten_and_busy_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rates, "_MAX_HOSTS", 10)
    quick = rates.Rate(at_once=2, per_second=1e9)  # is forgiven at once
    for i in range(1000):
        assert quick.take(f"host-{i}")
        assert len(quick._left) <= 10
    slow = rates.Rate(at_once=2, per_second=1e-9)
    for i in range(20):
        assert [slow.take(f"host-{i}") for _ in range(3)] == [True, True, False]
    assert not slow.take("host-0")


def test_tokens_come_back_at_their_rate() -> None:
    bucket = rates.Bucket(capacity=3, rate=0.5, now=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True] * 3 + [False]
    assert [bucket.take(12.0), bucket.take(12.0)] == [True, False]
    assert not bucket.is_full(17.0)
    assert bucket.is_full(1000.0)
    assert [bucket.take(1000.0) for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:4242", "127.0.0.1"),
        ("ipv6:%5B::ffff:10.1.2.3%5D:4242", "10.1.2.3"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4242", "2001:db8:1:2::/64"),  # of one subscriber
        ("ipv6:[fe80::1%25eth0]:4242", "fe80::/64"),
        ("unix:", "unix"),
        ("unix:/run/impala:1", "unix"),
    ],
)
def test_hosts_are_ipv4_addresses_and_networks_of_ipv6(peer: str, host: str) -> None:
    assert rates.host_of(peer) == host


def test_the_status_counts_refused_calls_by_reason() -> None:
    with serving() as address, grpc.insecure_channel(address) as channel:
        join = channel.unary_unary("/impala.v1.Learner/Join")
        assert status(lambda: join(b"no JoinRequest", timeout=WAIT)) == "INVALID_ARGUMENT"
        reply = pb_grpc.LearnerStub(channel).GetStatus(pb.GetStatusRequest(), timeout=WAIT)
        assert dict(reply.refused) == {"invalid": 1}


# Connections and file descriptors.


def _train_with_few_files(connection: Connection) -> None:
    """A learner that may open 300 files and opens as many of them as training may need."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    server_module._HANDSHAKE_SECONDS = 2.0
    server = Server(messages.service(), "127.0.0.1:0")
    connection.send(server.start())
    while not connection.poll(0.01):
        with ExitStack() as files:
            for _ in range(server_module._RESERVED_FILES // 2):
                files.enter_context(tempfile.TemporaryFile())
        server.check()
    server.stop(0.0)
    connection.send("trained")


def test_strangers_cannot_use_up_the_files_of_training() -> None:
    """Those who are connected go on, and silent connections make room again."""
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    learner = spawn.Process(target=_train_with_few_files, args=(theirs,))
    learner.start()
    try:
        assert ours.poll(services.SECONDS)
        address = ours.recv()
        with Actor(address, "good", 1) as good, ExitStack() as open_ones:
            for i in range(600):
                stranger = open_ones.enter_context(connect(address))
                if i % 2:
                    with suppress(OSError):  # it may have been closed by now
                        stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            for incarnation in range(2, 12):
                good.stub.Join(messages.join_request("good", incarnation), timeout=WAIT)

            def joins() -> bool:
                with grpc.insecure_channel(address, NEW_CONNECTION) as channel:
                    join = pb_grpc.LearnerStub(channel).Join
                    return status(lambda: join(messages.join_request("new"), timeout=WAIT)) == OK

            services.wait_for("room for another caller", joins, WAIT)
        ours.send("stop")
        assert ours.poll(WAIT)
        assert ours.recv() == "trained"
    finally:
        learner.kill()
        learner.join()


def test_hardly_any_files_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (60, 60))
    with pytest.raises(OSError, match="may open 60 files"):
        Server(messages.service(), "127.0.0.1:0").start()
