"""Checks of custom parts: what would fail far from its cause, or not at all.

An actor's network computes one row of one group of environments at a time, the learner's all rows
of a batch: a part that makes a difference of it corrects for lag wrongly. Each part is tried when a
process makes it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.agents.cores import Core
from impala.agents.observation import as_channels_last, as_vector
from impala.agents.torsos import Torso
from impala.algorithms.base import Algorithm, LossOutput
from impala.environments.spaces import main_space
from impala.parts.components import ComponentError, described
from impala.types import Batch, Nest

_SEES = ("vector", "image", "observation")
_CLOSE = 1e-2  # of the largest output: other batches are summed up in another order


def check_torso(name: str, torso: Torso, observation_space: gym.Space) -> None:
    """Checks that a torso maps each observation to a vector, whatever is beside it.

    Args:
      name: in the configuration.
      torso: a custom one.
      observation_space: of one environment, after the frame stack.

    Raises:
      ComponentError: it does not.
    """
    inputs = _inputs(name, torso, observation_space)
    with _described(name, "torso"):
        features = tf.convert_to_tensor(torso(inputs))
        alone = _traced(torso)(tree.map_structure(lambda leaf: leaf[:1], inputs))
    shapes = tree.map_structure(lambda leaf: list(leaf.shape), inputs)
    if not features.dtype.is_floating or features.shape.rank != 2 or features.shape[0] != 2:
        raise ComponentError(
            f"{name} gives {features.dtype.name} {features.shape} for two observations of shape "
            f"{shapes} (it sees {torso.sees!r}); it must give float32 [N, F]."
        )
    if not _equal(features[:1], alone):
        raise ComponentError(
            f"{name} gives other features for an observation when another one is beside it: the "
            "rows of a batch must not act upon each other, and nothing may be random."
        )


def check_core(name: str, core: Core, num_features: int) -> None:
    """Checks that a core keeps to the shapes, forgets when an episode begins, and goes row by row.

    Args:
      name: in the configuration.
      core: a custom one.
      num_features: F of its inputs [T, B, F].

    Raises:
      ComponentError: it does not.
    """
    rng = np.random.default_rng(0)
    inputs = tf.constant(rng.standard_normal((3, 2, num_features)), tf.float32)
    is_first = tf.constant([[True, True], [False, False], [False, True]])
    with _described(name, "core"):
        initial = core.initial_state(2)
        outputs, state = core(inputs, is_first, initial)
        again, _ = _traced(core)(inputs, is_first, state)
        rows, each = [], initial
        for t in range(3):
            row, each = core(inputs[t : t + 1], is_first[t : t + 1], each)
            rows.append(row)
    if outputs.shape.rank != 3 or outputs.shape[:2] != (3, 2):
        raise ComponentError(
            f"{name} gives outputs {outputs.shape} for inputs {inputs.shape}: it must give "
            "[T, B, G]."
        )
    if (before := _shapes(initial)) != (after := _shapes(state)):
        raise ComponentError(
            f"{name} gives the state {after} where its initial_state is {before}: both must have "
            "the same structure, shapes and dtypes."
        )
    if not _equal(outputs, again):
        raise ComponentError(
            f"{name} lets the state of before act upon a row where is_first is true: an episode "
            "begins there, so use the initial state instead."
        )
    if not _equal(outputs, tf.concat(rows, axis=0)):
        raise ComponentError(
            f"{name} gives other outputs for three rows at once than for one row after another: "
            "nothing but the state may go from row to row, and nothing may be random."
        )


def check_loss(name: str, algorithm: Algorithm, batch: Batch) -> None:
    """Checks the shapes of an algorithm's loss and metrics, and that each variable acts upon it.

    Args:
      name: in the configuration.
      algorithm: a custom one.
      batch: arrays [T + 1, B, ...] of any contents; nothing is computed.

    Raises:
      ComponentError: it has others, or a variable does not.
    """
    expected = [batch.unroll.timestep.reward.shape[0] - 1, batch.is_replay.shape[0]]

    def trial(batch: Batch, progress: tf.Tensor) -> None:
        variables = algorithm.learned_variables
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            output = algorithm.loss(batch, progress)
            _check_output(name, output, expected)
        if algorithm.agent.popart is not None and output.targets is None:
            raise ComponentError(
                f"{name} demands normalises_values, but its loss returns no targets, by which "
                "PopArt's statistics would change: give LossOutput.of its Targets."
            )
        for variable, gradient in zip(
            variables, tape.gradient(output.loss, variables), strict=True
        ):
            if gradient is None:
                raise ComponentError(
                    f"{name}: {variable.name} has no gradient, as it does not act upon the loss. "
                    "Use it, or leave it out of learned_variables."
                )

    arrays = tree.map_structure(tf.convert_to_tensor, batch)
    with _described(name, "algorithm"):
        _traced(trial).get_concrete_function(arrays, tf.constant(0.0))


def check_optimiser(
    name: str, apply: Callable[..., None], variables: Sequence[tf.Variable]
) -> None:
    """Checks that an optimiser takes what it is called with, and has made its state before.

    Args:
      name: in the configuration.
      apply: of a custom optimiser, made for the variables.
      variables: are not changed.

    Raises:
      ComponentError: it does not, or has not.
    """

    def refuse(_: Callable[..., tf.Variable], **kw: Any) -> tf.Variable:
        raise ComponentError(
            f"{name} makes a variable in apply: make it in the constructor, so that checkpoints "
            "hold it and a bad update can be undone."
        )

    def trial(learning_rate: tf.Tensor) -> None:
        gradients = [tf.zeros_like(variable) for variable in variables]
        with tf.variable_creator_scope(refuse):
            apply(gradients, variables, learning_rate)

    with _described(name, "optimiser"):
        _traced(trial).get_concrete_function(tf.constant(0.0))


def _traced(function: Callable[..., Any]) -> Any:
    """Returns a function as it is in a graph, where learners and actors call it."""
    return tf.function(function, autograph=False)


def _check_output(name: str, output: LossOutput, expected: list[int]) -> None:
    if not isinstance(output, LossOutput):
        raise ComponentError(
            f"The loss of {name} returns {type(output).__name__}: return a LossOutput."
        )
    loss = tf.convert_to_tensor(output.loss)
    if loss.dtype != tf.float32 or not loss.shape.is_compatible_with(expected):
        raise ComponentError(
            f"The loss of {name} is {loss.dtype.name} {loss.shape}; it must be float32 [T, B], "
            f"here {expected}: the loss of each step, which the learner sums up."
        )
    for metric, value in output.metrics.items():
        if not (shape := tf.convert_to_tensor(value).shape).is_compatible_with([]):
            raise ComponentError(
                f"The metric {metric} of {name} has the shape {shape}; it must be a scalar: take "
                "its mean, or return it in histograms."
            )


def _inputs(name: str, torso: Torso, observation_space: gym.Space) -> Nest:
    """Returns what a torso sees of two observations, as its `sees` says."""
    if torso.sees not in _SEES:
        raise ComponentError(f"sees of {name} is {torso.sees!r}; it must be one of {_SEES}.")
    space = copy.deepcopy(main_space(observation_space))
    space.seed(0)
    if torso.sees == "image":
        assert isinstance(space, gym.spaces.Box)  # as Features has checked
        one = as_channels_last(space).shape
        shape = (2, *one, 1)[: max(4, 1 + len(one))]
        return tf.constant(np.random.default_rng(0).random(shape), tf.float32)
    drawn = space.sample(), space.sample()
    observation = tree.map_structure(lambda *leaves: tf.constant(_small(np.stack(leaves))), *drawn)
    return as_vector(space, observation) if torso.sees == "vector" else observation


def _small(leaf: np.ndarray) -> np.ndarray:
    """Returns numbers whose squares are finite, as a space without bounds draws any."""
    return np.clip(leaf, -9.0, 9.0).astype(leaf.dtype) if leaf.dtype.kind == "f" else leaf


def _shapes(state: Nest) -> Nest:
    """Returns the dtype and shape of each leaf, without B."""
    return tree.map_structure(lambda leaf: f"{leaf.dtype.name} {leaf.shape[1:]}", state)


def _equal(first: tf.Tensor, second: tf.Tensor) -> bool:
    """Returns whether two tensors are equal but for rounding, as far as they are finite."""
    a, b = (np.asarray(tf.cast(x, tf.float32)) for x in (first, second))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True
    return a.shape == b.shape and np.allclose(a, b, rtol=0.0, atol=_CLOSE * np.abs(a).max())


@contextlib.contextmanager
def _described(name: str, word: str) -> Iterator[None]:
    """Turns errors that a part raises into one line."""
    try:
        yield
    except ComponentError:
        raise
    except Exception as error:
        raise ComponentError(f"The {word} {name} raises {described(error)}.") from error
