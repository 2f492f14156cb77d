"""Exported models do what the agent does, with TensorFlow or ONNX Runtime alone."""

import dataclasses
import json
import math
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
import tree
from gymnasium.vector.utils import batch_space
from half_trained import STORED, evaluated

import impala
from impala.commands import main as cli
from impala.config.schema import AgentConfig, EnvironmentConfig
from impala.logdir import checkpoint
from impala.parts import build
from impala.play import export
from impala.play.player import Player
from impala.types import TimeStep

NAMES = ("catch", "cartpole", "bandit")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """SavedModels of the stored runs, each in a directory of its name."""
    directory = tmp_path_factory.mktemp("models")
    for name in NAMES:
        player = Player(checkpoint.choose(STORED / name))
        tried = export.saved_model(player, directory / name, export.recorded(player, steps=8))
        assert (tried.calls, tried.actions) == (19, 0)
    return directory


def _flat(observation: Any) -> dict[str, tf.Tensor]:
    """An observation of one environment, as the model takes it."""
    return {
        "_".join(map(str, ("observation", *path))): tf.constant(np.asarray(leaf)[np.newaxis])
        for path, leaf in tree.flatten_with_path(observation)
    }


@pytest.mark.filterwarnings("ignore::UserWarning")  # of gym
@pytest.mark.parametrize(
    ("name", "episodes", "greedy"),
    [("catch", 6, False), ("cartpole", 2, False), ("bandit", 4, False), ("bandit", 4, True)],
)
def test_a_saved_model_plays_what_evaluate_plays(
    models: pathlib.Path, name: str, episodes: int, greedy: bool
) -> None:
    signatures = tf.saved_model.load(str(models / name)).signatures
    state = dict(signatures["initial_state"](batch_size=tf.constant(1)))
    environment = impala.load(STORED / name).environment()
    observation, _ = environment.reset(seed=7)
    is_first, count, played = True, 0, [0.0]
    while len(played) <= episodes:
        given = {**_flat(observation), **state, "is_first": tf.constant([is_first])}
        if greedy:
            said = signatures["act_greedy"](**given)
        else:
            said = signatures["act"](**given, seed=tf.constant([7, count]))
        state = {key: value for key, value in said.items() if key.startswith("core_state")}
        observation, reward, terminated, truncated, _ = environment.step(said["action"].numpy()[0])
        is_first, count = terminated or truncated, count + 1
        played[-1] += reward
        if is_first:
            observation, _ = environment.reset()
            count += 1  # evaluate draws for the last observation too
            played.append(0.0)
    environment.close()
    assert played[:-1] == evaluated(name, 1, episodes, greedy, seed=7)


