"""Exports a checkpoint's agent as a model that runs without this package, and tests the model.

The signatures of a SavedModel take and return tensors by name, for B environments at a time:

* `initial_state(batch_size)` returns the core state before an episode: `core_state_0` and so on, or
  nothing if the agent has none.
* `act(observation, is_first, core_state_0, ..., seed)` returns a sampled `action`, the parameters
  of its distribution (`policy`), the value estimate (`baseline`) and the next core state.
* `act_greedy` is the same without `seed`, for the most likely action.

Parts of observations and actions that are dicts or tuples have names such as
`observation_last_action`. An ONNX model is `act_greedy` alone, whose next core state is
`next_core_state_0` and so on: no two values of a graph of ONNX have the same name.
"""

import contextlib
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.environments import base
from impala.environments.spaces import FORBIDDEN, Spaces
from impala.play import onnx_model
from impala.play.player import Player
from impala.types import AgentOutput, Nest, StepType, TimeStep

Tensors = dict[str, Any]
"""Tensors by their names in a signature."""
Run = Callable[[str, Tensors], Mapping[str, Any]]
"""Runs a signature by name."""

_TOLERANCE = 1e-4


class ExportError(RuntimeError):
    """A model cannot be written, or does not reproduce its agent."""


class Trial(NamedTuple):
    """The result of comparing a model with its agent."""

    calls: int
    difference: float  # the largest of any output but actions, as `differences` says
    actions: int  # that differ from the agent's


class Functions:
    """An agent as functions of tensors by name: the signatures of a SavedModel.

    Args:
      agent: the agent.
      spaces: of observations and actions.

    Raises:
      ExportError: two parts of an observation or of an action would have the same name.
    """

    def __init__(self, agent: Agent, spaces: Spaces) -> None:
        self._agent = agent
        self._core_state = agent.initial_state(1)
        self._observation = base.map_leaves(_spec, "observation", spaces[0])
        self._observations = tree.flatten(self._observation)
        self.actions = [
            spec.name for spec in tree.flatten(base.map_leaves(_spec, "action", spaces[1]))
        ]
        self.observations = [spec.name for spec in self._observations]
        for names in (self.observations, self.actions):
            _check_unique(names)
        states = [
            tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype, name)
            for name, leaf in _state(self._core_state).items()
        ]
        shared = [*self._observations, tf.TensorSpec([None], tf.bool, "is_first"), *states]
        self.inputs = {
            "act": [*shared, tf.TensorSpec([2], tf.int32, "seed")],
            "act_greedy": shared,
            "initial_state": [tf.TensorSpec([], tf.int32, "batch_size")],
        }
        functions = {"act": self.act, "act_greedy": self.act, "initial_state": self._begin}
        self.signatures = {
            name: tf.function(functions[name], autograph=False).get_concrete_function(
                **{spec.name: spec for spec in specs}
            )
            for name, specs in self.inputs.items()
        }

    def given(self, timestep: TimeStep, core_state: Nest) -> Tensors:
        """Returns the agent's inputs [B, ...] by name, without a seed."""
        leaves = zip(self._observations, tree.flatten(timestep.observation), strict=True)
        observation = {spec.name: leaf for spec, leaf in leaves}
        is_first = tf.equal(timestep.step_type, tf.cast(StepType.FIRST, tf.int8))
        return {**observation, "is_first": is_first, **_state(core_state)}

    def named_outputs(self, output: AgentOutput, core_state: Nest) -> Tensors:
        """Returns the agent's outputs [B, ...] by name."""
        actions = dict(zip(self.actions, tree.flatten(output.action), strict=True))
        return {
            **actions,
            "policy": output.policy,
            "baseline": output.baseline,
            **_state(core_state),
        }

    def act(self, **given: tf.Tensor) -> Tensors:
        """Returns outputs by name, of inputs by name: a sampled action if there is a seed."""
        observation = [given[spec.name] for spec in self._observations]
        size = tf.shape(given["is_first"])
        timestep = TimeStep(
            tree.unflatten_as(self._observation, observation),
            reward=tf.zeros(size),  # the agent uses neither
            discount=tf.ones(size),
            step_type=tf.cast(~given["is_first"], tf.int8),  # FIRST or MID
        )
        states = [given[name] for name in _state(self._core_state)]
        core_state = tree.unflatten_as(self._core_state, states)
        if "seed" in given:
            return self.named_outputs(*self._agent.step(timestep, core_state, given["seed"]))
        return self.named_outputs(*self._agent.greedy_step(timestep, core_state))

    def _begin(self, batch_size: tf.Tensor) -> Tensors:
        return _state(self._agent.initial_state(batch_size))


