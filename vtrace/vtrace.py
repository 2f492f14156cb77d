"""V-trace, the off-policy correction of IMPALA.

Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted
Actor-Learner Architectures", section 4, arXiv 1802.01561. Symbols are the paper's.
"""

import math
from typing import NamedTuple

import tensorflow as tf

# Up to this many steps the recursion is unrolled in the graph, which saves the cost of a loop;
# beyond it, building the graph would take too long.
_MAX_UNROLLED_STEPS = 128


class VTraceReturns(NamedTuple):
    """Value targets and advantages of T steps; no gradient flows through either."""

    vs: tf.Tensor  # [T, B, ...] v_s, the target of V(x_s)
    pg_advantages: tf.Tensor  # [T, B, ...] rho_s (r_s + gamma_s v_{s+1} - V(x_s))


def from_importance_weights(
    log_rhos: tf.Tensor,
    discounts: tf.Tensor,
    rewards: tf.Tensor,
    values: tf.Tensor,
    bootstrap_value: tf.Tensor,
    *,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """Returns value targets and advantages of target policy pi from data of behaviour policy mu.

    All tensors have the same dtype, float32 or float64. Works in eager mode, in a `tf.function` (T
    and B may be unknown) and compiled by XLA.

    Args:
      log_rhos: [T, B, ...] log(pi(a_t | x_t) / mu(a_t | x_t)). -inf cuts the trace at step t:
        earlier targets bootstrap from V(x_t), and the step itself has no temporal difference.
      discounts: [T, B, ...] gamma times the environment's discount; 0 where an episode terminated.
      rewards: [T, B, ...] r_t.
      values: [T, B, ...] V(x_t).
      bootstrap_value: [B, ...] V(x_T).
      clip_rho_threshold: rho-bar, clips the weights of the temporal differences; it determines the
        fixed point, between the value function of mu (near 0) and that of pi (None: no clipping).
      clip_pg_rho_threshold: clips the weights of the advantages. None: no clipping.
      clip_c_threshold: c-bar, clips the weights of the trace; it influences the speed of
        convergence, not the fixed point. None: no clipping.
      lambda_: 0 to 1, multiplies the weights of the trace.

    Returns:
      Targets and advantages, [T, B, ...] each. The advantage of the last step bootstraps from
      `bootstrap_value`.

    Raises:
      TypeError: if a tensor is neither float32 nor float64, or they differ.
      ValueError: if shapes do not agree, T is 0, or a number is outside its range.
    """
    _check_threshold("clip_rho_threshold", clip_rho_threshold)
    _check_threshold("clip_pg_rho_threshold", clip_pg_rho_threshold)
    _check_threshold("clip_c_threshold", clip_c_threshold)
    if not 0.0 <= lambda_ <= 1.0:
        raise ValueError(f"lambda_ is {lambda_}; it must be from 0 to 1.")
    log_rhos, discounts, rewards, values, bootstrap_value = _tensors(
        log_rhos=log_rhos,
        discounts=discounts,
        rewards=rewards,
        values=values,
        bootstrap_value=bootstrap_value,
    )

    rhos = tf.exp(log_rhos)
    clipped_rhos = _clip(rhos, clip_rho_threshold)
    cs = tf.math.multiply_no_nan(_clip(rhos, clip_c_threshold), lambda_)  # 0 times infinity is 0

    # Temporal differences: delta_t V = rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t)).
    next_values = tf.concat([values[1:], tf.expand_dims(bootstrap_value, 0)], axis=0)
    deltas = clipped_rhos * (rewards + discounts * next_values - values)

    # Remark 1: v_s - V(x_s) = delta_s V + gamma_s c_s (v_{s+1} - V(x_{s+1})).
    vs = values + _discounted_sums(deltas, tf.math.multiply_no_nan(cs, discounts))

    # Section 4.2, policy gradient: v_{s+1}, and V(x_T) behind the last step.
    next_vs = tf.concat([vs[1:], tf.expand_dims(bootstrap_value, 0)], axis=0)
    clipped_pg_rhos = _clip(rhos, clip_pg_rho_threshold)
    pg_advantages = clipped_pg_rhos * (rewards + discounts * next_vs - values)
    return VTraceReturns(vs, pg_advantages)


def _discounted_sums(terms: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns y [T, B, ...], where y_t = terms_t + weights_t y_{t+1} and y_T = 0."""
    last = tf.zeros_like(terms[0])
    if terms.shape[0] is None or terms.shape[0] > _MAX_UNROLLED_STEPS:

        def step(y: tf.Tensor, term_and_weight: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
            term, weight = term_and_weight
            return term + weight * y

        return tf.scan(step, (terms, weights), last, parallel_iterations=1, reverse=True)
    sums = [last]
    for term, weight in zip(tf.unstack(terms)[::-1], tf.unstack(weights)[::-1], strict=True):
        sums.append(term + weight * sums[-1])
    return tf.stack(sums[:0:-1])


def _clip(rhos: tf.Tensor, threshold: float | None) -> tf.Tensor:
    return rhos if threshold is None else tf.minimum(rhos, threshold)


def _check_threshold(name: str, threshold: float | None) -> None:
    if threshold is not None and (threshold < 0.0 or math.isnan(threshold)):
        raise ValueError(f"{name} is {threshold}; it must be 0 or more, or None not to clip.")


def _tensors(**arguments: tf.Tensor) -> list[tf.Tensor]:
    """Returns the arguments as tensors without gradients, after checking dtypes and shapes."""
    tensors = [tf.stop_gradient(tf.convert_to_tensor(value)) for value in arguments.values()]
    log_rhos = tensors[0]
    if log_rhos.shape.rank is not None and log_rhos.shape.rank < 2:
        raise ValueError(f"log_rhos has shape {log_rhos.shape}; it must be [T, B, ...].")
    if log_rhos.shape[0] == 0:
        raise ValueError(f"log_rhos has shape {log_rhos.shape}; T must be 1 or more.")
    for name, tensor in zip(arguments, tensors, strict=True):
        if tensor.dtype not in (tf.float32, tf.float64):
            raise TypeError(f"{name} is {tensor.dtype.name}; it must be float32 or float64.")
        if tensor.dtype != log_rhos.dtype:
            raise TypeError(
                f"{name} is {tensor.dtype.name} and log_rhos {log_rhos.dtype.name}; cast one."
            )
        expected = log_rhos.shape[1:] if name == "bootstrap_value" else log_rhos.shape
        if not tensor.shape.is_compatible_with(expected):
            raise ValueError(
                f"{name} has shape {tensor.shape}; with log_rhos {log_rhos.shape} "
                f"it must be {expected}."
            )
    return tensors
