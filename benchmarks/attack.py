"""The throughput of honest actors under attack, by kind of attack and rate.

A real learner that requires tokens serves synthetic actors without a pause. In alternating windows
of one run there is also either an attacker from another loopback address, without a token, or a
process that uses the same CPU time for nothing. So the comparison excludes the cost of the
attacker's own computation on the same machine. Each window has its own address, so that an attacker
starts with the full limits. At the end the learner's accounts are compared with those of the honest
actors.
"""

import asyncio
import collections
import contextlib
import itertools
import multiprocessing
import pathlib
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import NamedTuple

import grpc

from benchmarks import fleet
from impala.config.schema import Config
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_ROUNDS = 3  # windows of each kind under attack, and as many without
_PAUSE_SECONDS = 1.0  # between windows
_ACTORS = 8
_ENVS = 4  # of each
_WARM_UPDATES = 20
_DEADLINE_SECONDS = 120.0  # time limit of every operation
_TOKEN = "actor-token-of-the-benchmark"
_READER = "reader-token-of-the-benchmark"
_SILENT = 2000  # connections that a stranger holds open
_TIMEOUT = 0.5  # seconds that a stranger waits for anything
_WATCHES = 64  # of one connection, as many as HTTP/2 is told that there may be


class Endured(NamedTuple):
    """The cost of one kind of attack; rates are medians over the windows."""

    share: float  # of the throughput beside the harmless load
    produced_per_second: float  # calls, or connections tried where there is none
    stranger_cores: float  # CPU time per second of the stranger...
    harmless_cores: float  # ...and of the harmless load
    attacked_unrolls_per_second: float
    harmless_unrolls_per_second: float
    learner_megabytes_before: float  # resident
    learner_megabytes_after: float
    relay_megabytes_after: float


class Attack(NamedTuple):
    """A kind of attack."""

    act: "Callable[[str, str], contextlib.AbstractContextManager[Callable[[], None]]]"
    per_second: float | None  # as asked for; None: as many as possible


def measure(config: Config, seconds: float) -> tuple[dict[str, Endured], bool]:
    """Measures each kind of attack for `seconds`, and for as long without.

    Returns:
      The cost of each; and whether the accounts are exact in the end.
    """
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as last_first:

        def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
            process = spawn.Process(target=target, args=arguments, daemon=True)
            process.start()
            last_first.callback(process.join)
            last_first.callback(process.kill)
            return process

        tokens = f"actor {_TOKEN}\nreader {_READER}\n"
        address, learner = last_first.enter_context(fleet.learner(config, tokens=tokens))
        received, is_warm, is_over = spawn.Value("Q"), spawn.Event(), spawn.Event()
        honest = start(_play, address, received, is_warm, is_over)
        burning, cores = spawn.Event(), spawn.Value("d")
        harmless = start(_burn, burning, cores)
        if not is_warm.wait(_DEADLINE_SECONDS):
            raise RuntimeError("The honest actors do not get anywhere.")
        hosts = (f"127.0.1.{number}" for number in itertools.count(1))

        def window(load: BaseProcess, is_on: Event) -> tuple[float, float]:
            """Returns unrolls per second, and the cores that the load used."""
            assert load.pid is not None
            unrolls, cpu, begun = received.value, fleet.cpu_seconds(load.pid), time.perf_counter()
            is_on.set()
            time.sleep(seconds / _ROUNDS)
            elapsed = time.perf_counter() - begun
            measured = (
                (received.value - unrolls) / elapsed,
                (fleet.cpu_seconds(load.pid) - cpu) / elapsed,
            )
            is_on.clear()
            time.sleep(_PAUSE_SECONDS)
            for process in (honest, load):
                if not process.is_alive():
                    raise RuntimeError(f"{process} has ended.")
            if learner.poll() is not None:
                raise RuntimeError(f"The learner ended with status {learner.returncode}.")
            return measured

        def endure(kind: str) -> Endured:
            before = fleet.resident_bytes(learner.pid)
            under, beside, produced = [], [], []
            for _ in range(_ROUNDS):
                attacking, is_ready, count = spawn.Event(), spawn.Event(), spawn.Value("Q")
                stranger = start(_attack, kind, address, next(hosts), is_ready, attacking, count)
                is_ready.wait(_DEADLINE_SECONDS)
                begun = time.perf_counter()
                under.append(window(stranger, attacking))
                produced.append(count.value / (time.perf_counter() - begun - _PAUSE_SECONDS))
                stranger.kill()
                cores.value = under[-1][1]
                beside.append(window(harmless, burning))
            (attacked, used), (quiet, stood_for) = (
                map(statistics.median, zip(*each, strict=True)) for each in (under, beside)
            )
            return Endured(
                share=attacked / quiet,
                produced_per_second=statistics.median(produced),
                stranger_cores=used,
                harmless_cores=stood_for,
                attacked_unrolls_per_second=attacked,
                harmless_unrolls_per_second=quiet,
                learner_megabytes_before=before / 1e6,
                learner_megabytes_after=fleet.resident_bytes(learner.pid) / 1e6,
                relay_megabytes_after=sum(map(fleet.resident_bytes, _children(learner.pid))) / 1e6,
            )

        endured = {kind: endure(kind) for kind in ATTACKS}
        is_over.set()
        honest.join(_DEADLINE_SECONDS)
        return endured, _received(address) == received.value


