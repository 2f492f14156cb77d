"""The learner service, wired from top to bottom: composition root of this package."""

import contextlib
import functools
import logging
import os
import pathlib
import secrets
from collections.abc import Sequence

from impala.config import values
from impala.config.schema import Config
from impala.finite import NotFiniteError
from impala.logdir import checkpoint
from impala.logdir import directory as log_directory
from impala.logdir.checkpoint import Checkpoint
from impala.logdir.directory import LogDirectory, StorageError
from impala.logdir.store import Copier
from impala.runtime import process
from impala.runtime.listen import is_local
from impala.runtime.security import ServerSecurity
from impala.runtime.signals import EndRequest
from learner import farewell
from learner.data.ingest import Ingest
from learner.data.mix import Mix
from learner.data.opening import open_replay
from learner.data.pacing import make_pacing
from learner.evaluation.best_and_milestones import Kept
from learner.evaluation.evaluations import Evaluations
from learner.evaluation.snapshot_maker import SnapshotMaker
from learner.evaluation.snapshots import Snapshots
from learner.fleet.incarnations import Incarnations
from learner.fleet.receipts import ReceiptProofs, load_key
from learner.fleet.records import Records
from learner.plan import acting_step, plan_of
from learner.service.executable import ExecutablePolicy
from learner.service.inference import Inference
from learner.service.server import Server
from learner.service.service import LearnerService, Lineage
from learner.service.terms import terms
from learner.share import of as share_of
from learner.telemetry import own_sinks
from learner.telemetry.console import Console
from learner.telemetry.files import JsonLines, TensorBoard
from learner.telemetry.gauges import Gauges
from learner.telemetry.prometheus import Prometheus
from learner.telemetry.reporter import Reporter
from learner.telemetry.telemetry import Telemetry
from learner.telemetry.writer import Writer
from learner.update import devices, output_judge
from learner.update.checkpoints import Checkpoints, resume
from learner.update.guard import Guard
from learner.update.peers import Peers
from learner.update.publisher import Publisher
from learner.update.training import Training

_log = logging.getLogger(__name__)

# Between rows of a deterministic run; files get them as if that took so many seconds.
_ROW_UPDATES, _ROW_SECONDS = 100, 5.0
_GRACE_SECONDS = 2.0  # for calls in progress when the learner stops

STOPPED = os.EX_TEMPFAIL
"""Exit status of a learner that ends because of another one: it has to be started again."""


