"""Parts by name: built-in ones, installed entry points, and `module:attribute` where allowed.

Wherever a configuration names a part, the name is one of three: that of a built-in part; that of an
entry point of the group `impala.components`, which an installed package declares; or
`module:attribute`. The last two import code that is not of this package, so `Allowed` says what a
process may import. `described` words what such code raises. A program may also `give` a class or
function that it has made itself, in a notebook for instance.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import itertools
import os
import pathlib
import pickle
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

GROUP = "impala.components"  # of entry points


# Directories of code that the user has not written.
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))
_OURS = tuple(
    f"{pathlib.Path(__file__).parents[2] / name}/" for name in ("actors", "impala", "learner")
)
_CALLED_FOR_US = ("gymnasium", "numpy")  # what calls an environment, or stumbles over its values

_GIVEN = "_IMPALA_PARTS"  # environment variable: a file of what the parent process was given

_OF_PROGRAM = (
    "A program has given it to its run: load it in one that defines it, with allow='__main__', or "
    "train with the class of a module."
)
_ATTRIBUTE = re.compile(r"[^\W\d][\w.]*")  # an id that is registered has a - or a /


class ComponentError(ValueError):
    """A name does not stand for a part of the required kind, or may not be imported here."""


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """A kind of part that a configuration names."""

    word: str
    """Its name in messages."""
    base: str
    """The base class of parts of this kind, as module:attribute."""
    built_in: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> module:attribute; "" where the name means no part."""
    section: str = ""
    """Section of the configuration with the settings of built-in parts; "": one per part, by the
    part's name."""

    @property
    def a_word(self) -> str:
        """The word with its article."""
        return f"{'an' if self.word[0] in 'aeiou' else 'a'} {self.word}"


TORSO = Kind(
    "torso",
    "impala.agents.torsos:Torso",
    {
        "auto": "",  # chosen for the observation: `impala.agents.observation.fitting`
        "mlp": "impala.agents.torsos:MLP",
        "small": "impala.agents.torsos:Small",
        "strided": "impala.agents.torsos:Strided",
        "strided_valid": "impala.agents.torsos:StridedValid",
        "shallow": "impala.agents.torsos:Shallow",
        "deep": "impala.agents.torsos:DeepResidual",
    },
    section="agent",
)
CORE = Kind(
    "core",
    "impala.agents.cores:Core",
    {"feed_forward": "", "lstm": "impala.agents.cores:LSTM"},
    section="agent",
)
ALGORITHM = Kind(
    "algorithm",
    "impala.algorithms.base:Algorithm",
    {
        "impala": "impala.algorithms.impala:Impala",
        "actor_critic": "impala.algorithms.actor_critic:ActorCritic",
        "impact": "impala.algorithms.impact:Impact",
        "critic": "impala.algorithms.critic:Critic",
        "clone": "impala.algorithms.clone:Clone",
        "q_learning": "impala.algorithms.q_learning:QLearning",
        "sac": "impala.algorithms.sac:Sac",
    },
)
OPTIMISER = Kind(
    "optimiser",
    "learner.update.optimisers:Optimiser",
    {
        "rmsprop": "learner.update.optimisers:RMSProp",
        "adam": "learner.update.optimisers:Adam",
        "adamw": "learner.update.optimisers:AdamW",
    },
    section="optimiser",
)
SINK = Kind(
    "sink",
    "learner.telemetry.sinks:Sink",
    {"mlflow": "learner.telemetry.trackers:MLflow", "wandb": "learner.telemetry.trackers:WandB"},
)
ENVIRONMENT = Kind(  # of those built in, the ones that nothing but their name makes special
    "environment",
    "impala.environments.base:Environment",
    {
        "Catch/Continuing": "impala.environments.continuing:ContinuingCatch",
        "External": "impala.environments.external:External",
    },
)


