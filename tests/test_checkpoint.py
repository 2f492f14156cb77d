"""Checkpoints are whole or absent, the newest intact one is read, a directory has one writer."""

import errno
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from impala.commands import sweep
from impala.config import values
from impala.config.presets import PRESETS
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, CheckpointError, Counters
from impala.logdir.directory import LogDirectory, LogDirectoryBusy, LogDirectoryError, StorageError
from learner.fleet.accounts import Accounts
from learner.update import named_variables
from learner.update.checkpoints import Checkpoints, Resumed


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
        spaces=(
            gym.spaces.Dict(
                {
                    "observation": gym.spaces.Box(0, 255, (84, 84, 1), np.uint8),
                    "last_reward": gym.spaces.Box(-np.inf, np.inf, (), np.float32),
                }
            ),
            gym.spaces.Discrete(3, start=-1),
        ),
    )


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: pathlib.Path) -> None:
    saved = _checkpoint(12)
    checkpoint.save(tmp_path, saved, keep=3)
    loaded = checkpoint.load(tmp_path)
    assert loaded.config == saved.config
    assert loaded.counters == saved.counters
    assert loaded.accounts == saved.accounts
    assert loaded.spaces == saved.spaces
    assert list(loaded.variables) == list(saved.variables)
    for name, value in saved.variables.items():
        np.testing.assert_array_equal(loaded.variables[name], value)
        assert loaded.variables[name].dtype == value.dtype
    assert [value.shape for value in loaded.agent_values] == [(2, 3), ()]


