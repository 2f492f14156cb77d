"""A caller with credentials that sends absurd but well-formed messages, drawn at random.

It is no actor and knows the protocol well: it joins, numbers its messages and takes note of every
receipt, so that what the learner accepted from it can be compared with the learner's accounts.
Without `absurd` it sends as many good messages in which nothing happens.
"""

import argparse
import collections
import dataclasses
import json
import math
import pathlib
import queue
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import cast

import grpc
import numpy as np

from benchmarks.fleet import idle_tensors
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_SECONDS = 20.0  # for an answer
_MOST_ENVS = 4  # of a message, unless that is what is absurd about it
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    # It comes back at once, however often its connection is closed.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
]
_FLOATS = [sign * 10.0**power for power in range(-45, 39) for sign in (1, -1)]
_FLOATS += [3.4028235e38, -3.4028235e38, math.inf, -math.inf, math.nan]
_INTEGERS = [0, *(2**power for power in range(64)), *(2**power - 1 for power in range(2, 65))]
_NAMES = ("", " ", "[/x]", "[red]x", "\x1b[2J", "\u202e", "..", "/etc/passwd", "x" * 10_000, "\0")


@dataclasses.dataclass
class Report:
    """What it did and what it was told."""

    sent: int = 0  # messages and joins
    heard: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    accepted: dict[str, int] = dataclasses.field(default_factory=dict)  # unrolls, by incarnation
    unsure: dict[str, int] = dataclasses.field(default_factory=dict)  # sent, but no receipt came
    seconds: float = 0.0


