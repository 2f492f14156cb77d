"""Files written atomically: all of the new content, or all of the old."""

import contextlib
import errno
import os
import pathlib
import stat

import pytest

from impala.logdir import atomic


def test_a_file_changes_only_if_its_block_ends_well(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "state.json"
    atomic.write(path, b"old")
    with atomic.replacing(path) as file:
        file.write(b"new and longer")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new and longer"
    with pytest.raises(RuntimeError), atomic.replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"new and longer"
    assert os.listdir(tmp_path) == ["state.json"]


def test_leftovers_are_replaced_and_secrets_are_private(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "key"
    path.with_name("key.partial").write_bytes(b"readable by all, and longer than the new one")
    atomic.write(path, b"secret", mode=0o600)
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["key"]


def test_a_disk_that_refuses_leaves_the_file_as_it_was(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    atomic.write(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_may_have_no_way_to_flush_a_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, is_told: bool
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError) if is_told else contextlib.nullcontext():
        atomic.flush_directory(tmp_path)
