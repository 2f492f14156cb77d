"""Measures how many actors one learner can serve, with hundreds of synthetic ones.

The actors are coroutines in one process, each with its own connection. They join, send messages as
fast as they get receipts, and pull parameters when a receipt announces newer ones, but at most once
a second each (a real actor asks late in each unroll, and a second after its last request). They do
not act, which costs an actor most: so the learner is always saturated, and the measurement shows
how it divides its time.
"""

import asyncio
import contextlib
import multiprocessing
import pathlib
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import grpc
import numpy as np

from impala.config import values
from impala.config.schema import Config
from impala.types import StepType
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_ENVS = 4  # of a synthetic actor
_PULL_SECONDS = 1.0  # between the pulls of an actor
_WARM_UP_SECONDS = 5.0
_DEADLINE_SECONDS = 120.0  # that no call should ever take


class Served(NamedTuple):
    """The service that a fleet of some size got."""

    actors: int
    join_seconds: float  # until the last had joined, all starting at once
    unrolls_per_second: float
    bytes_per_second: float
    fairness: float  # (Σx)² / (n Σx²) of the receipts x of each actor: 1 if all are equal
    receipt_seconds: float  # from a message to its receipt: median
    slowest_receipt_seconds: float  # 99th percentile
    pulls_per_second: float
    pull_seconds: float  # median
    slowest_pull_seconds: float  # 99th percentile
    learner_megabytes: float  # resident
    learner_cores: float  # CPU time per second
    updates_per_second: float


def measure(config: Config, seconds: float, sizes: tuple[int, ...]) -> list[Served]:
    """Measures fleets one after another, each with its own learner."""
    return [_measure(config, seconds, size) for size in sizes]


def _measure(config: Config, seconds: float, num_actors: int) -> Served:
    spawn = multiprocessing.get_context("spawn")
    with learner(config) as (address, process), spawn.Pool(1) as pool:
        job = pool.apply_async(_fleet, (address, num_actors, seconds, process.pid))
        return job.get(timeout=2 * _DEADLINE_SECONDS + seconds)


