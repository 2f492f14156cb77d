"""Torsos, the part of a network that sees single observations: MLP and convolutions.

The convolutions are those of Espeholt et al. 2018, arXiv 1802.01561, figure 3, and smaller ones.
"""

import abc
from typing import Any, ClassVar, Literal

import sonnet as snt
import tensorflow as tf

from impala.config.schema import AgentConfig


class Torso(snt.Module, abc.ABC):
    """Maps observations of N environments to features [N, F].

    A custom class may have settings: a nested frozen dataclass `Settings`, written like those
    in `impala.config.schema`. What wrappers add to an observation (last action, last reward, time
    in the episode) bypasses the torso and is appended to its features.
    """

    sees: ClassVar[Literal["vector", "image", "observation"]] = "image"
    """The torso's input. vector: the observation of any space as [N, D] float32, choices as
    one-hot. image: [N, H, W, C] float32. observation: a nest of tensors [N, ...], as the
    environment gave it."""
    smallest: ClassVar[int] = 1
    """Smallest height and width of an image, in pixels."""
    takes_bfloat16: ClassVar[bool] = False
    """Whether images, and then the features, may be in bfloat16 once its variables are made. They
    are where the process computes torsos in it."""

    def __init__(self, settings: Any = None, name: str | None = None) -> None:
        """Initialises the torso; variables are made in the first call.

        Args:
          settings: an instance of the class's `Settings`; None if it has none. Built-in torsos get
            `AgentConfig`.
          name: of the module and prefix of its variables' names. Pass it on: the torsos of an agent
            must have different names.
        """
        super().__init__(name=name)

    @abc.abstractmethod
    def __call__(self, inputs: Any) -> tf.Tensor:
        """Returns features [N, F] float32 of inputs as in `sees`."""


class MLP(Torso):
    """Linear layers with ReLU after each. [N, F] to [N, hidden_sizes[-1]]."""

    sees = "vector"

    def __init__(self, settings: AgentConfig, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._layers = [
            snt.Linear(size, w_init=_he(), name=f"linear_{i}")
            for i, size in enumerate(settings.hidden_sizes)
        ]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        for layer in self._layers:
            inputs = tf.nn.relu(layer(inputs))
        return inputs


class Shallow(Torso):
    """Two convolutions and a linear layer of 256. [N, H, W, C] to [N, 256]."""

    smallest = 20  # pixels; smaller images leave no input for the second convolution
    takes_bfloat16 = True

    def __init__(self, settings: AgentConfig | None = None, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._convolutions = [
            _Conv2D(16, kernel_shape=8, stride=4, padding="VALID", w_init=_he(), name="conv_0"),
            _Conv2D(32, kernel_shape=4, stride=2, padding="VALID", w_init=_he(), name="conv_1"),
        ]
        self._linear = _Linear(256, w_init=_he(), name="linear")

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        for convolution in self._convolutions:
            images = tf.nn.relu(convolution(images))
        return tf.nn.relu(self._linear(snt.flatten(images)))


class Small(Torso):
    """A convolution and a linear layer of 128. [N, H, W, C] to [N, 128].

    For images of 10x10, as in MinAtar: Young and Tian 2019, arXiv 1903.03176.
    """

    smallest = 3
    takes_bfloat16 = True

    def __init__(self, settings: AgentConfig | None = None, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._convolution = _Conv2D(16, kernel_shape=3, padding="VALID", w_init=_he(), name="conv")
        self._linear = _Linear(128, w_init=_he(), name="linear")

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        images = tf.nn.relu(self._convolution(images))
        return tf.nn.relu(self._linear(snt.flatten(images)))


class Strided(Torso):
    """Four convolutions that each halve an image: [N, H, W, C] to [N, F]; 288 features of 47x47."""

    takes_bfloat16 = True
    _padding, _activation = "SAME", staticmethod(tf.nn.elu)

    def __init__(self, settings: AgentConfig | None = None, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        common = {"kernel_shape": 3, "stride": 2, "padding": self._padding, "w_init": _he()}
        self._convolutions = [_Conv2D(32, **common, name=f"conv_{i}") for i in range(4)]

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        for convolution in self._convolutions:
            images = self._activation(convolution(images))
        return snt.flatten(images)


class StridedValid(Strided):
    """Four convolutions without padding: [N, H, W, C] to [N, F]; 128 features of 47x47."""

    smallest = 31  # pixels; smaller images leave no input for the last convolution
    _padding, _activation = "VALID", staticmethod(tf.nn.relu)


class DeepResidual(Torso):
    """Three sections of residual blocks and a linear layer of 256. [N, H, W, C] to [N, 256]."""

    takes_bfloat16 = True

    def __init__(self, settings: AgentConfig | None = None, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._sections = [
            _Section(channels, name=f"section_{i}") for i, channels in enumerate((16, 32, 32))
        ]
        self._linear = _Linear(256, w_init=_he(), name="linear")

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        for section in self._sections:
            images = section(images)
        return tf.nn.relu(self._linear(snt.flatten(tf.nn.relu(images))))


class _Section(snt.Module):
    """Halves the image, then two residual blocks."""

    def __init__(self, channels: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._convolution = _Conv2D(channels, kernel_shape=3, w_init=_he(), name="conv")
        self._blocks = [
            [
                _Conv2D(channels, kernel_shape=3, w_init=_he(), name=f"block_{i}_conv_{j}")
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
            # To the bit shortcut + images, at which TensorFlow's remapper fails (an error at the
            # start of each program) and fuses no operations of the whole graph.
            images = shortcut - -images
        return images


class _Conv2D(snt.Conv2D):
    """Computes in the precision of its input; its variables are float32.

    Without padding, and where the kernel is a multiple of the stride, as many pixels of a row as
    the stride are one pixel of more channels: four of four channels are one of 16. The reshape
    copies nothing, and oneDNN computes gradients in as little as 0.4 of the time.
    """

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        if not hasattr(self, "w"):
            return super().__call__(inputs)  # makes the variables
        weights, bias = (tf.cast(variable, inputs.dtype) for variable in (self.w, self.b))
        stride, kernel = self.stride, self.kernel_shape
        strides = [stride, stride]
        if self.conv_padding == "VALID" and kernel % stride == 0:
            height, width, channels = inputs.shape[1:]
            seen = (width - kernel) // stride * stride + kernel
            if seen < width:
                inputs = inputs[:, :, :seen]
            wide = stride * channels
            inputs = tf.reshape(inputs, [-1, height, seen // stride, wide])
            weights = tf.reshape(weights, [kernel, kernel // stride, wide, -1])
            strides = [stride, 1]
        return tf.nn.bias_add(tf.nn.conv2d(inputs, weights, strides, self.conv_padding), bias)


class _Linear(snt.Linear):
    """Computes in the precision of its input; its variables are float32."""

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        if inputs.dtype == tf.float32:
            return super().__call__(inputs)
        weights, bias = (tf.cast(variable, inputs.dtype) for variable in (self.w, self.b))
        return tf.nn.bias_add(inputs @ weights, bias)


def _he() -> snt.initializers.Initializer:
    """Returns an initialiser for layers with ReLU: He et al. 2015, arXiv 1502.01852."""
    return snt.initializers.VarianceScaling(scale=2.0)
