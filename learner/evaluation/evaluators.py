"""The learner's service for evaluators: snapshots out, evaluations in."""

import queue
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from impala.config.schema import MOST_EVALUATION_EPISODES
from impala.types import Episode
from learner.data.ingest import Rejected, Validator
from learner.evaluation.snapshots import Snapshots
from learner.fleet.records import Records
from learner.fleet.refusals import InvalidRequest, Unavailable, UnknownActor, check_name
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_MAX_EVALUATIONS = 64  # that may wait to be written


class EvaluationReport(NamedTuple):
    """An evaluator's results with a snapshot."""

    actor: str
    task: int
    learner_incarnation: int  # of the learner that made the snapshot
    parameter_version: int
    frames: int  # environment frames that the snapshot was learned from
    episodes: list[Episode]


class Evaluators:
    """Hands out snapshots, and takes evaluations of them."""

    def __init__(
        self,
        seed: int,
        num_tasks: int,
        records: Records,
        snapshots: Snapshots,
        validator: Validator,
        newest_of: Callable[[int], int | None],
    ):
        """Starts without evaluations.

        Args:
          seed: the run's.
          num_tasks: tasks of the run.
          records: updated with who asks and reports.
          snapshots: handed out.
          validator: checks the episodes of an evaluation.
          newest_of: a learner's incarnation -> the last version that it can have published, None if
            it is not of this run.
        """
        self._seed = int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])
        self._num_tasks = num_tasks
        self._records = records
        self._snapshots = snapshots
        self._validator = validator
        self._newest_of = newest_of
        self.reports: queue.Queue[EvaluationReport] = queue.Queue(_MAX_EVALUATIONS)
        """That wait to be written."""

    def join(self) -> bool:
        """Lets an evaluator join.

        Returns:
          Whether nothing is left to evaluate.

        Raises:
          InvalidRequest: there never is anything.
        """
        if self._snapshots.are_refused:
            raise InvalidRequest(
                "This learner has nothing to evaluate: start it with --learner.snapshots auto; "
                "of several --peers, evaluators join the first."
            )
        return self._snapshots.are_over

    def __len__(self) -> int:
        """Returns how many snapshots wait."""
        return len(self._snapshots)

    def get_snapshot(self, request: pb.GetSnapshotRequest) -> bytes:
        """Returns what an evaluator is to evaluate next, as a serialised GetSnapshotReply.

        It may read a file; thread-safe.

        Raises:
          InvalidRequest: the name is invalid.
          UnknownActor: this evaluator has not joined, and may play with an earlier run's settings.
        """
        check_name(request.actor)
        if not self._records.roster.has_joined(request.actor):
            raise UnknownActor(f"No Join for evaluator {request.actor!r}: join again.")
        self._records.roster.heard(request.actor, "evaluator")
        self._snapshots.heard()
        reply = pb.GetSnapshotReply()
        while not request.busy and (found := self._snapshots.next()) is not None:
            snapshot, task = found
            held = request.learner_incarnation, request.frames
            if held != (snapshot.incarnation, snapshot.frames):
                if (saved := self._snapshots.read(snapshot)) is None:
                    continue  # it is damaged
                reply.parameters.tensors.extend(codec.encode(saved.agent_values))
            reply.task, reply.seed = task, self._seed
            reply.parameters.learner_incarnation = snapshot.incarnation
            reply.parameters.version = snapshot.version
            reply.parameters.progress = snapshot.progress
            reply.parameters.frames = snapshot.frames
            break
        reply.finished = self._snapshots.are_over
        return reply.SerializeToString()

    def report(self, request: pb.Evaluation) -> pb.EvaluationReceipt:
        """Adds an evaluator's report to `reports`.

        Raises:
          InvalidRequest: too many episodes or none, an unknown task or unknown parameters, or a
            number out of range.
          Unavailable: too many reports wait to be written.
        """
        if self.reports.full():  # before any work
            raise Unavailable(
                f"{_MAX_EVALUATIONS} evaluations wait to be written: report it again later."
            )
        check_name(request.actor)
        if not request.episodes:
            raise InvalidRequest("The evaluation has no episodes: report those that were played.")
        if request.task >= self._num_tasks:
            raise InvalidRequest(
                f"task is {request.task}, the run has {self._num_tasks}: count from 0."
            )
        newest = self._newest_of(request.learner_incarnation)
        # A waiting snapshot may be of a learner that the list of learners lacks, as it was damaged.
        place = request.learner_incarnation, request.frames, request.task
        if not self._snapshots.awaits(*place) and (
            newest is None or request.parameter_version > newest
        ):
            raise InvalidRequest(
                f"parameter_version is {request.parameter_version} of the learner incarnation "
                f"{request.learner_incarnation}, which this run never had: evaluate snapshots "
                "from GetSnapshot."
            )
        try:
            report = EvaluationReport(
                actor=request.actor,
                task=request.task,
                learner_incarnation=request.learner_incarnation,
                parameter_version=request.parameter_version,
                frames=request.frames,
                episodes=[
                    self._records.info_names.keep(episode)
                    for episode in self._validator.episodes(
                        request.episodes, MOST_EVALUATION_EPISODES, request.task
                    )
                ],
            )
        except Rejected as rejected:
            raise InvalidRequest(rejected.rejection.detail) from None
        self._snapshots.report(*place)
        self.reports.put_nowait(report)  # nobody else adds any
        self._records.roster.reported(report.actor, report.parameter_version)
        return pb.EvaluationReceipt()
