"""Measures the rate at which a learner ingests experience, against a bare gRPC stream.

Synthetic actors in their own processes send the messages of an Atari actor: once to the real
server, service, ingest and mix, which check every message, find no violation, and copy it into
batches that are discarded; once to a server that only counts bytes. CPU time is of all programs:
on a machine with other work, its ratio is the one to trust.
"""

import asyncio
import multiprocessing
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import grpc
import gymnasium as gym
import numpy as np
import tree

from benchmarks.experience import random_batch
from benchmarks.setting import Options
from impala.config import schema as configs
from impala.parts import build
from impala.runtime import process
from impala.schedule import tasks
from impala.types import Parameters, StepType
from learner.data.ingest import Ingest
from learner.data.mix import Mix
from learner.data.rows import Layout
from learner.evaluation.snapshots import Snapshots
from learner.fleet.receipts import ReceiptProofs
from learner.fleet.records import Records
from learner.service.server import SERVICE_NAME, Server
from learner.service.service import LearnerService, Lineage
from learner.service.terms import terms
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_ACTORS = 2
_IN_FLIGHT = 2
_INCARNATION = 1
_START_SECONDS = 120.0  # for all actors to start


class _Rate(NamedTuple):
    """A rate of ingestion."""

    bytes_per_second: float
    unrolls_per_second: float
    cpu_seconds: float  # of all programs, for a gigabyte


def measure(config: configs.Config, options: Options) -> dict[str, float]:
    """Measures the learner's ingest and the bare stream alternately, twice each."""
    seconds = options.seconds / 2
    pairs = [(_with_learner(config, seconds), _with_bare_stream(config, seconds)) for _ in range(2)]
    ours, bare = map(_mean, zip(*pairs, strict=True))
    return {
        "ingest, MB/s": ours.bytes_per_second / 1e6,
        "ingest, unrolls/s": ours.unrolls_per_second,
        "bare stream, MB/s": bare.bytes_per_second / 1e6,
        "share of the bare stream": ours.bytes_per_second / bare.bytes_per_second,
        "CPU of a GB, ingest, ms": 1e3 * ours.cpu_seconds,
        "CPU of a GB, bare stream, ms": 1e3 * bare.cpu_seconds,
        "share of the bare stream, by CPU": bare.cpu_seconds / ours.cpu_seconds,
    }


def _mean(rates: Sequence[_Rate]) -> _Rate:
    return _Rate(*(sum(values) / len(values) for values in zip(*rates, strict=True)))


def _service(config: configs.Config) -> tuple[LearnerService, Records, Ingest, Layout]:
    """Returns a learner's service that has published version 0, with its parts."""
    played = tasks.make(config.environment, config.tasks)
    spaces = build.spaces(played)
    agent = build.agent(config.agent, *spaces)
    ingest = Ingest(config.learner.queue_unrolls)
    unroll_spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
    of_run = terms(config, agent.variables, unroll_spec, played, spaces)._replace(
        max_in_flight=_IN_FLIGHT
    )
    records = Records.begin(config)
    lineage = Lineage(_INCARNATION, {}, ReceiptProofs(secrets.token_bytes(), _INCARNATION))
    service = LearnerService(
        *(of_run, lineage, records, ingest, tasks.Schedule(config)), Snapshots(1, "never")
    )
    service.publish(Parameters(_INCARNATION, 0, 0.0, 0, [v.numpy() for v in agent.variables]))
    return service, records, ingest, Layout(unroll_spec)


def _with_learner(config: configs.Config, seconds: float) -> _Rate:
    process.tune_malloc()
    service, records, ingest, layout = _service(config)
    mix = Mix(ingest, config.mix, layout)
    server = Server(service, "127.0.0.1:0")
    address = server.start()
    stop = threading.Event()

    def consume() -> None:
        while not stop.is_set():
            prepared = mix.get(timeout=0.2)
            for part in prepared.provenance if prepared else ():
                records.accounts.settle(*part.account)

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        rate = _senders(config, address, seconds)
    finally:
        server.stop(0.0)
        stop.set()
        consumer.join()
        ingest.close()
        mix.close()
    if violations := records.violations.totals():
        raise RuntimeError(f"These are not messages of an actor: the learner counts {violations}.")
    return rate


