"""Actors that play nothing and know to the unit what they sent and what they got receipts for."""

import dataclasses
import secrets
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np

from benchmarks.synthetic import idle_tensors
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_ENVS = 3
_SECONDS = 30.0  # for an answer
_OPTIONS = [  # a learner that has vanished is noticed
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclasses.dataclass
class Ledger:
    """What one incarnation did."""

    name: str
    incarnation: int
    sent: int = 0  # unrolls in messages that were given to the network at least once
    acknowledged: int = 0  # unrolls whose receipt said accepted or duplicate
    proof: bytes = b""  # of the last receipt
    sequence: int = 0  # the last message that got a receipt
    ended: float | None = None  # when it was killed, by the monotonic clock


class Witness(threading.Thread):
    """Sends until it is stopped, and reconnects as the wire protocol asks for.

    Args:
      address: of the learner.
      name: unique in the fleet.
      pause: seconds between a receipt and the next message.
    """

    def __init__(self, address: str, name: str, pause: float = 0.1) -> None:
        super().__init__(name=name, daemon=True)
        self._address = address
        self._pause = pause
        self._stopping = threading.Event()
        self._killed = threading.Event()
        self.error: BaseException | None = None
        self.ledgers = [self._born()]

    def kill(self) -> None:
        """Forgets everything, as a process does that gets SIGKILL; another one takes its place."""
        self.ledgers[-1].ended = time.monotonic()
        self._killed.set()

    def stop(self) -> None:
        """Ends when everything that was sent has a receipt."""
        self._stopping.set()
        self.join(timeout=2 * _SECONDS)

    def run(self) -> None:
        try:
            while not self._stopping.is_set() or self._owes():
                try:
                    with grpc.insecure_channel(self._address, options=_OPTIONS) as channel:
                        self._session(pb_grpc.LearnerStub(channel))
                except grpc.RpcError:
                    time.sleep(0.5)
                if self._killed.is_set():
                    self.ledgers.append(self._born())
                    self._killed.clear()
        except BaseException as error:
            self.error = error

    def _owes(self) -> bool:
        return self.ledgers[-1].sent > self.ledgers[-1].sequence * _ENVS

    def _born(self) -> Ledger:
        return Ledger(self.name, secrets.randbits(62) + 1)

    def _session(self, stub: pb_grpc.LearnerStub) -> None:
        ledger = self.ledgers[-1]
        message = _join(stub, ledger)
        answered = threading.Semaphore(1)

        def messages() -> Iterator[pb.Unrolls]:
            while answered.acquire(timeout=_SECONDS) and (self._owes() or not self._is_over()):
                message.sequence = ledger.sequence + 1
                ledger.sent = max(ledger.sent, message.sequence * _ENVS)
                yield message

        for receipt in stub.StreamUnrolls(messages()):
            if receipt.reason == pb.REASON_UNKNOWN_ACTOR:
                return  # join again, and send it again
            if receipt.status not in (pb.STATUS_ACCEPTED, pb.STATUS_DUPLICATE):
                raise AssertionError(f"{ledger.name} sent a good message and got {receipt}")
            if self._killed.is_set():
                return  # before it could take note of the receipt
            ledger.sequence = receipt.sequence
            ledger.acknowledged += _ENVS
            if receipt.acknowledged_unrolls != ledger.acknowledged:
                raise AssertionError(f"{ledger} was acknowledged otherwise: {receipt}")
            ledger.proof = receipt.proof
            time.sleep(self._pause)
            answered.release()

    def _is_over(self) -> bool:
        return self._stopping.is_set() or self._killed.is_set()


def poison(address: str, name: str, reward: float, count: int) -> tuple[Ledger, list[pb.Receipt]]:
    """Sends messages in which one environment gives a reward; stops when the stream ends.

    Args:
      address: of the learner.
      name: unique in the fleet.
      reward: at every step of environment 0.
      count: messages.

    Returns:
      What was done, and the receipts.
    """
    ledger, receipts = Ledger(name, secrets.randbits(62) + 1), []
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        stub = pb_grpc.LearnerStub(channel)
        message = _join(stub, ledger, reward)

        def messages() -> Iterator[pb.Unrolls]:
            for message.sequence in range(1, count + 1):
                ledger.sent += _ENVS
                yield message

        try:
            for receipt in stub.StreamUnrolls(messages(), timeout=_SECONDS):
                receipts.append(receipt)
                ledger.acknowledged += _ENVS * (receipt.status == pb.STATUS_ACCEPTED)
        except grpc.RpcError:
            pass  # the learner has had enough
    ledger.ended = time.monotonic()
    return ledger, receipts


def _join(stub: pb_grpc.LearnerStub, ledger: Ledger, reward: float = 0.0) -> pb.Unrolls:
    """Joins, and returns a message in which nothing happens but a reward to environment 0."""
    hello = stub.Join(
        pb.JoinRequest(
            protocol=codec.PROTOCOL_VERSION,
            actor=ledger.name,
            incarnation=ledger.incarnation,
            role=pb.ROLE_ACTOR,
            acknowledged_sequence=ledger.sequence,
            acknowledged_unrolls=ledger.acknowledged,
            proof=ledger.proof,
        ),
        timeout=_SECONDS,
    )
    tensors = idle_tensors(hello, _ENVS)
    place = [spec.name for spec in hello.unroll_specs].index("timestep/reward")
    rewards = np.frombuffer(tensors[place], np.float32).reshape(-1, _ENVS).copy()
    rewards[:, 0] = reward
    tensors[place] = rewards.tobytes()
    return pb.Unrolls(
        actor=ledger.name,
        incarnation=ledger.incarnation,
        fingerprint=hello.fingerprint,
        learner_incarnation=hello.learner_incarnation,
        num_envs=_ENVS,
        frames=[hello.unroll_length] * _ENVS,
        tensors=tensors,
    )
