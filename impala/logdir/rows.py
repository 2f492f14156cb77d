"""Reads rows of telemetry from a log directory."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from impala.logdir import json_lines

Row = dict[str, float]

_RECENT = re.compile(r"episode/((?:(?!/info/).)+)/return_recent", re.DOTALL)


def read(logdir: pathlib.Path) -> list[Row]:
    """Returns a run's rows, without those that cannot be read; empty if there are none."""
    return json_lines.read(logdir / "metrics.jsonl", _parse)


def recent_returns(row: Row) -> Row:
    """Returns the mean return of the last 100 episodes of each task, by its name."""
    matches = [(_RECENT.fullmatch(name), value) for name, value in row.items()]
    return {match[1]: value for match, value in matches if match}


def _parse(line: Mapping[str, Any]) -> Row:
    row = {name: value for name, value in line.items() if json_lines.is_number(value)}
    row["frames"], row["seconds"]
    return row
