"""The contract of action distributions: a new one gets every test by listing a space of its own.

The truth is a sum over the whole action space: every choice, and a fine grid over every box.
"""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
import tree

from impala.agents import distributions
from impala.environments.spaces import choices
from impala.types import Nest

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


def whole_space(space: gym.Space) -> tuple[list[Nest], np.ndarray]:
    """Actions of a space, and how much of the space each stands for."""
    match space:
        case spaces.Discrete():
            return list(space.start + np.arange(space.n, dtype=space.dtype)), np.ones(space.n)
        case spaces.MultiDiscrete():
            ranges = [range(n) for n in space.nvec.reshape(-1)]
            actions = [
                (np.reshape(choice, space.shape) + space.start).astype(space.dtype)
                for choice in itertools.product(*ranges)
            ]
            return actions, np.ones(len(actions))
        case spaces.MultiBinary():
            actions = [
                np.array(bits, np.int8)
                for bits in itertools.product((0, 1), repeat=int(np.prod(space.shape)))
            ]
            return actions, np.ones(len(actions))
        case spaces.Box():
            size = int(np.prod(space.shape))
            step = 0.05 if size == 1 else 0.1
            points = np.arange(-7.0, 7.0, step) + step / 2  # Where the Gaussian is, and further.
            grid = np.stack(np.meshgrid(*[points] * size), -1).reshape(-1, size)
            half = (space.high - space.low).reshape(-1).astype(float) / 2
            actions = space.low.reshape(-1) + half * (1 + np.tanh(grid))
            weights = np.prod(half * (1 - np.tanh(grid) ** 2) * step, axis=-1)
            return list(actions.reshape(-1, *space.shape).astype(space.dtype)), weights
        case spaces.Dict():
            actions, weights = whole_space(spaces.Tuple(tuple(space.spaces.values())))
            return [dict(zip(space.spaces, action, strict=True)) for action in actions], weights
        case spaces.Tuple():
            parts = [whole_space(part) for part in space.spaces]
            pairs = list(itertools.product(*[part[0] for part in parts]))
            products = itertools.product(*[part[1] for part in parts])
            return pairs, np.array([np.prod(product) for product in products])
    raise AssertionError(f"List the actions of {space} here.")


def cells(space: gym.Space, actions: Nest) -> np.ndarray:
    """Numbers the regions of an action space: choices and, before tanh, widths of 0.7."""
    match space:
        case spaces.Dict():
            return _combine([cells(part, actions[name]) for name, part in space.spaces.items()])
        case spaces.Tuple():
            return _combine([cells(*pair) for pair in zip(space.spaces, actions, strict=True)])
        case spaces.Box():
            centre, half = (space.high + space.low) / 2, (space.high - space.low) / 2
            point = np.arctanh(np.clip((actions - centre) / half, -0.999998, 0.999998))
            actions = np.floor((point + 7) / 0.7).astype(int)
        case spaces.Discrete():
            actions = actions - space.start
        case spaces.MultiDiscrete():
            actions = actions - space.start
    return _combine(list(actions.reshape(len(actions), -1).T))


def _combine(numbers: list[np.ndarray]) -> np.ndarray:
    combined = np.zeros(len(numbers[0]), int)
    for number in numbers:
        combined = combined * 20 + number
    return combined


def stack(actions: list) -> Nest:
    return tree.map_structure(lambda *leaves: np.stack(leaves), *actions)


Case = tuple[gym.Space, distributions.Distribution]


@pytest.fixture(params=CASES, scope="class")
def case(request: pytest.FixtureRequest) -> Case:
    space = CASES[request.param]
    return space, distributions.for_space(space)


def draw(distribution: distributions.Distribution, *leading: int, seed: int = 0) -> tf.Tensor:
    """Parameters of a policy that is neither uniform nor certain."""
    rng = np.random.default_rng(seed)
    shape = (*leading, distribution.num_parameters)
    return tf.constant(rng.uniform(-1.2, 0.4, shape), tf.float32)


def masks(space: gym.Space) -> list[list[np.ndarray]]:
    """What is allowed, part by part: one choice, all but one, and anything."""
    rng = np.random.default_rng(5)
    sizes = choices(space)
    one = [np.eye(size, dtype=np.int8)[rng.integers(size)] for size in sizes]
    all_but_one = [
        np.ones(size, np.int8) if size == 1 else 1 - m for size, m in zip(sizes, one, strict=True)
    ]
    anything = [np.maximum(m, rng.integers(0, 2, len(m), np.int8)) for m in one]
    return [one, all_but_one, anything]


