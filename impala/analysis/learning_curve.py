"""The learning curve of a run in numbers: `impala.curve`."""

import pathlib
from typing import NamedTuple

import numpy as np

from impala.analysis import runs
from impala.config import layers, values
from impala.config.schema import Config
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
      ValueError: there is no such run or task, or it has no episode and no reward yet.
    """
    groups = {"": [runs.read(logdir)]}
    config = values.from_stored(Config, layers.read_yaml(logdir / "config.yaml"))
    name = tasks.choose(config, task).name
    if evaluated := runs.evaluations(groups).get(name):
        return Curve(*evaluated[""][0], "return, mean of an evaluation")
    training = runs.training(groups)
    if name not in training.over_frames:
        raise ValueError(f"{logdir} has no episode and no reward of {name} yet.")
    return Curve(*training.over_frames[name][""][0], training.what.replace("\n", " "))
