"""A tethered child is the program that it was asked for, and is started without fork()."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from impala.runtime.tether import tethered


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(tethered(command), capture_output=True, text=True, timeout=60)


def test_tether_becomes_the_program_with_its_arguments() -> None:
    code = "import os, sys; print(os.getppid(), *sys.argv[1:]); sys.exit(3)"
    ended = _run(sys.executable, "-c", code, "-x", "a b")
    assert (ended.stdout, ended.stderr) == (f"{os.getpid()} -x a b\n", "")
    assert ended.returncode == 3


def test_signals_that_python_ignores_have_their_usual_effect() -> None:
    assert _run("sh", "-c", "kill -PIPE $$; echo lives").returncode == -signal.SIGPIPE


def test_handlers_of_fork_are_not_run() -> None:
    """GRPC has some, which abort the child or leave it hanging while calls are under way."""
    script = """
import os, sys
from impala.runtime.supervisor import Program, Supervisor
os.register_at_fork(before=lambda: print("fork"))
with Supervisor() as supervisor:
    supervisor.start(Program("child", ["echo", "child"], output=print))
    for exit in supervisor.watch():
        print(exit.status)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout == "child\n0\n", run.stderr


def test_a_child_of_a_parent_that_has_died_does_not_begin() -> None:
    command = tethered(["echo", "begun"])
    died = [str(os.getppid()) if word == str(os.getpid()) else word for word in command]
    ended = subprocess.run(died, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_program_that_cannot_be_run_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such program: 'nothing-like-it'"):
        tethered(["nothing-like-it"])
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    ended = _run(str(broken))
    assert ended.returncode == 1
    assert ended.stderr == f"{broken}: Exec format error\n"
