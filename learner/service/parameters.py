"""The published parameters as replies to actors, with the permits to begin unrolls with them."""

import functools
from collections.abc import Mapping
from typing import Any

from impala.schedule.tasks import Schedule
from impala.types import Parameters
from learner.data.pacing import Pacing, Permit
from protos import codec
from protos.impala.v1 import learner_pb2 as pb


class Published:
    """Parameters and their reply, which is serialised when first asked for."""

    def __init__(self, parameters: Parameters, finished: bool, shown: Mapping[str, Any]):
        self.parameters = parameters
        self._finished = finished
        self.shown = shown  # fields of the status

    def finished(self) -> "Published":
        """Returns the same parameters, marked as final."""
        return Published(self.parameters, True, self.shown)

    def is_held(self, request: pb.GetParametersRequest) -> bool:
        """Returns whether the caller holds these parameters; another learner's do not count."""
        return (
            request.learner_incarnation == self.parameters.incarnation
            and request.newer_than >= self.parameters.version
        )

    @functools.cached_property
    def reply(self) -> bytes:
        parameters = pb.Parameters(
            learner_incarnation=self.parameters.incarnation,
            version=self.parameters.version,
            progress=self.parameters.progress,
            frames=self.parameters.frames,
            tensors=codec.encode(self.parameters.values),
        )
        reply = pb.GetParametersReply(parameters=parameters, finished=self._finished)
        return reply.SerializeToString()


class PublishedParameters:
    """The newest parameters, and with an exact lag those of the batches before."""

    def __init__(self, schedule: Schedule, pacing: Pacing | None):
        """Starts without parameters.

        Args:
          schedule: tells which task to play.
          pacing: gives the permits. Without it none is needed.
        """
        self._schedule = schedule
        self._pacing = pacing
        self._learned = 0  # batches of fresh unrolls...
        self._of_batch: dict[int, Published] = {}  # ...and what was published after the last ones
        self.newest: Published | None = None
        self.are_final = False

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return self.newest.parameters.version if self.newest else 0

    def publish(self, parameters: Parameters, shown: Mapping[str, Any]) -> None:
        """Publishes parameters, as `LearnerService.publish` does."""
        published = Published(parameters, self.are_final, shown)
        if self.newest is None and self._pacing is not None and self._pacing.is_exact:
            self._of_batch[0] = published
        elif self.newest is not None and self.newest.shown.get("rollbacks") != shown.get(
            "rollbacks"
        ):
            # With the bad variables of before nobody could play a round to its end.
            self._of_batch = dict.fromkeys(self._of_batch, published)
        self.newest = published

    def learned(self) -> None:
        """Takes note of a batch of fresh unrolls; what was learned from it has been published."""
        if self._pacing is not None:
            assert self.newest is not None
            if self._pacing.is_exact:
                self._learned += 1
                self._of_batch[self._learned] = self.newest
                self._of_batch.pop(self._learned - self._pacing.lag - 1, None)
            self._pacing.learned()

    def finish(self) -> None:
        """Marks the newest, and all to come, as final."""
        self.are_final = True
        if self.newest is not None:
            self.newest = self.newest.finished()

    def task(self, actor: str = "") -> int:
        """Returns the task to play now; where permits are needed, it is they that tell actors."""
        frames = self.newest.parameters.frames if self.newest else 0
        return self._schedule.next(frames, actor if self._pacing is None else "")

    def reply(self, request: pb.GetParametersRequest, permit: Permit | None) -> bytes:
        """Returns a serialised GetParametersReply, as `LearnerService.get_parameters` does."""
        published = self.newest
        needs_permit = self._pacing is not None and request.actor
        if published is None or (needs_permit and permit is None):
            return self._nothing_new()
        if permit is None:
            if published.is_held(request):
                return self._nothing_new()
            return published.reply
        assert self._pacing is not None
        if self._pacing.is_exact:
            published = self._of_batch[permit.learned]
        parameters = published.parameters
        reply = pb.GetParametersReply(
            finished=self.are_final,
            permit=pb.Permit(
                number=permit.number,
                version=parameters.version,
                task=self._schedule.next(parameters.frames, request.actor),
            ),
        ).SerializeToString()
        held = request.learner_incarnation, request.newer_than
        if held != (parameters.incarnation, parameters.version):
            reply = published.reply + reply  # two messages in a row are one with both's fields
        return reply

    def _nothing_new(self) -> bytes:
        return pb.GetParametersReply(finished=self.are_final).SerializeToString()
