"""Rows of telemetry as Prometheus metrics.

Only aggregates: no label has a value per actor, so the number of series is bounded.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from impala.logdir.rows import Row
from impala.runtime.exporter import SECONDS, Exporter
from learner.service.service import REASONS
from learner.telemetry.sinks import Histograms, Sink


class Scalar(NamedTuple):
    """A metric made of scalars of a row: a counter if the name ends in _total, else a gauge."""

    name: str
    row: str  # the scalar's name; {LABEL} stands for the value of a label
    documentation: str


class Distribution(NamedTuple):
    """A metric made of all numbers behind a row's quantiles."""

    name: str
    row: str
    buckets: tuple[float, ...]
    documentation: str


SCALARS = tuple(
    Scalar(f"impala_{name}", row, documentation)
    for name, row, documentation in (
        ("frames_total", "frames", "Environment frames learned from."),
        ("steps_total", "steps", "Agent decisions learned from."),
        ("updates_total", "updates", "Updates; equals the newest version."),
        ("training_seconds_total", "seconds", "Total time of training."),
        ("progress_ratio", "progress", "Share of the run that is done, 0 to 1."),
        (
            *("learner_wait_seconds_total", "learner/wait_seconds"),
            "Time that the learner waited for data: more actors would help.",
        ),
        (
            *("actor_wait_ratio", "actor/wait_share"),
            "Share of time that actors waited for the learner, their mean: fewer would suffice.",
        ),
        (
            *("actor_environment_ratio", "actor/environment_share"),
            "Share of time that actors spent in their environments, their mean.",
        ),
        (
            *("environment_step_seconds", "environment/step_seconds"),
            "Mean time that a step of an environment took of an actor, resets included.",
        ),
        ("unrolls_received_total", "unrolls/received", "Unrolls taken from actors."),
        ("unrolls_learned_total", "unrolls/learned", "Unrolls learned from."),
        (
            *("unrolls_dropped_total", "unrolls/dropped/{reason}"),
            "Unrolls that were not learned from while fresh.",
        ),
        (
            *("messages_rejected_total", "messages/rejected/{reason}"),
            "Messages that were rejected as invalid.",
        ),
        (
            *("violations_total", "messages/violations/{kind}"),
            "Violations in messages: valid numbers that mean something else than they should.",
        ),
        (
            *("messages_duplicate_total", "messages/duplicates"),
            "Messages that had been accepted before.",
        ),
        (
            *("info_names_dropped_total", "info_names/dropped"),
            "Numbers of episodes' info that were not recorded: invalid or too many names.",
        ),
        ("refused_total", "refused/{reason}", "Calls that were refused."),
        (
            *("telemetry_rows_dropped_total", "telemetry/dropped"),
            "Rows that were merged because they could not be written fast enough.",
        ),
        (
            *("evaluations_dropped_total", "evaluations/dropped"),
            "Evaluations of no snapshot that waited for them, and so not filed.",
        ),
        (
            *("skipped_updates_total", "guard/skipped_updates"),
            "Batches that were not finite and were skipped, since the learner started.",
        ),
        (
            *("culprits_total", "guard/culprits"),
            "Unrolls that would have made an update not finite, and were left out of it.",
        ),
        (
            *("rollbacks_total", "guard/rollbacks"),
            "Rollbacks of the variables to a checkpoint, since the learner started.",
        ),
        ("received_bytes_total", "ingest/bytes", "Bytes of accepted unrolls."),
        ("joins_total", "actor/joins", "Joins: restarts and lost connections."),
        (
            *("environment_faults_total", "actor/environment_faults/{kind}"),
            "Environments of actors that crashed or hung, and were started again.",
        ),
        (
            *("task_unrolls_learned_total", "task/{task}/unrolls/learned"),
            "Unrolls of a task that were learned from, since the learner started.",
        ),
        (
            *("task_unrolls_dropped_total", "task/{task}/unrolls/dropped/{reason}"),
            "Unrolls of a task that were not learned from while fresh, since the learner started.",
        ),
        (
            *("task_policy_lag_updates", "task/{task}/policy_lag/{fate}"),
            "Mean age of fresh unrolls of a task, learned from or dropped, in updates.",
        ),
        (
            *("task_episode_length_steps", "task/{task}/episode_length/{fate}"),
            "Mean length of episodes that ended in unrolls learned from, or dropped, in steps.",
        ),
        (
            *("task_wait_seconds_total", "task/{task}/wait_seconds"),
            "Time that actors who played a task waited for the learner, since it started.",
        ),
        (
            *("task_reward_per_step", "task/{task}/reward_per_step"),
            "Mean raw reward of an agent step of a task.",
        ),
        ("permitted_unrolls", "pacing/making", "Unrolls that are being made."),
        ("queue_unrolls", "ingest/depth", "Unrolls queued."),
        ("queue_capacity_unrolls", "ingest/capacity", "Capacity of the queue."),
        (
            *("actors_quarantined", "actor/quarantined"),
            "Actors in quarantine: refused for a while after invalid contents.",
        ),
        ("actors", "actor/{state}", "Actors that are active, and that are silent."),
        ("replay_unrolls", "replay/unrolls", "Unrolls in replay."),
        ("replay_frames", "replay/frames", "Environment frames in replay."),
        ("replay_bytes", "replay/bytes", "Bytes of replay in memory, without what is compressed."),
        ("episodes_total", "episodes/{task}", "Episodes that actors ended."),
        (
            *("episode_return", "episode/{task}/return_recent"),
            "Mean raw return of the last 100 episodes.",
        ),
        (
            *("checkpoint_age_seconds", "checkpoint/age_seconds"),
            "Time since the first update that is in no checkpoint; 0: there is none.",
        ),
        # Everything else that a row has: losses, gradient norm, evaluations, ...
        ("scalar", "{name}", "Any other scalar of a row of telemetry."),
    )
)

# What a row does not name is 0: of a counter that begins above 0, no increase can be seen.
_ZEROS: Row = {f"messages/rejected/{reason}": 0 for reason in REASONS.values()}
_OF_ONE_ACTOR = "worker/"  # begins the names of scalars that are left out
_OF_EVALUATIONS = "evaluation/"

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
    """Serves the newest row and evaluations over HTTP, in Prometheus' text format."""

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
        """Serves this row from now on, and evaluations until there are newer ones."""
        # One row alone has an evaluation, and may be over before it is scraped.
        kept = {name: x for name, x in self._row.items() if name.startswith(_OF_EVALUATIONS)}
        self._row = kept | _ZEROS | row

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
                is_counter = scalar.name.endswith("_total")
                family = CounterMetricFamily if is_counter else GaugeMetricFamily
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
