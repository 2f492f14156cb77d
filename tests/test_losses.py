"""The shift by one, the seam mask and clipped rewards, against NumPy and pencil."""

import math

import numpy as np
import pytest
import tensorflow as tf

from impala.algorithms import losses
from impala.config.schema import ObjectiveConfig
from impala.types import AgentOutput, Batch, NetworkOutput, StepType, TimeStep, Unroll

PLAIN = ObjectiveConfig(discount=1.0)
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST

# Two environments, five rows: the first never ends, the second ends in row 2.
STEP_TYPES = np.array([[MID, MID], [MID, MID], [MID, LAST], [MID, FIRST], [MID, MID]], np.int8)
ROWS, B = STEP_TYPES.shape
T = ROWS - 1


def counting_batch() -> Batch:
    """Every leaf counts rows: timesteps 0, 1, ..., actions from 10, mu from 20, V from 30."""
    row = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], B, axis=1)  # [T + 1, B]
    timestep = TimeStep(
        observation=tf.constant(row),
        reward=tf.constant(row),
        discount=tf.constant(100 + row),
        step_type=tf.constant(STEP_TYPES),
    )
    output = AgentOutput(
        action={"move": tf.constant(10 + row, tf.int32), "look": tf.constant(row[..., None])},
        policy=tf.constant((20 + row)[..., None]),
        baseline=tf.constant(30 + row),
    )
    unroll = Unroll(timestep, output, (), tf.zeros([B], tf.int32), tf.zeros([B], tf.int64))
    return Batch(unroll, tf.constant([False, True]))


def counting_network() -> NetworkOutput:
    row = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], B, axis=1)
    return NetworkOutput(tf.constant((40 + row)[..., None]), tf.constant(50 + row))


class TestAlign:
    def test_what_led_to_row_1_stands_beside_what_was_seen_in_row_0(self) -> None:
        steps = losses.align(counting_batch(), counting_network(), PLAIN)

        endless = 0  # The first environment has no seam.
        assert steps.target_policy[:, endless, 0].numpy().tolist() == [40, 41, 42, 43]
        assert steps.values[:, endless].numpy().tolist() == [50, 51, 52, 53]
        assert steps.bootstrap_value.numpy().tolist() == [54, 54]
        assert steps.actions["move"][:, endless].numpy().tolist() == [11, 12, 13, 14]
        assert steps.actions["look"][:, endless, 0].numpy().tolist() == [1, 2, 3, 4]
        assert steps.behaviour_policy[:, endless, 0].numpy().tolist() == [21, 22, 23, 24]
        assert steps.behaviour_values[:, endless].numpy().tolist() == [31, 32, 33, 34]
        assert steps.rewards[:, endless].numpy().tolist() == [1, 2, 3, 4]
        assert steps.discounts[:, endless].numpy().tolist() == [101, 102, 103, 104]
        assert steps.is_replay.numpy().tolist() == [False, True]

    def test_only_the_step_from_last_to_first_row_is_masked(self) -> None:
        steps = losses.align(counting_batch(), counting_network(), PLAIN)

        assert steps.mask.dtype == tf.float32
        assert steps.mask.numpy().tolist() == [[1, 1], [1, 1], [1, 0], [1, 1]]
        assert steps.rewards[:, 1].numpy().tolist() == [1, 2, 0, 4]
        assert steps.discounts[:, 1].numpy().tolist() == [101, 102, 0, 104]

    def test_the_objective_changes_rewards_and_discounts(self) -> None:
        objective = ObjectiveConfig(discount=0.5, reward_scale=0.5, reward_clipping="abs_one")

        steps = losses.align(counting_batch(), counting_network(), objective)

        assert steps.rewards.numpy().tolist() == [[0.5, 0.5], [1, 1], [1, 0], [1, 1]]
        assert steps.discounts[:, 0].numpy().tolist() == [50.5, 51, 51.5, 52]

    def test_an_episode_that_begins_in_row_0_loses_no_step(self) -> None:
        batch = counting_batch()
        step_type = tf.constant([[FIRST] * B] + [[MID] * B] * T, tf.int8)
        timestep = batch.unroll.timestep._replace(step_type=step_type)
        batch = batch._replace(unroll=batch.unroll._replace(timestep=timestep))

        mask = losses.align(batch, counting_network(), PLAIN).mask

        assert mask.numpy().sum() == T * B


class TestClipRewards:
    REWARDS = np.array([-20.0, -1.0, -0.5, 0.0, 0.5, 1.0, 20.0], np.float32)

    def test_abs_one_clips_to_one(self) -> None:
        clipped = losses.clip_rewards(self.REWARDS, "abs_one")

        assert clipped.numpy().tolist() == [-1.0, -1.0, -0.5, 0.0, 0.5, 1.0, 1.0]

    def test_sign_leaves_only_the_sign(self) -> None:
        clipped = losses.clip_rewards(self.REWARDS, "sign")

        assert clipped.numpy().tolist() == [-1.0, -1.0, -1.0, 0.0, 1.0, 1.0, 1.0]

    def test_soft_asymmetric_takes_losses_less_to_heart_than_gains(self) -> None:
        clipped = losses.clip_rewards(self.REWARDS, "soft_asymmetric").numpy()

        expected = [(0.3 if r < 0 else 1.0) * 5.0 * math.tanh(r / 5.0) for r in self.REWARDS]
        np.testing.assert_allclose(clipped, expected, rtol=1e-5)
        assert clipped[-1] == pytest.approx(5.0, abs=0.01)
        assert clipped[0] == pytest.approx(-1.5, abs=0.01)

    def test_another_mode_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'hard'; choose none, sign, abs_one or soft"):
            losses.clip_rewards(self.REWARDS, "hard")


class TestMasked:
    MASK = tf.constant([[1.0, 0.0], [1.0, 1.0]])

    def test_nothing_passes_a_mask_of_zero_not_even_nan(self) -> None:
        terms = tf.constant([[1.0, math.nan], [2.0, 6.0]])

        assert losses.masked(terms, self.MASK).numpy().tolist() == [[1.0, 0.0], [2.0, 6.0]]
        assert losses.masked_mean(terms, self.MASK).numpy() == 3.0

    def test_the_mean_of_nothing_is_zero(self) -> None:
        assert losses.masked_mean(tf.ones([2, 2]), tf.zeros([2, 2])).numpy() == 0.0

    def test_explained_variance_is_one_minus_what_is_left(self) -> None:
        rng = np.random.default_rng(0)
        values, targets = rng.normal(size=(2, 6, 4)).astype(np.float32)
        mask = (rng.uniform(size=(6, 4)) < 0.7).astype(np.float32)
        targets[mask == 0] = np.nan
        kept = mask > 0

        explained = losses.explained_variance(values, targets, tf.constant(mask))

        expected = 1.0 - np.var(targets[kept] - values[kept]) / np.var(targets[kept])
        assert explained.numpy() == pytest.approx(expected, rel=1e-4)

    def test_explained_variance_of_targets_that_do_not_vary_is_zero(self) -> None:
        values = tf.random.stateless_normal([20, 32], [0, 0])
        ones = tf.ones([20, 32])
        for jit_compile in (False, True):
            explained = tf.function(losses.explained_variance, jit_compile=jit_compile)
            for target in (1.0, 0.1):  # of which the mean is rounded
                assert explained(values, tf.fill([20, 32], target), ones).numpy() == 0.0
