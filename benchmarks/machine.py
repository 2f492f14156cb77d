"""Names the machine that a measurement is made on."""

import os
import pathlib
import platform
import sys


def machine() -> str:
    """Returns cores, processor and version of Python."""
    cores = len(os.sched_getaffinity(0))
    model = platform.processor() or platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{cores} cores of {model}, Python {sys.version.split()[0]}"
