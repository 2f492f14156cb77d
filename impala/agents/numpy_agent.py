"""An agent's step in NumPy, where calling TensorFlow would cost more than the step itself.

For agents whose parts are all built in and small: the MLP torso, the LSTM core, everything that
wrappers add to an observation, and every distribution of actions. It computes what `Agent.step`
computes; only the random numbers that actions are drawn with are others.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import tensorflow as tf

from impala.agents import numpy_distributions, popart
from impala.agents.cores import LSTMState
from impala.agents.normaliser import CLIP, LEAST, Numbers
from impala.agents.numpy_distributions import NotServed, Random
from impala.agents.observation import fitting
from impala.config.schema import AgentConfig
from impala.environments.spaces import (
    ACTION_MASK,
    SEEN,
    TASK,
    Spaces,
    has_action_mask,
    is_wrapped,
    main_space,
    num_tasks,
)
from impala.types import AgentOutput, Nest, StepType, TimeStep

MOST_WEIGHTS = 500_000
"""Number of weights. With more, a call of TensorFlow costs little beside what it computes."""

_FIRST = np.int8(StepType.FIRST)
_ZERO = np.float32(0.0)  # not Python's: `np.where` would make float64 of it
_Vector = Callable[[Nest], np.ndarray]  # values [B, ...] of a space as [B, F] float32


class NumPyAgent:
    """Acts as `Agent` does.

    Args:
      config: of the agent.
      spaces: of one environment, as for `build.agent`.
      variables: the agent's, whose names and shapes are read.

    Raises:
      NotServed: only TensorFlow computes such an agent.
    """

    def __init__(
        self, config: AgentConfig, spaces: Spaces, variables: Sequence[tf.Variable]
    ) -> None:
        torso = fitting(config.torso, main_space(spaces[0]))
        if torso != "mlp" or config.core not in ("feed_forward", "lstm"):
            raise NotServed(f"the torso {torso} with the core {config.core}")
        if config.frame_stack > 1:
            raise NotServed("stacked frames")
        weights = sum(math.prod(v.shape) for v in variables if v.shape.rank == 2)
        if weights > MOST_WEIGHTS:
            raise NotServed(f"{weights:,} weights, more than {MOST_WEIGHTS:,}")
        observation_space, action_space = spaces
        self._is_wrapped = is_wrapped(observation_space)
        self._numbers = Numbers(observation_space) if config.normalise_observations else None
        self._vector = _vector(main_space(observation_space))
        self._added = _added(observation_space)
        self._network = _Network(config, "")
        self._baseline_network = _Network(config, "baseline_") if config.separate_baseline else None
        self._masks_actions = has_action_mask(observation_space)
        self._popart = config.popart
        self._num_tasks = num_tasks(observation_space) if config.popart else 1
        self._sampler = numpy_distributions.for_agent(config, action_space)
        self._names = [variable.name.removesuffix(":0") for variable in variables]

    def assign(self, values: Sequence[np.ndarray]) -> None:
        """Takes the values of the agent's variables, in order, without a copy."""
        weights = dict(zip(self._names, values, strict=True))
        if self._numbers is not None:
            self._mean = weights["normaliser/mean"]
            self._deviation = np.sqrt(weights["normaliser/variance"] + np.float32(LEAST))
        policy, baseline = (_layer(weights, f"agent/{head}") for head in ("policy", "baseline"))
        if self._popart:  # the head's outputs are values then
            means, variances = weights["popart/mean"], weights["popart/variance"]
            scales = np.sqrt(np.clip(variances, popart.LOWEST**2, popart.HIGHEST**2))
            baseline = _Layer(baseline.weights * scales, baseline.bias * scales + means)
        if self._baseline_network is not None:
            self._baseline_network.assign(weights)
            self._policy_head, self._baseline_head = policy, baseline
        else:  # both heads see the same features: one product
            self._policy_head = _Layer(
                *(np.concatenate(p, axis=-1) for p in zip(policy, baseline, strict=True))
            )
        self._network.assign(weights)
        if isinstance(self._sampler, numpy_distributions.EpsilonGreedy):
            self._sampler.progress = weights["progress"]

    def initial_state(self, batch_size: int) -> Nest:
        """As `Agent.initial_state`."""
        networks = [network for network in (self._network, self._baseline_network) if network]
        cores = [network.core for network in networks if network.core is not None]
        return tuple(core.initial_state(batch_size) for core in cores)

    def step(
        self, timestep: TimeStep, core_state: Nest, random: Random
    ) -> tuple[AgentOutput, Nest]:
        """Acts once.

        Args:
          timestep: [B, ...].
          core_state: [B, ...] before it; is not changed.
          random: for the same B environments in every step.

        Returns:
          What to do, [B, ...], and the core state after it.
        """
        # What overflows becomes infinite, as in TensorFlow: the learner refuses it. Not as a
        # decorator, which threads would share before NumPy 2.
        with np.errstate(all="ignore"):
            return self._step(timestep, core_state, random)

    def _step(
        self, timestep: TimeStep, core_state: Nest, random: Random
    ) -> tuple[AgentOutput, Nest]:
        observation = timestep.observation
        main = observation["observation"] if self._is_wrapped else observation
        before: list[Any] = list(core_state)
        after: list[Any] = []
        is_first = timestep.step_type == _FIRST
        if self._numbers is not None:
            main = self._numbers.replaced(main, self._normal)
        seen = self._vector(main)
        added = [vector(observation[name]) for name, vector in self._added]

        features = self._network.torso(seen, added)
        if self._network.core is not None:
            features, state = self._network.core(features, is_first, before.pop(0))
            after.append(state)
        policy = _applied(self._policy_head, features)
        if self._baseline_network is None:
            policy, values = policy[:, : -self._num_tasks], policy[:, -self._num_tasks :]
        else:
            features = self._baseline_network.torso(seen, added)
            if self._baseline_network.core is not None:
                features, state = self._baseline_network.core(features, is_first, before.pop(0))
                after.append(state)
            values = _applied(self._baseline_head, features)
        baseline = values[:, 0]
        if self._num_tasks > 1:
            baseline = values[np.arange(len(values)), observation[TASK]]

        policy = self._sampler.bound(policy)
        if self._masks_actions:
            policy = self._sampler.mask(policy, observation[ACTION_MASK])
        policy = self._sampler.behaviour(policy, random)
        action = self._sampler.sample(policy, random)
        return AgentOutput(action, policy, baseline), tuple(after)

    def _normal(self, value: np.ndarray, where: slice, shape: tuple[int, ...]) -> np.ndarray:
        """As `normaliser.Normaliser`, for the values of a leaf."""
        mean, deviation = self._mean[where].reshape(shape), self._deviation[where].reshape(shape)
        return np.clip((value - mean) / deviation, -CLIP, CLIP).astype(np.float32)


