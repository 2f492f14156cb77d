"""`impala check`: an environment is looked at before training, and what is wrong is refused."""

import dataclasses
import json
import pathlib

import gymnasium as gym
import looked
import numpy as np
import own
import pytest

from impala import environments
from impala.commands import check
from impala.commands import main as cli
from impala.commands.check import Check
from impala.commands.parsing import parse
from impala.config import rules
from impala.config.presets import PRESETS
from impala.config.schema import EnvironmentConfig
from impala.environments import pace
from impala.environments.look import Look
from impala.runtime.failures import Shown
from impala.schedule.tasks import Task


def checked(*words: str) -> int:
    """The exit status of a look, without the network."""
    return cli.main(["check", *words, "--no-network"])


@pytest.mark.parametrize("how", ["shape", "exit"])
def test_what_is_wrong_is_refused_with_its_place(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert checked("own:Odd", "--environment.kwargs", json.dumps({"how": how})) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert f"({own.__file__}:" in said.err and ", in step)" in said.err


def test_what_failed_is_told_although_it_cannot_be_closed(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert checked("looked:Unmade") == 2
    assert "An environment has failed: KeyError: 'gear' (" in capfd.readouterr().err
    says = "looked:Unmade could not be closed: AttributeError: 'Unmade' object has no attribute"
    assert caplog.messages[0].startswith(says)


def test_what_cannot_be_made_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert checked("CartPol-v1") == 2
    assert "not registered with Gymnasium. Nearest: CartPole-v1" in capfd.readouterr().err


def test_ten_lines_say_what_is_seen_done_and_learned(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["check", "cartpole", "--environment.id", "looked:Quiet", "--steps", "100"]) == 0
    )
    lines = capfd.readouterr().out.splitlines()
    assert lines[:-1] == [
        "looked:Quiet: 100 random steps, 10 episodes of 10 to 10 steps ended, 10 by termination, "
        "0 cut off",
        "  observes  Box(-1.0, 1.0, (2,), float32)",
        "  acts      Discrete(2)",
        "  network   torso mlp (64, 64), core feed_forward, 4,547 weights, by the preset cartpole",
        "  rewards   1 to 10, mean 5.5, learned from times 0.1",
        "  seeds     two resets with the same seed give the same observation",
    ]
    assert lines[-1].startswith("  times     a step ")


def test_an_image_that_the_torso_flattens_is_odd(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "minatar", "--agent.torso", "mlp"]) == 0
    assert "torso mlp flattens images: --agent.torso auto" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["looked:Seedless"], "two resets with the same seed differ"),
        (["looked:FailsOnce"], "failed in the first of two plays: KeyError: 'gear' (/"),
        (["looked:Quiet", "--environment.kwargs", '{"spread": 1e6}'], "observed numbers reach 9"),
    ],
)
def test_what_is_odd_is_noted(
    words: list[str], says: str, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Shown(tmp_path / "failures")
    looked.FailsOnce.made = 0
    assert checked(*words, "--failures", str(shown.path)) == 0
    shown.show()
    (line,) = (line for line in caplog.messages if " slow, " not in line)  # on a busy machine
    assert line.startswith(f"{words[0]}: ") and says in line
    assert shown.last == ""  # it is no failure


def test_random_play_obeys_the_mask(capfd: pytest.CaptureFixture[str]) -> None:
    assert checked("looked:Guarded") == 0
    assert "a mask forbids 44% of the choices" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("vectorization", "helps"),
    [
        ("sync", "async gives each of an actor's 32 environments a process (if it is a gym"),
        ("async", "num-envs 64"),
    ],
)
def test_what_is_slow_is_noted_with_what_helps(vectorization: str, helps: str) -> None:
    spaces = gym.spaces.Discrete(2), gym.spaces.Discrete(2)
    look = Look(
        *(spaces, 20, [10, 10], 2, np.ones(20), 0.0, 0.0),
        *(1e-4, 0.3, []),  # seconds of a step and of a reset
    )
    task = Task("Slow", EnvironmentConfig(id="own:Slow", vectorization=vectorization))  # type: ignore[arg-type]
    (line,) = check._odd(look, task, PRESETS["cartpole"][1])
    assert "slow, 33 steps/s in one process (a step takes 0.1 ms, a reset 300 ms)" in line
    assert helps in line


@pytest.mark.parametrize("id", ["CartPole-v1", "Bandit/Independent-v0"])
def test_the_advice_for_what_is_slow_can_be_followed(id: str) -> None:
    advice = pace.advice(EnvironmentConfig(id=id, vectorization="sync"), 2)
    assert "async" in advice
    advised = EnvironmentConfig(id=id, vectorization="async")
    rules.validate(dataclasses.replace(PRESETS["cartpole"][1], environment=advised))
    environments.make(advised, 2).close()


@pytest.mark.parametrize("id", ["Catch", "Catch/Continuing", "ALE/Pong-v5"])
def test_what_steps_together_is_not_advised_to_have_processes(id: str) -> None:
    assert "async" not in pace.advice(EnvironmentConfig(id=id), 2)


@pytest.mark.parametrize(
    ("word", "preset"),
    [
        ("ALE/Breakout-v5", "atari"),
        ("MinAtar/Asterix-v1", "minatar"),
        ("MiniGrid-Empty-5x5-v0", "minigrid"),
        ("Hopper-v5", "mujoco"),
        ("Pendulum-v1", "pendulum"),
        ("package:Own-v0", "cartpole"),
    ],
)
def test_an_id_alone_has_the_settings_of_a_preset(word: str, preset: str) -> None:
    command = parse("check", Check, [word, "--actor.num-envs", "8"])
    assert (command.preset, command.settings.environment.id) == (preset, word)
    assert command.settings.agent == PRESETS[preset][1].agent


def test_a_preset_of_ones_own_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_presets.py").write_text(
        "import impala\nMINE = impala.Config(agent=impala.AgentConfig(hidden_sizes=(7,)))\n"
    )
    command = parse("check", Check, ["own_presets:MINE", "--environment.id", "Catch"])
    assert command.preset == "own_presets:MINE"
    assert command.settings.environment.id == "Catch"
    assert command.settings.agent.hidden_sizes == (7,)
