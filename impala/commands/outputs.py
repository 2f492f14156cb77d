"""Files that commands write: checked before the work, with errors of one line."""

import contextlib
import errno
import os
import pathlib
import tempfile
from collections.abc import Iterator

from impala.config.values import OptionError
from impala.logdir import atomic
from impala.logdir.directory import OF_DISKS


def check(path: pathlib.Path) -> None:
    """Checks that a file can be written, whose directory need not exist, before the work for it.

    Raises:
      OptionError: it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_in_place(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        there = next(each for each in path.parents if each.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise _error(path, error) from error


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns errors about a file, or about its disk, into usage errors. Others may be of the work.

    Raises:
      OptionError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in OF_DISKS and not str(error.filename).startswith(str(path)):
            raise
        raise _error(path, error) from error


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields where to write a file that replaces `path` when the block ends.

    It is beside it and has the same suffix. If the block raises an error, it is removed and `path`
    is unchanged. A link or a device is written in place.
    """
    if _is_in_place(path):
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):  # there is none, or the first error counts
            partial.unlink()


def write(path: pathlib.Path, data: bytes) -> None:
    """Writes a file whole or not at all, and makes its directory if needed.

    Raises:
      OptionError: it cannot be written.
    """
    try:
        if _is_in_place(path):
            path.write_bytes(data)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(path, data)
    except OSError as error:
        raise _error(path, error) from error


def _is_in_place(path: pathlib.Path) -> bool:
    """Returns whether a file must not be replaced: a link or a device, such as /dev/stdout."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def _error(path: pathlib.Path, error: OSError) -> OptionError:
    return OptionError(f"{path} cannot be written: {error.strerror or error}.")
