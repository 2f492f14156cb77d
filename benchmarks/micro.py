"""Measures codec and V-trace alone: the cost of one message and one batch of targets."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tree

import vtrace
from benchmarks.roofline import random_batch
from impala.config import schema as configs
from impala.parts import build
from impala.schedule import tasks
from protos import codec


def measure(config: configs.Config, seconds: float) -> dict[str, float]:
    """Returns name -> median seconds of one call."""
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    agent = build.agent(config.agent, *spaces)
    unroll = random_batch(config, agent, spaces).unroll
    leaves = tree.flatten((unroll.timestep, unroll.output, unroll.core_state))
    specs = codec.specs(leaves)
    encoded = codec.encode(leaves)

    shape = (config.learner.unroll_length, config.mix.batch_size)
    random = np.random.default_rng(0)
    arguments = {
        "log_rhos": tf.constant(random.normal(size=shape), tf.float32),
        "discounts": tf.constant(random.choice([0.0, 0.99], size=shape), tf.float32),
        "rewards": tf.constant(random.normal(size=shape), tf.float32),
        "values": tf.constant(random.normal(size=shape), tf.float32),
        "bootstrap_value": tf.constant(random.normal(size=shape[1:]), tf.float32),
    }
    compiled = tf.function(vtrace.from_importance_weights, autograph=False)
    return {
        "encode a message": _median(lambda: codec.encode(leaves), seconds),
        "decode a message": _median(lambda: codec.decode(encoded, specs), seconds),
        "V-trace of a batch": _median(lambda: compiled(**arguments).vs.numpy(), seconds),
    }


def _median(call: Callable[[], Any], seconds: float) -> float:
    call()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
