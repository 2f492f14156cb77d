"""Synthetic actors, which do not act: they send as fast as they get receipts."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import numpy as np

from impala.types import StepType
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

ENVS = 4  # of each actor
_DEADLINE_SECONDS = 120.0  # that no call should ever take


async def receipts(address: str, name: str, token: str | None = None) -> AsyncIterator[pb.Receipt]:
    """Joins a learner over a connection of its own, sends without a pause, and yields receipts.

    Raises:
      RuntimeError: a message was not accepted.
    """
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    metadata = [("authorization", f"Bearer {token}")] if token else None
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub = pb_grpc.LearnerStub(channel)
        join = pb.JoinRequest(
            protocol=codec.PROTOCOL_VERSION, actor=name, incarnation=1, role=pb.ROLE_ACTOR
        )
        hello = await stub.Join(join, timeout=_DEADLINE_SECONDS, metadata=metadata)
        message = pb.Unrolls(
            actor=name,
            incarnation=1,
            fingerprint=hello.fingerprint,
            learner_incarnation=hello.learner_incarnation,
            num_envs=ENVS,
            frames=[hello.unroll_length] * ENVS,
            tensors=idle_tensors(hello, ENVS),
        )
        call = stub.StreamUnrolls(metadata=metadata)
        while True:
            message.sequence += 1
            await call.write(message)
            receipt = await asyncio.wait_for(call.read(), _DEADLINE_SECONDS)
            if receipt is grpc.aio.EOF or receipt.status != pb.STATUS_ACCEPTED:
                raise RuntimeError(f"The learner did not take a synthetic message: {receipt}")
            message.parameter_version = receipt.newest_version
            yield receipt


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
