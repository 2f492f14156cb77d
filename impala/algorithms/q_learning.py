"""Q-learning with a target network, one-step or n-step, from the stream or from replay.

Mnih et al. 2016, arXiv 1602.01783, section 4 and supplement 8, with one learner instead of
asynchronous gradients; double Q-learning: van Hasselt et al. 2016, arXiv 1509.06461.
"""

import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from impala.agents.agent import Agent
from impala.agents.distributions import EpsilonGreedy
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput, Played, Sums, Term, copy_if, target_of
from impala.config import demands
from impala.config.schema import ObjectiveConfig, QLearningConfig
from impala.environments.spaces import ACTION_MASK
from impala.types import Batch, StepType


class QLearning(Algorithm):
    """Trains the policy head to output Q-values; there is no baseline.

    Raises:
      ValueError: the agent's policy is not epsilon-greedy.
    """

    demands = demands.Q_LEARNING
    _config: QLearningConfig

    def __init__(
        self,
        agent: Agent,
        objective: ObjectiveConfig,
        config: QLearningConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(agent, objective, config, name=name)
        if not isinstance(agent.distribution, EpsilonGreedy):
            raise ValueError(
                "q_learning learns what each of n actions is worth: set agent.policy to "
                "epsilon_greedy."
            )
        self._policy = agent.distribution
        self._target = target_of(agent)
        self._updates = tf.Variable(0, trainable=False, dtype=tf.int64, name="updates")

    @property
    def learned_variables(self) -> Sequence[tf.Variable]:
        return self.agent.policy_variables

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Computes the Huber loss of the temporal differences of the actions taken."""
        config = self._config
        batch = _with_last_masks(batch)
        network_output = self.unroll(batch)
        target_output = self.unroll(batch, self._target)
        steps = losses.align(batch, network_output, self._objective, self.burn_in)

        # Q-values of all T + 1 states.
        values, target_values = network_output.policy, target_output.policy  # [T + 1, B, n]
        best = tf.argmax(values if config.double else target_values, axis=-1)
        state_values = tf.gather(target_values, best, batch_dims=2)
        targets = losses.n_step_targets(steps, state_values, config.steps)

        taken = tf.one_hot(self._policy.index(steps.actions), self._policy.num_choices)
        q = tf.reduce_sum(taken * values[:-1], axis=-1)
        loss = losses.huber(q, targets, config.huber_delta)
        possible = self._policy.is_allowed(values[:-1])
        terms = {"td": Term(loss, steps.mask)}
        means = {
            "q/taken": q,
            "q/mean": tf.math.divide_no_nan(
                tf.reduce_sum(tf.where(possible, values[:-1], 0.0), axis=-1),
                tf.reduce_sum(tf.cast(possible, tf.float32), axis=-1),
            ),
            "q/greedy": tf.reduce_max(values[:-1], axis=-1),
            "q/target": targets,
        }
        metrics = {name: losses.masked_mean(term, steps.mask) for name, term in means.items()}
        for name, term in (
            ("loss_max/td", loss),
            ("q/max", means["q/greedy"]),
            ("reward/max", steps.rewards),
        ):
            metrics[name] = losses.masked_max(term, steps.mask)
        metrics["policy/epsilon"] = self._policy.mean_epsilon()
        # Not a number: left out of the histogram.
        histograms = {"q/taken": q, "q/all": tf.where(possible, values[:-1], math.nan)}
        return LossOutput.of(terms, metrics, histograms)

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Anneals epsilon, and copies the agent into the target network every few updates."""
        self._policy.progress.assign(progress)
        updates = self._updates.assign_add(1)
        if self._config.target_frames or self._config.target_episodes:
            return
        is_due = updates % self._config.target_updates == 0
        copy_if(is_due, self.agent, self._target)

    def after_count(self, before: Played, after: Played) -> None:
        """Copies the agent into the target network every few frames or episodes, if set so."""
        config = self._config
        intervals = Played(config.target_frames, config.target_episodes)
        if any(
            every and then // every < now // every
            for every, then, now in zip(intervals, before, after, strict=True)
        ):
            for target, variable in zip(self._target.variables, self.agent.variables, strict=True):
                target.assign(variable)


def _with_last_masks(batch: Batch) -> Batch:
    """Gives last rows whose action mask allows nothing the mask before them.

    At a time limit the target bootstraps from there, and without a mask would be the largest of
    values that were never learned.
    """
    timestep = batch.unroll.timestep
    observation = timestep.observation
    if not (isinstance(observation, Mapping) and ACTION_MASK in observation):
        return batch
    mask = observation[ACTION_MASK]  # [T + 1, B, n]
    says_nothing = tf.reduce_all(tf.cast(mask, tf.float32) <= 0.0, axis=-1)
    is_unknown = says_nothing & (timestep.step_type == StepType.LAST)
    mask = tf.where(is_unknown[..., tf.newaxis], tf.concat([mask[:1], mask[:-1]], axis=0), mask)
    timestep = timestep._replace(observation={**observation, ACTION_MASK: mask})
    return batch._replace(unroll=batch.unroll._replace(timestep=timestep))
