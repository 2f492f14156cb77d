"""A custom torso, with a setting: linear layers whose outputs are gated.

    cd examples
    python custom_torso.py
    impala train catch --agent.torso custom_torso:Gated --gated.width 32 --logdir runs/gated

Its settings are a section of the configuration that is named after the class.
"""

import argparse
import dataclasses

import sonnet as snt
import tensorflow as tf

import impala
from impala.agents.torsos import Torso
from impala.config.schema import Positive


class Gated(Torso):
    """Two gated linear units: Dauphin et al. 2017, arXiv 1612.08083. [N, D] to [N, width]."""

    sees = "vector"

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """The gated torso."""

        width: Positive = 64
        """Units of each layer."""

    def __init__(self, settings: Settings, name: str | None = None) -> None:
        super().__init__(settings, name=name)
        self._layers = [snt.Linear(2 * settings.width, name=f"linear_{i}") for i in range(2)]

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        for layer in self._layers:
            values, gates = tf.split(layer(inputs), 2, axis=-1)
            inputs = values * tf.sigmoid(gates)
        return inputs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=200_000)
    parser.add_argument("--logdir", default="runs/gated")
    options = parser.parse_args()
    trained = impala.train(
        "catch",
        options.logdir,
        agent={"torso": "custom_torso:Gated"},
        gated={"width": 32},
        total_frames=options.total_frames,
    )
    print(trained.returns)