def table(endured: dict[str, Endured]) -> str:
    """Returns the results as a table in Markdown."""
    lines = [
        "| kind | produced/s | share left | unrolls/s under attack, beside a harmless load "
        "| cores of the stranger | learner MB before, after | MB in front |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, each in endured.items():
        lines.append(
            f"| {kind} | {each.produced_per_second:,.0f} | {each.share:.3f} "
            f"| {each.attacked_unrolls_per_second:,.0f}, {each.harmless_unrolls_per_second:,.0f} "
            f"| {each.stranger_cores:.2f} "
            f"| {each.learner_megabytes_before:,.0f}, {each.learner_megabytes_after:,.0f} "
            f"| {each.relay_megabytes_after:.0f} |"
        )
    return "\n".join(lines)


def _children(pid: int) -> list[int]:
    path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


def _received(address: str) -> int:
    """Returns the unrolls received, according to the learner."""
    with grpc.insecure_channel(address) as channel:
        status = pb_grpc.LearnerStub(channel).GetStatus(
            pb.GetStatusRequest(),
            timeout=_DEADLINE_SECONDS,
            metadata=[("authorization", f"Bearer {_READER}")],
        )
    print(f"refused, by reason: {dict(status.refused)}")
    return int(status.received)


# The honest actors.


def _play(address: str, received: "Synchronized[int]", is_warm: Event, is_over: Event) -> None:
    async def play() -> None:
        actors = (
            _play_one(address, f"honest-{i}", received, is_warm, is_over) for i in range(_ACTORS)
        )
        await asyncio.gather(*actors)

    asyncio.run(play())


async def _play_one(
    address: str, name: str, received: "Synchronized[int]", is_warm: Event, is_over: Event
) -> None:
    """Sends messages until the end, each as soon as the previous one has its receipt."""
    caller = _Caller(address, name)
    message = caller.message(await caller.join(), _ENVS)
    exchange = caller.stream()
    while not is_over.is_set():
        message.sequence += 1
        receipt = await exchange(message)
        if receipt.status != pb.STATUS_ACCEPTED:
            raise RuntimeError(f"The learner did not take an honest message: {receipt}")
        received.value += _ENVS
        message.parameter_version = receipt.newest_version
        if receipt.newest_version >= _WARM_UPDATES:
            is_warm.set()


class _Caller:
    """An actor with its own connection."""

    def __init__(self, address: str, name: str):
        self.channel = grpc.aio.insecure_channel(
            address,
            options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)],
        )
        self.stub = pb_grpc.LearnerStub(self.channel)
        self.hello_request = pb.JoinRequest(
            protocol=codec.PROTOCOL_VERSION,
            actor=name,
            incarnation=secrets.randbits(62) + 1,
            role=pb.ROLE_ACTOR,
        )
        self._metadata = [("authorization", f"Bearer {_TOKEN}")]

    async def join(self) -> pb.JoinReply:
        return await self.stub.Join(
            self.hello_request, timeout=_DEADLINE_SECONDS, metadata=self._metadata
        )

    def stream(self) -> Callable[[pb.Unrolls], Awaitable[pb.Receipt]]:
        """Returns a function that sends a message and waits for its receipt."""
        call = self.stub.StreamUnrolls(metadata=self._metadata)

        async def exchange(message: pb.Unrolls) -> pb.Receipt:
            await call.write(message)
            receipt = await asyncio.wait_for(call.read(), _DEADLINE_SECONDS)
            if receipt is grpc.aio.EOF:
                raise RuntimeError(f"The learner ended a stream: {await call.details()}")
            return receipt

        return exchange

    def message(self, hello: pb.JoinReply, num_envs: int) -> pb.Unrolls:
        """Returns a valid message without its number, in which nothing happens."""
        return pb.Unrolls(
            actor=self.hello_request.actor,
            incarnation=self.hello_request.incarnation,
            fingerprint=hello.fingerprint,
            learner_incarnation=hello.learner_incarnation,
            num_envs=num_envs,
            frames=[hello.unroll_length] * num_envs,
            tensors=fleet.idle_tensors(hello, num_envs),
        )


# The attackers use HTTP/2 directly, as gRPC's client limits itself and cannot bind an address.


