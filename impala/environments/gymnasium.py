"""Any Gymnasium environment: through Gymnasium's vector environments, or a process each."""

import contextlib
import difflib
import functools
import importlib
import json
from collections.abc import Iterator
from typing import Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from impala.config.schema import RepeatConfig
from impala.environments import base
from impala.environments.failure import EnvironmentFailed, where_raised
from impala.environments.processes import Processes
from impala.environments.repeat import ActionRepeat
from impala.types import EnvironmentStep, Nest, TimeStep

_NO_REPEAT = RepeatConfig()


def processes(
    id: str,
    kwargs: dict[str, Any],
    num_envs: int,
    *,
    repeat: RepeatConfig = _NO_REPEAT,
    seconds: float = 60.0,
    max_bytes: int = 0,
    first: int = 0,
) -> Processes:
    """E copies of a registered environment, each in a process of its own.

    Args:
      id: as for `Gymnasium`; what only this process registered must be given as module:id.
      kwargs: keyword arguments of gymnasium.make.
      num_envs: E.
      repeat: how often an action is played.
      seconds: as for `Processes`.
      max_bytes: as for `Processes`.
      first: as for `Processes`.

    Raises:
      ValueError: if Gymnasium cannot make it, or its spaces have no fixed size.
    """
    make = functools.partial(_make_one, id, kwargs, repeat)
    return Processes(make, num_envs, name=id, seconds=seconds, max_bytes=max_bytes, first=first)


class Gymnasium(base.Environment):
    """E copies of a registered environment.

    A step is one frame, unless the environment's info says how many `frames` it played; its
    `discount`, if it has one, is what a step that does not terminate is discounted by. The other
    numbers of its info are passed on, NaN for the environments that did not give them.

    Args:
      id: a registered id; module:id imports the module, which registers it, first.
      kwargs: keyword arguments of gymnasium.make.
      num_envs: E.
      vectorization: sync steps them in turn, in `recv`; own takes the vector environment that is
        registered under the id.
      repeat: how often an action is played.
      render_mode: of environment 0, and then sync; the others show nothing.
      first: index of environment 0 among the actor's, for messages.

    Raises:
      ValueError: if Gymnasium cannot make it, or its spaces have no fixed size.
    """

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any],
        num_envs: int,
        *,
        vectorization: Literal["sync", "own"] = "sync",
        repeat: RepeatConfig = _NO_REPEAT,
        render_mode: str | None = None,
        first: int = 0,
    ) -> None:
        def make(i: int) -> gym.Env:
            with_render = {"render_mode": render_mode} if render_mode and i == 0 else {}
            environment = _make_one(id, {**kwargs, **with_render}, repeat)
            return Numbered(environment, f"environment {first + i} of {id}")

        self._vector: VectorEnv
        if vectorization == "own" and render_mode is None:
            self._vector = _make_own(id, kwargs, num_envs, repeat)
        else:
            self._vector = SyncVectorEnv(
                [functools.partial(make, i) for i in range(num_envs)],
                copy=False,
                autoreset_mode=AutoresetMode.NEXT_STEP,
            )
        self.num_envs = num_envs
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space

    def reset(self, seed: int) -> TimeStep:
        seeds = [int(s) for s in base.seeds(seed, self.num_envs)]
        is_own = not isinstance(self._vector, SyncVectorEnv)
        # Vector environments of others need take no more than one seed.
        observation, _ = self._vector.reset(seed=seeds[0] if is_own else seeds)  # type: ignore[arg-type]
        self._ended = np.zeros(self.num_envs, np.bool_)
        return base.first_timestep(observation, self.num_envs)

    def send(self, action: Nest) -> None:
        self._action = action

    def recv(self) -> EnvironmentStep:
        observation, reward, terminated, truncated, infos = self._vector.step(self._action)
        first, self._ended = self._ended, terminated | truncated
        return base.environment_step(
            observation, reward, terminated, truncated, first, _numbers(infos)
        )

    def render(self) -> np.ndarray:
        picture = None
        if isinstance(self._vector, SyncVectorEnv) and self._vector.render_mode is not None:
            picture = self._vector.envs[0].render()
        if not isinstance(picture, np.ndarray):
            raise ValueError("nothing to render: give render_mode rgb_array")
        return picture

    def close(self) -> None:
        self._vector.close()