@contextlib.contextmanager
def learner(
    config: Config, tokens: str | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Runs a learner of this configuration without an end.

    Args:
      config: of the run.
      tokens: contents of a file of tokens, if it is to require them.

    Yields:
      Its address, and its process.
    """
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as name:
        directory = pathlib.Path(name)
        (directory / "config.yaml").write_text(values.to_yaml(config))
        command = [
            *(sys.executable, "-m", "impala", "learner", "atari"),
            *("--logdir", f"{directory}/run", "--config", f"{directory}/config.yaml"),
            *("--listen", "127.0.0.1:0", "--total-frames", "1000000000000"),
        ]
        if tokens is not None:
            (directory / "tokens").write_text(tokens)
            command += ["--security.token-file", f"{directory}/tokens"]
        with open(directory / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield address(directory / "run", process), process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def address(logdir: pathlib.Path, learner: "subprocess.Popen[bytes]") -> str:
    """Returns the address of a learner that was just started."""
    path = logdir / "address"
    for _ in range(1800):
        if learner.poll() is not None:
            raise RuntimeError(f"The learner ended with status {learner.returncode}.")
        if path.exists() and (address := path.read_text().strip()):
            return address
        time.sleep(0.1)
    raise RuntimeError("No learner within three minutes.")


def _fleet(address: str, num_actors: int, seconds: float, learner: int) -> Served:
    return asyncio.run(run(address, num_actors, seconds, learner))


async def run(address: str, num_actors: int, seconds: float, learner: int) -> Served:
    """Measures a fleet for some seconds.

    Args:
      address: of the learner.
      num_actors: synthetic ones.
      seconds: to measure, after the first update and a warm-up.
      learner: its process id.
    """
    actors = [_Actor(address, f"synthetic-{index}") for index in range(num_actors)]
    start = time.perf_counter()
    await asyncio.gather(*(actor.join() for actor in actors))
    joined = time.perf_counter() - start
    running = [asyncio.create_task(actor.run()) for actor in actors]
    try:
        while await actors[0].version() == 0:  # the first update is compiled
            await unless_one_fails(running, 0.5)
        await unless_one_fails(running, _WARM_UP_SECONDS)
        for actor in actors:
            actor.begin()
        cpu, version, begun = cpu_seconds(learner), await actors[0].version(), time.perf_counter()
        await unless_one_fails(running, seconds)
        elapsed = time.perf_counter() - begun
        cores = (cpu_seconds(learner) - cpu) / elapsed
        updates = (await actors[0].version() - version) / elapsed
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(actor.close() for actor in actors))
    receipts = np.array([len(actor.receipt_seconds) for actor in actors], np.float64)
    receipt_seconds = np.concatenate([actor.receipt_seconds for actor in actors])
    pull_seconds = np.concatenate([actor.pull_seconds for actor in actors])
    total = receipts.sum()
    return Served(
        actors=num_actors,
        join_seconds=joined,
        unrolls_per_second=total * _ENVS / elapsed,
        bytes_per_second=total * actors[0].message_bytes / elapsed,
        fairness=total**2 / (num_actors * (receipts**2).sum()),
        receipt_seconds=float(np.median(receipt_seconds)),
        slowest_receipt_seconds=float(np.percentile(receipt_seconds, 99)),
        pulls_per_second=len(pull_seconds) / elapsed,
        pull_seconds=float(np.median(pull_seconds)),
        slowest_pull_seconds=float(np.percentile(pull_seconds, 99)),
        learner_megabytes=resident_bytes(learner) / 1e6,
        learner_cores=cores,
        updates_per_second=updates,
    )


async def unless_one_fails(running: list["asyncio.Task[None]"], seconds: float) -> None:
    """Waits; raises the error of an actor that ends before."""
    done, _ = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
        raise RuntimeError("A synthetic actor has ended.")


class _Actor:
    """A synthetic actor."""

    def __init__(self, address: str, name: str):
        self._name = name
        self._incarnation = secrets.randbits(62) + 1
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
            ],
        )
        self._stub = pb_grpc.LearnerStub(self._channel)
        self._held = (0, 0)  # learner incarnation and version of the parameters
        self.begin()

    def begin(self) -> None:
        """Starts the measurement."""
        self.receipt_seconds: list[float] = []
        self.pull_seconds: list[float] = []

    async def join(self) -> None:
        hello = await self._stub.Join(
            pb.JoinRequest(
                protocol=codec.PROTOCOL_VERSION,
                actor=self._name,
                incarnation=self._incarnation,
                role=pb.ROLE_ACTOR,
            ),
            timeout=_DEADLINE_SECONDS,
        )
        self._message = pb.Unrolls(
            actor=self._name,
            incarnation=self._incarnation,
            fingerprint=hello.fingerprint,
            learner_incarnation=hello.learner_incarnation,
            num_envs=_ENVS,
            frames=[hello.unroll_length] * _ENVS,
            tensors=idle_tensors(hello, _ENVS),
        )
        self.message_bytes = self._message.ByteSize()

    async def run(self) -> None:
        """Sends and pulls until it is cancelled."""
        call = self._stub.StreamUnrolls()
        pulled = 0.0
        while True:
            self._message.sequence += 1
            self._message.parameter_version = self._held[1]
            start = time.perf_counter()
            await call.write(self._message)
            receipt = await asyncio.wait_for(call.read(), _DEADLINE_SECONDS)
            self.receipt_seconds.append(time.perf_counter() - start)
            if receipt.status != pb.STATUS_ACCEPTED:
                raise RuntimeError(f"The learner did not take a synthetic message: {receipt}")
            is_newer = (receipt.learner_incarnation, receipt.newest_version) != self._held
            if is_newer and time.perf_counter() - pulled >= _PULL_SECONDS:
                pulled = time.perf_counter()
                await self._pull()
                self.pull_seconds.append(time.perf_counter() - pulled)

    async def version(self) -> int:
        """Returns the learner's newest version."""
        request = pb.GetParametersRequest()
        reply = await self._stub.GetParameters(request, timeout=_DEADLINE_SECONDS)
        return int(reply.parameters.version)

    async def _pull(self) -> None:
        incarnation, version = self._held
        reply = await self._stub.GetParameters(
            pb.GetParametersRequest(learner_incarnation=incarnation, newer_than=version),
            timeout=_DEADLINE_SECONDS,
        )
        if reply.HasField("parameters"):
            self._held = reply.parameters.learner_incarnation, reply.parameters.version

    async def close(self) -> None:
        await self._channel.close()


def idle_tensors(hello: pb.JoinReply, num_envs: int) -> list[bytes]:
    """Returns the tensors of a valid message in which nothing happens."""
    specs = codec.with_environments(hello.unroll_specs, hello.num_core_state_specs, num_envs)
    arrays = [np.zeros(spec.shape, codec.numpy_dtype(spec.dtype)) for spec in specs]
    for spec, array in zip(specs, arrays, strict=True):
        if spec.name == "timestep/step_type":
            array[:] = StepType.MID
        if spec.name == "timestep/discount":
            array[:] = 1.0
    return codec.encode(arrays)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has used."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100.0  # user and system, in USER_HZ


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