def saved_model(player: Player, directory: pathlib.Path, timesteps: Iterable[TimeStep]) -> Trial:
    """Writes a SavedModel, describes its signatures in `model.json`, and tests it.

    Args:
      player: has the agent.
      directory: of the model; an earlier model there is replaced once this one has passed.
      timesteps: for the test: at least one, [B, ...] each.

    Raises:
      ExportError: it cannot be written, or its outputs differ from the agent's.
    """
    functions = Functions(player.agent, player.spaces)
    # TensorFlow does not tell capitals apart in the names of arguments.
    _check_unique([name.lower() for name in functions.observations])
    module = tf.Module()
    module.parameters = list(player.agent.variables)
    names = list(functions.signatures)
    with _replacing(directory) as partial:
        try:
            tf.saved_model.save(module, str(partial), signatures=functions.signatures)
        except tf.errors.OpError as error:
            raise ExportError(f"{directory} cannot be written: {error.message}") from error
        loaded = tf.saved_model.load(str(partial))
        tried = trial(
            *(player.agent, functions, timesteps),
            run=lambda name, given: loaded.signatures[name](**given),
            names=names,
        )
        _describe(partial / "model.json", player, functions, names, tried, renamed={})
    return tried


def onnx(player: Player, directory: pathlib.Path, timesteps: Iterable[TimeStep]) -> Trial:
    """Writes `act_greedy` as `model.onnx`, describes it in `model.onnx.json`, and tests it.

    Args:
      player: as for `saved_model`.
      directory: as for `saved_model`.
      timesteps: as for `saved_model`.

    Raises:
      ExportError: a package is missing, ONNX has no operation for a part of the network, or the
        model's outputs differ from the agent's.
    """
    functions = Functions(player.agent, player.spaces)
    specs = functions.inputs["act_greedy"]
    core_state = _state(player.agent.initial_state(1))
    names = {  # of the model's outputs
        name: f"next_{name}" if name in core_state else name
        for name in functions.signatures["act_greedy"].structured_outputs
    }

    def act(*given: tf.Tensor) -> list[tf.Tensor]:
        said = functions.act(**{spec.name: x for spec, x in zip(specs, given, strict=True)})
        return [said[name] for name in names]

    with _replacing(directory) as partial:
        try:
            model = onnx_model.written(player.agent, act, specs)
            onnx_model.name_outputs(model, list(names.values()))
            session = onnx_model.session(model)
        except onnx_model.OnnxError as error:
            raise ExportError(f"{error} Or export a SavedModel.") from error
        (partial / "model.onnx").write_bytes(model.SerializeToString())

        def run(name: str, given: Tensors) -> dict[str, Any]:
            feeds = {key: np.asarray(value) for key, value in given.items()}
            return dict(zip(names, session.run(list(names.values()), feeds), strict=True))

        tried = trial(*(player.agent, functions, timesteps), run=run, names=["act_greedy"])
        described = partial / "model.onnx.json"  # beside that of a SavedModel
        _describe(described, player, functions, ["act_greedy"], tried, renamed=names)
    return tried


def trial(
    agent: Agent, functions: Functions, timesteps: Iterable[TimeStep], run: Run, names: list[str]
) -> Trial:
    """Compares a model with its agent.

    Args:
      agent: that the model was made from.
      functions: of the agent.
      timesteps: at least one, [B, ...] each, consecutive.
      run: runs the model.
      names: of its signatures.

    Raises:
      ExportError: an output differs.
    """
    calls, difference, actions = 0, 0.0, 0
    core_state: Nest = None
    for count, each in enumerate(timesteps):
        # Copied, as the environment may overwrite its arrays.
        timestep = tree.map_structure(lambda x: tf.constant(np.array(x)), each)
        seed = tf.constant([1, count])
        pairs = []
        if core_state is None:
            core_state = agent.initial_state(len(each.reward))
            begun = {"batch_size": tf.constant(len(each.reward))}
            pairs.append(("initial_state", begun, _state(core_state)))
        given = functions.given(timestep, core_state)
        greedy = functions.named_outputs(*agent.greedy_step(timestep, core_state))
        output, core_state = agent.step(timestep, core_state, seed)
        sampled = functions.named_outputs(output, core_state)
        pairs += [("act_greedy", given, greedy), ("act", {**given, "seed": seed}, sampled)]
        for name, inputs, wanted in pairs:
            if name not in names:
                continue
            got = run(name, inputs)
            calls += 1
            for key, value in wanted.items():
                off = differences(value.numpy(), np.asarray(got[key]))
                if key in functions.actions:
                    actions += int((off > _TOLERANCE).sum())
                else:
                    difference = max(difference, float(off.max(initial=0.0)))
    tried = Trial(calls, difference, actions)
    if difference > _TOLERANCE or actions:
        raise ExportError(
            f"The model does not do what the agent does: in {calls} calls its outputs differ by up "
            f"to {difference:.2g} (at most {_TOLERANCE:g} is allowed), and {actions} actions do."
        )
    return tried


