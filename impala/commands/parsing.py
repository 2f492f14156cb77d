"""Parses a command's flags over the other layers of settings, and words errors."""

import contextlib
import dataclasses
import functools
import io
import itertools
import os
import pathlib
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import tyro
from tyro.conf import Positional

from impala.commands import foreign
from impala.commands.flags import RunFlags
from impala.config import layers, rules, values
from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.parts import components, sections
from impala.runtime import process

T = TypeVar("T")

_POSITIONAL = typing.get_args(Positional[int])[1]  # the mark of an argument without a flag


def parse(name: str, command_type: type[T], argv: list[str]) -> T:
    """Parses a command's flags over the other layers of settings.

    Raises:
      OptionError: an unknown flag, or an invalid value in any layer.
      SystemExit: 2 after tyro has explained a missing or invalid value, 0 after help.
    """
    foreign.check(name, argv)
    default: Any = tyro.MISSING_NONPROP
    settings = Config()
    if issubclass(command_type, RunFlags):
        names = _names(argv)
        preset, file = _layers(command_type, argv, names)
        if preset:
            if components.is_own(preset):
                _load_tensorflow(command_type)
            named = layers.named(preset, file, os.environ, names)
            if any(map(sections.needs_tensorflow, named)):
                _load_tensorflow(command_type)
            settings = layers.layered(preset, file, os.environ, names)
        default = command_type(preset=tyro.MISSING, settings=settings)
    command, unknown = _tyro(name, command_type, argv, default)
    if unknown:
        raise values.OptionError(_unknown(name, command_type, unknown[0], settings))
    values.check_ranges(command)
    if isinstance(command, RunFlags):
        rules.validate(command.settings)
    return command


def _names(argv: list[str]) -> dict[str, Any]:
    """Returns the settings on a command line that name parts, nested, before parsing the others."""
    named: dict[str, Any] = {}
    defaults = values.flatten(Config())
    for path in sections.NAMES:
        if not (words := _words(argv, path)):
            continue
        *outer, last = path.split(".")
        place = named
        for section in outer:
            place = place.setdefault(section, {})
        place[last] = words if isinstance(defaults[path], tuple) else words[0]
    return named


def _load_tensorflow(command_type: type[RunFlags]) -> None:
    """Imports TensorFlow quietly, as custom parts are about to import it."""
    uses_gpus = command_type.uses_gpus
    process.load_tensorflow(use_gpus=uses_gpus, is_guest=not uses_gpus)


def _words(argv: list[str], path: str) -> list[str]:
    """Returns the values of a setting's flag; the last ones if it is given several times."""
    found: list[str] = []
    for i, word in enumerate(argv):
        flag, _, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == path:
            behind = itertools.takewhile(lambda word: not word.startswith("-"), argv[i + 1 :])
            found = [value] if value else list(behind)
    return found


def _layers(
    command_type: type[RunFlags], argv: list[str], names: dict[str, Any]
) -> tuple[str, pathlib.Path | None]:
    """Returns the preset and file of a command line, before the defaults are known."""
    if argv and argv[0] in PRESETS and not any(word.startswith("--config") for word in argv):
        return argv[0], None  # as nearly always; the rest of this takes as long as parsing all
    named = values.overlay(Config(), names)
    if sections.needs_tensorflow(named):
        _load_tensorflow(command_type)
    default = command_type(preset=tyro.MISSING, settings=sections.compose(named))
    without_help = [word for word in argv if word not in ("-h", "--help")]
    silence = io.StringIO()
    try:
        with contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
            command, _ = _tyro("", command_type, without_help, default)
    except SystemExit:  # something is wrong or missing; the final parse reports it
        files = [pathlib.Path(word) for word in _words(argv, "config")[:1]]
        return next((word for word in argv if word in PRESETS), ""), next(iter(files), None)
    return command.preset, command.config


def _tyro(name: str, command_type: type[T], argv: list[str], default: Any) -> tuple[T, list[str]]:
    """Returns the command and the arguments that tyro does not know."""
    return tyro.cli(
        command_type,
        prog=f"impala {name}",
        args=argv,
        default=default,
        return_unknown_args=True,
        registry=_registry(),
    )


def _unknown(name: str, command_type: type, word: str, settings: Config) -> str:
    """Returns the error message about an unknown argument."""
    if not word.startswith("-"):
        return f"{name} can make nothing of {word!r}. See impala {name} --help."
    flags = [path.replace("_", "-") for path in _paths(command_type, settings)]
    hint = values.nearest(word.split("=")[0].lstrip("-").replace("_", "-"), flags)
    hint = hint.replace("'", "'--", 1) or f"See impala {name} --help."
    return f"{name} has no flag {word.split('=')[0]}. {hint}"


def _paths(command_type: type, settings: Config) -> Iterator[str]:
    """Yields what the flags of a command set, such as num_actors and security.tls_cert."""
    hints = typing.get_type_hints(command_type, include_extras=True)
    for field in dataclasses.fields(command_type):
        hint = hints[field.name]
        if field.name == "settings":
            yield from values.flatten(settings)
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from (f"{field.name}.{path}" for path in values.flatten(hint()))
        elif _POSITIONAL not in getattr(hint, "__metadata__", ()):
            yield field.name


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Returns rules that tyro applies before its own.

    Whole numbers may be written as 1e6, the error about a wrong choice names the nearest right one,
    and the lines of a help text are joined.
    """
    registry = tyro.constructors.ConstructorRegistry()
    asking = False

    @registry.struct_rule
    def joined_help(
        info: tyro.constructors.StructTypeInfo,
    ) -> tyro.constructors.StructConstructorSpec | None:
        # tyro keeps a line break before an indented line, and attribute docstrings are indented.
        nonlocal asking
        if asking or not dataclasses.is_dataclass(info.type):
            return None
        asking = True
        try:
            spec = registry.get_struct_spec(info)  # by tyro's own rule
        finally:
            asking = False
        if not isinstance(spec, tyro.constructors.StructConstructorSpec):
            return None
        fields = (
            dataclasses.replace(field, helptext=functools.partial(_joined, field.helptext))
            for field in spec.fields
        )
        return dataclasses.replace(spec, fields=tuple(fields))

    @registry.primitive_rule
    def whole_numbers(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[int] | None:
        if info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda words: values.whole_number(words[0]),
            is_instance=lambda value: type(value) is int,
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def choices(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[str] | None:
        if typing.get_origin(info.type) is not Literal:
            return None
        allowed = typing.get_args(info.type)
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(allowed) + "}",
            instance_from_str=lambda words: values.choice("the value", words[0], allowed),
            is_instance=lambda value: value in allowed,
            str_from_instance=lambda value: [value],
        )

    return registry


def _joined(text: str | Callable[[], str | None] | None) -> str | None:
    """Returns a help text, or that of a function, on one line."""
    text = text() if callable(text) else text
    return " ".join(text.split()) if text else text