@dataclasses.dataclass(frozen=True)
class Allowed:
    """What a process may import besides this package and installed entry points."""

    names: tuple[str, ...] = ()
    """MODULE, for all classes and functions that it and modules below it define, or
    MODULE:ATTRIBUTE."""

    @classmethod
    def of(cls, names: str | Iterable[str]) -> Self:
        """Returns what an argument `allow` of a function allows: a name, or several."""
        return cls((names,) if isinstance(names, str) else tuple(names))

    def check(self, name: str) -> None:
        """Checks that `name`, MODULE, MODULE:ATTRIBUTE or an entry point's, may be imported.

        Raises:
          ComponentError: it may not; names the flag and the argument that would allow it.
        """
        module = name.partition(":")[0]
        installed = {text for entry in _entry_points() for text in (entry.name, entry.value)}
        if name in self.names or name in installed:
            return
        if self.covers(module):
            return
        if module == "__main__":
            raise ComponentError(f"{name}: {_OF_PROGRAM}")
        raise ComponentError(
            f"{name} is code from outside impala, which this process may not import. Start it with "
            f"--allow {name} (or --allow {module}; in Python, call with allow={[name]!r}), or "
            f"install a package that declares it as an entry point of the group {GROUP}."
        )

    def covers(self, module: str) -> bool:
        """Returns whether `module`, or a package around it, is allowed as a whole."""
        return any(f"{module}.".startswith(f"{allowed}.") for allowed in self.names)


def give(part: Any) -> str:
    """Takes a class or function of this program, and returns its name, MODULE:ATTRIBUTE.

    In this process and its children (`for_children`) the name stands for it from now on, and may
    be used like that of a part that is built in. It ends in a number if another part has it.

    Raises:
      ComponentError: it is something else.
    """
    if not (inspect.isclass(part) or inspect.isfunction(part)):
        raise ComponentError(f"{part!r} is no part: give a class or a function that makes it.")
    # A lambda, or what a function has made, has a name that cannot be written.
    attribute = re.sub(r"[^\w.]", "_", part.__qualname__)
    name = f"{part.__module__}:{attribute}"
    names = itertools.chain([name], (f"{name}{number}" for number in itertools.count(2)))
    name = next(each for each in names if _is_again(_given().get(each, part), part))
    _given()[name] = part
    return name


def _is_again(one: Any, other: Any) -> bool:
    """Returns whether two parts of one name are the same, or the same definition run once more."""
    if one is other or "<" not in other.__qualname__:  # as when a notebook's cell is run again
        return True
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return False
    try:
        return all(
            getattr(one, name) == getattr(other, name)
            for name in ("__code__", "__defaults__", "__kwdefaults__", "__closure__")
        )
    except Exception:  # of what they hold: the comparison of arrays is no bool
        return False


def for_children(file: pathlib.Path, names: Collection[str] | None) -> dict[str, str]:
    """Writes what this process was given to a file, for its children.

    Args:
      file: that is written.
      names: of the parts that the children need; None: all.

    Returns:
      The environment variables that they need. They load the file as a pickle, so only the user
      may be able to write it.

    Raises:
      ComponentError: something cannot be pickled.
    """
    given = {name: x for name, x in _given().items() if names is None or name in names}
    if not given:
        return {}
    from gymnasium.vector.utils import CloudpickleWrapper

    try:  # cloudpickle, which Gymnasium needs, also takes what is defined in a notebook
        parts = pickle.dumps(CloudpickleWrapper(given.copy))
    except Exception as error:
        raise ComponentError(
            f"{', '.join(given)} cannot be sent to other processes ({described(error)}): put it "
            "into a module and name it, as MODULE:ATTRIBUTE, or train serially."
        ) from error
    file.write_bytes(pickle.dumps((sys.path, parts)))
    return {_GIVEN: str(file)}


@functools.cache
def _given() -> dict[str, Any]:
    """Returns what this process, or its parent, was given, by name."""
    if (file := os.environ.get(_GIVEN)) is None:
        return {}
    path, parts = pickle.loads(pathlib.Path(file).read_bytes())
    # Last, so that a user's modules hide none of ours.
    sys.path += [each for each in path if each and each not in sys.path]
    found: dict[str, Any] = pickle.loads(parts)()
    return found


