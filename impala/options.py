"""Where the settings of a run come from: flags over environment variables over YAML over preset.

Frozen dataclasses become plain data and come back, strictly: an unknown name or an impossible
value is an `OptionError` that names it, what is allowed and the nearest right one. Works on any
dataclass written like those of `impala.configs`; imports neither TensorFlow nor gymnasium.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import pathlib
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import yaml

from impala import phases, tasks
from impala.configs import PRESETS, Config, Range

T = TypeVar("T")

ENVIRONMENT_PREFIX = "IMPALA_"


class OptionError(ValueError):
    """A setting has a name or a value that it cannot have."""


# Plain data.


def to_dict(config: Any) -> dict[str, Any]:
    """Turns nested dataclasses into nested dicts of numbers, strings, booleans and lists."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Turns plain data, as JSON or YAML reads it, into nested dataclasses.

    Args:
      cls: a dataclass whose fields all have defaults; what `data` leaves out keeps them.
      data: field name -> value.

    Raises:
      OptionError: an unknown name, a value of another type or outside its range.
    """
    return overlay(cls(), data)


def overlay(config: T, data: Any, source: str = "") -> T:
    """Returns `config` with the values of `data`, nested and maybe partial, put over its own.

    Args:
      config: nested dataclasses.
      data: plain data.
      source: where `data` comes from; error messages begin with it.

    Raises:
      OptionError: an unknown name, a value of another type or outside its range.
    """
    try:
        return typing.cast(T, _overlay(config, data, path="", root=config))
    except OptionError as error:
        raise OptionError(f"{source}{error}") from None


def to_yaml(config: Any) -> str:
    """Writes a configuration as YAML that `--config` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def flatten(config: Any) -> dict[str, Any]:
    """Lists every setting: dotted path such as "optimiser.learning_rate" -> value."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= {f"{field.name}.{path}": v for path, v in flatten(value).items()}
        else:
            flat[field.name] = value
    return flat


def differences(old: Any, new: Any) -> list[str]:
    """Describes each setting that differs, such as "seed: 0 -> 1"."""
    before, after = flatten(old), flatten(new)
    return [
        f"{path}: {before[path]} -> {after[path]}" for path in after if before[path] != after[path]
    ]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns the hint "Did you mean 'x'?", or nothing if no candidate is near."""
    candidates = list(candidates)
    matches = difflib.get_close_matches(name, candidates, n=1)
    if not matches:  # learning_rate -> optimiser.learning_rate
        by_tail = {path.rsplit(".", 1)[-1]: path for path in candidates}
        tail = name.rsplit(".", 1)[-1]
        matches = [by_tail[near] for near in difflib.get_close_matches(tail, by_tail, n=1)]
    return f"Did you mean {matches[0]!r}?" if matches else ""


def choice(name: str, value: str, choices: Iterable[str]) -> str:
    """Returns `value` if it is one of `choices`.

    Raises:
      OptionError: it is none of them; says what they are and which is nearest.
    """
    choices = list(choices)
    if value in choices:
        return value
    sentence = f"{name} is {value!r}; it must be one of {', '.join(choices)}."
    raise OptionError(f"{sentence} {nearest(str(value), choices)}".strip())


def check_ranges(command: Any) -> None:
    """Checks a dataclass that plain data does not hold, such as a command with its paths.

    Raises:
      OptionError: a number is outside the `Range` of its field.
    """
    for name, hint in typing.get_type_hints(type(command), include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, Range):
                _check_range(name, getattr(command, name), mark)


def describe(limits: Range) -> str:
    """Words the range of a setting."""
    if math.isinf(limits.high):
        return f"at least {limits.low:g}"
    return f"from {limits.low:g} to {limits.high:g}"


# The layers.


