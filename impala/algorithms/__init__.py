"""What is learned: an algorithm is the loss of a batch, and which variables it moves."""

from impala.algorithms.actor_critic import ActorCritic
from impala.algorithms.base import Algorithm, LossOutput
from impala.algorithms.critic import Critic
from impala.algorithms.impala import Impala
from impala.algorithms.q_learning import QLearning
from impala.algorithms.sac import Sac

__all__ = [
    "ALGORITHMS",
    "ActorCritic",
    "Algorithm",
    "Critic",
    "Impala",
    "LossOutput",
    "QLearning",
    "Sac",
]

ALGORITHMS: dict[str, type[Algorithm]] = {
    "impala": Impala,
    "actor_critic": ActorCritic,
    "critic": Critic,
    "q_learning": QLearning,
    "sac": Sac,
}
"""By the name that they and their settings have in a configuration."""
