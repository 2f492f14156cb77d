"""Starts child processes, monitors them, restarts failed ones and stops all of them together.

`impala train` runs the learner and the actors with it, and a fleet its actors. Children get their
own session, so Ctrl-C reaches only the supervisor, which then asks each of them to stop. The kernel
tells them to end if the supervisor itself is killed (Linux).
"""

import dataclasses
import logging
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, NamedTuple, Self

from impala.runtime.backoff import Backoff
from impala.runtime.signals import INSIST_SECONDS, EndRequest
from impala.runtime.tether import tethered

_log = logging.getLogger(__name__)

MOST_FAILURES = 5  # in a row, after which a program is not started again
REPEATS = os.EX_DATAERR
"""Exit status of a program that would fail alike however often it is started, such as an actor
whose environment fails before an unroll is complete. A second start makes sure."""
_SURE_FAILURES = 2
_POLL_SECONDS = 0.05
_BACKOFF = Backoff(1.0, 30.0)
_READ_SECONDS = 5.0
_CANNOT_START = 126  # exit status, as in a shell


@dataclasses.dataclass(frozen=True)
class Program:
    """A child process to run."""

    name: str
    """Unique within its supervisor."""
    command: Sequence[str]
    """The executable and its arguments."""
    restart: bool = False
    """Restart it, after a pause, when it fails; exit status 0 is final."""
    log: pathlib.Path | None = None
    """File to which its output and errors are appended; None: it shares the supervisor's."""
    output: Callable[[str], None] | None = None
    """Called with each line of its output and errors instead, in a thread."""
    environ: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Environment variables added to the supervisor's own; None: removed from them."""
    after: pathlib.Path | None = None
    """Start it only once this path exists."""
    orphan_signal: signal.Signals = signal.SIGTERM
    """What the kernel sends it when the supervisor is killed (Linux)."""


class Exit(NamedTuple):
    """The end of a child process."""

    name: str
    status: int  # as in a shell: 128 + the signal's number for a killed process
    restart_seconds: float | None  # until it is restarted; None: it is not
    is_hopeless: bool = False  # whether it has made sure that it fails alike each time


