"""Optimisers: RMSProp, Adam and AdamW, gradient clipping, and the schedule of the learning rate.

Each rule is one fused, in-place kernel per variable (TensorFlow 1's, which has XLA and GPU forms):
a chain of separate operations would pass over the parameters' memory a dozen times per update.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import sonnet as snt
import tensorflow as tf

from impala.config.schema import OptimiserConfig
from impala.parts import build
from impala.parts.components import OPTIMISER
from impala.parts.sections import Own

Clip = Callable[[Sequence[tf.Tensor], float], tuple[list[tf.Tensor], tf.Tensor]]

# Values scaled by this have a sum of squares within float32.
_TINY = 2.0**-80

_NONE: Own = {}


def learning_rate(config: OptimiserConfig, progress: float) -> float:
    """Returns the learning rate after a share `progress` of the phase; linear to 0 if it decays."""
    remaining = max(0.0, 1.0 - progress) if config.decay_to_zero else 1.0
    return config.learning_rate * remaining


def clip_by_global_norm(
    gradients: Sequence[tf.Tensor], limit: float
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Scales all gradients by one factor so that their global norm is at most `limit`.

    Args:
      gradients: of any shapes.
      limit: 0 leaves the gradients as they are.

    Returns:
      The gradients, and their norm before clipping: [] float32. If it is not finite, all clipped
      gradients are NaN: either a gradient is not finite, or the sum of squares overflows float32;
      `clip_large_by_global_norm` tells which.
    """
    if not limit:
        return list(gradients), tf.linalg.global_norm(gradients)
    return tf.clip_by_global_norm(gradients, limit)


