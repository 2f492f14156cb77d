"""The scalars of an update: the terms of the loss, annealed numbers, and norms."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from services import check_losses
from test_guard import batch_for, make

from impala.config.schema import AgentConfig, ImpalaConfig
from impala.logdir.checkpoint import Counters
from impala.types import Batch, Episode
from learner.data.ingest import Arrival
from learner.data.mix import Prepared, Provenance
from learner.telemetry.reporter import Reporter
from learner.telemetry.telemetry import Interval, Telemetry
from learner.update import training
from learner.update.learner import Learner, Update
from learner.update.peers import Peers
from learner.update.training import Iteration, Training

ALGORITHMS = ("impala", "actor_critic", "impact", "critic", "q_learning", "sac")
_TRUSTING = ImpalaConfig(trust_region=0.5, policy_cloning_cost=0.3, value_cloning_cost=0.2)


def _update(learner: Learner, seed: int = 0, weights: np.ndarray | None = None) -> Update:
    batch = batch_for(learner, seed)
    if learner.phase.algorithm == "impala":
        batch = batch._replace(is_replay=np.arange(len(batch.is_replay)) >= 4)
    update = learner.update(batch, weights)
    assert isinstance(update, Update)
    return update


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [*((name, {}) for name in ALGORITHMS), ("impala", {"impala": _TRUSTING})],
)
def test_the_terms_of_a_loss_add_up_to_its_total(algorithm: str, settings: dict[str, Any]) -> None:
    """As means of a row too, and where unrolls have no weight. Values have a histogram."""
    learner, telemetry = make(algorithm, **settings), Telemetry()
    for seed in range(3):
        weights = np.array([1, 0, 1, 1, 0, 1], np.float32) if seed == 1 else None
        update = _update(learner, seed, weights)
        for name, value in update.metrics.items():
            telemetry.interval.mean(name, value)
        assert check_losses(update.metrics)
    names = {"critic": "critic/baseline", "q_learning": "q/taken", "sac": "q/taken"}
    values = np.asarray(update.histograms[names.get(algorithm, "baseline")])
    assert values.shape == (4, 6) and np.isfinite(values).all()
    row, _ = telemetry.end(Counters(updates=3), {}).row()
    assert check_losses(row)


def test_a_term_is_cost_times_steps_times_mean() -> None:
    metrics = _update(make("impala")).metrics
    steps = 4 * 6  # T x B, of which a third is replayed
    for name, count in (("baseline", steps), ("entropy", steps), ("value_cloning", steps / 3)):
        expected = metrics[f"{name}_cost"] * count * metrics[f"loss_mean/{name}"]
        assert metrics[f"loss/{name}"] == pytest.approx(expected, rel=1e-4)
    assert metrics["loss_mean/entropy"] == pytest.approx(-metrics["policy/entropy"])


def test_annealed_numbers_are_scalars() -> None:
    config = ImpalaConfig(entropy_cost=0.4, entropy_anneal=0.5, entropy_cost_end=0.2)
    learner = make("impala", total_frames=1000, impala=config)
    learner.count(unrolls=1, frames=250, steps=250, seconds=1.0)
    metrics = _update(learner).metrics
    assert metrics["entropy_cost"] == pytest.approx(0.3)
    assert metrics["learning_rate"] == pytest.approx(0.75 * 0.01)


@pytest.mark.parametrize("algorithm", ["q_learning", "critic"])
def test_epsilon_is_annealed_and_its_mean_is_a_scalar(algorithm: str) -> None:
    """Over half of its annealing: finals 0.1, 0.01 and 0.5 with weights 0.4, 0.3 and 0.3."""
    agent = AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy")
    learner = make(algorithm, agent=agent, total_frames=1000)
    learner.count(unrolls=1, frames=50, steps=50, seconds=1.0)
    _update(learner)  # the algorithm moves epsilon after an update
    name = "critic/policy/epsilon" if algorithm == "critic" else "policy/epsilon"
    assert _update(learner).metrics[name] == pytest.approx((1.0 + 0.193) / 2)


class _NoGauges:
    def read(self, counters: Counters) -> dict[str, float]:
        return {}


def _arrival(batch: Batch, episodes: Sequence[Episode]) -> Arrival:
    return Arrival(
        *(batch.unroll, "actor-7", 5, 1, 0, 0, list(episodes)),
        elapsed_seconds=1.0,
        waited_seconds=0.0,
        step_info={"speed": np.array([1.0, 5.0], np.float32)},
    )


def test_a_row_has_what_is_read_once_also_if_all_is_replayed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given a run that learns from replay alone, and a message with two episodes ...
    learner, rows = make("q_learning"), list[Interval]()
    batch = batch_for(learner)._replace(is_replay=np.ones(6, np.bool_))
    fresh = batch_for(learner, seed=1)
    episodes = [Episode(2.0, 7, 28, {"lives": 3.0}), Episode(4.0, 9, 36, {"lives": 0.0})]
    sink = SimpleNamespace(put=lambda interval, is_last: rows.append(interval))
    reporter = Reporter(
        *(Telemetry(), _NoGauges(), sink, ["Catch"], 1e9),  # type: ignore[arg-type]
        logs_episodes=True,
    )
    # ... when a row is made of an update ...
    update = learner.update(batch)
    assert isinstance(update, Update)
    prepared = Prepared(batch, [], [], 6, 24, 24, [_arrival(fresh, episodes)], True)
    with caplog.at_level(logging.INFO):
        reporter.take(Iteration(learner, prepared, update, 0.0, 0.1, False, True, False))
    reporter.end_row(learner.counters)
    # ... then it has the norm, the actions of the message, and a line for each episode was logged.
    row, histograms = rows[0].row()
    assert row["parameter_norm"] == learner.norms()["parameter_norm"]
    actions = fresh.unroll.output.action[1:].ravel()
    assert sorted(histograms["action"]) == sorted(actions)
    assert (row["episode/Catch/return"], row["episode/Catch/return_deviation"]) == (3.0, 1.0)
    assert (row["step/Catch/info/speed/mean"], row["step/Catch/info/speed/max"]) == (3.0, 5.0)
    assert histograms["step/Catch/info/speed"].tolist() == [1.0, 5.0]
    assert caplog.messages == [
        "Episode of Catch by actor-7: episode_return 2, length 7, frames 28, info/lives 3.",
        "Episode of Catch by actor-7: episode_return 4, length 9, frames 36, info/lives 0.",
    ]


def test_what_was_dropped_still_tells_how_it_was_played() -> None:
    """Given a message of which no unroll is left, because they were all too old."""
    learner, rows = make("impala"), list[Interval]()
    arrival = _arrival(batch_for(learner), [Episode(2.0, 7, 28, {})])
    arrival = arrival._replace(unroll=None, pace=(0.5, 10))  # type: ignore[arg-type]
    parts = [Provenance("actor-7", 5, 1, 6, "policy_lag")]
    prepared = Prepared(None, [], parts, 0, 0, 0, [arrival], False)
    sink = SimpleNamespace(put=lambda interval, is_last: rows.append(interval))
    reporter = Reporter(Telemetry(), _NoGauges(), sink, ["Catch"], 1e9)  # type: ignore[arg-type]
    reporter.take(Iteration(learner, prepared, None, 0.0, 0.1, False, True, False))
    reporter.end_row(learner.counters)
    row, _ = rows[0].row()
    assert row["episode/Catch/return"] == 2.0


class _TwoPeers(Peers):
    def meet(self, own: Any) -> list[Any]:
        return [own, own]


def test_a_peer_waits_once_for_each_part_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given parts that take longer than an iteration."""
    learner, rows = make("impala"), list[Interval]()
    batch, now = batch_for(learner), [0.0]
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waits = iter([0.5, 0.5, 0.25, 0.5, 0.125])
    part = Prepared(batch, [], [], 6, 24, 24, [], True)
    parts = iter([None, None, part, None, part])

    def get(timeout: float) -> Prepared | None:
        now[0] += next(waits)
        return next(parts)

    phases = SimpleNamespace(are_over=lambda counters: counters.updates == 2)
    guard = SimpleNamespace(
        judge_outputs=lambda learner: None,
        learn=lambda learner, prepared: (prepared, learner.update(prepared.batch)),
        in_doubt=False,
    )
    mix = SimpleNamespace(get=get)
    sink = SimpleNamespace(put=lambda interval, is_last: rows.append(interval))
    reporter = Reporter(*(Telemetry(), _NoGauges(), sink, ["Catch"], 1e9))  # type: ignore[arg-type]
    together = Training(*(phases, learner, mix, guard, _TwoPeers()))  # type: ignore[arg-type]
    for iteration in together.iterations(lambda: False):
        reporter.take(iteration)
    reporter.end_row(learner.counters)
    row, histograms = rows[0].row()
    assert histograms["peer/0/waited_seconds"].tolist() == [1.25, 0.625]
    assert row["peer/1/waited_seconds/max"] == 1.25
