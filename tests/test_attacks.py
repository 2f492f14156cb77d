"""Attacks on a learner's port: slow, endless, silent and deaf callers, and fuzzed messages.

Who is let in is in test_security.py, what a message may hold in test_ingest.py.
"""

import asyncio
import functools
import itertools
import logging
import pathlib
import queue
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress

import grpc
import messages
import numpy as np
import pytest
import services
import trustme
from callers import (
    ACTOR,
    OK,
    READER,
    STREAM_METHOD,
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
    write,
)
from google.protobuf.message import DecodeError
from http2 import DATA, HEADERS, PING, Raw, connect, framed
from services import WAIT

from impala.types import Parameters
from learner.data.ingest import Arrival, Ingest
from learner.fleet.accounts import Accounts
from learner.service import calls as calls_module
from learner.service import server as server_module
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

UNARY = (
    *("Join", "GetParameters", "GetSnapshot", "ReportEvaluation", "GetStatus"),
    "GetExecutablePolicy",
)
METHODS = (*UNARY, "StreamUnrolls", "Act")
FUZZED = 10_000


@contextmanager
def _exchanging(actor: Actor, seconds: float = WAIT) -> Iterator[Callable[[], int]]:
    """Sends the actor's next good message and returns the status of its receipt; on one stream."""
    outgoing: queue.SimpleQueue[pb.Unrolls | None] = queue.SimpleQueue()
    receipts = actor.stub.StreamUnrolls(iter(outgoing.get, None), timeout=seconds)

    def exchange() -> int:
        outgoing.put(actor.next())
        return next(receipts).status

    try:
        yield exchange
    finally:
        outgoing.put(None)
        with suppress(grpc.RpcError):
            list(receipts)  # the learner has seen the end


# Slow, endless, silent and deaf.


def test_messages_that_come_byte_by_byte_hold_up_nobody() -> None:
    with (
        Learner() as learner,
        Actor(learner.address, "slow", 2) as slow,
        Actor(learner.address, "good", 1) as good,
        _exchanging(good) as exchange,
        Raw(learner.address) as raw,
    ):
        message = framed(slow.next().SerializeToString())
        streams = [raw.call(STREAM_METHOD) for _ in range(20)]
        for i in range(100):
            for stream in streams:
                raw.say(stream, message[i : i + 1])
            assert exchange() == pb.STATUS_ACCEPTED
        # One of them comes to its end and is silent from then on, the others for ever before.
        raw.say(streams[0], message[100:])
        receipt = raw.hear(DATA, streams[0])
        assert pb.Receipt.FromString(receipt[5:]).status == pb.STATUS_ACCEPTED
        assert [exchange() for _ in range(10)] == [pb.STATUS_ACCEPTED] * 10
        learner.server.check()


def test_endless_streams_hold_up_nobody() -> None:
    with (
        Learner() as learner,
        Actor(learner.address, "empty", 2) as empty,
        Actor(learner.address, "again", 3) as again,
        Actor(learner.address, "good", 1) as good,
        _exchanging(good) as exchange,
        futures.ThreadPoolExecutor(2) as pool,
    ):
        ended = threading.Event()
        heard: dict[str, Counter] = {"empty": Counter(), "again": Counter()}

        def attack(actor: Actor, message: pb.Unrolls) -> None:
            for_ever = itertools.repeat(message, 50_000)
            endless = itertools.takewhile(lambda _: not ended.is_set(), for_ever)
            for receipt in actor.stub.StreamUnrolls(endless, timeout=WAIT):
                heard[actor.name][receipt.status] += 1

        nothing = empty.message(1, num_envs=0, frames=[], tensors=[])
        attacks = [pool.submit(attack, empty, nothing), pool.submit(attack, again, again.next())]
        try:
            while min(each.total() for each in heard.values()) < 500 and good.sequence < 5_000:
                assert exchange() == pb.STATUS_ACCEPTED
        finally:
            ended.set()
        for each in attacks:
            each.result(WAIT)
        assert min(each.total() for each in heard.values()) >= 500
        totals = learner.accounts.totals()
        duplicates = {name: of_one.pop(pb.STATUS_DUPLICATE) for name, of_one in heard.items()}
        assert heard == {"empty": {pb.STATUS_REJECTED: 1}, "again": {pb.STATUS_ACCEPTED: 1}}
        assert sum(duplicates.values()) == totals.duplicates
        assert totals.rejected == {"num_envs": 1}
        assert totals.received == 2 * (good.sequence + 1)


