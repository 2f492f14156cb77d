"""Experiment trackers: what they stored is read with their own libraries."""

import importlib
import json
import pathlib
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from impala.config.schema import Config, TelemetryConfig
from impala.config.values import OptionError
from learner.telemetry import custom_sinks
from learner.telemetry.sinks import Sink, pass_on

RETURN = 'episode/Catch{"rows": 9}/return_recent'


@pytest.fixture
def logdir(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "config.yaml").write_text("seed: 3\noptimiser:\n  learning_rate: 0.25\n")
    return tmp_path


def opened(name: str, logdir: pathlib.Path) -> Sink:
    (sink,) = custom_sinks.make(Config(telemetry=TelemetryConfig(sinks=(name,))), logdir)
    return sink


def tracked(name: str, logdir: pathlib.Path) -> None:
    """A run of 20 frames that is resumed from a checkpoint at 10."""
    for first, last in ((10.0, 20.0), (20.0, 30.0)):
        sink = opened(name, logdir)
        pass_on(sink, {"frames": first, RETURN: -first}, {}, {})
        pass_on(sink, {"frames": last, RETURN: -last}, {"q": np.arange(5.0)}, {})
        sink.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_settings_and_rows_over_frames_in_one_run(
    logdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked("mlflow", logdir)
    client = mlflow.MlflowClient(f"sqlite:///{logdir}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name == "impala"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (logdir.name, "FINISHED")
    assert run.data.params == {"seed": "3", "optimiser.learning_rate": "0.25"}
    history = client.get_metric_history(run.info.run_id, "episode/Catch__rows_: 9_/return_recent")
    assert sorted((each.step, each.value) for each in history) == [
        *((10, -10.0), (20, -20.0), (20, -20.0), (30, -30.0))
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_has_settings_and_rows_in_one_run(
    logdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked("wandb", logdir)
    wandb.teardown()  # as at the end of a program: its service writes the rest of its files
    files = sorted(logdir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # resumed, not another run
    records = [record for file in files for record in stored(file)]
    begun = [record.run for record in records if record.HasField("run")]
    assert {run.project for run in begun} == {"impala"}
    settings = {each.key: json.loads(each.value_json) for each in begun[0].config.update}
    assert settings["optimiser"] == {"learning_rate": 0.25}
    rows = [
        {
            each.key or ".".join(each.nested_key): json.loads(each.value_json)
            for each in record.history.item
        }
        for record in records
        if record.HasField("history")
    ]
    told = [(row["frames"], row[RETURN]) for row in rows if RETURN in row]
    assert told == [(10, -10), (20, -20), (20, -20), (30, -30)]
    assert [row["q._type"] for row in rows if "q._type" in row] == ["histogram"] * 2


def stored(file: pathlib.Path) -> Iterator[Any]:
    """The records of a file of W&B's, which is a log of LevelDB's format of one block."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data = file.read_bytes()
    assert data[:4] == b":W&B" and len(data) < 32_768
    place = 7
    while place + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1  # a whole record
        yield messages.Record.FromString(data[place + 7 : place + 7 + length])
        place += 7 + length


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_an_absent_tracker_is_refused_with_a_hint(
    name: str, logdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, f"{name}.entities", None)
    with pytest.raises(OptionError, match=rf'cannot be opened.*pip install "impala-rl\[{name}\]"'):
        opened(name, logdir)
