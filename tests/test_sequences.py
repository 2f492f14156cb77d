"""Sequences of tasks: what differs between their arms, and areas and claims by pencil and paper."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import scipy.stats

from impala.config import values
from impala.config.schema import Config, EnvironmentConfig, ReplayConfig, TasksConfig
from impala.schedule import tasks
from ledger import continual, running, sequences, statistics
from ledger.experiments import EXPERIMENTS
from ledger.records import Evaluation, Record

SEQUENCES = [name for name, x in EXPERIMENTS.items() if "no-cloning-20th" in x.arms]
assert SEQUENCES

# Tasks a and b are trained in turn for 100 frames each, twice, and evaluated every 100.
CONFIG = Config(
    environment=EnvironmentConfig(id="Catch"),
    tasks=TasksConfig(environments=("a", "b"), frames=(100, 100), cycles=2),
)
SEEDS = range(101, 107)
ALONE_A, ALONE_B = [0.0, 4.0, 4.0, 4.0, 4.0], [2.0, 6.0, 6.0, 6.0, 6.0]


def record(arm: str, seed: int, a: Sequence[float], b: Sequence[float]) -> Record:
    """A run whose evaluations are these returns, one after every block."""
    lines = [
        {"task": task, "frames": 100 * i, "returns": [value], "learner": 1, "version": i, "time": 0}
        for task, returns in (("a", a), ("b", b))
        for i, value in enumerate(returns)
    ]
    played = Evaluation(
        task="a", command="", greedy=False, seed=0, returns=[1], lengths=[1], info={}
    )
    return Record(
        experiment="clear-catch",
        arm=arm,
        seed=seed,
        command="",
        commit="0123456789",
        date="2026-11-23",
        machine="a machine",
        settings=values.to_dict(CONFIG),
        frames=400,
        seconds=1.0,
        other_cores=0.0,
        sessions=1,
        training={},
        evaluations=lines,
        final=[played],
    )


@pytest.fixture
def arms() -> Mapping[str, Sequence[Record]]:
    """Simultaneous is as good as alone, sequential forgets, CLEAR forgets a little."""
    returns = {
        "separate-0": (ALONE_A, [2.0] * 5),
        "separate-1": ([0.0] * 5, ALONE_B),
        "simultaneous": (ALONE_A, ALONE_B),
        "simultaneous-equal-compute": (ALONE_A, ALONE_B),
        "sequential": ([0.0, 4.0, 0.0, 4.0, 0.0], [2.0] * 5),
        "sequential-equal-compute": ([0.0, 4.0, 0.0, 4.0, 0.0], [2.0] * 5),
        "clear": ([0.0, 4.0, 3.0, 4.0, 3.0], ALONE_B),
    }
    return {
        arm: [record(arm, seed, *of_tasks) for seed in SEEDS] for arm, of_tasks in returns.items()
    }


def test_arms_score_between_nothing_learned_and_all(
    arms: Mapping[str, Sequence[Record]],
) -> None:
    scores = continual.areas(arms)
    assert list(scores) == [arm for arm in arms if not arm.startswith("separate")]
    assert scores["simultaneous"] == pytest.approx(dict.fromkeys(SEEDS, 1.0))
    # Task a's area is 2 of 3.5, task b's is none.
    assert scores["sequential"] == pytest.approx(dict.fromkeys(SEEDS, 2 / 3.5 / 2))
    # Task a's is 12.5 / 4 of 3.5, task b's all.
    assert scores["clear"] == pytest.approx(dict.fromkeys(SEEDS, (12.5 / 14 + 1) / 2))


def test_there_are_no_areas_without_the_tasks_alone(arms: Mapping[str, Sequence[Record]]) -> None:
    assert continual.areas({}) == {}
    without = {arm: of_seeds for arm, of_seeds in arms.items() if arm != "separate-1"}
    assert continual.areas(without) == {}


def test_a_claim_is_judged_by_its_interval(
    arms: Mapping[str, Sequence[Record]],
) -> None:
    forgotten, closed, _, small, *_ = continual.CLAIMS
    scores = continual.areas(arms)
    found = continual.claim(forgotten, scores)
    assert found is not None
    assert found.mean == pytest.approx(2 / 3.5 / 2)
    assert forgotten.verdict(found, 0.04) == "holds"
    assert forgotten.verdict(found, 0.06) == "open"
    assert forgotten.verdict(found._replace(mean=1.1), 0.04) == "does not hold"
    found = continual.claim(closed, scores)
    assert found is not None
    clear, sequential = (12.5 / 14 + 1) / 2, 2 / 3.5 / 2
    assert found.mean == pytest.approx((clear - sequential) / (1 - sequential))
    assert closed.verdict(found, 0.04) == "holds"
    found = continual.claim(closed, continual.areas({**arms, "clear": arms["clear"][1:]}))
    assert found is not None
    assert found.seeds == 5
    assert closed.verdict(found, 0.04) == "open: fewer than 6 seeds"
    assert continual.claim(small, scores) is None  # nobody has run it
    verdicts = [verdict for *_, verdict in continual.judged(scores)]
    assert verdicts == [*["holds"] * 3, *["not measured"] * 4]
    # An arm that it is not about changes nothing.
    few = continual.areas({**arms, "clear": arms["clear"][1:]})
    assert continual.claim(forgotten, few) == continual.claim(forgotten, scores)


def test_arms_that_are_equal_have_a_ratio_of_1() -> None:
    """Whatever seed is beside which: a mean of ratios would be 1.25."""
    claim = continual.CLAIMS[0]
    scores = {"sequential": {1: 1.0, 2: 2.0}, "simultaneous": {1: 2.0, 2: 1.0}}
    found = continual.claim(claim, scores)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 0.5, 2.0))


def test_p_is_that_of_welch_s_test() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.8, 0.1, 10), rng.normal(0.8, 0.3, 7)
    scores = {"clear-20th": dict(enumerate(a)), "clear": dict(enumerate(b))}
    small = continual.CLAIMS[3]
    expected = scipy.stats.ttest_ind(a, small.limit * b, equal_var=False).pvalue
    assert small.p(scores) == pytest.approx(expected)
    assert statistics.welch({"a": [1.0, 1.0], "b": [2.0, 2.0]}, {"a": 1.0, "b": -0.5}) == 1.0
    assert statistics.welch({"a": [1.0]}, {"a": 1.0}) == 1.0


def test_where_a_claim_of_three_arms_is_at_its_limit_one_p_in_twenty_is_below_0_05() -> None:
    closed, rng = continual.CLAIMS[1], np.random.default_rng(0)
    means = {
        "clear": (0.85, 0.05),
        "sequential-equal-compute": (0.64, 0.07),
        "simultaneous-equal-compute": (1.06, 0.03),
    }
    p = [
        closed.p({arm: dict(enumerate(rng.normal(*x, 10))) for arm, x in means.items()})
        for _ in range(4000)
    ]
    assert 0.04 < np.mean(np.array(p) < 0.05) < 0.06


def test_several_p_values_are_corrected() -> None:
    """Holm 1979: the smallest times 4, the next times 3, never smaller than one before it."""
    assert statistics.holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert statistics.holm([0.9, 0.5]) == [1.0, 1.0]


def test_effects_are_forgetting_and_transfer(
    arms: Mapping[str, Sequence[Record]],
) -> None:
    found = {(x.block.start, x.task): x[2:] for x in continual.effects(arms["clear"])}
    assert found == {
        (0, 1): (None, pytest.approx(4 / 6)),
        (100, 0): (pytest.approx(1 / 4), None),
        (200, 1): (0.0, None),
        (300, 0): (pytest.approx(1 / 4), None),
    }


def _without_what_arms_vary(config: Config) -> Config:
    return dataclasses.replace(
        config,
        mix=dataclasses.replace(config.mix, replayed=0, learn_from_fresh=True),
        tasks=dataclasses.replace(config.tasks, frames=(), order="sequential", anneal_anew=False),
        replay=ReplayConfig(),
        impala=dataclasses.replace(config.impala, policy_cloning_cost=0.0, value_cloning_cost=0.0),
    )


@pytest.mark.parametrize("name", SEQUENCES)
def test_arms_differ_in_what_they_say_and_nothing_else(name: str) -> None:
    settings = {arm: running.settings(words) for arm, words in EXPERIMENTS[name].arms.items()}
    clear = settings["clear"]
    fresh = clear.mix.fresh
    history = tasks.total_frames(clear)
    assert (clear.mix.replayed, clear.replay.rule, clear.mix.learn_from_fresh) == (
        *(fresh, "reservoir", True),
    )
    assert clear.replay.capacity_frames == history // 2
    assert (clear.impala.policy_cloning_cost, clear.impala.value_cloning_cost) == (0.01, 0.005)
    for arm, config in settings.items():
        assert config.mix.fresh == fresh, arm
        assert config.tasks.environments == clear.tasks.environments
        assert config.tasks.cycles == clear.tasks.cycles
        assert _without_what_arms_vary(config) == _without_what_arms_vary(clear), arm
    for task in range(len(clear.tasks.environments)):
        alone = settings[f"{sequences.SEPARATE}{task}"]
        frames = [
            clear.tasks.frames[task] if i == task else 0 for i in range(len(clear.tasks.frames))
        ]
        assert list(alone.tasks.frames) == frames
    without = settings["no-cloning-20th"]
    assert without.replay == settings["clear-20th"].replay
    assert without.impala.policy_cloning_cost == without.impala.value_cloning_cost == 0
    assert settings["fifo-20th"].replay == dataclasses.replace(without.replay, rule="fifo")
    assert without.replay.capacity_frames == history // 20
    for equal in (settings["sequential-equal-compute"], settings["simultaneous-equal-compute"]):
        assert equal.mix.batch_size == clear.mix.batch_size
        assert equal.replay.capacity_frames < history / 200
    only = settings["replay-only"].mix
    assert (only.batch_size, only.replayed) == (clear.mix.batch_size, clear.mix.batch_size)
