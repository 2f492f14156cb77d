"""The conformance suites find what is wrong: each broken part fails the test that is about it."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from impala.agents import distributions
from impala.agents.agent import Agent
from impala.agents.distributions import Categorical, TanhNormal
from impala.agents.torsos import MLP, Torso
from impala.algorithms.base import Algorithm, LossOutput
from impala.algorithms.impala import Impala
from impala.config.schema import AgentConfig, ImpalaConfig, ObjectiveConfig
from impala.environments.base import Environment
from impala.environments.catch import Catch
from impala.testing.algorithms import AlgorithmConformance
from impala.testing.distributions import DistributionConformance
from impala.testing.environments import EnvironmentConformance
from impala.testing.torsos import TorsoConformance
from impala.types import Batch, EnvironmentStep, Nest, StepType, TimeStep


def failing(suite: type) -> set[str]:
    """The tests of a suite that fail, without test_."""
    found = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite(), name)()
            except Exception:
                found.add(name.removeprefix("test_"))
    return found


def suite(base: type, **members: Any) -> type:
    """A suite, as a user writes it; functions get what the suite's method gets."""
    methods = {
        name: (lambda self, *args, call=value: call(*args)) if callable(value) else value
        for name, value in members.items()
    }
    return type("Broken", (base,), methods)


class LiesAboutItsSpace(Catch):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.observation_space = gym.spaces.Box(0, 0, (10, 5), np.uint8)


class GivesOtherNumbers(Catch):
    def recv(self) -> EnvironmentStep:
        step = super().recv()
        reward = np.asarray(step.timestep.reward, np.float64)
        return step._replace(timestep=step.timestep._replace(reward=reward))


class ResetsInTheMiddle(Catch):
    """Begins a new game after the fifth step, and says FIRST."""

    steps = 0

    def recv(self) -> EnvironmentStep:
        step = super().recv()
        self.steps += 1
        if self.steps == 5:
            step.timestep.step_type[:] = StepType.FIRST
            return step._replace(frames=np.zeros(self.num_envs, np.int32))
        return step


class SkipsTheEnd(Catch):
    """Begins the next game in the step in which one ends, as SAME_STEP does."""

    def recv(self) -> EnvironmentStep:
        step = super().recv()
        step.timestep.step_type[step.timestep.step_type == StepType.LAST] = StepType.MID
        return step


class PaysForTheReset(Catch):
    def recv(self) -> EnvironmentStep:
        step = super().recv()
        step.timestep.reward[step.timestep.step_type == StepType.FIRST] = 1.0
        return step


class CountsTheReset(Catch):
    def recv(self) -> EnvironmentStep:
        return super().recv()._replace(frames=np.ones(self.num_envs, np.int32))


class ReusesItsBuffer(Catch):
    """Writes the next observation where the last one is, as soon as an action is sent."""

    def recv(self) -> EnvironmentStep:
        step = super().recv()
        self._given = step.timestep.observation
        return step

    def reset(self, seed: int) -> TimeStep:
        timestep = super().reset(seed)
        self._given = timestep.observation
        return timestep

    def send(self, action: Nest) -> None:
        super().send(action)
        self._given[:] = 0


class DrawsFromThin(Catch):
    """Does not know its seed."""

    def reset(self, seed: int) -> TimeStep:
        return super().reset(int(np.random.default_rng().integers(2**20)))


class OneSeedForAll(Catch):
    def reset(self, seed: int) -> TimeStep:
        super().reset(seed)
        self._generators = [np.random.default_rng(seed) for _ in range(self.num_envs)]
        return self._first()


class CannotBeClosed(Catch):
    closed = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class DiscountsTooMuch(Catch):
    def recv(self) -> EnvironmentStep:
        step = super().recv()
        return step._replace(timestep=step.timestep._replace(discount=1.5 * step.timestep.discount))


class ForgetsItsNumber(Catch):
    def __init__(self, num_envs: int) -> None:
        super().__init__(3)


