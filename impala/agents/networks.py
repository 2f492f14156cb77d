"""The parts of an agent's network: torsos (before time), cores (in time), the frame stack.

Torsos are those of Espeholt et al. 2018, arXiv 1802.01561, figure 3, smaller ones and an MLP; they
map observations [N, ...] to features [N, F]. What has a state has one signature: (inputs
[T, B, ...], is_first [T, B], state) -> (outputs [T, B, ...], state), and starts anew where
is_first.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

import gymnasium as gym
import numpy as np
import sonnet as snt
import tensorflow as tf

from impala.environments import spaces
from impala.environments.spaces import is_wrapped, main_space
from impala.types import Nest


class MLP(snt.Module):
    """Linear layers with ReLU after each. [N, F] to [N, hidden_sizes[-1]]."""

    def __init__(self, hidden_sizes: Sequence[int], name: str | None = None) -> None:
        super().__init__(name=name)
        self._layers = [
            snt.Linear(size, w_init=_he(), name=f"linear_{i}")
            for i, size in enumerate(hidden_sizes)
        ]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        for layer in self._layers:
            inputs = tf.nn.relu(layer(inputs))
        return inputs


class Shallow(snt.Module):
    """Two convolutions and a linear layer of 256. [N, H, W, C] to [N, 256]."""

    smallest = 20  # pixels; less leaves the second convolution nothing to look at

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self._convolutions = [
            snt.Conv2D(16, kernel_shape=8, stride=4, padding="VALID", w_init=_he(), name="conv_0"),
            snt.Conv2D(32, kernel_shape=4, stride=2, padding="VALID", w_init=_he(), name="conv_1"),
        ]
        self._linear = snt.Linear(256, w_init=_he())

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        for convolution in self._convolutions:
            images = tf.nn.relu(convolution(images))
        return tf.nn.relu(self._linear(snt.flatten(images)))


class Small(snt.Module):
    """A convolution and a linear layer of 128. [N, H, W, C] to [N, 128].

    For images of 10x10, as in MinAtar: Young and Tian 2019, arXiv 1903.03176.
    """

    smallest = 3

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self._convolution = snt.Conv2D(
            16, kernel_shape=3, padding="VALID", w_init=_he(), name="conv"
        )
        self._linear = snt.Linear(128, w_init=_he())

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        images = tf.nn.relu(self._convolution(images))
        return tf.nn.relu(self._linear(snt.flatten(images)))


class Strided(snt.Module):
    """Four convolutions that each halve an image: [N, H, W, C] to [N, F]; 288 features of 47x47."""

    smallest = 1

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self._convolutions = [
            snt.Conv2D(32, kernel_shape=3, stride=2, w_init=_he(), name=f"conv_{i}")
            for i in range(4)
        ]

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        for convolution in self._convolutions:
            images = tf.nn.elu(convolution(images))
        return snt.flatten(images)


class DeepResidual(snt.Module):
    """Three sections of residual blocks and a linear layer of 256. [N, H, W, C] to [N, 256]."""

    smallest = 1

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self._sections = [
            _Section(channels, name=f"section_{i}") for i, channels in enumerate((16, 32, 32))
        ]
        self._linear = snt.Linear(256, w_init=_he())

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        for section in self._sections:
            images = section(images)
        return tf.nn.relu(self._linear(snt.flatten(tf.nn.relu(images))))


class _Section(snt.Module):
    """Halves the image, then two residual blocks."""

    def __init__(self, channels: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._convolution = snt.Conv2D(channels, kernel_shape=3, w_init=_he(), name="conv")
        self._blocks = [
            [
                snt.Conv2D(channels, kernel_shape=3, w_init=_he(), name=f"block_{i}_conv_{j}")
                for j in range(2)
            ]
            for i in range(2)
        ]

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        images = tf.nn.max_pool2d(self._convolution(images), ksize=3, strides=2, padding="SAME")
        for block in self._blocks:
            shortcut = images
            for convolution in block:
                images = convolution(tf.nn.relu(images))
            images += shortcut
        return images


class Torso(snt.Module):
    """Observations as they travel, nest and all, to features [N, F] float32.

    What the wrappers added (last action, last reward, time in the episode) goes past the network
    and stands behind its features.

    Args:
      network: sees the rest; an `MLP` as one vector, the others as an image.
      observation_space: of one environment, after the frame stack.
      standardise_images: shift and scale each image of unsigned integers to mean 0 and variance 1.

    Raises:
      ValueError: if the network cannot see such observations.
    """

    def __init__(
        self,
        network: MLP | Small | Strided | Shallow | DeepResidual,
        observation_space: gym.Space,
        standardise_images: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._network = network
        self._space = observation_space
        self._standardise_images = standardise_images
        self._main_space = main_space(observation_space)
        if not isinstance(network, MLP):
            _check_image(self._main_space, network)

    def __call__(self, observation: Nest) -> tf.Tensor:
        if not is_wrapped(self._space):
            return self._network(self._network_input(observation))
        features = self._network(self._network_input(observation["observation"]))
        return tf.concat([features, *self._added(observation)], axis=-1)

    def vector(self, observation: Nest) -> tf.Tensor:
        """All that is seen of observations, flat: [N, F]."""
        if not is_wrapped(self._space):
            return as_vector(self._space, observation)
        own = as_vector(self._main_space, observation["observation"])
        return tf.concat([own, *self._added(observation)], axis=-1)

    @property
    def vector_size(self) -> int:
        """F of `vector`."""
        any_one = tf.nest.map_structure(lambda x: np.asarray(x)[np.newaxis], self._space.sample())
        return int(self.vector(any_one).shape[-1])

    def _added(self, observation: Nest) -> list[tf.Tensor]:
        """What wrappers added, as vectors."""
        assert isinstance(self._space, gym.spaces.Dict)
        return [
            _ADDED[key](self._space[key], observation[key])
            for key in sorted(self._space.spaces)
            if key in spaces.SEEN
        ]

    def _network_input(self, observation: Nest) -> tf.Tensor:
        if isinstance(self._network, MLP):
            return as_vector(self._main_space, observation)
        images = _as_float(self._main_space, observation)
        if images.shape.rank == 3:
            images = images[..., tf.newaxis]
        if self._standardise_images and _is_unsigned(self._main_space):
            images = tf.image.per_image_standardization(images)
        return images


class LSTMState(NamedTuple):
    """What an LSTM remembers."""

    hidden: tf.Tensor  # [B, size] float32
    cell: tf.Tensor  # [B, size] float32


class LSTM(snt.Module):
    """A long short-term memory, Hochreiter and Schmidhuber 1997, with a forget bias of 1."""

    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._size = size
        self._from_input = snt.Linear(4 * size, name="from_input")
        self._from_hidden = snt.Linear(4 * size, with_bias=False, name="from_hidden")

    def initial_state(self, batch_size: int | tf.Tensor) -> LSTMState:
        zeros = tf.zeros([batch_size, self._size])
        return LSTMState(zeros, zeros)

    def __call__(
        self, inputs: tf.Tensor, is_first: tf.Tensor, state: LSTMState
    ) -> tuple[tf.Tensor, LSTMState]:
        """The number of rows T must be known when the graph is made: it is unrolled."""
        hidden, cell = state
        goes_on = ~is_first[..., tf.newaxis]
        from_inputs = snt.BatchApply(self._from_input)(inputs)  # All rows at once: 4 large gates.
        outputs = []
        for from_input, keep in zip(tf.unstack(from_inputs), tf.unstack(goes_on), strict=True):
            hidden, cell = tf.where(keep, hidden, 0.0), tf.where(keep, cell, 0.0)
            gates = from_input + self._from_hidden(hidden)
            new, enter, forget, leave = tf.split(gates, 4, axis=-1)
            cell = tf.sigmoid(forget + 1.0) * cell + tf.sigmoid(enter) * tf.tanh(new)
            hidden = tf.sigmoid(leave) * tf.tanh(cell)
            outputs.append(hidden)
        return tf.stack(outputs), LSTMState(hidden, cell)


class FrameStack(snt.Module):
    """Puts the last `size` frames on top of one another, along the last axis, oldest first.

    The state is the size - 1 frames before. An episode starts with its first frame repeated.
    Pixels [H, W] become [H, W, size]; [..., C] becomes [..., size * C]. What wrappers added to
    the observation is not stacked.

    Raises:
      ValueError: if the observation is not one array.
    """

    def __init__(self, size: int, observation_space: gym.Space, name: str | None = None) -> None:
        super().__init__(name=name)
        space = main_space(observation_space)
        if not isinstance(space, gym.spaces.Box) or not space.shape:
            raise ValueError(
                f"frame_stack is {size}, but only a Box with 1 or more dimensions can be stacked, "
                f"not {space}. Set frame_stack to 1."
            )
        self._size = size
        self._is_wrapped = is_wrapped(observation_space)
        # Single frames end in a channel, so that there is an axis to stack them on.
        self._shape = (*space.shape, 1) if len(space.shape) == 2 else space.shape
        self._dtype = tf.as_dtype(space.dtype)
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
        """Frames [B, size - 1, ...] of no episode: the first row must be FIRST."""
        return tf.zeros([batch_size, self._size - 1, *self._shape], self._dtype)

    def __call__(
        self, observation: Nest, is_first: tf.Tensor, state: tf.Tensor
    ) -> tuple[Nest, tf.Tensor]:
        if self._is_wrapped:
            stacked, state = self._stack(observation["observation"], is_first, state)
            return {**observation, "observation": stacked}, state
        return self._stack(observation, is_first, state)

    def _stack(
        self, frames: tf.Tensor, is_first: tf.Tensor, state: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        rows, batch_size = tf.unstack(tf.shape(is_first))
        before = self._size - 1
        frames = tf.reshape(frames, [rows, batch_size, *self._shape])
        # No transpose: oneDNN would log that it cannot do that to bytes.
        history = tf.concat([tf.stack(tf.unstack(state, axis=1)), frames], axis=0)

        # Which row of the history is `age` frames old at t? The one that was age - 1 frames old
        # at t - 1; the newest, where an episode starts. Only row numbers are computed with.
        newest = tf.broadcast_to(before + tf.range(rows)[:, tf.newaxis], [rows, batch_size])
        indices = [newest]  # [T, B] for each age
        for age in range(1, self._size):
            oldest = tf.fill([1, batch_size], before - age)
            one_step_on = tf.concat([oldest, indices[-1][:-1]], axis=0)
            indices.append(tf.where(is_first, newest, one_step_on))
        indices.reverse()

        # One flat axis of frames, for copies of whole frames.
        history = tf.reshape(history, [-1, *self._shape])
        flat = [index * batch_size + tf.range(batch_size) for index in indices]
        stacked = _interleave([tf.gather(history, index) for index in flat])
        return stacked, tf.gather(history, tf.stack([index[-1] for index in flat[1:]], axis=1))


def as_vector(space: gym.Space, value: Nest) -> tf.Tensor:
    """Values [N, ...] of any space, flat and float32: [N, F]. Choices become one-hot.

    Raises:
      ValueError: if the space, or one in it, has no fixed size.
    """
    # No match statement: autograph, which tf.function applies, does not know it.
    if isinstance(space, gym.spaces.Discrete):
        return tf.one_hot(value - tf.cast(space.start, value.dtype), int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        choices = tf.unstack(snt.flatten(value - tf.cast(space.start, value.dtype)), axis=-1)
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


def _he() -> snt.initializers.Initializer:
    """First weights that keep the variance through ReLUs: He et al. 2015, arXiv 1502.01852."""
    return snt.initializers.VarianceScaling(scale=2.0)


def _last_reward(space: gym.Space, value: tf.Tensor) -> tf.Tensor:
    """sign(r) log(1 + |r|): large rewards do not drown the rest, and still differ."""
    reward = as_vector(space, value)
    return tf.sign(reward) * tf.math.log1p(tf.abs(reward))


def _time_in_episode(space: gym.Space, value: tf.Tensor) -> tf.Tensor:
    """About 1 after 100 steps, 2 after 27,000 (an Atari episode's most)."""
    return tf.math.log1p(as_vector(space, value)) / 5.0


_ADDED: dict[str, Callable[[gym.Space, tf.Tensor], tf.Tensor]] = {
    "last_action": as_vector,
    "last_reward": _last_reward,
    "time_in_episode": _time_in_episode,
}


def _as_float(space: gym.Space, value: tf.Tensor) -> tf.Tensor:
    """float32; unsigned integers as a share of the largest."""
    value = tf.cast(value, tf.float32)
    if _is_unsigned(space):
        return value * (1.0 / max(float(space.high.max()), 1.0))
    return value


def _is_unsigned(space: gym.Space) -> TypeGuard[gym.spaces.Box]:
    return isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.unsignedinteger)


def _check_image(space: gym.Space, network: Small | Strided | Shallow | DeepResidual) -> None:
    name, smallest = type(network).__name__, network.smallest
    if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (2, 3):
        raise ValueError(
            f"The {name} torso sees images [height, width] or [height, width, channels], not "
            f"{space}. Set torso to mlp."
        )
    height, width = space.shape[:2]
    if min(height, width) < smallest:
        raise ValueError(
            f"The {name} torso needs images of {smallest}x{smallest} pixels or more, not "
            f"{height}x{width}. Enlarge them, or set torso to deep or mlp."
        )


def _interleave(frames: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates along the last axis."""
    if len(frames) == 4 and frames[0].dtype == tf.uint8 and frames[0].shape[-1] == 1:
        # Four bytes side by side are one little-endian integer. On a CPU its arithmetic is six
        # times as fast as tf.concat, which copies single bytes, and was a third of an inference.
        words = [tf.cast(frame[..., 0], tf.int32) * (1 << 8 * i) for i, frame in enumerate(frames)]
        return tf.bitcast(tf.add_n(words), tf.uint8)
    return tf.concat(frames, axis=-1)
