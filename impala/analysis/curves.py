"""Learning curves of runs in numbers: what `impala plot` draws, and `impala.curve` returns."""

import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from impala.analysis import continual
from impala.config import layers, values
from impala.config.schema import Config
from impala.logdir import rows
from impala.schedule import tasks


class Curve(NamedTuple):
    """How well a run did in a task, over training."""

    frames: np.ndarray  # [N] float64, environment frames of training, ascending
    returns: np.ndarray  # [N] float64, undiscounted, of rewards as the environment gives them
    measure: str  # what `returns` are


class Training(NamedTuple):
    """The telemetry of training in a task, a number for each row, as it was written."""

    frames: np.ndarray  # [N] environment frames
    seconds: np.ndarray  # [N]
    standings: np.ndarray  # [N]


def read(logdir: pathlib.Path, task: int = 0) -> Curve:
    """Returns a run's curve: of its evaluations or, if it has none, of its training.

    Args:
      logdir: of the run.
      task: counted from 0.

    Raises:
      ValueError: there is no such run or task, or no episode has ended in it yet.
    """
    if not logdir.is_dir():
        raise ValueError(f"There is no log directory {logdir}.")
    config = values.from_stored(Config, layers.read_yaml(logdir / "config.yaml"))
    name = tasks.choose(config, task).name
    try:
        of_task = continual.read(logdir).curves.get(name)
    except continual.NoEvaluations:
        of_task = None
    if of_task is not None:
        frames, returns = (x.astype(np.float64) for x in of_task)
        return Curve(frames, returns, "return, mean of an evaluation")
    measure, trained = training(logdir)
    if name not in trained:
        raise ValueError(f"{logdir} has no episode and no reward of {name} yet.")
    frames, returns = ascending(trained[name].frames, trained[name].standings)
    return Curve(frames, returns, measure.replace("\n", " "))


def training(logdir: pathlib.Path) -> tuple[str, Mapping[str, Training]]:
    """Returns what tells how well a run does in training, as `rows.standings`, and it by task.

    Raises:
      ValueError: there is nothing yet.
    """
    of_run = rows.read(logdir)
    measure, standings = rows.standings(of_run)
    names = dict.fromkeys(task for standing in standings for task in standing)
    if not names:
        raise ValueError(f"{logdir} has no episode and no reward yet, in training or evaluation.")
    pairs = list(zip(of_run, standings, strict=True))
    return measure, {
        name: Training(
            *np.array(
                [(r["frames"], r["seconds"], s[name]) for r, s in pairs if name in s], np.float64
            ).T
        )
        for name in names
    }


def ascending(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns points of a curve in which the last part counts where a run resumed."""
    later = np.minimum.accumulate(x[::-1])[::-1]  # the smallest of this and all later ones
    kept = np.append(x[:-1] < later[1:], True)
    return x[kept].astype(np.float64), y[kept].astype(np.float64)
