"""Converts settings to plain data and back, with strict checks.

An unknown name or an invalid value is an `OptionError` that names it, what is allowed and the
nearest valid one. Works on any dataclass written like those of `impala.config.schema`.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import yaml

from impala.config.schema import JSON_OBJECT, OPERATIONAL, Range
from impala.parts.components import ComponentError, Kind, check_name

T = TypeVar("T")

_SWITCHES = {"on": True, "yes": True, "off": False, "no": False}


class OptionError(ValueError):
    """A setting has an unknown name or an invalid value."""


# Plain data.


def to_dict(config: Any) -> dict[str, Any]:
    """Returns nested dataclasses as nested dicts of numbers, strings, booleans and lists."""
    return {field.name: plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Returns nested dataclasses from plain data, as read from JSON or YAML.

    Args:
      cls: a dataclass whose fields all have defaults, which are used for missing values.
      data: field name -> value.

    Raises:
      OptionError: an unknown name, a value of another type or outside its range.
    """
    return overlay(cls(), data)


def overlay(config: T, data: Any, source: str = "") -> T:
    """Returns `config` with the values of `data`, nested and possibly partial.

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


def from_stored(cls: type[T], data: Any, needs: Iterable[str] = ()) -> T:
    """Returns nested dataclasses from plain data of a program, possibly of another minor version.

    Args:
      cls: a dataclass whose fields all have defaults, which are used for missing values.
      data: field name -> value, nested; unknown names are ignored.
      needs: paths of settings that must not be ignored.

    Raises:
      OptionError: a setting in `needs` is unknown, or as `from_dict`.
    """
    known = flatten(config := cls())
    if unknown := [path for path in needs if path not in known]:
        raise OptionError(
            f"{unknown[0]} is not known here, and it changes what is played or learned. Run the "
            "version that has set it, or do without it there."
        )
    return overlay(config, _known(config, data))


def settings_that_matter(config: Any) -> dict[str, Any]:
    """Returns the non-default settings that change what is played or learned.

    These are all that are not marked `OPERATIONAL`: dotted path -> value.
    """
    return {
        path: value
        for path, value in changed(config).items()
        if not is_operational(type(config), path)
    }


def changed(config: Any) -> dict[str, Any]:
    """Returns the non-default settings: dotted path -> value."""
    defaults = flatten(type(config)())
    return {path: value for path, value in flatten(config).items() if value != defaults[path]}


def is_operational(cls: type, path: str) -> bool:
    """Returns whether a setting, or a section around it, is marked `OPERATIONAL`."""
    name, _, rest = path.partition(".")
    hint = typing.get_type_hints(cls, include_extras=True)[name]
    if typing.get_origin(hint) is typing.Annotated:
        hint, *marks = typing.get_args(hint)
        if OPERATIONAL in marks:
            return True
    return bool(rest) and is_operational(hint, rest)


def to_yaml(config: Any) -> str:
    """Returns a configuration as YAML, which `--config` reads back."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def flatten(config: Any) -> dict[str, Any]:
    """Returns every setting: dotted path such as "optimiser.learning_rate" -> value.

    Args:
      config: dataclasses, or nested plain data.
    """
    if dataclasses.is_dataclass(config):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if dataclasses.is_dataclass(value) or isinstance(value, Mapping):
            flat |= {f"{name}.{path}": leaf for path, leaf in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by dotted path as nested plain data."""
    data: dict[str, Any] = {}
    for path, value in flat.items():
        *outer, last = path.split(".")
        place = data
        for section in outer:
            place = place.setdefault(section, {})
        place[last] = value
    return data


def differences(old: Any, new: Any) -> list[str]:
    """Returns a description of each differing setting, such as "seed: 0 -> 1".

    Settings unknown to either are omitted.

    Args:
      old: dataclasses, or nested plain data.
      new: of the same kind.
    """
    before, after = flatten(old), flatten(new)
    return [
        f"{path}: {shown(before[path])} -> {shown(value)}"
        for path, value in after.items()
        if path in before and canonical(before[path]) != canonical(value)
    ]


def canonical(value: Any) -> Any:
    """Returns a setting, the text of a JSON object in the order of its names, for comparisons."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(json.loads(value), sort_keys=True)
    return value


def shown(value: Any) -> str:
    """Returns a setting as text for a message."""
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns the hint "Did you mean 'x'?", or nothing if no candidate is near."""
    candidates = list(candidates)
    section, _, tail = name.rpartition(".")
    alike = [
        path
        for path in candidates
        if not section or difflib.get_close_matches(tail, [path.rsplit(".", 1)[-1]])
    ]  # an equal section is not enough: optimiser.lr is not optimiser.name
    matches = difflib.get_close_matches(name, alike, n=1)
    if not matches:  # learning_rate -> optimiser.learning_rate
        by_tail = {path.rsplit(".", 1)[-1]: path for path in candidates}
        matches = [by_tail[near] for near in difflib.get_close_matches(tail, by_tail, n=1)]
    return f"Did you mean {matches[0]!r}?" if matches else ""


def choice(name: str, value: str, choices: Iterable[str]) -> str:
    """Returns `value` if it is one of `choices`.

    Raises:
      OptionError: it is none of them; names them and the nearest.
    """
    choices = list(choices)
    if value in choices:
        return value
    sentence = f"{name} is {value!r}; it must be one of {', '.join(choices)}."
    raise OptionError(f"{sentence} {nearest(str(value), choices)}".strip())


def check_ranges(command: Any) -> None:
    """Checks the ranges of a dataclass that is not plain data, such as a command with its paths.

    Raises:
      OptionError: a number is outside the `Range` of its field.
    """
    for name, hint in typing.get_type_hints(type(command), include_extras=True).items():
        value = getattr(command, name)
        for either in (hint, *typing.get_args(hint)):  # of a union, what is not a number is a word
            for mark in getattr(either, "__metadata__", ()):
                if isinstance(mark, Range) and not isinstance(value, str):
                    _check_range(name, value, mark)


def plain(value: Any) -> Any:
    """Returns a setting or a section as plain data, as in YAML."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def _overlay(config: Any, data: Any, path: str, root: Any) -> Any:
    if not isinstance(data, Mapping):
        raise OptionError(
            f"{path or 'The configuration'} holds settings by name, not {data!r}. "
            f"It has: {', '.join(field.name for field in dataclasses.fields(config))}."
        )
    all_hints = typing.get_type_hints(type(config), include_extras=True)
    hints = {field.name: all_hints[field.name] for field in dataclasses.fields(config)}
    changes = {}
    for name, value in data.items():
        where = f"{path}.{name}" if path else str(name)
        if name not in hints:
            here = [f"{path}.{known}" if path else known for known in hints]
            hint = nearest(where, [*here, *flatten(root)]) or f"There are: {', '.join(here)}."
            if where in flatten(root):
                hint = f"Nest it: {where.replace('.', ': {')}: ...{'}' * where.count('.')}."
            raise OptionError(f"There is no setting {where!r}. {hint}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            changes[name] = _overlay(current, value, where, root)
        else:
            changes[name] = _value(hints[name], value, where)
    return dataclasses.replace(config, **changes)


def _known(config: Any, data: Any) -> Any:
    """Returns `data` without the names that a configuration does not have."""
    if not (dataclasses.is_dataclass(config) and isinstance(data, Mapping)):
        return data
    names = {field.name for field in dataclasses.fields(config)}
    return {n: _known(getattr(config, n), value) for n, value in data.items() if n in names}


def _value(hint: Any, value: Any, path: str) -> Any:
    """Returns `value` as the type that `hint` asks for, checked."""
    if typing.get_origin(hint) is typing.Annotated:
        plain_type, *marks = typing.get_args(hint)
        if JSON_OBJECT in marks:
            value = _json(value, path)
        value = _value(plain_type, value, path)
        for mark in marks:
            if isinstance(mark, Range):
                _check_range(path, value, mark)
            if isinstance(mark, Kind):
                _check_name(path, value, mark)
        return value
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return _either(typing.get_args(hint), value, path)
    if typing.get_origin(hint) is Literal:
        words = typing.get_args(hint)
        if isinstance(value, bool):  # off and no, of which YAML 1.1 makes false
            value = next((word for word in words if _SWITCHES.get(word) is value), value)
        return choice(path, value, words)
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
    if hint not in names:
        raise OptionError(
            f"{path} is declared as {hint}; a setting is an int, float, bool, str, Literal, a "
            "union or a tuple of these."
        )
    raise OptionError(f"{path} is {value!r}; it must be {names[hint]}.")


def _either(hints: Iterable[Any], value: Any, path: str) -> Any:
    """Returns `value` as the first of several types that it can be."""
    refusals = []
    for hint in hints:
        try:
            return _value(hint, value, path)
        except OptionError as error:
            refusals.append(str(error))
    raise OptionError(" ".join(refusals))


def _json(value: Any, path: str) -> Any:
    """Returns a JSON object as text, spaced in the same way; other text as it is."""
    loaded = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            loaded = json.loads(value)
    if not isinstance(loaded, Mapping):
        return value
    try:
        return json.dumps(loaded)
    except TypeError as error:
        raise OptionError(f"{path} is {value!r}, which is not a JSON object ({error}).") from None


def _check_name(path: str, value: str, kind: Kind) -> None:
    try:
        check_name(path, value, kind)
    except ComponentError as error:
        raise OptionError(str(error)) from None


def _check_range(path: str, value: float, limits: Range) -> None:
    low, high = limits.low, limits.high
    if not low <= value <= high:
        must = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise OptionError(f"{path} is {value!r}; it must be {must}.")


def _number(hint: type, value: Any) -> int | float | None:
    """Returns the number, or None if there is none; "3e-4", text in YAML 1.1, is one."""
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # one of NumPy
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value) if str(value).isdecimal() else float(value)
        if not math.isfinite(number) or (hint is int and number != int(number)):
            return None
    except (ValueError, OverflowError):
        return None
    return hint(number)
