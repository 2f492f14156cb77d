"""Checkpoints are whole or absent, the newest intact one is read, a directory has one writer."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from impala.configs import PRESETS
from learner import checkpoint
from learner.checkpoint import Checkpoint, CheckpointError, Counters
from learner.log_directory import LogDirectory, LogDirectoryBusy


def _checkpoint(updates: int) -> Checkpoint:
    return Checkpoint(
        config=PRESETS["catch"][1],
        counters=Counters(updates=updates, unrolls=3, steps=5, frames=7, seconds=1.5),
        variables={
            "agent/000/w:0": np.arange(6, dtype=np.float32).reshape(2, 3) + updates,
            "agent/001/b:0": np.array(2.5, np.float32),
            "optimiser/000/ms:0": np.ones(4, np.float32),
        },
        accounts={"actors": {"a": [1, 2, 3]}},
    )


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: pathlib.Path) -> None:
    saved = _checkpoint(12)
    checkpoint.save(tmp_path, saved, keep=3)
    loaded = checkpoint.load(tmp_path)
    assert loaded.config == saved.config
    assert loaded.counters == saved.counters
    assert loaded.accounts == saved.accounts
    assert list(loaded.variables) == list(saved.variables)
    for name, value in saved.variables.items():
        np.testing.assert_array_equal(loaded.variables[name], value)
        assert loaded.variables[name].dtype == value.dtype
    assert [value.shape for value in loaded.agent_values] == [(2, 3), ()]


def test_only_the_newest_are_kept(tmp_path: pathlib.Path) -> None:
    for updates in (5, 10, 100, 1000):
        checkpoint.save(tmp_path, _checkpoint(updates), keep=2)
    names = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert names == [100, 1000]
    assert checkpoint.load(tmp_path).counters.updates == 1000


@pytest.mark.parametrize("damage", ["truncate", "flip", "no_state", "bad_state"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: pathlib.Path, damage: str
) -> None:
    checkpoint.save(tmp_path, _checkpoint(1), keep=3)
    newest = checkpoint.save(tmp_path, _checkpoint(2), keep=3)
    variables = newest / "variables.npz"
    content = bytearray(variables.read_bytes())
    match damage:
        case "truncate":
            variables.write_bytes(content[: len(content) // 2])
        case "flip":
            at = content.index(np.float32(2.0).tobytes())  # the first value of version 2's arrays
            content[at] ^= 0xFF
            variables.write_bytes(content)
        case "no_state":
            (newest / "state.json").unlink()
        case "bad_state":
            (newest / "state.json").write_text(json.dumps({"counters": {}}))
    assert checkpoint.load(tmp_path).counters.updates == 1


def test_a_crash_while_writing_leaves_the_last_one(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, _checkpoint(1), keep=3)
    partial = tmp_path / "checkpoints" / ".partial-000000000002"
    partial.mkdir()
    (partial / "variables.npz").write_bytes(b"half")
    assert checkpoint.load(tmp_path).counters.updates == 1
    checkpoint.save(tmp_path, _checkpoint(2), keep=3)  # the leftover does not get in the way
    assert checkpoint.load(tmp_path).counters.updates == 2


def test_no_checkpoint_is_an_error_that_names_the_directory(tmp_path: pathlib.Path) -> None:
    assert not checkpoint.exists(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoint.load(tmp_path)


def test_another_network_is_refused_before_anything_is_assigned() -> None:
    w, b = tf.Variable(tf.zeros([2, 3])), tf.Variable(tf.zeros([3]))
    variables = {"agent/000/w:0": w, "agent/001/b:0": b}
    saved = {"agent/000/w:0": np.ones((2, 3)), "agent/001/b:0": np.ones(4)}
    with pytest.raises(CheckpointError, match=r"001/b:0.*\(4,\).*\(3,\).*--fresh"):
        checkpoint.assign(saved, variables)
    np.testing.assert_array_equal(w, np.zeros((2, 3)))
    with pytest.raises(CheckpointError, match="agent/001/b:0"):
        checkpoint.assign({"agent/000/w:0": np.ones((2, 3))}, variables)
    checkpoint.assign({**saved, "agent/001/b:0": np.ones(3)}, variables)
    np.testing.assert_array_equal(w, np.ones((2, 3)))


_HOLD = """
import pathlib, sys
from learner.log_directory import LogDirectory
with LogDirectory(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_log_directory_has_one_writer_even_after_a_kill(tmp_path: pathlib.Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LogDirectoryBusy, match=str(holder.pid)):
            LogDirectory(tmp_path)
        holder.kill()
    with LogDirectory(tmp_path):
        pass


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    with LogDirectory(logdir):
        checkpoint.save(logdir, _checkpoint(1), keep=1)
        (logdir / "metrics.jsonl").write_text("{}\n")
    with LogDirectory(logdir, fresh=True):
        assert not checkpoint.exists(logdir)
        assert not (logdir / "metrics.jsonl").exists()
    (aside,) = (path for path in tmp_path.iterdir() if path != logdir)
    assert checkpoint.load(aside).counters.updates == 1
    assert (aside / "metrics.jsonl").read_text() == "{}\n"