def layered(preset: str, file: pathlib.Path | None, environ: Mapping[str, str]) -> Config:
    """Returns the preset with a YAML file and, over it, environment variables put on it.

    Raises:
      OptionError: of any layer; the message begins with the layer's name.
    """
    config = PRESETS[choice("The preset", preset, PRESETS)][1]
    if file is not None:
        config = overlay(config, read_yaml(file), f"{file}: ")
    return overlay(config, from_environment(environ), "Environment variables: ")


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collects variables such as IMPALA_OPTIMISER__LEARNING_RATE=3e-4 into nested settings.

    Lists are JSON, or numbers between commas or spaces. Variables that begin with IMPALA_ but have
    no "__" are other people's (Kubernetes makes IMPALA_LEARNER_PORT for a service of that name),
    except those that differ from ours only in underscores or hardly at all.

    Raises:
      OptionError: a variable names no setting; says which is nearest.
    """
    ours = {variable(path): path for path in flatten(Config())}
    squeezed = {name.replace("__", "_"): name for name in ours}
    defaults = flatten(Config())
    settings: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name not in ours:
            near = difflib.get_close_matches(name, ours, n=1, cutoff=0.6 if "__" in name else 0.9)
            near = [squeezed[name]] if name in squeezed else near
            if near or "__" in name:
                hint = f"Did you mean {near[0]}?" if near else "See impala train --help."
                raise OptionError(f"Environment variable {name} names no setting. {hint}")
            continue
        *sections, last = ours[name].split(".")
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = _read_text(text, defaults[ours[name]])
    return settings


def to_environment(config: Config) -> dict[str, str]:
    """Writes every setting as the environment variable that `from_environment` reads."""
    return {
        variable(path): value if isinstance(value, str) else json.dumps(value)
        for path, value in flatten(config).items()
    }


def variable(path: str) -> str:
    """Names the environment variable of a setting: "actor.num_envs" -> IMPALA_ACTOR__NUM_ENVS."""
    return ENVIRONMENT_PREFIX + path.upper().replace(".", "__")


def validate(config: Config) -> Config:
    """Returns `config` if each value is in its range and the values go together.

    Raises:
      OptionError: names the settings, their values and what would fit.
    """
    overlay(config, to_dict(config))
    environments, groups = config.actor.num_envs, config.actor.num_groups
    if environments % groups:
        raise OptionError(
            f"actor.num_envs is {environments} and actor.num_groups {groups}: the groups have the "
            f"same size, so give a multiple of {groups}, "
            f"such as {-(-environments // groups) * groups}."
        )
    if environments // groups > config.learner.max_envs_per_message:
        raise OptionError(
            f"actor.num_envs is {environments} in {groups} groups, which sends "
            f"{environments // groups} unrolls per message; learner.max_envs_per_message is "
            f"{config.learner.max_envs_per_message}. Raise it, or have fewer environments."
        )
    # One environment hangs, its process is replaced and starts: all of it within one unroll.
    if config.environment.vectorization == "async" and (
        config.actor.hang_seconds <= (least := 6.0 * config.actor.environment_seconds)
    ):
        raise OptionError(
            f"actor.hang_seconds is {config.actor.hang_seconds:g} and actor.environment_seconds "
            f"{config.actor.environment_seconds:g}: one environment that hangs and starts again, "
            f"which takes up to {least:g} s, would end the actor. Raise the first above that, or "
            "lower the second."
        )
    try:
        algorithms = [phase.algorithm for phase in phases.make(config)]
    except ValueError as error:
        raise OptionError(str(error)) from error
    is_greedy = config.agent.policy == "epsilon_greedy"
    unfit = {"impala", "actor_critic", "sac"} if is_greedy else {"q_learning"}
    if found := sorted(unfit & {*algorithms}):
        raise OptionError(
            f"agent.policy is {config.agent.policy}, which {found[0]} cannot learn: set it to "
            f"{'stochastic' if is_greedy else 'epsilon_greedy'}, or choose another algorithm."
        )
    # While a critic learns first of all, the policy that replay holds is the one there is.
    on_policy = {"actor_critic"} & {*algorithms} | {"critic"} & {*algorithms[1:]}
    if on_policy and config.mix.replayed:
        raise OptionError(
            f"mix.replayed is {config.mix.replayed}, but {on_policy.pop()} does not correct for "
            "what an older policy did. Set mix.replayed to 0, or learn with impala."
        )
    if config.mix.batch_size == 0:
        raise OptionError(
            "mix.learn_from_fresh is false and mix.replayed is 0: there is nothing to learn from. "
            "Set one of them."
        )
    if config.mix.updates > 1 and config.mix.learn_from_fresh:
        raise OptionError(
            f"mix.updates is {config.mix.updates}, but fresh unrolls are learned from once: set "
            "mix.learn_from_fresh to false (--mix.no-learn-from-fresh), or mix.updates to 1."
        )
    if config.guard.max_skips > config.guard.window_updates:
        raise OptionError(
            f"guard.max_skips is {config.guard.max_skips}, but only the last "
            f"{config.guard.window_updates} batches are looked back on: lower it, or raise "
            "guard.window_updates."
        )
    _check_frames(config)
    try:
        kwargs = json.loads(config.environment.kwargs)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"environment.kwargs is {config.environment.kwargs!r}, which is no JSON: {error}. "
            """It must be an object, such as '{"continuous": true}'."""
        ) from None
    if not isinstance(kwargs, dict):
        raise OptionError(
            f"environment.kwargs is {config.environment.kwargs!r}; it must be a JSON object, such "
            """as '{"continuous": true}'."""
        )
    return config


def _check_frames(config: Config) -> None:
    """Refuses unrolls whose frames cannot be counted, or do not fit into replay."""
    try:
        played = tasks.make(config.environment, config.tasks)
    except ValueError as error:
        raise OptionError(str(error)) from error
    steps = config.learner.unroll_length
    most, task = max((tasks.frames_per_step(task, config.limits), task.name) for task in played)
    frames = f"An unroll of {task} can have {most * steps} frames ({steps} steps of up to {most})"
    fewer = "lower learner.unroll_length, the frame skip or environment.repeat.most"
    if most * steps > 2**31 - 1:
        raise OptionError(f"{frames}, more than the {2**31 - 1} that can be counted: {fewer}.")
    if config.mix.replayed and most * steps > config.replay.capacity_frames:
        raise OptionError(
            f"{frames}, but replay.capacity_frames is {config.replay.capacity_frames}: raise it, "
            f"or {fewer}."
        )


def read_yaml(file: pathlib.Path) -> Any:
    """Reads a file as plain data; an empty one is {}.

    Raises:
      OptionError: it cannot be read, or is no YAML.
    """
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{file}: {error.strerror}. Give --config a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} is not YAML: {' '.join(str(error).split())}.") from None
    return {} if data is None else data


def _read_text(text: str, like: Any) -> Any:
    """Reads the text of an environment variable as the plain data that YAML would hold."""
    if isinstance(like, str):
        return text
    if isinstance(like, tuple):
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(data := json.loads(text), list):
                return data
        return text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if isinstance(like, bool):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _overlay(config: Any, data: Any, path: str, root: Any) -> Any:
    if not isinstance(data, Mapping):
        raise OptionError(
            f"{path or 'The configuration'} holds settings by name, not {data!r}. "
            f"It has: {', '.join(field.name for field in dataclasses.fields(config))}."
        )
    hints = typing.get_type_hints(type(config), include_extras=True)
    changes = {}
    for name, value in data.items():
        where = f"{path}.{name}" if path else str(name)
        if name not in hints:
            here = [f"{path}.{known}" if path else known for known in hints]
            hint = nearest(where, [*here, *flatten(root)]) or f"There are: {', '.join(here)}."
            raise OptionError(f"There is no setting {where!r}. {hint}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            changes[name] = _overlay(current, value, where, root)
        else:
            changes[name] = _value(hints[name], value, where)
    return dataclasses.replace(config, **changes)


def _value(hint: Any, value: Any, path: str) -> Any:
    """Returns `value` as the type that `hint` asks for, checked."""
    if typing.get_origin(hint) is typing.Annotated:
        plain_type, *marks = typing.get_args(hint)
        value = _value(plain_type, value, path)
        for mark in marks:
            if isinstance(mark, Range):
                _check_range(path, value, mark)
        return value
    if typing.get_origin(hint) is Literal:
        return choice(path, value, typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise OptionError(f"{path} is {value!r}; it must be a list.")
        item = typing.get_args(hint)[0]
        return tuple(_value(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint in (int, float) and (number := _number(hint, value)) is not None:
        return number
    names = {
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "text",
    }
    raise OptionError(f"{path} is {value!r}; it must be {names[hint]}.")


def _check_range(path: str, value: float, limits: Range) -> None:
    if not limits.low <= value <= limits.high:
        raise OptionError(f"{path} is {value!r}; it must be {describe(limits)}.")


def _number(hint: type, value: Any) -> int | float | None:
    """Returns the number, or None if `value` is none; "3e-4" is text to YAML 1.1, not to us."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value) if str(value).isdecimal() else float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or (hint is int and number != int(number)):
        return None
    return hint(number)
