"""Versions side by side: what was written by one opens in another, or is refused by name.

tests/stored/ holds what earlier versions wrote; `newer` is a next version, made up.
"""

import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

from impala.config import values
from impala.config.schema import Config
from impala.logdir import checkpoint
from impala.logdir.checkpoint import CheckpointError
from impala.runtime.installation import VERSION

TESTS = pathlib.Path(__file__).parent
STORED = TESTS / "stored"
OLDEST = STORED / "run-before-schema"  # written by commit a966f2c

# Every setting that changes neither what is played nor what is learned, so that a version may go on
# without knowing it. All others matter. A new setting is to be thought about, and listed here if it
# is marked OPERATIONAL.
OPERATIONAL = {
    *("actor.num_envs", "actor.num_groups", "actor.env_threads", "actor.hang_seconds"),
    *("actor.environment_seconds", "actor.max_environment_bytes", "actor.max_memory_bytes"),
    *("guard.max_skips", "guard.window_updates"),
    *("learner.max_envs_per_message", "learner.checkpoint_seconds", "learner.checkpoints_kept"),
    *("learner.log_seconds", "learner.jit_compile", "learner.threads"),
    *("limits.info_names", "limits.frames_per_step", "limits.reward", "limits.observation"),
    *("limits.policy_parameter", "limits.baseline"),
    *("quarantine.blames", "quarantine.window_seconds", "quarantine.seconds"),
    *("replay.storage", "replay.on_damage"),
}


def newer(*arguments: object) -> str:
    """Runs the made-up next version; returns what it prints."""
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "newer.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_setting_is_known_to_matter_or_not() -> None:
    paths = values.flatten(Config())
    assert {path for path in paths if values.is_operational(Config, path)} == OPERATIONAL


def test_what_matters_is_what_is_away_from_its_default() -> None:
    data = {"agent": {"hidden_sizes": [8]}, "actor": {"num_envs": 2}, "seed": 0}
    config = values.from_dict(Config, data)
    assert values.settings_that_matter(config) == {"agent.hidden_sizes": (8,)}
    assert values.changed(config) == {"agent.hidden_sizes": (8,), "actor.num_envs": 2}


# ------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_from_before_schemas_opens() -> None:
    saved = checkpoint.load(OLDEST)
    assert saved.counters == checkpoint.Counters(2778, 22224, 200016, 200016, 201.39536289300122)
    assert saved.config.agent.hidden_sizes == (8,)
    assert saved.config.environment.id == "Catch"
    assert saved.spaces is None and not saved.unknown
    shapes = [value.shape for value in saved.agent_values]
    assert shapes == [(1,), (8, 1), (3,), (8, 3), (8,), (50, 8)]


def test_a_checkpoint_of_a_newer_version_keeps_what_this_one_does_not_know(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"learner": {"tidy_seconds": 3.5, "log_seconds": 0.01, "unroll_length": 9}}
    newer("write", tmp_path, json.dumps(theirs))

    saved = checkpoint.load(tmp_path)
    assert saved.config.learner.unroll_length == 9 and saved.config.seed == 7
    assert saved.config.learner.log_seconds == 5.0  # this version takes no 0.01
    assert saved.unknown == {
        "agent": {"layer_norm": False},
        "learner": {"tidy_seconds": 3.5, "log_seconds": 0.01},
        "curiosity": {"cost": 0.0, "sizes": []},
    }
    (said,) = caplog.messages
    assert "impala 9.9" in said and "learner.tidy_seconds" in said and "curiosity.sizes" in said

    # This version goes on and writes its own checkpoint, which the newer one opens again.
    checkpoint.save(tmp_path, saved._replace(counters=checkpoint.Counters(2)), keep=3)
    back = json.loads(newer("read", tmp_path))
    assert back["config"]["learner"]["tidy_seconds"] == 3.5
    assert back["config"]["learner"]["log_seconds"] == 5.0  # as this version ran
    assert back["config"]["learner"]["unroll_length"] == 9
    assert back["unknown"] == {}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"agent": {"layer_norm": True}}, "agent.layer_norm = True"),
        ({"curiosity": {"sizes": [3]}}, r"curiosity.sizes = \[3\]"),
    ],
)
def test_what_changes_what_is_learned_is_refused_by_name_and_not_passed_over(
    tmp_path: pathlib.Path, settings: dict[str, Any], named: str
) -> None:
    shutil.copytree(OLDEST / "checkpoints", tmp_path / "checkpoints")  # one that would open
    newer("write", tmp_path, json.dumps(settings))
    expected = rf"impala 9.9 with schema 1.1, this is impala {VERSION} with schema 1.0.* {named}"
    for name in ("newest", "1"):
        with pytest.raises(CheckpointError, match=f"{expected}.*Open it with impala 9.9") as error:
            checkpoint.choose(tmp_path, name)
        assert "\n" not in str(error.value)


def test_a_newer_version_opens_what_this_one_wrote(tmp_path: pathlib.Path) -> None:
    saved = checkpoint.load(OLDEST)
    checkpoint.save(tmp_path, saved, keep=3)
    read = json.loads(newer("read", tmp_path))
    assert read["config"]["agent"]["hidden_sizes"] == [8]
    assert read["config"]["agent"]["layer_norm"] is False  # the behaviour of before
    assert read["config"]["learner"]["tidy_seconds"] == 60.0
    assert read["unknown"] == {}


def test_another_major_version_is_refused_naming_both(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint.load(OLDEST)
    checkpoint.save(tmp_path, saved, keep=3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", (2, 0))
        patch.setattr(checkpoint, "VERSION", "9.9")
        checkpoint.save(tmp_path, saved, keep=3)
    with pytest.raises(
        CheckpointError, match=r"9.9 with schema 2.0.* with schema 1.0, another maj"
    ):
        checkpoint.load(tmp_path)


def test_what_a_version_would_not_have_written_is_damage(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = checkpoint.load(OLDEST)
    first = checkpoint.save(tmp_path, saved, keep=3)
    state = json.loads((checkpoint.save(tmp_path, saved, keep=3) / "state.json").read_text())
    state["config"]["agent"]["lstm_size"] = -1  # at its default, as `needs` says
    contents = {name: (first / name).read_bytes() for name in ("state.json", "variables.npz")}
    contents["state.json"] = json.dumps(state).encode()
    (newest,) = (path for path in first.parent.iterdir() if path != first)
    for name, content in {**contents, "MANIFEST": checkpoint._manifest(contents)}.items():
        (newest / name).write_bytes(content)
    caplog.set_level(logging.WARNING)
    assert checkpoint.load(tmp_path).config == saved.config
    assert "agent.lstm_size is -1" in caplog.text and "Going back to" in caplog.text
