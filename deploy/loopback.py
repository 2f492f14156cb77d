"""Runs the Envoy of deploy/components/envoy on this host, for tests and benchmarks."""

import contextlib
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

CONFIG = pathlib.Path(__file__).parent / "components" / "envoy" / "envoy.yaml"
_START_SECONDS = 30.0


@contextlib.contextmanager
def envoy(
    learner: str, directory: pathlib.Path, replaced: Mapping[str, str] | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Runs Envoy in front of a learner on 127.0.0.1.

    Args:
      learner: address of the learner, HOST:PORT.
      directory: for its configuration and log.
      replaced: other texts of the configuration -> by what they are replaced.

    Yields:
      The address for callers, and Envoy's process.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = CONFIG.read_text()
    for old, new in {
        "{address: 0.0.0.0, port_value: 50051}": f"{{address: 127.0.0.1, port_value: {port}}}",
        "{address: impala-learner, port_value: 50051}": "{{address: {}, port_value: {}}}".format(
            *learner.rsplit(":", 1)
        ),
        **(replaced or {}),
    }.items():
        if old not in config:
            raise ValueError(f"{CONFIG} does not contain {old!r}.")
        config = config.replace(old, new)
    (directory / "envoy.yaml").write_text(config)
    command = [
        *(str(pathlib.Path(sys.executable).with_name("envoy")), "-c", f"{directory}/envoy.yaml"),
        *("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"),
    ]
    with open(directory / "envoy.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_for(port, process, directory / "envoy.log")
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: "subprocess.Popen[bytes]", log: pathlib.Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise RuntimeError(f"Envoy does not start: {log.read_text()[-2000:]}")
