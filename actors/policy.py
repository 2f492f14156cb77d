"""What chooses an actor's actions: the agent's step, compiled by TensorFlow or in NumPy."""

import abc
from collections.abc import Sequence

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.agents import compiled
from impala.agents.agent import Agent
from impala.agents.numpy_agent import NumPyAgent
from impala.agents.numpy_distributions import NotServed, Random
from impala.config.schema import AgentConfig
from impala.environments.spaces import Spaces
from impala.types import AgentOutput, ArraySpec, Nest, TimeStep


class Policy(abc.ABC):
    """Acts for any number of groups of environments, with the same parameters for all."""

    @abc.abstractmethod
    def assign(self, values: Sequence[np.ndarray]) -> None:
        """Takes the values of the agent's variables, in order; comes before `begin`."""

    @abc.abstractmethod
    def begin(self, timestep: TimeStep, seed: Sequence[int]) -> "Acting":
        """Returns what acts for a group.

        Args:
          timestep: the group's first, [E, ...]. All are structured and shaped like it.
          seed: two numbers; others for every group.
        """


class Acting(abc.ABC):
    """Acts for one group, and remembers what the agent does."""

    output: AgentOutput
    """Specs of what it gives, [E, ...]: a nest of `ArraySpec`."""

    @abc.abstractmethod
    def act(self, timestep: TimeStep) -> list[np.ndarray]:
        """Acts once: the leaves of an `AgentOutput` [E, ...]."""

    @abc.abstractmethod
    def core_state(self) -> Nest:
        """Returns the core state [E, ...] before the next time step; it is not written again."""


class Uniform:
    """Draws actions uniformly from a box.

    Args:
      space: of one action.
      num_envs: E.
      seed: determines what is drawn.
    """

    def __init__(self, space: gym.Space, num_envs: int, seed: np.random.SeedSequence) -> None:
        if not isinstance(space, gym.spaces.Box):
            raise ValueError(f"agent.random_warm_up draws actions from a Box, not from {space}.")
        self._space = space
        self._shape = (num_envs, *space.shape)
        self._random = np.random.default_rng(seed)

    def draw(self) -> np.ndarray:
        """Returns actions [E, ...]."""
        drawn = self._random.uniform(self._space.low, self._space.high, self._shape)
        return drawn.astype(self._space.dtype)


def make_policy(agent: Agent, config: AgentConfig, spaces: Spaces) -> Policy:
    """Returns what acts as an agent does: in NumPy, if it can.

    Args:
      agent: made of the rest by `build.agent`.
      config: of the agent.
      spaces: of one environment.
    """
    try:
        return InNumPy(NumPyAgent(config, spaces, agent.variables))
    except NotServed:
        return Compiled(agent)


class InNumPy(Policy):
    """A small agent, without a call of TensorFlow."""

    def __init__(self, agent: NumPyAgent) -> None:
        self._agent = agent

    def assign(self, values: Sequence[np.ndarray]) -> None:
        self._agent.assign(values)

    def begin(self, timestep: TimeStep, seed: Sequence[int]) -> "Acting":
        return _ActingInNumPy(self._agent, timestep, seed)


class _ActingInNumPy(Acting):
    def __init__(self, agent: NumPyAgent, timestep: TimeStep, seed: Sequence[int]) -> None:
        num_envs = len(timestep.reward)
        self._agent = agent
        self._core_state = agent.initial_state(num_envs)
        self._random = Random(num_envs, seed)
        # With random numbers of its own: this action is not taken.
        output, _ = agent.step(timestep, self._core_state, Random(num_envs, seed))
        self.output = tree.map_structure(lambda x: ArraySpec(x.shape, x.dtype), output)

    def act(self, timestep: TimeStep) -> list[np.ndarray]:
        output, self._core_state = self._agent.step(timestep, self._core_state, self._random)
        action, policy, baseline = output
        return [*(tree.flatten(action)), policy, baseline]

    def core_state(self) -> Nest:
        return self._core_state


class Compiled(Policy):
    """Any agent, as a graph over flat lists of tensors, which is faster to call than over nests.

    Args:
      agent: its variables are overwritten.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._graph = tf.function(self._trace, autograph=False)
        # Of what is traced at the moment, which is structured alike for all groups.
        self._timestep_like: Nest = None
        self._state_like: Nest = None
        self._output_like: Nest = None

    def assign(self, values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(self._agent.variables, values, strict=True):
            variable.assign(value)

    def begin(self, timestep: TimeStep, seed: Sequence[int]) -> "Acting":
        num_envs = len(timestep.reward)
        acting = self._agent.acting(self._agent.initial_state(num_envs))
        state = tree.map_structure(tf.convert_to_tensor, (acting, np.asarray(seed, np.int32)))
        self._timestep_like, self._state_like = timestep, state
        leaves = tree.flatten((timestep, state))
        act = self._graph.get_concrete_function(*(tf.TensorSpec(x.shape, x.dtype) for x in leaves))
        return _ActingCompiled(self._agent, act, timestep, state, self._output_like)

    def _trace(self, *leaves: tf.Tensor) -> list[tf.Tensor]:
        timestep, (acting, seed) = tree.unflatten_as(
            (self._timestep_like, self._state_like), leaves
        )
        output, acting = self._agent.act(timestep, acting, seed)
        self._output_like = tree.map_structure(
            lambda x: ArraySpec(tuple(x.shape), np.dtype(x.dtype.as_numpy_dtype)), output
        )
        return tree.flatten((output, (acting, seed + [0, 1])))


class _ActingCompiled(Acting):
    """The state is the agent's for acting and the seed of the next action."""

    def __init__(
        self,
        agent: Agent,
        graph: tf.types.experimental.ConcreteFunction,
        timestep: TimeStep,
        state: Nest,
        output: AgentOutput,
    ) -> None:
        self.output = output
        self._agent = agent
        self._num_outputs = len(tree.flatten(output))
        self._state_like = state
        self._state: list[tf.Tensor] = tree.flatten(state)
        # Python's part of a call costs as much as the arithmetic of ten rows. So only what the
        # actions depend on becomes a tensor, and arguments are not checked again.
        self._observed = [tf.convert_to_tensor(leaf) for leaf in tree.flatten(timestep)]
        read = _read(graph.graph)
        given = graph.inputs[: len(self._observed)]
        self._read = [place for place, leaf in enumerate(given) if leaf.op in read]
        self._convert = compiled.eager_converter()
        self._call = compiled.call_of(graph)

    def act(self, timestep: TimeStep) -> list[np.ndarray]:
        leaves = tree.flatten(timestep)
        for place in self._read:
            self._observed[place] = self._convert(leaves[place])
        results = self._call(*self._observed, *self._state)
        self._state = results[self._num_outputs :]
        return [x.numpy() for x in results[: self._num_outputs]]

    def core_state(self) -> Nest:
        acting, _ = tree.unflatten_as(self._state_like, self._state)
        return tree.map_structure(lambda x: x.numpy(), self._agent.core_state(acting))


def _read(graph: tf.Graph) -> set[tf.Operation]:
    """Returns the operations on which a function's outputs and effects depend."""
    found: set[tf.Operation] = set()
    pending = [*(output.op for output in graph.outputs), *graph.control_outputs]
    while pending:
        operation = pending.pop()
        if operation not in found:
            found.add(operation)
            pending += [*(given.op for given in operation.inputs), *operation.control_inputs]
    return found
