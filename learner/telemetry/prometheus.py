"""Rows of telemetry as Prometheus metrics.

Only aggregates: no label has a value per actor, so the number of series is bounded.
"""

import functools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from impala.logdir.rows import Row
from impala.runtime.exporter import SECONDS, Exporter
from learner.service.service import REASONS
from learner.telemetry.sinks import Histograms, Sink


class Scalar(NamedTuple):
    """A metric made of scalars of a row."""

    name: str
    kind: Literal["counter", "gauge"]
    row: str  # the scalar's name; {LABEL} stands for the value of a label
    documentation: str


class Distribution(NamedTuple):
    """A metric made of all numbers behind a row's quantiles."""

    name: str
    row: str
    buckets: tuple[float, ...]
    documentation: str


SCALARS = (
    Scalar("impala_frames_total", "counter", "frames", "Environment frames learned from."),
    Scalar("impala_steps_total", "counter", "steps", "Agent decisions learned from."),
    Scalar("impala_updates_total", "counter", "updates", "Updates; equals the newest version."),
    Scalar("impala_training_seconds_total", "counter", "seconds", "Total time of training."),
    Scalar("impala_progress_ratio", "gauge", "progress", "Share of the run that is done, 0 to 1."),
    Scalar(
        "impala_learner_wait_seconds_total",
        "counter",
        "learner/wait_seconds",
        "Time that the learner waited for data: more actors would help.",
    ),
    Scalar(
        "impala_actor_wait_ratio",
        "gauge",
        "actor/wait_share",
        "Share of time that actors waited for the learner, their mean: fewer would suffice.",
    ),
    Scalar(
        "impala_unrolls_received_total", "counter", "unrolls/received", "Unrolls taken from actors."
    ),
    Scalar("impala_unrolls_learned_total", "counter", "unrolls/learned", "Unrolls learned from."),
    Scalar(
        "impala_unrolls_dropped_total",
        "counter",
        "unrolls/dropped/{reason}",
        "Unrolls that were not learned from while fresh.",
    ),
    Scalar(
        "impala_messages_rejected_total",
        "counter",
        "messages/rejected/{reason}",
        "Messages that were rejected as invalid.",
    ),
    Scalar(
        "impala_mistakes_total",
        "counter",
        "messages/mistakes/{kind}",
        "Mistakes in messages: valid numbers that mean something else than they should.",
    ),
    Scalar(
        "impala_messages_duplicate_total",
        "counter",
        "messages/duplicates",
        "Messages that had been accepted before.",
    ),
    Scalar(
        "impala_info_names_dropped_total",
        "counter",
        "info_names/dropped",
        "Numbers of episodes' info that were not recorded: invalid or too many names.",
    ),
    Scalar(
        "impala_refused_total",
        "counter",
        "refused/{reason}",
        "Calls that were refused.",
    ),
    Scalar(
        "impala_telemetry_rows_dropped_total",
        "counter",
        "telemetry/dropped",
        "Rows that were merged because they could not be written fast enough.",
    ),
    Scalar(
        "impala_telemetry_sinks_dropped_total",
        "counter",
        "telemetry/sinks_dropped",
        "Custom sinks that raised an error, and get no more rows.",
    ),
    Scalar(
        "impala_evaluations_dropped_total",
        "counter",
        "evaluations/dropped",
        "Evaluations of no snapshot that waited for them, and so not filed.",
    ),
    Scalar(
        "impala_skipped_updates_total",
        "counter",
        "guard/skipped_updates",
        "Batches that were not finite and were skipped, since the learner started.",
    ),
    Scalar(
        "impala_culprits_total",
        "counter",
        "guard/culprits",
        "Unrolls that would have made an update not finite, and were left out of it.",
    ),
    Scalar(
        "impala_rollbacks_total",
        "counter",
        "guard/rollbacks",
        "Rollbacks of the variables to a checkpoint, since the learner started.",
    ),
    Scalar("impala_received_bytes_total", "counter", "ingest/bytes", "Bytes of accepted unrolls."),
    Scalar("impala_joins_total", "counter", "actor/joins", "Joins: restarts and lost connections."),
    Scalar(
        "impala_environment_faults_total",
        "counter",
        "actor/environment_faults/{kind}",
        "Environments of actors that crashed or hung, and were started again.",
    ),
    Scalar(
        "impala_task_unrolls_learned_total",
        "counter",
        "task/{task}/unrolls/learned",
        "Unrolls of a task that were learned from, since the learner started.",
    ),
    Scalar(
        "impala_task_unrolls_dropped_total",
        "counter",
        "task/{task}/unrolls/dropped/{reason}",
        "Unrolls of a task that were not learned from while fresh, since the learner started.",
    ),
    Scalar(
        "impala_task_policy_lag_updates",
        "gauge",
        "task/{task}/policy_lag/{fate}",
        "Mean age of fresh unrolls of a task, learned from or dropped, in updates.",
    ),
    Scalar(
        "impala_task_episode_length_steps",
        "gauge",
        "task/{task}/episode_length/{fate}",
        "Mean length of episodes that ended in unrolls learned from, or dropped, in agent steps.",
    ),
    Scalar(
        "impala_task_wait_seconds_total",
        "counter",
        "task/{task}/wait_seconds",
        "Time that actors who played a task waited for the learner, since it started.",
    ),
    Scalar(
        "impala_task_reward_per_step",
        "gauge",
        "task/{task}/reward_per_step",
        "Mean raw reward of an agent step of a task.",
    ),
    Scalar("impala_permitted_unrolls", "gauge", "pacing/making", "Unrolls that are being made."),
    Scalar("impala_queue_unrolls", "gauge", "ingest/depth", "Unrolls queued."),
    Scalar("impala_queue_capacity_unrolls", "gauge", "ingest/capacity", "Capacity of the queue."),
    Scalar(
        "impala_actors_quarantined",
        "gauge",
        "actor/quarantined",
        "Actors in quarantine: refused for a while after invalid contents.",
    ),
    Scalar(
        "impala_actors", "gauge", "actor/{state}", "Actors that are active, and that are silent."
    ),
    Scalar("impala_replay_unrolls", "gauge", "replay/unrolls", "Unrolls in replay."),
    Scalar("impala_replay_frames", "gauge", "replay/frames", "Environment frames in replay."),
    Scalar("impala_replay_bytes", "gauge", "replay/bytes", "Compressed bytes in replay."),
    Scalar("impala_episodes_total", "counter", "episodes/{task}", "Episodes that actors ended."),
    Scalar(
        "impala_episode_return",
        "gauge",
        "episode/{task}/return_recent",
        "Mean raw return of the last 100 episodes.",
    ),
    Scalar(
        "impala_checkpoint_age_seconds",
        "gauge",
        "checkpoint/age_seconds",
        "Time since the first update that is in no checkpoint; 0: there is none.",
    ),
    Scalar(
        "impala_checkpoint_store_behind_seconds",
        "gauge",
        "checkpoint/store_behind_seconds",
        "Time that something has waited to be copied to the store; 0: everything is there.",
    ),
    Scalar(
        "impala_checkpoint_store_failures_total",
        "counter",
        "checkpoint/store_failures",
        "Attempts to copy to the store that have failed.",
    ),
    # Everything else that a row has: losses, gradient norm, evaluations, ...
    Scalar("impala_scalar", "gauge", "{name}", "Any other scalar of a row of telemetry."),
)

