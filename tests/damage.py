"""Damages the files of a run at random and sees what becomes of those who read them.

`PYTHONPATH=tests python -m damage --cases 10000 --starts 50 --seed 1` trains Catch for a few
seconds, with replay on disk and an evaluator. Each case then damages a checkpoint, the replay or
the evaluations, and lets a process of its own load all of them; each start lets a whole learner
load them. Nothing may load wrong, end by a signal or a traceback, or hang: each has to be as it
was, to fall back, or to be refused in one line. A table says what happened; the exit status is 1
if anything was bad.
"""

import argparse
import collections
import contextlib
import json
import logging
import os
import pathlib
import random
import re
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import messages
import numpy as np
import services

from impala.analysis import continual
from impala.logdir import checkpoint, json_lines
from impala.logdir.checkpoint import Checkpoint, CheckpointError
from impala.logdir.directory import LogDirectory, StorageError
from learner.data.replay import Replay
from learner.data.storage import Disk, Record

CASE_SECONDS = 60.0
START_SECONDS = 600.0
BAD = "BAD"
OUTCOMES = ("intact", "fell back", "emptied", "lines lost", "refused", BAD)
_PAGE = 4096
_SETTINGS = (
    *("--total-frames", 1_000_000_000, "--mix.fresh", 16, "--mix.replayed", 16),
    *("--learner.checkpoint-seconds", 1.0, "--evaluator.every-frames", 5_000),
)


class Original(NamedTuple):
    """What the files say while they are intact."""

    files: Mapping[str, bytes]  # by path in the log directory
    checkpoints: Mapping[str, Checkpoint]  # by name, the newest last
    records: Mapping[int, Record]
    identity: str  # of the replay
    reports: list[object]


def original(logdir: pathlib.Path) -> Original:
    """Reads the log directory of a run that has ended."""
    files = {
        str(path.relative_to(logdir)): path.read_bytes()
        for path in sorted(logdir.rglob("*"))
        if path.is_file() and "tensorboard" not in path.parts
    }
    saved = sorted((logdir / "checkpoints").iterdir(), key=lambda path: path.name[-6:])
    checkpoints = {path.name: checkpoint.read(path) for path in saved}
    with contextlib.closing(sqlite3.connect(logdir / "replay" / "replay.sqlite")) as connection:
        sealed = connection.execute("SELECT content FROM meta WHERE number = 1").fetchone()[0]
    identity = sealed[:-16].decode()
    disk = Disk(logdir / "replay", identity)
    records = {number: disk.get(number) for number, _ in disk.heads()}
    disk.close()
    reports = json_lines.read(logdir / "evaluations.jsonl", continual.parse)
    assert len(checkpoints) > 1 and records and len(reports) > 1
    return Original(files, checkpoints, records, identity, list(reports))


def train(logdir: pathlib.Path) -> None:
    """Makes a log directory by training for a few seconds, twice."""
    arguments = ("train", "catch", "--logdir", logdir, *_SETTINGS, "--evaluate", "yes")
    for _ in range(2):
        seen = len(services.rows(logdir))
        with services.impala(*arguments, log=logdir.with_suffix(".log")) as training:
            services.wait_for_row(
                logdir,
                "an evaluation after many updates",
                lambda row: "evaluation/Catch/return" in row and row["updates"] >= 30,
                after=seen,
            )
            _stop(training, signal.SIGINT)


# What may happen to the content of a file. None: the file is gone.


