"""Who may import whom and know of what: read from the source, so that lazy imports count too."""

import ast
import itertools
import pathlib
import re
from collections.abc import Container, Iterable, Iterator, Mapping

from impala.parts.components import ALGORITHM

ROOT = pathlib.Path(__file__).parent.parent

PACKAGES = ("vtrace", "protos", "impala", "actors", "learner")

# Rooms, lowest floor first. A module is in the room with the longest name that its own begins with;
# it may import its own room and those on lower floors.
FLOORS = (
    ("vtrace", "protos", "impala.types", "impala.finite", "impala.runtime"),
    ("impala.parts.components",),
    ("impala.config.schema",),
    ("impala.config.values", "impala.schedule"),
    ("impala.parts.sections",),
    ("impala.config",),
    ("impala.environments",),
    ("impala.agents",),
    ("impala.algorithms",),
    ("impala.parts",),
    ("impala.acting", "impala.logdir", "impala.testing"),
    ("impala.analysis", "impala.play"),
    ("impala.sweeps", "actors", "learner.checks"),
    ("learner.data",),
    ("learner.fleet",),
    ("learner.update",),
    ("learner.telemetry.sinks",),
    ("learner.telemetry.telemetry",),
    ("learner.evaluation",),
    ("learner.service",),
    ("learner.telemetry",),
    ("learner",),
    ("impala.conform",),
)
# What the floors alone would allow.
NEVER = (
    *(("learner", "actors"), ("learner", "impala.sweeps")),
    *(("protos", "impala"), ("protos", "vtrace"), ("vtrace", "impala"), ("vtrace", "protos")),
)
# The `impala` command: it wires everything together, and nothing imports it.
COMPOSITION_ROOTS = ("impala.__main__", "impala.commands")
# What `import impala` offers: it forwards to a composition root when a name is first used.
LIBRARY = "impala.__init__"
# gRPC stays at the edge of a service.
MAY_IMPORT_GRPC = (
    *("actors.channel", "actors.client", "actors.connection", "actors.evaluator"),
    *("learner.service.calls", "learner.service.probes", "learner.service.server"),
    *("impala.conform.cases", "impala.conform.learner"),
    "protos.impala.v1.learner_pb2_grpc",
)
GRPC = ("grpc", "grpc_health", "protos.impala.v1.learner_pb2_grpc")
# What environments need starts in an instant and works beside any framework.
WITHOUT_TENSORFLOW = (
    *("actors.channel", "actors.client", "actors.connection", "actors.evaluator"),
    *("actors.session", "actors.status"),
    *("impala.config.schema", "impala.environments", "impala.sweeps"),
    *("impala.testing.environments", "impala.types", "learner.checks"),
    *("learner.service.service", "protos"),
)
TENSORFLOW = ("sonnet", "tensorflow")


def modules_of(root: pathlib.Path) -> dict[str, str]:
    """Dotted name -> source of every module in our packages; a package's name ends in __init__."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def imports_of(name: str, source: str, modules: Container[str]) -> Iterator[str]:
    """Yields the dotted names that a module imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")[: -node.level] if node.level else []
            package = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{package}.{alias.name}"
                yield full if full in modules or package in ("protos.impala.v1",) else package


def is_in(name: str, rooms: Iterable[str]) -> bool:
    """Returns whether a module is one of these, or inside one of them."""
    return any(f"{name}.".startswith(f"{room}.") for room in rooms)


def floor_of(name: str) -> tuple[str, int] | None:
    """Returns the room of a module of ours and the number of its floor."""
    rooms = [
        (room, number)
        for number, floor in enumerate(FLOORS)
        for room in floor
        if is_in(name, (room,))
    ]
    return max(rooms, key=lambda room: len(room[0]), default=None)


