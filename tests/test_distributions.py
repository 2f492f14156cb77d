"""Action distributions: the suite of all of them, for each space, and what is special."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from distribution_suite import DistributionConformance

from impala.agents import distributions

spaces = gym.spaces

CASES = {
    "discrete": spaces.Discrete(5),
    "discrete_start": spaces.Discrete(3, start=-1),
    "single_choice": spaces.Discrete(1),
    "multi_discrete": spaces.MultiDiscrete([2, 4, 3]),
    "multi_discrete_start": spaces.MultiDiscrete([2, 3], start=[5, -2], dtype=np.int32),
    "multi_discrete_matrix": spaces.MultiDiscrete(np.array([[2, 3], [1, 2]])),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 3.0, (1,), np.float32),
    "box_scalar": spaces.Box(0.0, 0.01, (), np.float64),
    "box_matrix": spaces.Box(
        np.array([[-2.0, 10.0]], np.float32), np.array([[2.0, 11.0]], np.float32)
    ),
    "dict": spaces.Dict({"move": spaces.Discrete(3), "aim": spaces.Box(-1, 1, (1,), np.float32)}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))),
    "nested": spaces.Dict(
        {"b": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(1))), "a": spaces.Discrete(3)}
    ),
}

SEED = tf.constant([7, 11], tf.int32)


def _contract(name: str, space: gym.Space) -> type[DistributionConformance]:
    """The suite of one space."""
    return type(
        f"Test{name.title().replace('_', '')}",
        (DistributionConformance,),
        {"action_space": space, "make": lambda self: distributions.for_space(space)},
    )


for _suite in itertools.starmap(_contract, CASES.items()):
    globals()[_suite.__name__] = _suite


def test_the_most_likely_choice_is_the_mode() -> None:
    logits = tf.constant([[0.1, 2.0, -1.0], [3.0, 2.0, -1.0]])
    np.testing.assert_array_equal(distributions.Categorical(3, start=4).mode(logits), [5, 4])


def test_a_forbidden_choice_is_never_made_and_costs_nothing() -> None:
    """-1e9 on a logit is how a choice is forbidden; the rest must stay finite beside it."""
    distribution = distributions.Categorical(3)
    logits = tf.constant([[0.0, -1e9, 0.0]])
    actions, _ = distribution.sample_and_log_prob(tf.repeat(logits, 1000, axis=0), SEED)
    assert set(actions.numpy()) == {0, 2}
    np.testing.assert_allclose(distribution.entropy(logits), [np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(distribution.kl(logits, tf.zeros([1, 3])), [np.log(1.5)], rtol=1e-6)


class TestTanhNormal:
    def test_the_edge_of_the_box_is_finite_with_finite_gradients(self) -> None:
        for low, high in [(-1.0, 1.0), (0.0, 1000.0), (-0.1, 1e-6)]:
            distribution = distributions.for_space(spaces.Box(low, high, (1,), np.float32))
            parameters = tf.constant([[0.3, 0.1], [0.3, 0.1]])
            with tf.GradientTape() as tape:
                tape.watch(parameters)
                log_prob = distribution.log_prob(parameters, tf.constant([[low], [high]]))
            assert np.isfinite(log_prob).all()
            gradient = tape.gradient(log_prob, parameters)
            assert np.isfinite(gradient).all()
            assert gradient[0, 0] < 0 < gradient[1, 0]  # The mean moves towards the edge taken.

    def test_parameters_of_zero_are_a_standard_normal_squashed(self) -> None:
        distribution = distributions.for_space(spaces.Box(-1, 1, (1,), np.float32))
        log_prob = distribution.log_prob(tf.zeros([1, 2]), tf.zeros([1, 1]))
        np.testing.assert_allclose(log_prob, [-0.5 * np.log(2 * np.pi)], rtol=1e-6)

    def test_the_mode_is_the_squashed_mean(self) -> None:
        distribution = distributions.for_space(spaces.Box(-1, 3, (2,), np.float32))
        mode = distribution.mode(tf.constant([[0.0, 0.5, 9.0, -9.0]]))
        np.testing.assert_allclose(mode, [[1.0, 1 + 2 * np.tanh(0.5)]], rtol=1e-6)

    @pytest.mark.parametrize("mean", [-3.0, 0.0, 1.0, 4.0])
    @pytest.mark.parametrize("unbounded", [-2.0, 0.0, 2.0, 9.0])
    def test_entropy_is_right_to_a_hundredth_of_a_nat(self, mean: float, unbounded: float) -> None:
        """Against a fine sum over the Gaussian, which no clipping at the edge blurs."""
        distribution = distributions.for_space(spaces.Box(-1, 1, (1,), np.float32))
        std = np.exp(-5 + 6 / (1 + np.exp(-(unbounded + np.log(5)))))
        noise = np.linspace(-10, 10, 20_001)
        density = np.exp(-0.5 * noise**2) / np.sqrt(2 * np.pi)
        point = mean + std * noise
        log_slope = -2 * np.logaddexp(point, -point) + 2 * np.log(2)
        expected = 0.5 * np.log(2 * np.pi * np.e) + np.log(std)
        expected += np.sum(density * log_slope) * (noise[1] - noise[0])
        entropy = distribution.entropy(tf.constant([[mean, unbounded]], tf.float32))
        np.testing.assert_allclose(entropy, [expected], atol=1e-2)

    def test_a_sample_has_a_gradient_to_the_parameters(self) -> None:
        distribution = distributions.for_space(spaces.Box(-1, 1, (1,), np.float32))
        parameters = tf.zeros([8, 2])
        with tf.GradientTape() as tape:
            tape.watch(parameters)
            action, _ = distribution.sample_and_log_prob(parameters, SEED)
        assert (tape.gradient(action, parameters).numpy()[:, 0] > 0).all()


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "bounds must be finite.*TransformAction"),
        (spaces.Box(0, 255, (2,), np.uint8), "dtype uint8 is not a float"),
        (spaces.Box(np.array([0.0, 1.0]), np.ones(2), dtype=np.float64), "low must be less than"),
        (spaces.Text(5), "No action distribution for Text.*Supported: Discrete"),
        (spaces.Dict({}), "not empty"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Text(3))), "No action distribution for Text"),
    ],
)
def test_other_spaces_are_refused_with_the_fix(space: gym.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distributions.for_space(space)