def _with_bare_stream(config: configs.Config, seconds: float) -> _Rate:
    process.tune_malloc()
    bound: futures.Future[str] = futures.Future()
    is_over = threading.Event()

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> None:
        del request
        receipt = pb.Receipt(status=pb.STATUS_ACCEPTED).SerializeToString()
        while await context.read() is not grpc.aio.EOF:
            await context.write(receipt)

    async def join(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        del request, context
        return pb.JoinReply(learner_incarnation=_INCARNATION).SerializeToString()

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        handlers = {
            "Join": grpc.unary_unary_rpc_method_handler(join),
            "StreamUnrolls": grpc.stream_stream_rpc_method_handler(stream),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),)
        )
        bound.set_result(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        await asyncio.to_thread(is_over.wait)
        await server.stop(0.0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        return _senders(config, bound.result(timeout=30.0), seconds)
    finally:
        is_over.set()
        thread.join()


def _senders(config: configs.Config, address: str, seconds: float) -> _Rate:
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(_ACTORS + 1)
    with context.Pool(_ACTORS, _keep, (begin,)) as pool:
        jobs = [
            pool.apply_async(_send, (config, address, index, seconds)) for index in range(_ACTORS)
        ]
        begin.wait(timeout=_START_SECONDS)
        spent = time.process_time()
        time.sleep(seconds)
        spent = time.process_time() - spent
        sent = [job.get(timeout=_START_SECONDS) for job in jobs]
    size, unrolls, spent_sending = (sum(values) for values in zip(*sent, strict=True))
    return _Rate(size / seconds, unrolls / seconds, (spent + spent_sending) / (size / 1e9))


_begin: Barrier


def _keep(begin: Barrier) -> None:
    global _begin
    _begin = begin


def _send(
    config: configs.Config, address: str, index: int, seconds: float
) -> tuple[int, int, float]:
    """Runs one synthetic actor. Returns acknowledged bytes and unrolls, and the CPU seconds."""
    process.tune_malloc()
    channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
    stub = pb_grpc.LearnerStub(channel)
    incarnation = secrets.randbits(62) + 1
    hello = stub.Join(
        pb.JoinRequest(
            protocol=codec.PROTOCOL_VERSION,
            actor=f"synthetic-{index}",
            incarnation=incarnation,
            role=pb.ROLE_ACTOR,
        ),
        timeout=30,
    )
    first, following = _messages(config, f"synthetic-{index}", incarnation, hello)
    window = threading.Semaphore(_IN_FLIGHT)
    end = float("inf")

    def messages() -> Iterator[pb.Unrolls]:
        message = first
        while time.perf_counter() < end:
            if window.acquire(timeout=1.0):
                yield message
                following.sequence, message = message.sequence + 1, following

    receipts, spent = 0, 0.0
    for receipt in stub.StreamUnrolls(messages(), timeout=seconds + 60):
        if receipt.status != pb.STATUS_ACCEPTED:
            raise RuntimeError(f"The learner did not take a synthetic message: {receipt}")
        if end == float("inf"):  # connecting and the first message are not measured
            _begin.wait(timeout=_START_SECONDS)
            spent = time.process_time()
            end = time.perf_counter() + seconds
        elif time.perf_counter() < end:
            receipts += 1
        window.release()
    spent = time.process_time() - spent
    channel.close()
    return receipts * following.ByteSize(), receipts * following.num_envs, spent


def _messages(
    config: configs.Config, actor: str, incarnation: int, hello: pb.JoinReply
) -> tuple[pb.Unrolls, pb.Unrolls]:
    """Returns the unrolls of one group of environments, with random pixels and actions.

    The first begins with a reset. The second follows it, and itself: its row 0 is its row T.
    """
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    agent = build.agent(config.agent, *spaces)
    unroll = random_batch(config, agent, spaces).unroll
    rng = np.random.default_rng(0)
    unroll.timestep.discount[:] = 1.0
    unroll.output.action[:] = rng.integers(
        gym.spaces.flatdim(spaces[1]), size=unroll.output.action.shape
    )
    for rows in tree.flatten((unroll.timestep, unroll.output)):
        rows[0] = rows[-1]

    def message() -> pb.Unrolls:
        leaves = tree.flatten((unroll.timestep, unroll.output, unroll.core_state))
        return pb.Unrolls(
            actor=actor,
            incarnation=incarnation,
            sequence=1,
            fingerprint=hello.fingerprint,
            learner_incarnation=hello.learner_incarnation,
            num_envs=config.mix.batch_size,
            frames=[config.learner.unroll_length] * config.mix.batch_size,
            tensors=codec.encode(leaves),
        )

    follows = message()
    unroll.timestep.step_type[0] = StepType.FIRST
    return message(), follows
