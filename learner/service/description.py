"""Describes spaces, policy, network and limits in the reply to `Join`.

It is all that an actor in another language needs to build an agent. `protos/network.py` and
`protos/policy.py` compute what is described here; tests compare them with the agent.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeGuard

import gymnasium as gym
import numpy as np

from impala.config.schema import AgentConfig, Config
from impala.environments.spaces import (
    ACTION_MASK,
    FORBIDDEN,
    SEEN,
    TASK,
    Spaces,
    choices,
    has_action_mask,
    is_wrapped,
    main_space,
    num_tasks,
)
from learner.data.bounds import MessageBounds
from protos.impala.v1 import learner_pb2 as pb

OBSERVATION, ACTION = "timestep/observation", "output/action"
"""What the names of leaves of an unroll begin with."""
_LOG_DEVIATIONS = -5.0, 1.0  # bounds, of `impala.agents.distributions.TanhNormal`
_KINDS = {
    gym.spaces.Box: pb.Space.KIND_BOX,
    gym.spaces.Discrete: pb.Space.KIND_DISCRETE,
    gym.spaces.MultiDiscrete: pb.Space.KIND_MULTI_DISCRETE,
    gym.spaces.MultiBinary: pb.Space.KIND_MULTI_BINARY,
}


class Variable(Protocol):
    """A variable of the agent."""

    @property
    def name(self) -> str: ...


class _Layer(NamedTuple):
    """A layer of a built-in torso."""

    kind: "pb.Layer.Kind"
    module: str = ""  # whose variables it has
    size: int = 0
    stride: int = 0
    padded: bool = False


def of(
    config: Config, variables: Sequence[Variable], spaces: Spaces, bounds: MessageBounds
) -> pb.JoinReply:
    """Returns a reply that says nothing but spaces, policy, network and limits.

    Args:
      config: of the run.
      variables: of the agent.
      spaces: of one environment.
      bounds: of the numbers in a message.
    """
    parameters = [variable.name.removesuffix(":0") for variable in variables]
    limits = config.limits
    return pb.JoinReply(
        observation_space=leaves(spaces[0], OBSERVATION),
        action_space=leaves(spaces[1], ACTION),
        policy=policy(config.agent, spaces, parameters),
        network=network(config.agent, spaces, parameters),
        limits=pb.Limits(
            num_envs=config.learner.max_envs_per_message,
            reward=limits.reward,
            observation=limits.observation,
            policy_parameter=limits.policy_parameter,
            baseline=limits.baseline,
            info_names=limits.info_names,
            frames_per_step=bounds.frames_per_step,
        ),
    )


def leaves(space: gym.Space, name: str) -> list[pb.Space]:
    """Returns the leaves of a space, in the order in which they travel.

    Args:
      space: of an observation or an action.
      name: what their names begin with.
    """
    return [_space(leaf, path) for path, leaf in _leaves(space, name)]


def policy(config: AgentConfig, of: Spaces, parameters: Sequence[str]) -> pb.Policy:
    """Returns how the parameters of the policy make an action.

    Args:
      config: of the agent.
      of: the spaces of one environment.
      parameters: names of the agent's variables, in order.
    """
    described = pb.Policy(masked=FORBIDDEN)
    if has_action_mask(of[0]):
        described.mask = f"{OBSERVATION}/{ACTION_MASK}"
    # In the order of the space, which is that of the distribution.
    for path, leaf in _leaves(of[1], ACTION, is_sorted=False):
        factor = described.factors.add(action=path, num_choices=sum(choices(leaf)))
        factor.num_parameters = factor.num_outputs = factor.num_choices
        if config.policy == "epsilon_greedy":
            factor.family = pb.Policy.FAMILY_EPSILON_GREEDY
            factor.num_parameters += 1
            factor.progress = parameters.index("progress")
        elif factor.num_choices:
            factor.family = pb.Policy.FAMILY_CATEGORICAL
        else:
            factor.family = pb.Policy.FAMILY_TANH_NORMAL
            factor.num_parameters = factor.num_outputs = 2 * math.prod(leaf.shape or ())
            factor.lowest_log_deviation, factor.highest_log_deviation = _LOG_DEVIATIONS
    return described


def network(config: AgentConfig, of: Spaces, parameters: Sequence[str]) -> pb.Network:
    """Returns what the agent computes.

    Args:
      config: of the agent.
      of: the spaces of one environment.
      parameters: names of the agent's variables, in order.
    """
    described = pb.Network(parameters=parameters)
    for part, known in ((config.torso, _TORSOS), (config.core, _CORES)):
        if part not in known:
            described.not_described = part
            return described
    is_image = _TORSOS[config.torso].is_image
    seen = OBSERVATION if not is_wrapped(of[0]) else f"{OBSERVATION}/observation"
    main = main_space(of[0])
    described.inputs.extend(_input(leaf, path) for path, leaf in _leaves(main, seen))
    if config.frame_stack > 1:
        (stacked,) = described.inputs
        stacked.frames = config.frame_stack
    if is_wrapped(of[0]):
        for name in sorted(SEEN & set(of[0].spaces)):
            for path, leaf in _leaves(of[0][name], f"{OBSERVATION}/{name}"):
                described.added.append(_input(leaf, path, _ADDED.get(name)))

    layers = _Layers(config, parameters, standardises=is_image and _is_unsigned(main))
    layers.has_added = bool(described.added)
    policy_head, baseline_head = (layers.linear(f"agent/{head}") for head in ("policy", "baseline"))
    body = list(layers.body(""))
    if config.separate_baseline:
        described.policy.extend([*body, policy_head])
        described.baseline.extend([*layers.body("baseline_"), baseline_head])
    else:
        described.shared.extend(body)
        described.policy.append(policy_head)
        described.baseline.append(baseline_head)
    if config.popart:
        popart = layers.layer(pb.Layer.KIND_POPART, "popart/mean", "popart/variance")
        popart.task = f"{OBSERVATION}/{TASK}" if num_tasks(of[0]) > 1 else ""
        described.baseline.append(popart)
    return described


class _Layers:
    """Makes the layers of an agent, and counts the leaves of its core state."""

    has_added = False

    def __init__(
        self, config: AgentConfig, parameters: Sequence[str], *, standardises: bool
    ) -> None:
        self._config = config
        self._numbers = {name: number for number, name in enumerate(parameters)}
        self._standardises = standardises and config.standardise_images
        self._states = 1 if config.frame_stack > 1 else 0

    def body(self, prefix: str) -> Iterator[pb.Layer]:
        """Yields the layers of torso and core whose modules' names begin with a prefix."""
        config = self._config
        if self._standardises:
            yield self.layer(pb.Layer.KIND_STANDARDISE)
        for layer in _TORSOS[config.torso].layers(config):
            made = self.layer(layer.kind)
            if layer.module:
                made = self.linear(f"{prefix}{config.torso}/{layer.module}")
                made.kind = layer.kind
            made.size, made.stride, made.padded = layer.size, layer.stride, layer.padded
            yield made
        if self.has_added:
            yield self.layer(pb.Layer.KIND_ADDED)
        if config.core == "lstm":
            names = ("from_hidden/w", "from_input/b", "from_input/w")
            lstm = self.layer(pb.Layer.KIND_LSTM, *(f"{prefix}lstm/{name}" for name in names))
            lstm.state.extend([self._states, self._states + 1])
            self._states += 2
            yield lstm

    def linear(self, module: str) -> pb.Layer:
        """Returns a linear layer with the variables of a module."""
        return self.layer(pb.Layer.KIND_LINEAR, f"{module}/b", f"{module}/w")

    def layer(self, kind: "pb.Layer.Kind", *parameters: str) -> pb.Layer:
        """Returns a layer with these variables."""
        return pb.Layer(kind=kind, parameters=[self._numbers[name] for name in parameters])