class Numbered(gym.Wrapper):
    """One environment of several that step in turn; its errors say which one it is.

    Args:
      environment: what is wrapped.
      name: which one it is.
    """

    def __init__(self, environment: gym.Env, name: str) -> None:
        super().__init__(environment)
        self._name = name

    def doing(self) -> str:
        """Which one it is, for a message about where an actor hangs."""
        return f"in {self._name}"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        try:
            return self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise self._failed(error) from error

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        try:
            return self.env.step(action)
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> EnvironmentFailed:
        what = f"{type(error).__name__}: {error}"
        return EnvironmentFailed(f"{self._name}: {what}", what, where_raised(error))


def check_registered(id: str) -> None:
    """Checks that Gymnasium knows an id, without making an environment.

    Raises:
      ValueError: it does not; names the nearest.
    """
    with _explained(id, {}) as name:
        gym.spec(name)


def parse_kwargs(text: str) -> dict[str, Any]:
    """Keyword arguments from a JSON object.

    Raises:
      ValueError: if it is not one.
    """
    try:
        kwargs = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"environment.kwargs is {text!r}, which is not JSON: {error}.") from error
    if not isinstance(kwargs, dict):
        raise ValueError(
            f'environment.kwargs is {text!r}; it must be a JSON object, such as {{"gravity": 9.8}}.'
        )
    return kwargs


def _make_one(id: str, kwargs: dict[str, Any], repeat: RepeatConfig) -> gym.Env:
    with _explained(id, kwargs) as name:
        environment: gym.Env = gym.make(name, **kwargs)
    try:
        for what in ("observation", "action"):
            base.map_leaves(lambda *_: None, what, getattr(environment, f"{what}_space"))
    except ValueError as error:
        environment.close()
        raise ValueError(f"{id}: {error}") from error
    return environment if repeat == _NO_REPEAT else ActionRepeat(environment, repeat)


def _make_own(id: str, kwargs: dict[str, Any], num_envs: int, repeat: RepeatConfig) -> VectorEnv:
    with _explained(id, kwargs) as name:
        if gym.spec(name).vector_entry_point is None:
            raise ValueError(
                f"environment.vectorization is own, but {id} has no vector environment. Use sync "
                "or async."
            )
        vector = gym.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    mode = vector.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP or repeat != _NO_REPEAT:
        vector.close()
        reason = "cannot repeat actions" if repeat != _NO_REPEAT else f"has the autoreset {mode}"
        raise ValueError(
            f"environment.vectorization is own, but that of {id} {reason}. Use sync or async."
        )
    return vector


@contextlib.contextmanager
def _explained(id: str, kwargs: dict[str, Any]) -> Iterator[str]:
    """Imports what an id says; turns what goes wrong with an environment into a ValueError."""
    module, _, name = id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        yield name
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ValueError(f"environment.id is {id!r}, which cannot be imported: {error}.") from error
    except (gym.error.UnregisteredEnv, gym.error.NameNotFound) as error:
        nearest = difflib.get_close_matches(name, gym.registry, cutoff=0.5)
        advice = f"Nearest: {', '.join(nearest)}." if nearest else "Use module:id for your own."
        raise ValueError(
            f"environment.id is {id!r}, which is not registered with Gymnasium. {advice}"
        ) from error
    except (TypeError, gym.error.Error) as error:
        raise ValueError(f"environment.kwargs is {kwargs}; {id} refuses it: {error}") from error


def _numbers(infos: dict[str, Any]) -> dict[str, np.ndarray]:
    """The numeric scalars of a vector environment's infos: float64 [E], NaN where not given."""
    return {
        name: np.where(infos[f"_{name}"], values, np.nan)
        for name, values in infos.items()
        if f"_{name}" in infos
        and isinstance(values, np.ndarray)
        and values.ndim == 1
        and values.dtype.kind in "biuf"
    }
