"""Who may import whom and know of what: read from the source, so that lazy imports count too."""

import ast
import graphlib
import pathlib
import re
from collections.abc import Iterator, Mapping

import pytest

from impala.components import ALGORITHM

ROOT = pathlib.Path(__file__).parent.parent

PACKAGES = ("vtrace", "protos", "impala", "actors", "learner")

# Room -> the rooms that it may import besides itself. A module belongs to the longest name of a
# room that its own begins with; a room that is named stands for what is in it, not for the rooms
# below it.
_LIBRARY = {
    *("impala", "impala.agents", "impala.algorithms", "impala.components", "impala.config"),
    *(
        "impala.config.schema",
        "impala.environments",
        "impala.finite",
        "impala.runtime",
        "impala.schedule",
        "impala.types",
    ),
}
MAY_IMPORT: dict[str, set[str]] = {
    "vtrace": set(),
    "protos": set(),
    "impala.components": set(),
    "impala.finite": set(),
    "impala.types": set(),
    "impala.runtime": set(),
    "impala.config.schema": {"impala.components"},
    "impala.schedule": {"impala.components", "impala.config.schema"},
    "impala.config": {
        *("impala.components", "impala.config.schema", "impala.schedule", "impala.types"),
    },
    "impala.environments": {
        *("impala.components", "impala.config", "impala.config.schema", "impala.types"),
    },
    "impala.agents": {
        *("impala.config.schema", "impala.environments", "impala.runtime", "impala.types"),
    },
    "impala.algorithms": {
        *("impala.agents", "impala.config", "impala.config.schema", "impala.types", "vtrace"),
    },
    # Names become objects; episodes are played.
    "impala": _LIBRARY,
    "impala.logdir": _LIBRARY,
    "impala.sweeps": {*_LIBRARY, "impala.logdir"},
    # Suites of tests for parts; only tests import them.
    "impala.testing": _LIBRARY,
    "actors": {*_LIBRARY, "protos"},
    "learner.telemetry": {
        *(*_LIBRARY, "impala.logdir"),
        *("learner.data", "learner.front", "learner.update"),
    },
    "learner.checks": {"protos"},
    "learner.front": {*_LIBRARY, "impala.logdir", "learner.checks", "learner.data", "protos"},
    "learner.data": {*_LIBRARY, "impala.logdir", "learner.checks", "protos"},
    "learner.update": {*_LIBRARY, "impala.logdir", "learner.data", "learner.front"},
    # The compliance kit: a learner that learns nothing, and an actor that plays nothing.
    "impala.conform": {
        *(*_LIBRARY, "protos"),
        *("actors", "learner.checks", "learner.data", "learner.front"),
    },
    "learner": {
        *(*_LIBRARY, "impala.logdir", "protos"),
        *("learner.data", "learner.front", "learner.telemetry", "learner.update"),
    },
}
# The `impala` command: it wires everything together, so it imports from everywhere and nothing
# imports it.
COMPOSITION_ROOTS = ("impala.__main__", "impala.commands")
# What `import impala` offers: it forwards to a composition root when a name is first used. The one
# exception to the floors; to import it, as every import of ours does, loads nothing.
LIBRARY = "impala.__init__"
# gRPC stays at the edge of a service.
MAY_IMPORT_GRPC = (
    *("actors.channel", "actors.client"),
    *("learner.front.calls", "learner.front.probes", "learner.front.server"),
    *("impala.conform.cases", "impala.conform.learner", "impala.conform.probe"),
    "protos.impala.v1.learner_pb2_grpc",
)
GRPC = ("grpc", "grpc_health", "protos.impala.v1.learner_pb2_grpc")
# What environments need starts in an instant and works beside any framework.
WITHOUT_TENSORFLOW = (
    *("actors.channel", "actors.client", "actors.session", "actors.status"),
    *("impala.config.schema", "impala.conform", "impala.environments", "impala.sweeps"),
    *("impala.testing.environments", "impala.types", "learner.checks"),
    *("learner.front.service", "protos"),
)
TENSORFLOW = ("sonnet", "tensorflow")


