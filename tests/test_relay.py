"""The process in front of the learner's port: what it passes on, what it limits, and its end."""

import contextlib
import functools
import multiprocessing
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Self

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
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http2 import ELSEWHERE, Raw, connect
from services import WAIT

from impala.config.schema import QuarantineConfig
from impala.runtime.security import ServerSecurity
from learner.fleet.quarantine import Quarantine
from learner.front import door as door_module
from learner.front.door import GuardedDoor
from learner.front.relay import PREFACE, Bucket, Hosts, Limits, host_of
from learner.service.server import Server
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

JOIN = "/impala.v1.Learner/Join"


# What each host may have, without a clock.


def test_tokens_come_back_at_their_rate() -> None:
    bucket = Bucket(capacity=3, rate=0.5, now=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True] * 3 + [False]
    assert [bucket.take(12.0), bucket.take(12.0)] == [True, False]
    assert not bucket.is_full(17.0)
    assert bucket.is_full(1000.0)
    assert [bucket.take(1000.0) for _ in range(4)] == [True] * 3 + [False]


def test_a_host_may_open_so_many_connections_at_once_and_so_many_a_second() -> None:
    hosts = Hosts(Limits(connections=9, host_burst=3, host_rate=1.0), now=0.0)
    seen = [hosts.arrives("a", key, now=0.0) for key in range(5)]
    assert seen == [None] * 3 + ["too_fast"] * 2
    assert hosts.arrives("b", 5, now=0.0) is None  # another one is not concerned
    assert [hosts.arrives("a", key, now=2.0) for key in (6, 7, 8)] == [None, None, "too_fast"]


def test_a_host_with_many_proven_connections_gets_no_more() -> None:
    hosts = Hosts(Limits(connections=9, host_connections=2), now=0.0)
    for key in (1, 2):
        assert hosts.arrives("a", key, 0.0) is None
        hosts.speaks("a", key)
        hosts.proves("a", key)
    assert hosts.arrives("a", 3, 0.0) == "too_many"
    hosts.leaves("a", 1)
    assert hosts.arrives("a", 4, 0.0) is None


def test_one_host_cannot_have_all_connections_admitted_at_once() -> None:
    """All of them come before the first one is admitted."""
    with _Behind(Limits(connections=4)) as behind, ExitStack() as open_ones:
        peers = []
        for _ in range(3):
            client, taken, peer = behind.pair()
            open_ones.enter_context(client)
            open_ones.enter_context(taken)
            peers.append(peer)
        for peer in peers:
            behind.door.admitted(peer)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        services.wait_for("word of it", lambda: behind.door.refusals(), WAIT)
        assert behind.door.refusals() == {"too_many": 1}


def test_the_oldest_that_is_not_proven_makes_room() -> None:
    hosts = Hosts(Limits(connections=9, host_silent=2, host_unproven=1), now=0.0)
    for key in (1, 2):
        assert hosts.arrives("a", key, 0.0) is None
        assert hosts.too_many("a") is None
    assert hosts.arrives("a", 3, 0.0) is None
    assert hosts.too_many("a") == 1
    hosts.leaves("a", 1)
    hosts.speaks("a", 2)
    assert hosts.too_many("a") is None
    hosts.speaks("a", 3)
    assert hosts.too_many("a") == 2
    hosts.proves("a", 2)  # just in time
    assert hosts.too_many("a") is None


def test_a_host_that_misbehaves_is_slowed_down_more_and_more_and_forgiven() -> None:
    hosts = Hosts(Limits(connections=9, min_pause=1.0, max_pause=4.0), now=0.0)
    assert hosts.arrives("a", 1, 0.0) is None
    assert [hosts.strikes("a", 0.0) for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert hosts.arrives("a", 2, 3.9) == "slowed_host"
    assert hosts.arrives("b", 3, 3.9) is None
    assert hosts.arrives("a", 4, 4.0) is None
    assert hosts.arrives("a", 5, 7.9) == "slowed_host"
    assert [hosts.arrives("a", key, 700.0) for key in (6, 7)] == [None, None]
    assert hosts.strikes("a", 700.0) == 1.0


def test_hosts_of_which_nothing_is_known_are_forgotten() -> None:
    hosts = Hosts(Limits(connections=9), now=0.0)
    for key in range(1000):
        assert hosts.arrives(f"host-{key}", key, 0.0) is None
        if key:
            hosts.leaves(f"host-{key}", key)
    hosts.strikes("host-1", 0.0)
    assert hosts.arrives("new", 1000, 100.0) is None
    assert len(hosts) == 3  # one is connected, one was bad, one is new


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),  # all of which one subscriber has
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_whose_an_address_is(address: str, host: str) -> None:
    assert host_of(address) == host


