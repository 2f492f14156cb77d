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
from learner.checks.mistakes import Kind

MISTAKEN = node.TESTS / "node_mistaken.mjs"
QUICK = {Kind.SHIFTED_ACTIONS, Kind.ROW_0}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in Kind]
)
def test_the_kit_names_a_mistake(kind: Kind) -> None:
    kit = Kit(
        "catch",
        30.0,
        f"env MISTAKE={kind} {node.needed()} {MISTAKEN} --learner {{address}}",
        lambda line: print(line, file=sys.stderr),
    )
    report = asyncio.run(kit.run("127.0.0.1:0", only=(cases.JOIN, cases.MISTAKES)))
    rows = {row.sentence: row for row in report.rows()}
    row = rows[cases.SENTENCE_OF[kind]]
    assert row.result == "FAILED", report.text()
    assert kind in row.detail


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
