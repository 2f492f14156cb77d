"""Runs real learners for other benchmarks."""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from impala.config import values
from impala.config.schema import Config


@contextlib.contextmanager
def learner(
    config: Config, tokens: str | None = None, flags: Sequence[str] = ()
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Runs a learner of this configuration without an end.

    Args:
      config: of the run.
      tokens: contents of a file of tokens, if it is to require them.
      flags: further arguments of `impala learner`.

    Yields:
      Its address, and its process.
    """
    with started(config, tokens, flags) as (logdir, process):
        yield address(logdir, process), process


@contextlib.contextmanager
def started(
    config: Config, tokens: str | None = None, flags: Sequence[str] = ()
) -> Iterator[tuple[pathlib.Path, "subprocess.Popen[bytes]"]]:
    """Yields the log directory and process of such a learner, which may not serve yet."""
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as name:
        directory = pathlib.Path(name)
        (directory / "config.yaml").write_text(values.to_yaml(config))
        command = [
            *(sys.executable, "-m", "impala", "learner", "atari"),
            *("--logdir", f"{directory}/run", "--config", f"{directory}/config.yaml"),
            *("--listen", "127.0.0.1:0", "--total-frames", "1000000000000", *flags),
        ]
        if tokens is not None:
            (directory / "tokens").write_text(tokens)
            command += ["--security.token-file", f"{directory}/tokens"]
        with open(directory / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield directory / "run", process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def address(logdir: pathlib.Path, learner: "subprocess.Popen[bytes]") -> str:
    """Returns the address of a learner that was just started."""
    path = logdir / "address"
    for _ in range(1800):
        if learner.poll() is not None:
            raise RuntimeError(f"The learner ended with status {learner.returncode}.")
        if path.exists() and (address := path.read_text().strip()):
            return address
        time.sleep(0.1)
    raise RuntimeError("No learner within three minutes.")
