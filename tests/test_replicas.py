"""Several replicas that share an update are one learner of the joined batch."""

import contextlib
import json
import pathlib
import subprocess
import sys

import learning_together
import numpy as np
import pytest
import services
from services import WAIT

SCRIPT = pathlib.Path(learning_together.__file__)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("sac",), id="quick"),
        pytest.param(tuple(learning_together.CASES), id="all", marks=pytest.mark.slow),
    ],
)
def test_replicas_learn_what_one_learner_learns(
    tmp_path: pathlib.Path, names: tuple[str, ...]
) -> None:
    # Given the same batches for one learner, for two devices of a process, and for two peers...
    peers = f"localhost:{services.free_port()},localhost:{services.free_port()}"
    ways = {"devices": ["devices"], "peer 0": [peers, "0"], "peer 1": [peers, "1"]}
    with contextlib.ExitStack() as stack:
        processes = []
        for name, way in ways.items():
            words = [sys.executable, str(SCRIPT), f"{tmp_path}/{name}.npz", ",".join(names), *way]
            processes.append(stack.enter_context(subprocess.Popen(words)))
            stack.callback(processes[-1].kill)
        learning_together.main(tmp_path / "alone.npz", ",".join(names), "alone")
        assert [process.wait(timeout=WAIT) for process in processes] == [0, 0, 0]

    # ...when they have learned, then all have the same variables.
    alone = np.load(tmp_path / "alone.npz")
    for name in ways:
        together = np.load(tmp_path / f"{name}.npz")
        assert together.files == alone.files
        for what in alone.files:
            tolerance = 1e-6 if ", update 1, " in what else 1e-4
            np.testing.assert_allclose(
                *(together[what], alone[what]), tolerance, tolerance, err_msg=f"{what} of {name}"
            )


@pytest.mark.slow
def test_a_learner_on_two_devices_learns_catch(tmp_path: pathlib.Path) -> None:
    logdir, address = tmp_path / "run", f"unix:{tmp_path}/learner"
    learner = subprocess.Popen(
        [
            *(sys.executable, str(SCRIPT.with_name("two_devices.py")), "learner", "catch"),
            *("--logdir", str(logdir), "--listen", address, "--learner.devices", "all"),
            *("--learner.log-seconds", "1"),
        ]
    )
    try:
        with services.actor(logdir, address) as actor:
            assert services.end_of(learner) == services.end_of(actor) == 0
    finally:
        learner.kill()
    report = tmp_path / "report.json"
    assert services.run("evaluate", logdir, "--greedy", "--json", report).returncode == 0
    assert json.loads(report.read_text())["summary"]["return_mean"] >= 0.99