def _flip(path: pathlib.Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return (
        one._replace(variables={}) == other._replace(variables={})
        and list(one.variables) == list(other.variables)
        and all(np.array_equal(value, other.variables[n]) for n, value in one.variables.items())
    )


def _make_a_directory(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[pathlib.Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "removed": lambda path: path.unlink(),
    "directory": _make_a_directory,
}


@pytest.mark.parametrize("name", ["variables.npz", "state.json", "MANIFEST"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, damage: str, name: str
) -> None:
    checkpoint.save(tmp_path, _checkpoint(1), keep=3)
    newest = checkpoint.save(tmp_path, _checkpoint(2), keep=3)
    DAMAGES[damage](newest / name)
    assert _same(checkpoint.load(tmp_path), _checkpoint(1))
    (said,) = caplog.messages
    assert newest.name in said and "Going back to update 1." in said


def test_no_flipped_bit_loads_wrong_silently(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, _checkpoint(1), keep=3)
    newest = checkpoint.save(tmp_path, _checkpoint(2), keep=3)
    rng = np.random.default_rng(0)
    for path in sorted(newest.iterdir()):
        intact = path.read_bytes()
        for bit in rng.choice(8 * len(intact), 30, replace=False):
            _flip(path, int(bit))
            assert _same(checkpoint.load(tmp_path), _checkpoint(1)), (path.name, bit)
            path.write_bytes(intact)
    assert _same(checkpoint.load(tmp_path), _checkpoint(2))


def test_if_all_are_damaged_one_line_says_so(tmp_path: pathlib.Path) -> None:
    for updates in (1, 2):
        (checkpoint.save(tmp_path, _checkpoint(updates), keep=3) / "state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"002-000002 .*001-000001 .*--fresh") as error:
        checkpoint.load(tmp_path)
    assert "\n" not in str(error.value)
    assert checkpoint.exists(tmp_path)  # so a learner does not start over unasked


def test_a_damaged_checkpoint_that_is_the_only_one_is_named(tmp_path: pathlib.Path) -> None:
    path = checkpoint.save(tmp_path, _checkpoint(1), keep=3)
    (path / "variables.npz").write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match=rf"^The checkpoint is of no use: {path.name}"):
        checkpoint.load(path)


def test_a_run_that_went_back_goes_on_from_what_it_saved_last(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, _checkpoint(100), keep=3)
    damaged = checkpoint.save(tmp_path, _checkpoint(200), keep=3)
    (damaged / "variables.npz").unlink()
    checkpoint.save(tmp_path, _checkpoint(150), keep=1)
    assert [path.name for path in damaged.parent.iterdir()] == ["000000000150-000003"]
    assert checkpoint.load(tmp_path).counters.updates == 150


def test_at_every_step_of_saving_there_is_an_intact_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the same update is saved again, as by a second stop without an update between."""
    checkpoint.save(tmp_path, _checkpoint(1), keep=1)
    looks = []

    def looking(step: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **kwargs: Any) -> Any:
            looks.append(checkpoint.load(tmp_path).counters.updates)
            done = step(*args, **kwargs)
            looks.append(checkpoint.load(tmp_path).counters.updates)
            return done

        return look

    with monkeypatch.context() as patch:
        for module, name in ((os, "fsync"), (os, "rename"), (shutil, "rmtree")):
            patch.setattr(module, name, looking(getattr(module, name)))
        checkpoint.save(tmp_path, _checkpoint(1), keep=1)
    assert looks == [1] * len(looks) and len(looks) > 10
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_full_disk_leaves_the_last_one_and_no_leftovers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, _checkpoint(1), keep=1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        checkpoint.save(tmp_path, _checkpoint(2), keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000000000001-000001"]
    assert checkpoint.load(tmp_path).counters.updates == 1


def test_first_checkpoint_comes_half_a_minute_after_an_update(tmp_path: pathlib.Path) -> None:
    now = [0.0]

    def begun(seconds: float, updates: int = 0) -> tuple[Checkpoints, Any]:
        config = values.overlay(PRESETS["catch"][1], {"learner": {"checkpoint_seconds": seconds}})
        phase, counters = SimpleNamespace(algorithm="impala"), Counters(updates)
        learner: Any = SimpleNamespace(
            config=config, counters=counters, phase=phase, variables=dict
        )
        spaces: Any = None
        of_run = tmp_path / f"{seconds}-{updates}", Resumed(learner), spaces, Accounts(), None
        return Checkpoints(*of_run, clock=lambda: now[0]), learner

    def is_saved(checkpoints: Checkpoints, learner: Any, updates: int = 1) -> bool:
        """After so many updates more."""
        learner.counters = Counters(learner.counters.updates + updates)
        made = updates or None
        step: Any = SimpleNamespace(
            learner=learner, update=made, begins_phase=False, in_doubt=False
        )
        checkpoints.take(step)
        return checkpoints._saved == learner.counters

    run = begun(300.0)
    now[0] = 100.0  # no actor until now
    assert is_saved(*run, updates=0) and not checkpoint.exists(tmp_path / "300.0-0")
    for now[0] in (100.0, 101.0, 129.0):
        assert not is_saved(*run)
    assert run[0].age_seconds == 29.0  # since the first update
    now[0] = 130.0
    assert is_saved(*run)
    assert run[0].age_seconds == 0.0
    now[0] = 140.0
    assert not is_saved(*run)
    now[0] = 429.0
    assert not is_saved(*run) and run[0].age_seconds == 289.0
    now[0] = 430.0
    assert is_saved(*run)

    now[0] = 0.0
    often, resumed = begun(10.0), begun(300.0, updates=5)
    assert not is_saved(*often) and not is_saved(*resumed)
    now[0] = 30.0
    assert is_saved(*often) and not is_saved(*resumed)


def test_no_checkpoint_is_an_error_that_names_the_directory(tmp_path: pathlib.Path) -> None:
    assert not checkpoint.exists(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoint.load(tmp_path)


def test_another_network_is_refused_before_anything_is_assigned() -> None:
    w, b = tf.Variable(tf.zeros([2, 3])), tf.Variable(tf.zeros([3]))
    variables = {"agent/000/w:0": w, "agent/001/b:0": b}
    saved = {"agent/000/w:0": np.ones((2, 3)), "agent/001/b:0": np.ones(4)}
    with pytest.raises(CheckpointError, match=r"001/b:0.*\(4,\).*\(3,\).*--fresh"):
        named_variables.assign(saved, variables)
    np.testing.assert_array_equal(w, np.zeros((2, 3)))
    with pytest.raises(CheckpointError, match="agent/001/b:0"):
        named_variables.assign({"agent/000/w:0": np.ones((2, 3))}, variables)
    named_variables.assign({**saved, "agent/001/b:0": np.ones(3)}, variables)
    np.testing.assert_array_equal(w, np.ones((2, 3)))


_HOLD = """
import pathlib, sys
from impala.logdir.directory import LogDirectory
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


def test_a_file_system_without_locks_is_said_to_be_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(LogDirectoryError, match=r"not implemented.*no flock.*--logdir"):
        LogDirectory(tmp_path)
    with pytest.raises(values.OptionError, match=r"not implemented.*no flock.*--output"):
        sweep._locked(tmp_path)


def test_fresh_moves_the_old_run_aside_and_deletes_nothing(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    with LogDirectory(logdir):
        checkpoint.save(logdir, _checkpoint(1), keep=1)
        (logdir / "metrics.jsonl").write_text("{}\n")
    with LogDirectory(logdir) as directory:
        directory.move_run_aside()
        assert not checkpoint.exists(logdir)
        assert not (logdir / "metrics.jsonl").exists()
    (aside,) = (path for path in tmp_path.iterdir() if path != logdir)
    assert checkpoint.load(aside).counters.updates == 1
    assert (aside / "metrics.jsonl").read_text() == "{}\n"


def test_what_a_run_without_a_checkpoint_has_kept_is_moved_aside(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    with LogDirectory(logdir) as directory:
        for kind in ("snapshots", "best"):
            checkpoint.save(logdir, _checkpoint(0), keep=1, kind=kind)
        (logdir / "receipt.key").write_text("key")
        for name, text in (("evaluations.jsonl", ""), ("evaluations.1.jsonl", "{}")):
            (logdir / name).write_text(text)
        directory.move_kept_aside()
        assert _names(logdir) == ["evaluations.jsonl", "lock", "receipt.key"]  # it is empty
        (aside,) = tmp_path.glob("run.before-*")
        assert _names(aside) == ["best", "evaluations.1.jsonl", "snapshots"]
        directory.move_kept_aside()  # nothing is left to be moved
    assert _names(tmp_path) == ["run", "run.before-TIME"]


def _with_a_run(logdir: pathlib.Path, updates: int) -> pathlib.Path:
    checkpoint.save(logdir, _checkpoint(updates), keep=1)
    (logdir / "metrics.jsonl").write_text("{}\n")
    return logdir


def _move_aside(logdir: pathlib.Path) -> None:
    with LogDirectory(logdir) as directory:
        directory.move_run_aside()


def _names(directory: pathlib.Path) -> list[str]:
    return sorted(re.sub(r"-[0-9]{8}-[0-9]{6}", "-TIME", path.name) for path in directory.iterdir())


def test_fresh_moves_all_or_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logdir = _with_a_run(tmp_path / "run", 1)
    before = _names(logdir)
    rename = pathlib.Path.rename
    stuck = list(logdir.iterdir())[-1].name

    def renamed(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if path.name == stuck:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path), None, str(target))
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", renamed)
    with pytest.raises(LogDirectoryError, match=f"{stuck}: Device or resource busy"):
        _move_aside(logdir)
    assert _names(logdir) == sorted([*before, "lock"]) and _names(tmp_path) == ["run"]


def test_a_log_directory_that_cannot_be_used_is_said_in_one_line(tmp_path: pathlib.Path) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("")
    (tmp_path / "run" / "lock").mkdir(parents=True)
    for path, why in (
        (a_file, "File exists"),
        (a_file / "below", "Not a directory"),
        (pathlib.Path("/proc/run"), "No such file or directory"),  # where even root cannot write
        (tmp_path / "run", r"run/lock: Is a directory"),
    ):
        with pytest.raises(LogDirectoryError, match=why) as error:
            LogDirectory(path)
        assert str(path) in str(error.value) and "--logdir" in str(error.value)
        assert "\n" not in str(error.value)
    with LogDirectory(tmp_path / "other") as directory:
        (directory.path / "config.yaml").mkdir()
        with pytest.raises(LogDirectoryError, match=r"config\.yaml: Is a directory"):
            directory.write("config.yaml", "seed: 1\n")


def test_checkpoints_are_named_by_word_number_or_path(tmp_path: pathlib.Path) -> None:
    for updates in (10, 20, 30):
        newest = checkpoint.save(tmp_path, _checkpoint(updates), keep=1)
    for updates in (10, 20):
        checkpoint.save(tmp_path, _checkpoint(updates), keep=None, kind="milestones")
    for updates in (15, 25):
        best = checkpoint.save(tmp_path, _checkpoint(updates), keep=1, kind="best")

    def updates_of(text: str) -> int:
        return checkpoint.choose(tmp_path, text).counters.updates

    named = ["newest", "best", "10", "20", "30", str(newest), f"best/{best.name}"]
    assert list(map(updates_of, named)) == [30, 25, 10, 20, 30, 30, 25]
    assert checkpoint.load(tmp_path).counters.updates == 30  # a run goes on from the newest
    there = (
        "There are: newest \\(30 updates\\), best \\(25 updates\\), 10, 20, 25, 30; or give a path"
    )
    for text in ("15", "bst", "checkpoints", "/absent/000000000010-000001"):
        with pytest.raises(CheckpointError, match=f"{text!r} of .* is not there. {there}"):
            checkpoint.choose(tmp_path, text)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoint.choose(tmp_path / "absent", "best")


def test_the_best_may_be_replaced_while_it_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, _checkpoint(1), keep=1, kind="best")
    read, seen = checkpoint.read, list[pathlib.Path]()

    def reads(path: pathlib.Path) -> Checkpoint:
        if not seen:
            checkpoint.save(tmp_path, _checkpoint(2), keep=1, kind="best")
        seen.append(path)
        return read(path)

    monkeypatch.setattr(checkpoint, "read", reads)
    assert checkpoint.choose(tmp_path, "best").counters.updates == 2
    assert len(seen) == 2


def test_of_two_best_ones_the_newer_is_read(tmp_path: pathlib.Path) -> None:
    """Given a learner that was killed before it deleted the older one."""
    older = checkpoint.save(tmp_path, _checkpoint(1), keep=1, kind="best")
    shutil.copytree(older, tmp_path / "kept")
    checkpoint.save(tmp_path, _checkpoint(2), keep=1, kind="best")
    (tmp_path / "kept").rename(older)
    assert checkpoint.choose(tmp_path, "best").counters.updates == 2


def test_a_damaged_checkpoint_that_was_named_is_an_error(tmp_path: pathlib.Path) -> None:
    checkpoint.save(tmp_path, _checkpoint(10), keep=3)
    best = checkpoint.save(tmp_path, _checkpoint(10), keep=1, kind="best")
    _flip(best / "variables.npz", 1000)

    assert checkpoint.choose(tmp_path, "10").counters.updates == 10  # another copy is intact
    with pytest.raises(CheckpointError, match=r"'best' of .* is damaged: .*its files differ from"):
        checkpoint.choose(tmp_path, "best")
