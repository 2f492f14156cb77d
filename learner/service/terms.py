"""The terms of a run, which everyone who joins is told, and what the service judges by."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from impala.config.schema import ActorConfig, AgentConfig, ChecksConfig, Config
from impala.environments.spaces import Spaces, leaves
from impala.schedule import tasks
from impala.types import Unroll
from learner.data.bounds import (
    MOST_NAMES,
    OBSERVATION,
    POLICY_PARAMETER,
    MessageBounds,
    message_bounds,
    most_baseline,
)
from learner.service import settings
from protos import codec
from protos.impala.v1 import learner_pb2 as pb


class Terms(NamedTuple):
    """The terms for everyone who joins a run."""

    unroll_spec: Unroll  # a nest of ArraySpec of one environment, as for `Validator`
    parameter_specs: Sequence[pb.TensorSpec]  # of `Parameters.values`, in order
    settings: str  # what actors need of the configuration, as JSON
    agreed: str  # the part of them that must be equal for experience to be accepted
    seed: int  # the run's
    is_deterministic: bool  # actors are seeded by it and their index alone
    max_envs_per_message: int  # largest E
    max_in_flight: int  # messages without a receipt that an actor may have
    bounds: MessageBounds  # of the numbers in a message, as for `Validator`
    spaces: Spaces  # of one environment
    checks: ChecksConfig
    agent: AgentConfig = AgentConfig()  # its settings
    hang_seconds: float = ActorConfig().hang_seconds  # that an actor may take for a row

    @property
    def limits(self) -> pb.Limits:
        """Returns what a message may hold, for actors."""
        limits = self.bounds.limits
        return pb.Limits(
            num_envs=self.max_envs_per_message,
            reward=limits.reward,
            observation=OBSERVATION,
            policy_parameter=POLICY_PARAMETER,
            baseline=most_baseline(limits),
            info_names=MOST_NAMES,
            frames_per_step=self.bounds.frames_per_step,
        )


def terms(
    config: Config,
    variables: Sequence[Any],
    unroll_spec: Unroll,
    played: Sequence[tasks.Task],
    spaces: Spaces,
) -> Terms:
    """Returns the terms of a run.

    Args:
      config: the run's configuration.
      variables: of the agent, which are sent to actors.
      unroll_spec: a nest of ArraySpec of one environment.
      played: the run's tasks.
      spaces: common to all tasks.

    """
    return Terms(
        unroll_spec,
        codec.specs(list(variables)),
        settings.for_actors(config, played),
        settings.agreed(config, played),
        seed=config.seed,
        is_deterministic=config.deterministic,
        max_envs_per_message=config.learner.max_envs_per_message,
        max_in_flight=config.learner.max_in_flight,
        bounds=message_bounds(config, played, spaces),
        spaces=spaces,
        checks=config.checks,
        agent=config.agent,
        hang_seconds=config.actor.hang_seconds,
    )


def described(space: gym.Space, name: str) -> list[pb.Space]:
    """Returns the leaves of a space as actors are told of them, in the order in which they travel.

    Args:
      space: of an observation or an action.
      name: what their names begin with.
    """
    return [_described(leaf, path) for path, leaf in leaves(space, name)]


def _described(leaf: gym.Space, name: str) -> pb.Space:
    message = pb.Space(name=name)
    match leaf:
        case gym.spaces.Box():
            message.kind = pb.Space.KIND_BOX
            message.low.extend(_bounds(leaf.low))
            message.high.extend(_bounds(leaf.high))
        case gym.spaces.Discrete():
            message.kind = pb.Space.KIND_DISCRETE
            message.start.append(int(leaf.start))
            message.n.append(int(leaf.n))
        case gym.spaces.MultiDiscrete():
            message.kind = pb.Space.KIND_MULTI_DISCRETE
            message.start.extend(leaf.start.reshape(-1).tolist())
            message.n.extend(leaf.nvec.reshape(-1).tolist())
        case gym.spaces.MultiBinary():
            message.kind = pb.Space.KIND_MULTI_BINARY
            message.start.extend([0] * math.prod(leaf.shape))
            message.n.extend([2] * math.prod(leaf.shape))
    return message


def _bounds(bounds: np.ndarray) -> list[float]:
    """Returns bounds of a Box: one number if all are the same."""
    numbers: list[float] = bounds.astype(np.float64).reshape(-1).tolist()
    return numbers[:1] if len(set(numbers)) == 1 else numbers
