"""Optimisers against slow NumPy transcriptions of their papers, step by step."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tensorflow as tf

from impala.config.schema import OptimiserConfig
from learner.update import optimisers

SHAPES = [(3, 4), (4,), ()]
STEPS = 5
RMSPROP = OptimiserConfig(name="rmsprop", decay=0.9, momentum=0.5, epsilon=0.01)
ADAM = OptimiserConfig(name="adam", beta1=0.8, beta2=0.95, epsilon=1e-3)
CENTRED = dataclasses.replace(RMSPROP, centred=True)
ADAMW = dataclasses.replace(ADAM, name="adamw", weight_decay=0.5)
CONFIGS = [RMSPROP, CENTRED, ADAM, ADAMW]

Arrays = Sequence[np.ndarray]
Update = Callable[[Sequence[tf.Tensor], tf.Tensor], None]  # gradients and the rate


def rmsprop(
    values: Arrays,
    gradients_of_steps: Sequence[Arrays],
    rates: Sequence[float],
    decay: float,
    momentum: float,
    epsilon: float,
    centred: bool,
) -> Arrays:
    """TensorFlow 1's RMSProp: mean square from one, epsilon under the root, no Nesterov."""
    values = [*values]
    means = [np.zeros_like(value) for value in values]
    mean_squares = [np.ones_like(value) for value in values]
    moments = [np.zeros_like(value) for value in values]
    for gradients, rate in zip(gradients_of_steps, rates, strict=True):
        for i, g in enumerate(gradients):
            mean_squares[i] = decay * mean_squares[i] + (1 - decay) * g**2
            means[i] = decay * means[i] + (1 - decay) * g
            spread = mean_squares[i] - (means[i] ** 2 if centred else 0.0)
            moments[i] = momentum * moments[i] + rate * g / np.sqrt(spread + epsilon)
            values[i] = values[i] - moments[i]
    return values


def adam(
    values: Arrays,
    gradients_of_steps: Sequence[Arrays],
    rates: Sequence[float],
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> Arrays:
    """Algorithm 1 of Kingma and Ba, line by line, and what algorithm 2 of AdamW's paper adds."""
    values = [*values]
    ms = [np.zeros_like(value) for value in values]
    vs = [np.zeros_like(value) for value in values]
    for t, (gradients, rate) in enumerate(zip(gradients_of_steps, rates, strict=True), start=1):
        for i, g in enumerate(gradients):
            ms[i] = beta1 * ms[i] + (1 - beta1) * g
            vs[i] = beta2 * vs[i] + (1 - beta2) * g**2
            m_hat, v_hat = ms[i] / (1 - beta1**t), vs[i] / (1 - beta2**t)
            decay = weight_decay * values[i] if values[i].ndim > 1 else 0.0
            values[i] = values[i] - rate * (m_hat / (np.sqrt(v_hat) + epsilon) + decay)
    return values


def reference(
    config: OptimiserConfig, values: Arrays, gradients: Sequence[Arrays], rates: Sequence[float]
) -> Arrays:
    if config.name == "rmsprop":
        settings = config.decay, config.momentum, config.epsilon, config.centred
        return rmsprop(values, gradients, rates, *settings)
    weight_decay = config.weight_decay if config.name == "adamw" else 0.0
    settings_of_adam = config.beta1, config.beta2, config.epsilon, weight_decay
    return adam(values, gradients, rates, *settings_of_adam)


def draw(seed: int = 0) -> tuple[Arrays, Sequence[Arrays], Sequence[float]]:
    """First values, and for each step gradients (some large, some tiny, some 0) and a rate."""
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=shape) for shape in SHAPES]
    sizes = [0.01, 1.0, 0.0, 10.0, 0.1]
    gradients = [[size * rng.normal(size=shape) for shape in SHAPES] for size in sizes]
    return values, gradients, [0.1, 0.08, 0.06, 0.04, 0.02]


def to_tensors(arrays: Arrays) -> list[tf.Tensor]:
    return [tf.constant(array, tf.float32) for array in arrays]


def make_variables(values: Arrays) -> list[tf.Variable]:
    return [tf.Variable(value, name=f"v{i}") for i, value in enumerate(to_tensors(values))]


def graph(function: Update) -> Update:
    compiled: Update = tf.function(function, autograph=False)
    return compiled


def xla(function: Update) -> Update:
    compiled: Update = tf.function(function, autograph=False, jit_compile=True)
    return compiled


def eager(function: Update) -> Update:
    return function


