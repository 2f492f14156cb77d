"""Files of JSON objects, one per line, that tolerate damage when appended to or read.

A large file NAME.jsonl is continued in a new one: the parts before it are NAME.1.jsonl,
NAME.2.jsonl, ..., the oldest first.
"""

import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

_PART_BYTES = 32 * 2**20  # size at which the file becomes a part and a new one is begun

_INVALID = AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError

_T = TypeVar("_T")


class Appender:
    """Appends to such a file. A line that was not written completely affects no other."""

    def __init__(self, path: pathlib.Path):
        """Opens or makes the file.

        Args:
          path: ends in .jsonl.

        Raises:
          OSError: it cannot be written.
        """
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._is_torn = _ends_torn(path)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line, which is in the file when this returns.

        Raises:
          OSError: it was not written, or only a part of it.
          ValueError: `line` has a number that JSON cannot represent: NaN or infinity.
        """
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        if self._file.tell() + len(data) > _PART_BYTES:
            self._begin_part()
        if self._is_torn:
            data = b"\n" + data
        self._is_torn = True  # until it is complete
        done = self._file.write(data)
        if done < len(data):
            raise OSError(f"Only {done} of {len(data)} bytes could be written to {self._path}.")
        self._is_torn = False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _begin_part(self) -> None:
        if not self._file.tell():
            return
        numbers = [number for number, _ in _parts(self._path)]
        part = self._path.with_suffix(f".{max(numbers, default=0) + 1}.jsonl")
        self._path.rename(part)
        try:
            new = open(self._path, "ab", buffering=0)  # noqa: SIM115
        except OSError:
            part.rename(self._path)  # the next line tries again
            raise
        self._file.close()
        self._file = new
        self._is_torn = False


def read(path: pathlib.Path, parse: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """Reads all parts of a file; lines that cannot be read are skipped, with one log message.

    Args:
      path: of the newest part, which need not exist.
      parse: converts the object in a line. AttributeError, KeyError, TypeError, ValueError and
        ArithmeticError mean that the line is invalid.

    Returns:
      The results of `parse`, in the order of the lines.
    """
    found = []
    bad: list[str] = []
    for part in [*(part for _, part in _parts(path)), path]:
        lines = part.read_bytes().split(b"\n") if part.is_file() else []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found.append(parse(json.loads(line)))
            except _INVALID:
                bad.append(f"line {number} of {part}")
    if bad:
        _log.warning("Skipped %d that cannot be read, the first is %s.", len(bad), bad[0])
    return found


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a finite number and no bool."""
    return type(value) in (int, float) and abs(value) < math.inf and value == value


def _parts(path: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """Returns the parts before the newest, with their numbers, the oldest first."""
    named = re.compile(re.escape(path.stem) + r"\.(\d{1,9})\.jsonl")
    if not path.parent.is_dir():
        return []
    matches = [(named.fullmatch(other.name), other) for other in path.parent.iterdir()]
    return sorted((int(match[1]), other) for match, other in matches if match)


def _ends_torn(path: pathlib.Path) -> bool:
    """Returns whether the last line is incomplete, because its writer failed."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size > 0 and file.read(1) != b"\n"
