"""Actors of one host that only pull parameters, for `benchmarks.pulls`. Without TensorFlow.

They ask for parameters when three quarters of a round are done and take them at its end, where
their age is measured, as `actors.actor` does.
"""

import ctypes
import pathlib
import random
import threading
import time
from collections.abc import Sequence

import numpy as np

from actors.client import LearnerClient, new_incarnation
from actors.shared import SharedPulls
from impala.runtime import process

ROUND_SECONDS = 0.37  # 32 environments, 20 steps, at 1,750 steps/s and core (docs/operations.md)

_newest: ctypes.c_int64


def keep(newest: ctypes.c_int64) -> None:
    """Keeps where the newest version can be read."""
    global _newest
    _newest = newest


def act(
    address: str, places: Sequence[int], begin: float, end: float, directory: pathlib.Path | None
) -> tuple[float, np.ndarray]:
    """Runs some actors.

    Args:
      address: of the learner.
      places: one for each actor.
      begin: when to begin to measure, on the monotonic clock.
      end: when to end.
      directory: by which the host's actors share pulls; None: they do not.

    Returns:
      CPU seconds, and the age in versions of what each round began with.
    """
    process.tune_malloc()
    ages: list[int] = []

    def run(place: int) -> None:
        generator = random.Random(place)
        with LearnerClient(
            address,
            name=f"synthetic-{place}",
            incarnation=new_incarnation(),
            shared=SharedPulls(address, directory) if directory is not None else None,
        ) as client:
            client.join()
            client.parameters()
            due = time.monotonic() + generator.uniform(0.0, ROUND_SECONDS)
            while due < end:
                time.sleep(max(0.0, due - time.monotonic()))
                client.prefetch()
                time.sleep(max(0.0, due + 0.25 * ROUND_SECONDS - time.monotonic()))
                held = client.parameters().version
                if begin < time.monotonic() < end:
                    ages.append(_newest.value - held)
                due = max(due + ROUND_SECONDS * generator.uniform(0.9, 1.1), time.monotonic())

    actors = [threading.Thread(target=run, args=(place,)) for place in places]
    for actor in actors:
        actor.start()
    time.sleep(max(0.0, begin - time.monotonic()))
    spent = time.process_time()
    time.sleep(max(0.0, end - time.monotonic()))
    spent = time.process_time() - spent
    for actor in actors:
        actor.join()
    return spent, np.array(ages)
