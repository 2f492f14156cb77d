"""Names of numbers in episodes' info: bounded in number and characters, and the rest is counted."""

import asyncio
import logging

import messages
import pytest

from impala.types import Episode
from learner.data.ingest import Ingest
from learner.fleet.info_names import InfoNames
from protos.impala.v1 import learner_pb2 as pb


def _kept(names: InfoNames, *wanted: str) -> list[str]:
    return list(names.keep(Episode(1.0, 9, 36, dict.fromkeys(wanted, 3.0))).info)


@pytest.mark.parametrize("name", ["lives", "x" * 64, "reward/forward", "0.5", "A_b-C"])
def test_good_names_are_kept(name: str) -> None:
    names = InfoNames(8)
    assert _kept(names, name) == [name]
    assert names.dropped == 0


@pytest.mark.parametrize(
    "name",
    ["", "x" * 65, "_x", "/x", "a b", "[/x]", "\x1b[2J", "a\nb", "a\n", "\u202ex", "härte", "漢"],
)
def test_names_that_no_terminal_or_label_should_see_are_left_out(name: str) -> None:
    names = InfoNames(8)
    assert _kept(names, name, "lives") == ["lives"]
    assert names.dropped == 1


def test_first_names_are_kept_and_later_ones_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = InfoNames(2)
    with caplog.at_level(logging.WARNING):
        assert _kept(names, "a", "b", "\x1b[2J") == ["a", "b"]
        for i in range(1000):
            assert _kept(names, "a", f"n{i}") == ["a"]
    assert _kept(names, "b") == ["b"]
    assert names.dropped == 1001
    (line,) = caplog.messages
    assert r"'\x1b[2J'" in line


def test_thousands_of_info_names_refuse_no_message() -> None:
    """The service takes eight names here. A message brings 150 episodes of 64 new names each."""
    ingest = Ingest(64)
    service = messages.service(ingest=ingest, unroll_spec=messages.spec(unroll_length=75))
    reply = service.join(messages.join_request())
    for sequence in (1, 2):
        floods = [
            pb.Episode(length=1, info={f"n{sequence}.{i}.{j}": 1.0 for j in range(64)})
            for i in range(150)
        ]
        message = messages.message(
            sequence,
            arrays=messages.unroll(unroll_spec=messages.spec(unroll_length=75)),
            fingerprint=reply.fingerprint,
            episodes=floods,
        )
        assert asyncio.run(service.submit(message)).status == pb.STATUS_ACCEPTED
    service.evaluators.report(
        pb.Evaluation(actor="e", learner_incarnation=messages.LEARNER, episodes=floods)
    )

    found = [ingest.get(0.0), ingest.get(0.0), service.evaluators.reports.get()]
    names = {
        name
        for each in found
        if each is not None
        for episode in each.episodes
        for name in episode.info
    }
    assert len(names) == 8
    assert service.get_status().dropped_info_names == 3 * 150 * 64 - 8
