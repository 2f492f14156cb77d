"""A log directory knows which experiment it holds, and none is written over another."""

import pathlib
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import yaml

from impala.commands import preflight
from impala.commands.learner import Learner
from impala.commands.parsing import parse
from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.logdir import checkpoint, identity
from impala.logdir.checkpoint import Checkpoint, CheckpointError, Counters
from impala.logdir.directory import LogDirectoryError

CATCH = PRESETS["catch"][1]


def _run(logdir: pathlib.Path, config: Config = CATCH, frames: int = 0) -> pathlib.Path:
    """Makes the log directory of a run that has written a checkpoint."""
    variables = {"agent/000/w:0": np.zeros(2, np.float32)}
    counters = Counters(updates=5, frames=frames)
    checkpoint.save(logdir, Checkpoint(config, counters, variables, {}), keep=1)
    (logdir / "config.yaml").write_text(values.to_yaml(config))
    return logdir


def _with(**changes: Any) -> Config:
    return values.overlay(CATCH, changes)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"environment": {"id": "CartPole-v1"}}, "environment.id: Catch -> CartPole-v1"),
        ({"environment": {"kwargs": '{"rows": 8}'}}, 'environment.kwargs: {} -> {"rows": 8}'),
        ({"tasks": {"environments": ["Catch"]}}, "tasks.environments: none -> Catch"),
        ({"algorithm": "actor_critic"}, "algorithm: impala -> actor_critic"),
        ({"phases": ["critic:9", "impala"]}, "phases: none -> critic:9, impala"),
        ({"agent": {"hidden_sizes": [8, 9]}}, "agent.hidden_sizes: 64, 64 -> 8, 9"),
        ({"objective": {"discount": 0.5}}, "objective.discount: 0.99 -> 0.5"),
        ({"optimiser": {"name": "rmsprop"}}, "optimiser.name: adam -> rmsprop"),
        ({"optimiser": {"centred": True}}, "optimiser.centred: False -> True"),
    ],
)
def test_another_experiment_is_refused_with_the_ways_on(
    tmp_path: pathlib.Path, changes: dict[str, Any], difference: str
) -> None:
    logdir = _run(tmp_path / "run")
    with pytest.raises(LogDirectoryError) as caught:
        identity.check(logdir, _with(**changes))
    assert str(caught.value) == (
        f"{logdir} holds another experiment ({difference}). Give this one another --logdir, start "
        "over with --fresh (the other one is moved aside), or go on with the changed settings with "
        "--change-settings."
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"total_frames": 10**9},
        {"optimiser": {"learning_rate": 1e-5, "decay_to_zero": False}},
        {"learner": {"log_seconds": 60.0}, "evaluator": {"episodes": 5}},
        {"mix": {"replayed": 8}, "impala": {"entropy_cost": 0.5}},
        {"actor": {"num_envs": 4}, "environment": {"vectorization": "async"}},
        {"tasks": {"cycles": 3}},
    ],
)
def test_an_experiment_goes_on_with_operational_changes(
    tmp_path: pathlib.Path, changes: dict[str, Any]
) -> None:
    identity.check(_run(tmp_path), _with(**changes))


def test_how_json_is_written_makes_no_other_experiment(tmp_path: pathlib.Path) -> None:
    logdir = _run(tmp_path, _with(environment={"kwargs": '{"rows":8, "columns":4}'}))
    text = (logdir / "config.yaml").read_text().replace('"rows": 8', '"rows":8')  # as it once was
    (logdir / "config.yaml").write_text(text)
    identity.check(logdir, _with(environment={"kwargs": ' {"columns": 4,"rows": 8}'}))
    (change,) = identity.differences(logdir, _with(environment={"kwargs": '{"rows": 9}'}))
    assert change.endswith('-> {"rows": 9}')


def test_what_holds_no_run_yet_takes_any_experiment(tmp_path: pathlib.Path) -> None:
    identity.check(tmp_path / "absent", CATCH)
    (tmp_path / "config.yaml").write_text(values.to_yaml(_with(seed=1)))  # no checkpoint yet
    identity.check(tmp_path, CATCH)


def test_a_run_of_another_version_is_compared_in_what_both_know(tmp_path: pathlib.Path) -> None:
    logdir = _run(tmp_path)
    stored = values.to_dict(CATCH)
    del stored["agent"]["standardise_images"], stored["objective"]
    stored["environment"]["colour"] = "red"
    (logdir / "config.yaml").write_text(yaml.safe_dump(stored))

    identity.check(logdir, _with(objective={"discount": 0.5}))
    assert identity.differences(logdir, _with(seed=3)) == ["seed: 0 -> 3"]


