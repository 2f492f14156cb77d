"""Custom parts that would fail far from their cause, or not at all, are refused by name."""

import contextlib
import dataclasses
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

from impala.agents.cores import Core
from impala.agents.torsos import Torso
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput
from impala.config.schema import (
    AgentConfig,
    Config,
    EnvironmentConfig,
    ObjectiveConfig,
    OptimiserConfig,
)
from impala.config.values import OptionError
from impala.parts import build, checks, sections
from impala.parts.components import CORE, TORSO, ComponentError
from impala.parts.sections import Found
from impala.types import Batch
from learner.plan import make_plan
from learner.update.optimisers import Optimiser
from learner.update.output_judge import blank

VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (6, 5), np.uint8)
CHANNELS_FIRST = gym.spaces.Box(0, 255, (3, 7, 6), np.uint8)
NEST = gym.spaces.Dict({"a": VECTOR, "b": gym.spaces.Discrete(4, start=100)})
LARGE = gym.spaces.Box(-3e38, 3e38, (3,), np.float32)


class Linear(Torso):
    sees: ClassVar[Any] = "vector"

    def __init__(self, settings: Any = None, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._linear = snt.Linear(4)

    def __call__(self, inputs: Any) -> tf.Tensor:
        return self._linear(inputs)


class OfImages(Linear):
    sees = "image"

    def __call__(self, inputs: Any) -> tf.Tensor:
        return self._linear(snt.flatten(inputs))


class Convolving(OfImages):
    def __call__(self, inputs: Any) -> tf.Tensor:
        return super().__call__(tf.nn.conv2d(inputs, tf.ones([5, 5, 3, 1]), 1, "VALID"))


class OfNests(Linear):
    sees = "observation"

    def __call__(self, inputs: Any) -> tf.Tensor:
        return self._linear(inputs["a"]) + tf.one_hot(inputs["b"] - 100, 4)


class Rows(Linear):
    def __call__(self, inputs: Any) -> tf.Tensor:
        return self._linear(inputs)[:, None]


class Means(Linear):
    def __call__(self, inputs: Any) -> tf.Tensor:
        return self._linear(inputs - tf.reduce_mean(inputs, axis=0))


@pytest.mark.parametrize(
    ("torso", "space"),
    [
        *((Linear, VECTOR), (Linear, NEST), (Linear, LARGE)),
        *((OfImages, IMAGE), (Convolving, CHANNELS_FIRST), (OfNests, NEST)),
    ],
)
def test_a_torso_of_each_kind_passes(torso: type[Torso], space: gym.Space) -> None:
    checks.check_torso("mine:Torso", torso(), space)


@pytest.mark.parametrize(
    ("torso", "said"),
    [
        (Rows, r"gives float32 \(2, 1, 4\) for two .*must give float32 \[N, F\]"),
        (Means, "gives other features for an observation when another one is beside it"),
    ],
)
def test_a_torso_that_does_not_map_rows_is_refused(torso: type[Torso], said: str) -> None:
    with pytest.raises(ComponentError, match=said):
        checks.check_torso("mine:Torso", torso(), VECTOR)


class Decay(Core):
    def initial_state(self, batch_size: int | tf.Tensor) -> Any:
        return tf.zeros([batch_size, 4])

    def __call__(self, inputs: tf.Tensor, is_first: tf.Tensor, state: Any) -> Any:
        outputs = []
        for row, first in zip(tf.unstack(inputs), tf.unstack(is_first), strict=True):
            state = 0.5 * self._before(first, state) + row
            outputs.append(state)
        return tf.stack(outputs), state

    def _before(self, first: tf.Tensor, state: Any) -> Any:
        return tf.where(first[:, None], tf.zeros_like(state), state)


class Unforgetting(Decay):
    def _before(self, first: tf.Tensor, state: Any) -> Any:
        return state


class LastRow(Decay):
    def __call__(self, inputs: tf.Tensor, is_first: tf.Tensor, state: Any) -> Any:
        return super().__call__(inputs, is_first, state)[0][-1], state


def test_a_core_that_forgets_passes() -> None:
    checks.check_core("mine:Core", Decay(), 4)


@pytest.mark.parametrize(
    ("core", "said"),
    [
        (Unforgetting, "lets the state of before act upon a row where is_first is true"),
        (LastRow, r"gives outputs \(2, 4\) for inputs \(3, 2, 4\): it must give \[T, B, G\]"),
    ],
)
def test_a_core_that_is_no_recurrence_is_refused(core: type[Core], said: str) -> None:
    with pytest.raises(ComponentError, match=said):
        checks.check_core("mine:Core", core(), 4)


class Values(Algorithm):
    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> Any:
        output, _ = self.agent.unroll(batch.unroll.timestep, batch.unroll.core_state)
        steps = losses.align(batch, output, self._objective)
        loss = losses.masked(tf.square(steps.values), steps.mask)
        entropy = self.agent.distribution.entropy(steps.target_policy)
        return self._said(loss - losses.masked(entropy, steps.mask))

    def _said(self, loss: tf.Tensor) -> Any:
        return LossOutput(loss, {"size": tf.reduce_mean(loss)})


class Mean(Values):
    def _said(self, loss: tf.Tensor) -> Any:
        return LossOutput(tf.reduce_mean(loss), {})


class Metric(Values):
    def _said(self, loss: tf.Tensor) -> Any:
        return LossOutput(loss, {"size": loss[0]})


def _check(algorithm: type[Algorithm], popart: bool = False) -> None:
    spaces = VECTOR, gym.spaces.Discrete(3)
    agent = build.agent(AgentConfig(hidden_sizes=(4,), popart=popart), *spaces)
    batch = blank(build.unroll_spec(agent, *spaces, unroll_length=5))
    checks.check_loss("mine:Loss", algorithm(agent, ObjectiveConfig(), None), batch)


def test_an_algorithm_passes() -> None:
    _check(Values)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (Mean, r"is float32 \(\); it must be float32 \[T, B\], here \[5, 2\]"),
        (Metric, r"The metric size of mine:Loss has the shape \(2,\); it must be a scalar"),
    ],
)
def test_an_algorithm_without_a_loss_per_step_is_refused(
    algorithm: type[Algorithm], said: str
) -> None:
    with pytest.raises(ComponentError, match=said):
        _check(algorithm)


