"""What algorithms of a policy and a baseline share: a bonus for the entropy, and teachers."""

import tensorflow as tf

from impala.agents.agent import Agent
from impala.algorithms import losses
from impala.algorithms.base import Algorithm, Sums, Term
from impala.algorithms.losses import Aligned
from impala.algorithms.multiplier import Multiplier
from impala.algorithms.teachers import Teachers
from impala.config.schema import ObjectiveConfig, PolicyGradientConfig
from impala.types import Batch


class PolicyGradient(Algorithm):
    """Base class of algorithms that train a policy and a baseline."""

    _config: PolicyGradientConfig

    def __init__(
        self,
        agent: Agent,
        objective: ObjectiveConfig,
        config: PolicyGradientConfig,
        name: str | None = None,
    ) -> None:
        super().__init__(agent, objective, config, name=name)
        self.teachers: Teachers | None = None
        """Whom the policy imitates; set by `impala.parts.build`."""
        self._entropy_cost: Multiplier | None = None
        if config.entropy_target:
            self._entropy_cost = Multiplier(config.entropy_cost, agent.distribution.num_parts)

    def shared_terms(
        self,
        batch: Batch,
        steps: Aligned,
        entropies: tf.Tensor,
        mask: tf.Tensor,
        progress: tf.Tensor | float,
    ) -> tuple[dict[str, Term], dict[str, tf.Tensor]]:
        """Returns the terms of entropy and teachers, and what `LossOutput.sums` needs for them.

        Args:
          batch: [T + 1, B, ...].
          steps: the same, aligned.
          entropies: [T, B] of pi.
          mask: [T, B], where the entropy counts.
          progress: [] share of the phase done.
        """
        config, over = self._config, self._config.entropy_anneal
        terms, sums = dict[str, Term](), dict[str, tf.Tensor]()
        if self.teachers is not None:
            scales = self.value_scales(batch)
            terms, sums = self.teachers.terms(self.agent, batch, steps, scales, progress)
        if self._entropy_cost is None:
            cost = losses.annealed(config.entropy_cost, config.entropy_cost_end, progress, over)
        else:
            cost = self._entropy_cost.value
            share = losses.annealed(
                config.entropy_target, config.entropy_target_end, progress, over
            )
            target = self.agent.distribution.entropy_at(share, steps.target_policy)
            sums |= {"lacking_entropy": losses.masked(target - entropies, mask), "steps": mask}
        terms["entropy"] = Term(losses.entropy(entropies), mask, cost)
        return terms, sums

    def after_update(self, progress: tf.Tensor | float, sums: Sums) -> None:
        """Moves the weights that are learned towards what keeps to their targets."""
        if self._entropy_cost is not None:
            self._entropy_cost.update(sums["lacking_entropy"], sums["steps"])
        if self.teachers is not None:
            self.teachers.after_update(sums)