def clip_large_by_global_norm(
    gradients: Sequence[tf.Tensor], limit: float
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Clips as `clip_by_global_norm`, for gradients whose squares overflow float32.

    Returns:
      The gradients, and their norm before clipping: [] float64, finite if and only if all gradients
      are.
    """
    scaled = [gradient * _TINY for gradient in gradients]
    norm = tf.linalg.global_norm(scaled)
    true_norm = tf.cast(norm, tf.float64) / _TINY
    if not limit:
        return list(gradients), true_norm
    factor = tf.minimum(limit / norm, 1.0 / _TINY)
    return [gradient * factor for gradient in scaled], true_norm


@snt.allow_empty_variables
class Optimiser(snt.Module, abc.ABC):
    """Applies gradients to variables.

    The constructor makes the optimiser's state per variable, the slots. `variables` are these slots
    and nothing else, and checkpoints hold them. The learner clips the gradients beforehand, and
    gives the learning rate of each step. An update whose result is not finite is undone, including
    the slots, so `apply` must keep all its state in TensorFlow variables.

    A custom class may have settings: a nested frozen dataclass `Settings`, written like those
    in `impala.config.schema`.
    """

    def __init__(
        self, variables: Sequence[tf.Variable], settings: Any = None, name: str | None = None
    ) -> None:
        """Makes the slots at their first values.

        Args:
          variables: the variables to optimise.
          settings: an instance of the class's `Settings`; None if it has none. Built-in optimisers
            get `OptimiserConfig`.
          name: of the module.
        """
        super().__init__(name=name)

    @abc.abstractmethod
    def apply(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        """Applies one step.

        Args:
          gradients: one per variable.
          variables: those that the optimiser was made for, in the same order.
          learning_rate: [] float32.

        Raises:
          ValueError: a variable has no gradient, or the variables are not the optimiser's.
        """


class RMSProp(Optimiser):
    """RMSProp (Tieleman and Hinton 2012), or centred (Graves 2013, arXiv 1308.0850, eq. 38 to 45).

    mean        <- decay mean + (1 - decay) gradient       (centred; otherwise 0)
    mean_square <- decay mean_square + (1 - decay) gradient^2
    moment      <- momentum moment + learning_rate gradient / sqrt(mean_square - mean^2 + epsilon)
    variable    <- variable - moment

    The mean square starts at ONE, as in TensorFlow 1 and the paper: with a start at zero (Sonnet,
    PyTorch), the first steps are 3 to 10 times as large.
    """

    EPSILON = 0.01

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        settings: OptimiserConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(variables, settings, name=name)
        self._decay, self._momentum = settings.decay, settings.momentum
        self._epsilon = settings.epsilon or self.EPSILON
        self._means = [_slot("mean", v, 0.0) for v in variables] if settings.centred else []
        self._mean_squares = [_slot("mean_square", v, 1.0) for v in variables]
        self._moments = [_slot("moment", v, 0.0) for v in variables]

    def apply(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        _check(gradients, variables, self._mean_squares)
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            arguments = {
                "var": variable.handle,
                "ms": self._mean_squares[i].handle,
                "mom": self._moments[i].handle,
                "lr": learning_rate,
                "rho": self._decay,
                "momentum": self._momentum,
                "epsilon": self._epsilon,
                "grad": gradient,
            }
            if self._means:
                tf.raw_ops.ResourceApplyCenteredRMSProp(mg=self._means[i].handle, **arguments)
            else:
                tf.raw_ops.ResourceApplyRMSProp(**arguments)


class Adam(Optimiser):
    """Adam, algorithm 1 of Kingma and Ba 2014, arXiv 1412.6980; `step` counts from 1.

    first_moment  <- beta1 first_moment + (1 - beta1) gradient
    second_moment <- beta2 second_moment + (1 - beta2) gradient^2
    variable      <- variable - learning_rate m / (sqrt(v) + epsilon)
      where m = first_moment / (1 - beta1^step) and v = second_moment / (1 - beta2^step)
    """

    EPSILON = 1e-8

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        settings: OptimiserConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(variables, settings, name=name)
        self._beta1, self._beta2 = settings.beta1, settings.beta2
        self._epsilon = settings.epsilon or self.EPSILON
        self._first_moments = [_slot("first_moment", v, 0.0) for v in variables]
        self._second_moments = [_slot("second_moment", v, 0.0) for v in variables]
        self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps")

    def apply(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        _check(gradients, variables, self._first_moments)
        step = tf.cast(self._steps.assign_add(1), tf.float32)
        power1, power2 = tf.pow(self._beta1, step), tf.pow(self._beta2, step)
        for gradient, variable, first_moment, second_moment in zip(
            gradients, variables, self._first_moments, self._second_moments, strict=True
        ):
            tf.raw_ops.ResourceApplyAdam(
                var=variable.handle,
                m=first_moment.handle,
                v=second_moment.handle,
                beta1_power=power1,
                beta2_power=power2,
                lr=learning_rate,
                beta1=self._beta1,
                beta2=self._beta2,
                # The kernel adds its epsilon to sqrt(second_moment); the paper's goes to sqrt(v).
                epsilon=self._epsilon * tf.sqrt(1.0 - power2),
                grad=gradient,
            )


class AdamW(Adam):
    """Adam with decoupled weight decay: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.

    variable <- variable - learning_rate (m / (sqrt(v) + epsilon) + weight_decay variable)

    Only matrices and convolutions decay: no biases, gains or temperatures.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        settings: OptimiserConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(variables, settings, name=name)
        self._weight_decay = settings.weight_decay

    def apply(
        self,
        gradients: Sequence[tf.Tensor],
        variables: Sequence[tf.Variable],
        learning_rate: tf.Tensor,
    ) -> None:
        factor = learning_rate * self._weight_decay
        shares = [factor * v if len(v.shape) > 1 else None for v in variables]
        super().apply(gradients, variables, learning_rate)
        for variable, share in zip(variables, shares, strict=True):
            if share is not None:
                variable.assign_sub(share)


def make(config: OptimiserConfig, variables: Sequence[tf.Variable], own: Own = _NONE) -> Optimiser:
    """Returns the optimiser of a configuration, with initial slots.

    Args:
      config: names it.
      variables: the variables to optimise.
      own: the custom parts that the configuration names: `impala.parts.sections.found`.

    Raises:
      ValueError: there is no optimiser of that name.
    """
    found = build.part(OPTIMISER, config.name, config, own)
    made: Optimiser = found.component(variables, found.settings)
    return made


def _slot(name: str, variable: tf.Variable, value: float) -> tf.Variable:
    """Returns a variable like `variable`, filled with `value`."""
    first = tf.fill(variable.shape, tf.cast(value, variable.dtype))
    return tf.Variable(first, trainable=False, name=f"{name}/{variable.name.split(':')[0]}")


def _check(
    gradients: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    slots: Sequence[tf.Variable],
) -> None:
    if not len(gradients) == len(variables) == len(slots):
        raise ValueError(
            f"{len(gradients)} gradients for {len(variables)} variables in an optimiser made for "
            f"{len(slots)}: pass those that it was made for."
        )
    for gradient, variable, slot in zip(gradients, variables, slots, strict=True):
        if gradient is None:
            raise ValueError(f"{variable.name} has no gradient: it does not act upon the loss.")
        if variable.shape != slot.shape:
            raise ValueError(
                f"{variable.name} has shape {variable.shape}, its slot {slot.shape}: pass the "
                "variables in the order that the optimiser was made with."
            )
