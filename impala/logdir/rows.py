"""Reads rows of telemetry from a log directory."""

import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from impala.logdir import json_lines

Row = dict[str, float]

_RECENT = re.compile(r"episode/((?:(?!/info/).)+)/return_recent", re.DOTALL)
_PER_STEP = re.compile(r"task/(.+)/reward_per_step", re.DOTALL)


def read(logdir: pathlib.Path) -> list[Row]:
    """Returns a run's rows, without those that cannot be read; empty if there are none."""
    return json_lines.read(logdir / "metrics.jsonl", _parse)


def recent_returns(row: Row) -> Row:
    """Returns the mean return of the last 100 episodes of each task, by its name."""
    return _of_tasks(_RECENT, row)


def rewards_per_step(row: Row) -> Row:
    """Returns the mean raw reward of a step of each task, by its name: what tasks that never end
    have.
    """
    return _of_tasks(_PER_STEP, row)


def standings(of_run: Sequence[Row], per_step: bool = False) -> tuple[str, list[Row]]:
    """Returns what tells how well a run does, and for each of its rows that by task.

    These are recent returns, or rewards per step if no episode has ended in the run, or `per_step`.
    """
    returns = list(map(recent_returns, of_run))
    if any(returns) and not per_step:
        return "return, mean of\nthe last 100 episodes", returns
    return "reward per step", list(map(rewards_per_step, of_run))


def _of_tasks(name: re.Pattern[str], row: Row) -> Row:
    matches = [(name.fullmatch(each), value) for each, value in row.items()]
    return {match[1]: value for match, value in matches if match}


def _parse(line: Mapping[str, Any]) -> Row:
    row = {sys.intern(name): x for name, x in line.items() if json_lines.is_number(x)}
    row["frames"], row["seconds"]
    return row
