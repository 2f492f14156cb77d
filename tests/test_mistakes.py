"""The mistakes that a newcomer makes, one by one in the actor in Node: each of them is named."""

import asyncio
import functools
import json
import os
import pathlib
import sys
from contextlib import ExitStack

import node
import pytest
import services

from impala.conform import cases
from impala.conform.cases import Kit
from impala.conform.report import Report
from learner.checks.mistakes import Kind

MISTAKEN = node.TESTS / "node_mistaken.mjs"
QUICK = {Kind.SHIFTED_ACTIONS, Kind.ROW_0}


def _report(mistake: str, case: str) -> Report:
    """What the kit finds of an actor with a mistake, in one case."""
    kit = Kit(
        "catch",
        6.0,
        f"env MISTAKE={mistake} {node.needed()} {MISTAKEN} --learner {{address}}",
        lambda line: print(line, file=sys.stderr),
    )
    return asyncio.run(kit.run("127.0.0.1:0", only=(cases.JOIN, case)))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in Kind]
)
def test_the_kit_names_a_mistake(kind: Kind) -> None:
    report = _report(kind, cases.MISTAKES)
    rows = {row.sentence: row for row in report.rows()}
    row = rows[cases.SENTENCE_OF[kind]]
    assert row.result == "FAILED", report.text()
    assert kind in row.detail


# Breaches of rules that only a conversation shows, and the case in which each is seen.
BREACHES = {
    "own_weights": cases.JOIN,
    "old_parameters": cases.PARAMETERS,
    "old_incarnation": cases.RESTART,
    "too_many_in_flight": cases.PRESSURE,
    "changed_retry": cases.BROKEN,
    "new_incarnation": cases.BROKEN,
    "no_claim": cases.BROKEN,
    "left_out": cases.BROKEN,
    "duplicate_again": cases.LOST,
    "not_again": cases.UNKNOWN,
    "refused_again": cases.REFUSALS,
    "no_backoff": cases.BACKOFF,
    "same_run": cases.NEW_RUN,
    "endless": cases.FINISH,
    "stubborn": cases.MAJOR,
    "reckless": cases.NEEDS,
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
    case = cases.STREAM if breach == "changed_retry" else BREACHES[breach]
    assert case in failed, report.text()


def test_every_case_can_fail() -> None:
    assert {*BREACHES.values(), cases.MISTAKES, cases.STREAM} == set(cases.SENTENCES)


@pytest.mark.slow
def test_the_learner_names_each_mistake_of_its_actor_and_no_honest_one(
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
