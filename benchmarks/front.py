"""Measures what actors cost a learner beside their unrolls: pulls, joins, status and memory.

The learner is a real one that waits for unrolls, with the process in front of it; the actors are
coroutines of one process, with a connection each. Every pull finds newer parameters.
"""

import asyncio
import contextlib
import functools
import multiprocessing
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import grpc

from benchmarks import fleet
from impala.config.schema import Config
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_CALLERS = 8  # at once, where as many calls as possible are made
_JOINING = 100
_CALL_SECONDS = 60.0


class Cost(NamedTuple):
    """What calls of one kind cost."""

    per_second: float
    megabytes_per_second: float
    cpu_milliseconds: float  # of the learner and the process in front, for a call
    learner_cores: float  # of both, beyond those of a learner without calls


class Front(NamedTuple):
    """What actors cost a learner that has nothing else to do."""

    parameter_megabytes: float
    joins: Cost
    kilobytes_of_an_actor: float  # resident, of both processes, with an open stream and no message
    status: Cost
    pulls: Cost


def measure(config: Config, seconds: float) -> Front:
    """Measures each kind of call for so many seconds, as many of them as possible."""
    spawn = multiprocessing.get_context("spawn")
    with fleet.learner(config) as (address, process), spawn.Pool(1) as pool:
        arguments = (address, process.pid, seconds)
        return pool.apply_async(_measured, arguments).get(timeout=600.0 + 10.0 * seconds)


def _measured(address: str, pid: int, seconds: float) -> Front:
    return asyncio.run(_all(address, pid, seconds))


async def _all(address: str, pid: int, seconds: float) -> Front:
    async with contextlib.AsyncExitStack() as stack:

        async def connect(count: int) -> list[pb_grpc.LearnerStub]:
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(
                        address,
                        options=[
                            ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
                            ("grpc.max_receive_message_length", -1),
                        ],
                    )
                )
                for _ in range(count)
            ]
            return [pb_grpc.LearnerStub(channel) for channel in channels]

        (first,) = await connect(1)
        size = len((await first.GetParameters(pb.GetParametersRequest())).SerializeToString())
        await _cost(pid, 2.0, 0.0, 0, [])  # it has started
        idle = (await _cost(pid, seconds, 0.0, 0, [])).learner_cores
        cost = functools.partial(_cost, pid, seconds, idle)

        callers = await connect(_CALLERS)
        status = await cost(0, [functools.partial(_status, stub) for stub in callers])
        pulls = await cost(size, [functools.partial(_pull, stub) for stub in callers])

        # Joins, each over a connection of its own, whose streams stay open.
        before, cpu, begun = _resident(pid), _cpu(pid), time.perf_counter()
        stubs = await connect(_JOINING)
        await asyncio.gather(*(_join(stub, place) for place, stub in enumerate(stubs)))
        elapsed = time.perf_counter() - begun
        cpu = _cpu(pid) - cpu - idle * elapsed
        streams = [stub.StreamUnrolls() for stub in stubs]
        await asyncio.sleep(1.0)
        resident = (_resident(pid) - before) / len(stubs)
        for stream in streams:
            stream.cancel()
        number = len(stubs)
        joins = Cost(number / elapsed, 0.0, 1e3 * cpu / number, cpu / elapsed)
    return Front(size / 1e6, joins, resident / 1e3, status, pulls)


async def _cost(
    pid: int, seconds: float, idle: float, size: int, calls: Sequence[Callable[[], Awaitable[None]]]
) -> Cost:
    """Makes calls again and again, each list entry by itself."""
    made = 0

    async def repeat(call: Callable[[], Awaitable[None]]) -> None:
        nonlocal made
        while True:
            await call()
            made += 1

    cpu, begun = _cpu(pid), time.perf_counter()
    running = [asyncio.create_task(repeat(call)) for call in calls]
    await fleet.unless_one_fails(running, seconds) if running else await asyncio.sleep(seconds)
    elapsed, cpu = time.perf_counter() - begun, _cpu(pid) - cpu
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    cores = cpu / elapsed - idle
    rate = made / elapsed
    return Cost(rate, rate * size / 1e6, 1e3 * cores / rate if made else 0.0, cores)


async def _status(stub: pb_grpc.LearnerStub) -> None:
    await stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_SECONDS)


async def _pull(stub: pb_grpc.LearnerStub) -> None:
    reply = await stub.GetParameters(pb.GetParametersRequest(), timeout=_CALL_SECONDS)
    assert reply.HasField("parameters")


async def _join(stub: pb_grpc.LearnerStub, place: int) -> None:
    await stub.Join(
        pb.JoinRequest(
            protocol=codec.PROTOCOL_VERSION,
            actor=f"synthetic-{place}",
            incarnation=1 + place,
            role=pb.ROLE_ACTOR,
        ),
        timeout=_CALL_SECONDS,
    )


def _processes(pid: int) -> list[int]:
    """Returns a process and those that it has started."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for task in tasks for child in task.read_text().split())]


def _cpu(pid: int) -> float:
    return sum(map(fleet.cpu_seconds, _processes(pid)))


def _resident(pid: int) -> int:
    return sum(map(fleet.resident_bytes, _processes(pid)))
