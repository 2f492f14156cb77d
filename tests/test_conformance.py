"""Each conformance suite finds a broken part. That right parts pass is tested with ours."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from distribution_suite import DistributionConformance

from impala import environments
from impala.agents.agent import Agent
from impala.agents.distributions import Categorical
from impala.agents.torsos import MLP
from impala.algorithms.base import LossOutput
from impala.algorithms.impala import Impala
from impala.config.schema import AgentConfig, EnvironmentConfig, ImpalaConfig, ObjectiveConfig
from impala.environments.base import Environment
from impala.environments.catch import Catch
from impala.parts.components import ComponentError
from impala.testing.algorithms import AlgorithmConformance
from impala.testing.environments import EnvironmentConformance
from impala.testing.torsos import TorsoConformance
from impala.types import Batch, EnvironmentStep, Nest, StepType


class SkipsTheReset(Catch):
    """Ends an episode, and goes on without the first row of the next one."""

    def recv(self) -> EnvironmentStep:
        step = super().recv()
        step.timestep.step_type[step.timestep.step_type == StepType.FIRST] = StepType.MID
        return step


class Unnormalised(Categorical):
    """Its log-probabilities are logits."""

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        return tf.reduce_sum(tf.one_hot(action, self.num_parameters) * parameters, axis=-1)


class Looks(MLP):
    """Normalises by what else is in the batch."""

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return super().__call__(inputs - tf.reduce_mean(inputs, axis=0, keepdims=True))


class CountsSeams(Impala):
    """Adds an entropy bonus in every row."""

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        loss, metrics, histograms, *_ = super().loss(batch, progress)
        output, _ = self.agent.unroll(batch.unroll.timestep, batch.unroll.core_state)
        entropy = self.agent.distribution.entropy(output.policy[:-1])
        return LossOutput(loss - 0.1 * entropy, metrics, histograms)


class BrokenEnvironment(EnvironmentConformance):
    __test__ = False
    num_steps = 60

    def make(self, num_envs: int) -> SkipsTheReset:
        return SkipsTheReset(num_envs)


class Unclosable(EnvironmentConformance):
    __test__ = False

    def make(self, num_envs: int) -> Environment:
        return environments.make(EnvironmentConfig(id="looked:Unclosable"), num_envs)


class BrokenDistribution(DistributionConformance):
    __test__ = False
    action_space = gym.spaces.Discrete(3)

    def make(self) -> Unnormalised:
        return Unnormalised(3)


class BrokenTorso(TorsoConformance):
    __test__ = False
    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def make(self, name: str) -> Looks:
        return Looks(AgentConfig(hidden_sizes=(5,)), name=name)


class BrokenAlgorithm(AlgorithmConformance):
    __test__ = False

    def make(self, agent: Agent) -> CountsSeams:
        return CountsSeams(agent, ObjectiveConfig(), ImpalaConfig())


def test_a_suite_finds_that_closing_fails(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AssertionError, match=r"close has failed: .*the simulator has gone"):
        Unclosable().test_it_can_be_closed_twice_and_within_a_step(caplog)


@pytest.mark.parametrize(
    ("suite", "test"),
    [
        (BrokenEnvironment, "an_episode_is_first_mids_last_and_then_first_again"),
        (BrokenDistribution, "probabilities_sum_to_one"),
        (BrokenTorso, "it_is_one_that_an_agent_takes"),
        (BrokenAlgorithm, "the_loss_is_zero_on_seams_and_only_there"),
    ],
)
def test_a_suite_finds_a_broken_part(suite: type[Any], test: str) -> None:
    says = "the row behind LAST is not FIRST" if suite is BrokenEnvironment else None
    with pytest.raises((AssertionError, ComponentError), match=says):
        getattr(suite(), f"test_{test}")()
