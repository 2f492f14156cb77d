"""Builds environments, agents and algorithms from their names in a configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import tensorflow as tf
import tree

from impala.agents import distributions
from impala.agents.agent import Agent
from impala.agents.cores import Core
from impala.agents.normaliser import Normaliser
from impala.agents.observation import Combined, Features, FrameStack, fitting
from impala.agents.popart import PopArt
from impala.agents.torsos import Torso
from impala.algorithms.base import Algorithm
from impala.algorithms.policy_gradient import PolicyGradient
from impala.algorithms.teachers import Teacher, Teachers
from impala.config.schema import ActorConfig, AgentConfig, Config, EnvironmentConfig
from impala.environments.spaces import (
    ACTION_MASK,
    Spaces,
    has_action_mask,
    main_space,
    num_tasks,
)
from impala.parts import checks, components, sections
from impala.parts.components import ALGORITHM, CORE, ENVIRONMENT, TORSO, Allowed, Kind
from impala.parts.sections import Found, Own
from impala.schedule.tasks import Task
from impala.types import AgentOutput, ArraySpec, Nest, StepType, TimeStep, Unroll

if TYPE_CHECKING:
    from impala.environments import Environment

_ACTOR = ActorConfig()
_NONE: Own = {}
_NO_PART = Found(None, None)


def environment(
    config: EnvironmentConfig,
    num_envs: int,
    *,
    actor: ActorConfig = _ACTOR,
    first: int = 0,
    render_mode: str | None = None,
    joint: Spaces | None = None,
    exactly: bool = False,
    task: int = 0,
    own: Own = _NONE,
) -> Environment:
    """Returns `num_envs` environments that step together, adapted to `joint` spaces.

    `actor` and `first` are as for `impala.environments.make`, `exactly` as for `check_fits`; `task`
    is the number of the task in the run.

    Raises:
      ValueError: there is no such environment, it cannot be made with these settings, or it does
        not fit the joint spaces.
    """
    from impala import environments  # here, so that other tools load no emulator

    # A custom id is resolved first, so that only allowed code is imported.
    found = _NO_PART
    if components.is_own(config.id):
        found = part(ENVIRONMENT, config.id, None, own)
    made = environments.make(
        config,
        num_envs,
        component=found.component,
        settings=found.settings,
        actor=actor,
        first=first,
        render_mode=render_mode,
    )
    spaces = made.observation_space, made.action_space
    if joint is None or joint == spaces:
        return made
    try:
        environments.check_fits(spaces, joint, exactly=exactly)
    except ValueError:
        made.close()
        raise
    return environments.Joint(made, *joint, task)


def spaces(tasks: Sequence[Task], own: Own = _NONE, *, numbered: bool = False) -> Spaces:
    """Returns the observation and action space of one environment, common to all tasks.

    Args:
      tasks: of the run.
      own: the custom parts that the configuration names.
      numbered: whether observations hold the number of the task: `agent.popart`.

    Raises:
      ValueError: as `environment`, an `action_mask` would not be obeyed, or no spaces join the
        tasks.
    """
    from impala import environments

    environments.check_joint(tasks)
    of_tasks = []
    for task in tasks:
        probe = environment(task.environment, num_envs=1, own=own)
        probe.close()
        _check_mask_is_one(task, probe.observation_space)
        if task.environment.last_action:
            _check_choices(task, "action", probe.action_space, "environment.last_action")
        if len(tasks) > 1:
            _check_choices(task, "observation", probe.observation_space, "several tasks")
        of_tasks.append((probe.observation_space, probe.action_space))
    return environments.join([task.name for task in tasks], of_tasks, numbered)


def _check_mask_is_one(task: Task, space: gym.Space) -> None:
    """Checks that an `action_mask` stands where it is obeyed.

    Raises:
      ValueError: it stands elsewhere, and so would only be observed.
    """
    if has_action_mask(space):
        return
    own = main_space(space)
    if isinstance(own, gym.spaces.Dict) and ACTION_MASK in own.spaces:
        raise ValueError(
            f"{task.name}: its observation is a Dict of {', '.join(sorted(own.spaces))}, in which "
            f"{ACTION_MASK} would not be obeyed. Observe a Dict of observation and {ACTION_MASK} "
            "alone, and let observation be a Dict of all that the agent is to see; or give "
            f"{ACTION_MASK} another name if no action is forbidden."
        )


def _check_choices(task: Task, name: str, space: gym.Space, used: str) -> None:
    """Checks that choices are of int64, as those are that this makes of them.

    Raises:
      ValueError: they are of another type, with which every message would be refused.
    """
    from impala.environments import base

    def check(name: str, leaf: gym.Space) -> None:
        is_choice = isinstance(leaf, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
        if is_choice and leaf.dtype != np.int64:
            raise ValueError(
                f"{task.name}: {name} is {leaf} of {leaf.dtype}. With {used}, choices have to be "
                "of int64: leave the dtype of the space out."
            )

    base.map_leaves(check, name, space)


@contextlib.contextmanager
def _allocated() -> Iterator[None]:
    """Raises a ValueError instead of what TensorFlow raises where there is too little memory."""
    try:
        yield
    except tf.errors.OpError as error:
        is_too_many = "would have more than 2**63" in error.message
        if not (is_too_many or isinstance(error, tf.errors.ResourceExhaustedError)):
            raise
        found = re.search(r"(?i)shape ?(\[[\d,]*\])", error.message)
        raise ValueError(
            "The network is too large to be allocated: there is no memory for a tensor of "
            f"the shape {found[1] if found else error.message}. Reduce agent.hidden_sizes or "
            "agent.lstm_size, or the size of the observation or the number of actions."
        ) from error


@_allocated()
def agent(
    config: AgentConfig,
    observation_space: gym.Space,
    action_space: gym.Space,
    seed: int = 0,
    own: Own = _NONE,
) -> Agent:
    """Returns an agent with initialised variables.

    Args:
      config: of the agent.
      observation_space: of one environment.
      action_space: of one environment.
      seed: determines the initial weights.
      own: the custom parts that the configuration names: `impala.parts.sections.found`.

    Raises:
      ValueError: the configuration does not fit the spaces, or the network does not fit in memory.
    """
    single_observation_space = observation_space
    # Chosen before frames are stacked, which makes tables look like images.
    torso = fitting(config.torso, main_space(observation_space))
    config = dataclasses.replace(config, torso=torso)
    frame_stack = normaliser = None
    if config.normalise_observations:
        normaliser = Normaliser(observation_space, config.frame_stack)
    if config.frame_stack > 1:
        frame_stack = FrameStack(config.frame_stack, observation_space)
        observation_space = frame_stack.observation_space
    # Sonnet's initialisers draw from the global generator; everything drawn later is stateless.
    tf.random.set_seed(seed)
    if config.policy == "epsilon_greedy":
        distribution: distributions.Distribution = distributions.epsilon_greedy_for_space(
            action_space, config.epsilon
        )
    else:
        distribution = distributions.for_space(action_space)
    masks_actions = has_action_mask(observation_space)
    if masks_actions:
        _check_action_mask(observation_space, distribution.num_choices)
    separate = config.separate_baseline
    features_of = functools.partial(_features, config, observation_space, normaliser, own)
    features, core = features_of(), _core(config, own)
    if core is not None and config.core not in CORE.built_in:
        seen = features(_zeros(observation_space).observation)
        checks.check_core(config.core, core, int(seen.shape[1]))
    built = Agent(
        torso=features,
        core=core,
        distribution=distribution,
        frame_stack=frame_stack,
        baseline_torso=features_of("baseline_") if separate else None,
        baseline_core=_core(config, own, "baseline_") if separate else None,
        masks_actions=masks_actions,
        popart=PopArt(num_tasks(observation_space)) if config.popart else None,
        normaliser=normaliser,
    )
    built.greedy_step(_zeros(single_observation_space), built.initial_state(1))
    return built


def part(kind: Kind, name: str, settings: Any, own: Own) -> Found:
    """Returns the class of a part and its settings.

    Args:
      kind: of the part.
      name: in the configuration.
      settings: of the part, if it is built in.
      own: the custom parts that the configuration names.

    Raises:
      ValueError: it is neither built in nor in `own`.
    """
    if name in kind.built_in:
        return Found(components.find(name, kind, Allowed()), settings)
    if (found := own.get((kind, name))) is None:
        raise ValueError(
            f"The {kind.word} {name} is not built in: make the configuration with "
            "impala.parts.sections.compose, and pass its parts."
        )
    return found


def _features(
    config: AgentConfig,
    observation_space: gym.Space,
    normaliser: Normaliser | None,
    own: Own,
    prefix: str = "",
) -> Features:
    """Returns torso and features; the prefix makes names of variables unique in an agent."""

    def make(name: str, suffix: str = "") -> Torso:
        found = part(TORSO, name, config, own)
        made: Torso = found.component(found.settings, name=f"{prefix}{_module_name(name)}{suffix}")
        return made

    standardise = config.standardise_images
    if config.torso == "auto":
        space = main_space(observation_space)
        torso: Torso = Combined(space, make, standardise, name=f"{prefix}auto")
    else:
        torso = make(config.torso)
    features = Features(torso, observation_space, standardise, normaliser)
    if config.torso not in TORSO.built_in:
        checks.check_torso(config.torso, torso, observation_space)
    return features


def _core(config: AgentConfig, own: Own, prefix: str = "") -> Core | None:
    if not CORE.built_in.get(config.core, config.core):
        return None
    found = part(CORE, config.core, config, own)
    core: Core = found.component(found.settings, name=f"{prefix}{_module_name(config.core)}")
    return core


def _module_name(name: str) -> str:
    """Returns a part's name as a module's name, which must be an identifier."""
    return re.sub(r"\W", "_", name.rpartition(":")[2])


def _check_action_mask(observation_space: gym.Space, num_choices: int) -> None:
    assert isinstance(observation_space, gym.spaces.Dict)
    space = observation_space[ACTION_MASK]
    if space.shape != (num_choices,):
        raise ValueError(
            f"The observation's {ACTION_MASK} is {space}; the action has {num_choices} choices in "
            f"all its parts together, so it must have the shape ({num_choices},)."
        )


def algorithm(
    name: str, config: Config, agent: Agent, teachers: Sequence[Teacher] = ()
) -> Algorithm:
    """Returns the algorithm of this name, with its settings and with teachers if there are any."""
    found = part(ALGORITHM, name, getattr(config, name, None), sections.found(config))
    made: Algorithm = found.component(agent, config.objective, found.settings)
    made.burn_in = config.replay.burn_in
    if teachers and isinstance(made, PolicyGradient):
        made.teachers = Teachers(config.teacher, teachers, agent.distribution.num_parts)
    elif teachers and made.demands.has_teachers:
        raise ValueError(
            f"{name} demands teachers, which PolicyGradient alone has: derive it from that (from "
            "impala.algorithms.policy_gradient import PolicyGradient)."
        )
    return made


def unroll_spec(
    agent: Agent, observation_space: gym.Space, action_space: gym.Space, unroll_length: int
) -> Unroll:
    """Returns shape and dtype of each leaf of one environment's unroll: a nest of `ArraySpec`.

    `frames` and `parameter_version` are () here, as messages have separate fields for them.
    """
    rows = unroll_length + 1

    def row_spec(space: gym.Space) -> Nest:
        return tree.map_structure(
            lambda spec: ArraySpec((rows, *spec.shape), spec.dtype), _spec(space)
        )

    scalar = ArraySpec((rows,), np.dtype(np.float32))
    parameters = agent.distribution.num_parameters
    return Unroll(
        timestep=TimeStep(
            observation=row_spec(observation_space),
            reward=scalar,
            discount=scalar,
            step_type=ArraySpec((rows,), np.dtype(np.int8)),
        ),
        output=AgentOutput(
            action=row_spec(action_space),
            policy=ArraySpec((rows, parameters), np.dtype(np.float32)),
            baseline=scalar,
        ),
        core_state=tree.map_structure(
            lambda state: ArraySpec(tuple(state.shape[1:]), np.dtype(state.dtype.as_numpy_dtype)),
            agent.initial_state(1),
        ),
        frames=(),
        parameter_version=(),
    )


def _spec(space: gym.Space) -> Nest:
    """Returns the specs of an element of a space, structured like the element."""
    match space:
        case gym.spaces.Dict():
            return {name: _spec(part) for name, part in space.spaces.items()}
        case gym.spaces.Tuple():
            return tuple(_spec(part) for part in space.spaces)
    if space.shape is None or space.dtype is None:
        raise ValueError(f"{space} has no fixed shape, so it cannot travel. Wrap the environment.")
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype))


def _zeros(observation_space: gym.Space) -> TimeStep:
    """Returns the first time step of a batch of one, all zeros."""
    observation = tree.map_structure(
        lambda spec: tf.zeros((1, *spec.shape), spec.dtype), _spec(observation_space)
    )
    return TimeStep(
        observation=observation,
        reward=tf.zeros([1]),
        discount=tf.ones([1]),
        step_type=tf.fill([1], tf.constant(StepType.FIRST, tf.int8)),
    )
