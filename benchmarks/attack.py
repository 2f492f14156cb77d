"""What honest actors keep of their throughput while a learner is attacked at a fixed rate.

A real learner that asks for tokens serves synthetic actors without a pause. Beside them by turns,
in one run: an attacker, and a process that uses as much CPU time for nothing. So what is compared
is not what an attacker's own computing costs on the same machine, but what it costs the learner.
The attacker has a token, sends malformed unrolls of one environment, tries to join without a token,
and opens connections that stay silent.
"""

import asyncio
import collections
import contextlib
import itertools
import multiprocessing
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import NamedTuple

import grpc

from benchmarks import fleet
from impala.configs import Config
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

MALFORMED_PER_SECOND = 200
JOINS_PER_SECOND = 50  # without a token
CONNECTIONS_PER_SECOND = 20  # that stay silent
_OPEN_SECONDS = 5  # for each of those

_ROUNDS = 5
_SETTLE_SECONDS = 1.0  # at the beginning of each window; not measured
_ACTORS = 8
_ENVS = 4  # of each
_LANES = 5  # connections of the attacker, each with an equal share of it
_WARM_UPDATES = 20
_DEADLINE_SECONDS = 120.0  # that nothing should ever take
_TOKEN = "actor-token-of-the-benchmark"


class Endured(NamedTuple):
    """What was measured; rates are medians over the windows."""

    share: float  # of the throughput beside a harmless load that is left under attack
    attacked_unrolls_per_second: float
    harmless_unrolls_per_second: float
    attacker_cores: float  # CPU time per second of the attacker...
    harmless_cores: float  # ...and of the load that stands for it
    malformed_per_second: float  # as the attacker managed to send them
    joins_per_second: float
    connections_per_second: float


class _Load:
    """A process beside the honest actors that works while it is switched on."""

    def __init__(self, process: BaseProcess, is_on: Event):
        self.process = process
        self.is_on = is_on

    def cpu_seconds(self) -> float:
        assert self.process.pid is not None
        return fleet.cpu_seconds(self.process.pid)


class _Window(NamedTuple):
    unrolls_per_second: float
    cores: float  # of the load


def measure(config: Config, seconds: float) -> Endured:
    """Measures for `seconds` under attack, and for as long without."""
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as last_first:

        def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
            process = spawn.Process(target=target, args=arguments, daemon=True)
            process.start()
            last_first.callback(process.join)
            last_first.callback(process.kill)
            return process

        address, learner = last_first.enter_context(
            fleet.learner(config, tokens=f"actor {_TOKEN}\n")
        )
        received, is_warm = spawn.Value("Q"), spawn.Event()
        honest = start(_play, address, received, is_warm)
        attacking, burning = spawn.Event(), spawn.Event()
        sent = [spawn.Value("Q") for _ in range(3)]
        cores = spawn.Value("d")
        attacker = _Load(start(_attack, address, attacking, sent), attacking)
        harmless = _Load(start(_burn, burning, cores), burning)
        if not is_warm.wait(_DEADLINE_SECONDS):
            raise RuntimeError("The honest actors do not get anywhere.")

        def window(load: _Load) -> _Window:
            load.is_on.set()
            time.sleep(_SETTLE_SECONDS)
            unrolls, cpu, begun = received.value, load.cpu_seconds(), time.perf_counter()
            time.sleep(seconds / _ROUNDS)
            elapsed = time.perf_counter() - begun
            measured = _Window(
                (received.value - unrolls) / elapsed, (load.cpu_seconds() - cpu) / elapsed
            )
            load.is_on.clear()
            for process in (honest, attacker.process, harmless.process):
                if not process.is_alive():
                    raise RuntimeError(f"{process} has ended.")
            if learner.poll() is not None:
                raise RuntimeError(f"The learner ended with status {learner.returncode}.")
            return measured

        cores.value = window(attacker).cores  # what the harmless load takes first
        beside, under = [], []
        before, attacked_seconds = [count.value for count in sent], 0.0
        for _ in range(_ROUNDS):
            beside.append(window(harmless))
            begun = time.perf_counter()
            under.append(window(attacker))
            attacked_seconds += time.perf_counter() - begun
            cores.value = under[-1].cores
        rates = [
            (count.value - first) / attacked_seconds
            for count, first in zip(sent, before, strict=True)
        ]
    attacked, harmless_rate = (
        statistics.median(each.unrolls_per_second for each in windows)
        for windows in (under, beside)
    )
    return Endured(
        attacked / harmless_rate,
        attacked,
        harmless_rate,
        *(statistics.median(each.cores for each in windows) for windows in (under, beside)),
        *rates,
    )