# What a row does not name is 0: of a counter that begins above 0, no increase can be seen.
_ZEROS: Row = {f"messages/rejected/{reason}": 0 for reason in REASONS.values()}
_OF_ONE_ACTOR = "worker/"  # begins the names of scalars that are left out

_UPDATES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

DISTRIBUTIONS = (
    Distribution(
        "impala_policy_lag_updates", "policy_lag", _UPDATES, "Age of fresh unrolls, in updates."
    ),
    Distribution(
        "impala_replay_policy_lag_updates",
        "replay/policy_lag",
        (*_UPDATES, 1e4, 1e5),
        "Age of replayed unrolls, in updates.",
    ),
    Distribution("impala_update_seconds", "learner/update_seconds", SECONDS, "Time of an update."),
    Distribution(
        "impala_queue_wait_seconds",
        "ingest/seconds",
        SECONDS,
        "Time from a message's arrival until it was learned from.",
    ),
    Distribution(
        "impala_rpc_seconds",
        "rpc_seconds/{method}",
        SECONDS,
        "Time to answer a call; of StreamUnrolls, a message.",
    ),
)


class Prometheus(Sink, Collector):
    """Serves the newest row over HTTP, in Prometheus' text format."""

    def __init__(self, listen: str) -> None:
        """Binds the address.

        Args:
          listen: HOST:PORT; port 0 is any free one.

        Raises:
          OSError: it cannot be bound.
        """
        self._row: Row = {}
        registry = prometheus.CollectorRegistry()
        registry.register(self)
        prometheus.ProcessCollector(registry=registry)
        self._histograms = {
            each.name: prometheus.Histogram(
                *(each.name, each.documentation, _labels(each.row)),
                buckets=each.buckets,
                registry=registry,
            )
            for each in DISTRIBUTIONS
        }
        self._exporter = Exporter(listen, registry)
        self.address = self._exporter.address

    def write(self, row: Row) -> None:
        """Serves this row from now on."""
        self._row = _ZEROS | row

    def write_histograms(self, histograms: Histograms, frames: float) -> None:
        """Adds numbers to the served distributions."""
        del frames
        for each in DISTRIBUTIONS:
            for name, values in histograms.items():
                if (labels := _match(each.row, name)) is not None:
                    metric = self._histograms[each.name]
                    metric = metric.labels(**labels) if labels else metric
                    for value in values:
                        metric.observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the newest row, for the Prometheus client library."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, value in self._row.items():
            if name.startswith(_OF_ONE_ACTOR):
                continue
            scalar, labels = next(
                (each, labels) for each in SCALARS if (labels := _match(each.row, name)) is not None
            )
            if scalar.name not in families:
                family = CounterMetricFamily if scalar.kind == "counter" else GaugeMetricFamily
                families[scalar.name] = family(
                    scalar.name, scalar.documentation, labels=_labels(scalar.row)
                )
            families[scalar.name].add_metric(list(labels.values()), value)
        yield from families.values()

    def close(self) -> None:
        """Stops the server."""
        self._exporter.close()


def _labels(row: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", row)


def _match(row: str, name: str) -> dict[str, str] | None:
    """Returns the values of the labels in a name, or None if it does not match."""
    found = _pattern(row).fullmatch(name)
    return None if found is None else found.groupdict()


@functools.cache
def _pattern(row: str) -> re.Pattern[str]:
    # The name of an environment's info must not be taken for one of ours.
    any_text = r".+" if row == "{name}" else r"(?:(?!/info/).)+"
    pattern = re.sub(r"\\\{(\w+)\\\}", lambda label: f"(?P<{label[1]}>{any_text})", re.escape(row))
    return re.compile(pattern, re.DOTALL)