def run_learner(
    config: Config,
    *,
    logdir: pathlib.Path,
    listen: str,
    fresh: bool,
    empty_replay: bool,
    init_from: pathlib.Path | None,
    when_finished: str,
    stopped_status: int = 0,
    own_actors: bool = False,
    security: ServerSecurity,
    health_listen: str | None = None,
    metrics_listen: str | None = None,
    rows_to_log: bool = False,
    peers: Sequence[str] = (),
    peer: int = 0,
) -> int:
    """Serves a fleet of actors and learns until the run is done, or SIGTERM, SIGINT or SIGHUP.

    Args:
      config: the run. If `logdir` has a checkpoint, the run goes on from it.
      logdir: where checkpoints and telemetry go.
      listen: HOST:PORT (port 0: any free one) or unix:PATH.
      fresh: start over; an earlier run in `logdir` is moved aside.
      empty_replay: move only the replay aside.
      init_from: log directory of another run, whose agent a new run starts from as far as it fits;
        not opened if the run is resumed.
      when_finished: "exit", or "idle" to go on serving the final parameters.
      stopped_status: what to return for a run that was stopped before its end.
      own_actors: all actors are the run's own: the run fails when one would be quarantined.
      security: which credentials callers need, and the server's own.
      health_listen: HOST:PORT where only health is served, in plain text.
      metrics_listen: HOST:PORT where Prometheus metrics are served.
      rows_to_log: log the rows of telemetry instead of printing them to standard output.
      peers: HOST:PORT of each learner that learns together with this one, itself included.
      peer: which of them it is.

    Returns:
      The exit status: 0 after a finished run, `stopped_status` after a stopped one, 1 after a
      failure, `STOPPED` if a peer was stopped.

    Raises:
      LogDirectoryError: `logdir` cannot be written, or another learner writes it.
      CheckpointError: the checkpoint in `logdir` does not fit `config`, or a new run's
        `init_from` has none.
      StorageError: the replay in `logdir` is missing or damaged, or does not fit `config`.
      OptionError: there is no such environment, the agent cannot play it, or its messages would
        be too large.
      OSError: an address is invalid or cannot be bound.
      SecurityError: the files of `security` cannot be used, or do not suffice for the addresses.
      PeerLost: a peer has ended, and this learner has to be started again, too.
    """
    process.tune_malloc()
    process.allow_many_files()
    devices.set_up(config)
    security.check(listen, health=health_listen, metrics=metrics_listen, has_peers=len(peers) > 1)
    initial = _initial(logdir, fresh, init_from)
    with (
        EndRequest() as stop,
        LogDirectory(logdir) as directory,
        contextlib.ExitStack() as at_the_end,
    ):
        joined = Peers.joined(config, peers, peer, stop)
        if joined is None:
            return stopped_status
        group = at_the_end.enter_context(joined)
        share = share_of(config, group.index, group.count)
        # May raise an OSError that does not concern the log directory.
        plan = plan_of(config, group.replicas)
        with log_directory.opening(logdir):
            if fresh:  # only now that nothing in the settings can be wrong
                directory.move_run_aside()
            # Restored state.
            if not checkpoint.exists(logdir):
                directory.move_kept_aside()
            records = Records.begin(config, own_actors=own_actors)
            resumed = resume(logdir, plan.phases, records.accounts, initial, group)
            if empty_replay:
                directory.move_replay_aside()
            added = resumed.replay_added
            replay = open_replay(share, plan.unroll_spec, directory, added, empty_replay)
            directory.write("config.yaml", values.to_yaml(config))
            copier = Copier(logdir, share) if share.learner.checkpoint_store else None
            if copier is not None:
                at_the_end.callback(copier.close)  # when all is saved
            incarnation = group.of_first(secrets.randbits(62) + 1)
            incarnations = Incarnations(logdir / "incarnations.json", incarnation)

            # The service for actors.
            pacing = make_pacing(share)
            # Unrolls with a permit always have room: none that is due waits behind others.
            ingest = Ingest(pacing.capacity if pacing else share.learner.queue_unrolls)
            snapshots = Snapshots(len(plan.played), share.learner.snapshots)
            snapshot_maker = SnapshotMaker(
                *(logdir, resumed, plan.phases, plan.spaces, snapshots, incarnations.own)
            )
            proofs = ReceiptProofs(load_key(logdir / log_directory.RECEIPT_KEY), incarnations.own)
            inference = None
            if config.learner.inference == "auto" and pacing is None:
                inference = Inference(
                    *(share, plan.spaces, plan.unroll_spec),
                    step=lambda: acting_step(config, plan.spaces),
                    observe=lambda name, value: telemetry.sample(f"inference/{name}", value),
                )
            service = LearnerService(
                terms(
                    share, plan.phases.agent.variables, plan.unroll_spec, plan.played, plan.spaces
                ),
                Lineage(incarnations.own, incarnations.earlier, proofs),
                records,
                ingest,
                plan.schedule,
                snapshots,
                pacing,
                ExecutablePolicy(config, plan.spaces),
                inference,
            )

            at_the_end.callback(service.close)

            # Telemetry, closed last.
            telemetry = Telemetry(plan.names)
            evaluations = Evaluations(
                *(logdir, config, plan.names, snapshots),
                frames=resumed.learner.counters.frames,
            )
            writer = Writer(
                evaluations,
                service.evaluators.reports,
                Prometheus(metrics_listen) if metrics_listen is not None else None,
                live=[Console(to_log=rows_to_log)],
                files=[TensorBoard(logdir), JsonLines(logdir)],
                own=own_sinks.make(config, logdir),
                seconds_per_update=_ROW_SECONDS / _ROW_UPDATES if config.deterministic else None,
            )
            at_the_end.callback(writer.close)

            # From messages to batches and updates.
            if replay is not None:
                at_the_end.callback(replay.close)
            mix = Mix(
                *(ingest, share.mix, replay),
                version=resumed.learner.counters.updates,
                pacing=pacing,
                place=resumed.learner.place,
            )
            at_the_end.callback(mix.close)
            at_the_end.callback(ingest.close)
            guard = Guard(
                *(config.guard, logdir, mix, replay),
                blame=functools.partial(records.quarantine.blame, is_culprit=True),
                refused_outputs=records.refused_outputs,
                peers=group,
                blank=output_judge.blank(plan.unroll_spec),
            )
            training = Training(plan.phases, resumed.learner, mix, guard, group)

            # Consumers of the stream of iterations.
            publisher = Publisher(service, incarnations, plan.phases, guard)
            at_the_end.callback(publisher.close)
            checkpoints = Checkpoints(
                *(logdir, resumed, plan.spaces, records.accounts, replay), peers=group
            )
            kept = Kept(
                *(logdir, resumed, plan.spaces),
                evaluated=snapshots.take_evaluated,
                settings=share.learner,
            )
            if any(group.meet(empty_replay and added > 0)):
                checkpoints.save(training.learner)  # no longer counts the replay moved aside
            server = Server(
                *(service, listen, security, health_listen),
                observe=lambda method, seconds: telemetry.sample(f"rpc_seconds/{method}", seconds),
            )
            gauges = Gauges(
                *(plan.phases, records, server, ingest, pacing),
                *(replay, guard, checkpoints),
                *(copier, snapshots, writer),
                inference=inference,
            )
            reporter = Reporter(
                *(telemetry, gauges, writer, plan.names, config.learner.log_seconds),
                updates=_ROW_UPDATES if config.deterministic else None,
                logs_episodes=config.telemetry.log_episodes,
            )

        def check() -> None:
            server.check()
            writer.check()
            reporter.end_row_if_due(training.learner.counters)

        try:
            publisher.publish(training.learner)
            snapshot_maker.begin(training.learner)
            address = server.start()
            at_the_end.callback(server.stop, _GRACE_SECONDS)
            directory.write("address", f"{address}\n")
            _log.info("Serving %s on %s.", logdir, address)
            if not is_local(listen) and security.insecure:
                _log.warning("Insecure: whoever reaches %s may take part in this run.", address)

            telemetry.begin(training.learner.counters)
            for iteration in training.iterations(
                until=lambda: stop.is_set() or bool(records.quarantine.ends_run),
                may_learn=snapshot_maker.has_room,
                queued=lambda: ingest.depth,
            ):
                server.check()
                for part in iteration.provenance:
                    records.accounts.settle(*part.account)
                publisher.take(iteration)
                reporter.take(iteration)
                snapshot_maker.take(iteration)  # before the checkpoint, which counts these frames
                kept.take(iteration)  # likewise
                checkpoints.take(iteration)
                # Last: with an exact lag of 0 nothing is under way until then, nor at the end.
                if pacing is not None and iteration.is_whole and not training.is_finished:
                    publisher.wait()
                    service.learned()
            publisher.wait()

            ends_run = "" if training.is_finished or stop.is_set() else records.quarantine.ends_run
            if ends_run:
                _log.error("Stopping: %s", ends_run)
            elif not training.is_finished:
                _log.info("Stopping: %s.", stop.cause if stop.is_set() else "a peer stops")
            if finished := training.is_finished:
                service.finish()
            else:
                server.stop(_GRACE_SECONDS)
            records.accounts.drop_queued("run_finished" if finished else "learner_stop")
            if training.settle():
                publisher.publish(training.learner)  # the final parameters
                if finished:
                    snapshot_maker.make_last(training.learner)
                kept.consider(training.learner)
                checkpoints.save(training.learner)
            group.part()
            if finished:
                snapshots.end()
                farewell.await_evaluations(snapshots, check, stop)
            kept.keep_evaluated()
            reporter.end_row(training.learner.counters, is_last=True)
            writer.drain()
            if finished:
                _log.info("Finished: %s.", training.learner.counters)
                evaluations.log()
                farewell.serve_on(when_finished, check, stop)
        except (NotFiniteError, StorageError) as error:
            _log.error("%s", error)  # no checkpoint: the variables are bad, or the disk is full
            if isinstance(error, NotFiniteError):
                group.part()  # those of the peers are as bad
            return 1
    if finished:
        return 0
    if ends_run:
        return 1
    return stopped_status if stop.is_set() else STOPPED


def _initial(
    logdir: pathlib.Path, fresh: bool, init_from: pathlib.Path | None
) -> Checkpoint | None:
    """Returns what a new run starts from. `init_from` may be in a log directory to be moved."""
    if init_from is None:
        return None
    if fresh or not checkpoint.exists(logdir):
        return checkpoint.load(init_from)
    _log.info("Going on with the run in %s: --init-from is for new ones.", logdir)
    return None
