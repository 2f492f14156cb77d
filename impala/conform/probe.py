"""An actor that plays nothing: it makes good messages for any learner, which cases spoil."""

import secrets
import time
from collections.abc import Iterable
from typing import Any

import grpc
import numpy as np

from actors.channel import LearnerChannel
from impala.conform.report import Failed
from impala.runtime.security import ClientSecurity
from protos import codec, policy
from protos.impala.v1 import learner_pb2 as pb
from protos.network import Network, NotDescribed

_FIRST, _MID = 0, 1
_POLL_SECONDS = 0.1


class Probe:
    """Calls of many actors, one after another, and messages that a learner has to accept.

    Args:
      learner: HOST:PORT or unix:PATH.
      security: the credentials to present.
      seconds: deadline of each call.
    """

    def __init__(self, learner: str, security: ClientSecurity, seconds: float) -> None:
        self._channel = LearnerChannel(learner, security)
        self._seconds = seconds
        self._run = secrets.token_hex(3)  # names differ from those of other runs of the kit
        self._actors = 0
        self.reply = pb.JoinReply()
        self.parameters = pb.Parameters()

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def connect(self) -> None:
        """Joins once, and waits for parameters.

        Raises:
          Failed: the learner does not answer as it should.
        """
        self.reply = self.join(self.request())
        if self.reply.finished:
            raise Failed("its training has finished: start it anew")
        end = time.monotonic() + self._seconds
        while not (pulled := self.pull()).HasField("parameters"):
            if time.monotonic() > end:
                raise Failed(f"it has no parameters after {self._seconds:g} s")
            time.sleep(_POLL_SECONDS)
        self.parameters = pulled.parameters

    # Calls.

    def request(self, **fields: Any) -> pb.JoinRequest:
        """Returns how an actor with a name of its own introduces itself."""
        self._actors += 1
        usual = {
            "protocol": codec.PROTOCOL_VERSION,
            "actor": f"conform-{self._run}-{self._actors}",
            "incarnation": secrets.randbits(63) + 1,
            "role": pb.ROLE_ACTOR,
            "version": "impala conform",
        }
        return pb.JoinRequest(**{**usual, **fields})

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Joins. Raises Failed if that is refused."""
        try:
            reply: pb.JoinReply = self._channel.stub.Join(request, **self._call())
        except grpc.RpcError as error:
            raise Failed(f"Join was answered with {_status(error)}") from None
        return reply

    def join_status(self, request: pb.JoinRequest) -> str:
        """Returns the gRPC status of a Join."""
        try:
            self._channel.stub.Join(request, **self._call())
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def pull(self, **fields: Any) -> pb.GetParametersReply:
        """Asks for parameters. Raises Failed if that is refused."""
        request = pb.GetParametersRequest(**fields)
        try:
            reply: pb.GetParametersReply = self._channel.stub.GetParameters(request, **self._call())
        except grpc.RpcError as error:
            raise Failed(f"GetParameters was answered with {_status(error)}") from None
        return reply

    def send(self, messages: Iterable[pb.Unrolls]) -> list[pb.Receipt]:
        """Sends messages in a stream of their own. Raises Failed unless each gets a receipt."""
        sent = list(messages)
        receipts: list[pb.Receipt] = []
        try:
            for receipt in self._channel.stub.StreamUnrolls(iter(sent), **self._call()):
                receipts.append(receipt)
        except grpc.RpcError as error:
            raise Failed(
                f"{len(receipts)} of {len(sent)} messages got a receipt, then the stream ended "
                f"with {_status(error)}"
            ) from None
        if len(receipts) != len(sent):
            raise Failed(f"{len(receipts)} of {len(sent)} messages got a receipt")
        return receipts

    def stream_status(self, *contents: bytes) -> str:
        """Returns the gRPC status with which a stream of these bytes ends."""
        try:
            for _ in self._channel.stream_of_bytes(iter(contents), **self._call()):
                pass
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def act(self, rows: Iterable[pb.ActRequest]) -> tuple[list[pb.ActReply], str]:
        """Sends rows in a stream. Returns the replies, and the status with which it ended."""
        replies: list[pb.ActReply] = []
        try:
            for reply in self._channel.stub.Act(iter(list(rows)), **self._call()):
                replies.append(reply)
        except grpc.RpcError as error:
            return replies, str(error.code().name)
        return replies, "OK"

    def _call(self) -> dict[str, Any]:
        return {"timeout": self._seconds, "metadata": self._channel.metadata()}

    # Messages.

    def joined(self) -> pb.JoinRequest:
        """Returns the request of another actor, which has joined."""
        request = self.request()
        self.join(request)
        return request

    def message(self, actor: pb.JoinRequest, sequence: int = 1, **fields: Any) -> pb.Unrolls:
        """Returns a good message of an actor; name a field to make it another."""
        usual = {
            "actor": actor.actor,
            "incarnation": actor.incarnation,
            "sequence": sequence,
            "fingerprint": self.reply.fingerprint,
            "learner_incarnation": self.parameters.learner_incarnation,
            "parameter_version": self.parameters.version,
            "num_envs": 1,
            "frames": [self.reply.unroll_length],
            "task": self.reply.task,
            "elapsed_seconds": 0.5,
        }
        if "tensors" not in fields:
            fields["tensors"] = codec.encode(self.arrays().values())
        return pb.Unrolls(**{**usual, **fields})

    def row(self, actor: pb.JoinRequest, **fields: Any) -> pb.ActRequest:
        """Returns a good row of an actor, which begins no unroll; name a field to change it."""
        arrays = self.arrays()
        states = list(arrays)[len(arrays) - self.reply.num_core_state_specs :]
        seen = [name for name in arrays if name.startswith("timestep/observation")]
        tensors = [arrays[name][0] for name in (*seen, "timestep/step_type")]
        usual = {
            "actor": actor.actor,
            "incarnation": actor.incarnation,
            "num_envs": 1,
            "tensors": codec.encode([*tensors, *(arrays[name] for name in states)]),
        }
        return pb.ActRequest(**{**usual, **fields})

    def acted_sizes(self) -> list[int]:
        """Returns the bytes of each tensor in the reply to a row."""
        arrays = self.arrays()
        states = list(arrays)[len(arrays) - self.reply.num_core_state_specs :]
        outputs = [arrays[name][0] for name in arrays if name.startswith("output/")]
        return [array.nbytes for array in (*outputs, *(arrays[name] for name in states))]

    def arrays(self, sequence: int = 1) -> dict[str, np.ndarray]:
        """Returns the tensors of a good message, by name: nothing happens in its episode.

        Args:
          sequence: of the message: in the first one, row 0 is the reset.
        """
        reply, length = self.reply, self.reply.unroll_length
        specs = codec.with_environments(reply.unroll_specs, reply.num_core_state_specs, 1)
        arrays = {
            spec.name: np.zeros(tuple(spec.shape), codec.numpy_dtype(spec.dtype)) for spec in specs
        }
        for space in reply.observation_space:
            arrays[space.name][:] = _value(space, arrays[space.name].shape[2:])
        arrays["timestep/discount"][:] = 1.0
        arrays["timestep/step_type"][:] = _MID
        if sequence == 1:
            arrays["timestep/step_type"][0] = _FIRST
        self._act(arrays, length)
        return arrays

    def _act(self, arrays: dict[str, np.ndarray], length: int) -> None:
        """Chooses actions as the network says."""
        reply = self.reply
        try:
            network, factors = Network(reply), policy.factors(reply)
        except NotDescribed:  # then its checks cannot know what is right
            for space in reply.action_space:
                arrays[space.name][:] = _value(space, arrays[space.name].shape[2:])
            return
        parameters = codec.decode(self.parameters.tensors, reply.parameter_specs)
        computed = network.unroll(
            parameters,
            {space.name: arrays[space.name] for space in reply.observation_space},
            arrays["timestep/step_type"],
            list(arrays.values())[len(arrays) - reply.num_core_state_specs :],
        )
        rng = np.random.default_rng()
        outputs, at = computed.outputs[:-1, 0], 0
        columns = []
        for described, factor in zip(reply.policy.factors, factors, strict=True):
            its = outputs[:, at : at + described.num_outputs]
            at += described.num_outputs
            if isinstance(factor, policy.EpsilonGreedy):
                its = np.concatenate([its, np.ones((length, 1), np.float32)], axis=-1)
            columns.append(its)
            space = next(each for each in reply.action_space if each.name == described.action)
            action = arrays[described.action]
            action[1:] = _drawn(factor, space, its, rng).reshape(action[1:].shape)
        arrays["output/policy"][1:, 0] = np.concatenate(columns, axis=-1)
        arrays["output/baseline"][1:] = computed.baseline[:-1]


def _drawn(
    factor: policy.Factor, space: pb.Space, parameters: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    if isinstance(factor, policy.Choices):
        each = [
            log_probs + rng.gumbel(size=log_probs.shape)
            for log_probs in factor.log_probs(parameters)
        ]
        return np.stack([np.argmax(of, axis=-1) for of in each], axis=-1) + np.array(space.start)
    assert isinstance(factor, policy.TanhNormal)
    means, log_deviations = factor.gaussian(parameters)
    points = np.tanh(means + np.exp(log_deviations) * rng.normal(size=means.shape))
    low, high = np.array(space.low), np.array(space.high)
    return (high + low) / 2 + (high - low) / 2 * points


def _value(space: pb.Space, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a value of a space: 0, or what is nearest to it."""
    if space.kind == pb.Space.KIND_BOX:
        low, high = (
            np.broadcast_to(np.array(bound), (max(len(bound), 1),))
            for bound in (space.low, space.high)
        )
        nearest = np.clip(0.0, low, high)
    else:
        nearest = np.array(space.start, np.float64)
    value: np.ndarray = (
        nearest.reshape(shape) if nearest.size > 1 else np.broadcast_to(nearest.reshape(()), shape)
    )
    return value


def _status(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