class _Line:
    """A connection to the learner that is reopened whenever it is closed."""

    def __init__(self, address: str, host: str) -> None:
        self._address, self._host = address, host
        self._socket: socket.socket | None = None
        self._stream = 0

    def call(self, method: str, data: bytes | None, reset: bool = False) -> None:
        """Begins a call; without a connection it only tries to connect."""
        try:
            if self._socket is None:
                self._socket = _connected(self._address, self._host)
                self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
                self._stream = -1
            self._stream += 2
            frames = _frame(_HEADERS, _END_HEADERS, self._stream, _headers(method))
            if data is not None:
                frames += _frame(_DATA, _END_STREAM, self._stream, data)
            if reset:
                frames += _frame(_RST_STREAM, 0, self._stream, struct.pack(">I", 8))
            self._socket.sendall(frames)
            self._socket.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                while self._socket.recv(1 << 16):
                    pass
                raise ConnectionResetError
            self._socket.settimeout(_TIMEOUT)
        except OSError:
            self.close()

    @property
    def calls(self) -> int:
        """Returns the number of calls made on this connection."""
        return (self._stream + 1) // 2 if self._socket is not None else 0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4  # frames
_END_STREAM, _END_HEADERS = 1, 4  # flags
_EMPTY = b"\0\0\0\0\0"  # a message with nothing in it
_JOIN = "/impala.v1.Learner/Join"
_WATCH = "/grpc.health.v1.Health/Watch"


def _frame(kind: int, flags: int, stream: int, contents: bytes) -> bytes:
    return (
        struct.pack(">I", len(contents))[1:] + struct.pack(">BBI", kind, flags, stream) + contents
    )


def _headers(method: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "learner",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    texts = ((name.encode(), value.encode()) for name, value in fields.items())
    return b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in texts
    )


def _connected(address: str, host: str) -> socket.socket:
    its_host, _, port = address.rpartition(":")
    return socket.create_connection((its_host, int(port)), _TIMEOUT, source_address=(host, 0))


@contextlib.contextmanager
def _refused(address: str, host: str) -> Iterator[Callable[[], None]]:
    """Joins without a token."""
    line = _Line(address, host)
    yield lambda: line.call(_JOIN, _EMPTY)
    line.close()


@contextlib.contextmanager
def _resets(address: str, host: str) -> Iterator[Callable[[], None]]:
    """Makes calls and resets them at once."""
    line = _Line(address, host)
    yield lambda: line.call(_JOIN, None, reset=True)
    line.close()


@contextlib.contextmanager
def _watches(address: str, host: str) -> Iterator[Callable[[], None]]:
    """Opens more and more connections that watch the health service."""
    lines = collections.deque([_Line(address, host)])

    def act() -> None:
        if lines[-1].calls >= _WATCHES:
            lines.append(_Line(address, host))
        if len(lines) > _SILENT:
            lines.popleft().close()
        lines[-1].call(_WATCH, _EMPTY)

    yield act
    for line in lines:
        line.close()


@contextlib.contextmanager
def _silent(address: str, host: str) -> Iterator[Callable[[], None]]:
    """Connects and sends nothing; beyond a limit the oldest connection is closed."""
    open_ones: collections.deque[socket.socket] = collections.deque()

    def act() -> None:
        with contextlib.suppress(OSError):
            open_ones.append(_connected(address, host))
        if len(open_ones) > _SILENT:
            open_ones.popleft().close()

    yield act
    for each in open_ones:
        each.close()


@contextlib.contextmanager
def _connects(address: str, host: str) -> Iterator[Callable[[], None]]:
    """Connects, sends the first bytes of a client, and closes."""

    def act() -> None:
        with contextlib.suppress(OSError), _connected(address, host) as line:
            line.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))

    yield act


ATTACKS = {
    "500 refused calls a second": Attack(_refused, 500.0),
    "refused calls": Attack(_refused, None),
    "stream resets": Attack(_resets, None),
    "Watch streams": Attack(_watches, None),
    "silent connections": Attack(_silent, None),
    "connections opened and closed": Attack(_connects, None),
}
"""Kind -> attack."""


def _attack(
    kind: str, address: str, host: str, is_ready: Event, is_on: Event, count: "Synchronized[int]"
) -> None:
    """Attacks while it is switched on, at the requested rate, and makes up for delays."""
    attack = ATTACKS[kind]
    with attack.act(address, host) as act:
        is_ready.set()
        is_on.wait()
        due = time.perf_counter()
        while is_on.is_set():
            act()
            count.value += 1
            if attack.per_second is not None:
                due += 1.0 / attack.per_second
                time.sleep(max(0.0, due - time.perf_counter()))
    time.sleep(_DEADLINE_SECONDS)  # until it is killed, so that its CPU time can be read


def _burn(is_on: Event, cores: "Synchronized[float]") -> None:
    """Uses the given CPU time per second while it is switched on."""
    while is_on.wait():
        begun, used = time.perf_counter(), time.process_time()
        while is_on.is_set():
            if time.process_time() - used < cores.value * (time.perf_counter() - begun):
                sum(range(10_000))
            else:
                time.sleep(0.002)
