"""Starts the real services as processes, as a user does, and watches what they write."""

import contextlib
import json
import os
import pathlib
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

SECONDS = 90.0  # longest wait without progress; starting TensorFlow on a busy machine takes a while
WAIT = 300.0  # seconds; nothing within this process takes so long, however busy the machine
_PROGRESS = 0.05  # CPU seconds per second: services that start or learn use more, idle ones less


def free_port() -> int:
    """Returns a port of loopback for a program that cannot take port 0 and say which it got.

    It is below those that the system gives to connections and to port 0, so that nobody comes to it
    by chance before the program has started.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def impala(
    *arguments: object, log: pathlib.Path, namespace: str = ""
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `impala ARGUMENTS`; whatever happens, it is gone afterwards."""
    inside = ("ip", "netns", "exec", namespace) if namespace else ()
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", "impala", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Terminal:
    """A window on a screen: it takes what is written, until it is closed."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.openpty()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def close(self) -> None:
        """Closes it: SIGHUP for its session, and errors for who writes to it."""
        self._closed.set()
        self._reader.join()

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self._ours], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # nobody else has it open at the moment
                    os.read(self._ours, 1 << 16)
        os.close(self._ours)


@contextmanager
def on_a_terminal(
    *arguments: object,
) -> Iterator[tuple[subprocess.Popen[bytes], Terminal]]:
    """Runs `impala ARGUMENTS` in a terminal of its own; whatever happens, both are gone then."""
    terminal = Terminal()
    script = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # unless the tests themselves run under nohup
from impala.__main__ import main
sys.exit(main())
"""
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=terminal.theirs,
            stdout=terminal.theirs,
            stderr=terminal.theirs,
            start_new_session=True,
        )
        os.close(terminal.theirs)
        try:
            yield process, terminal
        finally:
            process.kill()
            process.wait()
    finally:
        terminal.close()


def learner(
    logdir: pathlib.Path, listen: str, *arguments: object
) -> "Any":  # a context manager of the process
    """`impala learner catch` that reports and saves often and never finishes by itself."""
    (logdir / "address").unlink(missing_ok=True)
    length = () if "--tasks.frames" in arguments else ("--total-frames", 1_000_000_000)
    return impala(
        *("learner", "catch", "--logdir", logdir, "--listen", listen),
        *(*length, "--learner.log-seconds", 0.3),
        *("--learner.checkpoint-seconds", 1.0),
        *arguments,
        log=logdir.with_suffix(".learner.log"),
    )


def actor(logdir: pathlib.Path, address: str, *arguments: object) -> "Any":
    """`impala actor` for the learner at `address`."""
    return impala(
        *("actor", "--learner", address, *arguments), log=logdir.with_suffix(".actor.log")
    )


def wait_for(what: str, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Waits until `condition` gives something true, and returns that.

    Raises:
      AssertionError: it gave nothing for `seconds`, and the processes that this one has started did
        nothing meanwhile. On a busy machine, they may take as long as they need.
    """
    worked, end = _cpu_seconds_below(), time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            before, worked = worked, _cpu_seconds_below()
            if worked - before < _PROGRESS * seconds:
                raise AssertionError(f"Waited for {what}: nothing was done for {seconds} seconds.")
            end = time.monotonic() + seconds
        time.sleep(0.05)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _cpu_seconds_below() -> float:
    """Returns the CPU time that this process's children, and theirs, have used."""
    parents, ticks = {}, {}
    for file in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            pid, fields = (
                int(file.parent.name),
                file.read_text(errors="replace").rpartition(")")[2].split(),
            )
            parents[pid] = int(fields[1])
            # Of it and of its children that have ended; of this process, only of those.
            ticks[pid] = sum(map(int, fields[13 if pid == os.getpid() else 11 : 15]))
    below, generation = set[int](), {os.getpid()}
    while generation:
        below |= generation
        generation = {pid for pid, parent in parents.items() if parent in generation}
    return sum(ticks[pid] for pid in below) / os.sysconf("SC_CLK_TCK")


def address_of(logdir: pathlib.Path) -> str:
    """The address of the learner that has just been started."""
    path = logdir / "address"
    text = wait_for("the learner's address", lambda: path.exists() and path.read_text())
    return str(text).strip()


def rows(logdir: pathlib.Path) -> list[dict[str, float]]:
    """All rows of telemetry so far."""
    path = logdir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_row(
    logdir: pathlib.Path, what: str, condition: Callable[[dict[str, float]], Any], after: int = 0
) -> dict[str, float]:
    """The first row, of those after the first `after`, that meets a condition."""

    def found() -> dict[str, float] | None:
        return next((row for row in rows(logdir)[after:] if condition(row)), None)

    row: dict[str, float] = wait_for(what, found)
    return row


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
    """Sends a signal and returns the exit status."""
    process.send_signal(number)
    return end_of(process)


def end_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process and returns its exit status."""
    wait_for("the end of a process", lambda: process.poll() is not None)
    return process.returncode


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """Runs `impala ARGUMENTS` to its end.

    Raises:
      AssertionError: it did nothing for long; with what it has written.
    """
    command: Sequence[str] = [sys.executable, "-m", "impala", *map(str, arguments)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:

        def written() -> list[str]:
            return [os.pread(file.fileno(), 1 << 26, 0).decode() for file in (output, errors)]

        process = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            status = end_of(process)
        except AssertionError as error:
            raise AssertionError(f"{error} {command}:\n" + "\n".join(written())) from None
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(command, status, *written())


def check_losses(row: Mapping[str, float]) -> bool:
    """Checks that the terms of each loss in a row add up to its total. Returns whether it has any.

    Sums in float32 are exact to about 1e-7 of their largest part.
    """
    totals = [name for name in row if name.endswith("loss/total")]
    for total in totals:
        prefix = total.removesuffix("total")
        parts = [value for name, value in row.items() if name.startswith(prefix) and name != total]
        assert parts, f"{total} has no terms"
        scale = max(1.0, *map(abs, parts))
        assert abs(sum(parts) - row[total]) <= 1e-4 * scale, f"{prefix}: {parts}, {row[total]}"
    return bool(totals)
