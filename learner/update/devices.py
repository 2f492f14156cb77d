"""Configures TensorFlow for learning: GPU memory, threads, bfloat16."""

import logging

import tensorflow as tf

from impala.config.schema import LearnerConfig
from impala.runtime import process

_log = logging.getLogger(__name__)


def set_up(config: LearnerConfig) -> None:
    """Applies the configured threads and precision, and lets GPU memory grow as needed."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
        _log.info("Learning on %s.", gpu.name)
    process.set_threads(config.threads or process.available_cores())
    if config.bfloat16:
        kind = "bfloat16" if process.use_bfloat16() else "float32: this CPU has no bfloat16"
        _log.info("Convolutions and products are computed in %s.", kind)
