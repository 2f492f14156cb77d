"""Snapshots of the agent that wait on disk to be evaluated, and which evaluator does what."""

import collections
import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from impala.logdir import checkpoint

_log = logging.getLogger(__name__)


class Snapshot(NamedTuple):
    """A checkpoint of the agent alone, to be evaluated in every task."""

    path: pathlib.Path
    incarnation: int  # of the learner that made it
    version: int  # of its parameters
    frames: int  # environment frames that they were learned from
    progress: float  # share of the run that was done, 0 to 1


class Evaluated(NamedTuple):
    """A snapshot that has been evaluated in every task."""

    path: pathlib.Path
    frames: int
    mean: float  # return, averaged over tasks


@dataclasses.dataclass
class _Waiting:
    snapshot: Snapshot
    assigned: dict[int, int]  # task without an evaluation -> how many evaluators got it
    means: list[float] = dataclasses.field(default_factory=list)  # returns in the other tasks
    reported: set[int] = dataclasses.field(default_factory=set)  # tasks whose report is to be filed


class Snapshots:
    """The snapshots in order. Thread-safe.

    An evaluator gets the first task of the oldest snapshot that no other has got. When all have
    been given away, those without a report are given away again: whoever got them may have died. A
    report that is not filed yet is one too, or else who reports and asks at once would play the
    same again. As every evaluator plays the same episodes of a snapshot, the first report counts.
    """

    def __init__(
        self,
        num_tasks: int,
        keep: Literal["auto", "always", "never"],
    ):
        """Starts without snapshots.

        Args:
          num_tasks: tasks of the run.
          keep: `learner.snapshots`.
        """
        self._num_tasks = num_tasks
        self._keep = keep
        self._lock = threading.Lock()
        self._has_evaluators = False
        self._heard = time.monotonic()
        self._waiting: collections.deque[_Waiting] = collections.deque()
        self._evaluated: list[Evaluated] = []
        self._are_all = False

    @property
    def are_wanted(self) -> bool:
        """Whether snapshots are to be kept."""
        return self._keep == "always" or (self._keep == "auto" and self._has_evaluators)

    @property
    def are_refused(self) -> bool:
        """Whether no evaluator ever gets one."""
        return self._keep == "never"

    @property
    def silent_seconds(self) -> float:
        """Returns the seconds since an evaluator was heard of, or since the start."""
        return time.monotonic() - self._heard

    @property
    def are_over(self) -> bool:
        """Whether all have been evaluated, and there will be no more."""
        with self._lock:
            return self._are_all and not self._waiting

    def __len__(self) -> int:
        """Returns how many wait."""
        return len(self._waiting)

    def heard(self) -> None:
        """Notes that there is an evaluator, at work or waiting for some."""
        self._has_evaluators = True
        self._heard = time.monotonic()

    def add(self, snapshot: Snapshot) -> None:
        """Adds a snapshot, of more frames than those before."""
        with self._lock:
            self._has_evaluators = True  # as below, if this one is of the run's past
            assigned = dict.fromkeys(range(self._num_tasks), 0)
            self._waiting.append(_Waiting(snapshot, assigned))

    def end(self) -> None:
        """Notes that there will be no more."""
        self._are_all = True

    def next(self) -> tuple[Snapshot, int] | None:
        """Returns a snapshot and the task to evaluate it in next; None if nothing waits."""
        with self._lock:
            open_tasks = (
                (count, each, task)
                for each in self._waiting
                for task, count in each.assigned.items()
                if task not in each.reported
            )
            found = min(open_tasks, key=lambda entry: entry[0], default=None)
            if found is None:
                return None
            count, each, task = found
            each.assigned[task] = count + 1
            return each.snapshot, task

    def awaits(self, incarnation: int, frames: int, task: int) -> bool:
        """Returns whether a snapshot waits to be evaluated in a task.

        Args:
          incarnation: of the learner that made the snapshot.
          frames: of its parameters.
          task: index of the task.
        """
        with self._lock:
            found = self._find(incarnation, frames)
            return found is not None and task in found.assigned

    def report(self, incarnation: int, frames: int, task: int, is_lost: bool = False) -> None:
        """Notes that a report of a snapshot in a task is on its way to be filed.

        Args:
          incarnation: as for `awaits`, like the next two.
          frames: of its parameters.
          task: index of the task.
          is_lost: it could not be filed: the snapshot waits for another one.
        """
        with self._lock:
            if (found := self._find(incarnation, frames)) is not None:
                (found.reported.discard if is_lost else found.reported.add)(task)

    def settle(self, incarnation: int, frames: int, task: int, mean: float) -> None:
        """Notes the mean return of a snapshot in a task, if one waits for it."""
        with self._lock:
            self._has_evaluators = True  # before the run was resumed, at least
            found = self._find(incarnation, frames)
            if found is None or found.assigned.pop(task, None) is None:
                return
            found.means.append(mean)
            if not found.assigned:
                self._waiting.remove(found)
                mean = sum(found.means) / len(found.means)
                self._evaluated.append(Evaluated(found.snapshot.path, frames, mean))

    def take_evaluated(self) -> Sequence[Evaluated]:
        """Returns the snapshots evaluated since the last call. Their files are the caller's."""
        with self._lock:
            evaluated, self._evaluated = self._evaluated, []
            return evaluated

    def read(self, snapshot: Snapshot) -> checkpoint.Checkpoint | None:
        """Returns the contents of a snapshot; None if it is damaged, and so waits no longer."""
        try:
            return checkpoint.load(snapshot.path)
        except checkpoint.CheckpointError as error:
            with self._lock:
                if (found := self._find(snapshot.incarnation, snapshot.frames)) is not None:
                    _log.error("A snapshot is not evaluated: %s", error)
                    self._waiting.remove(found)
            return None

    def _find(self, incarnation: int, frames: int) -> _Waiting | None:
        for each in self._waiting:
            if (each.snapshot.incarnation, each.snapshot.frames) == (incarnation, frames):
                return each
        return None
