"""A torso with settings: linear layers whose outputs are gated."""

import dataclasses
from typing import Annotated

import sonnet as snt
import tensorflow as tf

from impala.agents.torsos import Torso
from impala.config.schema import Positive, Range


class Gated(Torso):
    """Gated linear units: Dauphin et al. 2017, arXiv 1612.08083. [N, D] to [N, width]."""

    sees = "vector"

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """The gated torso."""

        width: Positive = 64
        """Units of each layer."""
        layers: Annotated[int, Range(1, 8)] = 2
        """Layers."""

    def __init__(self, settings: Settings, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._width = settings.width
        self._layers = [
            snt.Linear(2 * settings.width, name=f"linear_{i}") for i in range(settings.layers)
        ]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        for layer in self._layers:
            values, gates = tf.split(layer(inputs), 2, axis=-1)
            inputs = values * tf.sigmoid(gates)
        return inputs
