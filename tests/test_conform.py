"""The compliance kit: our actors pass it, and it says what the page says."""

import pathlib
import re
import subprocess
import sys

import node
import pytest
import services
from page import PAGE, normal

from impala.conform import cases
from impala.conform.report import Report


def _told(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return services.run("conform", *arguments)


def _passes(preset: str, actor: str, seconds: float = 60.0) -> None:
    told = _told(
        *("--listen", "127.0.0.1:0", "--preset", preset, "--actor", actor, "--seconds", seconds)
    )
    assert told.returncode == 0, told.stdout + told.stderr
    sentences = sum(map(len, cases.SENTENCES.values()))
    assert f"{sentences} sentences of docs/wire-protocol.md: {sentences} passed." in told.stdout


def _in_node() -> str:
    return f"{node.needed()} {node.HOME / 'actor.js'} --learner {{address}}"


def _in_python() -> str:
    return f"{sys.executable} -m impala actor --learner {{address}}"


def test_the_actor_in_node_passes() -> None:
    _passes("catch", _in_node())


@pytest.mark.slow
def test_the_actor_in_node_passes_with_numbers_as_actions() -> None:
    _passes("pendulum", _in_node())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["catch", "pendulum"])
def test_our_own_actor_passes(preset: str) -> None:
    _passes(preset, _in_python())


def test_the_kit_quotes_the_page() -> None:
    page = normal(PAGE)
    for sentences in cases.SENTENCES.values():
        for sentence in sentences:
            assert normal(sentence) in page, sentence


def test_who_does_not_come_or_ends_fails_in_time(tmp_path: pathlib.Path) -> None:
    """Nobody joins, and an actor that ends at once."""
    for actor in ("", "false"):
        told = _told("--listen", "127.0.0.1:0", "--seconds", 0.3, "--actor", actor)
        assert told.returncode == 1
        assert "did not join" in told.stdout
        assert "it did not come to it" in told.stdout
        assert not re.search(r"^  passed", told.stdout, re.M)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--listen is missing"),
        (("--listen", "nowhere"), "the host is missing"),
        (("--listen", "127.0.0.1:0", "--actor", "'"), "No closing quotation"),
        (("--listen", "127.0.0.1:0", "--seconds", "0"), "seconds"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: tuple[str, ...], words: str) -> None:
    told = _told(*arguments)
    assert told.returncode == 2
    assert words in told.stderr


def test_a_report_names_the_first_failure_of_each_sentence() -> None:
    report = Report({"one": ("a", "b"), "two": ("c",), "three": ("d",)})
    report.failed("one", "because", "b")
    report.failed("one", "and then", "b")
    report.done("one")
    report.done("two", "no way to")
    assert [row[1:] for row in report.rows()] == [
        ("a", "passed", ""),
        ("b", "FAILED", "because"),
        ("c", "not tested", "no way to"),
        ("d", "not tested", "it did not come to it"),
    ]
    assert not report.is_good
    assert (
        "4 sentences of docs/wire-protocol.md: 1 passed, 1 FAILED, 2 not tested." in report.text()
    )
