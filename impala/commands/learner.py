"""`impala learner`: serves a fleet of actors and learns from what they send."""

import dataclasses
import logging
from typing import Annotated, Literal

from impala.commands.flags import ADDRESS, STOPPED, RunFlags, WhenFinished, plainly, print_config
from impala.config import values
from impala.config.schema import Range
from impala.runtime import listen, process
from impala.runtime.logs import log_to_stderr
from impala.runtime.meeting import PeerLost
from impala.runtime.security import ServerSecurity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner(RunFlags):
    """Serves a fleet of actors and learns from what they send."""

    uses_gpus = True

    listen: str = ADDRESS
    """HOST:PORT, or unix:PATH. Use 0.0.0.0:PORT to accept other hosts."""
    when_finished: WhenFinished = "exit"
    """exit, or idle: continue to serve the final parameters."""
    stopped_status: Annotated[int, Range(0, 125)] = 0
    """Exit status if a signal stops the run before its end. 0 suits Kubernetes and systemd; use 75
    if a script must distinguish a stopped run from a finished one."""
    own_actors: bool = False
    """All actors are the run's own, as with `impala train`: when one would be quarantined, except
    for updates that were not finite, say why and end with status 1."""
    own_evaluator: Literal["auto", "yes", "no"] = "auto"
    """Set by `impala train`: whether it starts an evaluator, so that --learner.snapshots auto is
    always or never. auto: as that setting says."""
    health_listen: str | None = None
    """HOST:PORT of the gRPC health service, in plain text. None: it is not served."""
    metrics_listen: str | None = None
    """HOST:PORT where Prometheus metrics are served."""
    peers: str = ""
    """HOST:PORT,HOST:PORT,...: learners that learn as one, each with its own actors and --logdir,
    the same list for all of them; see docs/scaling.md. At these addresses they reach each other,
    unencrypted: in a private network."""
    peer: Annotated[int, Range(-1)] = -1
    """Which of the --peers this is, from 0. -1: the number at the end of the host's name, as of a
    StatefulSet's pod."""
    security: ServerSecurity = dataclasses.field(default_factory=ServerSecurity)


def learner(command: Learner) -> int:
    """Runs the learner. Returns the exit status.

    Ends with it where telemetry hangs or XLA still compiles.
    """
    if command.print_config:
        return print_config(command)
    return process.ended(_run(command))


def _run(command: Learner) -> int:
    """Runs `learner.run.run_learner`."""
    from impala.commands import preflight
    from learner import peer_config

    process.outlive_readers(waits=False)
    log_to_stderr(command.log_format)
    addresses = peer_config.addresses(command.peers)
    peer = peer_config.number(addresses, command.peer)
    peer_config.check(command.settings, max(1, len(addresses)))
    with plainly():
        command.security.check(
            command.listen,
            health=command.health_listen,
            metrics=command.metrics_listen,
            has_peers=len(addresses) > 1,
        )
        listen.check_free("The learner", command.listen)
        listen.check_free("Health", command.health_listen)
        listen.check_free("Metrics", command.metrics_listen)
    logdir = preflight.log_directory(command)
    process.load_tensorflow(use_gpus=True)
    from impala.logdir.checkpoint import CheckpointError
    from impala.logdir.directory import LogDirectoryError, StorageError
    from learner.run import Options, run_learner

    options = Options(
        logdir=logdir,
        listen=command.listen,
        fresh=command.fresh,
        empty_replay=command.empty_replay,
        init_from=command.init_from,
        when_finished=command.when_finished,
        stopped_status=command.stopped_status,
        own_actors=command.own_actors,
        own_evaluator=command.own_evaluator,
        security=command.security,
        health_listen=command.health_listen,
        metrics_listen=command.metrics_listen,
        rows_to_log=command.log_format == "json",
        peers=addresses,
        peer=peer,
    )
    try:
        with plainly():
            return run_learner(command.settings, options)
    except PeerLost as error:
        logging.getLogger(__name__).error("%s", error)
        return STOPPED
    except (CheckpointError, LogDirectoryError, StorageError) as error:
        raise values.OptionError(str(error)) from error
