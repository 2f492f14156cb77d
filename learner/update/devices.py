"""Configures TensorFlow for learning: GPU memory, threads, bfloat16."""

import logging

import tensorflow as tf

from impala.config.schema import Config
from impala.runtime import process

_log = logging.getLogger(__name__)


def set_up(config: Config) -> None:
    """Applies the configured threads and precision, and lets GPU memory grow as needed."""
    if config.deterministic:
        # Its operations want a seed of the global generator, which building the agent sets again.
        tf.random.set_seed(config.seed)
        tf.config.experimental.enable_op_determinism()
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
        _log.info("Learning on %s.", gpu.name)
    most = 1 if config.deterministic else process.available_cores()
    process.set_threads(config.learner.threads or most)
    if config.learner.bfloat16:
        kind = "bfloat16" if process.use_bfloat16() else "float32: this CPU has no bfloat16"
        _log.info("Convolutions and products are computed in %s.", kind)
