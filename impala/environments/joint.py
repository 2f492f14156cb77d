"""One pair of spaces for several tasks, and the wrapper that lets each be played through it.

The rules: arrays of the same dtype and number of dimensions become as large as the largest and are
padded with zeros at the end of each dimension; choices (Discrete with the same start) become as
many as the largest has. Dicts and tuples must have the same parts, to which the rules apply.
Actions must be choices, or the same space everywhere. Where the numbers of actions differ, the
observation gets an `action_mask`, which makes what a task does not have impossible; if asked for,
also the task's number.
"""

from collections.abc import Sequence

import gymnasium as gym
import numpy as np

from impala.environments import base
from impala.environments.spaces import (
    ACTION_MASK,
    TASK,
    Spaces,
    has_action_mask,
    is_wrapped,
    leaves,
    num_tasks,
    written,
)
from impala.types import Nest, TimeStep


def join(names: Sequence[str], spaces: Sequence[Spaces], numbered: bool = False) -> Spaces:
    """The spaces that an agent needs to play every task.

    Args:
      names: of the tasks, for messages.
      spaces: of the tasks.
      numbered: whether observations hold the number of the task, if there are several.

    Raises:
      ValueError: if there are none; says which part of which two tasks does not fit.
    """
    observation, action = spaces[0]
    for name, (other_observation, other_action) in zip(names[1:], spaces[1:], strict=True):
        between = f"{names[0]} and {name} cannot be tasks of one run"
        observation = _join(f"{between}: their observations", observation, other_observation)
        differ = action != other_action
        if has_action_mask(other_observation):  # whose entries are in the order of the parts
            differ |= _parts(action) != _parts(other_action)
        if differ and not isinstance(action, gym.spaces.Discrete):
            raise ValueError(f"{between}: their actions are {action} and {other_action}.")
        action = _join(f"{between}: their actions", action, other_action)
    if any(own != action for _, own in spaces):
        for name, (own, _) in zip(names, spaces, strict=True):
            if has_action_mask(own):
                raise ValueError(
                    f"{name} has an action_mask of its own, so it can only be a task beside others "
                    "with as many actions."
                )
        assert isinstance(action, gym.spaces.Discrete)
        observation = _with(observation, ACTION_MASK, gym.spaces.MultiBinary(int(action.n)))
    if numbered and len(spaces) > 1:
        observation = _with(observation, TASK, gym.spaces.Discrete(len(spaces)))
    return observation, action


def _parts(space: gym.Space) -> list[str]:
    return [path for path, _ in leaves(space, is_sorted=False)]


def _join(what: str, one: gym.Space, other: gym.Space) -> gym.Space:
    match one, other:
        case gym.spaces.Dict(), gym.spaces.Dict() if set(one.spaces) == set(other.spaces):
            pairs = [(key, _join(f"{what}/{key}", one[key], other[key])) for key in one.spaces]
            return gym.spaces.Dict(pairs)  # which keep their order
        case gym.spaces.Tuple(), gym.spaces.Tuple() if len(one) == len(other):
            both = enumerate(zip(one, other, strict=True))
            return gym.spaces.Tuple([_join(f"{what}/{i}", *pair) for i, pair in both])
        case gym.spaces.Discrete(), gym.spaces.Discrete() if one.start == other.start:
            return gym.spaces.Discrete(int(max(one.n, other.n)), start=int(one.start))
        case gym.spaces.Box(), gym.spaces.Box():
            if one.dtype == other.dtype and len(one.shape) == len(other.shape):
                shape = tuple(map(max, one.shape, other.shape))
                low, high = (
                    pick(_pad(getattr(one, bound), shape), _pad(getattr(other, bound), shape))
                    for bound, pick in (("low", np.minimum), ("high", np.maximum))
                )
                return gym.spaces.Box(low, high, shape, one.dtype.type)  # () is not inferred
    if one == other:
        return one
    raise ValueError(
        f"{what} are {one} and {other}. They must be arrays of the same dtype and number of "
        "dimensions, or choices with the same start; wrap one of the environments."
    )


def _with(space: gym.Space, name: str, part: gym.Space) -> gym.Space:
    parts = space.spaces if is_wrapped(space) else {"observation": space}
    return gym.spaces.Dict({**parts, name: part})


