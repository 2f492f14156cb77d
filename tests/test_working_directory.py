"""Modules in the working directory: the user's environment is found, and nothing of ours is hidden.

Each process runs in a folder of bad modules that are called like ours, like those of the standard
library and like those of other packages; each of them raises when it is imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from impala.runtime.process import IMPALA

ROOT = pathlib.Path(__file__).parent.parent
OURS = ("actors", "impala", "learner", "protos", "vtrace")
OTHERS = (
    "dataclasses",
    "multiprocessing",
    "numpy",
    "random",
    "signal",
    "tempfile",
    "tyro",
    "types",
)

_MINE = """
import json, os, pathlib, sys
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    pass

gym.register("Mine-v0", Mine, max_episode_steps=100)
pathlib.Path(os.environ["SEEN"], str(os.getpid())).write_text(json.dumps(sys.path))
"""
# Starts a command as its installed script does, whose own folder is the first to import from.
_SCRIPT = """
import sys
sys.path[0] = "/"
from impala.__main__ import main
sys.exit(main())
"""
# Plays an environment in two processes of its own.
_PLAY = """
import sys
sys.path[0] = "/"
import numpy as np
from impala import __main__, environments
from impala.config.schema import EnvironmentConfig
if __name__ == "__main__":
    __main__._put_working_directory_last()
    config = EnvironmentConfig(id="mine:Mine-v0", vectorization="async")
    environment = environments.make(config, 2)
    environment.reset(0)
    environment.send(np.zeros(2, np.int64))
    environment.recv()
    environment.close()
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with an environment and bad modules."""
    here = tmp_path / "here"
    for name in OURS:
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"raise AssertionError('{name} of the folder')")
    for name in OTHERS:
        (here / f"{name}.py").write_text(f"raise AssertionError('{name} of the folder')")
    (here / "mine.py").write_text(_MINE)
    (tmp_path / "seen").mkdir()
    return here


def run(folder: pathlib.Path, *command: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder, with this checkout on the path."""
    seen = str(folder.parent / "seen")
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SEEN": seen},
        capture_output=True,
        text=True,
        timeout=240,
    )


def check_paths(folder: pathlib.Path, least: int) -> None:
    """Checks the paths of the processes, at least so many, that have imported the environment."""
    paths = [path.read_text() for path in (folder.parent / "seen").iterdir()]
    assert len(paths) >= least
    assert all(path.endswith(f'"{folder}"]') for path in paths), paths


def test_children_leave_the_folder_out(folder: pathlib.Path) -> None:
    assert run(folder, *IMPALA, "presets").returncode == 0
    # Without -P the folder is the first place to look at: this test can fail.
    bad = run(folder, *(word for word in IMPALA if word != "-P"), "presets")
    assert "of the folder" in bad.stderr


def test_processes_of_environments_find_the_folder_last(folder: pathlib.Path) -> None:
    (folder.parent / "play.py").write_text(_PLAY)
    done = run(folder, sys.executable, folder.parent / "play.py")
    assert (done.returncode, done.stderr) == (0, "")
    check_paths(folder, 3)


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_training_takes_only_the_environment_of_the_folder(
    folder: pathlib.Path, vectorization: str
) -> None:
    done = run(
        folder,
        *(sys.executable, "-c", _SCRIPT, "train", "cartpole"),
        *("--environment.id", "mine:Mine-v0", "--environment.vectorization", vectorization),
        *("--total-frames", 3000, "--num-actors", 2, "--actor.num-envs", 2),
        *("--logdir", folder.parent / "run"),
    )
    said = done.stderr + (folder.parent / "run" / "actors.log").read_text()
    assert done.returncode == 0, said
    assert "of the folder" not in said
    check_paths(folder, 7 if vectorization == "async" else 3)
