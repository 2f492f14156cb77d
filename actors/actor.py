"""The unroll loop: steps environments with an agent and yields unrolls. Knows nothing of gRPC.

An actor holds one or more groups of environments. While the agent infers one group's actions, the
environments of the others step. All groups go through the same rows together and take new
parameters between the last row of an unroll and the first of the next, so no unroll mixes two
versions. The task changes at the same boundary; each task has its own groups, which keep their
state while another task is played.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.environments.base import Environment
from impala.environments.episodes import EpisodeStatistics
from impala.types import (
    ActorUnrolls,
    AgentOutput,
    Array,
    ArraySpec,
    EnvironmentFault,
    Episode,
    Nest,
    Parameters,
    TimeStep,
    Unroll,
)


class Actor:
    """Unrolls an agent in groups of environments.

    Args:
      environments: makes the groups of a task, each of E environments, when it is first played;
        while actions of one are inferred the others step. The caller closes them. Every task has
        the same number of groups.
      agent: its variables are overwritten by the actor.
      unroll_length: T, in agent steps.
      seed: seed of the agent's actions.
    """

    def __init__(
        self,
        environments: Callable[[int], Sequence[Environment]],
        agent: Agent,
        unroll_length: int,
        seed: int,
    ):
        if unroll_length < 1:
            raise ValueError(f"unroll_length is {unroll_length}, it must be at least 1")
        self._environments = environments
        self._agent = agent
        self._policy = _CompiledAgent(agent)
        self._unroll_length = unroll_length
        self._seed = seed
        self._held = (0, 0)  # incarnation and version of what is in agent.variables; none yet
        self._groups: dict[int, list[_Group]] = {}  # of each task that was played

    def run(
        self,
        parameters: Callable[[], Parameters],
        task: Callable[[], int] = lambda: 0,
        prefetch: Callable[[], None] = lambda: None,
    ) -> Iterator[ActorUnrolls]:
        """Yields one `ActorUnrolls` per group and unroll, the groups in turn, for ever.

        The yielded arrays are the actor's own buffers: they are valid until the generator is asked
        for the next item.

        Args:
          parameters: returns the newest parameters without waiting. Called before each round of
            unrolls.
          task: returns the task to play; called just after `parameters`.
          prefetch: called when three quarters of a round are done, so that new parameters arrive
            in time for the next round without being a round old.
        """
        last = self._unroll_length
        soon = max(1, 3 * last // 4)
        self._take(parameters())
        groups = self._groups_of(task())
        for group in groups:
            group.begin(self._held)
            group.act(0)
        while True:
            for row in range(1, last):
                if row == soon:
                    prefetch()
                for group in groups:
                    group.observe(row)
                    group.act(row)
            if soon == last:
                prefetch()
            next_groups: list[_Group] = []
            for place, group in enumerate(groups):
                group.observe(last)
                yield group.finish()
                if not next_groups:  # the other groups' row T is under way already
                    self._take(parameters())
                    next_groups = self._groups_of(task())
                next_groups[place].begin(self._held)
                next_groups[place].act(0)
            groups = next_groups

    def _groups_of(self, task: int) -> list["_Group"]:
        if task not in self._groups:
            environments = self._environments(task)
            if not environments:
                raise ValueError("an actor needs at least one group of environments, got none")
            seeds = np.random.SeedSequence([self._seed, task]).spawn(len(environments))
            self._groups[task] = [
                _Group(task, place, environment, self._policy, self._unroll_length, seed)
                for place, (environment, seed) in enumerate(zip(environments, seeds, strict=True))
            ]
        return self._groups[task]

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

    The state carried from row to row is the core state and the seed of the next action.
    """

    def __init__(self, agent: Agent):
        self._agent = agent
        self._graph = tf.function(self._trace)
        self._timestep_like: Nest = None
        self._state_like: Nest = None
        self._output_like: Nest = None

    def initial_state(self, num_envs: int, seed: Sequence[int]) -> Nest:
        """Returns the core state of `num_envs` environments and the seed of the first action."""
        state = self._agent.initial_state(num_envs), np.asarray(seed, np.int32)
        return tree.map_structure(tf.convert_to_tensor, state)

    def compile(self, timestep: TimeStep, state: Nest) -> tuple[Callable, AgentOutput]:
        """Returns the graph for these shapes, and the spec of its output.

        The graph maps the leaves of time step and state to those of output and state.
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
    """E environments, the unroll being written, and the agent's state between rows."""

    def __init__(
        self,
        task: int,
        place: int,
        environment: Environment,
        policy: _CompiledAgent,
        unroll_length: int,
        seed: np.random.SeedSequence,
    ):
        self._task, self._place = task, place
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
        self._faults: list[EnvironmentFault] = []

    def doing(self) -> str:
        """Returns which group this is, for the error about an actor that hangs."""
        return f"in group {self._place} of task {self._task}"

    def begin(self, held: tuple[int, int]) -> None:
        """Starts the next unroll at the last row of the previous one, with parameters `held`."""
        self._held = held
        for leaf in self._timestep_leaves:
            np.copyto(leaf[0], leaf[self._last])
        for leaf in self._output_leaves:
            np.copyto(leaf[0], leaf[self._last])
        core_state, _ = tree.unflatten_as(self._state_like, self._state)
        self._core_state = tree.map_structure(lambda x: x.numpy(), core_state)
        self._frames[:] = 0
        self._episodes = []
        self._faults = []

    def act(self, row: int) -> None:
        """Infers from `row` the actions that lead to the next row, and starts the step."""
        observed = [tf.convert_to_tensor(leaf[row]) for leaf in self._timestep_leaves]
        results = self._act(*observed, *self._state)
        num_outputs = len(self._output_leaves)
        self._state = results[num_outputs:]
        self._write(self._output_leaves, row + 1, [x.numpy() for x in results[:num_outputs]])
        self._environment.send(tree.map_structure(lambda x: x[row + 1], self._outputs.action))

    def observe(self, row: int) -> None:
        """Waits for the step that `act` started and writes the result to `row`."""
        step = self._environment.recv()
        self._write(self._timestep_leaves, row, tree.flatten(step.timestep))
        self._frames += step.frames
        self._episodes += [episode for _, episode in self._statistics.update(step)]
        self._faults += step.faults

    def finish(self) -> ActorUnrolls:
        """Returns the finished unroll, once its last row has been observed."""
        incarnation, version = self._held
        unroll = Unroll(
            timestep=self._timesteps,
            output=self._outputs,
            core_state=self._core_state,
            frames=self._frames,
            parameter_version=version,
        )
        return ActorUnrolls(unroll, self._task, incarnation, self._episodes, self._faults)

    @staticmethod
    def _write(leaves: list[np.ndarray], row: int, values: Sequence[Array]) -> None:
        for leaf, value in zip(leaves, values, strict=True):
            np.copyto(leaf[row], value)