# Bytes, without gRPC.


class _Behind:
    """What a learner would be: a Unix socket behind a process in front."""

    def __init__(self, limits: Limits) -> None:
        self.door = GuardedDoor("127.0.0.1:0", None, is_encrypted=False, limits=limits)
        listen, _ = self.door.bind()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(listen.removeprefix("unix:"))
        self._listener.listen()
        self._listener.settimeout(WAIT)
        self.address, _ = self.door.open(listen, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.door.close()

    def accept(self) -> tuple[socket.socket, str]:
        """A connection that was passed on, and its peer as gRPC would name it."""
        taken, name = self._listener.accept()
        taken.settimeout(WAIT)
        return taken, "unix-abstract:" + name.removeprefix(b"\0").decode()

    def pair(self, host: str = ELSEWHERE) -> tuple[socket.socket, socket.socket, str]:
        """A client's socket, the learner's, and the peer, once the client has spoken."""
        client = connect(self.address, host)
        client.sendall(PREFACE)
        taken, peer = self.accept()
        assert taken.recv(len(PREFACE), socket.MSG_WAITALL) == PREFACE
        return client, taken, peer


@pytest.fixture
def behind() -> Iterator[_Behind]:
    with _Behind(Limits(connections=50)) as served:
        yield served


def test_bytes_pass_unchanged_both_ways_at_once(behind: _Behind) -> None:
    client, taken, peer = behind.pair()
    behind.door.admitted(peer)
    sent = {each: random.Random(each).randbytes(5_000_000) for each in (0, 1)}
    heard: dict[int, bytes] = {}

    def hear(which: int, end: socket.socket) -> None:
        with end.makefile("rb") as stream:
            heard[which] = stream.read(len(sent[which]))

    with client, taken:
        threads = [
            threading.Thread(target=client.sendall, args=(sent[0],)),
            threading.Thread(target=taken.sendall, args=(sent[1],)),
            threading.Thread(target=hear, args=(0, taken)),
            threading.Thread(target=hear, args=(1, client)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    assert heard == sent


def test_a_peer_is_known_by_its_true_address(behind: _Behind) -> None:
    client, taken, peer = behind.pair()
    with client, taken:
        assert behind.door.host(peer) == ELSEWHERE
        assert behind.door.name(peer) == f"{ELSEWHERE} port {client.getsockname()[1]}"
    assert behind.door.host("unix:") == "unix"  # who is not from there
    assert behind.door.host("unix-abstract:another/1/10.0.0.1/5") != "10.0.0.1"


def test_who_reads_nothing_holds_up_the_sender_and_fills_no_memory(behind: _Behind) -> None:
    client, taken, _ = behind.pair()
    with client, taken:
        taken.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            for _ in range(1000):  # until nothing has gone on for a while
                sent += taken.send(bytes(1 << 16))
                behind.door.check()
        assert sent < 32 << 20
        client.settimeout(WAIT)
        assert client.recv(1 << 16)


def test_the_end_of_one_side_is_the_end_of_the_other_after_all_was_sent(behind: _Behind) -> None:
    client, taken, _ = behind.pair()
    with client:
        with taken:
            taken.sendall(b"x" * 1_000_000)
        with client.makefile("rb") as stream:
            assert len(stream.read()) == 1_000_000
    client, taken, _ = behind.pair()
    with taken:
        client.close()
        assert taken.recv(1) == b""


def test_what_is_not_grpc_is_not_passed_on(behind: _Behind) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", b"\x16\x03\x01"):
        with connect(behind.address) as stranger:
            stranger.sendall(said)
            with pytest.raises(OSError):
                assert stranger.recv(1)
                raise OSError
    services.wait_for(
        "that to be counted", lambda: behind.door.refusals().get("not_grpc") == 3, WAIT
    )
    behind._listener.settimeout(0.1)
    with pytest.raises(TimeoutError):
        behind.accept()


def test_a_connection_that_stays_silent_is_closed() -> None:
    with _Behind(Limits(connections=9, silent_seconds=0.2)) as behind:
        with connect(behind.address) as silent, pytest.raises(ConnectionResetError):
            silent.recv(1)
        services.wait_for("that to be counted", lambda: behind.door.refusals(), WAIT)
        assert behind.door.refusals() == {"silent": 1}


def test_before_its_first_admitted_call_a_connection_may_say_little() -> None:
    limits = Limits(connections=9, unproven_bytes=10_000, unproven_rate=1.0)
    with _Behind(limits) as behind:
        client, taken, peer = behind.pair()
        with client, taken:
            client.sendall(bytes(100_000))
            assert len(taken.recv(9_000, socket.MSG_WAITALL)) == 9_000
            taken.settimeout(0.3)
            rest = b""
            with contextlib.suppress(TimeoutError):
                while True:
                    rest += taken.recv(100_000)
            assert 9_000 + len(rest) + len(PREFACE) <= 10_100
            taken.settimeout(WAIT)
            behind.door.admitted(peer)
            with taken.makefile("rb") as stream:
                assert len(stream.read(100_000 - 9_000 - len(rest))) == 91_000 - len(rest)


def test_with_no_room_left_the_oldest_stranger_makes_room_and_no_admitted_caller() -> None:
    with _Behind(Limits(connections=2)) as behind:
        proven, proven_taken, peer = behind.pair()
        behind.door.admitted(peer)
        stranger, stranger_taken, _ = behind.pair("127.0.0.3")
        newest, newest_taken, peer = behind.pair("127.0.0.4")
        with proven, proven_taken, stranger, stranger_taken, newest, newest_taken:
            assert stranger_taken.recv(1) == b""
            for client, taken in ((proven, proven_taken), (newest, newest_taken)):
                client.sendall(b"still here")
                assert taken.recv(10, socket.MSG_WAITALL) == b"still here"
            behind.door.admitted(peer)
            services.wait_for("word of it", lambda: behind.door.refusals(), WAIT)
            assert behind.door.refusals() == {"no_room": 1}
            with connect(behind.address, "127.0.0.5") as late:
                late.sendall(PREFACE)
                with pytest.raises(ConnectionResetError):
                    late.recv(1)


def test_one_host_cannot_have_all_connections() -> None:
    with _Behind(Limits(connections=4)) as behind, ExitStack() as open_ones:
        for _ in range(2):
            client, taken, peer = behind.pair()
            open_ones.enter_context(client)
            open_ones.enter_context(taken)
            behind.door.admitted(peer)
            client.sendall(bytes(100_000))  # which passes once it is known to be admitted
            with taken.makefile("rb") as stream:
                assert len(stream.read(100_000)) == 100_000
        with pytest.raises(ConnectionResetError), connect(behind.address) as third:
            third.recv(1)
        services.wait_for("word of it", lambda: behind.door.refusals(), WAIT)
        assert behind.door.refusals() == {"too_many": 1}
        client, taken, _ = behind.pair("127.0.0.3")
        with client, taken:
            pass


# With a learner.


def test_calls_go_through_it_as_without_it(tmp_path: pathlib.Path) -> None:
    """Certificates are checked end to end, so that roles are known behind it."""
    ca = trustme.CA()
    files = mutual_tls(ca, tmp_path)
    actor = certificate(ca, tmp_path, "spiffe://cluster.local/impala/actor")
    stranger = certificate(trustme.CA(), tmp_path, "spiffe://cluster.local/impala/evaluator")
    with serving(guarded=True, **files) as address:
        with secure_channel(address, ca, actor) as channel:
            assert calls(channel) == only(ACTOR, "PERMISSION_DENIED")
        with secure_channel(address, ca, stranger) as channel:
            assert calls(channel) == only((), "UNAVAILABLE")
    tokens = token_file(tmp_path / "tokens", "actor")
    with (
        serving(guarded=True, token_file=tokens) as address,
        grpc.insecure_channel(address) as channel,
    ):
        assert calls(channel, TOKENS["actor"]) == only(ACTOR, "PERMISSION_DENIED")


def test_a_thousand_silent_connections_do_not_reach_the_learner() -> None:
    with (
        Learner(guarded=True) as learner,
        Actor(learner.address, "good", 1) as good,
        ExitStack() as open_ones,
    ):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            open_ones.enter_context(connect(learner.address))
        good.stub.Join(messages.join_request("good", 2), timeout=WAIT)
        with Actor(learner.address, "another", 1):
            assert len(os.listdir("/proc/self/fd")) < before + 1000 + 20
        learner.server.check()


@pytest.mark.parametrize("attack", ["unknown method", "no token", "taken back", "probes"])
def test_a_caller_that_is_refused_often_is_slowed_down_and_others_are_not(
    attack: str, tmp_path: pathlib.Path
) -> None:
    tokens = token_file(tmp_path / "tokens", "actor", "reader")
    service = messages.service()
    server = Server(service, "127.0.0.1:0", ServerSecurity(token_file=tokens), guarded=True)
    address = server.start()
    method = {
        "unknown method": "/impala.v1.Learner/Nonsense",
        "probes": "/grpc.health.v1.Health/Watch",
    }.get(attack, JOIN)
    metadata = [("authorization", f"Bearer {TOKENS['actor']}")]
    try:
        with grpc.insecure_channel(address) as channel:
            join = channel.unary_unary(JOIN, lambda request: request.SerializeToString())

            def honest() -> str:
                request = messages.join_request()
                return status(lambda: join(request, timeout=WAIT, metadata=metadata))

            assert honest() == OK
            with Raw(address) as raw, pytest.raises(OSError):
                for _ in range(100_000):  # until the learner hangs up
                    stream = raw.call(method)
                    if attack != "unknown method":
                        raw.reset(stream)
            services.wait_for("word of it", lambda: server.refusals().get("misbehaved"), WAIT)
            with pytest.raises(ConnectionResetError), connect(address) as again:
                again.sendall(PREFACE)
                again.recv(1)
            services.wait_for("word of it", lambda: server.refusals().get("slowed_host"), WAIT)
            assert honest() == OK
            # Another connection of the honest host.
            assert list(calls_of(address, metadata)) == [OK]
            server.check()
    finally:
        server.stop(0.0)


def test_an_actor_in_quarantine_that_opens_stream_after_stream_is_slowed_down() -> None:
    """A good one asks seven times within the first ten seconds, and then every ten."""
    quarantine = Quarantine(QuarantineConfig(blames=1))
    server = Server(messages.service(quarantine=quarantine), "127.0.0.1:0", guarded=True)
    address = server.start()
    try:
        with grpc.insecure_channel(address) as channel:
            stub = pb_grpc.LearnerStub(channel)
            fingerprint = stub.Join(messages.join_request("a"), timeout=WAIT).fingerprint
            quarantine.blame("a", "the culprit of an update that was not finite")
            for _ in range(300):
                message = messages.message(1, actor="a", fingerprint=fingerprint)
                stream = stub.StreamUnrolls(iter([message]), timeout=WAIT)
                if status(functools.partial(list, stream)) == "UNAVAILABLE":  # closed
                    break
        services.wait_for("word of it", lambda: server.refusals().get("misbehaved"), WAIT)
        refused = server.refusals()
        assert refused["misbehaved"] == 1
        assert refused["quarantined"] > 20
    finally:
        server.stop(0.0)


def calls_of(address: str, metadata: list[tuple[str, str]]) -> Iterator[str]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        call = channel.unary_unary(JOIN)
        request = messages.join_request("b", 2).SerializeToString()
        yield status(lambda: call(request, timeout=WAIT, metadata=metadata))


def test_an_honest_connection_of_a_host_that_is_slowed_down_lives_on() -> None:
    with Learner(guarded=True) as learner, Actor(learner.address, "good", 1) as good:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(learner.address, options=options) as channel:
            nonsense = channel.unary_unary("/x/y")
            seen = {status(lambda: nonsense(b"", timeout=WAIT)) for _ in range(30)}
        assert seen == {"UNIMPLEMENTED", "UNAVAILABLE"}
        stream = good.stub.StreamUnrolls(iter([good.next() for _ in range(5)]), timeout=WAIT)
        assert [receipt.status for receipt in stream] == [pb.STATUS_ACCEPTED] * 5
        refusals = learner.server.refusals
        services.wait_for("word of it", lambda: refusals().get("misbehaved"), WAIT)


def test_the_status_says_what_was_refused() -> None:
    with serving(guarded=True) as address, grpc.insecure_channel(address) as channel:
        assert status(lambda: channel.unary_unary("/x/y")(b"", timeout=WAIT)) == "UNIMPLEMENTED"
        stub = pb_grpc.LearnerStub(channel)
        told = stub.GetStatus(pb.GetStatusRequest(), timeout=WAIT)
        assert dict(told.refused) == {"unknown_method": 1}


def test_the_health_port_goes_through_it_as_well() -> None:
    server = Server(messages.service(), "127.0.0.1:0", health_listen="127.0.0.1:0", guarded=True)
    server.start()
    try:
        with grpc.insecure_channel(server.health_address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert check(health_pb2.HealthCheckRequest(), timeout=WAIT).status == 1
            assert status(lambda: channel.unary_unary(JOIN)(b"", timeout=WAIT)) == "UNIMPLEMENTED"
    finally:
        server.stop(0.0)


# Its end, and that of the learner.


def _door_of(server: Server) -> GuardedDoor:
    assert isinstance(server._door, GuardedDoor)
    return server._door


def _process_of(door: GuardedDoor) -> "subprocess.Popen[bytes]":
    assert door._process is not None
    return door._process


def test_it_is_started_again_when_it_dies(caplog: pytest.LogCaptureFixture) -> None:
    with Learner(guarded=True) as learner:
        with Actor(learner.address, "a", 1):
            _process_of(_door_of(learner.server)).kill()
        services.wait_for("word of it", lambda: "ended with status -9" in caplog.text, WAIT)
        with Actor(learner.address, "b", 2):
            learner.server.check()


def test_it_is_started_again_however_often_it_dies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And however often it cannot be started: training goes on meanwhile."""
    monkeypatch.setattr(door_module, "_MAX_PAUSE", 0.01)
    monkeypatch.setattr(door_module, "_MIN_PAUSE", 0.01)
    with Learner(guarded=True) as learner:
        door = _door_of(learner.server)

        def deaths() -> int:
            learner.server.check()
            with contextlib.suppress(ProcessLookupError):
                _process_of(door).kill()
            return caplog.text.count("ended with status -9")

        services.wait_for("many deaths", lambda: deaths() > 7, WAIT)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/nowhere")
            services.wait_for(
                "failures", lambda: deaths() and caplog.text.count("cannot be started") > 2, WAIT
            )
        with Actor(learner.address, "late", 1):
            learner.server.check()


def test_pauses_grow_and_do_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door_module, "_MIN_PAUSE", 1000.0)
    monkeypatch.setattr(door_module, "_MAX_PAUSE", 3000.0)
    with _Behind(Limits(connections=9)) as behind:
        pauses: list[float] = []

        def wait(pause: float) -> bool:
            if len(pauses) < 4:
                pauses.append(pause)
                return False
            return True

        def died_four_times() -> bool:
            _process_of(behind.door).kill()
            return len(pauses) == 4

        monkeypatch.setattr(behind.door._closing, "wait", wait)
        services.wait_for("four deaths", died_four_times, WAIT)
        assert pauses == [1000.0, 2000.0, 3000.0, 3000.0]
    with _Behind(Limits(connections=9)) as behind:
        caplog.clear()
        _process_of(behind.door).kill()
        services.wait_for("its pause", lambda: "starting it in 1000.0 s" in caplog.text, WAIT)


def test_one_that_is_started_while_the_door_closes_ends_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door_module, "_MIN_PAUSE", 0.0)
    starts, go_on, start = threading.Event(), threading.Event(), GuardedDoor._start
    with _Behind(Limits(connections=9)) as behind:

        def slowly(door: GuardedDoor) -> None:
            starts.set()
            assert go_on.wait(WAIT)
            start(door)

        monkeypatch.setattr(GuardedDoor, "_start", slowly)
        _process_of(behind.door).kill()
        assert starts.wait(WAIT)
        closing = threading.Thread(target=behind.door.close)
        closing.start()
        services.wait_for("the end", behind.door._closing.is_set, WAIT)
        go_on.set()
        closing.join(WAIT)
        assert not closing.is_alive()
        assert _process_of(behind.door).poll() == 0


def test_signals_to_all_processes_leave_it_to_the_learner_when_it_ends(behind: _Behind) -> None:
    client, taken, _ = behind.pair()
    with client, taken:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            _process_of(behind.door).send_signal(each)
        taken.sendall(b"the last receipt")
        assert client.recv(16, socket.MSG_WAITALL) == b"the last receipt"
    behind.door.close()
    assert _process_of(behind.door).poll() == 0


def test_without_a_file_for_the_way_to_the_learner_only_that_connection_ends(
    behind: _Behind,
) -> None:
    old, old_taken, _ = behind.pair()
    pid = _process_of(behind.door).pid

    def count() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    before = count()
    limit = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with old, old_taken:
        with pytest.raises(ConnectionResetError), connect(behind.address) as new:
            services.wait_for("it to be taken in", lambda: count() == before + 1, WAIT)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limit[1]))  # no further file
            new.sendall(PREFACE)
            new.recv(1)
        services.wait_for("word of it", behind.door.refusals, WAIT)
        assert behind.door.refusals() == {"not_serving": 1}
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
        old_taken.sendall(b"still here")
        assert old.recv(10, socket.MSG_WAITALL) == b"still here"
        assert _process_of(behind.door).pid == pid
    client, taken, _ = behind.pair()
    with client, taken:
        pass


def test_temporary_files_may_be_deep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Learner(guarded=True) as learner, Actor(learner.address, "a", 1):
        pass


def _serve(connection: Connection) -> None:
    server = Server(messages.service(), "127.0.0.1:0", guarded=True)
    address = server.start()
    door = _door_of(server)
    connection.send((address, _process_of(door).pid, str(door._directory)))
    connection.recv()


def test_it_ends_with_the_learner_whatever_ends_that() -> None:
    ours, theirs = multiprocessing.Pipe()
    learner = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,))
    learner.start()
    _, pid, directory = ours.recv()
    try:
        assert os.stat(directory).st_mode & 0o777 == 0o700
        learner.kill()
        learner.join(WAIT)
        services.wait_for("its end", lambda: not pathlib.Path(f"/proc/{pid}").exists(), WAIT)
    finally:
        learner.kill()
        pathlib.Path(directory, "grpc").unlink(missing_ok=True)
        pathlib.Path(directory).rmdir()


def test_stopping_leaves_nothing_behind() -> None:
    server = Server(messages.service(), "127.0.0.1:0", guarded=True)
    address = server.start()
    door = _door_of(server)
    server.stop(0.0)
    assert _process_of(door).poll() == 0
    assert door._directory is not None
    assert not door._directory.exists()
    with closing(socket.socket()) as again:  # the port is free
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(address.rpartition(":")[2])))


# File descriptors.


def _train_with_few_files(connection: Connection) -> None:
    """A learner that may open 240 files and opens as many of them as training may need."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (240, 240))
    server = Server(messages.service(), "127.0.0.1:0", guarded=True)
    connection.send(server.start())
    while not connection.poll(0.01):
        with ExitStack() as files:
            for _ in range(door_module._RESERVED_FILES // 2):
                files.enter_context(tempfile.TemporaryFile())
        server.check()
    server.stop(0.0)
    connection.send("trained")


def test_strangers_cannot_use_up_the_files_that_training_needs() -> None:
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    learner = spawn.Process(target=_train_with_few_files, args=(theirs,))
    learner.start()
    try:
        assert ours.poll(services.SECONDS)
        address = ours.recv()
        with ExitStack() as open_ones:
            for i in range(300):
                stranger = open_ones.enter_context(connect(address))
                if i % 2:
                    with contextlib.suppress(OSError):  # it may have made room by now
                        stranger.sendall(PREFACE)
            with Actor(address, "good", 1) as good:
                assert good.fingerprint
        ours.send("stop")
        assert ours.poll(WAIT)
        assert ours.recv() == "trained"
    finally:
        learner.kill()
        learner.join()


def test_hardly_any_files_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (60, 60))
    with pytest.raises(OSError, match="may open 60 files"):
        Server(messages.service(), "127.0.0.1:0", guarded=True).start()