class Caller:
    """Sends `count` messages at a rate, whatever it is answered.

    Args:
      address: of the learner.
      token: its credential.
      name: that it may use.
      others: names of honest actors, which it may not use.
      seed: of everything it draws.
    """

    def __init__(
        self, address: str, token: str, name: str, others: list[str], seed: int, absurd: bool
    ) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = pb_grpc.LearnerStub(self._channel)
        self._metadata = [("authorization", f"Bearer {token}")]
        self._name, self._others = name, others
        self._rng = random.Random(seed)
        self._absurd = absurd
        self._hello: pb.JoinReply | None = None  # the last one
        self._must_join = True
        self._incarnation = 0
        self._sequence = 0  # the last one that was used up
        self._acknowledged = pb.Receipt()
        self._newest = (0, 0)  # incarnation and version of the parameters
        self._stream: _Stream | None = None
        self.report = Report()

    def run(self, count: int, per_second: float) -> None:
        """Sends them all."""
        start = time.monotonic()
        while self.report.sent < count:
            due = start + self.report.sent / per_second
            time.sleep(max(0.0, due - time.monotonic()))
            self._send_one()
        self.report.seconds = time.monotonic() - start
        self._channel.close()

    def _send_one(self) -> None:
        self.report.sent += 1
        must_join = self._must_join and not (self._absurd and self._rng.random() < 0.5)
        if self._hello is None or must_join or (self._absurd and self._rng.random() < 0.02):
            self._join()
            return
        message, is_mine = self._message()
        if self._stream is None:
            self._stream = _Stream(self._stub, self._metadata)
        incarnation = str(message.incarnation)
        try:
            receipt = self._stream.exchange(message)
        except grpc.RpcError as error:
            self._stream = None
            self.report.heard[f"stream ended: {error.code().name}"] += 1
            lost = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            if is_mine and error.code() in lost and message.num_envs <= _MOST_ENVS:
                unsure = self.report.unsure
                unsure[incarnation] = unsure.get(incarnation, 0) + message.num_envs
            if error.code() != grpc.StatusCode.INVALID_ARGUMENT:
                self._must_join = True
            return
        self._take(receipt, message, is_mine)

    def _take(self, receipt: pb.Receipt, message: pb.Unrolls, is_mine: bool) -> None:
        reason = pb.Reason.Name(receipt.reason) if receipt.reason else ""
        self.report.heard[f"{pb.Status.Name(receipt.status)} {reason}".strip()] += 1
        if receipt.reason == pb.REASON_UNKNOWN_ACTOR and is_mine:
            self._must_join = True
        if receipt.status == pb.STATUS_FINISHED:
            self.report.sent = sys.maxsize // 2
        if receipt.reason == pb.REASON_UNKNOWN_ACTOR or not is_mine:
            return
        self._acknowledged = receipt
        if receipt.sequence == self._sequence + 1:
            self._sequence = receipt.sequence
        if receipt.status == pb.STATUS_ACCEPTED:
            accepted, key = self.report.accepted, str(message.incarnation)
            accepted[key] = accepted.get(key, 0) + message.num_envs
        self._newest = (receipt.learner_incarnation, receipt.newest_version)

    def _join(self) -> None:
        again = self._incarnation and self._rng.random() < 0.7
        request = pb.JoinRequest(
            protocol=codec.PROTOCOL_VERSION,
            actor=self._name,
            incarnation=self._incarnation if again else self._rng.getrandbits(62) + 1,
            role=pb.ROLE_ACTOR,
        )
        if again:
            request.acknowledged_sequence = self._acknowledged.sequence
            request.acknowledged_unrolls = self._acknowledged.acknowledged_unrolls
            request.proof = self._acknowledged.proof
        if self._absurd and self._hello is not None:
            self._spoil_join(request)
        try:
            hello = self._stub.Join(request, timeout=_SECONDS, metadata=self._metadata)
        except grpc.RpcError as error:
            self.report.heard[f"join: {error.code().name}"] += 1
            return
        self.report.heard["join: OK"] += 1
        if request.actor != self._name:
            return
        if request.incarnation != self._incarnation:
            self._sequence, self._acknowledged = 0, pb.Receipt()
        self._sequence = max(self._sequence, request.acknowledged_sequence)
        self._incarnation, self._hello = request.incarnation, hello
        # Behind the largest numbers there are none: that incarnation has come to its end.
        self._must_join = self._sequence >= 2**63
        if self._must_join:
            self._incarnation = 0
        self._newest = (hello.learner_incarnation, 0)
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _spoil_join(self, request: pb.JoinRequest) -> None:
        rng = self._rng
        match rng.randrange(5):
            case 0:  # a claim of receipts that never were
                request.acknowledged_unrolls = rng.choice(_INTEGERS)
            case 1:
                request.acknowledged_sequence = rng.choice(_INTEGERS)
                request.acknowledged_unrolls = rng.choice(_INTEGERS)
                request.proof = rng.randbytes(rng.choice([0, 1, 16, 32, 1000]))
            case 2:
                request.actor = self._foreign_name()
            case 3:
                request.role = cast(pb.Role, rng.choice([0, 2, 3, 2**31 - 1]))
            case 4:
                request.protocol.major = rng.choice([0, 1, 3, 2**32 - 1])

    def _foreign_name(self) -> str:
        return self._rng.choice([*self._others, *_NAMES])

    def _message(self) -> tuple[pb.Unrolls, bool]:
        """The next message, and whether it goes to the account of this caller's incarnation."""
        assert self._hello is not None
        num_envs = 1 if not self._absurd else self._rng.choice([1, 1, 2, _MOST_ENVS])
        message = pb.Unrolls(
            actor=self._name,
            incarnation=self._incarnation,
            sequence=min(self._sequence + 1, 2**64 - 1),
            fingerprint=self._hello.fingerprint,
            learner_incarnation=self._newest[0],
            parameter_version=self._newest[1],
            num_envs=num_envs,
            frames=[self._hello.unroll_length] * num_envs,
            tensors=idle_tensors(self._hello, num_envs),
            elapsed_seconds=0.5,
        )
        if self._absurd:
            for _ in range(self._rng.choice([1, 1, 1, 2, 3])):
                self._rng.choice(_SPOILERS)(self, message)
        is_mine = (message.actor, message.incarnation) == (self._name, self._incarnation)
        return message, is_mine

    # What is absurd about a message.

    def _value(self, message: pb.Unrolls) -> None:
        """One number, or all, of a float tensor."""
        assert self._hello is not None
        specs = codec.with_environments(
            self._hello.unroll_specs, self._hello.num_core_state_specs, message.num_envs
        )
        floats = [i for i, spec in enumerate(specs) if spec.dtype == pb.DTYPE_FLOAT32]
        place = self._rng.choice(floats)
        if place >= len(message.tensors) or len(message.tensors[place]) % 4:
            return  # something else is wrong with it already
        array = np.frombuffer(message.tensors[place], np.float32).copy()
        where = slice(None) if self._rng.random() < 0.3 else self._rng.randrange(max(1, array.size))
        if array.size:
            with np.errstate(over="ignore"):
                array[where] = np.float32(self._rng.choice(_FLOATS))
        message.tensors[place] = array.tobytes()

    def _integer_tensor(self, message: pb.Unrolls) -> None:
        """Random bytes where step types, actions and observations are."""
        if message.tensors:
            place = self._rng.randrange(len(message.tensors))
            message.tensors[place] = self._rng.randbytes(len(message.tensors[place]))

    def _size(self, message: pb.Unrolls) -> None:
        if message.tensors:
            place = self._rng.randrange(len(message.tensors))
            message.tensors[place] = message.tensors[place][: self._rng.randrange(100)]

    def _count(self, message: pb.Unrolls) -> None:
        message.tensors.extend([b"x"] * self._rng.choice([1, 10, 1000]))

    def _frames(self, message: pb.Unrolls) -> None:
        number = min(self._rng.choice(_INTEGERS), 2**32 - 1)
        message.frames[self._rng.randrange(len(message.frames))] = number

    def _num_envs(self, message: pb.Unrolls) -> None:
        message.num_envs = min(self._rng.choice(_INTEGERS), 2**32 - 1)

    def _version(self, message: pb.Unrolls) -> None:
        message.parameter_version = self._rng.choice(_INTEGERS)
        if self._rng.random() < 0.5:
            message.learner_incarnation = self._rng.choice(_INTEGERS)

    def _identity(self, message: pb.Unrolls) -> None:
        if self._rng.random() < 0.5:
            message.actor = self._foreign_name()
        else:
            message.incarnation = self._rng.choice(_INTEGERS)

    def _fingerprint(self, message: pb.Unrolls) -> None:
        message.fingerprint = self._rng.choice(_NAMES)

    def _sequence_number(self, message: pb.Unrolls) -> None:
        message.sequence = self._rng.choice(_INTEGERS)

    def _task(self, message: pb.Unrolls) -> None:
        message.task = min(self._rng.choice(_INTEGERS), 2**32 - 1)

    def _time(self, message: pb.Unrolls) -> None:
        message.elapsed_seconds = _float32(self._rng.choice(_FLOATS))
        message.waited_seconds = _float32(self._rng.choice(_FLOATS))

    def _episode(self, message: pb.Unrolls) -> None:
        for _ in range(self._rng.choice([1, 2, 100, 3000])):
            message.episodes.add(
                episode_return=_float32(self._rng.choice(_FLOATS)),
                length=min(self._rng.choice(_INTEGERS), 2**32 - 1),
                frames=min(self._rng.choice(_INTEGERS), 2**32 - 1),
            )

    def _info(self, message: pb.Unrolls) -> None:
        """Names that no run has seen before, and such as no terminal should see."""
        for _ in range(self._rng.choice([1, 9])):
            episode = message.episodes.add(episode_return=0.0, length=9, frames=9)
            for _ in range(self._rng.choice([1, 64, 500])):
                name = self._rng.choice([*_NAMES, f"new-{self._rng.getrandbits(64):x}"])
                episode.info[name.replace("\0", "")] = _float32(self._rng.choice(_FLOATS))

    def _fault(self, message: pb.Unrolls) -> None:
        for _ in range(self._rng.choice([1, 1000])):
            message.environment_faults.add(
                environment=min(self._rng.choice(_INTEGERS), 2**32 - 1),
                kind=self._rng.choice([0, 1, 2, 77]),
                detail=self._rng.choice(_NAMES),
            )