def flip(content: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def truncate(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.choice([0, rng.randrange(len(content)), len(content) - 1])]


def zero(content: bytearray, rng: random.Random) -> bytearray:
    start = _PAGE * rng.randrange(-(-len(content) // _PAGE))
    end = min(len(content), start + _PAGE)
    content[start:end] = bytes(end - start)
    return content


def swap(content: bytearray, rng: random.Random) -> bytearray:
    """A page is written in the place of another one."""
    pages = -(-len(content) // _PAGE)
    from_, to = (_PAGE * rng.randrange(pages) for _ in range(2))
    page = content[from_ : from_ + _PAGE]
    content[to : to + len(page)] = page
    return content


def scribble(content: bytearray, rng: random.Random) -> bytearray:
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randrange(1, 200))
    content[start:end] = rng.randbytes(end - start)
    return content


def lengthen(content: bytearray, rng: random.Random) -> bytearray:
    return content + rng.randbytes(rng.choice([1, 100, _PAGE]))


def duplicate(content: bytearray, rng: random.Random) -> bytearray:
    """The end of the file is there twice."""
    return content + content[rng.randrange(len(content)) :]


def remove(content: bytearray, rng: random.Random) -> None:
    return None


DAMAGES: tuple[Callable[[bytearray, random.Random], bytearray | None], ...] = (
    *(flip, flip, truncate, zero, swap, scribble, lengthen, duplicate, remove),
)


def apply(
    logdir: pathlib.Path, files: Mapping[str, bytes], names: list[str], rng: random.Random
) -> list[tuple[str, str]]:
    """Damages one of the files, now and then two; returns which, and how."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 1, 2])):
        name, damage = rng.choice(names), rng.choice(DAMAGES)
        if not files[name]:  # such as a journal of nothing
            damage = lengthen
        content = damage(bytearray(files[name]), rng)
        if content is None:
            (logdir / name).unlink(missing_ok=True)
        else:
            (logdir / name).write_bytes(content)
        done.append((_kind(name), damage.__name__))
    return done


def _kind(name: str) -> str:
    return {"checkpoints": "checkpoint", "replay": "replay"}.get(name.split("/")[0], name)


def targets(files: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Names of files that loaders read, by kind."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for name in files:
        if name.startswith(("checkpoints/", "replay/", "evaluations")):
            found[_kind(name)] += [name] * (1 if name.endswith("-journal") else 5)
    return dict(found)


# Loaders: each returns an outcome, or raises.


def load_checkpoint(logdir: pathlib.Path, intact: Original, log: list[str]) -> str:
    try:
        loaded = checkpoint.load(logdir)
    except CheckpointError as error:
        return _refused(error)
    for name, known in intact.checkpoints.items():
        if _same(loaded, known):
            is_newest = name == list(intact.checkpoints)[-1]
            if not is_newest and len(log) != 1:
                return f"{BAD}: fell back and said {log}"
            return "intact" if is_newest else "fell back"
    return f"{BAD}: loaded what was never saved"


def load_replay(logdir: pathlib.Path, intact: Original, log: list[str]) -> str:
    """Refuses damage first, to see all that is there, then heals it."""
    outcome = _load_replay(logdir, intact, log, goes_on=False)
    if outcome == "refused":
        log.clear()
        healed = _load_replay(logdir, intact, log, goes_on=True)
        if healed not in ("emptied", "refused"):
            return f"{BAD}: refused, then {healed}"
        return healed
    return outcome


def _load_replay(logdir: pathlib.Path, intact: Original, log: list[str], goes_on: bool) -> str:
    directory = LogDirectory(logdir)
    counted = max(saved.replay_added for saved in intact.checkpoints.values())
    try:
        move_aside = (lambda: directory.move_replay_aside("damaged")) if goes_on else None
        store = Disk(directory.replay, intact.identity, move_aside, counted)
        replay = Replay(messages.spec(), store, "reservoir", capacity_frames=10**12)
        if replay.contents().added < counted:  # as learner.data.opening compares them
            return "refused"
        numbers = messages.held(replay).tolist()
        if not numbers:
            return "emptied" if any("Going on" in line for line in log) else f"{BAD}: is empty"
        if numbers != list(intact.records):
            return f"{BAD}: holds other unrolls"
        if any(store.get(number) != intact.records[number] for number in numbers):
            return f"{BAD}: holds other contents"
        replay.commit()
        return "intact"
    except StorageError as error:
        if goes_on:  # what is found in a draw: as learner.data.replay goes on
            store.start_over(error)  # type: ignore[arg-type]
            return "emptied"
        return _refused(error)
    finally:
        directory.__exit__(None, None, None)


def load_evaluations(logdir: pathlib.Path, intact: Original, log: list[str]) -> str:
    left = list(intact.reports)
    for report in json_lines.read(logdir / "evaluations.jsonl", continual.parse):
        while left and left[0] != report:
            left.pop(0)
        if not left:
            return f"{BAD}: read a report that was not written there: {report}"
        left.pop(0)
    try:
        run = continual.read(logdir)
        continual.summary(run)
    except ValueError as error:
        return _refused(error)
    found = sum(len(curve.frames) for curve in run.curves.values())
    return "intact" if not log and found else "lines lost"


LOADERS = {
    "checkpoint": load_checkpoint,
    "replay": load_replay,
    "evaluations.jsonl": load_evaluations,
}


def _refused(error: Exception) -> str:
    return "refused" if "\n" not in str(error) else f"{BAD}: refused in several lines: {error}"


def _same(one: Checkpoint, other: Checkpoint) -> bool:
    return (
        one._replace(variables={}) == other._replace(variables={})
        and list(one.variables) == list(other.variables)
        and all(
            value.dtype == other.variables[name].dtype
            and np.array_equal(value, other.variables[name])
            for name, value in one.variables.items()
        )
    )


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno > logging.INFO:
            self.lines.append(record.getMessage())


def in_child(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Runs `work` in a fork; whatever becomes of it is an outcome."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(work())
        except BaseException:
            answer = json.dumps({"all": f"{BAD}: {traceback.format_exc()}"})
        with contextlib.suppress(BaseException):
            os.write(writes, answer.encode())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        if not select.select([pipe], [], [], CASE_SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"all": f"{BAD}: hangs"}
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"all": f"{BAD}: ended by signal {os.WTERMSIG(status)}"}
    found: dict[str, str] = json.loads(outcome)
    return found


def run_loaders(logdir: pathlib.Path, intact: Original) -> dict[str, str]:
    """The outcome of each loader."""
    handler = _Lines()
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    found = {}
    for kind, loader in LOADERS.items():
        handler.lines.clear()
        try:
            found[kind] = loader(logdir, intact, handler.lines)
        except Exception:
            found[kind] = f"{BAD}: {traceback.format_exc()}"
    return found


def restore(logdir: pathlib.Path, files: Mapping[str, bytes]) -> None:
    """Makes the log directory what it was."""
    for path in logdir.iterdir():
        if path.name.startswith("replay"):
            shutil.rmtree(path)
    for name, content in files.items():
        path = logdir / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


Results = collections.Counter[tuple[str, str, str]]  # kind of file, damage, outcome


def cases(logdir: pathlib.Path, intact: Original, count: int, seed: int) -> Iterator[Results]:
    """Damages and loads, `count` times; yields what became of each."""
    by_kind = targets(intact.files)
    names = {name: intact.files[name] for of_kind in by_kind.values() for name in of_kind}
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        restore(logdir, names)
        done = apply(logdir, names, by_kind[rng.choice(list(by_kind))], rng)
        outcomes = in_child(lambda: run_loaders(logdir, intact))
        damaged = {kind for kind, _ in done}
        results: Results = collections.Counter()
        for kind, outcome in outcomes.items():
            if kind not in damaged and outcome != "intact":
                outcome = outcome if outcome.startswith(BAD) else f"{BAD}: {outcome} undamaged"
            if outcome.startswith(BAD):
                print(f"Case {number} of seed {seed}: {done}, {kind}: {outcome}", flush=True)
            if kind in damaged or outcome.startswith(BAD):
                results[kind, _how(done), outcome.split(":")[0]] += 1
        yield results


def _how(done: list[tuple[str, str]]) -> str:
    return done[0][1] if len(done) == 1 else "two of these"


def starts(logdir: pathlib.Path, intact: Original, count: int, seed: int) -> Iterator[Results]:
    """Starts learners on damaged directories, `count` times; yields what became of each."""
    names = {name: content for name, content in intact.files.items() if not name.endswith(".log")}
    for number in range(count):
        rng = random.Random(f"{seed} start {number}")
        with tempfile.TemporaryDirectory() as directory:
            copy = pathlib.Path(directory, "run")
            shutil.copytree(logdir, copy)
            restore(copy, names)
            kinds = collections.defaultdict(list)
            for name in names:
                kinds[_kind(name)].append(name)
            often = [kind for kind in LOADERS if kind in kinds]
            done = apply(copy, names, kinds[rng.choice([*sorted(kinds), *3 * often])], rng)
            outcome = _start(copy, intact)
        if outcome.startswith(BAD):
            print(f"Start {number} of seed {seed}: {done}: {outcome}", flush=True)
        yield collections.Counter([(f"start, {done[0][0]}", _how(done), outcome.split(":")[0])])


def _start(logdir: pathlib.Path, intact: Original) -> str:
    (logdir / "address").unlink(missing_ok=True)
    log = logdir.with_suffix(".start.log")
    arguments = ("learner", "catch", "--logdir", logdir, "--listen", "127.0.0.1:0", *_SETTINGS)
    with services.impala(*arguments, log=log) as learner:
        end = time.monotonic() + START_SECONDS
        while learner.poll() is None and not (logdir / "address").exists():
            if time.monotonic() > end:
                return f"{BAD}: hangs: {log.read_text()}"
            time.sleep(0.1)
        serves = learner.poll() is None
        status = _stop(learner, signal.SIGTERM) if serves else learner.returncode
    text = log.read_text(errors="replace")
    if "Traceback" in text or status not in (0, 2) or (status == 0) != serves:
        return f"{BAD}: status {status}: {text}"
    if status == 2:
        said = [line for line in text.splitlines() if line.startswith("impala: ")]
        return "refused" if len(said) == 1 else f"{BAD}: not one line: {text}"
    resumed = re.findall(r"Resumed .* at (Counters\(.*?\))", text)
    known = [str(saved.counters) for saved in intact.checkpoints.values()]
    if len(resumed) != 1 or resumed[0] not in known:
        return f"{BAD}: resumed at {resumed}, of {known}: {text}"
    if "Going on with an empty one" in text:
        return "emptied"
    return "intact" if resumed[0] == known[-1] else "fell back"


def _stop(process: "subprocess.Popen[bytes]", number: int) -> int:
    process.send_signal(number)
    return process.wait(START_SECONDS)


def table(results: Results) -> str:
    """Lines: the kind of file and the damage; columns: the outcomes."""
    rows = sorted({(kind, damage) for kind, damage, _ in results})
    lines = [
        f"| file | damage | {' | '.join(OUTCOMES)} |",
        f"|---|---|{'---:|' * len(OUTCOMES)}",
    ]
    for kind, damage in rows:
        counts = [results[kind, damage, outcome] for outcome in OUTCOMES]
        lines.append(f"| {kind} | {damage} | {' | '.join(map(str, counts))} |")
    totals = [sum(n for (*_, o), n in results.items() if o == outcome) for outcome in OUTCOMES]
    return "\n".join([*lines, f"| all | | {' | '.join(map(str, totals))} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logdir", type=pathlib.Path, help="of such a run, instead of training")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="damage-") as directory:
        logdir = pathlib.Path(directory, "run")
        if arguments.logdir:
            shutil.copytree(arguments.logdir, logdir)
        else:
            print("Training Catch for a few seconds.", flush=True)
            train(logdir)
        intact = original(logdir)
        results: Results = collections.Counter()
        for number, result in enumerate(cases(logdir, intact, arguments.cases, arguments.seed), 1):
            results += result
            if number % 1000 == 0:
                print(f"{number} cases.", flush=True)
        restore(logdir, intact.files)
        for result in starts(logdir, intact, arguments.starts, arguments.seed):
            results += result
    print(table(results))
    return int(any(outcome == BAD for *_, outcome in results))


if __name__ == "__main__":
    sys.exit(main())
