"""An optimiser: Lion, which steps by signs."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from impala.config.schema import Share
from learner.update.optimisers import Optimiser


class Lion(Optimiser):
    """Evolved sign momentum: Chen et al. 2023, arXiv 2302.06675, algorithm 2, without decay.

    variable <- variable - learning_rate sign(beta1 momentum + (1 - beta1) gradient)
    momentum <- beta2 momentum + (1 - beta2) gradient
    """

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """Lion."""

        beta1: Share = 0.9
        """Weight of the momentum in a step."""
        beta2: Share = 0.99
        """Decay of the momentum."""

    def __init__(
        self, variables: Sequence[tf.Variable], settings: Settings, name: str | None = None
    ) -> None:
        super().__init__(variables, settings, name=name)
        self._beta1, self._beta2 = settings.beta1, settings.beta2
        self._momenta = [
            tf.Variable(tf.zeros_like(v), trainable=False, name=f"momentum/{v.name.split(':')[0]}")
            for v in variables
        ]

    def apply(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        for gradient, variable, momentum in zip(gradients, variables, self._momenta, strict=True):
            direction = tf.sign(self._beta1 * momentum + (1.0 - self._beta1) * gradient)
            variable.assign_sub(learning_rate * direction)
            momentum.assign(self._beta2 * momentum + (1.0 - self._beta2) * gradient)
