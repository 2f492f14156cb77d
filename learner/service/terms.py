"""The terms of a run for everyone who joins: shapes, settings, sizes, bounds, the network."""

from collections.abc import Sequence
from typing import NamedTuple

from impala.config.schema import ChecksConfig, Config
from impala.environments.spaces import Spaces
from impala.schedule import tasks
from impala.types import Unroll
from learner.data.bounds import MessageBounds, message_bounds
from learner.service import description, settings
from protos import codec
from protos.impala.v1 import learner_pb2 as pb


class Terms(NamedTuple):
    """The terms for everyone who joins a run."""

    unroll_spec: Unroll  # a nest of ArraySpec of one environment, as for `Validator`
    parameter_specs: Sequence[pb.TensorSpec]  # of `Parameters.values`, in order
    settings: pb.ActorSettings  # what actors need of the configuration
    agreed: str  # the part of them that must be equal for experience to be accepted
    seed: int  # the run's
    is_deterministic: bool  # actors are seeded by it and their index alone
    max_envs_per_message: int  # largest E
    max_in_flight: int  # messages without a receipt that an actor may have
    bounds: MessageBounds  # of the numbers in a message, as for `Validator`
    described: pb.JoinReply  # only what is said of spaces, policy, network and limits
    checks: ChecksConfig


def terms(
    config: Config,
    variables: Sequence[description.Variable],
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

    Raises:
      OptionError: a setting is too large to be sent.
    """
    bounds = message_bounds(config, played, spaces)
    return Terms(
        unroll_spec,
        codec.specs(list(variables)),
        settings.message(config, played),
        settings.agreed(config, played),
        seed=config.seed,
        is_deterministic=config.deterministic,
        max_envs_per_message=config.learner.max_envs_per_message,
        max_in_flight=config.learner.max_in_flight,
        bounds=bounds,
        described=description.of(config, variables, spaces, bounds),
        checks=config.checks,
    )
