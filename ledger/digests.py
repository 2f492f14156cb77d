"""Digests of the source that a learning result depends on.

Comments, docstrings and layout do not count. Of the modules that several algorithms, networks or
optimisers share, only the definitions count that the result's own ones lead to.
"""

import ast
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import gymnasium as gym

from impala.config.schema import Config, EnvironmentConfig, RepeatConfig
from impala.parts.components import ALGORITHM, CORE, OPTIMISER, TORSO
from impala.schedule import phases, tasks

# Prefix of an environment's id -> its module, on which no other environment depends.
_ENVIRONMENTS = {
    "ALE/": "atari",
    "Bandit/": "bandit",
    "Catch": "catch",
    "Catch/Continuing": "continuing",
    "External": "external",
    "MinAtar/": "minatar",
}

_WRAPPERS = ("impala.environments.gymnasium", "impala.environments.wrappers")

# For images of unsigned integers alone: Atari's, of all that experiments are made with.
_OF_IMAGES = "impala.agents.images"


class Group(NamedTuple):
    """A part of the source on which a result depends."""

    entries: tuple[str, ...]
    """What it depends on at first: MODULE as a whole, or MODULE:DEFINITION."""
    rooms: tuple[str, ...] = ()
    """Packages and modules in which the definitions that these lead to are looked for."""
    others: tuple[str, ...] = ()
    """Modules in these on which it does not depend."""


def of(config: Config, root: pathlib.Path) -> dict[str, str]:
    """Returns the digest of each group on which results with these settings depend.

    Args:
      config: settings of a run.
      root: of the source tree.
    """
    return {name: _digest(group, root) for name, group in groups(config, root).items()}


def groups(config: Config, root: pathlib.Path) -> dict[str, Group]:
    """Returns the groups on which results with these settings depend, by name."""
    algorithms = [ALGORITHM.built_in.get(word.algorithm, "") for word in phases.words(config)]
    agent = (TORSO.built_in.get(config.agent.torso), CORE.built_in.get(config.agent.core))
    optimiser = OPTIMISER.built_in.get(config.optimiser.name)
    played = [task.environment.id for task in tasks.make(config.environment, config.tasks)]
    found = {
        "algorithm": Group(
            tuple(dict.fromkeys(name.partition(":")[0] for name in algorithms if name)),
            ("impala.algorithms", "vtrace"),
        ),
        "agent": Group(
            ("impala.agents.agent", *filter(None, agent), "impala.agents.distributions:for_space"),
            ("impala.agents",),
            () if any(id.startswith("ALE/") for id in played) else (_OF_IMAGES,),
        ),
        "optimiser": Group(
            ("learner.update.learner", *filter(None, (optimiser,))), ("learner.update.optimisers",)
        ),
        "environment": Group(tuple(_environments(config, played, root))),
        "wrappers": Group(tuple(_wrappers(config, played)), _WRAPPERS),
        "mix": Group(("learner.data.mix",)),
    }
    if config.is_paced:
        found["pacing"] = Group(("learner.data.pacing",))
    if config.mix.replayed:
        found["replay"] = Group(("learner.data.replay",))
    return found


def _environments(config: Config, ids: Sequence[str], root: pathlib.Path) -> Iterator[str]:
    """Yields the modules that all environments share, and those of these ids and settings."""
    own = {module for each in ids for module in _own(each)}
    used = {
        **{module: module in own for module in _ENVIRONMENTS.values()},
        **{module.rpartition(".")[2]: False for module in _WRAPPERS},  # by definition
        "joint": len(ids) > 1,
        "processes": config.environment.vectorization == "async",
        "outward": False,  # for who plays an agent outside of a run
    }
    for path in sorted((root / "impala/environments").glob("*.py")):
        if used.get(path.stem, True):
            yield f"impala.environments.{path.stem}"