def test_an_algorithm_gives_popart_its_targets() -> None:
    with pytest.raises(ComponentError, match="mine:Loss demands normalises_values, but its loss"):
        _check(Values, popart=True)


class Descent(Optimiser):
    def apply(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(learning_rate * gradient + 1.0)


class Lazy(Optimiser):
    def apply(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        self.moments = [tf.Variable(tf.zeros_like(gradient)) for gradient in gradients]


def test_an_optimiser_passes_and_changes_nothing() -> None:
    variable = tf.Variable([1.0, 2.0])
    checks.check_optimiser("mine:Optimiser", Descent([variable]).apply, [variable])
    np.testing.assert_array_equal(variable.numpy(), [1.0, 2.0])


@pytest.mark.parametrize(
    ("torso", "core", "said"),
    [(Linear, Decay, ""), (Means, Decay, "mine:Torso"), (Linear, Unforgetting, "mine:Core")],
)
def test_every_process_tries_the_parts_of_the_agent_it_makes(
    torso: type[Torso], core: type[Core], said: str
) -> None:
    own = {(TORSO, "mine:Torso"): Found(torso, None), (CORE, "mine:Core"): Found(core, None)}
    config = AgentConfig(torso="mine:Torso", core="mine:Core")
    with pytest.raises(ComponentError, match=said) if said else contextlib.nullcontext():
        build.agent(config, VECTOR, gym.spaces.Discrete(3), own=own)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(algorithm=f"{__name__}:Mean"), "The loss of .*Mean is float32"),
        (Config(optimiser=OptimiserConfig(name=f"{__name__}:Lazy")), "Lazy makes a variable"),
    ],
)
def test_the_learner_tries_its_parts_before_it_serves(config: Config, said: str) -> None:
    small = dataclasses.replace(
        config,
        environment=EnvironmentConfig(id="Catch"),
        agent=AgentConfig(torso="mlp", hidden_sizes=(4,)),
    )
    with pytest.raises(OptionError, match=said):
        make_plan(sections.compose(small))