@pytest.mark.parametrize(
    ("environment", "test"),
    [
        (LiesAboutItsSpace, "observations_are_in_the_space"),
        (GivesOtherNumbers, "the_rest_has_its_shape_and_dtype"),
        (ResetsInTheMiddle, "an_episode_is_first_mids_last_and_then_first_again"),
        (SkipsTheEnd, "an_episode_is_first_mids_last_and_then_first_again"),
        (PaysForTheReset, "a_first_row_carries_nothing"),
        (CountsTheReset, "a_first_row_carries_nothing"),
        (ReusesItsBuffer, "what_it_gave_stays_as_it_is_until_the_next_recv"),
        (DrawsFromThin, "the_seed_decides"),
        (OneSeedForAll, "environments_of_one_seed_differ"),
        (CannotBeClosed, "it_can_be_closed_twice_and_within_a_step"),
        (DiscountsTooMuch, "rewards_are_finite_and_discounts_are_from_0_to_1"),
        (ForgetsItsNumber, "its_attributes_say_what_it_is"),
    ],
)
def test_a_broken_environment_fails(environment: Callable[[int], Environment], test: str) -> None:
    assert test in failing(suite(EnvironmentConformance, make=environment, num_steps=60))


class Unnormalised(Categorical):
    """Its log-probabilities are logits."""

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        return tf.reduce_sum(tf.one_hot(action, self.num_parameters) * parameters, axis=-1)


class WithoutTheSlope(TanhNormal):
    """Forgets that tanh changes the density."""

    def log_prob(self, parameters: tf.Tensor, action: Nest) -> tf.Tensor:
        mean, log_std = self._gaussian(parameters)
        point = tf.atanh(tf.clip_by_value(self.unit(action), -0.999999, 0.999999))
        distance = (point - mean) * tf.exp(-log_std)
        gaussian = -0.5 * tf.square(distance) - log_std - 0.5 * np.log(2 * np.pi)
        return tf.reduce_sum(gaussian, axis=-1)


class Uniform(Categorical):
    """Draws something else than it says."""

    def sample_and_log_prob(self, parameters: tf.Tensor, seed: tf.Tensor) -> tuple[Nest, tf.Tensor]:
        action, _ = super().sample_and_log_prob(0.0 * parameters, seed)
        return action, self.log_prob(parameters, action)


class Turned(Categorical):
    """Gives KL(q || p)."""

    def kl(self, p: tf.Tensor, q: tf.Tensor) -> tf.Tensor:
        return super().kl(q, p)


class Unmasked(Categorical):
    def mask(self, outputs: tf.Tensor, allowed: tf.Tensor) -> tf.Tensor:
        return outputs


BOX = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


@pytest.mark.parametrize(
    ("distribution", "space", "test"),
    [
        (lambda: Unnormalised(3), gym.spaces.Discrete(3), "probabilities_sum_to_one"),
        (
            lambda: WithoutTheSlope(BOX.low, BOX.high, np.float32),
            BOX,
            "probabilities_sum_to_one",
        ),
        (
            lambda: Uniform(3),
            gym.spaces.Discrete(3),
            "sampling_frequencies_are_the_probabilities",
        ),
        (lambda: Turned(3), gym.spaces.Discrete(3), "kl_is_the_expected_log_ratio"),
        (
            lambda: Unmasked(3),
            gym.spaces.Discrete(3),
            "masked_choices_are_impossible_and_the_rest_is_as_enumerated",
        ),
        (
            lambda: Categorical(3),
            gym.spaces.Discrete(3, start=1),
            "samples_are_actions_of_the_space",
        ),
    ],
)
def test_a_broken_distribution_fails(
    distribution: Callable[[], distributions.Distribution], space: gym.Space, test: str
) -> None:
    assert test in failing(suite(DistributionConformance, make=distribution, action_space=space))


class Looks(MLP):
    """Normalises by what else is in the batch."""

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return super().__call__(inputs - tf.reduce_mean(inputs, axis=0, keepdims=True))


class HalfUsed(MLP):
    """Has a variable that nothing depends on."""

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        if not hasattr(self, "_more"):
            self._more = tf.Variable(1.0, name=f"{self.name}/more")
        return super().__call__(inputs)


