"""Demonstrations as rows of unrolls, from which batches are drawn."""

import logging
from collections.abc import Sequence

import numpy as np
import tree

from impala.agents.agent import Agent
from impala.config.schema import Config
from impala.environments import demonstrations
from impala.environments.demonstrations import Stream
from impala.environments.spaces import Spaces
from impala.runtime import process
from impala.schedule import tasks
from impala.types import AgentOutput, Nest, StepType, Unroll
from learner.data.rows import Layout

_log = logging.getLogger(__name__)

_AT_ONCE = 256  # unrolls that are written together


class Demonstrations:
    """Unrolls of demonstrations, of which each is drawn once before any is drawn again.

    Args:
      rows: uint8 [N, row_bytes], one or more.
      seed: of the order.
    """

    def __init__(self, rows: np.ndarray, seed: Sequence[int]) -> None:
        self._rows = rows
        self._rng = np.random.default_rng(seed)
        self._order = np.zeros(0, np.int64)  # that is left of this pass

    def draw(self, rows: np.ndarray) -> None:
        """Fills rows, uint8 [B, row_bytes]."""
        while len(self._order) < len(rows):
            self._order = np.concatenate([self._order, self._rng.permutation(len(self._rows))])
        drawn, self._order = np.split(self._order, [len(rows)])
        np.take(self._rows, drawn, axis=0, out=rows)


def open_demonstrations(
    config: Config, agent: Agent, spaces: Spaces, layout: Layout, seed: Sequence[int]
) -> Demonstrations:
    """Returns the demonstrations that a configuration names.

    Args:
      config: the configuration.
      agent: that learns from them.
      spaces: that it was made for.
      layout: of rows.
      seed: of the order in which they are drawn.

    Raises:
      ValueError: they are not there, do not fit the agent, or take more memory than replay may.
    """
    name = config.demonstrations.source
    of_dataset, episodes = demonstrations.load(name)
    memory = process.replay_memory(config.replay.memory)
    stream = demonstrations.stream(name, of_dataset, episodes, spaces, memory)
    length = config.learner.unroll_length
    size = len(stream.timestep.reward)  # of steps, and of rows that begin episodes
    count = -(-size // length)
    if count * layout.row_bytes > memory:
        raise ValueError(
            f"The demonstrations of {name} take {count * layout.row_bytes:,} bytes of memory, but "
            f"replay.memory allows {memory:,}: raise it, or give fewer episodes."
        )
    rows = layout.empty(count)
    (task,) = tasks.make(config.environment, config.tasks)
    frames = tasks.frames_per_step(task, config.limits)
    for start in range(0, count, _AT_ONCE):
        begins = length * np.arange(start, min(start + _AT_ONCE, count))
        unroll = _unrolls(agent, config.agent.frame_stack, stream, begins, length, frames)
        layout.write(unroll, slice(None), rows[start : start + len(begins)])
    _log.info(
        "%s: %s episodes, %s steps.", name, f"{stream.num_episodes:,}", f"{stream.num_steps:,}"
    )
    return Demonstrations(rows, seed)


def _unrolls(
    agent: Agent, stacked: int, stream: Stream, begins: np.ndarray, length: int, frames: int
) -> Unroll:
    """Returns the unrolls that begin at some rows; the stream begins anew at its end.

    Frames are stacked from those before. The state of a core is that of an episode's beginning, as
    the network that could have computed it has not learned.
    """

    def part(first: int, count: int) -> Stream:
        rows = (begins + np.arange(first, first + count)[:, np.newaxis]) % size
        taken: Stream = tree.map_structure(lambda x: x[rows], stream)
        return taken

    size, batch = len(stream.timestep.reward), len(begins)
    state: Nest = agent.state_of_frames(part(-stacked, stacked).timestep)
    state = tree.map_structure(lambda x: x.numpy(), state)
    timestep, action = part(0, length + 1)
    policy = np.zeros((length + 1, batch, agent.distribution.num_parameters), np.float32)
    is_step = timestep.step_type[1:] != StepType.FIRST
    return Unroll(
        timestep,
        AgentOutput(action, policy, baseline=np.zeros((length + 1, batch), np.float32)),
        core_state=state,
        frames=(frames * is_step.sum(axis=0)).astype(np.int32),
        parameter_version=np.full(batch, -1, np.int64),
    )
