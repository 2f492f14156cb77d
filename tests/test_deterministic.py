"""Two deterministic runs are equal, bit for bit: variables, replay's draws and telemetry."""

import pathlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import services

from impala.logdir import checkpoint, rows

FRESH, T = 8, 9
SMALL = (
    *("--deterministic", "--evaluate", "no", "--agent.hidden-sizes", 16),
    *("--mix.fresh", FRESH, "--mix.replayed", FRESH, "--mix.warm-up-unrolls", 20),
    *("--actor.num-envs", FRESH, "--learner.unroll-length", T, "--learner.checkpoints-kept", 1),
)
CLOCK = (
    "time",
    "seconds",
    "speed/",
    "actor/",
    "rpc_seconds/",
    "learner/",
    "ingest/",
    "checkpoint/age",
)


def _train(logdir: pathlib.Path, updates: int, seed: int) -> None:
    frames = updates * FRESH * T  # at most
    trained = services.run(
        *("train", "catch", "--logdir", logdir, "--seed", seed, *SMALL, "--total-frames", frames)
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr


def _runs(tmp_path: pathlib.Path, updates: int, *seeds: int) -> list[checkpoint.Checkpoint]:
    """Runs of these seeds, side by side; their last checkpoints."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        for done in [
            pool.submit(_train, tmp_path / str(i), updates, seed) for i, seed in enumerate(seeds)
        ]:
            done.result()
    return [checkpoint.load(tmp_path / str(i)) for i in range(len(seeds))]


def _telemetry(logdir: pathlib.Path) -> list[dict[str, float]]:
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(CLOCK) and "seconds" not in name
        }
        for row in rows.read(logdir)
    ]


def _check_equal(tmp_path: pathlib.Path, updates: int) -> None:
    one, other = _runs(tmp_path, updates, 3, 3)
    assert one.counters._replace(seconds=0.0) == other.counters._replace(seconds=0.0)
    assert one.counters.updates >= 0.95 * updates
    assert one.variables.keys() == other.variables.keys()
    for name, value in one.variables.items():
        np.testing.assert_array_equal(value, other.variables[name], err_msg=name)
    first, second = (_telemetry(tmp_path / name) for name in "01")
    assert first == second and len(first[-1]) > 30
    assert first[-1]["policy_lag/max"] == 0.0 and first[-1]["replay/policy_lag/max"] > 0.0


def test_two_short_runs_are_equal(tmp_path: pathlib.Path) -> None:
    _check_equal(tmp_path, 30)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_runs_of_500_updates_are_equal_and_one_of_another_seed_is_not(
    tmp_path: pathlib.Path,
) -> None:
    _check_equal(tmp_path, 530)
    assert checkpoint.load(tmp_path / "0").counters.updates >= 500
    (another,) = _runs(tmp_path / "another", 30, 4)
    one = checkpoint.load(tmp_path / "0")
    assert any((one.variables[name] != value).any() for name, value in another.variables.items())
