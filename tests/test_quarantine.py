"""Quarantine: who is refused for how long, by a clock of the test's."""

import logging
from typing import Any

import pytest
from callers import Clock

from impala.config.schema import QuarantineConfig
from learner.fleet import quarantine as quarantine_module
from learner.fleet.quarantine import Quarantine, Standing


def _quarantine(**settings: Any) -> tuple[Quarantine, Clock]:
    clock = Clock()
    return Quarantine(QuarantineConfig(**settings), clock), clock


def _blame(quarantine: Quarantine, actor: str, times: int = 3) -> None:
    for i in range(times):
        quarantine.blame(actor, f"range: {i} is too large")


def test_the_third_blame_is_a_quarantine_that_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quarantine, clock = _quarantine()
    assert quarantine.standing("a") == Standing(0, 0.0, "")
    _blame(quarantine, "a", times=2)
    assert quarantine.standing("a").seconds_left == 0.0
    with caplog.at_level(logging.WARNING):
        _blame(quarantine, "a", times=1)
        _blame(quarantine, "a", times=5)  # what it had sent before: counted, and no news
    assert quarantine.standing("a") == Standing(8, 60.0, "range: 4 is too large")
    assert (quarantine.standing("b").seconds_left, quarantine.count()) == (0.0, 1)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "a is to blame for range: 0 is too large. It is quarantined for 60 s after 3 blames in 0 s"
    )
    assert "--security.revoked-file" in record.getMessage()
    clock.now += 59.0
    assert quarantine.standing("a").seconds_left == 1.0
    clock.now += 1.0
    assert (quarantine.standing("a").seconds_left, quarantine.count()) == (0.0, 0)
    assert quarantine.standing("a").blamed == 8


def test_quarantines_double_until_an_hour_of_good_conduct() -> None:
    quarantine, clock = _quarantine()
    lengths = []
    for _ in range(9):
        _blame(quarantine, "a")
        lengths.append(quarantine.standing("a").seconds_left)
        clock.now += lengths[-1]
    assert lengths == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    clock.now += 3600.0
    _blame(quarantine, "a")
    assert (
        quarantine.standing("a").seconds_left == 3600.0
    )  # not more than an hour: not good for long enough
    clock.now += 3600.0 + 3601.0
    _blame(quarantine, "a")
    assert quarantine.standing("a").seconds_left == 60.0


def test_it_can_be_turned_off_and_goes_on_counting() -> None:
    quarantine, _ = _quarantine(blames=0)
    _blame(quarantine, "a", times=1000)
    assert quarantine.standing("a") == Standing(1000, 0.0, "range: 999 is too large")


def test_among_the_runs_own_actors_it_says_why_the_run_is_to_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quarantine = Quarantine(QuarantineConfig(), Clock(), own_actors=True)
    _blame(quarantine, "a", times=2)
    assert quarantine.ends_run == ""
    _blame(quarantine, "a", times=1)
    assert quarantine.ends_run == (
        "a is to blame for range: 0 is too large. It was blamed 3 times in 0 s."
    )
    assert not caplog.records


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine_module, "_MOST", 3)
    quarantine, _ = _quarantine()
    for name in ("a", "b", "c"):
        _blame(quarantine, name, times=1)
    quarantine.blame("a", "x" * 10_000)
    _blame(quarantine, "d", times=1)
    blamed = {name: quarantine.standing(name).blamed for name in "abcd"}
    assert blamed == {"a": 2, "b": 0, "c": 1, "d": 1}  # b was blamed the longest ago
    assert len(quarantine.standing("a").why) == 500