def _wrappers(config: Config, ids: Sequence[str]) -> Iterator[str]:
    """Yields what wraps environments of these ids and settings, and steps them together."""
    gymnasium, wrappers = _WRAPPERS
    settings = config.environment
    yield f"{wrappers}:Checked"
    if settings.last_action or settings.last_reward or settings.time_in_episode:
        yield f"{wrappers}:WithHistory"
    others = [id for id in ids if not _own(id)]
    if any({"bandit", "minatar"} & _own(id) for id in ids) or any(
        _has_vector(id, settings) for id in others
    ):
        yield f"{gymnasium}:vector"
    if not all(_has_vector(id, settings) for id in others):
        yield f"{gymnasium}:in_turn"


def _has_vector(id: str, settings: EnvironmentConfig) -> bool:
    """Returns whether environments of an id step together by Gymnasium's own code."""
    wants = settings.vectorization == "own" and settings.repeat == RepeatConfig()
    return wants and gym.spec(id).vector_entry_point is not None


def _own(id: str) -> set[str]:
    """Returns the modules of an environment of ours; none of one that comes from elsewhere."""
    return {module for prefix, module in _ENVIRONMENTS.items() if id.startswith(prefix)}


class _Module(NamedTuple):
    definitions: Mapping[str, tuple[ast.AST, ...]]
    imports: Mapping[str, tuple[str, str]]  # name -> module, name in it ("": the module itself)
    tree: ast.Module


def _digest(group: Group, root: pathlib.Path) -> str:
    """Returns the digest of everything that a group leads to."""
    pending = [tuple(entry.partition(":")[::2]) for entry in group.entries]
    found: dict[tuple[str, str], str] = {}
    while pending:
        module, name = pending.pop()
        if (module, name) in found or (path := _path(module, root)) is None:
            continue
        source = _module(path.read_text(encoding="utf-8"))
        if name in source.imports:  # a package's __init__ hands it on
            pending.append(source.imports[name])
            continue
        nodes = source.definitions.get(name, ()) if name else (source.tree,)
        found[module, name] = "".join(ast.dump(node, annotate_fields=False) for node in nodes)
        for other, part in _references(nodes, module, source):
            is_inside = any(f"{other}.".startswith(f"{room}.") for room in group.rooms)
            if is_inside and other not in group.others:
                pending.append((other, part))
    text = json.dumps(sorted([*place, dump] for place, dump in found.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _path(module: str, root: pathlib.Path) -> pathlib.Path | None:
    base = root.joinpath(*module.split("."))
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def _references(nodes: tuple[ast.AST, ...], module: str, source: _Module) -> list[tuple[str, str]]:
    """Returns the (module, definition) pairs that are named in these nodes."""
    found = []
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, ast.Name) and node.id in source.definitions:
            found.append((module, node.id))
        elif isinstance(node, ast.Name) and source.imports.get(node.id, ("", ""))[1]:
            found.append(source.imports[node.id])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imported, name = source.imports.get(node.value.id, ("", ""))
            if imported:
                found.append((f"{imported}.{name}" if name else imported, node.attr))
    return found


@functools.cache
def _module(text: str) -> _Module:
    tree = normal(text)
    definitions: dict[str, tuple[ast.AST, ...]] = {}
    for node in tree.body:
        for name in _defined(node):
            definitions[name] = (*definitions.get(name, ()), node)
    imports: dict[str, tuple[str, str]] = {}
    for each in ast.walk(tree):
        if isinstance(each, ast.Import):
            imports |= {(x.asname or x.name): (x.name, "") for x in each.names}
        elif isinstance(each, ast.ImportFrom) and each.module:
            imports |= {(x.asname or x.name): (each.module, x.name) for x in each.names}
    return _Module(definitions, imports, tree)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = (name for target in targets if target is not None for name in ast.walk(target))
    return [name.id for name in names if isinstance(name, ast.Name)]


def normal(text: str) -> ast.Module:
    """Returns the syntax tree of a module without its comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, field, None), list):
                setattr(node, field, [x for x in body if not _is_text(x)])
    return tree


def _is_text(node: ast.stmt) -> bool:
    """Returns whether a statement is a string alone, such as a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
