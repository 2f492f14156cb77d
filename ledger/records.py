"""Records of learning results: a JSON file for each experiment, arm and seed.

docs/results/records/NAME/ARM-seedN.json is a `Record`, which `ledger.running` writes. A result
from before there were records, or of runs stopped before their end, is an `Older`, written by
hand: docs/results/records/older/NAME.json.
Records hold raw data; means and intervals are computed where they are shown.
"""

import dataclasses
import json
import math
import pathlib
import re
import textwrap
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from impala.logdir import atomic
from ledger.experiments import REPORTING_SEEDS

FOLDER = "docs/results/records"
OLDER = "older"

_T = TypeVar("_T")
_MISSING = dataclasses.MISSING


class RecordError(ValueError):
    """A record cannot be used; the message names the file and says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Episodes of the trained agent on one task."""

    task: str
    command: str
    greedy: bool
    seed: int
    """Of environments and sampled actions."""
    returns: list[float]
    lengths: list[int]
    info: dict[str, list[float]]
    """Of each episode, at its end."""
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
    digests: dict[str, str]
    """Group of modules -> digest; see `ledger.digests`."""
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
    """Of the agent at the end, one for each task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Older:
    """Results without records, by hand: rows of tables, and what was written about them."""

    date: str
    commit: str | None
    """Of the code that was measured, or name and version of another program; None: not recorded."""
    reported: str | None
    """The commit that first showed these figures."""
    command: str | None
    seeds: list[int]
    body: list[dict[str, Any]]
    """In order: {"columns", "align", "rows"}, {"text": lines}, or {"picture", "alt", "sha256"}."""


class Ledger(NamedTuple):
    """All records of a source tree."""

    measured: Mapping[tuple[str, str], list[Record]]  # experiment, arm -> by seed
    older: Mapping[str, Older]


def path_of(root: pathlib.Path, experiment: str, arm: str, seed: int) -> pathlib.Path:
    """Returns the file of a record."""
    return root / FOLDER / experiment / f"{arm}-seed{seed}.json"


def read(root: pathlib.Path) -> Ledger:
    """Returns all records of a source tree.

    Raises:
      RecordError: one is damaged, or is not where its contents belong.
    """
    measured: dict[tuple[str, str], list[Record]] = {}
    older = {}
    for path in sorted((root / FOLDER).glob("*/*.json")):
        if path.parent.name == OLDER:
            older[path.stem] = load(path, Older)
            _check_body(path, older[path.stem])
            continue
        record = load(path, Record)
        if path != path_of(root, record.experiment, record.arm, record.seed):
            raise RecordError(
                f"{path} holds {record.experiment}, {record.arm}, seed {record.seed}: it must be "
                f"named {path_of(root, record.experiment, record.arm, record.seed)}."
            )
        check_seed(record.seed, f"{path}: ")
        measured.setdefault((record.experiment, record.arm), []).append(record)
    by_seed = {key: sorted(found, key=lambda x: x.seed) for key, found in measured.items()}
    return Ledger(by_seed, older)


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


def load(path: pathlib.Path, kind: type[_T]) -> _T:
    """Reads a file as a dataclass of this module.

    Raises:
      RecordError: it cannot be read, is damaged, or has other fields.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_not_a_number)
        return _from_plain(data, kind, "")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise RecordError(
            f"{path} is damaged ({error}). Restore it (git checkout), or delete it and run its "
            "experiment again."
        ) from error


def save(path: pathlib.Path, record: Any) -> None:
    """Writes a dataclass of this module to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, to_json(dataclasses.asdict(record)).encode())


def to_json(data: Any) -> str:
    """Returns plain data as JSON: sorted and indented, with lists of numbers in a few lines."""
    text = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False)
    return re.sub(r"\[\n\s*([-\d][^\[\]{}\"]*)\]", _packed, text) + "\n"


def rounded(number: float) -> float:
    """Returns a number with six significant digits, an integer if it is one."""
    short = float(f"{number:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _packed(match: re.Match[str]) -> str:
    """Returns a list of numbers in lines of 100 characters."""
    lines = textwrap.wrap(" ".join(match[1].split()), 100, break_on_hyphens=False)
    return f"[{lines[0]}]" if len(lines) == 1 else "[\n" + "\n".join(lines) + "]"


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _from_plain(data: Any, kind: Any, where: str) -> Any:
    """Returns plain data as a type hint asks for.

    Raises:
      ValueError: it is something else.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        has = data.keys() if isinstance(data, dict) else set()
        newer = {x.name for x in dataclasses.fields(kind) if x.default_factory is not _MISSING}
        if differing := sorted((hints.keys() ^ has) - (newer - has)):
            raise ValueError(f"{where or 'the record'} lacks or should not have {differing}")
        values = {name: _from_plain(data[name], hints[name], name) for name in has}
        return typing.cast(Any, kind)(**values)
    if origin is list and isinstance(data, list):
        return [_from_plain(item, parts[0], where) for item in data]
    if origin is dict and isinstance(data, dict):
        return {name: _from_plain(item, parts[1], f"{where}.{name}") for name, item in data.items()}
    if kind is float and type(data) in (int, float) and math.isfinite(data):
        return data
    if kind is Any or (origin is None and type(data) is kind):
        return data
    if origin not in (list, dict, None) and isinstance(data, kind):  # str | None
        return data
    raise ValueError(f"{where} is {str(data)[:40]!r}, which is no {kind}")


def _check_body(path: pathlib.Path, older: Older) -> None:
    for block in older.body:
        if block.keys() not in (
            {"columns", "align", "rows"},
            {"text"},
            {"picture", "alt", "sha256"},
        ):
            raise RecordError(f"{path}: there is no block with {sorted(block)}.")
        if any(len(row) != len(block["columns"]) for row in block.get("rows", ())):
            raise RecordError(f"{path}: a row is not as long as {block['columns']}.")