@pytest.mark.parametrize("content", [None, "\tno yaml", "- a list", ""])
def test_a_checkpoint_alone_says_what_the_run_is(
    tmp_path: pathlib.Path, content: str | None
) -> None:
    logdir = _run(tmp_path)
    (logdir / "config.yaml").unlink()
    if content is not None:
        (logdir / "config.yaml").write_text(content)
    assert identity.differences(logdir, _with(seed=3)) == ["seed: 0 -> 3"]
    for file in (logdir / "checkpoints").glob("*/state.json"):
        file.write_text("{")
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is of use"):
        identity.check(logdir, CATCH)


def test_changed_settings_and_a_fresh_start_are_let_through(tmp_path: pathlib.Path) -> None:
    logdir = str(_run(tmp_path / "run"))
    other = ["catch", "--seed", "1", "--logdir", logdir]
    for flag in ("--change-settings", "--fresh"):
        preflight.log_directory(parse("learner", Learner, [*other, flag]))
    with pytest.raises(values.OptionError, match="holds another experiment"):
        preflight.log_directory(parse("learner", Learner, other))


def test_what_a_run_began_with_may_be_gone_when_it_is_resumed(tmp_path: pathlib.Path) -> None:
    flags = [
        "catch",
        "--logdir",
        str(_run(tmp_path / "run")),
        "--init-from",
        str(tmp_path / "gone"),
    ]
    preflight.log_directory(parse("learner", Learner, flags))
    with pytest.raises(values.OptionError, match="gone has no checkpoint"):
        preflight.log_directory(parse("learner", Learner, [*flags, "--fresh"]))


_REFUSALS = """
import contextlib, io, sys
from impala.commands import main as cli
import fcntl

def refused(line, *messages):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert cli.main(line.split()) == 2, line
    lines = said.getvalue().splitlines()
    assert len(lines) == 1 and lines[0].startswith("impala: "), lines
    for message in messages:
        assert message in lines[0], (message, lines[0])
    heavy = {"tensorflow", "sonnet"} & sys.modules.keys()
    assert not heavy, (line, heavy)

TAKEN = sys.argv[1]
for command in ("train", "learner"):
    refused(f"{command} cacht", "Did you mean 'catch'?")
    refused(f"{command} catch --total-frames 0", "total_frames is 0; it must be at least 1")
    refused(f"{command} catch --config absent.yaml", "absent.yaml: No such file")
    refused(f"{command} catch --environment.id CartPol-v1", "CartPole-v1")
    refused(f"{command} atari --environment.id ALE/Pongg-v5", "Nearest: ALE/Pong-v5")
    refused(f"{command} catch --tasks.environments Catch Cach", "'Cach', which is not registered")
    refused(f"{command} catch --seed 1 --logdir run", "(seed: 0 -> 1)", "--change-settings")
    refused(f"{command} catch --logdir file/run", "file/run cannot be used as a log directory")
    refused(f"{command} catch --init-from absent --logdir new", "absent has no checkpoint")
    with open("run/lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(f"{command} catch --logdir run", "run is written by another learner")
refused("learner catch --listen nowhere", "The learner cannot be served on 'nowhere'")
refused(f"learner catch --listen 127.0.0.1:{TAKEN}", "give HOST:PORT of this machine with a port")
refused(f"learner catch --health-listen 127.0.0.1:{TAKEN}", "Health cannot be served")
refused("learner catch --listen 0.0.0.0:0", "--security.insecure")
for flag in ("--listen", "--health-listen", "--metrics-listen"):
    refused(f"learner catch {flag} localhost:99999", "65535")
refused("actor --learner here", "'here' is not the address of a learner: give HOST:PORT")
refused("actor --learner here:99999", "a port from 1 to 65535")
refused("actor --metrics-listen localhost:99999", "65535")
refused("actor --metrics-listen localhost:65530 --num-actors 10", "65535")
refused(f"actor --metrics-listen 127.0.0.1:{TAKEN}", "Metrics cannot be served")
refused("actor --security.token-file absent", "absent cannot be read")
refused("status nowhere", "'nowhere' is not the address of a learner")
for command in ("evaluate", "record"):
    refused(f"{command} absent", "absent has no checkpoint")
    refused(f"{command} run --checkpoint best", "There are: newest (5 updates), 5")
    refused(f"{command} run --task 1", "task is 1; of this run's tasks 0 is Catch")
refused("record run --output film.avi", "it must end in .gif or .mp4")
refused("evaluate run --json file/a.json", "file/a.json cannot be written: Not a directory")
refused("evaluate run --json run", "run cannot be written: Is a directory")
refused("record run --output file/film.gif", "file/film.gif cannot be written: Not a directory")
refused("export run --output file", "file/model.json cannot be written: Not a directory")
refused("plot run --output file/picture.png", "file/picture.png cannot be written: Not a directory")
refused("plot", "plot needs the log directories of runs")
refused("plot absent", "There is no log directory absent")
refused("plot run --output picture.doc", "No figure can be written to picture.doc")
"""


def test_refusals_come_before_tensorflow_loads(tmp_path: pathlib.Path) -> None:
    _run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", _REFUSALS, str(port)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