def test_a_saved_model_needs_tensorflow_alone(models: pathlib.Path, tmp_path: pathlib.Path) -> None:
    # Given what an agent with a memory saw and did in a batch of environments ...
    player = Player(checkpoint.choose(STORED / "bandit"))
    functions = export.Functions(player.agent, player.spaces)
    timesteps = [
        tree.map_structure(np.array, timestep)
        for timestep in export.recorded(player, steps=25, num_envs=3)
    ]
    assert any((timestep.step_type == 0).any() for timestep in timesteps[1:])
    state = player.agent.initial_state(3)
    arrays: dict[str, np.ndarray] = {}
    for count, timestep in enumerate(timesteps):
        given = functions.given(tree.map_structure(tf.constant, timestep), ())
        output, state = player.agent.step(
            tree.map_structure(tf.constant, timestep), state, tf.constant([5, count])
        )
        arrays |= {f"{count}/{name}": value.numpy() for name, value in given.items()}
        arrays[f"{count}/wanted"] = output.action.numpy()
    np.savez(tmp_path / "recorded.npz", **arrays)  # type: ignore[arg-type]

    # ... then a program that can import neither our packages nor Sonnet does the same.
    script = """
import importlib.abc, sys
OURS = {"impala", "actors", "learner", "vtrace", "protos", "sonnet", "tree", "gymnasium"}
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in OURS:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
arrays = np.load(sys.argv[2])
state = model.signatures["initial_state"](batch_size=tf.constant(3))
for count in range(len({name.split("/")[0] for name in arrays})):
    own = {name.split("/")[1]: tf.constant(arrays[name]) for name in arrays
           if name.startswith(f"{count}/")}
    wanted = own.pop("wanted")
    said = model.signatures["act"](**own, **state, seed=tf.constant([5, count]))
    assert (said["action"].numpy() == wanted.numpy()).all(), count
    state = {name: value for name, value in said.items() if name.startswith("core_state")}
assert not OURS & set(sys.modules)
print("acted", count + 1, "times")
"""
    command = [sys.executable, "-c", script, str(models / "bandit"), str(tmp_path / "recorded.npz")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "acted 26 times\n", done.stderr


def test_the_command_says_how_far_the_model_is_from_the_agent(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impala.runtime.process.load_tensorflow", lambda use_gpus: None)
    command = ["export", str(STORED / "cartpole"), "--output", str(tmp_path / "model")]
    assert cli.main([*command, "--checkpoint", "372"]) == 0
    said = capsys.readouterr().out
    assert "model: CartPole-v1 after 60,053 frames. Beside the agent, in 131 calls: the" in said

    described = json.loads((tmp_path / "model" / "model.json").read_text())
    assert described["updates"] == 372
    assert described["signatures"]["act"]["inputs"] == {
        "observation": "float32 [B, 4]",
        "is_first": "bool [B]",
        "seed": "int32 [2]",
    }
    assert set(described["signatures"]) == {"act", "act_greedy", "initial_state"}
    assert described["trial"]["difference"] < 1e-5
    assert cli.main(["export", str(tmp_path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("output", "change", "complaint"),
    [
        ("policy", 0.001, "differ by up to 0.001"),
        ("core_state_1", 0.001, "differ by up to 0.001"),
        ("policy", math.nan, "differ by up to inf"),
        ("baseline", math.inf, "differ by up to inf"),
        ("action", 1, "and [1-9][0-9]* actions do"),
    ],
)
def test_a_model_that_does_something_else_is_refused(
    output: str, change: float, complaint: str
) -> None:
    player = Player(checkpoint.choose(STORED / "bandit"))
    functions = export.Functions(player.agent, player.spaces)

    def run(name: str, given: export.Tensors) -> dict[str, Any]:
        said = dict(functions.signatures[name](**given))
        if name == "act":
            said[output] = said[output] + tf.cast(change, said[output].dtype)
        return said

    with pytest.raises(export.ExportError, match=complaint):
        timesteps = export.recorded(player, steps=2)
        export.trial(player.agent, functions, timesteps, run, list(functions.signatures))


def test_an_export_that_fails_leaves_everything_as_it_was(
    models: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a good model beside somebody's file, and a trial that fails ...
    there = tmp_path / "there"
    shutil.copytree(models / "bandit", there)
    (there / "notes.txt").write_text("mine")

    def contents() -> dict[pathlib.Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = contents()
    player = Player(checkpoint.choose(STORED / "catch"))
    with monkeypatch.context() as patch:
        patch.setattr(export, "_TOLERANCE", -1.0)
        for directory in (there, tmp_path / "new"):
            with pytest.raises(export.ExportError, match="does not do what the agent does"):
                export.saved_model(player, directory, export.recorded(player, steps=1))

    # ... then the good one stays, and nothing else; one that passes replaces it.
    assert contents() == before
    assert list(tmp_path.iterdir()) == [there]
    export.saved_model(player, there, export.recorded(player, steps=1))
    assert set(contents()) == set(before)
    assert json.loads((there / "model.json").read_text())["environment"] == player.task
    assert "act" in tf.saved_model.load(str(there)).signatures


@pytest.mark.parametrize("name", NAMES)
def test_an_onnx_model_acts_as_the_agent_does(name: str, tmp_path: pathlib.Path) -> None:
    player = Player(checkpoint.choose(STORED / name))
    tried = export.onnx(player, tmp_path, export.recorded(player, steps=8))
    assert (tried.calls, tried.actions) == (9, 0)

    # Its inputs and outputs have the names that are written beside it.
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    described = json.loads((tmp_path / "model.onnx.json").read_text())["signatures"]["act_greedy"]
    assert [value.name for value in session.get_inputs()] == list(described["inputs"])
    assert [value.name for value in session.get_outputs()] == list(described["outputs"])
    next_core_state = [f"next_{key}" for key in described["inputs"] if key.startswith("core")]
    assert list(described["outputs"]) == ["action", "policy", "baseline", *next_core_state]


@pytest.mark.slow
def test_an_onnx_model_sees_images_as_the_agent_does(tmp_path: pathlib.Path) -> None:
    """Given pixels that XLA stacks and standardises in the agent."""
    spaces = gym.spaces.Box(0, 255, (16, 16, 1), np.uint8), gym.spaces.Discrete(3)
    player = Player(checkpoint.choose(STORED / "catch"))
    player.spaces = spaces
    player.agent = build.agent(AgentConfig(torso="small", frame_stack=4), *spaces)
    zeros = np.zeros(2, np.float32)
    timesteps = [
        TimeStep(np.stack([spaces[0].sample() for _ in range(2)]), zeros, zeros + 1.0, step_type)
        for step_type in (np.array([0, 0], np.int8), np.array([1, 0], np.int8))
    ]
    tried = export.onnx(player, tmp_path, timesteps)
    assert (tried.calls, tried.actions) == (2, 0)


def test_outputs_near_0_are_rounded_as_large_ones_are() -> None:
    """As values are where rewards are not clipped, with PopArt."""
    assert export.differences(np.array([1e4, 0.0]), np.array([1e4, 5e-4])).max() < 1e-4
    assert export.differences(np.array([1.0, 0.0]), np.array([1.0, 5e-4])).max() == 5e-4
    logits = np.array([[-1e9, 0.5], [0.5, 0.5]])
    assert export.differences(logits, logits + [[0.0, 0.0], [5e-4, 0.0]]).max() > 4e-4
    assert export.differences(logits, np.array([[0.5, 0.5], [0.5, 0.5]])).max() > 1e8


def test_what_is_played_elsewhere_is_tried_on_random_observations(tmp_path: pathlib.Path) -> None:
    saved = checkpoint.choose(STORED / "cartpole")
    external = EnvironmentConfig(id="External")
    saved = saved._replace(config=dataclasses.replace(saved.config, environment=external))
    player = Player(saved)
    timesteps = list(export.recorded(player, steps=2))
    assert len(timesteps) == 3 and timesteps[0].observation in batch_space(player.spaces[0], 4)
    assert export.saved_model(player, tmp_path, timesteps).actions == 0


@pytest.mark.parametrize("names", [("größe", "b"), ("A", "a")])
def test_any_name_of_an_observation_will_do_or_is_said_not_to(
    names: tuple[str, str], tmp_path: pathlib.Path
) -> None:
    player = Player(checkpoint.choose(STORED / "catch"))
    box = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    player.spaces = gym.spaces.Dict(dict.fromkeys(names, box)), gym.spaces.Discrete(3)
    player.agent = build.agent(AgentConfig(hidden_sizes=(8,)), *player.spaces)
    timesteps = list(export.sampled(player.spaces[0], 2, 2))
    if names != ("A", "a"):
        assert export.saved_model(player, tmp_path, timesteps).actions == 0
        return
    with pytest.raises(export.ExportError, match="same name: observation_a, observation_a"):
        export.saved_model(player, tmp_path, timesteps)


def test_onnx_says_what_it_needs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(export.ExportError, match=r"pip install 'impala-rl\[onnx\]'"):
        export.onnx(Player(checkpoint.choose(STORED / "catch")), tmp_path, [])
