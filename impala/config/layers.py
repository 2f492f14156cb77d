"""Layers of settings: flags over environment variables over a YAML file over a preset."""

import collections
import contextlib
import difflib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import yaml

from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.config.values import OptionError, flatten, nested, overlay, to_dict
from impala.parts import sections
from impala.parts.components import Allowed, ComponentError, Kind, check_name, load

ENVIRONMENT_PREFIX = "IMPALA_"

C = TypeVar("C", bound=Config)

_DEFAULTS = Config()
_VARIABLES = "Environment variables: "  # prefix of errors in them


# The layers.


def layered(
    preset: str,
    file: pathlib.Path | None,
    environ: Mapping[str, str],
    argv: Sequence[str] = (),
    prepare: Callable[[Config], object] = lambda naming: None,
) -> Config:
    """Returns a preset overridden by a YAML file, environment variables and flags, in this order.

    Args:
      preset: name of one, or module:attribute.
      file: of settings.
      environ: environment variables.
      argv: a command line, of which only the flags of settings are read.
      prepare: called with what each layer and those below it name of custom parts, before they are
        imported.

    Raises:
      OptionError: an error in any layer; the message begins with the layer's name.
    """
    base = find_preset(preset)[1]
    data = read_yaml(file) if file is not None else {}  # once: it may be a pipe
    # The named parts determine which settings exist, so all names come first; and a layer may have
    # settings of a part that a layer above it has replaced.
    of_layers = [overlay(Config(), sections.naming(to_dict(base)))]
    for naming, source in (
        (sections.naming(data), f"{file}: "),
        (_naming_variables(environ), _VARIABLES),
        (sections.naming(from_flags(argv)[0]), ""),
    ):
        of_layers.append(overlay(of_layers[-1], naming, source))
    for each in of_layers:
        prepare(each)
    config = _known(base, of_layers)
    config = put_over(config, data, f"{file}: ")
    config = put_over(config, from_environment(environ, config), _VARIABLES)
    return sections.compose(put_over(config, from_flags(argv, config)[0]))


def put_over(config: C, layer: Any, source: str = "") -> C:
    """Returns a configuration overridden by a layer: nested plain data, possibly partial.

    An epsilon was chosen for one optimiser: a layer that names another one takes its default.

    Raises:
      OptionError: as `impala.config.values.overlay`.
    """
    over = overlay(config, layer, source)
    if over.optimiser.name == config.optimiser.name or "epsilon" in layer["optimiser"]:
        return over
    return overlay(over, {"optimiser": {"epsilon": _DEFAULTS.optimiser.epsilon}})


def composed_over(base: Config, data: Mapping[str, Any], source: str = "") -> Config:
    """Returns a configuration with settings applied, which may be those of custom parts.

    Raises:
      OptionError: as `put_over`.
    """
    known = _known(base, (base, overlay(base, sections.naming(data))))
    return sections.compose(put_over(known, data, source))


def _known(base: Config, of_layers: Iterable[Config]) -> Config:
    """Returns a configuration with a section for each part that layers name, the lowest first.

    Where parts have the same section, it is that of the highest layer.
    """
    parts: dict[str, sections.Part] = {}
    for config in of_layers:
        parts |= {part.section: part for part in sections.class_of(config).own}
    names = {(part.kind, part.name) for part in parts.values()}
    replaced = {part.section for part in base.own if (part.kind, part.name) not in names}
    kept = {name: value for name, value in to_dict(base).items() if name not in replaced}
    return overlay(sections.class_with(tuple(parts.values()))(), kept)


def find_preset(name: str) -> tuple[str, Config]:
    """Returns the description of a preset, in one line, and its configuration.

    Args:
      name: of a built-in preset, of an entry point, or module:attribute; the attribute is a
        `Config`, or a description and a `Config`.

    Raises:
      OptionError: there is no such preset.
    """
    if name in PRESETS:
        return PRESETS[name]
    try:
        check_name("The preset", name, Kind("preset", "", dict.fromkeys(PRESETS, "")))
        found = load(name, Allowed((name,)))
    except ComponentError as error:
        raise OptionError(str(error)) from None
    match found:
        case Config():
            return "", found
        case (str(line), Config() as config):
            return line, config
    raise OptionError(
        f"{name} is not a preset: it must be a Config (from impala.config.schema import Config), "
        f"or a line and a Config, not {type(found).__name__}."
    )


