"""Writes files atomically: a reader, even after a crash, finds the old content or the new."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: pathlib.Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a file that replaces `path`, flushed to the disk, when the block ends.

    If the block or the disk raises an error, `path` is unchanged and the new file is removed. A
    crash may leave a file whose name ends in `.partial`.

    Args:
      path: of the file, which need not exist. Its directory does.
      mode: permissions of the new file, before the umask.

    Raises:
      OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(partial, flags, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error counts; on a full disk, space is freed
            partial.unlink()
        raise


def flush_directory(path: pathlib.Path) -> None:
    """Flushes the names in a directory, so that they survive a crash of the machine.

    Raises:
      OSError: the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write(path: pathlib.Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a small file, as `replacing` does."""
    with replacing(path, mode) as file:
        file.write(data)
