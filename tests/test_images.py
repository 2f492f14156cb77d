"""Standardising by the first convolution is the same as standardising each pixel."""

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tree
from gymnasium import spaces

from impala.agents import images, torsos
from impala.agents.images import Frames, Images
from impala.agents.observation import FrameStack
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


def to_standardise() -> Images:
    pixels = tf.constant(pictures())
    return images.to_standardise(Frames(pixels, images.sums(pixels)), 255.0)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("kernel", "stride"), [(8, 4), (3, 1), (3, 2)])
def test_a_convolution_is_that_of_standardised_pixels(
    padding: str, kernel: int, stride: int
) -> None:
    random = np.random.default_rng(1)
    convolution = snt.Conv2D(16, kernel_shape=kernel, stride=stride, padding=padding)
    expected = convolution(tf.constant(standardised()))
    convolution.b.assign(random.normal(0.0, 0.5, 16))  # as 0 it would hide mistakes
    weights = tf.constant(random.normal(size=expected.shape), tf.float32)

    def outputs_and_gradients(shown: Images) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            outputs = images.convolve(convolution, shown)
            loss = tf.reduce_sum(weights * outputs)  # linear: no rounding decides a ReLU
        return outputs, tape.gradient(loss, convolution.trainable_variables)

    expected, their_gradients = outputs_and_gradients(Images(tf.constant(standardised())))
    outputs, gradients = outputs_and_gradients(to_standardise())
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(gradients, their_gradients, strict=True):
        scale = float(tf.reduce_max(tf.abs(theirs)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("torso", TORSOS)
def test_every_torso_begins_with_such_a_convolution(torso: type[torsos.Torso]) -> None:
    made = torso(AgentConfig(), name="torso")
    expected = made(Images(tf.constant(standardised())))
    assert to_standardise().shift is not None
    np.testing.assert_allclose(made(to_standardise()), expected, rtol=1e-3, atol=1e-4)


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


def test_whole_numbers_are_what_is_convolved() -> None:
    """They are exact in bfloat16, and so are products that cancel a large mean."""
    shown = to_standardise()
    np.testing.assert_array_equal(
        shown.pixels, tf.cast(tf.cast(shown.pixels, tf.bfloat16), tf.float32)
    )
    assert float(tf.reduce_max(tf.abs(shown.shift))) <= 0.5
