"""Loss terms per step, the alignment of actions with observations, and the seam mask.

Rewards are scaled and clipped, and discounts multiplied by gamma, during alignment. Terms are pure
functions of [T, B] tensors, unweighted and unmasked; an `Algorithm` selects, weights and masks
them. All are minimised.
"""

import math
from typing import NamedTuple

import tensorflow as tf
import tree

import vtrace
from impala.config.schema import ObjectiveConfig
from impala.types import Batch, Nest, NetworkOutput, StepType


class Aligned(NamedTuple):
    """A batch as T steps: in step t the agent observed row t and acted; row t + 1 has the result.

    Where the mask is 0 rewards, discounts and behaviour are 0; actions on seams are meaningless.
    """

    target_policy: tf.Tensor  # [T, B, P] pi, of the current network
    values: tf.Tensor  # [T, B] V(x_t), of the current network
    bootstrap_value: tf.Tensor  # [B] V(x_T)
    actions: Nest  # [T, B, ...]
    behaviour_policy: tf.Tensor  # [T, B, P] mu, as recorded when the agent acted
    behaviour_values: tf.Tensor  # [T, B] V(x_t), as recorded when the agent acted
    rewards: tf.Tensor  # [T, B] scaled and clipped
    discounts: tf.Tensor  # [T, B] gamma times the environment's
    mask: tf.Tensor  # [T, B] float32, 1 on what is learned from, 0 on seams and burn-in
    is_replay: tf.Tensor  # [B] bool


def align(
    batch: Batch, network_output: NetworkOutput, objective: ObjectiveConfig, burn_in: int = 0
) -> Aligned:
    """Aligns actions, behaviour policy, rewards and discounts of row t + 1 with outputs of row t.

    Args:
      batch: [T + 1, B, ...], T >= 1.
      network_output: [T + 1, B, ...], of the same rows.
      objective: how to transform rewards and discounts.
      burn_in: steps at the start of replayed unrolls that are masked, as seams are.

    Raises:
      ValueError: there are fewer than two rows, or the network's rows are not the batch's.
    """
    timestep, output = batch.unroll.timestep, batch.unroll.output
    rows, network_rows = timestep.reward.shape, network_output.baseline.shape
    if rows[0] is not None and rows[0] < 2:
        raise ValueError(f"An unroll needs 2 or more rows, a step has two ends; got {rows[0]}.")
    if not rows.is_compatible_with(network_rows):
        raise ValueError(f"The batch's rows are {rows}, the network's {network_rows}: unroll all.")
    # Before a seam there is a LAST row, whose value bootstraps a truncated episode. The seam itself
    # is no step: the environment ignored the action.
    experience = timestep.step_type[1:] != tf.cast(StepType.FIRST, timestep.step_type.dtype)
    if burn_in:
        steps = tf.range(tf.shape(experience)[0])[:, tf.newaxis]
        experience &= (steps >= burn_in) | ~tf.convert_to_tensor(batch.is_replay)
    rewards = clip_rewards(timestep.reward[1:], objective.reward_clipping, objective.reward_scale)
    return Aligned(
        target_policy=network_output.policy[:-1],
        values=network_output.baseline[:-1],
        bootstrap_value=network_output.baseline[-1],
        actions=tree.map_structure(lambda action: action[1:], output.action),
        behaviour_policy=tf.where(experience[..., tf.newaxis], output.policy[1:], 0.0),
        behaviour_values=tf.where(experience, output.baseline[1:], 0.0),
        rewards=tf.where(experience, rewards, 0.0),
        discounts=tf.where(experience, objective.discount * timestep.discount[1:], 0.0),
        mask=tf.cast(experience, tf.float32),
        is_replay=batch.is_replay,
    )


def lambda_returns(steps: Aligned, lambda_: float = 1.0) -> tf.Tensor:
    """Returns the behaviour policy's bootstrapped returns: V-trace with rho = 1.

    With lambda = 1 these are n-step returns to the end of the unroll, with less TD(lambda) returns;
    minus the values, they are the generalised advantages of Schulman et al. 2016, arXiv 1506.02438.
    No gradient. [T, B].
    """
    returns = vtrace.from_importance_weights(
        log_rhos=tf.where(steps.mask > 0.0, 0.0, -math.inf),
        discounts=steps.discounts,
        rewards=steps.rewards,
        values=steps.values,
        bootstrap_value=steps.bootstrap_value,
        lambda_=lambda_,
    )
    return returns.vs


def n_step_targets(steps: Aligned, state_values: tf.Tensor, n: int) -> tf.Tensor:
    """Returns n-step targets: up to n discounted rewards and the value after them.

    There are fewer at the end of the unroll and of an episode. After a termination nothing is
    added, at a time limit the value of the last state. No gradient. [T, B].

    Args:
      steps: [T, B].
      state_values: [T + 1, B].
      n: 1 or more.
    """
    next_values = state_values[1:]
    # Nothing passes a seam: the value of the LAST row before it bootstraps.
    goes_on = tf.concat([steps.mask[1:], tf.zeros_like(steps.mask[:1])], axis=0) > 0.0
    behind = next_values
    for _ in range(min(n, next_values.shape[0] or n)):  # each settles one more row, from the last
        targets = steps.rewards + steps.discounts * behind
        later = tf.concat([targets[1:], next_values[-1:]], axis=0)
        behind = tf.where(goes_on, later, next_values)
    return tf.stop_gradient(targets)


def huber(predictions: tf.Tensor, targets: tf.Tensor, delta: float) -> tf.Tensor:
    """Returns the Huber loss, linear beyond an error of `delta`. No gradient to targets. [T, B]."""
    error = tf.abs(tf.stop_gradient(targets) - predictions)
    inner = tf.minimum(error, delta)
    return 0.5 * tf.square(inner) + delta * (error - inner)


