"""Requests to end: however many signals come, and whenever, they are one; only a person insists."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from impala.runtime.signals import EndRequest, exits_by_signal

END = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Puts the handlers back: who was asked to end ignores these signals from then on."""
    before = {number: signal.getsignal(number) for number in END}
    # If the tests themselves run under nohup or in the background of a script, these are ignored.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class _Program:
    def leave(self, number: int, frame: object) -> None:
        sys.exit(3)


def test_who_exits_is_told_from_a_handler_that_does() -> None:
    signal.signal(signal.SIGTERM, _Program().leave)
    with pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert exits_by_signal(caught.value)
    with pytest.raises(SystemExit) as caught:
        sys.exit(3)
    assert not exits_by_signal(caught.value) and not exits_by_signal(KeyboardInterrupt())


@pytest.mark.parametrize("number", END)
def test_each_of_the_three_asks_for_the_end(number: signal.Signals) -> None:
    with EndRequest() as request:
        assert not request.is_set()
        assert not request.wait(0.01)
        signal.raise_signal(number)
        assert request.is_set()
        assert request.wait(600.0)
        assert request.cause == f"{number.name} received"
        assert not request.insists


def test_libraries_that_take_handlers_get_no_signals() -> None:
    theirs: list[int] = []
    with EndRequest() as request:
        with request.kept():
            signal.signal(signal.SIGTERM, lambda number, frame: theirs.append(number))
            signal.raise_signal(signal.SIGTERM)  # is received when the context ends
            assert not request.is_set()
        assert request.received == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
    assert not theirs


def test_only_the_first_signal_is_reported() -> None:
    told = []

    def on_first() -> None:
        told.append("first")
        signal.raise_signal(signal.SIGTERM)  # handled at once, within the handler of the first

    with EndRequest(on_first) as request:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
        assert told == ["first"]
        assert request.received == signal.SIGINT


@pytest.mark.parametrize(
    ("after", "numbers", "insists"),
    [
        ([0.0, 0.005], [signal.SIGINT, signal.SIGTERM], False),  # a cancelled job
        ([0.0, 0.005], [signal.SIGTERM, signal.SIGTERM], False),  # timeout, and make
        ([0.0, 5.0, 5.0], [signal.SIGINT, signal.SIGTERM, signal.SIGTERM], False),
        ([0.0, 5.0, 5.5], [signal.SIGTERM, signal.SIGINT, signal.SIGINT], False),
        ([0.0, 0.3, 0.6, 0.9], [signal.SIGINT] * 4, False),
        ([0.0, 0.3, 0.6, 1.0], [signal.SIGINT] * 4, True),
        ([0.0, 5.0, 6.0], [signal.SIGTERM, signal.SIGINT, signal.SIGINT], True),
    ],
)
def test_only_sigint_insists_a_second_after_its_first(
    monkeypatch: pytest.MonkeyPatch,
    after: list[float],
    numbers: list[signal.Signals],
    insists: bool,
) -> None:
    clock = _Clock()
    with EndRequest() as request:
        monkeypatch.setattr(time, "monotonic", clock.monotonic)
        for seconds, number in zip(after, numbers, strict=True):
            clock.now = 100.0 + seconds
            assert not request.insists
            signal.raise_signal(number)
        assert request.insists is insists


def test_who_insists_interrupts_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    with EndRequest(interrupts=True) as request:
        monkeypatch.setattr(time, "monotonic", clock.monotonic)
        signal.raise_signal(signal.SIGINT)
        clock.now += 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert request.cause == "SIGINT received"


def test_a_program_may_ask_for_the_end() -> None:
    asked = threading.Event()
    request = EndRequest(asked=asked)
    assert not request.is_set()
    asked.set()
    assert request.is_set() and request.cause == "asked to stop"


def test_nohup_stays_in_force() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with EndRequest() as request:
        signal.raise_signal(signal.SIGHUP)
        assert not request.is_set()


@pytest.mark.parametrize("number", END)
def test_a_command_with_nothing_to_save_ends_without_a_traceback(number: signal.Signals) -> None:
    script = """
import sys, time
from impala import __main__
from impala.commands import main as cli
def work():
    print("up", flush=True)
    time.sleep(600)
cli.main = work
sys.exit(__main__.main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + number, "")
