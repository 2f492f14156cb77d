"""The end of a run: waits for evaluators and actors."""

import logging
import math
import time
from collections.abc import Callable

from impala.runtime.signals import EndRequest
from learner.telemetry.evaluations import Evaluations

_log = logging.getLogger(__name__)

_EVALUATION_SECONDS = 120.0  # limit for an evaluator to play one task
_FAREWELL_SECONDS = 5.0  # for actors to learn that training has finished


def await_evaluations(
    evaluations: Evaluations,
    learner: int,
    version: int,
    check: Callable[[], None],
    stop: EndRequest,
) -> None:
    """Waits until every task is evaluated with the final parameters, or time is up.

    Args:
      evaluations: those reported so far.
      learner: this learner's incarnation.
      version: of the final parameters.
      check: called often; raises an error that ends the run.
      stop: ends the wait.
    """
    missing = evaluations.missing(learner, version)
    deadline = time.monotonic() + _EVALUATION_SECONDS
    while missing and not stop.wait(0.2) and time.monotonic() < deadline:
        check()
        if (now := evaluations.missing(learner, version)) < missing:
            missing, deadline = now, time.monotonic() + _EVALUATION_SECONDS
    if missing:
        _log.warning("No evaluation of the final parameters on %s.", ", ".join(missing))


def serve_on(when_finished: str, check: Callable[[], None], stop: EndRequest) -> None:
    """Continues to serve a finished run, so that actors learn that it has finished.

    Args:
      when_finished: "exit": for a few seconds; "idle": until `stop`.
      check: called often; raises an error that ends the run.
      stop: ends the wait.
    """
    idle = when_finished == "idle"
    end = math.inf if idle else time.monotonic() + _FAREWELL_SECONDS
    while time.monotonic() < end and not stop.wait(0.5):
        check()
