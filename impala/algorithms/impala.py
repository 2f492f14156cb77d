"""IMPALA: actor-critic with V-trace correction of policy lag, and CLEAR's losses on replay.

Espeholt et al. 2018, arXiv 1802.01561; Rolnick et al. 2018, arXiv 1811.11682. For very old data,
LASER's trust region: Schmitt et al. 2020, arXiv 1909.11583. For returns of different size, PopArt:
Hessel et al. 2018, arXiv 1809.04474.
"""

import math
from typing import Any

import tensorflow as tf

import vtrace
from impala.algorithms import losses
from impala.algorithms.base import LossOutput, Targets, Term
from impala.algorithms.policy_gradient import PolicyGradient
from impala.config import demands
from impala.config.schema import ImpalaConfig
from impala.types import Batch

_EPSILON = 1e-6  # section 5.2.2


class Impala(PolicyGradient):
    """Trains policy and baseline on unrolls of a policy that may be some updates older."""

    demands = demands.IMPALA
    _config: ImpalaConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._config.correction == "epsilon" and self.agent.distribution.has_density:
            raise ValueError(
                "impala.correction is epsilon, which adds 1e-6 to probabilities; for actions of a "
                "box there are densities, in its unit: set it to vtrace, one_step or none."
            )

    def loss(self, batch: Batch, progress: tf.Tensor | float = 0.0) -> LossOutput:
        """V-trace policy gradient, baseline and -entropy; on replayed rows, also cloning."""
        config, distribution = self._config, self.agent.distribution

        # Outputs of the current network for all T + 1 observations.
        network_output = self.unroll(batch)
        steps = losses.align(batch, network_output, self._objective, self.burn_in)
        trusted = steps.mask
        if config.trust_region:
            distances = distribution.kl(steps.target_policy, steps.behaviour_policy)
            trusted = losses.trust_region(steps.mask, distances, config.trust_region)

        # Log importance weights of target over behaviour policy. -inf on a seam cuts the trace, so
        # that the value of the LAST row bootstraps its episode; so does V(x_t) where mu is not
        # trusted.
        log_probs = distribution.log_prob(steps.target_policy, steps.actions)
        behaviour_log_probs = distribution.log_prob(steps.behaviour_policy, steps.actions)
        log_rhos = tf.where(trusted > 0.0, log_probs - behaviour_log_probs, -math.inf)

        # Value targets and advantages (section 4.1); without importance weights n-step returns.
        is_vtrace = config.correction == "vtrace"
        returns = vtrace.from_importance_weights(
            log_rhos=log_rhos if is_vtrace else tf.where(trusted > 0.0, 0.0, -math.inf),
            discounts=steps.discounts,
            rewards=steps.rewards,
            values=steps.values,
            bootstrap_value=steps.bootstrap_value,
            clip_rho_threshold=config.clip_rho_threshold,
            clip_pg_rho_threshold=config.clip_pg_rho_threshold,
            clip_c_threshold=config.clip_c_threshold,
            lambda_=config.vtrace_lambda,
        )
        scales = self.value_scales(batch)
        rhos = tf.exp(log_rhos)
        advantages = losses.normalised(returns.pg_advantages, scales)
        if config.correction == "one_step":
            advantages *= tf.minimum(rhos, config.clip_pg_rho_threshold)
        if config.clip_advantage_to_positive:
            advantages = tf.maximum(advantages, 0.0)

        # The three gradients (section 4.2).
        entropies = distribution.entropy(steps.target_policy)
        if config.correction == "epsilon":
            log_probs = tf.math.log(tf.exp(log_probs) + _EPSILON)
        policy_gradient = losses.policy_gradient(log_probs, advantages)
        values, targets, behaviour_values = (
            losses.normalised(x, scales) for x in (steps.values, returns.vs, steps.behaviour_values)
        )
        baseline = losses.baseline(values, targets)
        shared, sums = self.shared_terms(batch, steps, entropies, trusted, progress)

        # Cloning against forgetting (CLEAR: Rolnick et al. 2018, arXiv 1811.11682, section 3): on
        # replayed rows, keep policy and value close to the recorded ones. The value's square is
        # without the half of the baseline's.
        kls = distribution.kl(steps.behaviour_policy, steps.target_policy)
        value_cloning = tf.square(values - tf.stop_gradient(behaviour_values))
        replayed = steps.mask * tf.cast(steps.is_replay, tf.float32)

        terms = {
            "policy_gradient": Term(policy_gradient, trusted),
            "baseline": Term(baseline, trusted, config.baseline_cost),
            **shared,
            "policy_cloning": Term(kls, replayed, config.policy_cloning_cost),
            "value_cloning": Term(value_cloning, replayed, config.value_cloning_cost),
        }

        # Actors and learner round differently: a weight of 1 + 1e-6 does not count as clipped.
        rho_is_clipped = tf.cast(rhos > 1.001 * config.clip_rho_threshold, tf.float32)
        learned = {
            "vtrace/rho_mean": tf.minimum(rhos, config.clip_rho_threshold),
            "vtrace/rho_clip_fraction": rho_is_clipped,
            "vtrace/vs_mean": returns.vs,
        }
        everywhere = {
            "policy/entropy": entropies,
            "policy/kl_behaviour": kls,
            "baseline/mean": steps.values,
        }
        metrics = {
            name: losses.masked_mean(term, mask)
            for means, mask in ((learned, trusted), (everywhere, steps.mask))
            for name, term in means.items()
        }
        if config.trust_region:
            metrics["trust_region/left_out"] = losses.masked_mean(1.0 - trusted, steps.mask)
            metrics["trust_region/kl"] = losses.masked_mean(distances, steps.mask)
        metrics["baseline/explained_variance"] = self.explained_variance(
            batch, steps.values, returns.vs, trusted
        )
        return LossOutput.of(
            terms, metrics, {"baseline": steps.values}, Targets(returns.vs, trusted), sums
        )