class _Layer(NamedTuple):
    """A linear layer."""

    weights: np.ndarray  # [F, G]
    bias: np.ndarray  # [G]


def _layer(values: Mapping[str, np.ndarray], name: str) -> _Layer:
    return _Layer(values[f"{name}/w"], values[f"{name}/b"])


def _applied(layer: _Layer, inputs: np.ndarray) -> np.ndarray:
    """[B, F] to [B, G]."""
    outputs = np.dot(inputs, layer.weights)
    outputs += layer.bias
    return outputs


class _Network:
    """The MLP torso and perhaps an LSTM core behind it, of the policy or of the baseline alone."""

    def __init__(self, config: AgentConfig, prefix: str) -> None:
        self.core = _LSTM(config.lstm_size, f"{prefix}lstm") if config.core == "lstm" else None
        self._names = [f"{prefix}mlp/linear_{i}" for i in range(len(config.hidden_sizes))]
        self._layers: list[_Layer] = []

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Takes weights from those of the agent, by name."""
        self._layers = [_layer(values, name) for name in self._names]
        if self.core is not None:
            self.core.assign(values)

    def torso(self, features: np.ndarray, added: Sequence[np.ndarray]) -> np.ndarray:
        """As `torsos.MLP` inside `observation.Features`: what wrappers added goes past it."""
        for layer in self._layers:
            features = _applied(layer, features)
            np.maximum(features, 0.0, out=features)
        return np.concatenate([features, *added], axis=-1) if added else features


class _LSTM:
    """As `cores.LSTM`, one row at a time."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        self._from_input = _layer(values, f"{self._name}/from_input")
        self._from_hidden = values[f"{self._name}/from_hidden/w"]

    def initial_state(self, batch_size: int) -> LSTMState:
        zeros = np.zeros((batch_size, self._size), np.float32)
        return LSTMState(zeros, zeros)

    def __call__(
        self, inputs: np.ndarray, is_first: np.ndarray, state: LSTMState
    ) -> tuple[np.ndarray, LSTMState]:
        hidden, cell = state
        if is_first.any():
            goes_on = ~is_first[:, np.newaxis]
            hidden, cell = np.where(goes_on, hidden, _ZERO), np.where(goes_on, cell, _ZERO)
        gates = _applied(self._from_input, inputs)
        gates += np.dot(hidden, self._from_hidden)
        new, others = gates[:, : self._size], gates[:, self._size :]
        others[:, self._size : 2 * self._size] += 1.0  # of forget
        enter, forget, leave = np.split(1.0 / (1.0 + np.exp(-others)), 3, axis=-1)
        cell = forget * cell + enter * np.tanh(new)
        hidden = leave * np.tanh(cell)
        return hidden, LSTMState(hidden, cell)


