"""Custom parts that a configuration names, and the sections of their settings.

`Config` has the sections of everything that is built in. A configuration that names parts of one's
own has a class made for it: `Config` with one more section for each such part that has settings.
Whatever works on dataclasses (flags, `--help`, YAML, environment variables, checkpoints) works on
it as on `Config`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from impala.config import values
from impala.config.schema import OPERATIONAL, Config
from impala.parts import components
from impala.parts.components import (
    ALGORITHM,
    CORE,
    ENVIRONMENT,
    OPTIMISER,
    SINK,
    TORSO,
    Allowed,
    ComponentError,
    Kind,
)
from impala.schedule import phases

# The settings that name parts with settings of their own.
NAMES = (
    *("agent.torso", "agent.core", "algorithm", "phases", "optimiser.name", "telemetry.sinks"),
    *("environment.id", "tasks.environments"),
)
OF_AGENT = (TORSO, CORE)
"""Kinds of which a network is made."""
OF_ACTORS = (ENVIRONMENT, *OF_AGENT)
"""Kinds that whoever plays makes; only a learner makes the others."""


class Part(NamedTuple):
    """A custom part in a configuration."""

    kind: Kind
    name: str
    section: str  # of its settings; "" if it has none
    component: Any  # its class; for environments also a function, or None if it is registered


class Found(NamedTuple):
    """A part's class and settings."""

    component: Any
    settings: Any  # an instance of its class `Settings`; None if it has none


Own = Mapping[tuple[Kind, str], Found]


def names(config: Config) -> Iterator[tuple[Kind, str]]:
    """Yields the parts that a configuration names; of environments only custom ones."""
    # Ids alone: whether the tasks' arguments make sense is for `rules` to say.
    played = [text.partition("{")[0] for text in config.tasks.environments]
    for id in dict.fromkeys(played or [config.environment.id]):
        if components.is_own(id):
            yield ENVIRONMENT, id
    yield TORSO, config.agent.torso
    yield CORE, config.agent.core
    for word in phases.words(config):
        yield ALGORITHM, word.algorithm
    yield OPTIMISER, config.optimiser.name
    for name in config.telemetry.sinks:
        yield SINK, name


def allowed(config: Config, *, of_actors: bool = False) -> Allowed:
    """Returns what a process must be allowed to import for a configuration.

    Args:
      config: from the user's command line or program.
      of_actors: whether the process is an actor, which makes only some of the parts.
    """
    named = [(kind, name) for kind, name in names(config) if not of_actors or kind in OF_ACTORS]
    foreign = [name for kind, name in named if name not in kind.built_in and ":" in name]
    return Allowed(tuple(dict.fromkeys(foreign)))


def needs_tensorflow(config: Config) -> bool:
    """Returns whether loading the custom parts in a configuration imports TensorFlow."""
    return any(
        name not in kind.built_in and kind not in (ENVIRONMENT, SINK)
        for kind, name in names(config)
    )


def compose(
    config: Config,
    allow: Allowed | None = None,
    kinds: Collection[Kind] | None = None,
    **settings: Any,
) -> Config:
    """Returns a configuration with a section for each custom part that it names.

    Args:
      config: may have such sections already; those of other parts are removed.
      allow: what may be imported; None: everything that the configuration names, for configurations
        that the user wrote.
      kinds: of the parts that are imported and get a section; None: all.
      **settings: section -> settings, instances of the parts' classes `Settings`.

    Raises:
      OptionError: a part is not found, not allowed or of another kind, or its settings or their
        section are invalid.
    """
    cls = class_of(config, allow=allow, kinds=kinds)
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(settings.keys() - known):
        raise values.OptionError(
            f"The configuration names no part whose settings are the section {unknown[0]!r}; "
            f"it has {', '.join(part.section for part in cls.own if part.section) or 'none'}."
        )
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    kept = {name: value for name, value in sections.items() if name in known}
    return cls(**{**kept, **settings})


def from_dict(data: Mapping[str, Any], allow: Allowed) -> Config:
    """Returns the configuration of plain data from JSON or YAML, with the sections of parts.

    Args:
      data: section -> name -> value; missing settings keep their default.
      allow: what may be imported.

    Raises:
      OptionError: an unknown name, a value of another type or outside its range, or as `compose`.
    """
    cls = class_of(values.from_dict(Config, naming(data)), allow=allow)
    return values.from_dict(cls, data)


