"""The end of a run: what its evaluators and actors are waited for."""

import logging
import math
import time
from collections.abc import Callable

from impala.runtime.signals import EndRequest
from learner.telemetry.evaluations import Evaluations

_log = logging.getLogger(__name__)

_EVALUATION_SECONDS = 120.0  # that an evaluator may take for a task
_FAREWELL_SECONDS = 5.0  # that actors may take to hear that training has finished


def await_evaluations(
    evaluations: Evaluations,
    learner: int,
    version: int,
    check: Callable[[], None],
    stop: EndRequest,
) -> None:
    """Waits until every task has been played with the final parameters, or an evaluator takes long.

    Args:
      evaluations: that have been reported.
      learner: the incarnation of this one.
      version: of the final parameters.
      check: called often; raises what the run is to end with.
      stop: ends the waiting.
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
    """Goes on serving a finished run, so that actors hear of its end.

    Args:
      when_finished: "exit": for a few seconds; "idle": until `stop`.
      check: called often; raises what the run is to end with.
      stop: ends the waiting.
    """
    idle = when_finished == "idle"
    end = math.inf if idle else time.monotonic() + _FAREWELL_SECONDS
    while time.monotonic() < end and not stop.wait(0.5):
        check()
