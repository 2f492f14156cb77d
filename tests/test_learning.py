"""It learns: whole runs from the command line, evaluated over 100 episodes. Slow.

`make test-slow` prints what each run came to and how long it took; docs/results has the latest.
"""

import json
import pathlib
import time

import pytest
import services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def _train(tmp_path: pathlib.Path, preset: str, seed: int, seconds: float) -> float:
    """Trains a preset from scratch; the mean return of 100 greedy episodes afterwards."""
    logdir = tmp_path / preset
    start = time.monotonic()
    trained = services.run(*("train", preset, "--logdir", logdir, "--seed", seed), seconds=seconds)
    took = time.monotonic() - start
    assert trained.returncode == 0, trained.stdout + trained.stderr
    report = tmp_path / "report.json"
    evaluated = services.run("evaluate", logdir, "--greedy", "--json", report, seconds=1800.0)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    summary = json.loads(report.read_text())["summary"]
    assert summary["episodes"] == 100
    print(f"\n{preset}, seed {seed}: return {summary['return_mean']:.2f} after {took:.0f} s")
    return float(summary["return_mean"])


@pytest.mark.parametrize("seed", range(1, 6))
def test_catch(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "catch", seed, seconds=600.0) >= 0.99


@pytest.mark.parametrize("seed", range(1, 6))
def test_cartpole(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "cartpole", seed, seconds=600.0) >= 475.0


@pytest.mark.parametrize("seed", [1, 2])
def test_pong(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "atari", seed, seconds=7000.0) >= 18.0
