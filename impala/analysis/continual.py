"""Metrics of continual learning: curves per task, area, forgetting and transfer.

Forgetting and transfer follow CORA (Powers et al. 2022, arXiv 2110.10067): the fall of a task's
return, or its rise before the task's first block, while another task is trained, divided by that
task's largest |return| in the run.
"""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from impala.config import layers, values
from impala.config.schema import Config
from impala.logdir import json_lines
from impala.schedule import tasks

_MAX_RETURN = 1e39  # returns are float32 on the wire


class Curve(NamedTuple):
    """Evaluations of one task, by environment frames of training."""

    frames: np.ndarray  # [N] ascending
    returns: np.ndarray  # [N] mean over episodes

    def at(self, frames: float) -> float:
        """Returns the linear interpolation between the two nearest evaluations."""
        return float(np.interp(frames, self.frames, self.returns))

    def area(self, end: float) -> float:
        """Returns the mean return from 0 to `end` frames of training: CLEAR's cumulative score."""
        inside = self.frames[(self.frames > 0) & (self.frames < end)]
        frames = np.concatenate([[0.0], inside, [float(end)]])
        returns = np.interp(frames, self.frames, self.returns)
        return float(np.trapezoid(returns, frames) / end)


class NoEvaluations(ValueError):
    """A log directory has no evaluations."""


class Run(NamedTuple):
    """The evaluations of a log directory."""

    config: Config
    tasks: Sequence[str]
    blocks: Sequence[tasks.Block]  # when which task was trained; () if all were at once
    curves: Mapping[str, Curve]  # of each task that was evaluated


class Report(NamedTuple):
    """An evaluation as in a line of evaluations.jsonl."""

    task: str
    learner: int  # incarnation of the learner whose parameters were evaluated
    frames: int  # environment frames that they were learned from
    mean: float  # return

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> Self:
        """Returns the report in a line.

        Raises:
          KeyError, TypeError, ValueError, ArithmeticError: the line is none.
        """
        task, learner, frames, returns = (
            line[name] for name in ("task", "learner", "frames", "returns")
        )
        good = isinstance(task, str) and type(learner) is int
        good = good and type(frames) is int and 0 <= frames < 2**63
        if not (good and all(json_lines.is_number(x) and abs(x) < _MAX_RETURN for x in returns)):
            raise ValueError(f"{line} is not an evaluation.")
        return cls(task, learner, frames, math.fsum(returns) / len(returns))


class Resumed(NamedTuple):
    """A learner has resumed from a checkpoint, and repeats the frames that came after it."""

    frames: int  # of the checkpoint


def parse(line: Mapping[str, Any]) -> Report | Resumed:
    """Returns what a line of evaluations.jsonl says.

    Raises:
      KeyError, TypeError, ValueError, ArithmeticError: it says nothing.
    """
    return Resumed(int(line["resumed"])) if "resumed" in line else Report.parse(line)


class History:
    """Collects a run's lines in order.

    A learner that resumed from a checkpoint repeats some frames; the last report counts. Several
    evaluators report snapshots in any order, of learners before the last one too.
    """

    def __init__(self, config: Config):
        """Starts without reports."""
        self._config = config
        self._names = [task.name for task in tasks.make(config.environment, config.tasks)]
        self._points: dict[str, dict[int, float]] = {name: {} for name in self._names}

    def add(self, line: Report | Resumed) -> None:
        """Adds a line; a report of a task that the run no longer has is ignored."""
        if isinstance(line, Resumed):
            for name, of_task in self._points.items():
                self._points[name] = {f: r for f, r in of_task.items() if f <= line.frames}
        elif line.task in self._points:
            self._points[line.task][line.frames] = line.mean

    def run(self) -> Run:
        """Returns the reports so far, as curves."""
        curves = {
            name: Curve(*map(np.array, zip(*sorted(of_task.items()), strict=True)))
            for name, of_task in self._points.items()
            if of_task
        }
        sequential = self._config.tasks.order == "sequential"
        blocks = tasks.blocks(self._config) if sequential else ()
        return Run(self._config, self._names, blocks, curves)


def read(logdir: pathlib.Path) -> Run:
    """Reads a run's evaluations, as far as they can be read.

    Raises:
      NoEvaluations: there are none.
    """
    lines = json_lines.read(logdir / "evaluations.jsonl", parse)
    if not any(isinstance(line, Report) for line in lines):
        raise NoEvaluations(
            f"{logdir} has no evaluations. Train with several tasks, or with --evaluate yes."
        )
    config = values.from_stored(Config, layers.read_yaml(logdir / "config.yaml"))
    history = History(config)
    for line in lines:
        history.add(line)
    return history.run()


class Change(NamedTuple):
    """The effect of training one task on another."""

    task: str
    block: int
    forgetting: float | None  # share of the largest return; None before the task was trained
    transfer: float | None  # the same, gained; None once the task was trained


def changes(run: Run) -> list[Change]:
    """Returns forgetting and transfer of each task in each block of another one."""
    trained: set[int] = set()
    found = []
    for number, block in enumerate(run.blocks):
        for task, name in enumerate(run.tasks):
            if task == block.task or block.start == block.end or name not in run.curves:
                continue
            curve = run.curves[name]
            if curve.frames[-1] <= block.start or curve.frames[0] >= block.end:  # not evaluated
                continue
            gain = (curve.at(block.end) - curve.at(block.start)) / _largest(curve)
            found.append(
                Change(name, number, -gain, None)
                if task in trained
                else Change(name, number, None, gain)
            )
        if block.end > block.start:
            trained.add(block.task)
    return found


def forgetting(run: Run) -> dict[str, float]:
    """Returns the mean forgetting of each task over the blocks with something to forget."""
    return _means((change.task, change.forgetting) for change in changes(run))


def transfer(run: Run) -> dict[str, float]:
    """Returns the mean transfer to each task over the blocks before its own first one."""
    return _means((change.task, change.transfer) for change in changes(run))


class TaskSummary(NamedTuple):
    """The metrics of a task."""

    now: float  # return at the last evaluation
    best: float
    normalised: float  # 0: the first evaluation; 1: the best
    area: float  # mean return over training so far
    forgetting: float  # 0 if there was nothing to forget
    transfer: float  # 0 if there was nothing to gain


def summary(run: Run) -> dict[str, TaskSummary]:
    """Returns the metrics of each evaluated task; a current block counts as far as evaluated."""
    forgotten, gained = forgetting(run), transfer(run)
    found = {}
    for task, curve in run.curves.items():
        first, now, best = curve.returns[0], curve.returns[-1], curve.returns.max()
        found[task] = TaskSummary(
            now=float(now),
            best=float(best),
            normalised=normalised(now, first, best) if best > first else 0.0,
            area=curve.area(curve.frames[-1]) if curve.frames[-1] > 0 else float(now),
            forgetting=forgotten.get(task, 0.0),
            transfer=gained.get(task, 0.0),
        )
    return found


def normalised(value: float, random: float, reference: float) -> float:
    """Scales a value to 0 for a random policy and 1 for the reference."""
    return (value - random) / (reference - random)


def _largest(curve: Curve) -> float:
    return float(np.abs(curve.returns).max()) or 1.0


def _means(values: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Returns the mean of each task's values that are not None; tasks without one are omitted."""
    by_task: dict[str, list[float]] = {}
    for task, value in values:
        if value is not None:
            by_task.setdefault(task, []).append(value)
    return {task: float(np.mean(of_task)) for task, of_task in by_task.items()}
