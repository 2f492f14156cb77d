"""What an environment raises is named with its place in the user's file, and reaches the screen."""

import os
import pathlib
import re
import subprocess
import sys
from contextlib import closing
from typing import Literal

import faulty
import gymnasium as gym
import numpy as np
import pytest
from faulty import Do

from impala import environments
from impala.config.schema import EnvironmentConfig
from impala.environments import catch
from impala.environments.failure import EnvironmentFailed
from impala.environments.wrappers import Checked
from impala.parts.components import where_raised
from impala.runtime.failures import Failure, Shown, note

ROOT = pathlib.Path(__file__).parent.parent
RAISES = next(
    number
    for number, line in enumerate(pathlib.Path(faulty.__file__).read_text().splitlines(), 1)
    if 'KeyError("gear")' in line
)
IN_STEP = f"{faulty.__file__}:{RAISES}, in step"


def make(vectorization: Literal["sync", "async"]) -> environments.Environment:
    config = EnvironmentConfig(id=faulty.ID, vectorization=vectorization)
    return environments.make(config, 2)


def test_the_place_is_the_last_frame_of_the_users_file() -> None:
    with closing(make("sync")) as environment:
        environment.reset(0)
        environment.send(np.array([Do.COUNT, Do.RAISE]))
        with pytest.raises(EnvironmentFailed, match="environment 1 of faulty") as caught:
            environment.recv()
    assert (caught.value.error, caught.value.where) == ("KeyError: 'gear'", IN_STEP)


def test_a_process_of_its_own_tells_it_with_the_fault() -> None:
    with closing(make("async")) as environment:
        environment.reset(0)
        environment.send(np.array([Do.COUNT, Do.RAISE]))
        (fault,) = environment.recv().faults
    assert (fault.detail, fault.where) == ("fault 1, KeyError: 'gear'", IN_STEP)


def test_a_value_that_cannot_be_used_has_no_place() -> None:
    with closing(catch.Catch(2)) as inner:
        inner.observation_space = gym.spaces.Box(0, 1, (3, 3), np.uint8)
        environment = Checked(inner, "Catch")
        with pytest.raises(EnvironmentFailed) as caught:
            environment.reset(0)
    shapes = "(2, 10, 5), expected (2, 3, 3)"
    assert caught.value.error.startswith(f"ValueError: Catch: observation has shape {shapes} by")
    assert caught.value.where == ""


def test_errors_are_placed_where_the_user_called() -> None:
    with pytest.raises(AssertionError) as caught:
        np.testing.assert_array_equal(0, 1)
    assert where_raised(caught.value).startswith(f"{__file__}:")


def test_a_failure_that_cannot_be_noted_is_no_other_failure() -> None:
    note(pathlib.Path("/dev/full"), Failure("ValueError: x", ""))


def test_a_line_that_was_torn_by_a_full_disk_is_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Shown(tmp_path / "failures")
    note(shown.path, Failure("KeyError: 'gear'", "game.py:3, in step"))
    with open(shown.path, "ab") as file:
        file.write(b'["KeyError: ')
    note(shown.path, Failure("ValueError: 1", "game.py:5, in step"))
    note(shown.path, Failure("OSError: 2", "game.py:7, in step"))
    shown.show()
    assert [text.split(": ")[1] for text in caplog.messages] == ["KeyError", "OSError"]
    assert shown.last == "OSError: 2 (game.py:7, in step)"


_GAME = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Game(CartPoleEnv):
    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 100 == 0:
            self.shift()
        return super().step(action)

    def shift(self):
        return {}["gear"]

gym.register("Game-v0", Game, max_episode_steps=100)
"""


_MISTAKEN = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Mistaken(CartPoleEnv):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, None, *rest

gym.register("Mistaken-v0", Mistaken, max_episode_steps=100)
"""


def _trained(folder: pathlib.Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Trains on an environment of a module in a folder, where the run is kept."""
    return subprocess.run(
        [
            *(sys.executable, "-P", "-m", "impala", "train", "cartpole", *flags),
            *("--logdir", folder / "run"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_mistake_ends_a_run_before_it_begins(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mistaken.py").write_text(_MISTAKEN)
    done = _trained(
        tmp_path,
        *("--environment.id", "mistaken:Mistaken-v0", "--environment.vectorization", "sync"),
    )
    assert done.returncode == 2, done.stderr
    place = re.escape(f"({tmp_path / 'mistaken.py'}:6, in step)")
    assert len(re.findall(f"the reward is None.*{place}", done.stderr)) == 1
    assert "Training" not in done.stderr


def test_a_mistake_that_each_start_repeats_ends_the_run_after_the_second(
    tmp_path: pathlib.Path,
) -> None:
    """Given one that shows itself only where there are several environments in a process."""
    done = _trained(tmp_path, "--environment.id", "looked:Alone", "--num-actors", "1")
    assert done.returncode == 1, done.stderr
    assert re.search("The actors keep failing: ValueError: .* the reward is None", done.stderr)
    log = done.stderr + (tmp_path / "run" / "actors.log").read_text()
    assert 1 <= log.count("ended with status 65") <= 3  # it may have started a third time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vectorization", "actors", "status", "frames"),
    [("sync", 1, 1, 5000), ("sync", 2, 1, 5000), ("async", 1, 0, 1500)],
)
def test_training_shows_it_once(
    tmp_path: pathlib.Path, vectorization: str, actors: int, status: int, frames: int
) -> None:
    # Given an environment that raises at every hundredth step ...
    (tmp_path / "game.py").write_text(_GAME)
    done = _trained(
        tmp_path,
        *("--environment.id", "game:Game-v0", "--environment.vectorization", vectorization),
        *("--total-frames", str(frames), "--actor.num-envs", "2", "--num-actors", str(actors)),
    )
    # ... then the screen has it once, and says that it goes on.
    place = re.escape(f"KeyError: 'gear' ({tmp_path / 'game.py'}:13, in shift)")
    assert len(re.findall(f"An environment has failed: {place}", done.stderr)) == 1, done.stderr
    keep = "The actors keep failing" if status else "Environments keep failing, 10 times so far"
    assert re.search(f"{keep}.*{place}", done.stderr)
    assert done.returncode == status, done.stderr
