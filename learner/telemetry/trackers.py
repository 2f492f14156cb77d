"""Sinks that are experiment trackers: Weights & Biases and MLflow.

Each is an extra of the package, and is configured by its own environment variables.
"""

import contextlib
import importlib
import os
import pathlib
import re
import time
import uuid
from typing import Any

from impala.config import layers, values
from impala.logdir import atomic
from impala.logdir.rows import Row
from learner.telemetry.sinks import Histograms, Sink

_PROJECT = "impala"  # where the environment names none
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST = 1000, 100, 6000  # in a call of MLflow's; of a value
_NOT_IN_NAMES = re.compile(r"[^\w\-. /:]")  # of MLflow's metrics


class WandB(Sink):
    """Logs rows and histograms over frames to Weights & Biases.

    WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and the others apply. A resumed run goes on as
    the same run there.
    """

    def __init__(self, logdir: pathlib.Path, settings: object = None) -> None:
        """Opens or resumes the run.

        Raises:
          ValueError: the package is not installed.
        """
        super().__init__(logdir, settings)
        self._wandb = _package("wandb", "wandb")
        id_file = logdir / "wandb.id"
        known = id_file.read_text() if id_file.exists() else uuid.uuid4().hex
        atomic.write(id_file, known.encode())
        self._run = self._wandb.init(
            id=known,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=logdir.resolve().name,
            dir=str(logdir),
            config=_settings(logdir),
            settings=self._wandb.Settings(console="off", disable_git=True, silent=True),
        )
        # A resumed run goes back to a checkpoint: frames are no step, which may only grow.
        self._run.define_metric("*", step_metric="frames")

    def write(self, row: Row) -> None:
        """Logs a row."""
        self._run.log(dict(row))

    def write_histograms(self, histograms: Histograms, frames: float) -> None:
        """Logs the histograms of a row."""
        drawn = {name: self._wandb.Histogram(numbers) for name, numbers in histograms.items()}
        self._run.log({**drawn, "frames": frames})

    def close(self) -> None:
        """Ends the run there, which uploads what is left."""
        self._run.finish()


class MLflow(Sink):
    """Logs rows over frames to MLflow, and the settings as parameters.

    MLFLOW_TRACKING_URI (if it is not set, LOGDIR/mlflow.db) and
    MLFLOW_EXPERIMENT_NAME apply. A resumed run goes on as the same run there.
    """

    def __init__(self, logdir: pathlib.Path, settings: object = None) -> None:
        """Opens or resumes the run.

        Raises:
          ValueError: the package is not installed.
        """
        super().__init__(logdir, settings)
        self._entities = _package("mlflow.entities", "mlflow")
        local = f"sqlite:///{logdir.resolve() / 'mlflow.db'}"
        client = importlib.import_module("mlflow").MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or local
        )
        self._client = client
        id_file = logdir / "mlflow.id"
        if id_file.exists():
            self._id = id_file.read_text()
            client.update_run(self._id, status="RUNNING")
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        if (found := client.get_experiment_by_name(experiment)) is None:
            with contextlib.suppress(Exception):  # another run may have made it meanwhile
                client.create_experiment(experiment)
            found = client.get_experiment_by_name(experiment)
        self._id = client.create_run(
            found.experiment_id, run_name=logdir.resolve().name
        ).info.run_id
        atomic.write(id_file, self._id.encode())
        parameters = [
            self._entities.Param(path, str(value)[:_LONGEST])
            for path, value in values.flatten(_settings(logdir)).items()
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(self._id, params=parameters[first : first + _MOST_PARAMETERS])

    def write(self, row: Row) -> None:
        """Logs a row. What MLflow does not allow in a name becomes a `_`."""
        now, step = int(1000 * time.time()), int(row["frames"])
        metrics = [
            self._entities.Metric(_metric(name), value, now, step) for name, value in row.items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MOST_METRICS])

    def close(self) -> None:
        """Ends the run there."""
        self._client.set_terminated(self._id)


def _metric(name: str) -> str:
    """Returns a name as MLflow takes it: that of a file below a folder."""
    parts = _NOT_IN_NAMES.sub("_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)


def _package(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'it needs a package that is not installed: pip install "impala-rl[{extra}]" ({error})'
        ) from error


def _settings(logdir: pathlib.Path) -> dict[str, Any]:
    """Returns the run's settings, nested."""
    file = logdir / "config.yaml"
    return dict(layers.read_yaml(file)) if file.exists() else {}