def _added(space: gym.Space) -> list[tuple[str, _Vector]]:
    """What of an observation goes past the torso, in order: names, and what makes vectors of it."""
    if not is_wrapped(space):
        return []
    vectors = {name: _vector(space[name]) for name in sorted(space.spaces) if name in SEEN}
    transformed: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "last_reward": lambda x: np.sign(x) * np.log1p(np.abs(x)),
        "time_in_episode": lambda x: np.log1p(x) / np.float32(5.0),
    }

    def made(name: str, vector: _Vector) -> _Vector:
        transform = transformed.get(name)
        return vector if transform is None else lambda value: transform(vector(value))

    return [(name, made(name, vector)) for name, vector in vectors.items()]


def _vector(space: gym.Space) -> _Vector:
    """What makes vectors of values of a space, as `observation.as_vector`.

    Raises:
      NotServed: a space of another kind.
    """
    numpy_distributions.check_space(space)
    match space:
        case gym.spaces.Discrete():
            return _one_hot([int(space.n)], np.array([space.start]))
        case gym.spaces.MultiDiscrete():
            return _one_hot(space.nvec.reshape(-1).tolist(), space.start.reshape(-1))
        case gym.spaces.Box() | gym.spaces.MultiBinary():
            return _numbers(space)
        case gym.spaces.Dict():
            parts = [(key, _vector(space[key])) for key in sorted(space.spaces)]
            return lambda value: np.concatenate([of(value[key]) for key, of in parts], axis=-1)
        case gym.spaces.Tuple():
            vectors = [_vector(part) for part in space.spaces]
            return lambda value: np.concatenate(
                [of(item) for of, item in zip(vectors, value, strict=True)], axis=-1
            )
    raise NotServed(f"observations of {space}")


def _one_hot(sizes: Sequence[int], start: np.ndarray) -> _Vector:
    """Returns an encoder of choices of these sizes, [B, ...]; invalid values are all zeros."""
    part = np.repeat(np.arange(len(sizes)), sizes)  # [F], which choice a column is of
    meant = np.concatenate([np.arange(size) for size in sizes]) + start[part]
    return lambda value: (value.reshape(len(value), -1)[:, part] == meant).astype(np.float32)


def _numbers(space: gym.Space) -> _Vector:
    """Returns what encodes a Box or MultiBinary; unsigned integers as a share of the largest."""
    largest = 1.0
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.unsignedinteger):
        largest = max(float(space.high.max()), 1.0)
    share = np.float32(1.0 / largest)

    def numbers(value: np.ndarray) -> np.ndarray:
        vector = value.reshape(len(value), -1).astype(np.float32, copy=False)
        return vector if share == 1.0 else vector * share

    return numbers
