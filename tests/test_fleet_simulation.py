"""The simulation of fleets repeats itself, has limits, and agrees with what was measured."""

import dataclasses
import math

import pytest

from benchmarks.fleet_simulation import Scenario, as_measured, simulate

SMALL = Scenario(actors=20, seconds=20.0, warm_up=5.0)


def test_equal_scenarios_have_equal_reports() -> None:
    assert simulate(SMALL)[:10] == simulate(SMALL)[:10]
    assert simulate(SMALL)[:9] != simulate(dataclasses.replace(SMALL, seed=2))[:9]


def test_actors_that_a_learner_keeps_up_with_play_and_pull_once_a_round() -> None:
    report = simulate(SMALL)
    assert report.unrolls_per_second == pytest.approx(20 * 32 / 0.37, rel=0.05)
    assert report.pulls_per_second == pytest.approx(20 / 0.37, rel=0.05)
    assert report.receipt_seconds < 0.1 and report.failed_joins == 0
    shared = simulate(dataclasses.replace(SMALL, per_host=20))
    assert shared.unrolls_per_second == pytest.approx(report.unrolls_per_second, rel=0.02)
    assert shared.pulls_per_second < report.pulls_per_second / 3
    assert shared.age_updates < report.age_updates


def test_no_more_is_learned_than_the_cores_allow_and_the_rest_waits() -> None:
    report = simulate(dataclasses.replace(SMALL, cores=0.5, unroll_cpu=1e-3))
    assert 250.0 < report.unrolls_per_second <= 500.0
    in_progress = report.receipt_seconds * report.unrolls_per_second
    assert in_progress == pytest.approx(20 * 2 * 32, rel=0.15)  # Little's law


def test_after_a_restart_all_join_within_the_longest_back_off() -> None:
    report = simulate(dataclasses.replace(SMALL, seconds=60.0, down=(10.0, 30.0)))
    assert 0.0 < report.rejoined_seconds <= 10.5
    assert math.isnan(simulate(SMALL).rejoined_seconds)
    away = simulate(dataclasses.replace(SMALL, down=(10.0, 100.0)))
    assert math.isnan(away.rejoined_seconds)


def test_it_agrees_with_the_fleets_that_were_measured() -> None:
    """docs/results/fleet.md: unrolls/s and seconds to a receipt; the run of 10 gave the costs."""
    measured = {1: (354, 0.003), 10: (389, 0.086), 100: (325, 1.21), 500: (262, 7.686)}
    for actors, report in as_measured().items():
        unrolls, seconds = measured[actors]
        assert report.unrolls_per_second == pytest.approx(unrolls, rel=0.2), actors
        if actors >= 10:
            assert report.receipt_seconds == pytest.approx(seconds, rel=0.25), actors