class _Caller:
    """One who may send unrolls, on a connection of its own."""

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
        """Sends a message and waits for its receipt."""
        call = self.stub.StreamUnrolls(metadata=self._metadata)

        async def exchange(message: pb.Unrolls) -> pb.Receipt:
            await call.write(message)
            receipt = await asyncio.wait_for(call.read(), _DEADLINE_SECONDS)
            if receipt is grpc.aio.EOF:
                raise RuntimeError(f"The learner ended a stream: {await call.details()}")
            return receipt

        return exchange

    def message(self, hello: pb.JoinReply, num_envs: int) -> pb.Unrolls:
        """A good one in which nothing happens; its number is still missing."""
        return pb.Unrolls(
            actor=self.hello_request.actor,
            incarnation=self.hello_request.incarnation,
            fingerprint=hello.fingerprint,
            learner_incarnation=hello.learner_incarnation,
            num_envs=num_envs,
            frames=[hello.unroll_length] * num_envs,
            tensors=fleet.idle_tensors(hello, num_envs),
        )


# The honest actors.


def _play(address: str, received: "Synchronized[int]", is_warm: Event) -> None:
    async def play() -> None:
        await asyncio.gather(
            *(_play_one(address, f"honest-{i}", received, is_warm) for i in range(_ACTORS))
        )

    asyncio.run(play())


async def _play_one(address: str, name: str, received: "Synchronized[int]", is_warm: Event) -> None:
    """Sends messages for ever, each as soon as the one before has its receipt."""
    caller = _Caller(address, name)
    message = caller.message(await caller.join(), _ENVS)
    exchange = caller.stream()
    while True:
        message.sequence += 1
        receipt = await exchange(message)
        if receipt.status != pb.STATUS_ACCEPTED:
            raise RuntimeError(f"The learner did not take an honest message: {receipt}")
        received.value += _ENVS
        message.parameter_version = receipt.newest_version
        if receipt.newest_version >= _WARM_UPDATES:
            is_warm.set()


# The attacker, and what stands for it.


def _attack(address: str, is_on: Event, sent: "list[Synchronized[int]]") -> None:
    async def attack() -> None:
        lanes = (_attack_in_lane(address, f"attacker-{i}", is_on, sent) for i in range(_LANES))
        await asyncio.gather(*lanes)

    asyncio.run(attack())


async def _attack_in_lane(
    address: str, name: str, is_on: Event, sent: "list[Synchronized[int]]"
) -> None:
    caller = _Caller(address, name)
    exchange = caller.stream()
    malformed = itertools.cycle(_malformed(caller, await caller.join()))
    host, _, port = address.rpartition(":")
    silent: collections.deque[asyncio.StreamWriter] = collections.deque()

    async def send() -> None:
        receipt = await exchange(next(malformed))
        if receipt.status != pb.STATUS_REJECTED:
            raise RuntimeError(f"The learner took a malformed message: {receipt}")

    async def join() -> None:
        try:
            await caller.stub.Join(caller.hello_request, timeout=_DEADLINE_SECONDS)
        except grpc.aio.AioRpcError:
            return
        raise RuntimeError("The learner let someone join without a token.")

    async def connect() -> None:
        _, writer = await asyncio.open_connection(host, int(port))
        silent.append(writer)
        if len(silent) > _OPEN_SECONDS * CONNECTIONS_PER_SECOND / _LANES:
            silent.popleft().close()

    rates = (MALFORMED_PER_SECOND, JOINS_PER_SECOND, CONNECTIONS_PER_SECOND)
    await asyncio.gather(
        *(
            _repeat(do, rate / _LANES, is_on, count)
            for do, rate, count in zip((send, join, connect), rates, sent, strict=True)
        )
    )


def _malformed(caller: _Caller, hello: pb.JoinReply) -> list[pb.Unrolls]:
    """One in which a tensor is too short, and one that is only wrong where it is looked at last."""
    short, not_finite = (caller.message(hello, num_envs=1) for _ in range(2))
    short.tensors[-1] = short.tensors[-1][:-1]
    baseline = [spec.name for spec in hello.unroll_specs].index("output/baseline")
    not_finite.tensors[baseline] = b"\xff" * len(not_finite.tensors[baseline])
    return [short, not_finite]


async def _repeat(
    do: Callable[[], Awaitable[None]], rate: float, is_on: Event, count: "Synchronized[int]"
) -> None:
    """Does something so often per second while it is switched on, and makes up for delays."""
    while True:
        due = time.perf_counter()
        while is_on.is_set():
            await do()
            with count.get_lock():
                count.value += 1
            due += 1.0 / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await asyncio.sleep(0.05)


def _burn(is_on: Event, cores: "Synchronized[float]") -> None:
    """Uses so much CPU time per second while it is switched on."""
    while is_on.wait():
        begun, used = time.perf_counter(), time.process_time()
        while is_on.is_set():
            if time.process_time() - used < cores.value * (time.perf_counter() - begun):
                sum(range(10_000))
            else:
                time.sleep(0.002)
