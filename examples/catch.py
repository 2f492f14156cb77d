"""Learns Catch in one process, with a V-trace loss on this page: for reading, and for a debugger.

    python examples/catch.py

A run is serial: actor, replay mix and update follow each other in this thread, so `breakpoint()`
works in the loss below as in an environment. On two cores it takes less than a minute to a mean
return of 0.9 or more.
"""

import argparse
import math
import tempfile

import tensorflow as tf

import impala
import vtrace
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, LossOutput, Term
from impala.types import Batch

BASELINE_COST, ENTROPY_COST = 0.5, 0.01


class VTrace(Algorithm):
    """IMPALA's loss, Espeholt et al. 2018 (arXiv 1802.01561), section 4."""

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """Returns policy gradient, baseline and entropy loss of each of T x B steps."""
        output = self.unroll(batch)  # [T + 1, B]
        steps = losses.align(batch, output, self._objective)  # [T, B]: what led to what
        distribution = self.agent.distribution
        log_probs = distribution.log_prob(steps.target_policy, steps.actions)
        log_mus = distribution.log_prob(steps.behaviour_policy, steps.actions)
        returns = vtrace.from_importance_weights(
            log_rhos=tf.where(steps.mask > 0.0, log_probs - log_mus, -math.inf),
            discounts=steps.discounts,
            rewards=steps.rewards,
            values=steps.values,
            bootstrap_value=steps.bootstrap_value,
        )
        entropies = distribution.entropy(steps.target_policy)
        terms = {
            "policy": Term(losses.policy_gradient(log_probs, returns.pg_advantages), steps.mask),
            "baseline": Term(losses.baseline(steps.values, returns.vs), steps.mask, BASELINE_COST),
            "entropy": Term(losses.entropy(entropies), steps.mask, ENTROPY_COST),
        }
        return LossOutput.of(terms, {"policy/entropy": losses.masked_mean(entropies, steps.mask)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-frames", type=int, default=200_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logdir:
        trained = impala.train(
            "catch", logdir, serial=True, algorithm=VTrace, total_frames=options.total_frames
        )
    print(f"mean return {trained.returns['Catch']:.2f}")
