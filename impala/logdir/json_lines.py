"""Files of JSON objects, one a line: appended to whatever happens, and read back whatever is there.

Such a file NAME.jsonl is started anew when it is large: the parts before it are NAME.1.jsonl,
NAME.2.jsonl, ..., the oldest first. Lines may be sealed: then one that says something else by now,
or is there a second time, is not read.
"""

import hashlib
import io
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

PART_BYTES = 32 * 2**20
_PLACE, _DIGEST = "at", "sha256"

_T = TypeVar("_T")


class Appender:
    """Appends to such a file. A line that could not be written as a whole spoils no other."""

    def __init__(self, path: pathlib.Path, part_bytes: int = PART_BYTES, seals: bool = False):
        """Opens or makes the file.

        Args:
          path: ends in .jsonl.
          part_bytes: beyond so many, the file becomes a part and a new one is begun.
          seals: whether each line gets its place and a digest.

        Raises:
          OSError: it cannot be written.
        """
        self._path = path
        self._part_bytes = part_bytes
        self._seals = seals
        self._file = _open(path)
        self._is_torn = _ends_torn(path)
        self.written = 0
        """Bytes that were appended."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line, which is in the file when this returns.

        Raises:
          OSError: it is not, or only a part of it.
          ValueError: `line` has a number that JSON does not know: NaN or infinity.
        """
        data = self._encoded(line)
        if self._file.tell() + len(data) > self._part_bytes:
            self._begin_part()
            data = self._encoded(line)
        if self._is_torn:
            data = b"\n" + data
        self._is_torn = True  # until all of it is there
        done = self._file.write(data)
        self.written += done
        if done < len(data):
            raise OSError(f"Only {done} of {len(data)} bytes could be written to {self._path}.")
        self._is_torn = False

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _encoded(self, line: Mapping[str, Any]) -> bytes:
        if self._seals:
            line = {**line, _PLACE: self._file.tell()}
            line[_DIGEST] = _digest(line)
        return json.dumps(line, allow_nan=False).encode() + b"\n"

    def _begin_part(self) -> None:
        if not self._file.tell():
            return
        numbers = [number for number, _ in _parts(self._path)]
        part = self._path.with_suffix(f".{max(numbers, default=0) + 1}.jsonl")
        self._path.rename(part)
        try:
            new = _open(self._path)
        except OSError:
            part.rename(self._path)  # the next line tries it again
            raise
        self._file.close()
        self._file = new
        self._is_torn = False


def read(path: pathlib.Path, parse: Callable[[dict[str, Any]], _T]) -> list[_T]:
    """Reads all parts of a file, as far as they can be read; what cannot is logged in one line.

    Args:
      path: of the newest part, which need not be there.
      parse: makes something of the object in a line. KeyError, TypeError, ValueError and
        ArithmeticError mean that there is nothing to be made of it.

    Returns:
      What `parse` returned, in the order of the lines.
    """
    found = []
    bad: list[str] = []
    for part in [*(part for _, part in _parts(path)), path]:
        place = -1  # of the sealed line before
        for number, line in _lines(part):
            try:
                if not isinstance(row := json.loads(line), dict):
                    raise ValueError("It is no object.")
                if _DIGEST in row:
                    row, place = _unsealed(row, place)
                found.append(parse(row))
            except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
                bad.append(f"line {number} of {part}")
    if bad:
        _log.warning("Skipped %d that cannot be read, the first is %s.", len(bad), bad[0])
    return found


def _unsealed(line: Mapping[str, Any], before: int) -> tuple[dict[str, Any], int]:
    """What was sealed, and its place, which must be behind `before`.

    Raises:
      KeyError, TypeError, ValueError: it says something else, or is in another place.
    """
    content = {name: value for name, value in line.items() if name != _DIGEST}
    if line[_DIGEST] != _digest(content) or content[_PLACE] <= before:
        raise ValueError("It differs from its digest, or is in another place.")
    place = content.pop(_PLACE)
    return content, place


def _digest(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:16]


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number such as telemetry has: finite, and no bool."""
    return type(value) in (int, float) and abs(value) < math.inf and value == value


def _open(path: pathlib.Path) -> io.FileIO:
    return open(path, "ab", buffering=0)


def _parts(path: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """The parts before the newest, with their numbers, the oldest first."""
    named = re.compile(re.escape(path.stem) + r"\.(\d{1,9})\.jsonl")
    if not path.parent.is_dir():
        return []
    matches = [(named.fullmatch(other.name), other) for other in path.parent.iterdir()]
    return sorted((int(match[1]), other) for match, other in matches if match)


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not empty, with their numbers, counted from 1."""
    if path.is_file():
        with open(path, "rb") as file:
            yield from ((i, line) for i, line in enumerate(file, 1) if line.strip())


def _ends_torn(path: pathlib.Path) -> bool:
    """Whether the last line has no end, since whoever wrote it was killed or its disk was full."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size > 0 and file.read(1) != b"\n"
