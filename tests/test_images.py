"""Images are standardised, and their frames stacked, as in NumPy."""

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tree
from gymnasium import spaces

from impala.agents import images, observation, torsos
from impala.agents.images import Frames
from impala.agents.observation import Features, FrameStack
from impala.config.schema import AgentConfig

TORSOS = [torsos.Shallow, torsos.Small, torsos.Strided, torsos.DeepResidual]


def pictures() -> np.ndarray:
    """[6, 42, 37, 3]: noise, bright, dark, a dot on black, a dot on white, and one colour."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (42, 37, 3))
    dot = np.zeros_like(noise)
    dot[3:5, 30:33] = 200
    return np.stack(
        [noise, 200 + noise // 8, noise // 64, dot, 255 - dot, np.full_like(noise, 87)]
    ).astype(np.uint8)


def standardised() -> np.ndarray:
    """The pictures standardised, in double precision: that of `tf.image` is not enough."""
    shares = pictures() / 255.0
    mean = shares.mean(axis=(1, 2, 3), keepdims=True)
    deviation = np.maximum(shares.std(axis=(1, 2, 3), keepdims=True), shares[0].size ** -0.5)
    exact = ((shares - mean) / deviation).astype(np.float32)
    of_tf = tf.image.per_image_standardization(tf.cast(pictures(), tf.float32) / 255.0)
    np.testing.assert_allclose(exact, of_tf, atol=0.01)
    return exact


def test_they_are_standardised_as_in_double_precision() -> None:
    pixels = tf.constant(pictures())
    shown = images.standardised(Frames(pixels, images.sums(pixels)), 255.0)
    np.testing.assert_allclose(shown, standardised(), rtol=1e-4, atol=1e-4)


def test_they_are_rounded_to_bfloat16_as_tensorflow_does() -> None:
    pixels = tf.constant(pictures())
    frames = Frames(pixels, images.sums(pixels))
    exact = images.standardised(frames, 255.0)
    rounded = images.standardised(frames, 255.0, tf.bfloat16)
    assert np.any(exact != tf.cast(rounded, tf.float32))
    np.testing.assert_array_equal(rounded, tf.cast(exact, tf.bfloat16))


@pytest.mark.parametrize("torso", [torsos.Shallow, torsos.DeepResidual])
def test_every_torso_learns_nearly_the_same_in_bfloat16(
    torso: type[torsos.Torso], monkeypatch: pytest.MonkeyPatch
) -> None:
    tf.random.set_seed(0)  # of the first weights, on which rounding of the deep torso depends
    made = torso(AgentConfig(), name="torso")
    features = Features(made, spaces.Box(0, 255, pictures().shape[1:], np.uint8))

    def learned() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = features(tf.constant(pictures()))
            loss = tf.reduce_sum(outputs * tf.random.stateless_normal(outputs.shape, [1, 2]))
        return [outputs, *tape.gradient(loss, made.trainable_variables)]

    learned()  # makes the variables
    exact = tf.function(learned)()
    monkeypatch.setattr(observation, "uses_bfloat16", lambda: True)
    rounded = tf.function(learned)()
    assert {x.dtype for x in [*made.variables, *rounded]} == {tf.float32}
    for whole, part in zip(exact, rounded, strict=True):
        cosine = tf.reduce_sum(whole * part) / (tf.norm(whole) * tf.norm(part))
        assert 0.95 < cosine < 1.0
    assert 1e-4 < tf.norm(rounded[0] - exact[0]) / tf.norm(exact[0]) < 0.02


@pytest.mark.parametrize("torso", TORSOS)
def test_every_torso_sees_them_standardised(torso: type[torsos.Torso]) -> None:
    made = torso(AgentConfig(), name="torso")
    features = Features(made, spaces.Box(0, 255, pictures().shape[1:], np.uint8))
    expected = made(tf.constant(standardised()))
    np.testing.assert_allclose(features(tf.constant(pictures())), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("width", [36, 37])
def test_strides_as_channels_change_neither_features_nor_gradients(width: int) -> None:
    torso = torsos.Shallow(AgentConfig(), name="torso")
    shown = tf.constant(standardised()[:, :, :width])
    of_each: list[list[tf.Tensor]] = []
    for _ in range(2):  # Sonnet computes the first call, which makes the variables
        with tf.GradientTape() as tape:
            tape.watch(shown)
            outputs = torso(shown)
            weights = tf.random.stateless_normal(outputs.shape, [1, 2])
            loss = tf.reduce_sum(weights * outputs)
        of_each.append([outputs, *tape.gradient(loss, [shown, *torso.trainable_variables])])
    for expected, ours in zip(*of_each, strict=True):
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(ours, expected, atol=1e-5 * scale)


class _Convolution(torsos.Torso):
    """Linear: no rounding decides a ReLU."""

    def __init__(self, padding: str) -> None:
        super().__init__(name="convolution")
        self._convolution = snt.Conv2D(16, kernel_shape=8, stride=4, padding=padding)

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        return snt.flatten(self._convolution(images))


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_gradients_are_those_of_standardised_pixels(padding: str) -> None:
    convolution = _Convolution(padding)
    features = Features(convolution, spaces.Box(0, 255, pictures().shape[1:], np.uint8))
    of_each: list[list[tf.Tensor]] = []
    for function, shown in ((convolution, standardised()), (features, pictures())):
        with tf.GradientTape() as tape:
            outputs = function(tf.constant(shown))
            weights = tf.random.stateless_normal(outputs.shape, [1, 2])
            loss = tf.reduce_sum(weights * outputs)
        of_each.append([outputs, *tape.gradient(loss, convolution.trainable_variables)])
    for expected, ours in zip(*of_each, strict=True):
        scale = float(tf.reduce_max(tf.abs(expected)))
        np.testing.assert_allclose(ours, expected, atol=1e-4 * scale)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_sums_are_exact(dtype: type[np.unsignedinteger]) -> None:
    largest = np.iinfo(dtype).max
    white = np.full((2, 300, 200, 3), largest, dtype)
    size = 300 * 200 * 3
    np.testing.assert_array_equal(
        images.sums(tf.constant(white)), 2 * [[largest * size, largest**2 * size]]
    )


def test_a_stack_of_frames_has_the_sums_of_its_frames() -> None:
    stack = FrameStack(4, spaces.Box(0, 255, (9, 8), np.uint8))
    random = np.random.default_rng(2)
    frames = tf.constant(random.integers(0, 256, (7, 3, 9, 8)), tf.uint8)
    is_first = np.zeros((7, 3), np.bool_)
    is_first[0, 0] = is_first[3, 1] = is_first[6, 2] = True
    state = tf.constant(random.integers(0, 256, (3, 3, 9, 8, 1)), tf.uint8)
    stacked, _ = stack(frames, tf.constant(is_first), state)
    assert isinstance(stacked, Frames)
    assert stacked.pixels.shape == (7, 3, 9, 8, 4)
    tree.map_structure(np.testing.assert_array_equal, stacked.sums, images.sums(stacked.pixels))


def test_sums_of_wide_pixels_do_not_overflow() -> None:
    pixels = np.random.default_rng(0).integers(0, 2**32, (1, 84, 84, 1), np.uint32)
    exact = pixels.astype(np.float64)
    expected = [[exact.sum(), np.square(exact).sum()]]
    np.testing.assert_allclose(images.sums(tf.constant(pixels)), expected, rtol=1e-12)
