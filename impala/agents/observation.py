"""Converts nested observations to the inputs of a torso: images, vectors, stacked frames."""

import math
from collections.abc import Callable
from typing import TypeGuard

import gymnasium as gym
import numpy as np
import sonnet as snt
import tensorflow as tf
import tree

from impala.agents import images
from impala.agents.images import Frames
from impala.agents.normaliser import Normaliser
from impala.agents.torsos import Small, Torso
from impala.environments import spaces
from impala.environments.spaces import is_wrapped, leaves, main_space
from impala.runtime.process import uses_bfloat16
from impala.types import Nest

_CHANNELS = (1, 3, 4)  # grey, colours, colours and opacity
_LARGE = 32  # pixels, from which on an image is seen by strided convolutions


class Features(snt.Module):
    """Maps nested observations to features [N, F] float32 with a torso.

    What wrappers added (last action, last reward, time in the episode) bypasses the torso and is
    appended to its features.

    Args:
      torso: sees the rest, as its `sees` says.
      observation_space: of one environment, after the frame stack.
      standardise_images: shift and scale each image of unsigned integers to mean 0 and variance 1.
      normaliser: of floating-point numbers; None: they are seen as they are.

    Raises:
      ValueError: if the torso cannot see such observations.
    """

    def __init__(
        self,
        torso: Torso,
        observation_space: gym.Space,
        standardise_images: bool = True,
        normaliser: Normaliser | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._torso = torso
        self._normaliser = normaliser
        self._space = observation_space
        self._standardise_images = standardise_images
        self._main_space = main_space(observation_space)
        self._moves_channels = torso.sees == "image" and has_channels_first(self._main_space)
        self._has_variables = False
        if torso.sees == "image":
            _check_image(self._main_space, torso)

    def __call__(self, observation: Nest) -> tf.Tensor:
        features = self._seen(self._own(observation))
        if not is_wrapped(self._space):
            return features
        return tf.concat([features, *self._added(observation)], axis=-1)

    def vector(self, observation: Nest) -> tf.Tensor:
        """Returns observations flattened: [N, F]."""
        own = as_vector(self._main_space, self._own(observation))
        if not is_wrapped(self._space):
            return own
        return tf.concat([own, *self._added(observation)], axis=-1)

    @property
    def vector_size(self) -> int:
        """F of `vector`."""
        any_one = tf.nest.map_structure(lambda x: np.asarray(x)[np.newaxis], self._space.sample())
        return int(self.vector(any_one).shape[-1])

    def _own(self, observation: Nest) -> Nest:
        """Returns the environment's own part of an observation, normalised."""
        own = observation["observation"] if is_wrapped(self._space) else observation
        return own if self._normaliser is None else self._normaliser(own)

    def _added(self, observation: Nest) -> list[tf.Tensor]:
        """Returns what wrappers added, as vectors."""
        assert isinstance(self._space, gym.spaces.Dict)
        return [
            _ADDED[key](self._space[key], observation[key])
            for key in sorted(self._space.spaces)
            if key in spaces.SEEN
        ]

    def _seen(self, observation: Nest) -> tf.Tensor:
        """Returns what the torso makes of an observation."""
        features = tf.cast(self._torso(self._inputs(observation)), tf.float32)
        self._has_variables = True
        return features

    def _inputs(self, observation: Nest) -> Nest:
        pixels = observation.pixels if isinstance(observation, Frames) else observation
        if self._torso.sees == "observation":
            return pixels
        if self._torso.sees == "vector":
            return as_vector(self._main_space, pixels)
        if self._moves_channels:
            observation = pixels = _moved(pixels)
        if not (self._standardise_images and _is_unsigned(self._main_space)):
            return _with_channel(_as_float(self._main_space, pixels))
        if not isinstance(observation, Frames):
            pixels = _with_channel(pixels)
            observation = Frames(pixels, images.sums(pixels))
        # A layer's variables are of the type of its first input: float32.
        in_bfloat16 = self._has_variables and self._torso.takes_bfloat16 and uses_bfloat16()
        dtype = tf.bfloat16 if in_bfloat16 else tf.float32
        return images.standardised(observation, float(self._main_space.high.max()), dtype)


class Combined(Torso):
    """A torso for each image of a nested observation; an MLP sees their features beside the rest.

    The rest are vectors and choices, as `as_vector` makes them. [N, ...] to [N, hidden_sizes[-1]].

    Args:
      space: of one observation.
      make: returns a torso, of the setting `agent.torso` and of what to append to its name.
      standardise_images: as for `Features`.
    """

    sees = "observation"

    def __init__(
        self,
        space: gym.Space,
        make: Callable[[str, str], Torso],
        standardise_images: bool,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._leaves = [leaf for _, leaf in leaves(space)]
        names = [fitting("auto", leaf) for leaf in self._leaves]
        self._images = {
            number: Features(make(name, f"_{number}"), self._leaves[number], standardise_images)
            for number, name in enumerate(names)
            if name != "mlp"
        }
        self._mlp = make("mlp", "")

    def __call__(self, inputs: Nest) -> tf.Tensor:
        features = [
            self._images[number](value) if number in self._images else as_vector(leaf, value)
            for number, (leaf, value) in enumerate(
                zip(self._leaves, tree.flatten(inputs), strict=True)
            )
        ]
        return self._mlp(tf.concat(features, axis=-1))


def fitting(name: str, space: gym.Space) -> str:
    """Returns which torso a setting `agent.torso` means for the observations of a space.

    Only `auto` depends on the space. An image is seen by `shallow`, or `small` if it is below 32
    pixels; what contains no image by `mlp`. `auto` itself stands for `Combined`.

    Args:
      name: the setting.
      space: of the environment's own observations.
    """
    if name != "auto":
        return name
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return "auto" if any(fitting(name, leaf) != "mlp" for _, leaf in leaves(space)) else "mlp"
    if not isinstance(space, gym.spaces.Box):
        return "mlp"
    is_table = len(space.shape) == 2 and not _is_unsigned(space)
    if len(space.shape) not in (2, 3) or is_table:
        return "mlp"
    size = min(as_channels_last(space).shape[:2])
    return "shallow" if size >= _LARGE else "small" if size >= Small.smallest else "mlp"


class FrameStack(snt.Module):
    """Stacks the last `size` frames along the last axis, oldest first.

    The state is the size - 1 previous frames. An episode starts with its first frame repeated.
    Pixels [H, W] become [H, W, size]; [..., C] becomes [..., size * C], and images with channels
    first have them last. What wrappers added to the observation is not stacked.

    Raises:
      ValueError: the observation is not one array.
    """

    def __init__(self, size: int, observation_space: gym.Space, name: str | None = None) -> None:
        super().__init__(name=name)
        space = main_space(observation_space)
        if not isinstance(space, gym.spaces.Box) or not space.shape:
            raise ValueError(
                f"frame_stack is {size}, but only a Box with 1 or more dimensions can be stacked, "
                f"not {space}. Set frame_stack to 1."
            )
        self._moves_channels = has_channels_first(space)
        space = as_channels_last(space)
        self._size = size
        self._is_wrapped = is_wrapped(observation_space)
        # Frames [H, W] get a channel axis to be stacked on.
        self._shape = (*space.shape, 1) if len(space.shape) == 2 else space.shape
        self._dtype = tf.as_dtype(space.dtype)
        self._is_image = _is_unsigned(space) and len(self._shape) == 3
        self.packs_bytes = size == 4 and self._shape[-1] == 1 and space.dtype == np.uint8
        """Whether bytes are stacked by integer arithmetic, which ONNX does not support."""
        stacked = gym.spaces.Box(
            low=np.tile(space.low.reshape(self._shape), size),
            high=np.tile(space.high.reshape(self._shape), size),
            dtype=space.dtype.type,
        )
        self.observation_space: gym.Space = (
            gym.spaces.Dict({**observation_space.spaces, "observation": stacked})
            if is_wrapped(observation_space)
            else stacked
        )

    def initial_state(self, batch_size: int | tf.Tensor) -> tf.Tensor:
        """Returns zeros [B, size - 1, ...]; the first row must be FIRST."""
        return tf.zeros([batch_size, self._size - 1, *self._shape], self._dtype)

    def __call__(
        self, observation: Nest, is_first: tf.Tensor, state: tf.Tensor
    ) -> tuple[Nest, tf.Tensor]:
        """Stacks the frames of T rows.

        Args:
          observation: [T, B, ...].
          is_first: [T, B], whether an episode starts.
          state: before row 0.

        Returns:
          Stacked observations [T, B, ...], images as `Frames`, and the state after row T - 1.
        """
        frames = self._frames(observation)
        rows, batch_size = tf.unstack(tf.shape(is_first))
        before = self._size - 1
        frames = tf.reshape(frames, [rows, batch_size, *self._shape])
        # No transpose: oneDNN would log that it does not support it for bytes.
        history = tf.concat([tf.stack(tf.unstack(state, axis=1)), frames], axis=0)

        # Index of the row that is `age` frames old at t: that of age - 1 frames at t - 1, or the
        # newest where an episode starts.
        newest = tf.broadcast_to(before + tf.range(rows)[:, tf.newaxis], [rows, batch_size])
        indices = [newest]  # [T, B] for each age
        for age in range(1, self._size):
            oldest = tf.fill([1, batch_size], before - age)
            one_step_on = tf.concat([oldest, indices[-1][:-1]], axis=0)
            indices.append(tf.where(is_first, newest, one_step_on))
        indices.reverse()

        # One axis of whole frames, to gather from.
        history = tf.reshape(history, [-1, *self._shape])
        flat = [index * batch_size + tf.range(batch_size) for index in indices]
        state = tf.gather(history, tf.stack([index[-1] for index in flat[1:]], axis=1))
        stacked = (
            images.packed(history, flat)
            if self.packs_bytes
            else tf.concat([tf.gather(history, index) for index in flat], axis=-1)
        )
        if self._is_image:
            # Sums of single frames: in a stack each is seen `size` times.
            sums = images.sums(history)
            stacked = Frames(stacked, tf.add_n([tf.gather(sums, index) for index in flat]))
        return self._with_frames(observation, stacked), state

    def window(self, state: tf.Tensor) -> Nest:
        """Returns the window that `push` moves on from a state [B, ...]."""
        frames = tf.unstack(state, axis=1)
        frames = [frames[0], *frames]  # the oldest is not seen any more
        sums = tf.stack([images.sums(x) for x in frames], axis=1) if self._is_image else ()
        return tf.concat(frames, axis=-1), sums

    def push(self, observation: Nest, is_first: tf.Tensor, window: Nest) -> tuple[Nest, Nest]:
        """Stacks the frames of one row, at less than the price of a row of `__call__`.

        Args:
          observation: [B, ...].
          is_first: [B], whether an episode starts.
          window: before this row: the last stack, and the sums of its frames.

        Returns:
          Stacked observations [B, ...], images as `Frames`, and the window after this row.
        """
        frame = tf.reshape(self._frames(observation), [-1, *self._shape])
        stacked, sums = window
        if self.packs_bytes:
            stacked = images.pushed(stacked, frame, is_first)
        else:
            size, rank = self._shape[-1], len(self._shape)
            repeated = tf.concat([frame] * self._size, axis=-1)
            moved = tf.concat([stacked[..., size:], frame], axis=-1)
            stacked = tf.where(tf.reshape(is_first, [-1] + rank * [1]), repeated, moved)
        if not self._is_image:
            return self._with_frames(observation, stacked), (stacked, ())
        newest = images.sums(frame)[:, tf.newaxis]
        sums = tf.where(
            is_first[:, tf.newaxis, tf.newaxis], newest, tf.concat([sums[:, 1:], newest], axis=1)
        )
        frames = Frames(stacked, tf.reduce_sum(sums, axis=1))
        return self._with_frames(observation, frames), (stacked, sums)

    def state(self, window: Nest) -> tf.Tensor:
        """Returns the state after the last row that was pushed."""
        stacked, _ = window
        return tf.stack(tf.split(stacked, self._size, axis=-1)[1:], axis=1)

    def _frames(self, observation: Nest) -> tf.Tensor:
        frames = observation["observation"] if self._is_wrapped else observation
        return _moved(frames) if self._moves_channels else frames

    def _with_frames(self, observation: Nest, stacked: tf.Tensor | Frames) -> Nest:
        return {**observation, "observation": stacked} if self._is_wrapped else stacked


def has_channels_first(space: gym.Space) -> TypeGuard[gym.spaces.Box]:
    """Returns whether a space looks like images [C, H, W]: bytes of 1, 3 or 4 channels."""
    if not isinstance(space, gym.spaces.Box) or not _is_unsigned(space) or len(space.shape) != 3:
        return False
    channels, _, width = space.shape
    return channels in _CHANNELS and width not in _CHANNELS


def as_channels_last(space: gym.spaces.Box) -> gym.spaces.Box:
    """Returns the space of the same images as [H, W, C], as torsos see them."""
    if not has_channels_first(space):
        return space
    low, high = (np.moveaxis(bound, 0, -1) for bound in (space.low, space.high))
    return gym.spaces.Box(low, high, dtype=space.dtype.type)


def _moved(pixels: tf.Tensor) -> tf.Tensor:
    """[..., C, H, W] as [..., H, W, C]."""
    # No transpose: oneDNN would log that it does not support it for bytes.
    return tf.stack(tf.unstack(pixels, axis=-3), axis=-1)


def _with_channel(pixels: tf.Tensor) -> tf.Tensor:
    """[N, H, W] as [N, H, W, 1]."""
    return pixels[..., tf.newaxis] if pixels.shape.rank == 3 else pixels


def as_vector(space: gym.Space, value: Nest) -> tf.Tensor:
    """Returns values [N, ...] of any space, flat and float32: [N, F]. Choices become one-hot.

    Raises:
      ValueError: the space, or one in it, has no fixed size.
    """
    if isinstance(space, gym.spaces.Discrete):
        return tf.one_hot(tf.cast(value, tf.int64) - int(space.start), int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        start = space.start.astype(np.int64)
        choices = tf.unstack(snt.flatten(tf.cast(value, tf.int64) - start), axis=-1)
        sizes = [int(size) for size in space.nvec.reshape(-1)]
        vectors = [tf.one_hot(choice, size) for choice, size in zip(choices, sizes, strict=True)]
        return tf.concat(vectors, axis=-1)
    if isinstance(space, gym.spaces.Box | gym.spaces.MultiBinary):
        return tf.reshape(_as_float(space, value), [-1, math.prod(space.shape)])
    if isinstance(space, gym.spaces.Dict):
        vectors = [as_vector(space[key], value[key]) for key in sorted(space.spaces)]
        return tf.concat(vectors, axis=-1)
    if isinstance(space, gym.spaces.Tuple):
        vectors = [as_vector(part, item) for part, item in zip(space, value, strict=True)]
        return tf.concat(vectors, axis=-1)
    raise ValueError(
        f"No torso can see {space}. Supported: Box, Discrete, MultiDiscrete, MultiBinary, and Dict "
        "or Tuple of these. Wrap the environment so that it gives one of them."
    )


def _last_reward(space: gym.Space, value: tf.Tensor) -> tf.Tensor:
    """Returns sign(r) log(1 + |r|), which compresses large rewards."""
    reward = as_vector(space, value)
    return tf.sign(reward) * tf.math.log1p(tf.abs(reward))


def _time_in_episode(space: gym.Space, value: tf.Tensor) -> tf.Tensor:
    """Returns about 1 after 100 steps, 2 after 27,000 (the longest Atari episode)."""
    return tf.math.log1p(as_vector(space, value)) / 5.0


_ADDED: dict[str, Callable[[gym.Space, tf.Tensor], tf.Tensor]] = {
    "last_action": as_vector,
    "last_reward": _last_reward,
    "time_in_episode": _time_in_episode,
}


def _as_float(space: gym.Space, value: tf.Tensor) -> tf.Tensor:
    """Returns float32; unsigned integers as a fraction of the largest value."""
    value = tf.cast(value, tf.float32)
    if _is_unsigned(space):
        return value * (1.0 / max(float(space.high.max()), 1.0))
    return value


def _is_unsigned(space: gym.Space) -> TypeGuard[gym.spaces.Box]:
    return isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.unsignedinteger)


def _check_image(space: gym.Space, torso: Torso) -> None:
    name, smallest = type(torso).__name__, torso.smallest
    if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (2, 3):
        raise ValueError(
            f"The {name} torso sees images [height, width] or [height, width, channels], not "
            f"{space}. Set torso to auto."
        )
    height, width = as_channels_last(space).shape[:2]
    if min(height, width) < smallest:
        raise ValueError(
            f"The {name} torso needs images of {smallest}x{smallest} pixels or more, not "
            f"{height}x{width}. Enlarge them, or set torso to deep or mlp."
        )
