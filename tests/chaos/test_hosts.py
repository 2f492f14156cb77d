"""Learner and actor with a network stack and an address each, and a cable that is pulled. Slow.

Delay and loss are not tried here, since not every kernel can (netem): `chaos.proxy` delays.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
import services

from impala.logdir import checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]

_LEARNER, _ACTOR = "impala-learner", "impala-actor"  # namespaces
_PULLED_SECONDS = 60.0  # longer than it takes to notice


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30.0)


@contextlib.contextmanager
def _hosts() -> Iterator[None]:
    """Two namespaces, 10.77.0.1 and 10.77.0.2, and a cable from one to the other."""
    with contextlib.ExitStack() as stack:
        for namespace in (_LEARNER, _ACTOR):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "delete", namespace)
        _ip(
            *("link", "add", "eth0", "netns", _LEARNER, "type", "veth"),
            "peer",
            "eth0",
            "netns",
            _ACTOR,
        )
        for number, namespace in enumerate((_LEARNER, _ACTOR), start=1):
            _ip("-n", namespace, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", device, "up")
        yield


def _updates(logdir: pathlib.Path) -> float:
    return max((row["updates"] for row in services.rows(logdir)), default=0.0)


def test_an_actor_on_another_host_survives_a_pulled_cable(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    logdir.mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_hosts())
        learner = stack.enter_context(
            services.impala(
                *("learner", "catch", "--logdir", logdir, "--listen", "10.77.0.1:0"),
                *("--security.insecure", "--total-frames", 1_000_000_000),
                *("--learner.log-seconds", 0.3),
                log=tmp_path / "learner.log",
                namespace=_LEARNER,
            )
        )
        address = services.address_of(logdir)
        assert address.startswith("10.77.0.1:")
        actor = stack.enter_context(
            services.impala(
                "actor", "--learner", address, log=tmp_path / "actor.log", namespace=_ACTOR
            )
        )
        services.wait_for("updates", lambda: _updates(logdir) > 10)

        _ip("-n", _ACTOR, "link", "set", "eth0", "down")
        time.sleep(_PULLED_SECONDS)
        before = _updates(logdir)
        assert actor.poll() is None
        assert learner.poll() is None
        _ip("-n", _ACTOR, "link", "set", "eth0", "up")

        services.wait_for("more updates", lambda: _updates(logdir) > before + 10)
        assert "joined 10.77.0.1:" in (tmp_path / "actor.log").read_text().partition("lost")[2]
        assert services.stop(actor) == 0
        assert services.stop(learner) == 0
    saved = checkpoint.load(logdir)
    assert saved.counters.unrolls == saved.accounts["learned"] > 0