def recorded(player: Player, steps: int = 64, num_envs: int = 4) -> Iterator[TimeStep]:
    """Yields time steps of the task, played by the agent; of `External` `sampled` ones.

    Raises:
      ValueError: the environment cannot be made.
    """
    from impala.play.evaluation import play

    if player.is_external:
        yield from sampled(player.spaces[0], steps + 1, num_envs)
        return
    environment = player.environment(num_envs)
    try:
        for count, step in enumerate(play(environment, player.agent, greedy=False, seed=1)):
            yield step.timestep
            if count == steps:
                return
    finally:
        environment.close()


def sampled(space: gym.Space, steps: int, num_envs: int) -> Iterator[TimeStep]:
    """Yields time steps of random observations; in the first environment each begins an episode."""
    space.seed(0)
    ones = np.ones(num_envs, np.float32)
    for number in range(steps):
        samples = [space.sample() for _ in range(num_envs)]
        observation = tree.map_structure(lambda *leaves: np.stack(leaves), *samples)
        step_type = np.full(num_envs, StepType.MID if number else StepType.FIRST, np.int8)
        step_type[0] = StepType.FIRST
        yield TimeStep(tree.map_structure(_moderate, observation), 0 * ones, ones, step_type)


def _moderate(leaf: np.ndarray) -> np.ndarray:
    """Returns samples of an unbounded space without those beyond what one sees there."""
    return leaf if leaf.dtype.kind != "f" else np.clip(leaf, -10.0, 10.0).astype(leaf.dtype)


def _state(core_state: Nest) -> Tensors:
    return {f"core_state_{i}": leaf for i, leaf in enumerate(tree.flatten(core_state))}


def _spec(name: str, space: gym.Space) -> tf.TensorSpec:
    return tf.TensorSpec(
        [None, *(space.shape or ())], space.dtype, re.sub(r"\W", "_", name, flags=re.ASCII)
    )


def _check_unique(names: list[str]) -> None:
    if len(set(names)) < len(names):
        raise ExportError(
            f"Two parts would have the same name: {', '.join(names)}. Capitals do not count."
        )


def differences(wanted: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Returns the differences of outputs [B, ...] from an agent's.

    They are absolute, or relative to the agent's largest number over the batch in the same place of
    the output, if that is above 1: values near 0 are rounded as large ones are, with PopArt. Logits
    of forbidden actions do not count as large. A difference is 1 for unequal integers, and infinite
    if only one is finite, or two infinities or the shapes differ.
    """
    if wanted.shape != got.shape:
        return np.array([np.inf])
    if wanted.dtype.kind in "biu":
        return (wanted != got).astype(np.float64)
    wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    is_same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))
    counts = np.isfinite(wanted) & (wanted > 0.5 * FORBIDDEN)
    largest = np.where(counts, np.abs(wanted), 1.0).max(axis=0, initial=1.0)
    with np.errstate(invalid="ignore"):  # infinity - infinity, handled below
        off = np.abs(got - wanted) / largest
    return np.where(is_same, 0.0, np.nan_to_num(off, nan=np.inf, posinf=np.inf))


@contextlib.contextmanager
def _replacing(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a directory whose files replace those of `directory` when the block ends.

    If the block raises an error, nothing changes. Files of other names are kept.
    """
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=directory, suffix=".partial") as name:
            partial = pathlib.Path(name)
            yield partial
            for path in [each for each in partial.rglob("*") if each.is_file()]:
                target = directory / path.relative_to(partial)
                target.parent.mkdir(exist_ok=True)
                os.replace(path, target)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):  # the first error counts
                directory.rmdir()
        raise


def _describe(
    path: pathlib.Path,
    player: Player,
    functions: Functions,
    names: list[str],
    tried: Trial,
    renamed: Mapping[str, str],
) -> None:
    def shapes(specs: Iterable[Any]) -> dict[str, str]:
        """Returns dtype and shape of each, such as "float32 [B, 16]"."""
        sizes = {
            spec.name: ["B" if size is None else size for size in spec.shape] for spec in specs
        }
        return {
            spec.name: f"{spec.dtype.name} [{', '.join(map(str, sizes[spec.name]))}]"
            for spec in specs
        }

    signatures = {}
    for name in names:
        outputs = functions.signatures[name].structured_outputs
        said = [
            tf.TensorSpec(spec.shape, spec.dtype, renamed.get(key, key))
            for key, spec in outputs.items()
        ]
        signatures[name] = {"inputs": shapes(functions.inputs[name]), "outputs": shapes(said)}
    description = {
        "environment": player.task,
        "frames_trained": player.counters.frames,
        "updates": player.counters.updates,
        "signatures": signatures,
        "trial": tried._asdict(),
    }
    path.write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
