"""Weights that are learned: Lagrange multipliers."""

import math

import sonnet as snt
import tensorflow as tf

_STEP = 0.01
"""Change of a multiplier's logarithm, at each update, for each nat of one part of the action."""
_RANGE = 100.0
"""Largest factor between a multiplier and its first value."""


class Multiplier(snt.Module):
    """A Lagrange multiplier, learned in log space: it rises where its constraint is violated.

    Args:
      initial: its first value, more than 0.
      num_parts: of an action, each of which has its share of the violation.
    """

    def __init__(self, initial: float, num_parts: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self._num_parts = num_parts
        self._initial = math.log(initial)
        self._log = tf.Variable(self._initial, trainable=False, name="log_multiplier")

    @property
    def value(self) -> tf.Tensor:
        """Returns the multiplier: []."""
        return tf.exp(self._log)

    def update(self, violation: tf.Tensor, steps: tf.Tensor) -> None:
        """Ascends the gradient of the Lagrangian, within two orders of magnitude of the start.

        Args:
          violation: [] the sum over steps, in nats; negative where the constraint holds.
          steps: [] their number.
        """
        violation = tf.math.divide_no_nan(violation, steps) / self._num_parts
        lowest, highest = self._initial - math.log(_RANGE), self._initial + math.log(_RANGE)
        self._log.assign(tf.clip_by_value(self._log + _STEP * violation, lowest, highest))