class KeepsItsName(MLP):
    def __init__(self, settings: AgentConfig, name: str | None = None) -> None:
        super().__init__(settings, name="mine")


class Squeezes(MLP):
    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        return super().__call__(inputs)[:, 0]


class Remembers(MLP):
    calls = 0

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        self.calls += 1
        return super().__call__(inputs) + self.calls


@pytest.mark.parametrize(
    ("torso", "test"),
    [
        (Looks, "each_row_depends_on_its_own_observation_alone"),
        (HalfUsed, "variables_are_made_in_the_first_call_and_all_of_them_learn"),
        (KeepsItsName, "its_name_is_passed_on"),
        (Squeezes, "features_are_finite_vectors"),
        (Remembers, "the_same_observation_gives_the_same_features"),
    ],
)
def test_a_broken_torso_fails(torso: type[MLP], test: str) -> None:
    def make(name: str) -> Torso:
        return torso(AgentConfig(hidden_sizes=(5,)), name=name)

    space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    assert test in failing(suite(TorsoConformance, make=make, observation_space=space))


class Learns(Impala):
    """A part that is right, from which the broken ones derive."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent, ObjectiveConfig(), ImpalaConfig())


class CountsSeams(Learns):
    """Adds an entropy bonus in every row."""

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        loss, metrics, histograms, *_ = super().loss(batch, progress)
        output, _ = self.agent.unroll(batch.unroll.timestep, batch.unroll.core_state)
        entropy = self.agent.distribution.entropy(output.policy[:-1])
        return LossOutput(loss - 0.1 * entropy, metrics, histograms)


class ReadsSeams(Learns):
    """Averages rewards over all rows."""

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        loss, metrics, histograms, *_ = super().loss(batch, progress)
        mean = tf.reduce_mean(batch.unroll.timestep.reward)
        return LossOutput(loss, {**metrics, "reward/mean": mean}, histograms)


class LearnsLess(Learns):
    """Says that it learns what has no gradient."""

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        loss, metrics, histograms, *_ = super().loss(batch, progress)
        return LossOutput(tf.stop_gradient(loss), metrics, histograms)


class Sums(Learns):
    """Sums the loss itself."""

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        loss, metrics, histograms, *_ = super().loss(batch, progress)
        return LossOutput(tf.reduce_sum(loss), metrics, histograms)


class HidesWhatItKnows(Learns):
    """Counts its updates in a number that no checkpoint holds."""

    updates = 0

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        loss, metrics, histograms, *_ = super().loss(batch, progress)
        return LossOutput(loss / (1.0 + self.updates), metrics, histograms)

    def after_update(self, progress: tf.Tensor | float) -> None:
        self.updates += 1


@pytest.mark.parametrize(
    ("algorithm", "test"),
    [
        (CountsSeams, "the_loss_is_zero_on_seams_and_only_there"),
        (ReadsSeams, "a_seam_row_is_silent"),
        (LearnsLess, "exactly_the_learned_variables_move"),
        (Sums, "the_loss_is_finite_one_per_step_and_metrics_are_scalars"),
        (HidesWhatItKnows, "what_a_checkpoint_holds_says_everything"),
    ],
)
def test_a_broken_algorithm_fails(algorithm: Callable[[Agent], Algorithm], test: str) -> None:
    def nothing() -> None:
        """Compiling takes long, and none of them is about it."""

    broken = suite(AlgorithmConformance, make=algorithm, test_compiled_it_is_the_same=nothing)
    assert test in failing(broken)


def test_what_is_compiled_is_compared_in_plain_float32() -> None:
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    seen = []

    class Spied(MLP):
        def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
            seen.append(enabled())
            return super().__call__(inputs)

    def make(name: str) -> Torso:
        return Spied(AgentConfig(hidden_sizes=(5,)), name=name)

    space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    suite(TorsoConformance, make=make, observation_space=space)().test_compiled_it_says_the_same()
    assert seen and not any(seen)
    assert enabled()