def test_who_reads_no_receipts_is_not_read_any_further() -> None:
    with (
        Learner() as learner,
        Actor(learner.address, "deaf", 2) as deaf,
        Actor(learner.address, "good", 1) as good,
        _exchanging(good) as exchange,
        Raw(learner.address, window=0) as raw,
    ):
        nothing = deaf.message(1, num_envs=0, frames=[], tensors=[])
        stream = raw.call(STREAM_METHOD)
        raw.say(stream, 100 * framed(nothing.SerializeToString()))
        raw.hear(HEADERS, stream)  # the first receipt is about to come
        assert [exchange() for _ in range(50)] == [pb.STATUS_ACCEPTED] * 50
        assert learner.accounts.totals().rejected == {"num_envs": 1}
        assert learner.accounts.totals().duplicates == 0
        raw.widen(stream)
        services.wait_for(
            "the other receipts",
            lambda: learner.accounts.totals().duplicates == 99,
            WAIT,
        )
        assert learner.accounts.totals().rejected == {"num_envs": 1}


def test_silent_connections_and_streams_keep_nobody_out() -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    num_silent = min(1_000, (most_files - 500) // 2)  # both ends are in this process
    with (
        Learner() as learner,
        Actor(learner.address, "good", 1) as good,
        ExitStack() as open_ones,
    ):
        for _ in range(num_silent):
            silent = open_ones.enter_context(connect(learner.address))
            assert silent.recv(1)  # the learner has taken it and spoken first
        of_one = server_module._MAX_STREAMS_OF_CONNECTION
        for first in range(0, server_module._MAX_STREAMS + 1, of_one):
            raw = open_ones.enter_context(Raw(learner.address))
            for _ in range(min(of_one, server_module._MAX_STREAMS + 1 - first)):
                raw.call(STREAM_METHOD)
        refusals = learner.server.refusals
        services.wait_for(
            "one that is refused: so many are open", lambda: refusals().get("too_many_calls"), WAIT
        )
        assert refusals() == {"too_many_calls": 1}
        with _exchanging(good) as exchange:
            assert [exchange() for _ in range(20)] == [pb.STATUS_ACCEPTED] * 20
        with Actor(learner.address, "another", 2) as another, _exchanging(another) as exchange:
            assert exchange() == pb.STATUS_ACCEPTED
        learner.server.check()


def test_an_authority_that_is_taken_out_no_longer_opens_anything(tmp_path: pathlib.Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    files = mutual_tls(old, tmp_path)
    revoked = certificate(old, tmp_path, "spiffe://cluster.local/impala/actor")
    renewed = certificate(new, tmp_path, "spiffe://cluster.local/impala/reader")
    with serving(**files) as address:
        with secure_channel(address, old, revoked) as channel:
            assert calls(channel) == only(ACTOR, "PERMISSION_DENIED")
        write(files["tls_client_ca"], new.cert_pem.bytes())
        with secure_channel(address, old, revoked) as channel:
            assert calls(channel) == only((), "UNAVAILABLE")
        with secure_channel(address, old, renewed) as channel:
            assert calls(channel) == only(READER, "PERMISSION_DENIED")


# What strangers may not use up.


def test_joins_without_credentials_use_up_nobodys_joins(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_MAX_JOINS_PER_MINUTE", 3)
    tokens = token_file(tmp_path / "tokens", "actor")
    with serving(token_file=tokens) as address, grpc.insecure_channel(address) as channel:
        stub = pb_grpc.LearnerStub(channel)

        def join(token: str) -> str:
            metadata = [("authorization", f"Bearer {token}")]
            request = messages.join_request()
            return status(lambda: stub.Join(request, timeout=WAIT, metadata=metadata))

        attempts = [join("a-wrong-token-0123456789") for _ in range(5)]
        assert attempts == ["UNAUTHENTICATED"] * 5
        assert join(TOKENS["actor"]) == OK


def test_callers_without_credentials_are_refused_unread(tmp_path: pathlib.Path) -> None:
    tokens = token_file(tmp_path / "tokens", "actor", "reader")
    with serving(token_file=tokens) as address:
        with Raw(address) as raw:
            for method in METHODS:
                raw.hear(HEADERS, raw.call(f"/impala.v1.Learner/{method}"))
        with grpc.insecure_channel(address) as channel:
            reader = [("authorization", f"Bearer {TOKENS['reader']}")]
            reply = pb_grpc.LearnerStub(channel).GetStatus(pb.GetStatusRequest(), WAIT, reader)
        assert dict(reply.refused) == {"unauthenticated": len(METHODS)}  # and none was waited for


def test_a_call_that_never_says_what_it_wants_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "_REQUEST_SECONDS", 0.1)
    with serving() as address, Raw(address) as raw:
        for method in UNARY:
            raw.hear(HEADERS, raw.call(f"/impala.v1.Learner/{method}"))


@pytest.mark.parametrize(("interval", "is_closed"), [(0.01, False), (10.0, True)])
def test_who_pings_too_often_is_disconnected(
    interval: float, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_PING_SECONDS", interval)
    with serving() as address, Raw(address) as raw:
        try:
            for _ in range(6):
                raw.ping()
                raw.hear(PING)
                time.sleep(0.05)
        except OSError:
            assert is_closed
        else:
            assert not is_closed


def test_a_connection_that_never_speaks_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HANDSHAKE_SECONDS", 0.5)
    with serving() as address, connect(address) as silent, silent.makefile("rb") as answers:
        answers.read()  # to its end


def test_what_cannot_be_read_is_said_to_be_so_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as address, grpc.insecure_channel(address) as channel:
        for method in (*UNARY, "StreamUnrolls"):
            call = channel.stream_stream(f"/impala.v1.Learner/{method}")
            replies = call(iter([b"\xff" * 9]), timeout=WAIT)
            seen = status(functools.partial(list, replies))
            assert seen == "INVALID_ARGUMENT", method
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


# Fuzzing.


def _flip(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randint(0, len(data)) :]


def _cut(data: bytearray, rng: random.Random) -> None:
    start = rng.randint(0, len(data))
    del data[start : start + rng.randint(1, 40)]


def _splice(data: bytearray, rng: random.Random) -> None:
    start, place = rng.randint(0, len(data)), rng.randint(0, len(data))
    data[place:place] = data[start : start + rng.randint(1, 40)]


def _overwrite(data: bytearray, rng: random.Random) -> None:
    start, noise = rng.randint(0, len(data)), rng.randbytes(rng.randint(1, 8))
    data[start : start + len(noise)] = noise


def _replace(data: bytearray, rng: random.Random) -> None:
    data[:] = rng.randbytes(rng.randint(0, 300))


def _read(data: bytes) -> pb.Unrolls | None:
    """The message, if these bytes are one."""
    try:
        return pb.Unrolls.FromString(data)
    except DecodeError:
        return None


CHANGES = (_flip, _truncate, _cut, _splice, _overwrite, _replace)


class _Fuzzer:
    """Numbers a good message as it should be and then changes a few bytes at random."""

    def __init__(self, good: pb.Unrolls, seed: int) -> None:
        self._good = good
        self._rng = random.Random(seed)
        self._next = 1
        self.heard: Counter[str] = Counter()

    def message(self) -> bytes:
        self._good.sequence = self._next
        data = bytearray(self._good.SerializeToString())
        for _ in range(self._rng.randint(1, 3)):
            self._rng.choice(CHANGES)(data, self._rng)
        return bytes(data)

    def hear(self, receipt: pb.Receipt) -> None:
        """Takes note of a receipt, and of the number that it has used up."""
        if receipt.status == pb.STATUS_REJECTED:
            self.heard[pb.Reason.Name(receipt.reason).removeprefix("REASON_").lower()] += 1
        else:
            self.heard[pb.Status.Name(receipt.status).removeprefix("STATUS_").lower()] += 1
        is_used = receipt.reason not in (pb.REASON_UNKNOWN_ACTOR, pb.REASON_SEQUENCE)
        self._next += is_used and receipt.sequence == self._next


REASONS = {name.removeprefix("REASON_").lower() for name, _ in pb.Reason.items()}
# Nobody is quarantined here, and what a message means is looked at, but not refused.
REASONS -= {"unspecified", "quarantined", "meaning"}


def _parameters() -> Parameters:
    return Parameters(messages.LEARNER, 3, 0.5, 10, [np.ones((2, 3), np.float32)])


def _settle(accounts: Accounts, arrival: Arrival) -> None:
    unrolls = len(arrival.unroll.frames) - arrival.offset
    accounts.settle(arrival.actor, arrival.incarnation, arrival.sequence, unrolls)


def test_fuzzed_messages_are_decoded_or_refused_and_nothing_else() -> None:
    accounts, ingest = Accounts(), Ingest(capacity=64)
    service = messages.service(accounts, ingest, on_violation="warn")
    service.publish(_parameters())
    incarnation = random.Random(0).getrandbits(64)
    hello = service.join(messages.join_request("fuzz", incarnation))
    good = messages.message(
        actor="fuzz",
        incarnation=incarnation,
        fingerprint=hello.fingerprint,
        parameter_version=3,
    )
    specs = codec.with_environments(hello.unroll_specs, hello.num_core_state_specs, num_envs=2)
    fuzzer = _Fuzzer(good, seed=0)

    async def fuzz() -> int:
        unreadable = 0
        for _ in range(FUZZED):
            message = _read(fuzzer.message())
            if message is None:
                unreadable += 1
                continue
            with suppress(codec.CodecError):
                codec.decode(message.tensors, specs)
            fuzzer.hear(await service.submit(message))
            while (arrival := ingest.get(timeout=0.0)) is not None:
                _settle(accounts, arrival)
        return unreadable

    unreadable = asyncio.run(fuzz())
    assert unreadable + fuzzer.heard.total() == FUZZED
    assert fuzzer.heard.keys() >= {"accepted", "duplicate", "unknown_actor", "tensor_size", "range"}
    totals = accounts.totals()
    assert totals.rejected == {each: fuzzer.heard[each] for each in REASONS & fuzzer.heard.keys()}
    assert totals.duplicates == fuzzer.heard["duplicate"]
    assert totals.received == totals.learned
    looked_at = service.get_status()
    assert looked_at.checked >= fuzzer.heard["accepted"]
    assert looked_at.violations
