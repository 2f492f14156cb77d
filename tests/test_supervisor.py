"""Children are watched, started again, stopped with grace and never outlive their supervisor."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import services

from impala.runtime import supervisor as supervisor_module
from impala.runtime.backoff import Backoff
from impala.runtime.signals import INSIST_SECONDS
from impala.runtime.supervisor import REPEATS, Exit, Program, Supervisor

_STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(600)
"""
_POLITE = """
import signal, sys, time
def leave(*_):
    print('told', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print('up', flush=True)
time.sleep(600)
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def _says(log: pathlib.Path, text: str) -> Callable[[], bool]:
    return lambda: log.exists() and text in log.read_text()


def test_exits_are_reported_and_output_is_appended_to_the_log(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "new" / "log"
    with Supervisor() as supervisor:
        for name, status in [("a", 0), ("b", 3)]:
            code = f"import os, sys; print(os.environ['WHO']); sys.exit({status})"
            supervisor.start(Program(name, _python(code), log=log, environ={"WHO": name}))
        exits = sorted(supervisor.watch())

    assert exits == [Exit("a", 0, None), Exit("b", 3, None)]
    assert sorted(log.read_text().split()) == ["a", "b"]


def test_a_failing_program_is_started_again_until_it_succeeds(tmp_path: pathlib.Path) -> None:
    code = f"""
import pathlib, sys
tries = pathlib.Path({str(tmp_path / "tries")!r})
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
sys.exit(len(tries.read_text()) < 3)
"""
    with Supervisor(backoff=Backoff(0.01, 30.0)) as supervisor:
        supervisor.start(Program("flaky", _python(code), restart=True))
        exits = list(supervisor.watch())

    assert exits == [Exit("flaky", 1, 0.01), Exit("flaky", 1, 0.02), Exit("flaky", 0, None)]


def test_a_program_that_keeps_failing_stays_down() -> None:
    with Supervisor(backoff=Backoff(0.01, 1e9), max_failures=3) as supervisor:
        supervisor.start(Program("broken", _python("import sys; sys.exit(4)"), restart=True))
        exits = list(supervisor.watch())

    assert [end.restart_seconds for end in exits] == [0.01, 0.02, None]


def test_what_says_that_it_fails_alike_is_believed_the_second_time(tmp_path: pathlib.Path) -> None:
    """However long it takes to fail."""
    wait = f"import sys, time; time.sleep(0.3); sys.exit({REPEATS})"
    ends = []
    with Supervisor(backoff=Backoff(0.01, 0.2)) as supervisor:
        supervisor.start(Program("broken", _python(wait), restart=True))
        for end in supervisor.watch():
            ends.append(end.is_hopeless)
            if len(ends) == 3 or end.is_hopeless:
                supervisor.stop("it is hopeless")
    assert ends == [False, True]


def test_several_that_fail_alike_out_of_step_are_given_up() -> None:
    """Given one that has just ended, and one that has run for longer than the longest pause."""
    supervisor = Supervisor(backoff=Backoff(1.0, 30.0))
    with subprocess.Popen(_python("import time; time.sleep(60)")) as process:
        for name, runs in (("ended", None), ("runs", process)):
            child = supervisor_module._Child(Program(name, [], restart=True))
            child.failures, child.status, child.lived, child.process = 2, REPEATS, 60.0, runs
            child.started_at = time.monotonic() - 90.0
            supervisor._children[name] = child
        assert supervisor.all_keep_failing(1000)
        child.started_at -= 60.0  # it has not failed where it did before
        assert not supervisor.all_keep_failing(1000)
        process.kill()


def test_a_thread_that_compiles_holds_no_exit_up() -> None:
    code = (
        "import sys, threading, time; from impala.runtime import process; "
        "threading.Thread(target=time.sleep, args=(60,), name=process.COMPILER).start(); "
        "sys.exit(process.ended(7))"
    )
    began = time.monotonic()
    assert subprocess.run(_python(code), check=False).returncode == 7
    assert time.monotonic() - began < 30


def test_a_program_that_cannot_be_started_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a limit of processes is reached, which says nothing about the others."""
    make, failures = supervisor_module._popen, iter([BlockingIOError(11, "no more processes")])

    def popen(program: Program) -> "subprocess.Popen[bytes]":
        if program.name == "second":
            for failure in failures:
                raise failure
        return make(program)

    monkeypatch.setattr(supervisor_module, "_popen", popen)
    with Supervisor(backoff=Backoff(0.01, 30.0)) as supervisor:
        for name in ("first", "second"):
            supervisor.start(Program(name, _python(""), restart=True))
        exits = {end.name: end for end in supervisor.watch()}
    assert exits == {name: Exit(name, 0, None) for name in ("first", "second")}


