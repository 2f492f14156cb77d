"""A caller that sends what no honest actor sends, and counts what it got receipts for."""

import secrets
from collections.abc import Iterator

import grpc
import numpy as np
from chaos.witness import Ledger

from benchmarks.fleet import idle_tensors
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_ENVS = 3
_SECONDS = 30.0  # for an answer


def send(address: str, name: str, reward: float, count: int) -> tuple[Ledger, list[pb.Receipt]]:
    """Sends messages in which one environment gives a reward; stops when the stream ends.

    Args:
      address: of the learner.
      name: of the caller.
      reward: in every row of environment 0.
      count: messages.

    Returns:
      What it did, and its receipts.
    """
    ledger, receipts = Ledger(name, secrets.randbits(62) + 1), []
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.LearnerStub(channel)
        hello = stub.Join(
            pb.JoinRequest(
                protocol=codec.PROTOCOL_VERSION,
                actor=name,
                incarnation=ledger.incarnation,
                role=pb.ROLE_ACTOR,
            ),
            timeout=_SECONDS,
        )
        message = pb.Unrolls(
            actor=name,
            incarnation=ledger.incarnation,
            fingerprint=hello.fingerprint,
            learner_incarnation=hello.learner_incarnation,
            num_envs=_ENVS,
            frames=[hello.unroll_length] * _ENVS,
            tensors=_tensors(hello, reward),
        )

        def messages() -> Iterator[pb.Unrolls]:
            for number in range(1, count + 1):
                message.sequence = number
                ledger.sent += _ENVS
                yield message

        try:
            for receipt in stub.StreamUnrolls(messages(), timeout=_SECONDS):
                receipts.append(receipt)
                ledger.sequence = receipt.sequence
                if receipt.status == pb.STATUS_ACCEPTED:
                    ledger.acknowledged += _ENVS
        except grpc.RpcError:
            pass  # the learner has had enough
    return ledger, receipts


def _tensors(hello: pb.JoinReply, reward: float) -> list[bytes]:
    tensors = idle_tensors(hello, _ENVS)
    place = [spec.name for spec in hello.unroll_specs].index("timestep/reward")
    rewards = np.frombuffer(tensors[place], np.float32).reshape(-1, _ENVS).copy()
    rewards[:, 0] = reward
    tensors[place] = rewards.tobytes()
    return tensors
