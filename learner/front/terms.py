"""What a learner agrees with everyone who joins: shapes, settings, sizes, bounds."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import gymnasium as gym

from impala.agents.agent import Agent
from impala.config import parts, values
from impala.config.schema import Config
from impala.schedule import tasks
from impala.types import Unroll
from learner.front.bounds import MessageBounds, message_bounds
from protos import codec
from protos.impala.v1 import learner_pb2 as pb


class Terms(NamedTuple):
    """What holds for everyone who joins a run."""

    unroll_spec: Unroll  # a nest of ArraySpec of one environment, as for `Validator`
    parameter_specs: Sequence[pb.TensorSpec]  # of `Parameters.values`, in order
    config_json: str  # what actors need of the configuration
    seed: int  # the run's
    max_envs_per_message: int  # largest E
    max_in_flight: int  # messages without a receipt that an actor may have
    bounds: MessageBounds  # of the numbers in a message, as for `Validator`


def terms(
    config: Config,
    agent: Agent,
    unroll_spec: Unroll,
    played: Sequence[tasks.Task],
    action_space: gym.Space,
) -> Terms:
    """Returns the terms of a run.

    Args:
      config: of the run.
      agent: whose parameters travel.
      unroll_spec: a nest of ArraySpec of one environment.
      played: the run's tasks.
      action_space: through which all of them are played.
    """
    return Terms(
        unroll_spec,
        codec.specs(agent.variables),
        _config_json(config),
        seed=config.seed,
        max_envs_per_message=config.learner.max_envs_per_message,
        max_in_flight=config.learner.max_in_flight,
        bounds=message_bounds(config, played, action_space),
    )


def _config_json(config: Config) -> str:
    told = {
        name: values.to_dict(getattr(config, name))
        for name in ("environment", "tasks", "agent", "actor", "evaluator")
    } | parts.for_actors(config)
    if not config.evaluator.every_frames:
        told["evaluator"]["every_frames"] = max(1, tasks.total_frames(config) // 50)
    return json.dumps(told, sort_keys=True)
