"""The end of a run: waits for evaluators and actors."""

import logging
import math
import time
from collections.abc import Callable

from impala.runtime.signals import EndRequest
from learner.evaluation.snapshots import Snapshots

_log = logging.getLogger(__name__)

_SILENT_SECONDS = 120.0  # without an evaluator, after which the run ends
_FAREWELL_SECONDS = 5.0  # for actors to learn that training has finished


def await_evaluations(snapshots: Snapshots, check: Callable[[], None], stop: EndRequest) -> None:
    """Waits until every snapshot is evaluated, or no evaluator has been heard of for a while.

    Args:
      snapshots: that may wait.
      check: called often; raises an error that ends the run.
      stop: ends the wait.
    """
    if len(snapshots):
        _log.info("Waiting for evaluators: %d snapshots to go.", len(snapshots))
    began = time.monotonic()
    while len(snapshots) and not stop.wait(0.2):
        check()
        if min(snapshots.silent_seconds, time.monotonic() - began) > _SILENT_SECONDS:
            break
    if len(snapshots):
        _log.warning(
            "%d snapshots are not evaluated. They are kept: the same command, with an evaluator, "
            "goes on with them.",
            len(snapshots),
        )


def serve_on(
    when_finished: str,
    are_told: Callable[[], bool],
    check: Callable[[], None],
    stop: EndRequest,
) -> None:
    """Continues to serve a finished run, so that actors learn that it has finished.

    Args:
      when_finished: "exit": until they are told, but a few seconds at most; "idle": until `stop`.
      are_told: whether all actors have been told.
      check: called often; raises an error that ends the run.
      stop: ends the wait.
    """
    idle = when_finished == "idle"
    end = math.inf if idle else time.monotonic() + _FAREWELL_SECONDS
    while time.monotonic() < end and (idle or not are_told()) and not stop.wait(0.1):
        check()
