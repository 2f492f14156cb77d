"""PopArt: values that are learned normalised, by the mean and deviation of each task's targets.

van Hasselt et al. 2016, arXiv 1602.07714; with several tasks: Hessel et al. 2018, arXiv 1809.04474,
whose symbols these are.
"""

from collections.abc import Sequence

import sonnet as snt
import tensorflow as tf

from impala.environments.spaces import TASK
from impala.types import Nest

STEP = 3e-4
"""beta, for each target."""
LOWEST, HIGHEST = 1e-4, 1e6
"""Bounds of the deviation sigma."""


class PopArt(snt.Module):
    """The statistics of the targets of each task.

    The baseline's head has an output n_i(s) for each task i, whose value is sigma_i n_i(s) + mu_i.
    Observations tell the task, if there are several: see `spaces.TASK`.

    With every target G of task i, mu_i <- (1 - beta) mu_i + beta G and nu_i <- (1 - beta) nu_i +
    beta G^2; sigma_i^2 = nu_i - mu_i^2. What is kept is this variance in place of nu_i, as the
    difference would lose digits where mu_i is large.

    Args:
      num_tasks: of the run.
    """

    def __init__(self, num_tasks: int, name: str = "popart") -> None:
        super().__init__(name=name)
        self.num_tasks = num_tasks
        self._mean = tf.Variable(tf.zeros([num_tasks]), trainable=False, name="mean")
        self._variance = tf.Variable(tf.ones([num_tasks]), trainable=False, name="variance")

    @property
    def means(self) -> tf.Tensor:
        """Returns mu of each task: [n]."""
        return self._mean.read_value()

    @property
    def deviations(self) -> tf.Tensor:
        """Returns sigma of each task: [n]."""
        return tf.sqrt(tf.clip_by_value(self._variance, LOWEST**2, HIGHEST**2))

    def metrics(self, tasks: Sequence[str]) -> dict[str, tf.Tensor]:
        """Returns mu and sigma of each task, by its name: scalars."""
        statistics = {"mean": self.means, "deviation": self.deviations}
        return {
            f"popart/{name}/{task}": of_all[i]
            for name, of_all in statistics.items()
            for i, task in enumerate(tasks)
        }

    def values(self, normalised: tf.Tensor, observation: Nest) -> tf.Tensor:
        """Returns the value of each row's task (equation 2): [...].

        Args:
          normalised: [..., n], of the head.
          observation: [..., ...].
        """
        values = self.deviations * normalised + self.means
        return tf.reduce_sum(self._chosen(observation) * values, axis=-1)

    def scales(self, observation: Nest) -> tf.Tensor:
        """Returns sigma of each row's task: [...], or [] of a single task."""
        return tf.reduce_sum(self._chosen(observation) * self.deviations, axis=-1)

    def normalised(self, values: tf.Tensor, observation: Nest) -> tf.Tensor:
        """Returns (v - mu) / sigma of values or targets, by each row's task: [...]."""
        means = tf.reduce_sum(self._chosen(observation) * self.means, axis=-1)
        return (values - means) / self.scales(observation)

    def update(
        self, head: snt.Linear, observation: Nest, targets: tf.Tensor, weights: tf.Tensor
    ) -> None:
        """Updates the statistics by targets, and rescales the head so that no value changes.

        n targets of a task move its statistics by 1 - (1 - beta)^n towards those of all n: as far
        as if they came one after another, but without an order.

        Args:
          head: of the baseline.
          observation: [T, B, ...].
          targets: [T, B], of the values; not normalised.
          weights: [T, B], how often each counts; 0 for what does not.
        """
        each = weights[..., tf.newaxis] * self._chosen(observation)  # [T, B, n]
        targets = targets[..., tf.newaxis]

        def mean(terms: tf.Tensor) -> tf.Tensor:
            terms = tf.where(each > 0.0, each * terms, 0.0)
            return tf.math.divide_no_nan(tf.reduce_sum(terms, axis=[0, 1]), count)

        count = tf.reduce_sum(each, axis=[0, 1])
        step = -tf.math.expm1(count * tf.math.log1p(-STEP))  # 1 - (1 - beta)^count
        of_batch = mean(targets)
        shift = of_batch - self._mean
        spread = mean(tf.square(targets - of_batch)) + (1.0 - step) * tf.square(shift)

        old_mean, old_deviation = self.means, self.deviations
        self._mean.assign_add(step * shift)
        self._variance.assign_add(step * (spread - self._variance))
        # van Hasselt et al. 2016, proposition 1: outputs are preserved precisely.
        deviation = self.deviations
        head.w.assign(head.w * (old_deviation / deviation))
        # Means first: beside a large one, a small step of the bias would be rounded away.
        head.b.assign((old_deviation * head.b + (old_mean - self.means)) / deviation)

    def _chosen(self, observation: Nest) -> tf.Tensor:
        """Returns 1 for each row's task, else 0: [..., n]; [1] of a single task."""
        if self.num_tasks == 1:
            return tf.ones([1])
        return tf.one_hot(observation[TASK], self.num_tasks)
