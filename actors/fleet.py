"""Runs a fleet of actor processes on one host, and restarts those that fail."""

import logging
import signal
import sys
from collections.abc import Sequence

from impala.runtime.backoff import Backoff
from impala.runtime.process import IMPALA
from impala.runtime.supervisor import Program, Supervisor

_log = logging.getLogger(__name__)

_ACTOR = (*IMPALA, "actor")
_BACKOFF = Backoff(1.0, 30.0)
_GRACE_SECONDS = 15.0  # from the signal to SIGKILL
_WRONG_USAGE = 2  # exit status


def run_fleet(
    num_actors: int,
    argv: Sequence[str],
    *,
    command: Sequence[str] = _ACTOR,
    backoff: Backoff = _BACKOFF,
    give_up_after: int = 0,
) -> int:
    """Runs actors until each has ended by itself or a signal has ended them all.

    SIGTERM, SIGINT and SIGHUP are passed on, and the actors have 15 seconds to drain. A failed
    actor is restarted, with exponential back-off, unless all of them fail:
    so many times, or because the command line is wrong.

    Args:
      num_actors: number of processes.
      argv: arguments of `impala actor`, without --num-actors and --index.
      command: the command that starts an actor.
      backoff: pauses before restarts.
      give_up_after: end once each actor has failed so many times in a row; 0: never.

    Returns:
      Exit status: 0, or that with which all actors failed, or of the first that failed to drain;
      130 if SIGINT came twice.
    """
    if num_actors < 1:
        raise ValueError(f"num_actors is {num_actors}, it must be at least 1")
    status = 0
    with Supervisor(
        grace_seconds=_GRACE_SECONDS,
        backoff=backoff,
        max_failures=sys.maxsize,
    ) as supervisor:
        for index in range(num_actors):
            supervisor.start(
                Program(
                    name=f"actor-{index}",
                    command=[*command, *argv, "--num-actors", "1", "--index", str(index)],
                    restart=True,
                    orphan_signal=signal.SIGKILL,  # else it would finish its unroll first
                )
            )
        for ended in supervisor.watch():
            if ended.restart_seconds is not None:
                _log.warning(
                    "%s ended with status %d; starting it again in %.1f s",
                    ended.name,
                    ended.status,
                    ended.restart_seconds,
                )
                if ended.status == _WRONG_USAGE and supervisor.all_keep_failing(1):
                    status = ended.status
                    supervisor.stop("the command line is wrong")
                elif give_up_after and supervisor.all_keep_failing(give_up_after):
                    _log.error("All actors keep failing.")
                    status = ended.status
                    supervisor.stop("all actors keep failing")
            elif ended.status != 0:
                _log.error("%s ended with status %d", ended.name, ended.status)
                status = status or ended.status
    return 128 + signal.SIGINT if supervisor.killed else status
