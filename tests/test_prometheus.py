"""Metrics as Prometheus reads them: over HTTP, from both services."""

import re
import time
import urllib.request
from contextlib import closing

import numpy as np
import prometheus_client as prometheus
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.metrics import ActorMetrics
from impala.runtime.exporter import Exporter
from learner.telemetry.prometheus import DISTRIBUTIONS, SCALARS, Prometheus
from protos.impala.v1 import learner_pb2 as pb


def scrape(address: str) -> dict[str, float]:
    """Every sample at an address: `name{label="value"}` -> value."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
        text = answer.read().decode()
    return {
        sample.name
        + "".join(
            f'{{{key}="{value}"}}' for key, value in sorted(sample.labels.items())
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_row_becomes_metrics() -> None:
    row = {
        "frames": 1200.0,
        "unrolls/dropped/learner_stop": 3,
        "unrolls/dropped/policy_lag": 4,
        "actor/active": 2,
        "actor/silent": 1,
        "actor/joins": 9,
        "actor/environment_faults/crashed": 5,
        "actor/environment_faults/hung": 6,
        "actor/wait_share": 0.25,
        "episode/ALE/Pong-v5/return_recent": -3.5,
        "episodes/ALE/Pong-v5": 7,
        "loss/total": 0.5,
        "worker/pod-x7k2p/return_recent": 2.5,
    }
    histograms = {"policy_lag": np.array([0, 3, 3]), "rpc_seconds/Join": np.array([0.02])}
    with closing(Prometheus("127.0.0.1:0")) as exporter:
        assert scrape(exporter.address)["impala_policy_lag_updates_count"] == 0
        for _ in range(2):
            exporter.write(row)
            exporter.write_histograms(histograms, row["frames"])
        samples = scrape(exporter.address)
    assert samples["impala_frames_total"] == 1200
    assert samples['impala_unrolls_dropped_total{reason="learner_stop"}'] == 3
    assert samples['impala_unrolls_dropped_total{reason="policy_lag"}'] == 4
    assert samples['impala_actors{state="active"}'] == 2
    assert samples['impala_actors{state="silent"}'] == 1
    assert samples["impala_joins_total"] == 9
    assert samples['impala_environment_faults_total{kind="crashed"}'] == 5
    assert samples['impala_environment_faults_total{kind="hung"}'] == 6
    assert samples["impala_actor_wait_ratio"] == 0.25
    assert samples['impala_episode_return{task="ALE/Pong-v5"}'] == -3.5
    assert samples['impala_episodes_total{task="ALE/Pong-v5"}'] == 7
    assert samples['impala_scalar{name="loss/total"}'] == 0.5
    assert not any(
        "pod-x7k2p" in name for name in samples
    )  # which would be a series for each actor
    assert samples['impala_policy_lag_updates_bucket{le="0.0"}'] == 2  # of both rows
    assert samples['impala_policy_lag_updates_bucket{le="4.0"}'] == 6
    assert samples['impala_rpc_seconds_bucket{le="0.01"}{method="Join"}'] == 0
    assert samples['impala_rpc_seconds_count{method="Join"}'] == 2


def test_an_evaluation_is_served_until_there_is_a_newer_one() -> None:
    """A row lasts for seconds: less than the time between scrapes."""
    name = 'impala_scalar{name="evaluation/Catch/return"}'
    with closing(Prometheus("127.0.0.1:0")) as exporter:
        for row in ({"evaluation/Catch/return": 1.0, "loss/total": 0.5}, {"frames": 9.0}):
            exporter.write(row)
        samples = scrape(exporter.address)
        assert samples[name] == 1.0
        assert 'impala_scalar{name="loss/total"}' not in samples
        exporter.write({"evaluation/Catch/return": 2.0})
        assert scrape(exporter.address)[name] == 2.0


def test_rejection_counters_are_0_before_the_first_message() -> None:
    """An alert sees the first ones only from there. Before the first row nothing is known."""
    name = "impala_messages_rejected_total"
    with closing(Prometheus("127.0.0.1:0")) as exporter:
        assert not [each for each in scrape(exporter.address) if each.startswith(name)]
        exporter.write({"frames": 0, "messages/rejected/range": 3})
        samples = scrape(exporter.address)
    found = {each: value for each, value in samples.items() if each.startswith(name)}
    assert len(found) == len(pb.Reason.keys()) - 1  # without REASON_UNSPECIFIED
    assert found.pop(f'{name}{{reason="range"}}') == 3
    assert {*found.values()} == {0} and f'{name}{{reason="not_finite"}}' in found


def test_a_learner_says_when_its_process_has_started() -> None:
    """An alert counts restarts by it, which no counter tells for sure."""
    with closing(Prometheus("127.0.0.1:0")) as exporter:
        started = scrape(exporter.address)["process_start_time_seconds"]
    assert time.time() - 86400.0 < started < time.time() + 1.0


def test_an_actors_metrics() -> None:
    metrics = ActorMetrics()
    metrics.unrolls.labels("accepted").inc(16)
    with closing(Exporter("127.0.0.1:0", metrics.registry)) as exporter:
        samples = scrape(exporter.address)
    assert samples['impala_actor_unrolls_total{status="accepted"}'] == 16
    assert samples["impala_actor_connected"] == 0
    assert any(name.startswith("impala_build_info") for name in samples)


def test_names_follow_the_conventions() -> None:
    """Each once, with one prefix. A scalar is a counter if its name ends in _total."""
    names = {each.name for each in SCALARS} | {each.name for each in DISTRIBUTIONS}
    assert len(names) == len(SCALARS) + len(DISTRIBUTIONS)
    for name in names:
        assert re.fullmatch(r"impala_[a-z_]+", name)
    with closing(Prometheus("127.0.0.1:0")) as exporter:
        exporter.write({"frames": 1.0, "progress": 0.5})
        kinds = {each.name: each.type for each in exporter.collect()}
    assert kinds["impala_frames"] == "counter"
    assert kinds["impala_progress_ratio"] == "gauge"


def test_an_address_that_cannot_be_bound_is_refused() -> None:
    with pytest.raises(OSError, match=re.escape("1.2.3.4:1")):
        Exporter("1.2.3.4:1", prometheus.CollectorRegistry())
