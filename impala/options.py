"""Where the settings of a run come from: flags over environment variables over YAML over preset.

Frozen dataclasses become plain data and come back, strictly: an unknown name or an impossible
value is an `OptionError` that names it, what is allowed and the nearest right one. Works on any
dataclass written like those of `impala.configs`; imports neither TensorFlow nor gymnasium.
"""

import dataclasses
import difflib
import json
import math
import os
import pathlib
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import yaml

from impala.configs import Config, Range

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


def overlay(config: T, data: Mapping[str, Any]) -> T:
    """Returns `config` with the values of `data`, nested and maybe partial, put over its own.

    Raises:
      OptionError: an unknown name, a value of another type or outside its range.
    """
    return typing.cast(T, _overlay(config, data, path="", root=config))


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
    """Returns the hint "Did you mean 'x'?", or what there is to choose from if nothing is near."""
    candidates = list(candidates)
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if not matches:  # learning_rate -> optimiser.learning_rate, optimizer.beta1 -> ...
        tails = {path.rsplit(".", 1)[-1]: path for path in candidates}
        found = difflib.get_close_matches(name.rsplit(".", 1)[-1], tails, n=1, cutoff=0.7)
        matches = [tails[tail] for tail in found]
    if matches:
        return f"Did you mean {matches[0]!r}?"
    return f"There are: {', '.join(candidates)}."


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
            known = [f"{path}.{known}" if path else known for known in hints]
            raise OptionError(
                f"There is no setting {where!r}. {nearest(where, known + list(flatten(root)))}"
            )
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
            if isinstance(mark, Range) and not mark.low <= value <= mark.high:
                raise OptionError(f"{path} is {value!r}; it must be {describe(mark)}.")
        return value
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise OptionError(
                f"{path} is {value!r}; it must be one of {', '.join(choices)}. "
                f"{nearest(str(value), choices) if _is_near(str(value), choices) else ''}".rstrip()
            )
        return value
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
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    raise OptionError(f"{path} is {value!r}; it must be {names[hint]}.")


def _number(hint: type, value: Any) -> int | float | None:
    """Returns the number, or None if `value` is none; "3e-4" is text to YAML 1.1, not to us."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = value if isinstance(value, int) else float(value)
    except ValueError:
        return None
    if not math.isfinite(number) or (hint is int and number != int(number)):
        return None
    return hint(number)


def describe(limits: Range) -> str:
    """Words the range of a setting."""
    if math.isinf(limits.high):
        return f"at least {limits.low:g}"
    return f"from {limits.low:g} to {limits.high:g}"


def _is_near(value: str, choices: Iterable[str]) -> bool:
    return bool(difflib.get_close_matches(value, list(choices), n=1))
