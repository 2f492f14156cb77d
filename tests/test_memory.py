"""The limit of an actor's memory: what is measured, when, and what comes of it."""

import os
import pathlib
import subprocess
import sys

import pytest

from actors.memory import LimitTooLow, MemoryLimit, OverLimit, held_bytes

# Its name ends within a character, as that of one whose long name the kernel cuts.
_HOLDER = r"""
import pathlib, sys
pathlib.Path("/proc/self/comm").write_bytes(b"x" * 14 + b"\xc3")
held = bytearray(b"x") * (64 << 20)
print(flush=True)
sys.stdin.read()
"""
_STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_process_and_all_that_descend_from_it_are_measured() -> None:
    alone = held_bytes(1 << 50)
    child = subprocess.Popen(
        [sys.executable, "-c", _STARTER, _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        together = held_bytes(1 << 50)
        assert together - alone > 64 << 20  # of the child's child
        assert 64 << 20 < held_bytes(0) < together  # shared pages counted once, not twice
    finally:
        child.communicate(timeout=20)


def test_more_than_allowed_is_an_end_but_early_on_an_error() -> None:
    now, held = 100.0, 50

    def measure(limit: int) -> int:
        assert limit == 60
        return held

    limit = MemoryLimit(60, measure, lambda: now)
    limit.check()
    held = 61
    limit.check()  # it is not measured each time
    now = 110.0
    with pytest.raises(LimitTooLow, match=r"hold 61 bytes, actor.max_memory_bytes is 60.*raise"):
        limit.check()
    now = 131.0
    with pytest.raises(OverLimit, match=r"hold 61 bytes, actor.max_memory_bytes is 60$"):
        limit.check()
    held, now = 60, 140.0
    limit.check()


def test_a_new_start_leaves_no_temporary_directory(tmp_path: pathlib.Path) -> None:
    script = """
import multiprocessing.util
from actors import memory
print(memory.replacements(), multiprocessing.util.get_temp_dir())
if not memory.replacements():
    memory.start_anew()
"""
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert said[::2] == ["0", "1"] and str(tmp_path) in said[1] != said[3]
    assert not list(tmp_path.iterdir())


def test_without_a_limit_nothing_is_measured() -> None:
    def measure(limit: int) -> int:
        raise AssertionError

    MemoryLimit(0, measure).check()
