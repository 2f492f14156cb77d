"""What is measured, and on what machine; CPU time and memory of processes, from /proc (Linux)."""

import dataclasses
import os
import pathlib
import platform
import sys
from typing import NamedTuple

from impala.config import presets
from impala.config import schema as configs

_ATARI = presets.PRESETS["atari"][1]
CONFIG = dataclasses.replace(
    _ATARI,
    learner=dataclasses.replace(_ATARI.learner, unroll_length=20, queue_unrolls=64, threads=1),
    mix=configs.MixConfig(fresh=32),
    actor=configs.ActorConfig(num_envs=128, num_groups=1),
)
"""The preset `atari` with the paper's batch: T 20, B 32."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Options(NamedTuple):
    """The options of the command line."""

    seconds: float  # of each measurement
    preset: str = "catch"  # that the actor plays
    is_trial: bool = False  # only to try the measurement of a GPU
    against: pathlib.Path | None = None  # another checkout, to measure in turn


def machine() -> str:
    """Returns cores, processor and version of Python."""
    cores = len(os.sched_getaffinity(0))
    model = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{cores} cores of {model}, Python {sys.version.split()[0]}"


def cpu_seconds(task: int | pathlib.Path) -> float:
    """Returns the CPU time of a process, or of a thread given by its folder; 0: it has ended."""
    fields = _stat(task)
    return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0  # user and system


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def descendants(parent: int) -> list[int]:
    """Returns the process ids of the children of a process, of theirs, and so on."""
    children: dict[int, list[int]] = {}
    for process in pathlib.Path("/proc").iterdir():
        if process.name.isdigit() and (fields := _stat(process)):
            children.setdefault(int(fields[1]), []).append(int(process.name))
    found = [parent]
    for process_id in found:  # which grows
        found += children.get(process_id, [])
    return found[1:]


def _stat(task: int | pathlib.Path) -> list[str]:
    """Returns the fields of a process's or thread's stat after its name; []: it has ended."""
    folder = task if isinstance(task, pathlib.Path) else pathlib.Path(f"/proc/{task}")
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
