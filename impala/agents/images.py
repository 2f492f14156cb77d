"""Standardised images: mean 0 and variance 1, each by itself, at less than the price of an image.

A convolution is linear. So the first one of a torso sees pixels as they are, and its outputs, of
which there are fewer than pixels, are scaled and shifted instead: `convolve`. The sums that this
needs are taken from single frames, before frames are stacked, where each frame is seen once.
"""

from typing import NamedTuple

import numpy as np
import sonnet as snt
import tensorflow as tf


class Frames(NamedTuple):
    """Images of unsigned integers, and what standardises them."""

    pixels: tf.Tensor  # [..., H, W, C]
    sums: tf.Tensor  # [..., 2] float64: of the pixels, and of their squares


class Images(NamedTuple):
    """Images to be convolved. Standardised they are (pixels - shift) * scale."""

    pixels: tf.Tensor  # [N, H, W, C] float32
    shift: tf.Tensor | None = None  # [N, 1, 1, 1]; None: they are shown as they are
    scale: tf.Tensor | None = None  # [N, 1, 1, 1]


def sums(pixels: tf.Tensor) -> tf.Tensor:
    """Returns the sums of pixels and of their squares, exactly: [..., H, W, C] to [..., 2] float64.

    Args:
      pixels: of unsigned integers.
    """
    most = int(pixels.dtype.max) ** 2 * int(np.prod(pixels.shape[-3:]))
    integers = tf.cast(pixels, tf.int32 if most <= tf.int32.max else tf.int64)
    flat = tf.reshape(integers, [*tf.unstack(tf.shape(pixels)[:-3]), -1])
    both = tf.stack([tf.reduce_sum(flat, -1), tf.reduce_sum(flat * flat, -1)], axis=-1)
    return tf.cast(both, tf.float64)


def to_standardise(frames: Frames, largest: float) -> Images:
    """Returns images [N, H, W, C] as `tf.image.per_image_standardization` of their shares would be.

    Args:
      frames: [N, H, W, C], and [N, 2].
      largest: what a pixel may be; they are standardised as shares of it.
    """
    size = float(np.prod(frames.pixels.shape[-3:]))
    means = tf.reshape(frames.sums / size, [-1, 1, 1, 1, 2])
    mean, mean_square = tf.unstack(means, axis=-1)
    deviation = tf.sqrt(tf.maximum(mean_square - tf.square(mean), 0.0))
    # A whole number, so that the difference is exact in bfloat16 too, as is a pixel of eight bits.
    # Without it, sums of products with a large mean would be rounded away.
    whole = tf.round(mean)
    return Images(
        tf.cast(frames.pixels, tf.float32) - tf.cast(whole, tf.float32),
        shift=tf.cast(mean - whole, tf.float32),
        scale=tf.cast(1.0 / tf.maximum(deviation, max(largest, 1.0) / size**0.5), tf.float32),
    )


def standardised(shown: Images) -> tf.Tensor:
    """Returns the images themselves: [N, H, W, C] float32."""
    if shown.shift is None:
        return shown.pixels
    return (shown.pixels - shown.shift) * shown.scale


def convolve(convolution: snt.Conv2D, shown: Images) -> tf.Tensor:
    """Returns what a convolution makes of `standardised(shown)`: [N, H', W', C'].

    Args:
      convolution: with a bias, and padding VALID or SAME.
      shown: to be standardised, or not.
    """
    outputs = convolution(shown.pixels)  # the first time, this makes w and b
    if shown.shift is None:
        return outputs
    # What the shift adds to an output is the same wherever the whole kernel lies on the image.
    height, width = convolution.w.shape[:2]
    if convolution.conv_padding == "SAME":
        height, width = shown.pixels.shape[1:3]
    bias = convolution.b
    of_ones = convolution(tf.ones([1, height, width, shown.pixels.shape[-1]])) - bias
    return outputs * shown.scale + (bias - shown.scale * (bias + shown.shift * of_ones))
