"""A short run of `python -m damage`: files of a run are damaged at random and loaded."""

import os
import pathlib
import random
import subprocess
import sys

import numpy as np

from impala.config import values
from impala.config.presets import PRESETS
from impala.logdir import checkpoint, json_lines
from learner.data.storage import Disk, Record, State

CASES = 200


def _write_run(logdir: pathlib.Path) -> None:
    """What a learner leaves: two checkpoints, a replay of 50 unrolls, and ten evaluations."""
    rng = random.Random(0)
    disk = Disk(logdir / "replay", "test")
    for number in range(80):
        actor = f"actor-{number % 3}"
        disk.put(number, Record(rng.random(), 80, actor, rng.randbytes(rng.randrange(3000))))
    disk.commit(State(80))
    for number in range(30):
        disk.delete(number)
    disk.commit(State(80, 0.9))
    disk.close()

    config = PRESETS["catch"][1]
    for updates in (7, 9):
        saved = checkpoint.Checkpoint(
            config,
            checkpoint.Counters(updates, 16 * updates, 320 * updates, 320 * updates, 1.5),
            {"agent/000/w:0": np.full((30, 10), updates, np.float32)},
            {"learned": 16 * updates, "dropped": {}, "ledgers": [["a", 2**63 + 5, 7, 1, 0]]},
            replay_added=8 * updates,
        )
        checkpoint.save(logdir, saved, keep=3)

    evaluations = json_lines.Appender(logdir / "evaluations.jsonl", seals=True)
    for frames in range(0, 10_000, 1000):
        report = {"task": "Catch", "frames": frames, "learner": 1, "version": frames}
        evaluations.write({"time": 1.5, **report, "returns": [rng.uniform(-1, 1)] * 20})
    evaluations.close()
    (logdir / "config.yaml").write_text(values.to_yaml(config))


def test_no_damage_loads_wrong_or_ends_a_process(tmp_path: pathlib.Path) -> None:
    _write_run(tmp_path / "run")
    harness = subprocess.run(
        [sys.executable, "-m", "damage", "--logdir", str(tmp_path / "run")]
        + ["--cases", str(CASES), "--starts", "0", "--seed", "5"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert harness.returncode == 0, harness.stdout + harness.stderr
    total = harness.stdout.splitlines()[-1]
    intact, fell_back, emptied, lost, refused, bad = map(int, total.split("|")[3:-1])
    assert bad == 0 and intact + fell_back + emptied + lost + refused >= CASES
    assert min(intact, fell_back, emptied, lost, refused) >= 5  # the damages do reach the loaders
