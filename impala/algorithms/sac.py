"""Soft actor-critic: twin critics, target critics, a tanh-normal policy, a learned temperature.

Haarnoja et al. 2018, arXiv 1801.01290, whose form with a state-value network is an option; without
it, and with the temperature: Haarnoja et al. 2018, arXiv 1812.05905.
"""

import copy
import math
from collections.abc import Sequence

import sonnet as snt
import tensorflow as tf

from impala.agents import torsos
from impala.agents.agent import Agent
from impala.agents.distributions import TanhNormal
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput, Sums, Term
from impala.config import demands
from impala.config.schema import AgentConfig, ObjectiveConfig, SacConfig
from impala.types import Batch, Nest


class Critics(snt.Module):
    """Two Q-functions of observations and actions.

    Args:
      agent: provides the shapes of observations and actions.
      hidden_sizes: of each Q-function.
    """

    def __init__(self, agent: Agent, hidden_sizes: Sequence[int], name: str | None = None) -> None:
        super().__init__(name=name)
        self._observe = agent.observation_vector
        settings = AgentConfig(hidden_sizes=tuple(hidden_sizes))
        self._networks = [
            snt.Sequential(
                [torsos.MLP(settings, name=f"critic_{i}"), snt.Linear(1, name=f"value_{i}")]
            )
            for i in range(2)
        ]
        assert isinstance(agent.distribution, TanhNormal)
        inputs = agent.observation_size + agent.distribution.size
        for network in self._networks:
            network(tf.zeros([1, inputs]))

    def __call__(self, observation: Nest, points: tf.Tensor) -> tf.Tensor:
        """Returns Q-values [T, B, 2] of observations [T, B, ...] and points [T, B, D]."""
        inputs = tf.concat([snt.BatchApply(self._observe)(observation), points], axis=-1)
        return tf.concat([snt.BatchApply(network)(inputs) for network in self._networks], axis=-1)


class StateValue(snt.Module):
    """The soft value V of observations.

    Args:
      agent: provides the shape of observations.
      hidden_sizes: of the network.
    """

    def __init__(self, agent: Agent, hidden_sizes: Sequence[int], name: str | None = None) -> None:
        super().__init__(name=name)
        self._observe = agent.observation_vector
        settings = AgentConfig(hidden_sizes=tuple(hidden_sizes))
        self._network = snt.Sequential([torsos.MLP(settings), snt.Linear(1, name="value")])
        self._network(tf.zeros([1, agent.observation_size]))

    def __call__(self, observation: Nest) -> tf.Tensor:
        """Returns values [T, B] of observations [T, B, ...]."""
        inputs = snt.BatchApply(self._observe)(observation)
        return tf.squeeze(snt.BatchApply(self._network)(inputs), axis=-1)