def restore(
    config: Config,
    own: Mapping[str, Any],
    needs: Collection[str],
    allow: Allowed,
    kinds: Collection[Kind] = OF_ACTORS,
) -> Config:
    """Applies stored settings of custom parts to the configuration that names them.

    Settings that the installed version of a part does not know are ignored, and so are sections of
    parts that are not made.

    Args:
      config: names the parts.
      own: plain data: section -> name -> value; missing settings keep their default.
      needs: settings that must not be ignored, as dotted paths.
      allow: what may be imported.
      kinds: of the parts that are made.

    Raises:
      OptionError: as `compose`, a setting in `needs` is unknown, or a value is invalid.
    """
    composed = compose(config, allow, kinds)
    sections = [part.section for part in composed.own if part.section]
    stored = {section: own[section] for section in sections if section in own}
    if any(kind not in kinds and name not in kind.built_in for kind, name in names(config)):
        needs = [path for path in needs if path.partition(".")[0] in stored]
    read = values.from_stored(type(composed), stored, needs)
    return dataclasses.replace(
        composed, **{section: getattr(read, section) for section in sections}
    )


def for_actors(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the settings of the parts that actors make, as plain data: section -> name -> value.

    `from_dict` reads them, together with the sections `agent`, `environment`, ....
    """
    return {
        part.section: values.to_dict(getattr(config, part.section))
        for part in config.own
        if part.kind in OF_ACTORS and part.section
    }


def found(config: Config) -> Own:
    """Returns the custom parts that a composed configuration names, with their settings."""
    return {
        (part.kind, part.name): Found(
            part.component, getattr(config, part.section) if part.section else None
        )
        for part in config.own
    }


def naming(data: Any) -> dict[str, Any]:
    """Returns the part of nested plain data that names parts."""
    kept: dict[str, Any] = {}
    for path in NAMES:
        section, _, name = path.rpartition(".")
        holder = data.get(section) if section and isinstance(data, Mapping) else data
        if isinstance(holder, Mapping) and name in holder:
            (kept.setdefault(section, {}) if section else kept)[name] = holder[name]
    return kept


def class_of(
    *configs: Config, allow: Allowed | None = None, kinds: Collection[Kind] | None = None
) -> type[Config]:
    """Returns the class of configurations with a section for each part that these name.

    Args:
      *configs: of any such class.
      allow: as for `compose`.
      kinds: as for `compose`.

    Raises:
      OptionError: as `compose`.
    """
    parts: dict[tuple[Kind, str], Part] = {}
    try:
        for config in configs:
            permitted = allowed(config) if allow is None else allow
            for kind, name in names(config):
                is_made = kinds is None or kind in kinds
                if is_made and name not in kind.built_in and (kind, name) not in parts:
                    component = _find(kind, name, permitted)
                    has_settings = hasattr(component, "Settings")
                    section = components.section_of(name, component) if has_settings else ""
                    parts[kind, name] = Part(kind, name, section, component)
        return class_with(tuple(parts.values()))
    except ValueError as error:
        raise values.OptionError(str(error)) from error


def _find(kind: Kind, name: str, allow: Allowed) -> Any:
    if kind is not ENVIRONMENT:
        return components.find(name, kind, allow)
    if components.is_attribute(name):
        return components.load_environment(name, allow)
    allow.check(name)  # MODULE:ID, which is imported later
    return None


@functools.cache
def class_with(parts: tuple[Part, ...]) -> type[Config]:
    """Returns the class of configurations with a section for each of these parts.

    Raises:
      ComponentError: two parts have the same section, or their settings cannot be one.
    """
    if not parts:
        return Config
    taken = {field.name: "a section that is built in" for field in dataclasses.fields(Config)}
    sections = []
    for part in parts:
        if not part.section:
            continue
        if part.section in taken:
            raise ComponentError(
                f"The settings of {part.name} would be the section {part.section!r}, which is "
                f"{taken[part.section]}. Rename the class, or name it by an entry point."
            )
        taken[part.section] = f"that of {part.name}"
        settings = part.component.Settings
        hint = Annotated[settings, OPERATIONAL] if part.kind is SINK else settings
        sections.append((part.section, hint, dataclasses.field(default=_default(part))))
    return dataclasses.make_dataclass(
        "Config",
        sections,
        bases=(Config,),
        frozen=True,
        namespace={"__doc__": Config.__doc__, "own": parts, "__module__": Config.__module__},
    )


def _default(part: Part) -> Any:
    settings = part.component.Settings
    what = f"{part.name} has a class Settings that"
    if not (inspect.isclass(settings) and dataclasses.is_dataclass(settings)):
        raise ComponentError(f"{what} is not a dataclass: put @dataclasses.dataclass(frozen=True).")
    if lacking := [
        field.name
        for field in dataclasses.fields(settings)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]:
        raise ComponentError(f"{what} has no default for {lacking[0]}: give every field one.")
    if settings.__hash__ is None:
        raise ComponentError(f"{what} can be changed: put @dataclasses.dataclass(frozen=True).")
    return values.overlay(settings(), values.to_dict(settings()), f"{what} has a bad default: ")
