"""The `impala` command: dispatches to the commands.

A composition root: it imports from everywhere and nothing imports it. Each command imports what it
needs when it runs, so that help and typos are answered without loading TensorFlow.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any

from impala.commands.actor import Actor, actor
from impala.commands.check import Check, check
from impala.commands.conform import Conform, conform
from impala.commands.evaluate import Evaluate, evaluate
from impala.commands.export import Export, export
from impala.commands.flags import STOPPED
from impala.commands.learner import Learner, learner
from impala.commands.parsing import parse
from impala.commands.plot import Plot, plot
from impala.commands.presets import Presets, presets
from impala.commands.record import Record, record
from impala.commands.report import Report, report
from impala.commands.status import Status, status
from impala.commands.sweep import Sweep, sweep
from impala.commands.train import Train, train
from impala.config import values
from impala.runtime import installation, process
from impala.runtime.logs import say_failure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns its exit status; 2: the command line is wrong."""
    process.outlive_readers()  # of help, for instance: `impala train --help | head`
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(_version())
        return 0
    try:
        name = values.choice("The command", argv[0], COMMANDS)
        command_type, run = COMMANDS[name]
        return run(parse(name, command_type, argv[1:]))
    except values.OptionError as error:
        say_failure(str(error))
        return 2


COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "train": (Train, train),
    "learner": (Learner, learner),
    "actor": (Actor, actor),
    "check": (Check, check),
    "status": (Status, status),
    "evaluate": (Evaluate, evaluate),
    "record": (Record, record),
    "export": (Export, export),
    "plot": (Plot, plot),
    "report": (Report, report),
    "sweep": (Sweep, sweep),
    "presets": (Presets, presets),
    "conform": (Conform, conform),
}
"""Name -> (its flags, the function that runs it)."""


def _version() -> str:
    """Returns the versions that may differ between two services, or a service and a checkpoint."""
    from impala.logdir import checkpoint
    from protos import codec

    protocol = codec.PROTOCOL_VERSION
    return "\n".join(
        [
            f"impala {installation.VERSION}",
            f"protocol {protocol.major}.{protocol.minor}",
            f"checkpoint schema {'.'.join(map(str, checkpoint.SCHEMA))}",
            f"TensorFlow {importlib.metadata.version('tensorflow')}",
        ]
    )


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"  {name:<{width}}  {(cls.__doc__ or '').splitlines()[0]}"
        for name, (cls, _) in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: impala COMMAND ...",
            "",
            "IMPALA as a service: distributed reinforcement learning with V-trace and replay.",
            "",
            *lines,
            "",
            "impala COMMAND --help explains a command and its settings; impala --version names the",
            "versions of program, protocol, checkpoints and TensorFlow.",
            "",
            f"Exit status: 0 done, 1 failed, 2 wrong usage, {STOPPED} training stopped before its",
            "end (the same command without --fresh goes on with it), 128 + N ended by signal N.",
        ]
    )
