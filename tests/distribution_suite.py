"""The contract of action distributions (see `impala.agents.distributions`) as tests."""

import functools
import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree
from gymnasium import spaces

from impala.agents.distributions import Distribution, Normal
from impala.environments.spaces import choices
from impala.testing.precision import plain_float32
from impala.types import Nest

_SEED = (7, 11)


class DistributionConformance:
    """Compares a distribution with sums over its whole action space.

    The sums are over every choice, and a fine grid on every box. The distribution's mass must be
    inside a box, not on its edges.
    """

    action_space: gym.Space
    """Discrete, MultiDiscrete, MultiBinary, Box with finite bounds, or Dict or Tuple of these."""

    def make(self) -> Distribution:
        """Returns a distribution of actions of the space."""
        raise NotImplementedError(f"{type(self).__name__} has to define make().")

    def parameters(self, *leading: int, seed: int = 0) -> tf.Tensor:
        """Returns parameters [*leading, P] of a policy that is neither uniform nor certain."""
        rng = np.random.default_rng(seed)
        shape = (*leading, self.make().num_parameters)
        return tf.constant(rng.uniform(-1.2, 0.4, shape), tf.float32)

    def test_probabilities_sum_to_one(self) -> None:
        """Choices sum to one; densities over a box integrate to one."""
        space, distribution = self.action_space, self.make()
        actions, weights = whole_space(space)
        log_probs = distribution.log_prob(self.parameters(1), stack(actions))
        assert log_probs.shape == (len(actions),)
        np.testing.assert_allclose(np.sum(weights * np.exp(log_probs)), 1.0, atol=2e-3)

    def test_entropy_is_the_expected_surprise(self) -> None:
        """-E[log p], in nats."""
        space, distribution = self.action_space, self.make()
        actions, weights = whole_space(space)
        parameters = self.parameters(1)
        log_probs = distribution.log_prob(parameters, stack(actions)).numpy()
        expected = -np.sum(weights * np.exp(log_probs) * log_probs)
        np.testing.assert_allclose(distribution.entropy(parameters), [expected], atol=2e-2)

    def test_kl_is_the_expected_log_ratio(self) -> None:
        """E_p[log p - log q], in nats."""
        space, distribution = self.action_space, self.make()
        actions, weights = whole_space(space)
        p, q = self.parameters(1, seed=1), self.parameters(1, seed=2)
        log_p = distribution.log_prob(p, stack(actions)).numpy()
        log_q = distribution.log_prob(q, stack(actions)).numpy()
        expected = np.sum(weights * np.exp(log_p) * (log_p - log_q))
        np.testing.assert_allclose(distribution.kl(p, q), [expected], atol=2e-2, rtol=1e-2)

    def test_masked_choices_are_impossible(self) -> None:
        """With one choice of each part allowed, all but one, and any."""
        for parts in masks(self.action_space):
            self._check_mask(parts)

    def _check_mask(self, parts: list[np.ndarray]) -> None:
        space, distribution = self.action_space, self.make()
        allowed = np.concatenate([*parts, np.zeros(0, np.int8)])[np.newaxis]
        assert allowed.shape == (1, distribution.num_choices)
        actions, weights = whole_space(space)
        p, q = (distribution.mask(self.parameters(1, seed=seed), allowed) for seed in (1, 2))

        log_p, log_q = (distribution.log_prob(x, stack(actions)).numpy() for x in (p, q))

        probabilities = weights * np.exp(log_p)
        np.testing.assert_allclose(np.sum(probabilities), 1.0, atol=2e-3)
        if parts:
            share = np.prod([part.sum() / len(part) for part in parts])
            np.testing.assert_allclose(np.mean(probabilities > 0), share)
        entropy = -np.sum(probabilities * log_p)
        np.testing.assert_allclose(distribution.entropy(p), [entropy], atol=2e-2)
        divergence = np.sum(probabilities * (log_p - log_q))
        np.testing.assert_allclose(distribution.kl(p, q), [divergence], atol=2e-2, rtol=1e-2)
        _, log_probs = distribution.sample_and_log_prob(tf.repeat(p, 200, axis=0), _SEED)
        assert log_probs.numpy().min() > -100.0
        assert distribution.log_prob(p, distribution.mode(p)).numpy() > -100.0

    def test_kl_of_a_policy_to_itself_is_zero(self) -> None:
        """KL(p || p) = 0."""
        distribution = self.make()
        parameters = self.parameters(4)
        np.testing.assert_allclose(distribution.kl(parameters, parameters), [0.0] * 4, atol=1e-6)

    def test_described_it_diverges_as_much(self) -> None:
        """KL(p || q), of the probabilities and Gaussians that describe p and q."""
        distribution = self.make()
        p, q = self.parameters(3, seed=1), self.parameters(3, seed=2)
        of_p, of_q = _parts(distribution.described(p)), _parts(distribution.described(q))
        found = sum(_divergence(*pair) for pair in zip(of_p, of_q, strict=True))
        np.testing.assert_allclose(found, distribution.kl(p, q), rtol=1e-3, atol=1e-5)

    def test_sampling_frequencies_are_the_probabilities(self) -> None:
        """Pearson's chi-square of 20,000 samples."""
        space, distribution = self.action_space, self.make()
        actions, weights = whole_space(space)
        parameters = self.parameters(1)
        probabilities = weights * np.exp(distribution.log_prob(parameters, stack(actions)))
        expected = np.bincount(cells(space, stack(actions)), weights=probabilities)

        n = 20_000
        samples, _ = distribution.sample_and_log_prob(tf.repeat(parameters, n, axis=0), _SEED)
        samples = tree.map_structure(lambda leaf: leaf.numpy(), samples)
        seen = np.bincount(cells(space, samples), minlength=len(expected))

        # Pearson's chi-square, over the regions where at least 10 samples are expected.
        assert len(seen) == len(expected)
        likely = expected * n >= 10
        statistic = np.sum((seen - expected * n)[likely] ** 2 / (expected * n)[likely])
        freedom = np.count_nonzero(likely)
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)

    def test_samples_are_actions_of_the_space(self) -> None:
        """Of its shape and dtype, with the log-prob that `log_prob` gives."""
        space, distribution = self.action_space, self.make()
        samples, log_probs = distribution.sample_and_log_prob(self.parameters(50), _SEED)
        for i in range(50):
            sample = tree.map_structure(lambda leaf, i=i: np.asarray(leaf.numpy()[i]), samples)
            assert space.contains(sample), sample
        np.testing.assert_allclose(
            log_probs, distribution.log_prob(self.parameters(50), samples), rtol=1e-3, atol=1e-3
        )

    def test_the_seed_decides_and_rows_differ(self) -> None:
        """Sampling is stateless."""
        space, distribution = self.action_space, self.make()
        parameters = self.parameters(1) * tf.ones([64, 1])

        def draws(seed: tuple[int, int]) -> np.ndarray:
            return cells(
                space,
                tree.map_structure(
                    lambda leaf: leaf.numpy(), distribution.sample_and_log_prob(parameters, seed)[0]
                ),
            )

        np.testing.assert_array_equal(draws(_SEED), draws(_SEED))
        if len(whole_space(space)[0]) > 1:
            assert (draws(_SEED) != draws((_SEED[0] + 1, _SEED[1]))).any()
            assert len(set(draws(_SEED))) > 1

    def test_the_mode_of_a_certain_policy_is_what_it_samples(self) -> None:
        """With large parameters, the sample is the mode."""
        space, distribution = self.action_space, self.make()
        parameters = 1000.0 * self.parameters(20)
        mode = distribution.mode(parameters)
        sample, _ = distribution.sample_and_log_prob(parameters, _SEED)
        for expected, found in zip(tree.flatten(sample), tree.flatten(mode), strict=True):
            assert expected.dtype == found.dtype
            if found.dtype.is_integer:
                np.testing.assert_array_equal(found, expected)
        for i in range(20):
            assert space.contains(
                tree.map_structure(lambda leaf, i=i: np.asarray(leaf.numpy()[i]), mode)
            )

    def test_extreme_parameters_give_finite_numbers_and_gradients(self) -> None:
        """Parameters of 10,000, and policies that share nothing."""
        space, distribution = self.action_space, self.make()
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
                    distribution.sample_and_log_prob(p, _SEED)[1],
                ]
            for value in values:
                assert np.isfinite(value).all()
                assert np.isfinite(tape.gradient(value, p)).all()

    def test_any_leading_dimensions(self) -> None:
        """None, [B], [T, B] and more."""
        for leading in ((), (3,), (4, 3), (2, 1, 3)):
            self._check_leading(leading)

    def _check_leading(self, leading: tuple[int, ...]) -> None:
        space, distribution = self.action_space, self.make()
        parameters = self.parameters(*leading)
        actions, log_probs = distribution.sample_and_log_prob(parameters, _SEED)
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

    @plain_float32()
    def test_compiled_it_says_the_same(self) -> None:
        """As a graph, and by XLA."""
        for jit_compile in (False, True):
            self._check_compiled(jit_compile)

    def _check_compiled(self, jit_compile: bool) -> None:
        distribution = self.make()

        def everything(
            p: tf.Tensor, q: tf.Tensor, actions: Nest
        ) -> tuple[Nest, tf.Tensor, tf.Tensor, tf.Tensor]:
            return (
                distribution.mode(p),
                distribution.log_prob(p, actions),
                distribution.entropy(p),
                distribution.kl(p, q),
            )

        p, q = self.parameters(3, 2, seed=1), self.parameters(3, 2, seed=2)
        graph = functools.partial(tf.function, autograph=False, jit_compile=jit_compile)
        actions, log_probs = graph(distribution.sample_and_log_prob)(p, _SEED)
        compiled = graph(everything)(p, q, actions)
        eager = everything(p, q, actions)
        for expected, found in zip(tree.flatten(eager), tree.flatten(compiled), strict=True):
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(log_probs, eager[1], rtol=2e-3, atol=1e-3)


