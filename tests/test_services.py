"""Waiting for services: as long as they do something, and not much longer."""

import pathlib
import subprocess
import sys

import pytest
import services


def test_a_wait_lasts_as_long_as_a_process_works(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a grandchild that computes for four times as long as the limit without progress."""
    monkeypatch.setattr(services, "_PROGRESS", 0.01)  # on a busy machine it gets little of a core
    done = tmp_path / "done"
    work = f"""
import pathlib, time
while time.process_time() < 2.0:
    pass
pathlib.Path({str(done)!r}).touch()
"""
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {work!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", start]) as child:
        services.wait_for("the work", done.exists, seconds=0.5)
        assert services.end_of(child) == 0


def test_a_wait_for_processes_that_do_nothing_ends() -> None:
    with subprocess.Popen(["sleep", "600"]) as idle:
        try:
            with pytest.raises(AssertionError, match=r"Waited for a word: nothing was done for"):
                services.wait_for("a word", lambda: None, seconds=0.2)
        finally:
            idle.kill()


def test_a_command_that_is_run_to_its_end_gives_what_it_wrote() -> None:
    wrong = services.run("trane")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Did you mean 'train'?" in wrong.stderr
