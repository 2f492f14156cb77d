"""The learner: one compiled update, and the stream of its results."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from impala.algorithms.base import Algorithm
from impala.configs import Config
from impala.phases import Phase
from impala.types import Batch
from learner import checkpoint, optimisers
from learner.checkpoint import Counters

_START = Counters()


class NotFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite: the run must stop before it publishes that."""


class Update(NamedTuple):
    """What one update says."""

    learning_rate: float
    metrics: Mapping[str, float]
    histograms: Mapping[str, np.ndarray]


class Learner:
    """Owns the algorithm, the optimiser and the counters; moves them all by one batch at a time."""

    def __init__(
        self, algorithm: Algorithm, config: Config, phase: Phase, counters: Counters = _START
    ):
        """Ready for the first update of a phase, with a new optimiser.

        Args:
          algorithm: what is learned.
          config: of the run.
          phase: when it is learned.
          counters: how far the run is.
        """
        self._config = config
        self.phase = phase
        self._algorithm = algorithm
        self._optimiser = optimisers.make(config.optimiser, algorithm.learned_variables)
        self._update = tf.function(
            self._update_once, jit_compile=config.learner.jit_compile, autograph=False
        )
        self.counters = counters

    @property
    def progress(self) -> float:
        """Share of the phase done, 0 to 1."""
        return self.phase.progress(self.counters.frames)

    def update(self, batch: Batch) -> Update:
        """Learns from one batch: arrays [T + 1, B, ...].

        Raises:
          NotFiniteError: the loss or a gradient is not finite; says which. Variables are spoilt
            then: nothing may be published or saved.
        """
        learning_rate = optimisers.learning_rate(self._config.optimiser, self.progress)
        # TensorFlow keeps a constant of every Python float that it has ever seen, so not of those.
        metrics, histograms, finite = self._update(
            batch,
            tf.constant(np.float32(learning_rate)),
            tf.constant(np.float32(self.progress)),
        )
        metrics = {name: float(value) for name, value in metrics.items()}
        if not np.all(finite):
            self._explain(metrics, np.asarray(finite))
        self.counters = self.counters._replace(updates=self.counters.updates + 1)
        histograms = {name: values.numpy() for name, values in histograms.items()}
        return Update(learning_rate, metrics, histograms)

    def count(self, *, unrolls: int, frames: int, steps: int, seconds: float) -> None:
        """Counts what an update learned from, or what only went to replay.

        Args:
          unrolls: fresh ones.
          frames: environment frames in them.
          steps: agent decisions in them.
          seconds: wall-clock time since the last call, for the run's own clock.
        """
        before = self.counters
        self.counters = before._replace(
            unrolls=before.unrolls + unrolls,
            steps=before.steps + steps,
            frames=before.frames + frames,
            seconds=before.seconds + seconds,
        )

    def agent_values(self) -> list[np.ndarray]:
        """Copies of the agent's variables, in the order in which parameters travel."""
        return [variable.numpy().copy() for variable in self._algorithm.agent.variables]

    def variables(self) -> dict[str, np.ndarray]:
        """Copies of everything that a checkpoint must hold."""
        return {name: variable.numpy().copy() for name, variable in self._named_variables().items()}

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Goes back to a checkpoint; if another algorithm wrote it, only as far as the agent.

        Raises:
          CheckpointError: it belongs to another network, algorithm or optimiser.
        """
        values, variables = saved.variables, self._named_variables()
        if saved.algorithm != self.phase.algorithm:
            values, variables = checkpoint.of_agent(values), checkpoint.of_agent(variables)
        checkpoint.assign(values, variables)
        self.counters = saved.counters

    def _named_variables(self) -> dict[str, tf.Variable]:
        agent = self._algorithm.agent.variables
        of_agent = {id(variable) for variable in agent}
        others = [v for v in self._algorithm.variables if id(v) not in of_agent]
        return {
            **checkpoint.named("agent", agent),
            **checkpoint.named("algorithm", others),
            **checkpoint.named("optimiser", self._optimiser.variables),
        }

    def _update_once(
        self, batch: Batch, learning_rate: tf.Tensor, progress: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], Mapping[str, tf.Tensor], tf.Tensor]:
        variables = self._algorithm.learned_variables
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            output = self._algorithm.loss(batch, progress)
            loss = tf.reduce_sum(output.loss)
        gradients = tape.gradient(loss, variables)
        finite = tf.stack([tf.reduce_all(tf.math.is_finite(g)) for g in [loss, *gradients]])
        gradients, norm = optimisers.clip_by_global_norm(
            gradients, self._config.optimiser.clip_global_norm
        )
        self._optimiser.apply(gradients, variables, learning_rate)
        self._algorithm.after_update(progress)
        metrics = {**output.metrics, "loss/total": loss, "gradient_norm": norm}
        return metrics, output.histograms, finite

    def _explain(self, metrics: Mapping[str, float], finite: np.ndarray) -> None:
        names = ["the loss", *(f"gradient of {v.name}" for v in self._algorithm.learned_variables)]
        bad = [name for name, good in zip(names, finite, strict=True) if not good]
        terms = [name for name, value in metrics.items() if not np.isfinite(value)]
        raise NotFiniteError(
            f"Update {self.counters.updates + 1} is not finite in {', '.join(bad)}; metrics that "
            f"are not finite: {', '.join(terms) or 'none'}. The last checkpoint is intact. Lower "
            "optimiser.learning_rate, raise optimiser.epsilon, or clip the rewards."
        )