def _parts(described: Nest) -> list[Any]:
    """Returns what describes the parts of an action, in their order."""
    if isinstance(described, Normal) or not isinstance(described, dict | tuple):
        return [described]
    parts = described.values() if isinstance(described, dict) else described
    return [leaf for part in parts for leaf in _parts(part)]


def _divergence(p: Any, q: Any) -> np.ndarray:
    """Returns KL(p || q) of one part: [B]."""
    if isinstance(p, Normal):
        ratio = np.square(p.deviation / q.deviation)
        distance = np.square((p.mean - q.mean) / q.deviation)
        each = 0.5 * (ratio - 1.0 + distance - np.log(ratio))
    else:
        each = p * np.log(p / q)
    return np.sum(np.reshape(each, (len(each), -1)), axis=-1)


def whole_space(space: gym.Space) -> tuple[list[Any], np.ndarray]:
    """Returns the actions of a space, and the volume that each represents."""
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
            points = np.arange(-7.0, 7.0, step) + step / 2  # covers the Gaussian's mass
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
            combined: list[Any] = list(itertools.product(*[part[0] for part in parts]))
            products = itertools.product(*[part[1] for part in parts])
            return combined, np.array([np.prod(product) for product in products])
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


def stack(actions: list[Any]) -> Nest:
    """Puts actions into arrays [N, ...]."""
    return tree.map_structure(lambda *leaves: np.stack(leaves), *actions)


def masks(space: gym.Space) -> list[list[np.ndarray]]:
    """Returns masks, part by part: one choice allowed, all but one, and any."""
    rng = np.random.default_rng(5)
    sizes = choices(space)
    one = [np.eye(size, dtype=np.int8)[rng.integers(size)] for size in sizes]
    all_but_one = [
        np.ones(size, np.int8) if size == 1 else 1 - m for size, m in zip(sizes, one, strict=True)
    ]
    anything = [np.maximum(m, rng.integers(0, 2, len(m), np.int8)) for m in one]
    return [one, all_but_one, anything]
