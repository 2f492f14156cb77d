"""From an id to what makes an environment: registered with Gymnasium, or named module:attribute.

An attribute is called with keyword arguments: those of `environment.kwargs`; `settings`, if it has
a class `Settings`; `num_envs`, unless it makes one environment; `render_mode`, if the environment
is to be looked at.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from impala.config.schema import RepeatConfig
from impala.environments import base, interface, text
from impala.environments.failure import close
from impala.environments.repeat import ActionRepeat
from impala.parts import components
from impala.parts.components import Allowed, described

_UNKNOWN = (
    "If a package registers it, name that first, as in highway_env:highway-v0: "
    "PACKAGE:{name}. Use module:attribute for yours."
)

_EXTRAS = {"MiniGrid": "minigrid", "BabyAI": "minigrid"}  # what registers ids that begin so


@dataclasses.dataclass(frozen=True)
class Source:
    """Makes environments of one kind; it can be pickled."""

    id: str
    kind: type[gym.Env] | type[VectorEnv] | type[base.Environment]
    """What it makes."""
    call: Callable[..., Any]
    kwargs: dict[str, Any]

    def single(
        self, repeat: RepeatConfig, text_characters: int, render_mode: str | None = None
    ) -> gym.Env:
        """Makes one environment, whose actions are repeated and whose texts are numbers.

        Raises:
          ValueError: it cannot be made so.
        """
        made = interface.conforming(self.made(render_mode), self.id)
        if text.has_text(made.observation_space):
            made = text.TextAsNumbers(made, text_characters)
        return made if repeat == RepeatConfig() else ActionRepeat(made, repeat)

    def made(self, render_mode: str | None, num_envs: int | None = None) -> Any:
        """Makes what is of its kind; `num_envs` is for those that hold several environments.

        Raises:
          ValueError: it cannot be made so.
        """
        kwargs = dict(self.kwargs)
        if num_envs is not None:
            kwargs["num_envs"] = num_envs
        shown = {} if render_mode is None else {"render_mode": render_mode}
        self._check_call(kwargs, shown)
        try:
            made = self.call(**kwargs, **shown)
        except Exception as error:
            if isinstance(self.call, functools.partial) and isinstance(error, ValueError):
                raise  # it is explained already
            raise ValueError(f"Making {self.id} raises {described(error)}.") from error
        if not isinstance(made, self.kind):
            raise ValueError(
                f"{self.id} gives a {type(made).__name__}; it must be a class or a function that "
                f"gives a {self.kind.__module__.split('.')[0]} {self.kind.__name__}."
            )
        try:
            self._check(made, num_envs)
        except ValueError:
            close(made, self.id)
            raise
        return made

    def _check_call(self, kwargs: dict[str, Any], shown: dict[str, Any]) -> None:
        """Checks that the arguments are ones that it takes."""
        try:
            signature = inspect.signature(self.call)
        except ValueError:  # it is written in C
            return
        for arguments, refusal in (
            (kwargs, f"cannot be made with {', '.join(kwargs) or 'no arguments'}"),
            ({**kwargs, **shown}, "cannot be shown, since it cannot be made with render_mode"),
        ):
            try:
                signature.bind(**arguments)
            except TypeError as error:
                raise ValueError(
                    f"{self.id} {refusal}: {error}. It takes {signature}; environment.kwargs is "
                    f"{json.dumps(self.kwargs, default=str)}."
                ) from None

    def _check(self, made: Any, num_envs: int | None) -> None:
        """Checks what a custom environment says of itself."""
        prefix = "single_" if self.kind is VectorEnv else ""
        for what in ("observation", "action"):
            space = getattr(made, f"{prefix}{what}_space", None)
            if not isinstance(space, gym.Space):
                raise ValueError(
                    f"{self.id} has no {prefix}{what}_space: have its constructor set it, to a "
                    "space of Gymnasium."
                )
            if what == "observation" and self.kind is gym.Env:  # see `single`
                space = text.as_numbers(space, 0)
            try:
                _check_keys(space)
                base.map_leaves(lambda *_: None, what, space)
            except ValueError as error:
                raise ValueError(f"{self.id}: {error}") from None
        if num_envs is not None and getattr(made, "num_envs", None) != num_envs:
            raise ValueError(
                f"{self.id} was made with num_envs {num_envs}, but its num_envs is "
                f"{getattr(made, 'num_envs', 'not set')}: have its constructor set it."
            )


def _check_keys(space: gym.Space) -> None:
    """Refuses keys that JSON would turn into strings, with which no value would agree."""
    match space:
        case gym.spaces.Dict():
            for key, part in space.spaces.items():
                if not isinstance(key, str):
                    raise ValueError(
                        f"its Dict has the key {key!r}: keys must be strings, by which checkpoints "
                        "and messages name parts"
                    )
                _check_keys(part)
        case gym.spaces.Tuple():
            for part in space.spaces:
                _check_keys(part)


def find(
    id: str, kwargs: dict[str, Any], component: Any, settings: Any, *, takes_vector: bool
) -> Source:
    """Finds what makes the environments of an id.

    Args:
      id: a registered one, module:id, module:attribute, or the name of an entry point.
      kwargs: keyword arguments.
      component: the attribute, if it has been imported already. Otherwise what the id names is
        imported, whatever it is.
      settings: an instance of the attribute's class `Settings`; None: its defaults.
      takes_vector: whether a registered vector environment is wanted instead of a single one.

    Raises:
      ValueError: there is no such environment, or it is of no kind that can be played.
    """
    with _explained(id):
        attribute = component
        if attribute is None:
            attribute = components.load_environment(id, Allowed((id,)))
        if attribute is None:
            return _registered(id, kwargs, takes_vector)
    if hasattr(attribute, "Settings"):
        kwargs = {**kwargs, "settings": attribute.Settings() if settings is None else settings}
    if not callable(attribute):
        raise ValueError(
            f"{id} is a {type(attribute).__name__}; it must be a subclass of gymnasium.Env, "
            "gymnasium.vector.VectorEnv or impala.environments.Environment, or a function that "
            "gives a gymnasium.Env."
        )
    bases = attribute.__mro__ if inspect.isclass(attribute) else ()
    kind = next((each for each in (base.Environment, VectorEnv) if each in bases), gym.Env)
    return Source(id, kind, attribute, kwargs)


def check_registered(id: str) -> None:
    """Checks that Gymnasium knows an id, without making an environment.

    Raises:
      ValueError: it does not; names the nearest.
    """
    with _explained(id):
        spec = _spec(id)
        if str(spec.entry_point).startswith("ale_py."):  # once ALE is loaded, which it need not be
            raise gym.error.NameNotFound(f"{id} is a game of ALE, without our preprocessing.")


def _spec(name: str) -> gym.envs.registration.EnvSpec:
    """Returns what Gymnasium knows of a name, once the extra that registers it was imported."""
    if package := _EXTRAS.get(name.partition("-")[0]):
        importlib.import_module(package)
    return gym.spec(name)


def _registered(id: str, kwargs: dict[str, Any], takes_vector: bool) -> Source:
    spec = _spec(id.rpartition(":")[2])
    if spec.entry_point is None or (takes_vector and spec.vector_entry_point is not None):
        return Source(id, VectorEnv, functools.partial(_make_vector, id), kwargs)
    return Source(id, gym.Env, functools.partial(_make_single, id), kwargs)


def _make_single(id: str, **kwargs: Any) -> gym.Env:
    with _explained(id, kwargs):
        components.load_environment(id, Allowed((id,)))  # a process of its own has not done it yet
        _spec(name := id.rpartition(":")[2])
        return gym.make(name, **kwargs)


def _make_vector(id: str, num_envs: int, **kwargs: Any) -> VectorEnv:
    name = id.rpartition(":")[2]
    with _explained(id, kwargs):
        return gym.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **kwargs)


@contextlib.contextmanager
def _explained(id: str, kwargs: dict[str, Any] | None = None) -> Iterator[None]:
    """Turns what goes wrong with an environment into a ValueError."""
    try:
        yield
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ValueError(f"environment.id is {id!r}, which cannot be imported: {error}.") from error
    except (TypeError, gym.error.Error) as error:
        is_unknown = isinstance(error, gym.error.Error) and kwargs is None
        if is_unknown or isinstance(error, gym.error.UnregisteredEnv):
            near = _nearest(id.rpartition(":")[2])
            advice = f"Nearest: {', '.join(near)}." if near else _UNKNOWN.format(name=id)
            raise ValueError(
                f"environment.id is {id!r}, which is not registered with Gymnasium. {advice}"
            ) from error
        if kwargs is None:
            raise
        if "render_mode" in kwargs and "render_mode" in str(error):
            raise ValueError(
                f"{id} cannot be shown, as it is made without render_mode: {described(error)}."
            ) from error
        raise ValueError(
            f"environment.kwargs is {kwargs}; {id} refuses it: {described(error)}."
        ) from error


def _nearest(id: str) -> list[str]:
    """Returns ids that can be played, of which one may be meant: the newest version of each.

    Names are compared, without namespace, version and what older ids of Atari say of preprocessing:
    that of PongNoFrameskip-v4 is pong.
    """
    from impala.environments import atari  # Here, so that others load no emulator.

    def name_of(id: str) -> str:
        name = re.sub(r"-v\d+$", "", id.rpartition("/")[2].lower())
        return re.sub("(-ram)?(noframeskip|deterministic)?(-ram)?$", "", name)

    newest = {("", "catch"): "Catch", **{("ALE", name_of(game)): game for game in atari.games()}}
    for known, spec in gym.registry.items():
        if not str(spec.entry_point).startswith("ale_py."):
            newest[spec.namespace or "", name_of(known)] = known  # later versions come later
    names = difflib.get_close_matches(name_of(id), {name for _, name in newest}, cutoff=0.6)
    return [known for near in names for (_, name), known in newest.items() if name == near]
