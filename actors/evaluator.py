"""An evaluator's client of the learner: it gets snapshots to evaluate and reports the episodes."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from actors import messages
from actors.channel import failure
from actors.connection import CALL_SECONDS, POLL_SECONDS, PULL_SECONDS, Connection
from impala.types import Episode, Parameters
from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

_SIGN_OF_LIFE_SECONDS = 10.0  # between those of an evaluator at work


class Assignment(NamedTuple):
    """What an evaluator is to evaluate."""

    parameters: Parameters  # of a snapshot
    task: int
    seed: int  # of environments and actions


class EvaluatorClient(Connection):
    """An evaluator's session with the learner."""

    _role = pb.ROLE_EVALUATOR
    _is_idle = False  # the next assignment is wanted
    _assignment: Assignment | None = None  # not begun yet
    _snapshot: Parameters | None = None  # of the last assignment

    def next_assignment(self) -> Assignment:
        """Waits for something to evaluate. The assignment before counts as done."""
        with self._lock:
            self._is_idle = True
            self._wake()
            self._wait(lambda: self._assignment is not None)
            assignment, self._assignment = self._assignment, None
            assert assignment is not None
            return assignment

    def report_evaluation(self, assignment: Assignment, episodes: Sequence[Episode]) -> None:
        """Reports an assignment's episodes. If the learner cannot be reached, it is logged: the
        learner will assign them again.

        Raises:
          LearnerRefused: the learner would refuse this report again.
        """
        task, parameters = assignment.task, assignment.parameters
        session = self._session
        assert session.reply is not None
        evaluation = messages.evaluation(
            *(session.name, session.incarnation, session.reply, task, parameters, episodes)
        )
        try:
            self._channel.stub.ReportEvaluation(
                evaluation, timeout=CALL_SECONDS, metadata=self._channel.metadata()
            )
        except grpc.RpcError as error:
            self._session.raise_if_refused(failure(error))
            _log.warning(
                "%s could not report an evaluation: %s", self._session.name, failure(error)
            )

    def _serve(self, connection: int) -> None:
        """Asks for assignments, and gives signs of life, until the connection ends."""
        while self._goes_on(connection):
            with self._lock:
                request = pb.GetSnapshotRequest(actor=self._session.name, busy=not self._is_idle)
                if (held := self._snapshot) is not None:
                    request.learner_incarnation, request.frames = held.incarnation, held.frames
            with self._metrics.rpc_seconds.labels("GetSnapshot").time():
                reply = self._channel.stub.GetSnapshot(
                    request, timeout=PULL_SECONDS, metadata=self._channel.metadata()
                )
            with self._lock:
                if reply.HasField("parameters") and not request.busy:
                    self._assign(reply)
                if reply.finished:
                    self._session.finish()
                self._changed()
            if self._is_idle:
                self._sleep(POLL_SECONDS, until=lambda: not self._goes_on(connection))
            else:
                self._sleep(
                    _SIGN_OF_LIFE_SECONDS,
                    until=lambda: self._is_idle or not self._goes_on(connection),
                )

    def _assign(self, reply: pb.GetSnapshotReply) -> None:
        sent, held = reply.parameters, self._snapshot
        named = sent.learner_incarnation, sent.frames
        if held is None or named != (held.incarnation, held.frames):
            held = self._session.parameters_in(sent)
        self._snapshot = held
        self._assignment = Assignment(held, reply.task, reply.seed)
        self._is_idle = False