def normalised(terms: tf.Tensor, scales: tf.Tensor | None) -> tf.Tensor:
    """Returns terms / scales; the terms themselves without scales. [T, B].

    PopArt: with v = sigma n + mu, a difference of values or targets over sigma is that of the
    normalised ones: (G - mu) / sigma - n = (G - v) / sigma. Hessel et al. 2018, arXiv 1809.04474.
    """
    return terms if scales is None else terms / scales


def policy_gradient(log_probs: tf.Tensor, advantages: tf.Tensor) -> tf.Tensor:
    """Returns the policy-gradient loss -A log pi(a). No gradient to advantages. [T, B]."""
    return -log_probs * tf.stop_gradient(advantages)


def baseline(values: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Returns 0.5 (target - V)^2. No gradient to targets. [T, B]."""
    return 0.5 * tf.square(tf.stop_gradient(targets) - values)


def entropy(entropies: tf.Tensor) -> tf.Tensor:
    """Returns -H(pi); minimising it raises the entropy. [T, B]."""
    return -entropies


def annealed(
    start: float, end: float, progress: tf.Tensor | float, over: float
) -> tf.Tensor | float:
    """Returns a number that changes linearly from `start` to `end` over the first part of a phase.

    Args:
      start: value at the beginning.
      end: value after that part.
      progress: [] share of the phase done, 0 to 1.
      over: size of that part, as a share of the phase; 0: the value is constant.
    """
    if over == 0.0:
        return start
    return start + (end - start) * tf.minimum(progress / over, 1.0)


def clip_rewards(rewards: tf.Tensor, mode: str, scale: float = 1.0) -> tf.Tensor:
    """Scales rewards, then clips them; any shape.

    Args:
      rewards: raw, of the environment.
      mode: `none`; `sign`: -1, 0 or 1; `abs_one`: clip to [-1, 1]; `soft_asymmetric`: 5 tanh(r/5),
        and 0.3 times that where r < 0, as in the code released with Espeholt et al. 2018 (the paper
        prints another formula).
      scale: multiplies the reward before it is clipped.

    Raises:
      ValueError: there is no such mode.
    """
    rewards = rewards * scale
    match mode:
        case "none":
            return rewards
        case "sign":
            return tf.sign(rewards)
        case "abs_one":
            return tf.clip_by_value(rewards, -1.0, 1.0)
        case "soft_asymmetric":
            squeezed = 5.0 * tf.tanh(rewards / 5.0)
            return tf.where(rewards < 0.0, 0.3 * squeezed, squeezed)
    raise ValueError(f"No reward clipping {mode!r}; choose none, sign, abs_one or soft_asymmetric.")


def trust_region(mask: tf.Tensor, distances: tf.Tensor, limit: float) -> tf.Tensor:
    """Returns `mask`, with 0 also where the behaviour policy is too far from the target policy.

    The trust region of LASER: Schmitt et al. 2020, arXiv 1909.11583. A state is learned from only
    if its behaviour policy is relevant there, which is decided by both policies and not by the
    action taken: leaving out actions would bias what is learned. The trace of V-trace ends at a
    state without relevance, from whose value earlier targets bootstrap.

    Args:
      mask: [T, B], of the steps.
      distances: [T, B], KL(pi || mu) in each state. It is large where pi favours actions that mu
        avoids, whose importance weights V-trace clips; that is its bias. KL(mu || pi) is not.
      limit: b, the largest distance of a relevant behaviour policy, in nats.
    """
    # A distance that is NaN leaves the step in, so that the loss shows it.
    return tf.where(distances > limit, 0.0, mask)


def masked(terms: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns `terms` where the mask is 1, else 0, even where a term is not finite. [T, B]."""
    return tf.where(mask > 0.0, terms, 0.0)  # A product would keep NaN: 0 * inf.


def masked_mean(terms: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns the mean of `terms` over the rows where the mask is 1; 0 if there are none."""
    return tf.math.divide_no_nan(tf.reduce_sum(masked(terms, mask)), tf.reduce_sum(mask))


def masked_max(terms: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns the largest of `terms` where the mask is 1; 0 if there are none."""
    largest = tf.reduce_max(tf.where(mask > 0.0, terms, -math.inf))
    return tf.where(tf.reduce_any(mask > 0.0), largest, 0.0)


def statistics(name: str, terms: tf.Tensor, mask: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the mean, minimum, maximum and standard deviation of `terms` where the mask is 1.

    Returns:
      NAME/mean, NAME/min, NAME/max and NAME/deviation: scalars, 0 if the mask is 0 everywhere.
    """
    mean = masked_mean(terms, mask)
    return {
        f"{name}/mean": mean,
        f"{name}/min": -masked_max(-terms, mask),
        f"{name}/max": masked_max(terms, mask),
        f"{name}/deviation": tf.sqrt(masked_mean(tf.square(terms - mean), mask)),
    }


def explained_variance(values: tf.Tensor, targets: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Returns 1 - Var(target - V) / Var(target): 1 for a perfect baseline, 0 for a constant.

    Over the rows where the mask is 1; 0 where the targets do not vary. Scalar.
    """

    def variance(terms: tf.Tensor) -> tf.Tensor:
        return masked_mean(tf.square(terms - masked_mean(terms, mask)), mask)

    targets -= masked_max(targets, mask)  # exactly 0 where they do not vary
    spread = variance(targets)
    return tf.math.divide_no_nan(spread - variance(targets - values), spread)
