"""Action distributions: the suite of all of them, for each space, and what is special."""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from distribution_suite import DistributionConformance, masks

from impala.agents import distributions
from impala.environments.spaces import choices, leaves

spaces = gym.spaces

CASES = {
    "discrete_start": spaces.Discrete(3, start=-1),
    "single_choice": spaces.Discrete(1),
    "multi_discrete_start": spaces.MultiDiscrete([2, 3], start=[5, -2], dtype=np.int32),
    "multi_discrete_matrix": spaces.MultiDiscrete(np.array([[2, 3], [1, 2]])),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 3.0, (1,), np.float32),
    "box_scalar": spaces.Box(0.0, 0.01, (), np.float64),
    "box_matrix": spaces.Box(
        np.array([[-2.0, 10.0]], np.float32), np.array([[2.0, 11.0]], np.float32)
    ),
    "nested": spaces.Dict(
        {
            "b": spaces.Tuple((spaces.Discrete(2), spaces.MultiDiscrete([2, 3]))),
            "a": spaces.Box(-1, 1, (1,), np.float32),
        }
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


@pytest.mark.parametrize("name", CASES)
def test_a_share_of_the_entropy_means_the_same_for_every_part(name: str) -> None:
    """Of a choice, of what is allowed; of a box, of uniform actions over a part of its width."""
    space, share = CASES[name], 0.3
    distribution = distributions.for_space(space)
    boxes = [leaf for _, leaf in leaves(space) if isinstance(leaf, spaces.Box)]
    widths = np.concatenate([np.ravel(box.high - box.low) for box in boxes] or [np.ones(0)])
    assert distribution.num_parts == len(choices(space)) + len(widths)
    for parts in masks(space):
        allowed = np.concatenate([*parts, np.zeros(0, np.int8)])[np.newaxis]
        drawn = np.random.default_rng(1).normal(size=(1, distribution.num_parameters))
        parameters = distribution.mask(tf.constant(drawn, tf.float32), allowed)
        expected = sum(share * np.log(part.sum()) for part in parts)
        expected += np.sum(np.log(share * widths))
        found = distribution.entropy_at(share, parameters)
        np.testing.assert_allclose(found, [expected], rtol=1e-5, atol=1e-6)


class TestManyChoices:
    SIZES = np.array([[3, 2, 5], [2, 1, 3], [5, 2, 3]])  # those of a size are not side by side
    SPACE = spaces.MultiDiscrete(SIZES, start=SIZES - 4)

    def test_each_is_computed_as_if_it_were_alone(self) -> None:
        """Given masks that differ between rows, against float64, part by part."""
        sizes, random = self.SIZES.reshape(-1), np.random.default_rng(3)
        shape = (4, 6, sizes.sum())
        p, q = (tf.constant(3.0 * random.standard_normal(shape), tf.float32) for _ in range(2))
        allowed = random.integers(0, 2, shape)
        chosen = random.integers(0, sizes, (*shape[:2], 9))
        distribution = distributions.for_space(self.SPACE)

        with tf.GradientTape(persistent=True) as tape:
            tape.watch([p, q])
            masked, action = (
                distribution.mask(p, allowed),
                chosen.reshape(4, 6, 3, 3) + self.SIZES - 4,
            )
            log_prob = distribution.log_prob(masked, action)
            entropy, kl = distribution.entropy(masked), distribution.kl(masked, q)

        expected = [np.zeros(shape[:2]) for _ in range(3)]
        gradients = [np.zeros(shape) for _ in range(3)]
        modes = []
        for i, end in enumerate(sizes.cumsum()):
            part = np.s_[..., end - sizes[i] : end]
            says_nothing = ~allowed[part].any(axis=-1, keepdims=True)
            free = allowed[part].astype(bool) | says_nothing
            logits = np.where(free, p.numpy()[part].astype(np.float64), -1e9)
            log_p, log_q = _log_softmax(logits), _log_softmax(q.numpy()[part].astype(np.float64))
            pi, one_hot = np.exp(log_p), np.eye(sizes[i])[chosen[..., i]]
            of_entropy = -(pi * log_p).sum(axis=-1, keepdims=True)
            expected[0] += (one_hot * log_p).sum(axis=-1)
            expected[1] += of_entropy[..., 0]
            expected[2] += (pi * (log_p - log_q)).sum(axis=-1)
            gradients[0][part] = free * (one_hot - pi)
            gradients[1][part] = -pi * (log_p + of_entropy)
            gradients[2][part] = np.exp(log_q) - pi
            modes.append(logits.argmax(axis=-1))
        np.testing.assert_allclose(log_prob, expected[0], rtol=1e-6)
        np.testing.assert_allclose(entropy, expected[1], rtol=1e-5)
        np.testing.assert_allclose(kl, expected[2], rtol=1e-5)
        found = [tape.gradient(*pair) for pair in ((log_prob, p), (entropy, p), (kl, q))]
        for one, other in zip(found, gradients, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        mode = np.stack(modes, axis=-1).reshape(action.shape) + self.SIZES - 4
        np.testing.assert_array_equal(distribution.mode(masked), mode)

    def test_more_of_a_size_are_no_more_operations(self) -> None:
        def operations(count: int) -> int:
            distribution = distributions.for_space(spaces.MultiDiscrete([3, 2] * count))

            def everything(p: tf.Tensor) -> list[tf.Tensor]:
                p = distribution.mask(p, tf.ones_like(p))
                action, log_prob = distribution.sample_and_log_prob(p, SEED)
                again = distribution.log_prob(p, distribution.mode(p))
                return [action, log_prob, again, distribution.entropy(p), distribution.kl(p, p)]

            traced = tf.function(everything).get_concrete_function(tf.zeros([7, 5 * count]))
            return len(traced.graph.get_operations())

        assert operations(100) == operations(50)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


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

    def test_a_network_cannot_move_means_far_beyond_the_edge(self) -> None:
        """In a part of a joint action too; what determines the log-std is as the network says."""
        box = spaces.Box(-1, 1, (1,), np.float32)
        outputs = tf.constant([[1e4, 30.0], [-0.5, -30.0]])
        expected = [[5.0, 30.0], [-5 * np.tanh(0.1), -30.0]]
        bounded = distributions.for_space(box).bound(outputs)
        np.testing.assert_allclose(bounded, expected, rtol=1e-6)
        joint = distributions.for_space(spaces.Tuple((spaces.Discrete(2), box)))
        logits = tf.constant([[1e4, 7.0], [-1e4, 7.0]])
        found = joint.bound(tf.concat([logits, outputs], axis=-1))
        np.testing.assert_allclose(found, np.concatenate([logits, expected], -1), rtol=1e-6)

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
