"""Slow truths, written to be obviously right: NumPy float64, loops, and the papers' own sums."""

from typing import NamedTuple

import numpy as np


class VTraceReturns(NamedTuple):
    vs: np.ndarray  # [T, ...]
    pg_advantages: np.ndarray  # [T, ...]


def vtrace(
    log_rhos: np.ndarray,  # [T, ...]
    discounts: np.ndarray,  # [T, ...]
    rewards: np.ndarray,  # [T, ...]
    values: np.ndarray,  # [T, ...]
    bootstrap_value: np.ndarray,  # [...]
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    lambda_: float = 1.0,
) -> VTraceReturns:
    """Equation (1) of arXiv 1802.01561 as printed, O(T^2), and section 4.2's advantage.

    v_s = V(x_s) + sum_{t=s}^{T-1} gamma^{t-s} (prod_{i=s}^{t-1} c_i) delta_t V, where gamma^{t-s}
    is the product of the discounts from s to t - 1.
    """
    log_rhos, discounts, rewards, values, bootstrap_value = (
        np.asarray(x, np.float64) for x in (log_rhos, discounts, rewards, values, bootstrap_value)
    )
    weights = np.exp(log_rhos)
    rhos = _clip(weights, clip_rho_threshold)
    pg_rhos = _clip(weights, clip_pg_rho_threshold)
    cs = lambda_ * _clip(weights, clip_c_threshold)
    length = len(rewards)
    next_values = [*values[1:], bootstrap_value]  # V(x_{t+1})

    vs = []
    for s in range(length):
        v = values[s]
        for t in range(s, length):
            gamma = np.prod(discounts[s:t], axis=0)
            trace = np.prod(cs[s:t], axis=0)
            delta = rhos[t] * (rewards[t] + discounts[t] * next_values[t] - values[t])
            v = v + gamma * trace * delta
        vs.append(v)

    next_vs = [*vs[1:], bootstrap_value]  # v_{s+1}, and V(x_T) at the end
    pg_advantages = [
        pg_rhos[s] * (rewards[s] + discounts[s] * next_vs[s] - values[s]) for s in range(length)
    ]
    return VTraceReturns(np.stack(vs), np.stack(pg_advantages))


def _clip(weights: np.ndarray, threshold: float | None) -> np.ndarray:
    return weights if threshold is None else np.minimum(weights, threshold)
