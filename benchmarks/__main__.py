"""`make bench`: measures this machine and the services on it, prints a table, writes JSON."""

import argparse
import importlib
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import rich.console
import rich.table

from benchmarks.setting import CONFIG, Options, machine
from impala.config import presets, values
from impala.runtime import process, tether

_BY_DEFAULT = ("training", "ingest", "replay")
_PARTS = (*_BY_DEFAULT, "actor", "gpu", "pipe", "profile", "peers")  # modules of this package


def main() -> int:
    """Runs the selected benchmarks; by default, the quick ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        help=f"of {', '.join(_PARTS)}; default: {', '.join(_BY_DEFAULT)}",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="for each measurement")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("build/bench.json"))
    parser.add_argument(
        "--preset", choices=presets.PRESETS, default="catch", help="actor: what it plays"
    )
    parser.add_argument(
        "--trial", action="store_true", help="gpu: a tiny batch, on a CPU if there is no GPU"
    )
    parser.add_argument(
        "--against", type=pathlib.Path, help="pipe: another checkout, measured in turn"
    )
    arguments = parser.parse_args()
    parts = arguments.parts or _BY_DEFAULT
    if unknown := set(parts) - set(_PARTS):
        parser.error(f"no part {sorted(unknown)[0]!r}; there are {', '.join(_PARTS)}")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    process.prefer_onednn()

    options = Options(arguments.seconds, arguments.preset, arguments.trial, arguments.against)
    console = rich.console.Console()
    named = f"{machine()}, {time.strftime('%Y-%m-%d')}"
    results: dict[str, Any] = {"machine": named, "config": values.to_dict(CONFIG)}
    for part in parts:
        results[part] = _measured(part, options)
        table = rich.table.Table("measured", "value", title=f"{part} ({named})")
        for name, value in results[part].items():
            table.add_row(name, f"{value:,.3g}" if value < 100 else f"{value:,.0f}")
        console.print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"Written to {arguments.json}.")
    return 0


def _measured(part: str, options: Options) -> dict[str, float]:
    """Measures a part in a process of its own, as TensorFlow's threads can be set only once."""
    # Forked, as a spawned one does not find the functions of this module; nothing with threads is
    # imported here.
    context = multiprocessing.get_context("fork")
    results, child_end = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(child_end, os.getpid(), part, options))
    child.start()
    child_end.close()
    try:
        measured: dict[str, float] = results.recv()
    except EOFError:  # the child has printed why
        raise SystemExit(1) from None
    finally:
        child.join()
    return measured


def _measure(to: Connection, parent: int, part: str, options: Options) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    tether.tie(parent)
    to.send(importlib.import_module(f"benchmarks.{part}").measure(CONFIG, options))


if __name__ == "__main__":
    sys.exit(main())
