"""The unroll loop: environments and an agent in, unrolls out. It knows of no wire.

An actor holds one or more groups of environments. While one group is inferred the others' step,
and all groups go through the same rows together, so that new parameters taken at the boundary are
taken by every group between its last row and its first: no unroll mixes two versions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tree

from impala.environments.base import Environment
from impala.episodes import EpisodeStatistics
from impala.types import (
    AgentOutput,
    Array,
    ArraySpec,
    Episode,
    Nest,
    Parameters,
    TimeStep,
    Unroll,
)


class ActorUnrolls(NamedTuple):
    """What the E environments of one group gave together."""

    unroll: (
        Unroll  # [T + 1, E, ...]; core_state [E, ...], frames [E] int32, parameter_version an int
    )
    incarnation: int  # of the learner whose parameters acted in rows 1..T
    episodes: list[Episode]  # that ended in rows 1..T


class Actor:
    """Unrolls an agent in groups of environments.

    Args:
      environments: the groups, each of E environments; while one is inferred the others step. They
        stay the caller's, who closes them.
      agent: an `impala.agent.Agent`, whose variables the actor overwrites.
      unroll_length: T, in agent steps.
      seed: of environments and actions.
    """

    def __init__(
        self, environments: Sequence[Environment], agent: Any, unroll_length: int, seed: int
    ):
        if not environments:
            raise ValueError("an actor needs at least one group of environments, got none")
        if unroll_length < 1:
            raise ValueError(f"unroll_length is {unroll_length}, it must be at least 1")
        self._agent = agent
        self._unroll_length = unroll_length
        self._held = (0, 0)  # incarnation and version of what is in agent.variables; none yet
        seeds = np.random.SeedSequence(seed).spawn(len(environments))
        policy = _CompiledAgent(agent)
        self._groups = [
            _Group(environment, policy, unroll_length, group_seed)
            for environment, group_seed in zip(environments, seeds, strict=True)
        ]

    def run(self, parameters: Callable[[], Parameters]) -> Iterator[ActorUnrolls]:
        """Yields one `ActorUnrolls` per group and unroll, the groups in turn, for ever.

        The arrays of what is yielded are the actor's own buffers: they are valid until the
        generator is asked for the next one.

        Args:
          parameters: gives the newest parameters, at once. Asked once before each round of unrolls.
        """
        last = self._unroll_length
        self._take(parameters())
        for group in self._groups:
            group.begin(self._held)
            group.act(0)
        while True:
            for row in range(1, last):
                for group in self._groups:
                    group.observe(row)
                    group.act(row)
            for group in self._groups:
                group.observe(last)
                yield group.finish()
                if group is self._groups[0]:  # the other groups' row T is under way already
                    self._take(parameters())
                group.begin(self._held)
                group.act(0)

    def _take(self, parameters: Parameters) -> None:
        newest = parameters.incarnation, parameters.version
        if newest == self._held:
            return
        variables = self._agent.variables
        if len(variables) != len(parameters.values):
            raise ValueError(
                f"version {parameters.version} holds {len(parameters.values)} arrays, "
                f"the agent has {len(variables)} variables"
            )
        for variable, value in zip(variables, parameters.values, strict=True):
            variable.assign(value)
        self._held = newest


class _CompiledAgent:
    """`agent.step` as a graph over flat lists of tensors, which is faster to call than over nests.

    The state is what lives between two rows: the core state and the seed of the next action.
    """

    def __init__(self, agent: Any):
        self._agent = agent
        self._graph = tf.function(self._trace)
        self._timestep_like: Nest = None
        self._state_like: Nest = None
        self._output_like: Nest = None

    def initial_state(self, num_envs: int, seed: Sequence[int]) -> Nest:
        """(core state, seed of the first action), as tensors."""
        state = self._agent.initial_state(num_envs), np.asarray(seed, np.int32)
        return tree.map_structure(tf.convert_to_tensor, state)

    def compile(self, timestep: TimeStep, state: Nest) -> tuple[Callable, AgentOutput]:
        """The graph for these shapes, and the spec of its output.

        It is called with the leaves of time step and state, and gives those of output and state.
        """
        self._timestep_like, self._state_like = timestep, state
        leaves = tree.flatten((timestep, state))
        act = self._graph.get_concrete_function(*(tf.TensorSpec(x.shape, x.dtype) for x in leaves))
        return act, self._output_like

    def _trace(self, *leaves: tf.Tensor) -> list[tf.Tensor]:
        timestep, (core_state, seed) = tree.unflatten_as(
            (self._timestep_like, self._state_like), leaves
        )
        output, core_state = self._agent.step(timestep, core_state, seed)
        self._output_like = tree.map_structure(
            lambda x: ArraySpec(tuple(x.shape), np.dtype(x.dtype.as_numpy_dtype)), output
        )
        return tree.flatten((output, (core_state, seed + [0, 1])))


class _Group:
    """E environments, the unroll they are writing, and what the agent remembers between rows."""

    def __init__(
        self,
        environment: Environment,
        policy: _CompiledAgent,
        unroll_length: int,
        seed: np.random.SeedSequence,
    ):
        environment_seed, *action_seed = (int(s) for s in seed.generate_state(3) >> 1)
        num_envs = environment.num_envs
        first = environment.reset(environment_seed)
        state = policy.initial_state(num_envs, action_seed)
        self._environment = environment
        self._act, output = policy.compile(first, state)
        self._state_like = state
        self._state: list[tf.Tensor] = tree.flatten(state)  # before the row that is acted on next

        rows = unroll_length + 1
        self._last = unroll_length
        self._timesteps: TimeStep = tree.map_structure(
            lambda x: np.zeros((rows, *x.shape), x.dtype), first
        )
        self._outputs: AgentOutput = tree.map_structure(
            lambda x: np.zeros((rows, *x.shape), x.dtype), output
        )
        self._timestep_leaves: list[np.ndarray] = tree.flatten(self._timesteps)
        self._output_leaves: list[np.ndarray] = tree.flatten(self._outputs)
        # The first unroll begins with the reset, as if an unroll had ended there.
        self._write(self._timestep_leaves, unroll_length, tree.flatten(first))

        self._held: tuple[int, int] = (0, 0)
        self._core_state: Nest = ()
        self._frames = np.zeros(num_envs, np.int32)
        self._statistics = EpisodeStatistics(num_envs)
        self._episodes: list[Episode] = []

    def begin(self, held: tuple[int, int]) -> None:
        """Starts an unroll where the last one ended, to be acted with the parameters `held`."""
        self._held = held
        for leaf in self._timestep_leaves:
            np.copyto(leaf[0], leaf[self._last])
        for leaf in self._output_leaves:
            np.copyto(leaf[0], leaf[self._last])
        core_state, _ = tree.unflatten_as(self._state_like, self._state)
        self._core_state = tree.map_structure(lambda x: x.numpy(), core_state)
        self._frames[:] = 0
        self._episodes = []

    def act(self, row: int) -> None:
        """Chooses from `row` the actions that lead to the next row, and starts them."""
        observed = [tf.convert_to_tensor(leaf[row]) for leaf in self._timestep_leaves]
        results = self._act(*observed, *self._state)
        num_outputs = len(self._output_leaves)
        self._state = results[num_outputs:]
        self._write(self._output_leaves, row + 1, [x.numpy() for x in results[:num_outputs]])
        self._environment.send(tree.map_structure(lambda x: x[row + 1], self._outputs.action))

    def observe(self, row: int) -> None:
        """Waits for the step that `act` started and writes what it gave to `row`."""
        step = self._environment.recv()
        self._write(self._timestep_leaves, row, tree.flatten(step.timestep))
        self._frames += step.frames
        self._episodes += [episode for _, episode in self._statistics.update(step)]

    def finish(self) -> ActorUnrolls:
        """The unroll whose last row has just been observed."""
        incarnation, version = self._held
        unroll = Unroll(
            timestep=self._timesteps,
            output=self._outputs,
            core_state=self._core_state,
            frames=self._frames,
            parameter_version=version,
        )
        return ActorUnrolls(unroll, incarnation, self._episodes)

    @staticmethod
    def _write(leaves: list[np.ndarray], row: int, values: Sequence[Array]) -> None:
        for leaf, value in zip(leaves, values, strict=True):
            np.copyto(leaf[row], value)