def violations(modules: Mapping[str, str]) -> list[str]:
    """Returns every import that breaks a rule, as a sentence."""
    imports = {name: sorted(set(imports_of(name, text, modules))) for name, text in modules.items()}
    found = []
    for name, imported in imports.items():
        is_root = is_in(name, COMPOSITION_ROOTS) or name == LIBRARY
        home = floor_of(name)
        for other in imported:
            target = floor_of(other)
            if not is_root and is_in(other, COMPOSITION_ROOTS):
                found.append(f"{name} imports {other}: nothing imports a composition root")
            elif not is_root and home and target and target != home and target[1] >= home[1]:
                found.append(f"{name} imports {other}: that is on the same floor or higher")
            if any(is_in(name, (a,)) and is_in(other, (b,)) for a, b in NEVER):
                found.append(f"{name} imports {other}: never")
            if is_in(other, GRPC) and not is_in(name, MAY_IMPORT_GRPC):
                found.append(f"{name} imports {other}: only {MAY_IMPORT_GRPC} may")
            if is_in(other, ("benchmarks", "deploy", "ledger", "tests")):
                found.append(f"{name} imports {other}: that is not installed")
        if is_in(name, WITHOUT_TENSORFLOW):
            for reached in sorted(reachable(name, imports)):
                if heavy := [other for other in imports[reached] if is_in(other, TENSORFLOW)]:
                    found.append(f"{name} needs {heavy[0]}, by way of {reached}: it must not")
    return found


def reachable(name: str, imports: Mapping[str, list[str]]) -> set[str]:
    """The modules of ours that importing this one may load, itself included."""
    reached: set[str] = set()
    pending = [name]
    while pending:
        name = pending.pop()
        if name in imports and name not in reached:
            reached.add(name)
            pending += [
                module
                for other in imports[name]
                for module in (other, f"{other}.__init__")
                if module != LIBRARY
            ]
    return reached


def test_imports_follow_the_architecture() -> None:
    modules = modules_of(ROOT)
    assert violations(modules) == []
    named = {*MAY_IMPORT_GRPC, *WITHOUT_TENSORFLOW, *COMPOSITION_ROOTS, *itertools.chain(*FLOORS)}
    assert named <= {name.removesuffix(".__init__") for name in modules}, "a room has been renamed"


# Variety lives in environments, distributions, losses and the mix; what moves data knows of none.
SAME_FOR_ALL = ("actors.", "learner.", "protos.")
ENVIRONMENTS = ("ale", "atari", "bandit", "cartpole", "catch", "pong")


def names_in(source: str) -> set[str]:
    """The words of a source that name an algorithm or an environment."""
    algorithms = {name for name in ALGORITHM.built_in if name != "impala"}
    classes = {name.replace("_", "") for name in algorithms}
    words = {word.lower() for word in re.findall(r"[A-Za-z_]+", source)}
    return words & {*algorithms, *classes, *ENVIRONMENTS}


def test_no_service_knows_what_is_learned_or_played() -> None:
    told = {name: names_in(source) for name, source in modules_of(ROOT).items()}
    services = {name: words for name, words in told.items() if name.startswith(SAME_FOR_ALL)}
    assert {name: words for name, words in services.items() if words} == {}
    assert told["impala.config.schema"] >= {"critic", "actor_critic", "catch"}


def test_a_clock_that_jumps_changes_labels_only() -> None:
    """Durations and deadlines are by the monotonic clock; only these write down what time it is."""
    wall_clock = re.compile(r"\btime\.time(_ns)?\(|\b(now|today|utcnow|localtime|gmtime)\(")
    found = {name for name, source in modules_of(ROOT).items() if wall_clock.search(source)}
    assert found == {
        "learner.evaluation.evaluations",
        "learner.telemetry.files",
        "learner.telemetry.trackers",
        "impala.logdir.directory",
    }


def graphs_with_autograph(source: str) -> list[int]:
    """The lines on which tf.function is used without autograph=False."""
    nodes = list(ast.walk(ast.parse(source)))
    told = {
        node
        for call in nodes
        if isinstance(call, ast.Call)
        and any(
            word.arg == "autograph" and ast.unparse(word.value) == "False" for word in call.keywords
        )
        for node in (call.func, *call.args)
    }
    uses = {node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "function"}
    return sorted(node.lineno for node in uses - told if ast.unparse(node) == "tf.function")


def test_no_graph_is_made_with_autograph() -> None:
    """It takes seconds of each process's start, and the learner would not have it anyway."""
    found = {name: graphs_with_autograph(source) for name, source in modules_of(ROOT).items()}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert graphs_with_autograph("tf.function(f)") == [1]
    assert graphs_with_autograph("@tf.function\ndef f(): pass") == [1]
    assert graphs_with_autograph("partial(tf.function, autograph=True)(f)") == [1]
    assert graphs_with_autograph("partial(tf.function, autograph=False)(f)") == []