@pytest.mark.parametrize("compiled", [eager, graph, xla])
@pytest.mark.parametrize("config", CONFIGS, ids=["rmsprop", "centred", "adam", "adamw"])
def test_several_steps_are_those_of_the_paper(
    config: OptimiserConfig, compiled: Callable[[Update], Update]
) -> None:
    values, gradients, rates = draw()
    variables = make_variables(values)
    optimiser = optimisers.make(config, variables)

    @compiled
    def update(gradients: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        optimiser.apply(gradients, variables, rate)

    for gradients_now, rate in zip(gradients, rates, strict=True):
        update(to_tensors(gradients_now), tf.constant(rate, tf.float32))

    for variable, expected in zip(
        variables, reference(config, values, gradients, rates), strict=True
    ):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=["rmsprop", "centred", "adam", "adamw"])
def test_an_optimiser_goes_on_where_its_variables_were_saved(config: OptimiserConfig) -> None:
    """Given three steps and a copy of slots and values, two more steps are the same in the copy."""
    values, gradients, rates = draw()
    variables = make_variables(values)
    optimiser = optimisers.make(config, variables)
    for i in range(3):
        optimiser.apply(to_tensors(gradients[i]), variables, tf.constant(rates[i]))

    copies = make_variables([variable.numpy() for variable in variables])
    restored = optimisers.make(config, copies)
    assert [v.name for v in restored.variables] == [v.name for v in optimiser.variables]
    for slot, saved in zip(restored.variables, optimiser.variables, strict=True):
        slot.assign(saved.numpy())
    for i in range(3, STEPS):
        optimiser.apply(to_tensors(gradients[i]), variables, tf.constant(rates[i]))
        restored.apply(to_tensors(gradients[i]), copies, tf.constant(rates[i]))

    for variable, copy in zip(variables, copies, strict=True):
        np.testing.assert_array_equal(variable.numpy(), copy.numpy())


@pytest.mark.parametrize("config", CONFIGS, ids=["rmsprop", "centred", "adam", "adamw"])
def test_the_optimisers_variables_are_its_slots_alone(config: OptimiserConfig) -> None:
    variables = make_variables(draw()[0])
    optimiser = optimisers.make(config, variables)

    own = {id(slot) for slot in optimiser.variables}

    assert not own & {id(variable) for variable in variables}
    has_count = config.name in ("adam", "adamw")
    assert len(own) == (3 if config.centred else 2) * len(variables) + has_count
    assert not any(slot.trainable for slot in optimiser.variables)


def test_a_variable_without_a_gradient_or_out_of_order_is_named() -> None:
    variables = make_variables(draw()[0])
    gradients = to_tensors(draw()[1][0])
    optimiser = optimisers.make(RMSPROP, variables)

    with pytest.raises(ValueError, match="v1:0 has no gradient"):
        optimiser.apply([gradients[0], None, gradients[2]], variables, tf.constant(0.1))
    with pytest.raises(ValueError, match=r"v2:0 has shape \(\), its slot \(3, 4\)"):
        optimiser.apply(gradients[::-1], variables[::-1], tf.constant(0.1))
    with pytest.raises(ValueError, match="2 gradients for 3 variables"):
        optimiser.apply(gradients[:2], variables, tf.constant(0.1))
    with pytest.raises(ValueError, match="The optimiser sgd is not built in"):
        optimisers.make(dataclasses.replace(RMSPROP, name="sgd"), variables)


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    gradients = [tf.constant([3.0, 0.0]), tf.constant([[4.0]])]

    clipped, norm = optimisers.clip_by_global_norm(gradients, 2.5)

    assert norm.numpy() == pytest.approx(5.0)
    np.testing.assert_allclose(clipped[0].numpy(), [1.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped[1].numpy(), [[2.0]], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    _, norm = optimisers.clip_by_global_norm([tf.constant([1.0, bad]), tf.constant(1.0)], 40.0)

    assert not np.isfinite(norm.numpy())


@pytest.mark.parametrize("size", [1e15, 1e18, 1e25, 3e38])
def test_clipping_of_large_gradients_against_float64(size: float) -> None:
    rng = np.random.default_rng(0)
    gradients = [np.float32(size * rng.uniform(-1.0, 1.0, shape)) for shape in SHAPES]
    exact = [gradient.astype(np.float64) for gradient in gradients]
    norm64 = math.sqrt(sum(np.square(gradient).sum() for gradient in exact))

    clipped, norm = optimisers.clip_large_by_global_norm([*map(tf.constant, gradients)], 40.0)

    assert norm.numpy() == pytest.approx(norm64, rel=1e-6)
    for got, gradient in zip(clipped, exact, strict=True):
        np.testing.assert_allclose(got.numpy(), gradient * min(1.0, 40.0 / norm64), rtol=1e-5)


def test_the_learning_rate_decays_to_zero_and_stays() -> None:
    config = OptimiserConfig(learning_rate=0.8, decay_to_zero=True)

    rates = [optimisers.learning_rate(config, progress) for progress in (0.0, 0.25, 1.0, 1.1)]

    assert rates == pytest.approx([0.8, 0.6, 0.0, 0.0])
