"""Adapters of Gymnasium: single environments that step in turn, and vector environments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from impala.environments import base, interface
from impala.environments.failure import EnvironmentFailed, close, failure_of
from impala.runtime.signals import exits_by_signal
from impala.types import EnvironmentStep, Nest, StepType, TimeStep


class NextStep(base.Environment):
    """A vector environment that begins an episode in the step after the end of the one before.

    A step is one frame, unless the environment's info says how many `frames` it played; its
    `discount`, if it has one, is what a step that does not terminate is discounted by. The other
    numbers of its info are passed on, NaN for the environments that did not give them.

    Args:
      vector: the vector environment, with autoreset mode NEXT_STEP.
    """

    def __init__(self, vector: VectorEnv) -> None:
        self._vector = vector
        self.code = vector.envs[0] if isinstance(vector, SyncVectorEnv) else vector
        self.num_envs = vector.num_envs
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space

    def reset(self, seed: int) -> TimeStep:
        seeds = [int(s) for s in base.seeds(seed, self.num_envs)]
        is_ours = isinstance(self._vector, SyncVectorEnv)
        # Vector environments of others need take no more than one seed.
        observation, _ = self._vector.reset(seed=seeds if is_ours else seeds[0])  # type: ignore[arg-type]
        self._ended = np.zeros(self.num_envs, np.bool_)
        return base.first_timestep(observation, self.num_envs)

    def send(self, action: Nest) -> None:
        self._action = action

    def recv(self) -> EnvironmentStep:
        observation, reward, terminated, truncated, infos = interface.checked_step(
            self._vector.step(self._action)
        )
        infos = _numbers(infos, self.num_envs)
        step = base.environment_step(observation, reward, terminated, truncated, self._ended, infos)
        self._ended = step.timestep.step_type == StepType.LAST
        return step

    def render(self) -> np.ndarray:
        return _first_picture(self._vector)

    def close(self) -> None:
        self._vector.close()


class OneByOne(base.Environment):
    """E vector environments of one environment each: for those that do not reset in the next step.

    With SAME_STEP, a vector environment resets in the step that ends an episode, so that its next
    step already needs an action for the first observation of the next episode. The agent has not
    seen that observation: it has to see LAST first, and then FIRST. For one row, an environment
    whose episode has ended has to wait while the others step, and the environments of a vector
    environment cannot wait for each other. So each is on its own here: it is not stepped for the
    row of FIRST, which shows the observation that SAME_STEP gave with the end, or that a reset
    gives with DISABLED. Rows are exactly those of NEXT_STEP.

    Args:
      vectors: E vector environments, each of one environment, with autoreset mode SAME_STEP or
        DISABLED.
    """

    def __init__(self, vectors: Sequence[VectorEnv]) -> None:
        self._vectors = vectors
        self.code = vectors[0]
        self.num_envs = len(vectors)
        self.observation_space = vectors[0].single_observation_space
        self.action_space = vectors[0].single_action_space
        self._resets_itself = autoreset_mode(vectors[0]) == AutoresetMode.SAME_STEP

    def reset(self, seed: int) -> TimeStep:
        seeds = base.seeds(seed, self.num_envs)
        first = [
            vector.reset(seed=int(own))[0] for vector, own in zip(self._vectors, seeds, strict=True)
        ]
        self._next_first: list[Nest] = [None] * self.num_envs  # what SAME_STEP gave with the end
        self._ended = np.zeros(self.num_envs, np.bool_)
        return base.first_timestep(self._joined(first), self.num_envs)

    def send(self, action: Nest) -> None:
        self._action = action

    def recv(self) -> EnvironmentStep:
        first = self._ended
        rewards, terminated, truncated = np.zeros((3, self.num_envs))
        observations: list[Nest] = []
        infos: list[dict[str, float]] = []
        for i, vector in enumerate(self._vectors):
            if first[i]:
                shown = self._next_first[i] if self._resets_itself else vector.reset()[0]
                observations.append(shown)
                infos.append({})
                continue
            action = base.map_leaves(
                lambda name, space, leaf, i=i: leaf[i : i + 1],
                "action",
                self.action_space,
                self._action,
            )
            observation, reward, ends, cut_off, info = interface.checked_step(vector.step(action))
            rewards[i], terminated[i], truncated[i] = reward[0], ends[0], cut_off[0]
            if (ends[0] or cut_off[0]) and self._resets_itself:
                self._next_first[i] = _copied(self.observation_space, observation)
                observation, info = self._final(info), info.get("final_info", {})
            observations.append(observation)
            infos.append({name: x[0] for name, x in _numbers(info, 1).items()})
        self._ended = (terminated + truncated) > 0.0
        return base.environment_step(
            self._joined(observations),
            rewards,
            terminated > 0.0,
            truncated > 0.0,
            first,
            merged(infos),
        )

    def render(self) -> np.ndarray:
        return _first_picture(self._vectors[0])

    def close(self) -> None:
        for vector in self._vectors:
            vector.close()

    def _final(self, infos: dict[str, Any]) -> Nest:
        """The last observation of an episode, [1, ...], in whichever form it was given."""
        if "final_obs" not in infos:
            raise ValueError(
                "its autoreset mode is SAME_STEP, but the infos of a step that ends an episode "
                f"have no final_obs; they have {sorted(infos)}"
            )
        final = infos["final_obs"]
        if isinstance(final, np.ndarray) and final.dtype == object:  # as Gymnasium collects them
            final = final[0]

            def one(name: str, space: gym.Space, leaf: Any) -> np.ndarray:
                return np.asarray(leaf, space.dtype)[np.newaxis]

            return base.map_leaves(one, "final_obs", self.observation_space, final)
        return final

    def _joined(self, observations: Sequence[Nest]) -> Nest:
        def join(name: str, space: gym.Space, *leaves: np.ndarray) -> np.ndarray:
            return np.concatenate(leaves)

        return base.map_leaves(join, "observation", self.observation_space, *observations)


def in_turn(make: Callable[[bool], gym.Env], num_envs: int, name: str, first: int) -> NextStep:
    """Returns E environments that step one after another, in `recv`.

    Args:
      make: makes one; its argument is whether it is environment 0.
      num_envs: E.
      name: of the environment, for messages.
      first: index of environment 0 among the actor's, for messages.
    """
    makers = [
        lambda i=i: Numbered(make(i == 0), f"environment {first + i} of {name}")
        for i in range(num_envs)
    ]
    return NextStep(SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP))


def vector(make: Callable[[int], VectorEnv], num_envs: int, name: str) -> base.Environment:
    """Returns E environments of a vector environment, whatever its autoreset mode.

    Args:
      make: makes a vector environment of so many environments.
      num_envs: E.
      name: of the environment, for messages.

    Raises:
      ValueError: it does not say when it resets.
    """
    made = make(num_envs)
    match autoreset_mode(made):
        case AutoresetMode.NEXT_STEP:
            return NextStep(made)
        case AutoresetMode.SAME_STEP | AutoresetMode.DISABLED:
            close(made, name)
            return OneByOne([make(1) for _ in range(num_envs)])
    mode = made.metadata.get("autoreset_mode")
    close(made, name)
    raise ValueError(
        f"{name} has the autoreset mode {mode}: have its constructor set "
        'self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}, if it '
        "begins an episode in the step after the end of the one before, or else SAME_STEP."
    )


def autoreset_mode(vector: VectorEnv) -> AutoresetMode | None:
    """Returns when a vector environment resets; None if it does not say so."""
    mode = vector.metadata.get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError:
        return None


class Numbered(gym.Wrapper):
    """One environment of several that step in turn; its errors say which one it is.

    An observation that is not of its space's shape and type is one, see `converted`. Of its infos
    only numbers are passed on, all of one type: Gymnasium collects each by the type that the first
    environment gave.

    Args:
      environment: what is wrapped.
      name: which one it is.
    """

    def __init__(self, environment: gym.Env, name: str) -> None:
        super().__init__(environment)
        self._name = name
        space = environment.observation_space
        self._form = space.shape, space.dtype  # looked at first, since that is quick

    def doing(self) -> str:
        """Which one it is, for a message about where an actor hangs."""
        return f"in {self._name}"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        try:
            observation, info = self.env.reset(seed=seed, options=options)
            return self._converted(observation), numbers(info)
        except (Exception, SystemExit) as error:
            if exits_by_signal(error):
                raise
            raise self._failed(error, "reset") from error

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            observation = self._converted(observation)
            return observation, number(reward), terminated, truncated, numbers(info)
        except (Exception, SystemExit) as error:
            if exits_by_signal(error):
                raise
            raise self._failed(error, "step") from error

    def _converted(self, observation: Any) -> Nest:
        is_array = isinstance(observation, np.ndarray)
        if is_array and (observation.shape, observation.dtype) == self._form:
            return observation
        return base.map_leaves(converted, "observation", self.observation_space, observation)

    def _failed(self, error: BaseException, method: str) -> EnvironmentFailed:
        message = f"{self._name}: {type(error).__name__}: {error}"
        return EnvironmentFailed(message, *failure_of(error, self._name, self.env, method))


def converted(name: str, space: gym.Space, value: Any) -> np.ndarray:
    """Returns a value that one environment gave, in its space's type.

    Floating-point numbers may be rounded or become infinite, which is refused elsewhere.

    Raises:
      ValueError: it has another shape, or integers of that type would be other numbers.
    """
    base.check_shape(name, space, value)
    given = np.asarray(value)
    with np.errstate(over="ignore", invalid="ignore"):
        array = given.astype(space.dtype, copy=False)
    if array.dtype.kind in "biu" and given.dtype != array.dtype and (array != given).any():
        place = tuple(map(int, np.argwhere(array != given)[0]))
        at = f"[{', '.join(map(str, place))}]" if place else ""
        raise ValueError(
            f"{name}{at} is {given[place]}, which {array.dtype} cannot hold: clip, scale or round "
            "it, or correct observation_space"
        )
    return array


def number(reward: Any) -> float:
    """Returns the reward that one environment gave.

    Raises:
      ValueError: it is not one number.
    """
    try:
        return float(reward)
    except (TypeError, ValueError):
        is_array = bool(getattr(reward, "shape", ()))
        what = f"an array of shape {reward.shape}" if is_array else repr(reward)
        raise ValueError(f"the reward is {what}; it must be one number: return a float") from None


def numbers(info: Any) -> dict[str, float]:
    """Returns the numeric scalars of one environment's info, by name.

    Raises:
      ValueError: it has no names.
    """
    if not isinstance(info, Mapping):
        raise ValueError(f"the info is {info!r}; it must be a dict: return {{}} if it says nothing")
    return {
        str(name): float(value)
        for name, value in info.items()
        if isinstance(value, bool | int | float | np.bool_ | np.number)
        or (isinstance(value, np.ndarray) and not value.ndim and value.dtype.kind in "biuf")
    }


def _numbers(infos: dict[str, Any], num_envs: int) -> dict[str, np.ndarray]:
    """The numeric scalars of a vector environment's infos: float64 [E], NaN where not given.

    Where they were given is said by a mask of the same name behind an underscore; without one,
    everywhere.
    """
    masks = {f"_{name}" for name in infos}
    return {
        str(name): np.where(infos.get(f"_{name}", True), values, np.nan)
        for name, values in infos.items()
        if name not in masks
        and isinstance(values, np.ndarray)
        and values.shape == (num_envs,)
        and values.dtype.kind in "biuf"
    }


def merged(infos: Sequence[dict[str, float]]) -> dict[str, np.ndarray]:
    """Returns the infos of E environments, by name: float64 [E], NaN where not given."""
    names = {name: None for info in infos for name in info}
    return {
        name: np.array([info.get(name, np.nan) for info in infos], np.float64) for name in names
    }


def _copied(space: gym.Space, observation: Nest) -> Nest:
    return base.map_leaves(lambda name, leaf, x: np.array(x), "observation", space, observation)


def _first_picture(vector: VectorEnv) -> np.ndarray:
    """What environment 0 shows.

    Raises:
      ValueError: it shows nothing.
    """
    if isinstance(vector, SyncVectorEnv):
        shown: Any = vector.envs[0].render() if vector.render_mode is not None else None
    else:
        shown = vector.render()
    if isinstance(shown, tuple | list) or (isinstance(shown, np.ndarray) and shown.ndim == 4):
        shown = shown[0]  # one picture for each environment
    if not isinstance(shown, np.ndarray):
        raise ValueError(
            "nothing to render: give render_mode rgb_array, and have render return uint8 [height, "
            "width, 3]"
        )
    return shown
