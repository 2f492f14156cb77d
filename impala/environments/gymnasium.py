"""Any Gymnasium environment, through Gymnasium's own vector environments."""

import difflib
import functools
import importlib
import json
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from impala.environments import base
from impala.types import EnvironmentStep, Nest, TimeStep

_CLOSE_SECONDS = 5.0  # that a step under way has to finish when its environment is closed


class Gymnasium(base.Environment):
    """E copies of a registered environment.

    A step is one frame, unless the environment's info says how many `frames` it played. The other
    numbers of its info are passed on, NaN for the environments that did not give them.

    Args:
      id: a registered id; module:id imports the module, which registers it, first.
      kwargs: keyword arguments of gymnasium.make.
      num_envs: E.
      vectorization: sync steps them in turn, in `recv`; async steps each in a process of its own,
        started afresh, so an id that only this process registered must be given as module:id.
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
        vectorization: Literal["sync", "async"] = "sync",
        render_mode: str | None = None,
    ) -> None:
        makers = [functools.partial(_make_one, id, kwargs) for _ in range(num_envs)]
        if render_mode is not None:
            makers[0] = functools.partial(_make_one, id, {**kwargs, "render_mode": render_mode})
            vectorization = "sync"
        self._vector: SyncVectorEnv | AsyncVectorEnv
        if vectorization == "sync":
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
        seeds: list[int | None] = [int(s) for s in base.seeds(seed, self.num_envs)]
        observation, _ = self._vector.reset(seed=seeds)
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
        frames = np.nan_to_num(info.pop("frames", np.ones(self.num_envs)), nan=1.0)
        return EnvironmentStep(
            base.next_timestep(observation, reward, terminated, truncated, first),
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
        if isinstance(self._vector, SyncVectorEnv):
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


def _make_one(id: str, kwargs: dict[str, Any]) -> gym.Env:
    module, _, name = id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        environment: gym.Env = gym.make(name, **kwargs)
    except ImportError as error:
        raise ValueError(f"environment.id is {id!r}, which cannot be imported: {error}.") from error
    except gym.error.UnregisteredEnv as error:
        nearest = difflib.get_close_matches(name, gym.registry, cutoff=0.5)
        advice = f"Nearest: {', '.join(nearest)}." if nearest else "Use module:id for your own."
        raise ValueError(
            f"environment.id is {id!r}, which is not registered with Gymnasium. {advice}"
        ) from error
    except (TypeError, gym.error.Error) as error:
        raise ValueError(f"environment.kwargs is {kwargs}; {id} refuses it: {error}") from error
    try:
        for what in ("observation", "action"):
            base.map_leaves(lambda *_: None, what, getattr(environment, f"{what}_space"))
    except ValueError as error:
        environment.close()
        raise ValueError(f"{id}: {error}") from error
    return environment


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
