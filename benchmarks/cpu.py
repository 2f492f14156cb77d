"""CPU time of the programs of a run, read from /proc (Linux)."""

import os
import pathlib

_TICKS = os.sysconf("SC_CLK_TCK")


def seconds(parent: int) -> dict[str, float]:
    """Returns the CPU time of each `impala` program that a process has started.

    Args:
      parent: process id of `impala train`.

    Returns:
      Seconds by what spends them: a program's main thread, and its other threads together. An
      actor's main thread assembles unrolls and calls the others, which emulate and infer. A
      learner's main thread waits while TensorFlow's threads compute.
    """
    spent: dict[str, float] = {}
    for process in descendants(parent):
        words = (pathlib.Path("/proc") / str(process) / "cmdline").read_bytes().split(b"\0")
        program = next((w.decode() for w in words if w in (b"learner", b"actor")), None)
        if program is None:
            continue
        for thread in pathlib.Path(f"/proc/{process}/task").iterdir():
            name = f"{program}, {'main thread' if int(thread.name) == process else 'others'}"
            spent[name] = spent.get(name, 0.0) + _ticks(thread) / _TICKS
    return spent


def descendants(parent: int) -> list[int]:
    """Returns the process ids of the children of a process, of theirs, and so on."""
    children: dict[int, list[int]] = {}
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                after_name = (
                    (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
                )
            except OSError:  # it has ended
                continue
            children.setdefault(int(after_name[1]), []).append(int(process.name))
    found, waiting = [], [parent]
    while waiting:
        of_one = children.get(waiting.pop(), [])
        found += of_one
        waiting += of_one
    return found


def _ticks(thread: pathlib.Path) -> int:
    try:
        after_name = (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0
    return int(after_name[11]) + int(after_name[12])  # user and system
