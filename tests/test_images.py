"""Standardising by the first convolution is the same as standardising each pixel."""

import numpy as np
import pytest
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


@pytest.mark.parametrize("torso", TORSOS)
def test_outputs_and_gradients_are_those_of_standardised_pixels(torso: type[torsos.Torso]) -> None:
    pixels = tf.constant(pictures())
    # In double precision. In single, `tf.image` itself is off by more than the tolerance.
    shares = pictures() / 255.0
    mean = shares.mean(axis=(1, 2, 3), keepdims=True)
    deviation = np.maximum(shares.std(axis=(1, 2, 3), keepdims=True), shares[0].size ** -0.5)
    plain = tf.constant((shares - mean) / deviation, tf.float32)
    for_tf = tf.image.per_image_standardization(tf.cast(pixels, tf.float32) / 255.0)
    np.testing.assert_allclose(plain, for_tf, atol=0.01)
    made = torso(AgentConfig(), name="torso")
    made(Images(plain))
    random = np.random.default_rng(1)
    for variable in made.trainable_variables:
        if variable.shape.rank == 1:  # biases begin as 0, which would hide mistakes
            variable.assign(random.normal(0.0, 0.5, variable.shape))

    def outputs_and_gradients(shown: Images) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            outputs = made(shown)
            loss = tf.reduce_mean(tf.square(outputs - 1.0))
        return outputs, tape.gradient(loss, made.trainable_variables)

    expected, their_gradients = outputs_and_gradients(Images(plain))
    folded = images.to_standardise(Frames(pixels, images.sums(pixels)), 255.0)
    assert folded.shift is not None
    outputs, gradients = outputs_and_gradients(folded)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(gradients, their_gradients, strict=True):
        scale = float(tf.reduce_max(tf.abs(theirs)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * scale)


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
    pixels = tf.constant(pictures())
    shown = images.to_standardise(Frames(pixels, images.sums(pixels)), 255.0)
    np.testing.assert_array_equal(
        shown.pixels, tf.cast(tf.cast(shown.pixels, tf.bfloat16), tf.float32)
    )
    assert float(tf.reduce_max(tf.abs(shown.shift))) <= 0.5