def _pad(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`array` with zeros at the end of its last dimensions, which become `shape`."""
    if array.shape[array.ndim - len(shape) :] == shape:
        return array
    leading = array.ndim - len(shape)
    missing = [(0, to - has) for has, to in zip(array.shape[leading:], shape, strict=True)]
    return np.pad(array, [(0, 0)] * leading + missing)


def check_fits(own: Spaces, joint: Spaces, *, exactly: bool) -> None:
    """Checks that environments can be played through joint spaces, which the past may have made.

    Args:
      own: spaces of the environments.
      joint: of `join`.
      exactly: nothing is padded, as there is one task.

    Raises:
      ValueError: they cannot; says what differs.
    """
    ours, known = (dict(leaves(_parts_of(each[0]))) for each in (own, joint))
    if not exactly:  # what `join` has added
        known = {x: y for x, y in known.items() if x in ours or x[1:] not in (ACTION_MASK, TASK)}
    fits = ours.keys() == known.keys() and all(
        _is_like(ours[name], known[name], exactly) for name in ours
    )
    is_masked = not exactly and has_action_mask(joint[0])
    is_choice = isinstance(own[1], gym.spaces.Discrete)
    fit = fits, _is_like(own[1], joint[1], not is_masked) if is_choice else own[1] == joint[1]
    for what, is_fit, mine, theirs in zip(("observation", "action"), fit, own, joint, strict=True):
        if not is_fit:
            raise ValueError(
                f"The environment's {what} is {written(mine)}, but was {written(theirs)} for the "
                "agent: play an environment with the same spaces."
            )


def _parts_of(space: gym.Space) -> gym.Space:
    return space if is_wrapped(space) else gym.spaces.Dict(observation=space)


def _is_like(own: gym.Space, joint: gym.Space, exactly: bool) -> bool:
    """Whether elements of a leaf are, perhaps padded, elements of a joint one, up to bounds."""
    match own, joint:
        case gym.spaces.Box(), gym.spaces.Box() if own.dtype == joint.dtype:
            sizes, most = own.shape, joint.shape
        case gym.spaces.Discrete(), gym.spaces.Discrete() if own.start == joint.start:
            sizes, most = (int(own.n),), (int(joint.n),)
        case _:
            return own == joint
    is_smaller = len(sizes) == len(most) and all(np.less_equal(sizes, most))
    return sizes == most or (is_smaller and not exactly)


class Joint(base.Wrapper):
    """Plays a task through joint spaces: pads what it sees, masks the actions it does not have.

    Args:
      environment: the task's.
      observation_space: of `join`.
      action_space: of `join`.
      task: the task's number.
    """

    def __init__(
        self,
        environment: base.Environment,
        observation_space: gym.Space,
        action_space: gym.Space,
        task: int = 0,
    ) -> None:
        super().__init__(environment)
        self.observation_space = observation_space
        self.action_space = action_space
        own = environment.observation_space
        self._added: dict[str, np.ndarray] = {}
        self._is_wrapped = is_wrapped(own)
        if has_action_mask(observation_space) and not has_action_mask(own):  # see `join`
            ours, own_actions = action_space, environment.action_space
            assert isinstance(ours, gym.spaces.Discrete)
            assert isinstance(own_actions, gym.spaces.Discrete)
            mask = np.arange(int(ours.n)) < int(own_actions.n)
            self._added[ACTION_MASK] = np.tile(mask.astype(np.int8), (self.num_envs, 1))
        if num_tasks(observation_space) > 1:
            self._added[TASK] = np.full(self.num_envs, task)

    def changed(self, timestep: TimeStep) -> TimeStep:
        observation, space = timestep.observation, self.observation_space
        if not self._added:
            return timestep._replace(observation=self._padded(space, observation))
        assert isinstance(space, gym.spaces.Dict)
        parts = observation if self._is_wrapped else {"observation": observation}
        padded = {key: self._padded(space[key], part) for key, part in parts.items()}
        return timestep._replace(observation={**padded, **self._added})

    def _padded(self, space: gym.Space, observation: Nest) -> Nest:
        def pad(name: str, leaf: gym.Space, value: np.ndarray) -> np.ndarray:
            return _pad(value, leaf.shape) if isinstance(leaf, gym.spaces.Box) else value

        return base.map_leaves(pad, "observation", space, observation)
