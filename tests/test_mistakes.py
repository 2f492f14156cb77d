"""The mistakes that a newcomer makes, one by one in the actor in Node: each of them is named. No
honest actor ever is.
"""

import asyncio
import functools
import json
import os
import pathlib
import re
import signal
import sys
import time
from contextlib import ExitStack

import node
import pytest
import services

from impala.commands.flags import STOPPED
from impala.conform import learner, sentences
from impala.conform.cases import Kit
from impala.conform.report import Report
from impala.logdir import rows
from learner.checks.mistakes import Kind

MISTAKEN = node.TESTS / "node_mistaken.mjs"
SOAK_SECONDS = 90.0
QUICK = {Kind.SHIFTED_ACTIONS, Kind.ROW_0}


def _report(mistake: str, case: str) -> Report:
    """What the kit finds of an actor with a mistake, in one case."""
    kit = Kit(
        "catch",
        6.0,
        f"env MISTAKE={mistake} {node.needed()} {MISTAKEN} --learner {{address}}",
        lambda line: print(line, file=sys.stderr),
    )
    return asyncio.run(kit.run("127.0.0.1:0", only=(sentences.JOIN, case)))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in Kind]
)
def test_the_kit_names_a_mistake(kind: Kind) -> None:
    report = _report(kind, sentences.MISTAKES)
    rows = {row.sentence: row for row in report.rows()}
    row = rows[sentences.SENTENCE_OF[kind]]
    assert row.result == "FAILED", report.text()
    assert kind in row.detail


# Breaches of rules that only a conversation shows, and the case in which each is seen.
BREACHES = {
    "own_weights": sentences.JOIN,
    "old_parameters": sentences.PARAMETERS,
    "old_incarnation": sentences.RESTART,
    "too_many_in_flight": sentences.PRESSURE,
    "changed_retry": sentences.BROKEN,
    "new_incarnation": sentences.BROKEN,
    "no_claim": sentences.BROKEN,
    "left_out": sentences.BROKEN,
    "duplicate_again": sentences.LOST,
    "not_again": sentences.UNKNOWN,
    "refused_again": sentences.REFUSALS,
    "as_large": sentences.REFUSALS,
    "no_backoff": sentences.BACKOFF,
    "same_run": sentences.NEW_RUN,
    "endless": sentences.FINISH,
    "stubborn": sentences.MAJOR,
    "reckless": sentences.NEEDS,
}


@pytest.mark.parametrize(
    "breach",
    [
        pytest.param(b, marks=() if b == "too_many_in_flight" else pytest.mark.slow)
        for b in BREACHES
    ],
)
def test_the_kit_finds_a_breach(breach: str) -> None:
    report = _report(breach, BREACHES[breach])
    failed = {row.case for row in report.rows() if row.result == "FAILED"}
    # What comes again is compared whatever the case.
    case = sentences.STREAM if breach == "changed_retry" else BREACHES[breach]
    assert case in failed, report.text()


@pytest.mark.slow
def test_a_message_is_judged_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "_MESSAGE_SECONDS", 0.2)  # on a busy machine
    test_the_kit_finds_a_breach("same_run")


def test_every_case_can_fail() -> None:
    assert {*BREACHES.values(), sentences.MISTAKES, sentences.STREAM} == set(sentences.SENTENCES)


@pytest.mark.slow
def test_the_learner_names_mistakes_of_its_actor_only(
    tmp_path: pathlib.Path,
) -> None:
    """All play for one learner, with an actor that makes none."""
    logdir = tmp_path / "run"
    logdir.mkdir()

    def of(name: str) -> dict[str, int]:
        told = services.run("status", address, "--json")
        assert told.returncode == 0, told.stderr
        members = {member["name"]: member for member in json.loads(told.stdout)["members"]}
        return dict(members.get(name, {"mistakes": {}})["mistakes"])

    def is_named(kind: Kind) -> bool:
        return kind in of(kind)

    with ExitStack() as stack:
        stack.enter_context(services.learner(logdir, "127.0.0.1:0", "--checks.recompute", 0.5))
        address = services.address_of(logdir)
        honest = ("--name", "honest", "--num-envs", 8)
        stack.enter_context(node.actor(address, logdir, *honest))
        for kind in Kind:
            with node.actor(
                *(address, logdir, "--name", kind, "--num-envs", 8),
                script=MISTAKEN,
                environment={**os.environ, "MISTAKE": kind},
            ):
                services.wait_for(
                    f"the learner to name {kind}", functools.partial(is_named, kind), seconds=180.0
                )
        assert of("honest") == {}


def _received(logdir: pathlib.Path) -> float:
    """How many unrolls a learner has taken."""
    return max((row.get("unrolls/received", 0.0) for row in rows.read(logdir)), default=0.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", ["catch", "cartpole", "pendulum", "bandit", "cartpole-q"])
def test_honest_actors_are_never_named_in_a_soak(preset: str, tmp_path: pathlib.Path) -> None:
    """Two actors play for a minute and a half, and a core recomputes all that it can."""
    logdir, log = tmp_path / "run", tmp_path / "log"
    with services.impala(
        *("train", preset, "--logdir", logdir, "--num-actors", 2, "--seed", 101),
        *("--total-frames", 1_000_000_000, "--learner.log-seconds", 1),
        *("--checks.on-mistake", "refuse", "--checks.recompute", 1.0),
        log=log,
    ) as process:
        services.wait_for("the first unrolls", lambda: _received(logdir) > 0)
        time.sleep(SOAK_SECONDS)
        process.send_signal(signal.SIGINT)
        assert services.end_of(process) == STOPPED, log.read_text()
    (row,) = rows.read(logdir)[-1:]
    found = {name: n for name, n in row.items() if re.match("messages/(mistakes|rejected)", name)}
    print(f"{preset}: {row['unrolls/received']:,.0f} unrolls, mistakes and rejections {found}")
    assert not any(found.values()), log.read_text()
    assert "mistake" not in log.read_text()