def modules_of(root: pathlib.Path) -> dict[str, str]:
    """Dotted name -> source of every module in our packages; a package's name ends in __init__."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def imports_of(name: str, source: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere: `from a import b` gives a and a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_of(name: str) -> str | None:
    """The room that a module is in; None for modules that are not ours."""
    rooms = [room for room in MAY_IMPORT if is_in(name, (room,))]
    return max(rooms, key=len, default=None)


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of these, or inside one of them."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def violations(modules: Mapping[str, str]) -> list[str]:
    """Every import that should not be, as a sentence."""
    imports = {name: sorted(set(imports_of(name, text))) for name, text in modules.items()}
    found = []
    for name, imported in imports.items():
        room = room_of(name)
        is_root = is_in(name, COMPOSITION_ROOTS) or name == LIBRARY
        for other in imported:
            if name.startswith(f"{other}."):  # `from a import b` gives a and a.b: a.b counts
                continue
            allowed = {*MAY_IMPORT[room or ""], room or ""}
            if not is_root and room_of(other) not in {*allowed, None}:
                found.append(f"{name} imports {other}: {room} may import {sorted(allowed)}")
            if not is_root and is_in(other, COMPOSITION_ROOTS):
                found.append(f"{name} imports {other}: nothing imports a composition root")
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
    assert {room_of(name) for name in modules if not is_in(name, COMPOSITION_ROOTS)} == set(
        MAY_IMPORT
    )
    assert violations(modules) == []


def test_rooms_stand_on_floors() -> None:
    """No circle: each room is above those that it imports."""
    floors = {room: below - {room} for room, below in MAY_IMPORT.items()}
    order = list(graphlib.TopologicalSorter(floors).static_order())  # CycleError names a circle
    assert order.index("vtrace") < order.index("impala.algorithms") < order.index("learner")


def test_the_modules_named_here_exist() -> None:
    """A rule for a module that was renamed would hold for ever."""
    names = {name.removesuffix(".__init__") for name in modules_of(ROOT)}
    assert {*MAY_IMPORT_GRPC, *WITHOUT_TENSORFLOW, *COMPOSITION_ROOTS} <= names


def test_nothing_but_tests_imports_deploy_or_ledger_and_they_import_no_test() -> None:
    """They check manifests and pages against the program, so they may import all of that."""
    tests = {path.stem for path in (ROOT / "tests").iterdir() if path.suffix in ("", ".py")}
    for path in (ROOT / "deploy").rglob("*.py"):
        imported = {*imports_of("deploy.x.y", path.read_text(encoding="utf-8"))}
        assert not [name for name in imported if name.partition(".")[0] in {*tests, "tests"}], path
    for path in (ROOT / "benchmarks").rglob("*.py"):
        imported = {*imports_of("benchmarks.x.y", path.read_text(encoding="utf-8"))}
        assert not [name for name in imported if is_in(name, ("deploy", "ledger"))], path
    for path in (ROOT / "ledger").rglob("*.py"):
        imported = {*imports_of("ledger.x", path.read_text(encoding="utf-8"))}
        assert not [name for name in imported if name.partition(".")[0] in {*tests, "tests"}], path
        assert not [name for name in imported if is_in(name, ("deploy",))], path


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        ({"vtrace.vtrace": "import impala"}, "vtrace.vtrace imports impala"),
        ({"protos.codec": "from impala.types import Unroll"}, "protos.codec imports impala.types"),
        (
            {"impala.agents.agent": "import protos.codec"},
            "impala.agents.agent imports protos.codec",
        ),
        ({"actors.actor": "from learner.data import mix"}, "actors.actor imports learner.data.mix"),
        ({"learner.data.mix": "def f():\n  import actors"}, "learner.data.mix imports actors"),
        (
            {"impala.agents.agent": "from impala.commands import main"},
            "impala.agents.agent imports impala.commands.main: nothing",
        ),
        (
            {"learner.run": "from impala.commands.main import train"},
            "nothing imports a composition",
        ),
        (
            {"learner.front.service": "import grpc.aio"},
            "learner.front.service imports grpc.aio: only",
        ),
        (
            {"learner.front.service": "from protos.impala.v1 import learner_pb2_grpc"},
            "learner.front.service imports protos.impala.v1.learner_pb2_grpc: only",
        ),
        ({"impala.commands.main": "import grpc"}, "impala.commands.main imports grpc: only"),
        (
            {"impala.agents.agent": "from tests import counting"},
            "impala.agents.agent imports tests: that is",
        ),
        ({"learner.run": "from ledger import records"}, "learner.run imports ledger.records: that"),
        (
            {"learner.run": "from deploy.lint import checks"},
            "learner.run imports deploy.lint: that",
        ),
        ({"impala.types": "import tensorflow as tf"}, "impala.types needs tensorflow"),
        (
            {
                "impala.environments.atari": "from impala.agents import observation",
                "impala.agents.observation": "from impala.agents.torsos import MLP",
                "impala.agents.torsos": "import sonnet as snt",
            },
            "impala.environments.atari needs sonnet, by way of impala.agents.torsos",
        ),
    ],
)
def test_a_forbidden_import_is_found(modules: dict[str, str], complaint: str) -> None:
    assert any(complaint in violation for violation in violations(modules))


def test_allowed_imports_pass() -> None:
    modules = {
        "vtrace.vtrace": "import tensorflow as tf",
        "impala.__main__": "from impala.commands.main import main",
        "impala.commands.main": "from actors.run import run_actor\nfrom learner import run",
        "impala.algorithms.losses": "import vtrace\nimport impalalike\nfrom impala import types",
        "actors.client": "import grpc\nfrom protos.impala.v1 import learner_pb2_grpc",
        "learner.run": "from . import server\nfrom impala import build",
        "impala.environments.base": "import numpy as np\nfrom impala.types import TimeStep",
        "impala.types": "import numpy as np",
    }
    assert violations(modules) == []


# Variety lives in environments, distributions, losses and the mix; what moves data knows of none.
SAME_FOR_ALL = ("actors.", "learner.", "protos.")
ENVIRONMENTS = ("ale", "atari", "bandit", "cartpole", "catch", "pong")


def names_told(source: str) -> set[str]:
    """The words of a source that name an algorithm or an environment."""
    algorithms = {name for name in ALGORITHM.built_in if name != "impala"}
    classes = {name.replace("_", "") for name in algorithms}
    words = {word.lower() for word in re.findall(r"[A-Za-z_]+", source)}
    return words & {*algorithms, *classes, *ENVIRONMENTS}


def test_no_service_knows_what_is_learned_or_played() -> None:
    told = {name: names_told(source) for name, source in modules_of(ROOT).items()}
    services = {name: words for name, words in told.items() if name.startswith(SAME_FOR_ALL)}
    assert {name: words for name, words in services.items() if words} == {
        "protos.impala.v1.learner_pb2": {"atari"}  # a section of the settings that it carries
    }
    assert told["impala.config.schema"] >= {"critic", "actor_critic", "catch"}


def test_a_name_that_is_told_is_noticed() -> None:
    source = "if config.algorithm == 'critic' or isinstance(environment, Catch): pass"
    assert names_told(source) == {"critic", "catch"}


def test_a_clock_that_jumps_changes_labels_only() -> None:
    """Durations and deadlines are by the monotonic clock; only these write down what time it is."""
    wall_clock = re.compile(r"\btime\.time(_ns)?\(|\b(now|today|utcnow|localtime|gmtime)\(")
    found = {name for name, source in modules_of(ROOT).items() if wall_clock.search(source)}
    assert found == {
        "learner.telemetry.evaluations",
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
