"""Parts by name: built in, installed, or `module:attribute` where this process is allowed to."""

import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from impala.config import demands
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
    find,
    for_children,
    give,
    load,
    load_environment,
)
from impala.parts.components import section_of as section

ALLOWED = Allowed(("mine",))
THING = Kind("thing", "mine.things:Thing", {"flat": "mine.things:Flat"})


@pytest.fixture(autouse=True)
def _package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `mine`, and an installed one that declares two of its classes."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "things.py").write_text(
        "import abc\n"
        "class Thing(abc.ABC):\n"
        "    @abc.abstractmethod\n"
        "    def show(self): ...\n"
        "class Flat(Thing):\n"
        "    def show(self): return 'flat'\n"
        "class RoundThing(Flat): pass\n"
        "class Other: pass\n"
        "class Unfinished(Thing): pass\n"
        "class Unmade(Flat):\n"
        "    def __init__(self, colour): pass\n"
        "made = Flat()\n"
    )
    (package / "games.py").write_text(
        "import os\n"
        "from os import system\n"
        "import gymnasium as gym\n"
        "from gymnasium.vector import SyncVectorEnv\n"
        "from mine import things\n"
        "class Game(gym.Env): pass\n"
        "class Rules: pass\n"
        "def make(): return Game()\n"
    )
    (package / "front.py").write_text("from mine.things import Flat\n")
    (package / "broken.py").write_text("import abc\n1 / 0\n")
    (package / "lacking.py").write_text("import absent_module\n")
    (package / "outdated.py").write_text("import abc\nabc.gone\n")
    (package / "loud.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[impala.components]\nround-thing = mine.things:RoundThing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("flat", "Flat"),  # built in
        ("round-thing", "RoundThing"),  # the name of an entry point
        ("mine.things:RoundThing", "RoundThing"),  # what an entry point names
    ],
)
def test_what_is_built_in_or_installed_needs_no_allowance(name: str, found: str) -> None:
    assert find(name, THING, Allowed()).__name__ == found


@pytest.mark.parametrize("names", [("mine",), ("mine.things",), ("mine.things:Flat",)])
def test_a_module_or_an_attribute_of_it_can_be_allowed(names: tuple[str, ...]) -> None:
    assert find("mine.things:Flat", THING, Allowed(names)).__name__ == "Flat"


@pytest.mark.parametrize("names", [(), ("min",), ("mine.thing",), ("mine.things:Round",), ("",)])
def test_refusals_name_the_flag_that_would_allow_a_part(names: tuple[str, ...]) -> None:
    with pytest.raises(ComponentError, match=r"--allow mine\.things:Flat \(or --allow mine\.thi"):
        find("mine.things:Flat", THING, Allowed(names))


def test_what_is_refused_is_not_imported(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ComponentError, match="--allow"):
        load("mine.loud:anything", Allowed(("mine.things",)))
    assert not (tmp_path / "imported").exists()
    with pytest.raises(ComponentError, match="no attribute"):
        load("mine.loud:anything", ALLOWED)
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flut", "The thing is 'flut'; it must be one of flat, round-thing. Did you mean 'flat'?"),
        ("flut", "Your own thing is named as MODULE:ATTRIBUTE."),
        ("mine.things:", "'mine.things:'; it must be one of"),
        ("mine.thongs:Flat", "there is no module 'mine.thongs'. Install the package"),
        ("mine.things:Flut", "mine.things has no attribute 'Flut'. Did you mean 'Flat'?"),
        (
            "mine.things:Other",
            "mine.things:Other is not a thing: derive it from Thing (from mine.things import",
        ),
        ("mine.things:made", "mine.things:made is not a thing: derive it"),
        ("mine.things:Unfinished", "an abstract thing: it has to define show."),
        ("mine.things:Unmade", "mine.things:Unmade cannot be made: "),
        ("mine.broken:Flat", "Importing mine.broken raises ZeroDivisionError: division by zero ("),
        ("mine.broken:Flat", "broken.py:2, in <module>)."),
        ("mine.lacking:Flat", "Importing mine.lacking raises ModuleNotFoundError: No module named"),
        ("mine.outdated:Flat", "Importing mine.outdated raises AttributeError: module 'abc' has"),
    ],
)
def test_what_cannot_be_found_is_told_in_a_line(name: str, message: str) -> None:
    with pytest.raises(ComponentError) as caught:
        find(name, THING, ALLOWED)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Game", "make"])
def test_an_allowed_module_allows_its_own_environments(name: str) -> None:
    found = load_environment(f"mine.games:{name}", ALLOWED)
    assert found is not None and (found.__module__, found.__name__) == ("mine.games", name)


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "system", "os", "gym.make", "gym.Env", "SyncVectorEnv", "things.Flat"),
        *("Game.reset", "make.__class__", "__loader__.get_data", "__builtins__", "Rules"),
    ],
)
def test_an_allowed_module_does_not_allow_what_it_has_imported(name: str) -> None:
    """Given that a learner, or a checkpoint, names it to have it called with its own arguments."""
    id = f"mine.games:{name}"
    with pytest.raises(
        ComponentError, match=r"is not defined in what --allow|is not an environment"
    ):
        load_environment(id, ALLOWED)
    # What a person has typed in full is theirs to judge.
    assert load_environment(id, Allowed((id,))) is not None


