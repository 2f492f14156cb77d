"""The agent's acting step as a function of everything that it depends on.

Parameters, observation, core state and random numbers go in; what an unroll holds of a step comes
out. So it can act with several versions of the parameters, and be sent as a graph whose parameters
are inputs. All names are those of the wire: docs/wire-protocol.md.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tree

from impala.agents.agent import Agent
from impala.agents.compiled import read_as
from impala.agents.distributions import EpsilonGreedy, bounded_log_std
from impala.environments.spaces import Spaces, choices, leaves
from impala.parts import build
from impala.types import Nest, StepType, TimeStep

STEP_TYPE = "timestep/step_type"
UNIFORM, NORMAL, EPSILON_FINAL = "uniform", "normal", "epsilon_final"
"""Inputs: random numbers, and the final epsilon of each environment."""


class ActingStep:
    """What an agent does in one step of B environments.

    `inputs` are specs by name, in the order in which they are given: the leaves of the observation
    and `timestep/step_type` [B, ...], the core state [B, ...], random numbers [B, ...], and
    `parameters/0`, `parameters/1`, ... as the agent's variables. Of the random numbers there are
    only those that the action space needs: `uniform` from 0 to 1 and `normal`, both drawn anew for
    each step, and `epsilon_final`, which each environment draws once.

    `outputs` are the names of what is returned: the leaves of the action, `output/policy`,
    `output/baseline`, and with the prefix `next/` the core state before the next step.

    Args:
      agent: its variables are not read, and not changed.
      spaces: of one environment.
    """

    def __init__(self, agent: Agent, spaces: Spaces) -> None:
        self._agent = agent
        self._leaves = [leaf for _, leaf in leaves(spaces[1], is_sorted=False)]
        specs = build.unroll_spec(agent, *spaces, unroll_length=1)
        self._observation, self._core_state = specs.timestep.observation, specs.core_state
        timed = specs._replace(core_state=(), output=specs.output._replace(policy=(), baseline=()))
        named = [(name, x.shape[1:], x.dtype) for name, x in _named(timed)]
        states = [(name, x.shape, x.dtype) for name, x in _named({"core_state": self._core_state})]
        seen = [each for each in named if each[0].startswith("timestep/observation")]
        numbers = [sum(choices(leaf)) for leaf in self._leaves]
        sizes = {
            UNIFORM: sum(numbers),
            NORMAL: sum(
                math.prod(leaf.shape or ())
                for leaf, number in zip(self._leaves, numbers, strict=True)
                if not number
            ),
        }
        drawn: list[tuple[str, tuple[int, ...], Any]] = [
            (name, (size,), np.float32) for name, size in sizes.items() if size
        ]
        if isinstance(agent.distribution, EpsilonGreedy):
            drawn.append((EPSILON_FINAL, (), np.float32))
        self.inputs = [
            tf.TensorSpec([None, *shape], dtype, name)
            for name, shape, dtype in [*seen, (STEP_TYPE, (), np.int8), *states, *drawn]
        ]
        self.num_inputs = len(self.inputs)  # without parameters
        self.inputs += [
            tf.TensorSpec(variable.shape, variable.dtype, f"parameters/{number}")
            for number, variable in enumerate(agent.variables)
        ]
        self.outputs = [
            *(name for name, *_ in named if name.startswith("output/action")),
            *("output/policy", "output/baseline"),
            *(f"next/{name}" for name, *_ in states),
        ]

    def trace(self) -> tf.types.experimental.ConcreteFunction:
        """Returns the step as a graph over tensors in the order of `inputs`, for any B.

        Raises:
          ValueError: a custom part reads its variables so that nothing can take their place.
        """
        specs = [tf.TensorSpec(x.shape, x.dtype, f"input_{i}") for i, x in enumerate(self.inputs)]
        traced = tf.function(self.__call__, autograph=False).get_concrete_function(*specs)
        captured = [id(tensor) for tensor in traced.captured_inputs]
        past = [v for v in self._agent.variables if id(v.handle) in captured]
        if read := {v.name for v in (*traced.variables, *past)}:
            names = ", ".join(sorted(read))
            raise ValueError(
                f"The network reads the variables {names} in a tf.function of its own, or by "
                "another method than an operation: what it computes cannot be had as a function "
                "of parameters."
            )
        return traced

    def __call__(self, *given: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of `outputs`, of those of `inputs`."""
        named = {spec.name: tensor for spec, tensor in zip(self.inputs, given, strict=True)}
        shown = [x for name, x in named.items() if name.startswith("timestep/observation")]
        states = [x for name, x in named.items() if name.startswith("core_state")]
        rewards = tf.zeros(tf.shape(named[STEP_TYPE]))  # the agent uses neither these ...
        timestep = TimeStep(
            tree.unflatten_as(self._observation, shown),
            reward=rewards,
            discount=rewards,  # ... nor discounts
            # FIRST or MID. Compared as int32, as not every ONNX runtime compares bytes.
            step_type=tf.cast(
                tf.not_equal(tf.cast(named[STEP_TYPE], tf.int32), int(StepType.FIRST)), tf.int8
            ),
        )
        with read_as(self._agent.variables, given[self.num_inputs :]):
            output, after = self._agent.greedy_step(
                timestep, tree.unflatten_as(self._core_state, states)
            )
            policy, scores = self._drawn(output.policy, named)
            action = self._agent.distribution.mode(scores)
        return [
            tf.identity(x)
            for x in (*tree.flatten(action), policy, output.baseline, *tree.flatten(after))
        ]

    def _drawn(
        self, outputs: tf.Tensor, named: dict[str, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the parameters of the policy, and parameters whose mode is a sample of it."""
        distribution = self._agent.distribution
        gumbel: Any = None
        if UNIFORM in named:  # the largest of logit + Gumbel noise is a sample of the softmax
            uniform = tf.clip_by_value(named[UNIFORM], 1e-30, 1.0 - 1e-7)
            gumbel = -tf.math.log(-tf.math.log(uniform))
        if isinstance(distribution, EpsilonGreedy):
            values = outputs[:, : distribution.num_outputs]
            epsilon = distribution.annealed(named[EPSILON_FINAL])[:, tf.newaxis]
            policy = tf.concat([values, epsilon], -1)
            probabilities = distribution.described(policy)
            scores = tf.where(probabilities > 0.0, tf.math.log(probabilities) + gumbel, -math.inf)
            return policy, tf.concat([scores, epsilon], -1)
        scores, at, choice, number = [], 0, 0, 0
        for leaf in self._leaves:
            if size := sum(choices(leaf)):
                scores.append(outputs[:, at : at + size] + gumbel[:, choice : choice + size])
                at, choice = at + size, choice + size
                continue
            size = math.prod(leaf.shape or ())
            mean, unbounded = outputs[:, at : at + size], outputs[:, at + size : at + 2 * size]
            noise = named[NORMAL][:, number : number + size]
            scores += [mean + tf.exp(bounded_log_std(unbounded)) * noise, unbounded]
            at, number = at + 2 * size, number + size
        return outputs, tf.concat(scores, axis=-1)


class CompiledStep:
    """An acting step for any version of the parameters. Of one thread, which makes it.

    Args:
      agent: which no one else uses.
      spaces: of one environment.
    """

    def __init__(self, agent: Agent, spaces: Spaces) -> None:
        step = ActingStep(agent, spaces)
        self._graph = step.trace()
        self.drawn: Mapping[str, tuple[int, ...]] = {
            spec.name: tuple(spec.shape[1:])
            for spec in step.inputs[: step.num_inputs]
            if spec.name in (UNIFORM, NORMAL, EPSILON_FINAL)
        }
        """Shapes of the random numbers that it takes, by name and without [B]."""

    def held(self, values: Sequence[np.ndarray]) -> list[tf.Tensor]:
        """Returns parameters as this step takes them, on its device."""
        return [tf.constant(value) for value in values]

    def __call__(self, held: Sequence[tf.Tensor], given: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Acts once.

        Args:
          held: parameters.
          given: leaves of the observations, step type, core state, random numbers: [B, ...].

        Returns:
          Leaves of the action, policy, baseline, leaves of the core state after it: [B, ...].
        """
        return [x.numpy() for x in self._graph(*map(tf.constant, given), *held)]


def _named(nest: Nest) -> list[tuple[str, Nest]]:
    """Returns the leaves of a nest with their paths, as they are named on the wire."""
    return [("/".join(map(str, path)), leaf) for path, leaf in tree.flatten_with_path(nest)]