class Supervisor:
    """A context for child processes; when it is left, none of them is alive.

    If it is left by an exception, they are asked to end first, as by `stop()`.

    Inside it, the first SIGTERM, SIGINT or SIGHUP calls `stop()`, and further ones have no effect,
    except that a second SIGINT a second or more after the first calls `kill()`. Signals are seen
    only in the main thread.
    """

    def __init__(
        self,
        grace_seconds: float = 30.0,
        backoff: Backoff = _BACKOFF,
        max_failures: int = MOST_FAILURES,
        request: EndRequest | None = None,
    ):
        """Starts nothing yet.

        Args:
          grace_seconds: time between `stop()` and SIGKILL.
          backoff: pauses before restarts; a child that has run for as long as the longest is
            healthy, which resets the count of consecutive failures.
          max_failures: consecutive failures after which a program is not restarted.
          request: receives the signals; None: a new one without handlers of its own.
        """
        self._grace_seconds = grace_seconds
        self._backoff = backoff
        self._max_failures = max_failures
        self._children: dict[str, _Child] = {}
        self._kill_at: float | None = None  # set while stopping
        self._request = request or EndRequest()
        self._hinted = False
        self.why = ""
        """Why it was stopped, in words: the first cause. Empty before."""
        self.killed = False
        """Whether a second SIGINT demanded an end without grace."""

    def start(self, program: Program, delay_seconds: float = 0.0) -> None:
        """Starts a program, later if it has an `after` or there is a delay.

        Does nothing while stopping.
        """
        if program.name in self._children:
            raise ValueError(f"{program.name!r} is the name of two programs; give each its own.")
        if self.stopping:
            return
        child = _Child(program)
        child.start_at = time.monotonic() + delay_seconds
        self._children[program.name] = child
        try:
            child.start_if_due()
        except OSError:
            if not program.restart:  # others `watch` tries again, and counts the failure
                raise

    def watch(self, meanwhile: Callable[[], None] = lambda: None) -> Iterator[Exit]:
        """Yields each exit as it is noticed, until nothing runs and nothing is to be started.

        Args:
          meanwhile: called several times a second, and before each exit is yielded.
        """
        while self._children:
            self._obey_signals()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_late()
            for name, child in list(self._children.items()):
                if self.stopping and child.process is None:  # never started, or between restarts
                    del self._children[name]
                    continue
                try:
                    child.start_if_due()
                    status = child.poll()
                except OSError as error:  # no processes or memory left, at present
                    if not child.program.restart:
                        raise
                    _log.warning("%s cannot be started: %s.", name, error)
                    status = _CANNOT_START
                if status is not None:
                    meanwhile()
                    yield self._ended(child, status)
            meanwhile()
            time.sleep(_POLL_SECONDS)

    def stop(self, why: str) -> None:
        """Asks every child to end (SIGTERM); `watch` kills those that outlast the grace period.

        Args:
          why: the cause, for the log.
        """
        if not self.stopping:
            self.why = why
            _log.info("Stopping: %s.", why)
            self._kill_at = time.monotonic() + self._grace_seconds
            self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends every child and its process group at once (SIGKILL)."""
        self._kill_at = time.monotonic()
        self._send(signal.SIGKILL)

    def __enter__(self) -> Self:
        self._request.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.stop(f"{type(error).__name__} in the process that watches over the others")
            for _ in self.watch():
                pass
        self.kill()
        for child in self._children.values():
            if child.process is not None:
                child.process.wait()
                child.read_all()
        self._request.__exit__()

    @property
    def stopping(self) -> bool:
        """Whether the children have been asked to end."""
        return self._kill_at is not None

    def all_keep_failing(self, times: int) -> bool:
        """Returns whether each child has failed so many times in a row, and none has recovered.

        Two times are enough where it says that it would fail alike each time.
        """
        return all(
            (child.failures >= times or child.is_hopeless)
            and (child.process is None or not self._has_recovered(child))
            for child in self._children.values()
        )

    @property
    def interrupted(self) -> bool:
        """Returns whether the end was requested."""
        return self._request.is_set()

    def _obey_signals(self) -> None:
        request = self._request
        if request.is_set():
            self.stop(request.cause)
        if request.is_interrupted and not self._hinted:
            self._hinted = True
            _log.info(
                "Waiting for %s to end. Ctrl-C once more, %.0f s or more after the first, kills at "
                "once: no checkpoint is written.",
                *(", ".join(self._children), INSIST_SECONDS),
            )
        if request.insists and not self.killed:
            self.killed = True
            _log.warning("Killing at once: SIGINT received again.")
            self.kill()

    def _kill_late(self) -> None:
        for name, child in self._children.items():
            if child.process is not None and not child.killed and not self.killed:
                child.killed = True
                _log.warning("Killing %s: it has not ended in %.0f s.", name, self._grace_seconds)
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for child in self._children.values():
            child.send(number)

    def _has_run_long(self, child: "_Child") -> bool:
        return child.seconds >= self._backoff.longest

    def _has_recovered(self, child: "_Child") -> bool:
        """Returns whether a child that runs has run longer than it took to fail alike before."""
        before = 2.0 * child.lived if child.is_hopeless else 0.0
        return child.seconds >= max(self._backoff.longest, before)

    def _ended(self, child: "_Child", status: int) -> Exit:
        name = child.program.name
        # What fails before it begins fails alike however long that takes.
        if self._has_run_long(child) and not status == child.status == REPEATS:
            child.failures = 0
        child.failures += 1
        child.status = status
        child.lived = child.seconds
        again = child.program.restart and status != 0 and child.failures < self._max_failures
        if self.stopping or not again:
            del self._children[name]
            return Exit(name, status, None, child.is_hopeless)
        pause = self._backoff.pause(child.failures)
        child.start_at = time.monotonic() + pause
        return Exit(name, status, pause, child.is_hopeless)


class _Child:
    """A program and its current process, if any."""

    def __init__(self, program: Program):
        self.program = program
        self.process: subprocess.Popen[bytes] | None = None
        self.killed = False  # after the grace period
        self.failures = 0  # consecutive
        self.status = 0  # of the last end
        self.lived = 0.0  # seconds from the start to the last end
        self.start_at = 0.0
        self.started_at = 0.0
        self.reader: threading.Thread | None = None

    @property
    def seconds(self) -> float:
        """Returns the time since the last start."""
        return time.monotonic() - self.started_at

    @property
    def is_hopeless(self) -> bool:
        """Whether it has failed twice in a row in a way that it says to repeat."""
        return self.status == REPEATS and self.failures >= _SURE_FAILURES

    def start_if_due(self) -> None:
        after = self.program.after
        if self.process is not None or time.monotonic() < self.start_at:
            return
        if after is not None and not after.exists():
            return
        self.started_at = time.monotonic()
        self.process = _popen(self.program)
        if self.program.output is not None:
            assert self.process.stdout is not None
            self.reader = threading.Thread(
                target=_read_lines, args=(self.process.stdout, self.program.output), daemon=True
            )
            self.reader.start()

    def poll(self) -> int | None:
        """Returns the exit status if the process has ended since the last call."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        self.process = None
        self.read_all()
        return code if code >= 0 else 128 - code

    def read_all(self) -> None:
        """Waits until the last line of an ended process was passed to `output`."""
        if self.reader is not None:
            self.reader.join(_READ_SECONDS)  # does not wait for its own children, which may write
            self.reader = None

    def send(self, number: signal.Signals) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        if number == signal.SIGKILL:  # including its own children, which it cannot end itself
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)


def _read_lines(stream: IO[bytes], output: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            output(line.decode(errors="replace").rstrip("\n"))


def _popen(program: Program) -> subprocess.Popen[bytes]:
    def popen(output: IO[bytes] | int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            tethered(program.command, program.orphan_signal),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            env={k: v for k, v in {**os.environ, **program.environ}.items() if v is not None},
            start_new_session=True,
        )

    if program.output is not None:
        return popen(subprocess.PIPE)
    if program.log is None:
        return popen(None)
    program.log.parent.mkdir(parents=True, exist_ok=True)
    with open(program.log, "ab") as file:
        return popen(file)