class _Torso(NamedTuple):
    """A torso, as `impala.agents.torsos` has it."""

    is_image: bool
    layers: Callable[[AgentConfig], list[_Layer]]


_FLATTEN, _RELU = _Layer(pb.Layer.KIND_FLATTEN), _Layer(pb.Layer.KIND_RELU)


def _linear(module: str) -> list[_Layer]:
    return [_Layer(pb.Layer.KIND_LINEAR, module), _RELU]


def _convolution(module: str, stride: int = 1, padded: bool = False) -> _Layer:
    return _Layer(pb.Layer.KIND_CONVOLUTION, module, stride=stride, padded=padded)


def _mlp(config: AgentConfig) -> list[_Layer]:
    each = [_linear(f"linear_{i}") for i in range(len(config.hidden_sizes))]
    return [_FLATTEN, *(layer for layers in each for layer in layers)]


def _small(config: AgentConfig) -> list[_Layer]:
    return [_convolution("conv"), _RELU, _FLATTEN, *_linear("linear")]


def _shallow(config: AgentConfig) -> list[_Layer]:
    first, second = _convolution("conv_0", stride=4), _convolution("conv_1", stride=2)
    return [first, _RELU, second, _RELU, _FLATTEN, *_linear("linear")]


def _strided(config: AgentConfig) -> list[_Layer]:
    padded = config.torso == "strided"
    between = _Layer(pb.Layer.KIND_ELU) if padded else _RELU
    each = [[_convolution(f"conv_{i}", 2, padded), between] for i in range(4)]
    return [*(layer for layers in each for layer in layers), _FLATTEN]


