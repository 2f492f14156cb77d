"""Starts the actor in clients/node as a process."""

import contextlib
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping

import pytest

TESTS = pathlib.Path(__file__).parent
HOME = TESTS.parent / "clients" / "node"


def needed() -> str:
    """Returns the path of node. Skips the test if there is none."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("node is missing. On Debian: apt-get install nodejs npm; then: make clients")
    if not (HOME / "node_modules/.set-up").exists():
        pytest.skip("clients/node has no packages: make clients")
    return program


@contextlib.contextmanager
def actor(
    address: str,
    logdir: pathlib.Path,
    *arguments: object,
    script: pathlib.Path = HOME / "actor.js",
    environment: Mapping[str, str] | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs the actor in Node; whatever happens, it is gone afterwards. Skips without Node.

    Args:
      address: of the learner.
      logdir: `log` returns what it has written.
      *arguments: more of its flags.
      script: what is started instead of the actor.
      environment: all of the environment variables; None: those of this process.
    """
    named = ("--learner", address, "--name", "node", *map(str, arguments))
    command = [needed(), str(script), *named]
    with open(logdir.with_suffix(".node.log"), "ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def log(logdir: pathlib.Path) -> str:
    """What actors for this log directory have written."""
    return logdir.with_suffix(".node.log").read_text("utf-8", "replace")
