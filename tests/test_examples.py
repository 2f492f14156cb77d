"""The examples run: each learns or is trained with, as its page says."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def _run(*arguments: object, seconds: float = 280.0) -> str:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=EXAMPLES, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_that_learns_catch_runs() -> None:
    said = _run("catch.py", "--updates", 3)
    assert said.startswith("3 updates: mean return ")
    assert len((EXAMPLES / "catch.py").read_text().splitlines()) < 120


@pytest.mark.slow
def test_the_page_learns_catch() -> None:
    said = _run("catch.py", seconds=600.0)
    assert float(said.split()[-1]) >= 0.9


def test_parts_of_ones_own_are_trained_with_together(tmp_path: pathlib.Path) -> None:
    script = f"""
import impala
trained = impala.train(
    "catch", {str(tmp_path / "run")!r}, total_frames=3_000,
    environment={{"id": "own_environment:Corridor"}},
    agent={{"torso": "own_torso:Gated"}}, gated={{"width": 8}},
    algorithm="own_algorithm:Impact", impact={{"clip": 0.2}},
)
assert trained.status == "finished" and trained.frames >= 3_000, trained
allow = ["own_environment", "own_torso", "own_algorithm"]
policy = impala.load({str(tmp_path / "run")!r}, allow=allow)
environment = policy.environment()
observation, _ = environment.reset(seed=0)
print("acted", policy(observation))
"""
    assert _run("-c", script).splitlines()[-1] in ("acted 0", "acted 1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_environment", "own_torso", "own_algorithm"])
def test_each_part_is_trained_with_alone(name: str, tmp_path: pathlib.Path) -> None:
    said = _run(f"{name}.py", "--total-frames", 3_000, "--logdir", tmp_path / "run", seconds=600.0)
    assert said.splitlines()[-1].startswith("{")


def test_the_example_of_an_algorithm_is_the_one_that_a_package_brings() -> None:
    def class_of(path: pathlib.Path) -> str:
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        (found,) = [node for node in nodes if isinstance(node, ast.ClassDef)]
        return ast.dump(found)

    package = ROOT / "tests" / "outside" / "outside_parts" / "algorithms.py"
    assert class_of(EXAMPLES / "own_algorithm.py") == class_of(package)
