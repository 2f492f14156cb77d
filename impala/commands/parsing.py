"""Parses a command's flags over the other layers of settings, and words errors."""

import contextlib
import dataclasses
import functools
import io
import os
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tyro
from tyro.conf import Positional

from impala.commands import foreign
from impala.commands.flags import SettingsFlags
from impala.config import layers, rules, values
from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.parts import components, sections
from impala.runtime import process

T = TypeVar("T")

_HELP = {"-h", "--help"}
_POSITIONAL = typing.get_args(Positional[int])[1]  # the mark of an argument without a flag


def parse(name: str, command_type: type[T], argv: list[str]) -> T:
    """Parses a command line; settings of a run are read over their other layers.

    Raises:
      OptionError: an unknown flag, or an invalid value in any layer.
      SystemExit: 2 after tyro has explained a missing or invalid value, 0 after help.
    """
    foreign.check(name, argv)
    command: Any
    if issubclass(command_type, SettingsFlags):
        command, unknown = _parse_run(name, command_type, command_type.words(argv))
        settings = command.settings
    else:
        command, unknown = _tyro(name, command_type, argv, tyro.MISSING_NONPROP)
        settings = Config()
    if unknown:
        raise values.OptionError(_unknown(name, command_type, unknown[0], settings))
    values.check_ranges(command)
    if isinstance(command, SettingsFlags):
        rules.validate(command.settings)
        given = values.flatten(layers.from_flags(argv, command.settings)[0])
        rules.check_overridden(given, command.settings)
        rules.check_read(given, command.settings)
    return typing.cast(T, command)


def _parse_run(
    name: str, command_type: type[SettingsFlags], argv: list[str]
) -> tuple[SettingsFlags, list[str]]:
    """Returns a command with its settings, and the arguments that nobody knows."""
    named = values.overlay(Config(), sections.naming(layers.from_flags(argv)[0]))
    if sections.needs_tensorflow(named):
        _load_tensorflow(command_type)
    # Of the command line alone; preset and layers may name parts with further ones.
    settings = sections.compose(named)
    words = [word for word in layers.from_flags(argv, settings)[1] if word not in _HELP]
    flags = {word.partition("=")[0][2:].replace("-", "_") for word in words if word[:2] == "--"}
    if any("." in flag for flag in flags.difference(_paths(command_type, settings))):
        # Of a part that another layer names: tyro could take a preset behind them for a value.
        words.sort(key=lambda word: word not in PRESETS)
    is_help = not _HELP.isdisjoint(argv)
    try:
        with _silence() if is_help else contextlib.nullcontext():
            default = command_type(preset=tyro.MISSING, settings=settings)
            command, unknown = _tyro(name, command_type, words, default)
        settings = _settings(command, argv)
    except SystemExit:  # something is wrong or missing
        if not is_help:
            raise
    if is_help:
        default = command_type(preset=tyro.MISSING, settings=settings)
        _tyro(name, command_type, ["--help"], default)
    _, unknown = layers.from_flags(unknown, settings)
    return dataclasses.replace(command, settings=settings), unknown


def _settings(command: SettingsFlags, argv: list[str]) -> Config:
    """Returns the settings of all layers."""
    if components.is_own(command.preset):
        _load_tensorflow(type(command))

    def prepare(naming: Config) -> None:
        if sections.needs_tensorflow(naming):
            _load_tensorflow(type(command))

    return layers.layered(command.preset, command.config, os.environ, argv, prepare)


def _load_tensorflow(command_type: type[SettingsFlags]) -> None:
    """Imports TensorFlow quietly, as custom parts are about to import it."""
    uses_gpus = command_type.uses_gpus
    process.load_tensorflow(use_gpus=uses_gpus, is_guest=not uses_gpus)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    nothing = io.StringIO()
    with contextlib.redirect_stderr(nothing), contextlib.redirect_stdout(nothing):
        yield


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
        return f"{name} takes no argument {word!r}. See impala {name} --help."
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

    The lines of a help text are joined.
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

    return registry


def _joined(text: str | Callable[[], str | None] | None) -> str | None:
    """Returns a help text, or that of a function, on one line."""
    text = text() if callable(text) else text
    return " ".join(text.split()) if text else text
