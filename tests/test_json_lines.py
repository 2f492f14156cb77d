"""JSON lines: appended to what was torn, begun anew when large, and read whatever is there."""

import json
import logging
import pathlib
import random
from typing import IO

import pytest

from impala.analysis import continual, plot
from impala.logdir import json_lines
from impala.logdir.json_lines import Appender


def _append(path: pathlib.Path, *numbers: int) -> None:
    appender = Appender(path)
    for number in numbers:
        appender.write({"number": number})
    appender.close()


def _numbers(path: pathlib.Path) -> list[int]:
    return json_lines.read(path, lambda line: int(line["number"]))


def test_a_torn_line_does_not_swallow_the_next(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    _append(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-4])  # killed while it wrote
    _append(path, 3)
    with caplog.at_level(logging.WARNING):
        assert _numbers(path) == [1, 3]
    assert caplog.messages == [f"Skipped 1 that cannot be read, the first is line 2 of {path}."]


class _FullDisk:
    """A file that takes three bytes of a line, then none, until there is room again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.full = True

    def write(self, data: bytes) -> int:
        if not self.full:
            return self._file.write(data)
        if self._file.tell() > 16:
            raise OSError(28, "No space left on device")
        return self._file.write(data[:3])

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def test_what_a_full_disk_cut_off_spoils_no_other_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "rows.jsonl"
    _append(path, 10)  # 15 bytes
    appender = Appender(path)
    disk = appender._file = _FullDisk(appender._file)  # type: ignore[assignment]
    for number in (2, 3, 4):
        with pytest.raises(OSError, match=r"Only 3 of|No space"):
            appender.write({"number": number})
    disk.full = False
    appender.write({"number": 5})
    appender.close()
    assert _numbers(path) == [10, 5]


def test_a_large_file_is_begun_anew_and_read_as_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(json_lines, "_PART_BYTES", 100)
    for start in (0, 30, 60):  # three starts of a learner
        _append(path, *range(start, start + 30))
    assert _numbers(path) == list(range(90))
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 10
    assert all(part.stat().st_size <= 100 for part in parts)
    monkeypatch.setattr(json_lines, "_PART_BYTES", 5)
    _append(path, 90)  # smaller than a line: a line each
    assert _numbers(path)[-1] == 90


def test_numbers_outside_json_are_refused_before_writing(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    appender = Appender(path)
    with pytest.raises(ValueError, match="JSON"):
        appender.write({"number": float("nan")})
    appender.close()
    assert path.read_bytes() == b""


ODD: list[dict[str, object]] = [
    {"task": ["a"]},
    {"learner": None},
    {"frames": "100"},
    {"frames": -5},
    {"frames": True},
    {"returns": []},
    {"returns": 3},
    {"returns": "123"},
    {"returns": [float("nan")]},
    {"returns": [1e308, 1e308]},
    {"returns": [[1.0]]},
]
ABSURD = [
    b"",
    b"\0" * 4096,
    b"\xff\xfe binary \x80",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{}",
    b"[" * 100_000,
    b'{"learner": 1' + b"0" * 5000 + b"}",
    *[
        json.dumps({"task": "a", "learner": 5, "frames": 100, "returns": [1.0]} | odd).encode()
        for odd in ODD
    ],
]


def test_whatever_is_in_evaluations_the_rest_is_read(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    from test_continual import RETURNS, story

    path = story(tmp_path) / "evaluations.jsonl"
    good = path.read_bytes().splitlines()
    lines = good + ABSURD
    random.Random(0).shuffle(lines)
    whole = [line for line in lines if line in good]
    path.write_bytes(b"\n".join(whole))
    expected = continual.read(tmp_path)
    path.write_bytes(b"\n".join([*lines, good[0][:20]]))
    with caplog.at_level(logging.WARNING):
        run = continual.read(tmp_path)
    (line,) = caplog.messages
    assert f"Skipped {len(ABSURD)} " in line  # the empty one is none, the torn one is one
    assert set(run.curves) == set(RETURNS)
    for name, curve in run.curves.items():
        assert curve.returns.tolist() == expected.curves[name].returns.tolist()
    continual.summary(run)
    plot.draw([tmp_path], tmp_path / "figure.png")
