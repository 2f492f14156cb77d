"""The examples run: each learns or is trained with, as its page says."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def _run(*arguments: object, seconds: float = 280.0) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=EXAMPLES,
        env={name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_that_learns_catch_runs() -> None:
    said = _run("catch.py", "--total-frames", 3_000)
    assert said.splitlines()[-1].startswith("mean return -0.")


@pytest.mark.slow
def test_the_page_learns_catch() -> None:
    said = _run("catch.py", seconds=600.0)
    assert float(said.split()[-1]) >= 0.9


def test_parts_of_ones_own_are_trained_with_together(tmp_path: pathlib.Path) -> None:
    script = f"""
import impala
trained = impala.train(
    "catch", {str(tmp_path / "run")!r}, total_frames=3_000,
    environment={{"id": "custom_environment:Corridor"}},
    agent={{"torso": "custom_torso:Gated"}}, gated={{"width": 8}},
    algorithm="custom_algorithm:Slow", slow={{"step": 0.1}},
)
assert trained.status == "finished" and trained.frames >= 3_000, trained
allow = ["custom_environment", "custom_torso", "custom_algorithm"]
policy = impala.load({str(tmp_path / "run")!r}, allow=allow)
environment = policy.environment()
observation, _ = environment.reset(seed=0)
print("acted", policy(observation))
"""
    assert _run("-c", script).splitlines()[-1] in ("acted 0", "acted 1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_environment", "custom_torso", "custom_algorithm"])
def test_each_part_is_trained_with_alone(name: str, tmp_path: pathlib.Path) -> None:
    said = _run(f"{name}.py", "--total-frames", 3_000, "--logdir", tmp_path / "run", seconds=600.0)
    assert said.splitlines()[-1].startswith("{")
