"""The roster: speeds, silence and departures by a clock of the test's."""

from collections.abc import Sequence
from typing import Any

import pytest
from callers import Clock

from impala.types import EnvironmentFault
from learner.fleet.roster import Roster


def _sent(
    roster: Roster,
    name: str,
    frames: int = 400,
    version: int = 0,
    returns: Sequence[float] = (),
    pace: tuple[float, int] = (0.0, 0),
) -> None:
    told: dict[str, Any] = {"version": version, "returns": returns, "pace": pace}
    roster.sent(name, unrolls=2, frames=frames, size=10, **told)


def test_what_a_member_did_is_counted() -> None:
    clock = Clock()
    roster = Roster(clock)
    roster.joined("a", "actor")
    for version in range(5):
        clock.now += 2.0
        _sent(roster, "a", version=version)
    roster.refused("a", "range: too large", is_message=True)
    clock.now += 1.0
    (member,) = roster.members()
    assert (member.name, member.role, member.joins) == ("a", "actor", 1)
    assert (member.unrolls, member.frames, member.parameter_version) == (10, 2000, 4)
    assert (member.rejected, member.last_rejection) == (1, "range: too large")
    assert (member.silent_seconds, member.active) == (1.0, True)
    assert member.frames_per_second == pytest.approx(1600 / 8)  # the first came with the clock
    assert (roster.received_bytes, roster.joins) == (50, 1)


def test_speed_is_of_late_and_falls_to_nothing() -> None:
    clock = Clock()
    roster = Roster(clock)
    roster.joined("a", "actor")
    for _ in range(100):
        clock.now += 1.0
        _sent(roster, "a", frames=100)
    assert roster.members()[0].frames_per_second == pytest.approx(100.0, rel=0.05)
    clock.now += 15.0
    assert roster.members()[0].frames_per_second == pytest.approx(50.0, rel=0.1)
    clock.now += 31.0
    assert roster.members()[0].frames_per_second == 0.0


def test_members_go_silent_and_are_forgotten_but_totals_stay() -> None:
    clock = Clock()
    roster = Roster(clock)
    for name in ("a", "b"):
        roster.joined(name, "actor")
    roster.joined("e", "evaluator")
    clock.now += 61.0
    _sent(roster, "b")
    assert roster.actors() == (1, 1)
    clock.now += 3599.0
    _sent(roster, "b")
    roster.joined("b", "actor")
    assert [(member.name, member.joins) for member in roster.members()] == [("b", 2)]
    assert roster.joins == 4


def test_an_actor_has_left_when_its_last_stream_ends() -> None:
    roster = Roster(Clock())
    roster.joined("a", "actor")
    assert roster.actors() == (1, 0)  # it plays its first unroll
    for _ in range(2):  # the network broke, and the first stream has not noticed yet
        roster.began("a")
    assert not roster.ended("a")
    assert roster.actors() == (1, 0)
    assert roster.ended("a")
    assert roster.actors() == (0, 1)
    roster.ended("a")  # one too many changes nothing
    roster.joined("a", "actor")
    assert roster.actors() == (1, 0)
    for note in (roster.began, roster.ended):  # of somebody who was forgotten
        note("b")
    assert [member.name for member in roster.members()] == ["a"]


def test_an_actors_return_is_of_its_last_hundred_episodes() -> None:
    roster = Roster(Clock())
    for name in ("a", "b"):
        roster.joined(name, "actor")
    _sent(roster, "a", returns=[100.0])
    assert [member.recent_return for member in roster.members()] == [100.0, None]
    for _ in range(50):
        _sent(roster, "a", returns=[1.0, 3.0])
    assert [member.recent_return for member in roster.members()] == [2.0, None]


def test_the_time_of_a_step_is_a_mean_of_all_steps() -> None:
    roster = Roster(Clock())
    for name, paces in (("a", [(1.0, 10), (2.0, 30)]), ("unknown", [(0.0, 0)])):
        for pace in paces:
            _sent(roster, name, pace=pace)
    assert [member.step_seconds for member in roster.members()] == [3.0 / 40, None]


def test_environment_faults_are_counted() -> None:
    roster = Roster(Clock())
    roster.joined("a", "actor")
    roster.joined("b", "actor")
    roster.failed("a", [EnvironmentFault(3, "crashed", "KeyError: 'gear'")])
    roster.failed("a", [EnvironmentFault(3, "crashed", "x"), EnvironmentFault(0, "hung", "60 s")])
    roster.failed("b", [])
    a, b = roster.members()
    assert (a.environment_faults, a.last_fault) == (3, "environment 0 hung: 60 s")
    assert (b.environment_faults, b.last_fault) == (0, "")
    assert roster.faults == {"crashed": 2, "hung": 1}


def test_who_keeps_a_stream_open_is_no_silent_actor() -> None:
    """However long its next unroll takes, or training waits."""
    clock = Clock()
    roster = Roster(clock)
    roster.joined("a", "actor")
    roster.began("a")
    clock.now += 3000.0
    assert roster.actors() == (1, 0)
    clock.now += 1000.0  # it hangs, perhaps
    assert roster.actors() == (0, 1)
    roster.ended("a")
    assert roster.members() == []