class TestContract:
    def test_probabilities_sum_to_one(self, case: Case) -> None:
        space, distribution = case
        actions, weights = whole_space(space)
        log_probs = distribution.log_prob(draw(distribution, 1), stack(actions))
        assert log_probs.shape == (len(actions),)
        np.testing.assert_allclose(np.sum(weights * np.exp(log_probs)), 1.0, atol=2e-3)

    def test_entropy_is_the_expected_surprise(self, case: Case) -> None:
        space, distribution = case
        actions, weights = whole_space(space)
        parameters = draw(distribution, 1)
        log_probs = distribution.log_prob(parameters, stack(actions)).numpy()
        expected = -np.sum(weights * np.exp(log_probs) * log_probs)
        np.testing.assert_allclose(distribution.entropy(parameters), [expected], atol=2e-2)

    def test_kl_is_the_expected_log_ratio(self, case: Case) -> None:
        space, distribution = case
        actions, weights = whole_space(space)
        p, q = draw(distribution, 1, seed=1), draw(distribution, 1, seed=2)
        log_p = distribution.log_prob(p, stack(actions)).numpy()
        log_q = distribution.log_prob(q, stack(actions)).numpy()
        expected = np.sum(weights * np.exp(log_p) * (log_p - log_q))
        np.testing.assert_allclose(distribution.kl(p, q), [expected], atol=2e-2, rtol=1e-2)

    @pytest.mark.parametrize("which", range(3))
    def test_masked_choices_are_impossible_and_the_rest_is_as_enumerated(
        self, case: Case, which: int
    ) -> None:
        space, distribution = case
        parts = masks(space)[which]
        allowed = np.concatenate([*parts, np.zeros(0, np.int8)])[np.newaxis]
        assert allowed.shape == (1, distribution.num_choices)
        actions, weights = whole_space(space)
        p, q = (distribution.mask(draw(distribution, 1, seed=seed), allowed) for seed in (1, 2))

        log_p, log_q = (distribution.log_prob(x, stack(actions)).numpy() for x in (p, q))

        probabilities = weights * np.exp(log_p)
        np.testing.assert_allclose(np.sum(probabilities), 1.0, atol=2e-3)
        if parts:
            share = np.prod([part.sum() / len(part) for part in parts])
            assert np.mean(probabilities > 0) == pytest.approx(share)
        entropy = -np.sum(probabilities * log_p)
        np.testing.assert_allclose(distribution.entropy(p), [entropy], atol=2e-2)
        divergence = np.sum(probabilities * (log_p - log_q))
        np.testing.assert_allclose(distribution.kl(p, q), [divergence], atol=2e-2, rtol=1e-2)
        _, log_probs = distribution.sample_and_log_prob(tf.repeat(p, 200, axis=0), SEED)
        assert log_probs.numpy().min() > -100.0
        assert distribution.log_prob(p, distribution.mode(p)).numpy() > -100.0

    def test_kl_of_a_policy_to_itself_is_zero(self, case: Case) -> None:
        _, distribution = case
        parameters = draw(distribution, 4)
        np.testing.assert_allclose(distribution.kl(parameters, parameters), [0.0] * 4, atol=1e-6)

    def test_sampling_frequencies_are_the_probabilities(self, case: Case) -> None:
        space, distribution = case
        actions, weights = whole_space(space)
        parameters = draw(distribution, 1)
        probabilities = weights * np.exp(distribution.log_prob(parameters, stack(actions)))
        expected = np.bincount(cells(space, stack(actions)), weights=probabilities)

        n = 20_000
        samples, _ = distribution.sample_and_log_prob(tf.repeat(parameters, n, axis=0), SEED)
        samples = tree.map_structure(lambda leaf: leaf.numpy(), samples)
        seen = np.bincount(cells(space, samples), minlength=len(expected))

        # Pearson's chi-square, over the regions where at least 10 samples are expected.
        assert len(seen) == len(expected)
        likely = expected * n >= 10
        statistic = np.sum((seen - expected * n)[likely] ** 2 / (expected * n)[likely])
        freedom = np.count_nonzero(likely)
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)

    def test_samples_are_actions_of_the_space(self, case: Case) -> None:
        space, distribution = case
        samples, log_probs = distribution.sample_and_log_prob(draw(distribution, 50), SEED)
        for i in range(50):
            sample = tree.map_structure(lambda leaf, i=i: np.asarray(leaf.numpy()[i]), samples)
            assert space.contains(sample), sample
        np.testing.assert_allclose(
            log_probs, distribution.log_prob(draw(distribution, 50), samples), rtol=1e-3, atol=1e-3
        )

    def test_the_seed_decides_and_rows_differ(self, case: Case) -> None:
        space, distribution = case
        parameters = draw(distribution, 1) * tf.ones([64, 1])

        def draws(seed: tf.Tensor) -> np.ndarray:
            return cells(
                space,
                tree.map_structure(
                    lambda leaf: leaf.numpy(), distribution.sample_and_log_prob(parameters, seed)[0]
                ),
            )

        np.testing.assert_array_equal(draws(SEED), draws(SEED))
        if space != CASES["single_choice"]:
            assert (draws(SEED) != draws(SEED + 1)).any()
            assert len(set(draws(SEED))) > 1

    def test_the_mode_of_a_certain_policy_is_what_it_samples(self, case: Case) -> None:
        space, distribution = case
        parameters = 1000.0 * draw(distribution, 20)
        mode = distribution.mode(parameters)
        sample, _ = distribution.sample_and_log_prob(parameters, SEED)
        for expected, found in zip(tree.flatten(sample), tree.flatten(mode), strict=True):
            assert expected.dtype == found.dtype
            if found.dtype.is_integer:
                np.testing.assert_array_equal(found, expected)
        for i in range(20):
            assert space.contains(
                tree.map_structure(lambda leaf, i=i: np.asarray(leaf.numpy()[i]), mode)
            )

    def test_extreme_parameters_give_finite_numbers_and_gradients(self, case: Case) -> None:
        space, distribution = case
        action = tree.map_structure(lambda leaf: leaf[np.newaxis], stack([space.sample()]))
        signs = np.where(np.arange(distribution.num_parameters) % 2, 1.0, -1.0)
        for scale in (1e4, -1e4):
            p = tf.constant(scale * signs, tf.float32)[tf.newaxis, tf.newaxis]
            q = -p
            with tf.GradientTape(persistent=True) as tape:
                tape.watch([p, q])
                values = [
                    distribution.log_prob(p, action),
                    distribution.entropy(p),
                    distribution.kl(p, q),
                    distribution.sample_and_log_prob(p, SEED)[1],
                ]
            for value in values:
                assert np.isfinite(value).all()
                assert np.isfinite(tape.gradient(value, p)).all()

    @pytest.mark.parametrize("leading", [(), (3,), (4, 3), (2, 1, 3)])
    def test_any_leading_dimensions(self, case: Case, leading: tuple[int, ...]) -> None:
        space, distribution = case
        parameters = draw(distribution, *leading)
        actions, log_probs = distribution.sample_and_log_prob(parameters, SEED)
        example = tree.map_structure(np.asarray, space.sample())
        for found, one in zip(tree.flatten(actions), tree.flatten(example), strict=True):
            assert found.shape == (*leading, *one.shape)
            assert found.dtype.as_numpy_dtype == one.dtype
        for value in (
            log_probs,
            distribution.log_prob(parameters, actions),
            distribution.entropy(parameters),
            distribution.kl(parameters, parameters),
        ):
            assert value.shape == leading
            assert value.dtype == tf.float32

    @pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
    def test_compiled_it_says_the_same(self, case: Case, jit_compile: bool) -> None:
        _, distribution = case

        def everything(
            p: tf.Tensor, q: tf.Tensor, actions: Nest
        ) -> tuple[Nest, tf.Tensor, tf.Tensor, tf.Tensor]:
            return (
                distribution.mode(p),
                distribution.log_prob(p, actions),
                distribution.entropy(p),
                distribution.kl(p, q),
            )

        p, q = draw(distribution, 3, 2, seed=1), draw(distribution, 3, 2, seed=2)
        sample = tf.function(distribution.sample_and_log_prob, jit_compile=jit_compile)
        actions, log_probs = sample(p, SEED)
        compiled = tf.function(everything, jit_compile=jit_compile)(p, q, actions)
        eager = everything(p, q, actions)
        for expected, found in zip(tree.flatten(eager), tree.flatten(compiled), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(log_probs, eager[1], rtol=2e-3, atol=1e-3)


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


def test_an_action_outside_the_space_moves_nothing() -> None:
    logits = tf.constant([[1.0, 2.0]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        log_prob = distributions.Categorical(2).log_prob(logits, tf.constant([17]))
    np.testing.assert_array_equal(log_prob, [0.0])
    np.testing.assert_array_equal(tape.gradient(log_prob, logits), [[0.0, 0.0]])


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
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "bounds must be finite.*RescaleAction"),
        (spaces.Box(0, 255, (2,), np.uint8), "dtype uint8 is no float"),
        (spaces.Box(np.array([0.0, 1.0]), np.ones(2), dtype=np.float64), "low must be less than"),
        (spaces.Text(5), "No action distribution for Text.*Supported: Discrete"),
        (spaces.Dict({}), "not empty"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Text(3))), "No action distribution for Text"),
    ],
)
def test_other_spaces_are_refused_with_the_fix(space: gym.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distributions.for_space(space)