def _deep(config: AgentConfig) -> list[_Layer]:
    layers = []
    for section in (f"section_{i}" for i in range(3)):
        layers.append(_convolution(f"{section}/conv", padded=True))
        layers.append(_Layer(pb.Layer.KIND_MAX_POOL, size=3, stride=2, padded=True))
        for block in (f"{section}/block_{i}" for i in range(2)):
            layers.append(_Layer(pb.Layer.KIND_KEEP))
            for i in range(2):
                layers += [_RELU, _convolution(f"{block}_conv_{i}", padded=True)]
            layers.append(_Layer(pb.Layer.KIND_ADD))
    return [*layers, _RELU, _FLATTEN, *_linear("linear")]


_TORSOS: Mapping[str, _Torso] = {
    "mlp": _Torso(is_image=False, layers=_mlp),
    "small": _Torso(is_image=True, layers=_small),
    "strided": _Torso(is_image=True, layers=_strided),
    "strided_valid": _Torso(is_image=True, layers=_strided),
    "shallow": _Torso(is_image=True, layers=_shallow),
    "deep": _Torso(is_image=True, layers=_deep),
}
_CORES = ("feed_forward", "lstm")
_ADDED = {
    "last_reward": pb.Network.Input.KIND_LOG_REWARD,
    "time_in_episode": pb.Network.Input.KIND_LOG_TIME,
}


def _leaves(
    space: gym.Space, name: str, *, is_sorted: bool = True
) -> Iterator[tuple[str, gym.Space]]:
    """Yields the leaves of a space by name; keys of Dicts sorted, or in the order of the space."""
    match space:
        case gym.spaces.Dict():
            for key in sorted(space.spaces) if is_sorted else space.spaces:
                yield from _leaves(space[key], f"{name}/{key}", is_sorted=is_sorted)
        case gym.spaces.Tuple():
            for number, part in enumerate(space.spaces):
                yield from _leaves(part, f"{name}/{number}", is_sorted=is_sorted)
        case _:
            yield name, space


def _space(space: gym.Space, name: str) -> pb.Space:
    described = pb.Space(name=name)
    described.kind = next(kind for cls, kind in _KINDS.items() if isinstance(space, cls))
    match space:
        case gym.spaces.Box():
            described.low.extend(_bounds(space.low))
            described.high.extend(_bounds(space.high))
        case gym.spaces.Discrete():
            described.start.append(int(space.start))
            described.n.append(int(space.n))
        case gym.spaces.MultiDiscrete():
            described.start.extend(space.start.reshape(-1).tolist())
            described.n.extend(space.nvec.reshape(-1).tolist())
        case gym.spaces.MultiBinary():
            described.start.extend([0] * math.prod(space.shape))
            described.n.extend([2] * math.prod(space.shape))
    return described


def _bounds(bounds: np.ndarray) -> list[float]:
    numbers: list[float] = bounds.astype(np.float64).reshape(-1).tolist()
    return numbers[:1] if len(set(numbers)) == 1 else numbers


def _input(
    space: gym.Space, name: str, kind: "pb.Network.Input.Kind | None" = None
) -> pb.Network.Input:
    described = pb.Network.Input(observation=name)
    if kind is not None:
        described.kind = kind
    elif isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        described.kind = pb.Network.Input.KIND_ONE_HOT
    else:
        described.kind = pb.Network.Input.KIND_NUMBERS
        described.scale = 1.0 / max(float(space.high.max()), 1.0) if _is_unsigned(space) else 1.0
    return described


def _is_unsigned(space: gym.Space) -> TypeGuard[gym.spaces.Box]:
    return isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.unsignedinteger)
