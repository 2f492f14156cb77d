"""What is done to each pixel: frames are stacked, and images standardised.

XLA compiles it: one pass over the memory instead of one for each operation of TensorFlow, which
takes a third of the time on a CPU.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

_compiled = functools.partial(tf.function, jit_compile=True, autograph=False)


class Frames(NamedTuple):
    """Images of unsigned integers, and what standardises them."""

    pixels: tf.Tensor  # [..., H, W, C]
    sums: tf.Tensor  # [..., 2] float64: of the pixels, and of their squares


@_compiled
def sums(pixels: tf.Tensor) -> tf.Tensor:
    """Returns the sums of pixels and of their squares: [..., H, W, C] to [..., 2] float64.

    They are exact, but for pixels of 32 or more bits.

    Parts of an image are added to each other pixel by pixel, and the pixels of the result at last:
    XLA has vectors for the first, not for the second.

    Args:
      pixels: of unsigned integers.
    """
    size = int(np.prod(pixels.shape[-3:]))
    most = int(pixels.dtype.max) ** 2 * size
    parts = max(each for each in range(1, 15) if size % each == 0)
    shape = [*tf.unstack(tf.shape(pixels)[:-3]), parts, size // parts]
    fits = (tf.int32, tf.int64)
    exact = next((dtype for dtype in fits if most <= dtype.max), tf.float64)
    integers = tf.cast(pixels, exact)
    flat = tf.unstack(tf.reshape(integers, shape), axis=-2)
    both = [tf.reduce_sum(tf.add_n(each), -1) for each in (flat, [x * x for x in flat])]
    return tf.cast(tf.stack(both, axis=-1), tf.float64)


def standardised(frames: Frames, largest: float, dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns images [N, H, W, C] as `tf.image.per_image_standardization` of their shares.

    Args:
      frames: [N, H, W, C], and [N, 2].
      largest: what a pixel may be; they are standardised as shares of it.
      dtype: float32 or bfloat16.
    """
    size = float(np.prod(frames.pixels.shape[-3:]))
    means = tf.reshape(frames.sums / size, [-1, 1, 1, 1, 2])
    mean, mean_square = tf.unstack(means, axis=-1)
    deviation = tf.sqrt(tf.maximum(mean_square - tf.square(mean), 0.0))
    scale = 1.0 / tf.maximum(deviation, max(largest, 1.0) / size**0.5)
    scaled = _scaled if dtype == tf.float32 else _scaled_and_rounded
    return scaled(frames.pixels, tf.cast(mean, tf.float32), tf.cast(scale, tf.float32))


@_compiled
def _scaled(pixels: tf.Tensor, shift: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    return (tf.cast(pixels, tf.float32) - shift) * scale


@_compiled
def _scaled_and_rounded(pixels: tf.Tensor, shift: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Rounds to bfloat16, to even, by integers: `tf.cast` takes longer than all the rest."""
    bits = tf.bitcast(_scaled(pixels, shift, scale), tf.uint32)
    is_odd = tf.bitwise.right_shift(bits, 16) & 1
    upper = tf.bitwise.right_shift(bits + 0x7FFF + is_odd, 16)
    return tf.bitcast(tf.cast(upper, tf.uint16), tf.bfloat16)


# A stack of four bytes is a little-endian integer, with the oldest in its lowest bits. On a CPU
# integer arithmetic is faster than copies of single bytes.


@_compiled
def packed(frames: tf.Tensor, indices: Sequence[tf.Tensor]) -> tf.Tensor:
    """Stacks bytes.

    Args:
      frames: [N, H, W, 1] uint8.
      indices: four [...]; of the oldest frame first.

    Returns:
      [..., H, W, 4] uint8.
    """
    words = [tf.cast(tf.gather(frames[..., 0], index), tf.int32) for index in indices]
    return tf.bitcast(tf.add_n([word * (1 << 8 * i) for i, word in enumerate(words)]), tf.uint8)


@_compiled
def pushed(stacked: tf.Tensor, frame: tf.Tensor, is_first: tf.Tensor) -> tf.Tensor:
    """Leaves the oldest frame out and adds the newest; where an episode starts, it is repeated.

    Args:
      stacked: [B, H, W, 4] uint8.
      frame: [B, H, W, 1] uint8.
      is_first: [B].

    Returns:
      As `stacked`.
    """
    newest = tf.cast(frame[..., 0], tf.uint32)
    moved = tf.bitwise.right_shift(tf.bitcast(stacked, tf.uint32), 8) + newest * (1 << 24)
    words = tf.where(is_first[:, tf.newaxis, tf.newaxis], newest * 0x01010101, moved)
    return tf.bitcast(words, tf.uint8)
