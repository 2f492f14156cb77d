"""Any Gymnasium environment, through Gymnasium's own vector environments."""

import contextlib
import difflib
import functools
import importlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from impala.configs import RepeatConfig
from impala.environments import base
from impala.environments.repeat import ActionRepeat
from impala.types import EnvironmentStep, Nest, TimeStep

_NO_REPEAT = RepeatConfig()
_CLOSE_SECONDS = 5.0  # that a step under way has to finish when its environment is closed


class Gymnasium(base.Environment):
    """E copies of a registered environment.

    A step is one frame, unless the environment's info says how many `frames` it played; its
    `discount`, if it has one, is what a step that does not terminate is discounted by. The other
    numbers of its info are passed on, NaN for the environments that did not give them.

    Args:
      id: a registered id; module:id imports the module, which registers it, first.
      kwargs: keyword arguments of gymnasium.make.
      num_envs: E.
      vectorization: sync steps them in turn, in `recv`; async steps each in a process of its own,
        started afresh, so an id that only this process registered must be given as module:id; own
        takes the vector environment that is registered under the id.
      repeat: how often an action is played.
      render_mode: of environment 0, and then sync; the others show nothing.

    Raises:
      ValueError: if Gymnasium cannot make it, or its spaces have no fixed size.
    """

    def __init__(
        self,
        id: str,
        kwargs: dict[str, Any],
        num_envs: int,
        *,
        vectorization: Literal["sync", "async", "own"] = "sync",
        repeat: RepeatConfig = _NO_REPEAT,
        render_mode: str | None = None,
    ) -> None:
        makers = [functools.partial(_make_one, id, kwargs, repeat) for _ in range(num_envs)]
        if render_mode is not None:
            with_render = {**kwargs, "render_mode": render_mode}
            makers[0] = functools.partial(_make_one, id, with_render, repeat)
            vectorization = "sync"
        self._vector: VectorEnv
        if vectorization == "own":
            self._vector = _make_own(id, kwargs, num_envs, repeat)
        elif vectorization == "sync":
            self._vector = SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
        else:
            # A fork of a process that has threads (gRPC's, TensorFlow's) may hang.
            self._vector = AsyncVectorEnv(
                makers,
                shared_memory=True,
                copy=False,
                context="forkserver",
                autoreset_mode=AutoresetMode.NEXT_STEP,
            )
        self.num_envs = num_envs
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space
        self._stepping = False

    def reset(self, seed: int) -> TimeStep:
        seeds = [int(s) for s in base.seeds(seed, self.num_envs)]
        is_own = not isinstance(self._vector, SyncVectorEnv | AsyncVectorEnv)
        # Vector environments of others need take no more than one seed.
        observation, _ = self._vector.reset(seed=seeds[0] if is_own else seeds)  # type: ignore[arg-type]
        self._ended = np.zeros(self.num_envs, np.bool_)
        return base.first_timestep(observation, self.num_envs)

    def send(self, action: Nest) -> None:
        self._stepping = True
        if isinstance(self._vector, AsyncVectorEnv):
            self._vector.step_async(action)
        else:
            self._action = action

    def recv(self) -> EnvironmentStep:
        if isinstance(self._vector, AsyncVectorEnv):
            observation, reward, terminated, truncated, infos = self._vector.step_wait()
        else:
            observation, reward, terminated, truncated, infos = self._vector.step(self._action)
        self._stepping = False
        first, self._ended = self._ended, terminated | truncated
        info = _numbers(infos)
        ones = np.ones(self.num_envs)
        frames = np.nan_to_num(info.pop("frames", ones), nan=1.0)
        discount = np.nan_to_num(info.pop("discount", ones), nan=1.0).astype(np.float32)
        timestep = base.next_timestep(observation, reward, terminated, truncated, first)
        return EnvironmentStep(
            timestep._replace(discount=timestep.discount * np.where(first, 1.0, discount)),
            np.where(first, 0, frames).astype(np.int32),
            info,
        )

    def render(self) -> np.ndarray:
        picture = None
        if isinstance(self._vector, SyncVectorEnv) and self._vector.render_mode is not None:
            picture = self._vector.envs[0].render()
        if not isinstance(picture, np.ndarray):
            raise ValueError("nothing to render: give render_mode rgb_array")
        return picture

    def close(self) -> None:
        if not isinstance(self._vector, AsyncVectorEnv):
            self._vector.close()
            return
        try:
            if self._stepping:
                self._vector.step_wait(timeout=_CLOSE_SECONDS)
            self._vector.close()
        except Exception:  # One of them is dead or stuck, and Gymnasium would wait for it.
            for process in self._vector.processes:
                process.kill()
                process.join()
            self._vector.closed = True


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