def check_name(setting: str, name: str, kind: Kind) -> str:
    """Returns `name` if it can be a part's name; imports nothing.

    Args:
      setting: the setting with this value, for the message.
      name: of a built-in part, of an entry point, or module:attribute.
      kind: of the part.

    Raises:
      ComponentError: it is none of the three; names the nearest.
    """
    if name in kind.built_in or re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", name):
        return name
    names = [*kind.built_in, *(entry.name for entry in _entry_points())]
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    one_of = f"one of {', '.join(names)}" if names else f"an entry point of the group {GROUP}"
    raise ComponentError(
        f"{setting} is {name!r}; it must be {one_of}.{hint} Your own {kind.word} is "
        "named as MODULE:ATTRIBUTE."
    )


def find(name: str, kind: Kind, allowed: Allowed) -> type[Any]:
    """Imports the class of a part.

    Args:
      name: of a built-in part, of an entry point, or module:attribute.
      kind: of the part, whose base class the class derives from.
      allowed: what may be imported for a name that is not built in.

    Raises:
      ComponentError: there is no such part, it is of another kind, or may not be imported.
    """
    check_name(f"The {kind.word}", name, kind)
    if name in kind.built_in:
        built_in: type[Any] = pkgutil.resolve_name(kind.built_in[name])
        return built_in
    found = load(name, allowed)
    base: Any = pkgutil.resolve_name(kind.base)
    where = " import ".join(kind.base.split(":"))
    if not inspect.isclass(found) or not issubclass(found, base):
        raise ComponentError(
            f"{name} is not {kind.a_word}: derive it from {base.__name__} (from {where})."
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ComponentError(f"{name} is an abstract {kind.word}: it has to define {missing}.")
    if kind != ENVIRONMENT:
        _check_constructor(name, found, base, kind)
    return found


def _check_constructor(name: str, found: type[Any], base: type[Any], kind: Kind) -> None:
    """Raises ComponentError if a class cannot be made as its base class is."""
    expected = inspect.signature(base.__init__)
    arguments = [
        each.name
        for each in expected.parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD and each.name not in ("self", "name")
    ]
    # The names of an agent's modules tell its variables apart.
    names = {"name": name} if kind in (TORSO, CORE) else {}
    try:
        inspect.signature(found.__init__).bind(None, *arguments, **names)
    except TypeError as error:
        raise ComponentError(
            f"{name} cannot be made: {error}. Declare it as {base.__name__} does, "
            f"def __init__{expected}."
        ) from None


def load(name: str, allowed: Allowed) -> Any:
    """Imports what an entry point's name or module:attribute stands for.

    Raises:
      ComponentError: it may not be imported, is not there, or its module raises an error.
    """
    if name in _given():
        return _given()[name]
    place = next((entry.value for entry in _entry_points() if entry.name == name), name)
    allowed.check(place)
    module, _, attribute = place.partition(":")
    is_named = place in allowed.names or any(entry.value == place for entry in _entry_points())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
            if inspect.ismodule(found) and not is_named:
                break  # its contents are not of the allowed module
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise _broken(module, error) from error
        raise ComponentError(
            f"{name}: there is no module {error.name!r}. Install the package that has it, or name "
            "its folder in PYTHONPATH."
        ) from None
    except AttributeError as error:
        if not inspect.ismodule(error.obj) or error.obj.__name__ != module:
            raise _broken(module, error) from error
        near = difflib.get_close_matches(attribute, dir(error.obj), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if module == "__main__":
            hint = f" {_OF_PROGRAM}"
        raise ComponentError(f"{name}: {module} has no attribute {attribute!r}.{hint}") from None
    except Exception as error:
        raise _broken(module, error) from error
    defined_in = "" if inspect.ismodule(found) else str(getattr(found, "__module__", ""))
    if not is_named and not allowed.covers(defined_in):
        raise ComponentError(
            f"{name} is not defined in what --allow names, only imported there, and a module "
            f"stands for the classes and functions of its own. Start it with --allow {name} (in "
            f"Python, call with allow={[name]!r})."
        )
    return found


def load_environment(id: str, allowed: Allowed) -> Any | None:
    """Imports what the id of an environment names.

    Args:
      id: built in, registered with Gymnasium, MODULE:ID (which the module registers), MODULE:NAME,
        or the name of an entry point.
      allowed: what may be imported for the last three.

    Returns:
      The class or function, or None for an environment that is registered, of ALE, or Catch.

    Raises:
      ComponentError: as `load`, or the attribute makes no environment and is not itself allowed.
    """
    if id in ENVIRONMENT.built_in:
        return find(id, ENVIRONMENT, allowed)
    if is_attribute(id):
        found = load(id, allowed)
        if id not in allowed.names and not _makes_environments(found):
            raise ComponentError(
                f"{id} is not an environment: it must be a subclass of gymnasium.Env, "
                "gymnasium.vector.VectorEnv or impala.environments.Environment, or a function "
                "that gives a gymnasium.Env."
            )
        return found
    if ":" in id:
        allowed.check(id)
        module = id.partition(":")[0]
        load(module, Allowed((module,)))
    return None


def _makes_environments(found: Any) -> bool:
    if inspect.isclass(found):
        bases = ("gymnasium:Env", "gymnasium.vector:VectorEnv", ENVIRONMENT.base)
        return issubclass(found, tuple(map(pkgutil.resolve_name, bases)))
    return inspect.isfunction(found)


def is_attribute(id: str) -> bool:
    """Returns whether an environment's id is an entry point or MODULE:NAME, not MODULE:ID."""
    _, colon, name = id.rpartition(":")
    return bool(_ATTRIBUTE.fullmatch(name)) if colon else is_installed(id)


def is_own(name: str) -> bool:
    """Returns whether a name of an environment or preset is that of a part: a module's, an entry
    point's, or one of `ENVIRONMENT`.
    """
    return ":" in name or name in ENVIRONMENT.built_in or is_installed(name)


def steps_together(id: str) -> bool:
    """Returns whether the environments of a built-in id step together, so that none can have a
    process of its own.
    """
    return id == "Catch" or id in ENVIRONMENT.built_in or id.startswith("ALE/")


def is_installed(name: str) -> bool:
    """Returns whether an installed package declares an entry point of this name."""
    return name in {entry.name for entry in _entry_points()}


def section_of(name: str, component: type) -> str:
    """Returns the section of a part's settings: my_torso for class MyTorso or entry my-torso."""
    if ":" not in name:
        return re.sub(r"\W", "_", name).lower()
    boundary = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(boundary, "_", component.__name__).lower()


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return _entry_points_of(tuple(sys.path))


@functools.cache  # reading what is installed takes tens of milliseconds
def _entry_points_of(path: tuple[str, ...]) -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=GROUP)


def _broken(module: str, error: Exception) -> ComponentError:
    """Returns the error for a module that raises one while it is imported."""
    return ComponentError(f"Importing {module} raises {described(error)}.")


def described(error: BaseException) -> str:
    """Returns what a custom part has raised, in a line: TYPE: TEXT (where)."""
    place = f" ({where})" if (where := where_raised(error)) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def where_raised(error: BaseException) -> str:
    """Returns FILE:LINE, in FUNCTION: the last frame of an exception that is in a user's file.

    That is the last one outside of installed packages, or else outside of Gymnasium, NumPy and
    this package; empty if there is none.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    return _place(list(reversed(places)))


def where_defined(environment: Any, method: str) -> str:
    """Returns FILE:LINE, in METHOD, of the outermost layer of an environment with one of a user.

    Files are those of `where_raised`; empty if there is none.
    """
    places = []
    while environment is not None:
        function = inspect.unwrap(getattr(type(environment), method, where_defined))
        if (code := getattr(function, "__code__", None)) is not None:
            places.append((code.co_filename, code.co_firstlineno, method))
        environment = vars(environment).get("env")  # of a wrapper
    return _place(places)


def _place(places: Iterable[tuple[str, int, str]]) -> str:
    """Returns the first place (file, line, function) in a user's file, as text."""
    loaded = [sys.modules[name] for name in _CALLED_FOR_US if name in sys.modules]
    ours = (*_OURS, "<", *(f"{path}/" for module in loaded for path in module.__path__))
    outside = [place for place in places if not place[0].startswith(ours)]
    own = [place for place in outside if not place[0].startswith(_LIBRARIES)]
    for file, line, name in (own or outside)[:1]:
        return f"{file}:{line}, in {name}"
    return ""
