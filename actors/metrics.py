"""Prometheus metrics of an actor."""

import functools

import prometheus_client as prometheus

from impala.runtime.exporter import SECONDS


class ActorMetrics:
    """Instruments of one actor process, which survive its sessions with the learner."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        counter = functools.partial(prometheus.Counter, registry=self.registry)
        gauge = functools.partial(prometheus.Gauge, registry=self.registry)
        self.joins = counter(
            "impala_actor_joins_total", "Joins: the first, and one for each lost connection."
        )
        self.unrolls = counter(
            "impala_actor_unrolls_total",
            "Unrolls in messages, by what their receipts said.",
            ["status"],
        )
        self.frames = counter("impala_actor_frames_total", "Environment frames played.")
        self.sent_bytes = counter("impala_actor_sent_bytes_total", "Bytes of messages made.")
        self.episodes = counter("impala_actor_episodes_total", "Episodes that ended.")
        self.environment_faults = counter(
            "impala_actor_environment_faults_total",
            "Environments that failed and were started again, by how they failed.",
            ["kind"],
        )
        self.wait_seconds = counter(
            "impala_actor_wait_seconds_total", "Time that the actor waited for the learner."
        )
        self.environment_seconds = counter(
            "impala_actor_environment_seconds_total",
            "Time that the environments took, resets included.",
        )
        self.steps = counter(
            "impala_actor_steps_total", "Steps of environments; a reset between episodes is one."
        )
        self.parameter_version = gauge(
            "impala_actor_parameter_version", "Of the newest parameters here."
        )
        self.pending = gauge("impala_actor_pending_messages", "Messages without a receipt.")
        self.connected = gauge("impala_actor_connected", "1 while a session is open.")
        self.rpc_seconds = prometheus.Histogram(
            "impala_actor_rpc_seconds",
            "Time until an answer came; of StreamUnrolls, from a message to its receipt.",
            ["method"],
            buckets=SECONDS,
            registry=self.registry,
        )