def test_one_name_may_be_allowed_without_a_list() -> None:
    assert Allowed.of("mine") == Allowed.of(["mine"]) == Allowed(("mine",))
    with pytest.raises(ComponentError) as caught:
        Allowed.of("yours").check("mine:Flat")
    assert "--allow mine:Flat (or --allow mine; in Python, call with allow=['mine:Flat'])" in str(
        caught.value
    )


def test_parts_come_from_modules_of_allowed_packages_only() -> None:
    assert find("mine.front:Flat", THING, ALLOWED).__name__ == "Flat"
    with pytest.raises(ComponentError, match=r"Start it with --allow mine\.front:Flat"):
        find("mine.front:Flat", THING, Allowed(("mine.front",)))
    with pytest.raises(ComponentError, match=r"--allow mine\.games:things\.Flat"):
        find("mine.games:things.Flat", THING, ALLOWED)


def test_settings_stand_in_a_section_named_after_the_part() -> None:
    part = find("mine.things:RoundThing", THING, ALLOWED)
    assert section("mine.things:RoundThing", part) == "round_thing"
    assert section("round-thing", part) == "round_thing"
    assert section("any:x", type("HTTPTorso2D", (), {})) == "http_torso2_d"


KINDS = (ALGORITHM, CORE, ENVIRONMENT, OPTIMISER, SINK, TORSO)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.word)
def test_built_in_parts_derive_from_the_named_base(kind: Kind) -> None:
    base = load(kind.base, Allowed((kind.base,)))
    assert base.__name__ == kind.base.partition(":")[2]
    for name in filter(kind.built_in.get, kind.built_in):  # feed_forward is no part
        assert issubclass(find(name, kind, Allowed()), base)


def test_demands_are_checked_before_tensorflow_loads() -> None:
    for name in ALGORITHM.built_in:
        assert find(name, ALGORITHM, Allowed()).demands is demands.BUILT_IN[name]


def test_what_a_program_gives_is_found_here_and_in_children(tmp_path: pathlib.Path) -> None:
    # Given a function that a function has made, and a class of a module that only we find ...
    module = tmp_path / "modules" / "of_ours.py"
    module.parent.mkdir()
    module.write_text("class Ours:\n    number = 3\n")
    script = f"""
import os, subprocess, sys
sys.path.append({str(module.parent)!r})
from of_ours import Ours
from impala.parts.components import Allowed, for_children, give, load
import pathlib
def maker(number):
    return lambda: number
names = [give(maker(4)), give(Ours)]
print(*names, load(names[0], Allowed())(), load(names[1], Allowed()).number, flush=True)
environ = for_children(pathlib.Path("parts"), names)
code = "import sys; from impala.parts.components import Allowed, load;"
code += "print(load(sys.argv[1], Allowed())(), load(sys.argv[2], Allowed()).number)"
subprocess.run([sys.executable, "-c", code, *names], env={{**os.environ, **environ}}, check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    # ... then a child finds both by the names that they have got.
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "__main__:maker._locals_._lambda_ of_ours:Ours 4 3",
        "4 3",
    ]


def test_what_a_program_defines_is_not_to_be_allowed_elsewhere() -> None:
    with pytest.raises(ComponentError, match="load it in one that defines it") as raised:
        Allowed().check("__main__:Walk")
    assert "--allow" not in str(raised.value)


def test_what_a_program_gives_keeps_its_name(tmp_path: pathlib.Path) -> None:
    def function(held: object) -> Any:
        return lambda: held

    def a_class(held: object) -> Any:
        class Holder:
            it = held

        return Holder

    # Parts of one name are told apart, also by what cannot be compared ...
    of_function = [function(held) for held in (0.1, 0.5, np.zeros(2), np.ones(2))]
    parts = [*of_function, a_class(1), a_class(2)]
    names = [give(part) for part in parts]
    assert len(set(names)) == len(parts)
    assert names[1] == f"{names[0]}2"
    assert [load(name, Allowed()) for name in names] == parts
    # ... and the same one, or its definition run once more, has its name again.
    assert give(function(0.1)) == names[0]
    assert [give(part) for part in parts] == names
    made: list[Any] = []
    for number in (1, 2):  # as when a notebook's cell is changed and run again
        scope: dict[str, Any] = {"__name__": "notebook"}
        exec(f"def walk(): return {number}\nclass Walk: number = {number}", scope)
        made += [give(scope["walk"]), give(scope["Walk"])]
    assert made == 2 * ["notebook:walk", "notebook:Walk"]
    # A run's children get what it names, and need not be able to get other parts.
    locked = give(function(threading.Lock()))
    assert for_children(tmp_path / "parts", names=()) == {}
    assert for_children(tmp_path / "parts", names=names[:2])
    for needed in ([locked], None):
        with pytest.raises(ComponentError, match=f"{re.escape(locked)}.* cannot be sent to"):
            for_children(tmp_path / "parts", names=needed)


def test_what_is_no_part_cannot_be_given() -> None:
    with pytest.raises(ComponentError, match="3 is no part: give a class or a function"):
        give(3)
