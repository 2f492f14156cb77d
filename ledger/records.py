"""Records of learning results: one compressed file for each experiment.

ledger/records/NAME.jsonl.gz holds a `Record` in each line, which `ledger.running` adds. Records
hold raw data; means and intervals are computed where they are shown.
"""

import dataclasses
import fcntl
import gzip
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from impala.logdir import atomic
from ledger.experiments import REPORTING_SEEDS

FOLDER = "ledger/records"


class RecordError(ValueError):
    """A record cannot be used; the message names the file and says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Episodes of the trained agent on one task."""

    task: str
    command: str
    greedy: bool
    seed: int
    """Seed of environments and sampled actions."""
    returns: list[float]
    lengths: list[int]
    info: dict[str, list[float]]
    """Info of each episode, at its end."""
    steps: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)
    """Info -> of each step of some episodes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A run to its end, and what its agent came to."""

    experiment: str
    arm: str
    seed: int
    command: str
    commit: str
    date: str
    machine: str
    settings: dict[str, Any]
    """All of them, nested."""
    frames: int
    seconds: float
    """From the start of the command to its end, evaluation not included. Of a session that was
    killed, what its telemetry has."""
    other_cores: float
    """Cores that other processes of the machine used meanwhile, on average."""
    sessions: int
    """1 + how often it was stopped and resumed."""
    training: dict[str, list[list[float]]]
    """Task -> rows of frames, seconds and the mean return of the last 100 episodes, thinned."""
    evaluations: list[dict[str, Any]]
    """Lines of evaluations.jsonl: of evaluators beside training."""
    final: list[Evaluation]
    """Evaluations of the agent at the end, one for each task."""


Ledger = Mapping[tuple[str, str], Sequence[Record]]
"""All records of a source tree: experiment, arm -> by seed."""


def path_of(root: pathlib.Path, experiment: str) -> pathlib.Path:
    """Returns the file of an experiment's records."""
    return root / FOLDER / f"{experiment}.jsonl.gz"


def read(root: pathlib.Path) -> Ledger:
    """Returns all records of a source tree.

    Raises:
      RecordError: a file is damaged, or a record is not where it belongs.
    """
    measured: dict[tuple[str, str], list[Record]] = {}
    for path in sorted((root / FOLDER).glob("*.jsonl.gz")):
        for record in load(path):
            if path != path_of(root, record.experiment):
                raise RecordError(f"{path} holds a record of {record.experiment}.")
            check_seed(record.seed, f"{path}: ")
            measured.setdefault((record.experiment, record.arm), []).append(record)
    return measured


def check_seed(seed: int, where: str = "") -> None:
    """Checks that results of a seed may be reported.

    Raises:
      RecordError: it is below 101.
    """
    if seed < REPORTING_SEEDS:
        raise RecordError(
            f"{where}seed {seed} is not for reporting: presets are tuned on seeds 1 to 20, so "
            f"results are reported over seeds from {REPORTING_SEEDS} on."
        )


def load(path: pathlib.Path) -> list[Record]:
    """Reads a file of records.

    Raises:
      RecordError: it cannot be read, is damaged, or has other fields.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [_record(line) for line in file]
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise RecordError(
            f"{path} cannot be read ({error}). Restore it (git checkout), or delete it and run its "
            "experiment again."
        ) from error


def save(path: pathlib.Path, records: Sequence[Record]) -> None:
    """Writes records to a file, the same bytes for the same records."""
    lines = [json.dumps(dataclasses.asdict(each), ensure_ascii=False) for each in records]
    atomic.write(path, gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def add(root: pathlib.Path, record: Record) -> None:
    """Adds a record to its experiment's file; one of the same arm and seed is replaced.

    Whoever adds at the same time waits, so that no record is lost.
    """
    path = path_of(root, record.experiment)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        found = {(x.arm, x.seed): x for x in (load(path) if path.exists() else [])}
        found[record.arm, record.seed] = record
        save(path, [found[key] for key in sorted(found)])
    finally:
        os.close(folder)


def rounded(number: float) -> float:
    """Returns a number with six significant digits, an integer if it is one."""
    short = float(f"{number:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _record(line: str) -> Record:
    data = json.loads(line, parse_constant=_not_a_number)
    return Record(**data | {"final": [Evaluation(**each) for each in data["final"]]})


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")