_SPOILERS: list[Callable[[Caller, pb.Unrolls], None]] = [
    *[Caller._value] * 6,
    *(Caller._integer_tensor, Caller._size, Caller._count, Caller._frames, Caller._frames),
    *(Caller._num_envs, Caller._version, Caller._identity, Caller._fingerprint),
    *(Caller._sequence_number, Caller._task, Caller._time, Caller._episode, Caller._info),
    Caller._fault,
]


def _float32(value: float) -> float:
    """A float that fits the wire's."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


class _Stream:
    """A stream on which each message waits for the receipt of the one before."""

    def __init__(self, stub: pb_grpc.LearnerStub, metadata: list[tuple[str, str]]) -> None:
        self._queue: queue.SimpleQueue[pb.Unrolls | None] = queue.SimpleQueue()
        self._call = stub.StreamUnrolls(self._messages(), metadata=metadata, timeout=600.0)

    def _messages(self) -> Iterator[pb.Unrolls]:
        while (message := self._queue.get()) is not None:
            yield message

    def exchange(self, message: pb.Unrolls) -> pb.Receipt:
        """Sends it and waits for its receipt; RpcError when the stream has ended."""
        self._queue.put(message)
        try:
            return next(self._call)
        except StopIteration:
            raise _Ended from None
        except grpc.RpcError:
            self._queue.put(None)
            raise

    def close(self) -> None:
        self._queue.put(None)
        self._call.cancel()


class _Ended(grpc.RpcError):
    """The learner closed the stream without an error."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


def main() -> None:
    """Calls, and writes the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--token", required=True)
    parser.add_argument("--name", default="mallory")
    parser.add_argument("--others", nargs="*", default=[])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--per-second", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--harmless", action="store_true")
    arguments = parser.parse_args()
    caller = Caller(
        *(arguments.address, arguments.token, arguments.name, arguments.others, arguments.seed),
        absurd=not arguments.harmless,
    )
    try:
        caller.run(arguments.count, arguments.per_second)
    finally:
        arguments.report.write_text(json.dumps(vars(caller.report)))


if __name__ == "__main__":
    main()
