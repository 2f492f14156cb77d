"""Files that commands write: refused before the work, and whole or as they were."""

import errno
import os
import pathlib

import pytest

from impala.commands import outputs
from impala.config.values import OptionError


def test_a_check_leaves_nothing_and_makes_nothing(tmp_path: pathlib.Path) -> None:
    outputs.check(tmp_path / "deep" / "deeper" / "result.json")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OptionError, match=r"/proc/result\.json cannot be written"):
        outputs.check(pathlib.Path("/proc/result.json"))  # where even root cannot write


def test_a_file_is_written_whole_or_stays_as_it_was(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "result.json"
    outputs.write(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OptionError, match=r"result\.json cannot be written: No space left"):
        outputs.write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["result.json"]


def test_a_link_and_a_device_are_written_to_and_not_replaced(tmp_path: pathlib.Path) -> None:
    """As /dev/stdout is both."""
    link, file = tmp_path / "link", tmp_path / "file"
    file.write_bytes(b"old")
    link.symlink_to(file)
    for path in (link, pathlib.Path(os.devnull)):
        outputs.check(path)
        outputs.write(path, b"new")
    assert link.is_symlink() and file.read_bytes() == b"new"
    assert pathlib.Path(os.devnull).is_char_device()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_film_that_is_not_finished_leaves_the_one_before(
    tmp_path: pathlib.Path, error: type[BaseException]
) -> None:
    path = tmp_path / "deep" / "film.gif"
    with outputs.replacing(path) as file:
        file.write_bytes(b"old")
    assert file.suffix == ".gif" and path.read_bytes() == b"old"
    with pytest.raises(error), outputs.replacing(path) as file:
        file.write_bytes(b"new")
        raise error
    assert path.read_bytes() == b"old" and os.listdir(path.parent) == ["film.gif"]
    link = tmp_path / "link.gif"
    link.symlink_to(path)
    with outputs.replacing(link) as file:
        file.write_bytes(b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"


def test_only_errors_about_the_output_are_the_users(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "film.gif"
    for error in (
        PermissionError(errno.EACCES, "Permission denied", str(path)),
        OSError(errno.ENOSPC, "No space left on device"),
    ):
        with (
            pytest.raises(OptionError, match=r"film\.gif cannot be written"),
            outputs.writing(path),
        ):
            raise error
    for error in (
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "levels.txt"),
    ):
        with pytest.raises(type(error)), outputs.writing(path):
            raise error  # of an environment