def from_environment(environ: Mapping[str, str], config: Config = _DEFAULTS) -> dict[str, Any]:
    """Collects variables such as IMPALA_OPTIMISER__LEARNING_RATE=3e-4 into nested settings.

    Lists are JSON, or numbers separated by commas or spaces. Variables that begin with IMPALA_ but
    have no "__" are ignored (Kubernetes sets IMPALA_LEARNER_PORT for a service of that name),
    except those that are close to one of ours.

    Args:
      environ: environment variables.
      config: its class defines the settings.

    Raises:
      OptionError: a variable names no setting; names the nearest one.
    """
    defaults = flatten(config)
    ours = {variable(path): path for path in defaults}
    squeezed = {name.replace("__", "_"): name for name in ours}
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
        settings[ours[name]] = _read_text(text, defaults[ours[name]])
    return nested(settings)


def from_flags(argv: Sequence[str], config: Config = _DEFAULTS) -> tuple[dict[str, Any], list[str]]:
    """Collects flags such as --optimiser.learning-rate 3e-4 into nested settings.

    A list takes all words up to the next flag; --NAME and --no-NAME set what is true or false.

    Args:
      argv: a command line.
      config: its class defines the settings.

    Returns:
      The settings, and the other words.

    Raises:
      OptionError: a flag lacks its value.
    """
    defaults = flatten(config)
    settings: dict[str, Any] = {}
    others: list[str] = []
    words = collections.deque(argv)
    while words:
        word = words.popleft()
        flag, equals, text = word.partition("=")
        path = flag[2:].replace("-", "_") if flag.startswith("--") else ""
        section, dot, name = path.rpartition(".")
        switch = f"{section}{dot}{name.removeprefix('no_')}"
        like = defaults.get(path)
        if like is not None and equals:
            settings[path] = _read_text(text, like)
        elif not equals and isinstance(defaults.get(switch), bool):
            settings[switch] = path == switch
        elif isinstance(like, tuple):
            items = list(itertools.takewhile(_is_value, words))
            settings[path] = items
            for _ in items:
                words.popleft()
        elif like is None:
            others.append(word)
        elif words and _is_value(words[0]):
            settings[path] = words.popleft()
        else:
            raise OptionError(f"{flag} lacks its value: write {flag} VALUE.")
    return nested(settings), others


def _is_value(word: str) -> bool:
    return not word.startswith("--") and word != "-h"


def variable(path: str) -> str:
    """Returns the environment variable of a setting: "actor.num_envs" -> IMPALA_ACTOR__NUM_ENVS."""
    return ENVIRONMENT_PREFIX + path.upper().replace(".", "__")


def read_yaml(file: pathlib.Path) -> Any:
    """Reads a YAML file as plain data; an empty one is {}.

    Raises:
      OptionError: it cannot be read, or is not YAML.
    """
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise OptionError(f"{file}: {error.strerror}. Name a YAML file that can be read.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as a date that is none
        raise OptionError(f"{file} is not YAML: {' '.join(str(error).split())}.") from None
    return {} if data is None else data


class _Loader(yaml.SafeLoader):
    """Refuses a name that is given twice, of which PyYAML would keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return node


def _naming_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Collects the variables that name parts."""
    ours = {variable(path) for path in sections.NAMES}
    return from_environment({name: text for name, text in environ.items() if name in ours})


def _read_text(text: str, like: Any) -> Any:
    """Returns the text of an environment variable as the plain data of a YAML value."""
    if isinstance(like, tuple):
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(data := json.loads(text), list):
                return data
        return text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    if isinstance(like, bool):
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return text