class Sac(Algorithm):
    """Trains the agent's policy, two critics and the temperature; there is no baseline.

    With `value_network`, it also trains a state-value network. The target of the critics is then
    computed by a copy that follows this network, and not by copies of the critics.

    Raises:
      ValueError: the action is not a box, or the agent has a core or frame stack.
    """

    demands = demands.SAC
    _config: SacConfig

    def __init__(
        self,
        agent: Agent,
        objective: ObjectiveConfig,
        config: SacConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(agent, objective, config, name=name)
        if not isinstance(agent.distribution, TanhNormal):
            raise ValueError(
                "sac learns continuous actions: play an environment with a Box of them."
            )
        if agent.initial_state(1) != ():
            raise ValueError(
                "sac's critics see one observation at a time: set agent.core to feed_forward and "
                "agent.frame_stack to 1."
            )
        self._policy = agent.distribution
        self._critics = Critics(agent, config.critic_hidden_sizes)
        self._value: StateValue | None = None
        if config.value_network:
            self._value = StateValue(agent, config.critic_hidden_sizes)
            self._target_value = copy.deepcopy(self._value, {id(agent): agent})
        else:
            self._target_critics = copy.deepcopy(self._critics, {id(agent): agent})
        self._log_temperature = tf.Variable(math.log(config.temperature), name="log_temperature")
        self._updates = tf.Variable(0, trainable=False, dtype=tf.int64, name="updates")

    @property
    def learned_variables(self) -> Sequence[tf.Variable]:
        temperature = [self._log_temperature] if self._config.learn_temperature else []
        return [
            *self.agent.policy_variables,
            *self._critics.trainable_variables,
            *(() if self._value is None else self._value.trainable_variables),
            *temperature,
        ]

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Losses of critics, V, policy and temperature; each trains only its own variables."""
        config, policy = self._config, self._policy
        observation = batch.unroll.timestep.observation
        network_output, _ = self.agent.unroll(batch.unroll.timestep, batch.unroll.core_state)
        steps = losses.align(batch, network_output, self._objective)
        # A fixed one is the setting's, also after a checkpoint with another.
        temperature = tf.constant(config.temperature)
        if config.learn_temperature:
            temperature = tf.exp(self._log_temperature)
        fixed_temperature = tf.stop_gradient(temperature)

        # Actions of the current policy in each of the T + 1 states.
        seed = tf.stack([tf.cast(self._updates, tf.int32), 0])
        actions, log_probs = policy.sample_and_log_prob(network_output.policy, seed)
        points = policy.unit(actions)  # [T + 1, B, D]
        log_probs += policy.log_volume  # of the points, independent of the action's units

        # Critics: towards the reward and the soft value of the next state (equations 5 to 7).
        now, then = _rows(observation, slice(None, -1)), _rows(observation, slice(1, None))
        if self._value is None:
            next_values = tf.reduce_min(self._target_critics(then, points[1:]), axis=-1)
            next_values -= fixed_temperature * log_probs[1:]
        else:
            next_values = self._target_value(then)
        targets = tf.stop_gradient(steps.rewards + steps.discounts * next_values)
        q = self._critics(now, policy.unit(steps.actions))  # [T, B, 2]
        of_critics = losses.baseline(q, targets[..., tf.newaxis])

        # Policy: ascends the gradient of the critics with respect to the action (equation 9). The
        # term's value is that of the loss, its gradient that of `towards`.
        chosen = tf.stop_gradient(points[:-1])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(chosen)
            q_of_chosen = self._critics(now, chosen)  # [T, B, 2]
            least = tf.reduce_min(q_of_chosen, axis=-1)
            # With V the policy follows the first critic, and the smaller one is V's target.
            worth = least if self._value is None else q_of_chosen[..., 0]
        slope = tf.stop_gradient(tape.gradient(worth, chosen))
        towards = tf.reduce_sum(slope * points[:-1], axis=-1)
        towards += tf.stop_gradient(worth - towards)
        actor = fixed_temperature * log_probs[:-1] - towards

        # Temperature: rises if the entropy is below its target, else falls.
        wanted = config.entropy_per_dimension * policy.size
        lacking = tf.stop_gradient(log_probs[:-1] + wanted)
        terms = {
            "q1": Term(of_critics[..., 0], steps.mask),
            "q2": Term(of_critics[..., 1], steps.mask),
            "policy": Term(actor, steps.mask),
        }
        metrics = {"policy/temperature": fixed_temperature}
        if self._value is not None:
            values = self._value(now)
            soft_value = losses.baseline(values, least - fixed_temperature * log_probs[:-1])
            terms["v"] = Term(soft_value, steps.mask)
            metrics |= losses.statistics("v", values, steps.mask)
        if config.learn_temperature:
            terms["temperature"] = Term(-temperature * lacking, steps.mask)

        means = {
            "policy/entropy": -log_probs[:-1],
            "q/taken": tf.reduce_mean(q, axis=-1),
            "q/target": targets,
        }
        metrics |= {name: losses.masked_mean(term, steps.mask) for name, term in means.items()}
        for name, values in (
            ("q1", q[..., 0]),
            ("q2", q[..., 1]),
            ("policy/log_prob", log_probs[:-1]),
        ):
            metrics |= losses.statistics(name, values, steps.mask)
        return LossOutput.of(terms, metrics, {"q/taken": means["q/taken"]})

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Moves the target network towards the network that it follows."""
        self._updates.assign_add(1)
        step = self._config.target_step
        if self._value is None:
            pair = self._target_critics, self._critics
        else:
            pair = self._target_value, self._value
        for target, variable in zip(*(network.variables for network in pair), strict=True):
            target.assign_add(step * (variable - target))


def _rows(observation: Nest, rows: slice) -> Nest:
    return tf.nest.map_structure(lambda leaf: leaf[rows], observation)
