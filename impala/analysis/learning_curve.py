"""The learning curve of a run in numbers: `impala.curve`."""

import pathlib
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
        evaluated = continual.read(logdir).curves.get(name)
    except continual.NoEvaluations:
        evaluated = None
    if evaluated is not None:
        frames, returns = (x.astype(np.float64) for x in evaluated)
        return Curve(frames, returns, "return, mean of an evaluation")
    of_run = rows.read(logdir)
    measure, standings = rows.standings(of_run)
    pairs = zip(of_run, standings, strict=True)
    points = np.array(
        [(row["frames"], each[name]) for row, each in pairs if name in each], np.float64
    )
    if not len(points):
        raise ValueError(f"{logdir} has no episode and no reward of {name} yet.")
    frames, returns = points.T
    # Where the run resumed from a checkpoint, the last part counts.
    later = np.minimum.accumulate(frames[::-1])[::-1]  # the smallest of this and all later ones
    kept = np.append(frames[:-1] < later[1:], True)
    return Curve(frames[kept], returns[kept], measure.replace("\n", " "))