def test_a_program_waits_for_the_path_it_needs(tmp_path: pathlib.Path) -> None:
    socket = tmp_path / "socket"
    with Supervisor() as supervisor:
        needs = f"import os, sys; sys.exit(not os.path.exists({str(socket)!r}))"
        supervisor.start(Program("client", _python(needs), after=socket))
        supervisor.start(Program("server", _python(f"open({str(socket)!r}, 'w')")))
        exits = list(supervisor.watch())

    assert sorted(exits) == [Exit("client", 0, None), Exit("server", 0, None)]


def test_stop_asks_first_and_kills_after_the_grace_period(tmp_path: pathlib.Path) -> None:
    polite, stubborn = tmp_path / "polite", tmp_path / "stubborn"
    exits = []
    with Supervisor(grace_seconds=5.0) as supervisor:
        supervisor.start(Program("polite", _python(_POLITE), log=polite, restart=True))
        supervisor.start(Program("stubborn", _python(_STUBBORN), log=stubborn, restart=True))
        services.wait_for("up", _says(polite, "up"))
        services.wait_for("up", _says(stubborn, "up"))
        supervisor.stop("the test says so")
        assert supervisor.why == "the test says so"
        exits = list(supervisor.watch())
        supervisor.start(Program("late", _python("")))  # nothing is started while stopping
        exits += list(supervisor.watch())

    assert exits == [Exit("polite", 0, None), Exit("stubborn", 128 + signal.SIGKILL, None)]
    assert polite.read_text().split() == ["up", "told"]


def test_leaving_the_context_leaves_nothing_alive(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    code = f"import os; print(os.getpid(), flush=True)\n{_STUBBORN}"
    handler = signal.getsignal(signal.SIGINT)  # a shell that runs us in the background ignores it
    with Supervisor() as supervisor:
        supervisor.start(Program("child", _python(code), log=log))
        services.wait_for("up", _says(log, "up"))

    assert not services.is_alive(int(log.read_text().split()[0]))
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_error_leaves_the_children_time_to_end(tmp_path: pathlib.Path) -> None:
    """A learner writes its checkpoint then."""
    polite = tmp_path / "polite"
    with pytest.raises(KeyError), Supervisor(grace_seconds=600.0) as supervisor:
        supervisor.start(Program("polite", _python(_POLITE), log=polite))
        services.wait_for("up", _says(polite, "up"))
        raise KeyError("seen")
    assert polite.read_text().split() == ["up", "told"]
    assert supervisor.why.startswith("KeyError")


def _supervise(code: str, log: pathlib.Path) -> "subprocess.Popen[str]":
    """Starts a supervisor of one child in a process of its own; both are up on return."""
    script = f"""
import pathlib, signal, sys
from impala.runtime.supervisor import Program, Supervisor
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # unless the tests themselves run under nohup
with Supervisor(grace_seconds=600) as supervisor:
    code = "import os; print(os.getpid(), flush=True)\\n" + {code!r}
    log = pathlib.Path({str(log)!r})
    supervisor.start(Program("child", [sys.executable, "-S", "-c", code], log=log))
    for end in supervisor.watch():
        print(end.name, end.status, supervisor.why, supervisor.killed, sep=";")
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    services.wait_for("up", _says(log, "up"))
    return process


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT, signal.SIGINT],
        [signal.SIGHUP, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGINT],
    ],
)
def test_simultaneous_signals_leave_the_children_time(
    tmp_path: pathlib.Path, numbers: list[signal.Signals]
) -> None:
    # Given a child that ends once it may, and that is told to ...
    log, may = tmp_path / "log", tmp_path / "may"
    slow = f"""
import os, signal, sys, time
def leave(*_):
    print("told", flush=True)
    while not os.path.exists({str(may)!r}):
        time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(600)
"""
    process = _supervise(slow, log)
    process.send_signal(numbers[0])
    time.sleep(0.005)
    for number in numbers[1:]:
        process.send_signal(number)
    services.wait_for("told", _says(log, "told"))

    # ... when SIGTERM comes once more, even later, then it still ends by itself.
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    may.touch()
    output, _ = process.communicate(timeout=60)
    # A busy machine delivers those that wait in the order of their numbers.
    assert output in {f"child;0;{number.name} received;False\n" for number in numbers}


def test_a_second_sigint_a_second_later_kills_them(tmp_path: pathlib.Path) -> None:
    process = _supervise(_STUBBORN, tmp_path / "log")
    process.send_signal(signal.SIGINT)
    time.sleep(INSIST_SECONDS + 0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)

    assert output == "child;137;SIGINT received;True\n"


def test_children_of_a_killed_supervisor_are_told_to_end(tmp_path: pathlib.Path) -> None:
    process = _supervise(_POLITE, tmp_path / "log")
    child = int((tmp_path / "log").read_text().split()[0])
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)

    services.wait_for("its end", lambda: not services.is_alive(child))
    assert (tmp_path / "log").read_text().split()[1:] == ["up", "told"]
