"""A small real gRPC learner for tests: it says what it is told to and writes down what it hears."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, Self

import grpc
import numpy as np
import services

from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

Answer = Callable[[pb.Unrolls], pb.Receipt]


class FakeLearner(pb_grpc.LearnerServicer):
    """Listens on 127.0.0.1, or `address`; a context manager.

    Set `answer` to judge messages otherwise than by accepting them, clear `receipts` or `replies`
    to hold receipts or parameters back, set `finished`, `refusal` or `parameters` at any time. Set
    `permit` before anyone joins, to have rounds need permits: it gives a number, 0 for none yet, or
    -1 if it does not know the caller.
    """

    def __init__(
        self,
        *,
        incarnation: int = 5,
        fingerprint: str = "print",
        settings: dict[str, Any] | None = None,
        unroll_length: int = 4,
        unroll_specs: Sequence[pb.TensorSpec] = (),
        parameters: Sequence[np.ndarray] = (np.zeros(1, np.float32),),
        max_in_flight: int = 2,
        max_message_bytes: int = 1 << 20,
        port: int = 0,
    ) -> None:
        self.incarnation = incarnation
        self.fingerprint = fingerprint
        self.settings = settings or {}
        self.unroll_length = unroll_length
        self.unroll_specs = unroll_specs
        self.parameters = list(parameters)
        self.version = 0
        self.frames = 0
        self.max_in_flight = max_in_flight
        self.max_message_bytes = max_message_bytes
        self.finished = False
        self.refusal = ""
        self.answer: Answer = self.accepted
        self.permit: Callable[[pb.GetParametersRequest], int] | None = None
        self.receipts = threading.Event()
        self.receipts.set()
        self.replies = threading.Event()
        self.replies.set()

        self.changed = threading.Condition()  # notified when one of these grows
        self.joins: list[pb.JoinRequest] = []
        self.messages: list[pb.Unrolls] = []
        self.pulls: list[pb.GetParametersRequest] = []
        self.asked: list[pb.GetSnapshotRequest] = []
        self.snapshots: list[pb.GetSnapshotReply] = []  # what evaluators get, in order
        self.evaluations: list[pb.Evaluation] = []
        self.status = pb.RunStatus()

        self._server = grpc.server(
            futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)]
        )
        pb_grpc.add_LearnerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert self.port
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.receipts.set()
        self.replies.set()
        self._server.stop(grace=None).wait()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Waits until what was heard fulfils a condition."""

        def fulfilled() -> bool:
            with self.changed:
                return condition()

        services.wait_for("what the learner shall hear", fulfilled, seconds)

    def publish(self, version: int) -> None:
        with self.changed:
            self.parameters = [np.full_like(value, version) for value in self.parameters]
            self.version = version

    def receipt(self, message: pb.Unrolls, status: pb.Status, **fields: Any) -> pb.Receipt:
        return pb.Receipt(
            sequence=message.sequence,
            status=status,
            learner_incarnation=self.incarnation,
            newest_version=self.version,
            **fields,
        )

    def accepted(self, message: pb.Unrolls) -> pb.Receipt:
        return self.receipt(message, pb.STATUS_ACCEPTED)

    def _hear(self, heard: list, what: object) -> None:
        with self.changed:
            heard.append(what)
            self.changed.notify_all()

    # The service.

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        self._hear(self.joins, request)
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        return pb.JoinReply(
            protocol=request.protocol,
            learner_incarnation=self.incarnation,
            seed=1,
            settings=json.dumps(self.settings),
            fingerprint=self.fingerprint,
            unroll_length=self.unroll_length,
            unroll_specs=self.unroll_specs,
            parameter_specs=codec.specs(self.parameters),
            max_unrolls_in_flight=self.max_in_flight,
            max_message_bytes=self.max_message_bytes,
            limits=pb.Limits(num_envs=1000, info_names=64),
            finished=self.finished,
            needs_permits=self.permit is not None,
        )

    def StreamUnrolls(
        self, request_iterator: Iterator[pb.Unrolls], context: grpc.ServicerContext
    ) -> Iterator[pb.Receipt]:
        for message in request_iterator:
            self._hear(self.messages, message)
            self.receipts.wait()
            if not context.is_active():
                return
            yield self.answer(message)

    def GetParameters(
        self, request: pb.GetParametersRequest, context: grpc.ServicerContext
    ) -> pb.GetParametersReply:
        self._hear(self.pulls, request)
        self.replies.wait()
        with self.changed:
            number = self.permit(request) if self.permit is not None else 0
            if number < 0:
                context.abort(grpc.StatusCode.NOT_FOUND, "Join first.")
            if self.permit is not None and not number:
                return pb.GetParametersReply(finished=self.finished)
            if number:
                reply = self._parameters()
                reply.permit.CopyFrom(pb.Permit(number=number, version=self.version, task=7))
                return reply
            held = request.learner_incarnation, request.newer_than
            if held[0] == self.incarnation and held[1] >= self.version:
                return pb.GetParametersReply(finished=self.finished)
            return self._parameters()

    def _parameters(self) -> pb.GetParametersReply:
        return pb.GetParametersReply(
            parameters=pb.Parameters(
                learner_incarnation=self.incarnation,
                version=self.version,
                frames=self.frames,
                tensors=codec.encode(self.parameters),
            ),
            finished=self.finished,
        )

    def snapshot(self, frames: int, task: int = 0, seed: int = 0) -> None:
        """Adds a snapshot with the present parameters to those that evaluators get."""
        reply = pb.GetSnapshotReply(task=task, seed=seed)
        reply.parameters.CopyFrom(self._parameters().parameters)
        reply.parameters.frames = frames
        self.snapshots.append(reply)

    def GetSnapshot(
        self, request: pb.GetSnapshotRequest, context: grpc.ServicerContext
    ) -> pb.GetSnapshotReply:
        self._hear(self.asked, request)
        if not self.joins:
            context.abort(grpc.StatusCode.NOT_FOUND, "join again")
        reply = pb.GetSnapshotReply()
        with self.changed:
            if self.snapshots and not request.busy:
                reply = self.snapshots.pop(0)
        reply.finished = self.finished
        held = request.learner_incarnation, request.frames
        if held == (reply.parameters.learner_incarnation, reply.parameters.frames):
            del reply.parameters.tensors[:]
        return reply

    def ReportEvaluation(
        self, request: pb.Evaluation, context: grpc.ServicerContext
    ) -> pb.EvaluationReceipt:
        self._hear(self.evaluations, request)
        if self.refusal:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal)
        return pb.EvaluationReceipt()

    def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> pb.RunStatus:
        if self.refusal:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, self.refusal)
        return self.status
