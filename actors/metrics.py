"""Prometheus metrics of an actor."""

import prometheus_client as prometheus

from impala.runtime.exporter import SECONDS


class ActorMetrics:
    """Instruments of one actor process, which survive its sessions with the learner."""

    def __init__(self) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        self.joins = prometheus.Counter(
            "impala_actor_joins_total",
            "Joins: the first, and one for each lost connection.",
            registry=registry,
        )
        self.unrolls = prometheus.Counter(
            "impala_actor_unrolls_total",
            "Unrolls in messages, by what their receipts said.",
            ["status"],
            registry=registry,
        )
        self.frames = prometheus.Counter(
            "impala_actor_frames_total", "Environment frames played.", registry=registry
        )
        self.sent_bytes = prometheus.Counter(
            "impala_actor_sent_bytes_total", "Bytes of messages made.", registry=registry
        )
        self.episodes = prometheus.Counter(
            "impala_actor_episodes_total", "Episodes that ended.", registry=registry
        )
        self.environment_faults = prometheus.Counter(
            "impala_actor_environment_faults_total",
            "Environments that failed and were started again, by how they failed.",
            ["kind"],
            registry=registry,
        )
        self.wait_seconds = prometheus.Counter(
            "impala_actor_wait_seconds_total",
            "Time that the actor waited for the learner.",
            registry=registry,
        )
        self.environment_seconds = prometheus.Counter(
            "impala_actor_environment_seconds_total",
            "Time that the environments took, resets included.",
            registry=registry,
        )
        self.steps = prometheus.Counter(
            "impala_actor_steps_total",
            "Steps of environments; a reset between episodes is one.",
            registry=registry,
        )
        self.parameter_version = prometheus.Gauge(
            "impala_actor_parameter_version", "Of the newest parameters here.", registry=registry
        )
        self.pending = prometheus.Gauge(
            "impala_actor_pending_messages", "Messages without a receipt.", registry=registry
        )
        self.connected = prometheus.Gauge(
            "impala_actor_connected", "1 while a session is open.", registry=registry
        )
        self.rpc_seconds = prometheus.Histogram(
            "impala_actor_rpc_seconds",
            "Time until an answer came; of StreamUnrolls, from a message to its receipt.",
            ["method"],
            buckets=SECONDS,
            registry=registry,
        )
