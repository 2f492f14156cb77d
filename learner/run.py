"""The learner service, wired from top to bottom: composition root of this package."""

import contextlib
import dataclasses
import functools
import logging
import os
import pathlib
import secrets
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from impala.config import values
from impala.config.schema import Config
from impala.environments import pace
from impala.finite import NotFiniteError
from impala.logdir import checkpoint
from impala.logdir import directory as log_directory
from impala.logdir.checkpoint import Checkpoint, CheckpointError
from impala.logdir.directory import LogDirectory, StorageError
from impala.parts.components import steps_together
from impala.play import teachers
from impala.runtime import process
from impala.runtime.listen import from_anywhere, is_local
from impala.runtime.security import ServerSecurity
from impala.runtime.signals import EndRequest
from learner import peer_config, shutdown
from learner.data.demonstrations import Demonstrations, open_demonstrations
from learner.data.ingest import Ingest
from learner.data.mix import Mix
from learner.data.opening import open_replay
from learner.data.pacing import Pacing, make_pacing
from learner.data.replay import Replay
from learner.data.rows import Layout
from learner.evaluation.best_and_milestones import BestAndMilestones
from learner.evaluation.evaluations import Evaluations
from learner.evaluation.snapshot_maker import SnapshotMaker
from learner.evaluation.snapshots import Snapshots
from learner.fleet.incarnations import Incarnations
from learner.fleet.receipts import ReceiptProofs, load_key
from learner.fleet.records import Records
from learner.plan import Plan, acting_step, make_plan
from learner.service.executable import ExecutablePolicy
from learner.service.inference import Inference
from learner.service.server import Server
from learner.service.service import LearnerService, Lineage
from learner.service.terms import terms
from learner.telemetry import custom_sinks
from learner.telemetry.console import Console
from learner.telemetry.files import JsonLines, TensorBoard
from learner.telemetry.gauges import Gauges
from learner.telemetry.prometheus import Prometheus
from learner.telemetry.reporter import Reporter
from learner.telemetry.telemetry import Telemetry
from learner.telemetry.writer import Writer
from learner.update import devices, output_judge
from learner.update.checkpoints import Checkpoints, Resumed, resume
from learner.update.demand import Demand
from learner.update.guard import Guard
from learner.update.peers import Peers
from learner.update.publisher import Publisher
from learner.update.training import Training

_log = logging.getLogger(__name__)

# Between rows of a deterministic run; files get them as if that took so many seconds.
_ROW_UPDATES, _ROW_SECONDS = 100, 5.0
_GRACE_SECONDS = 2.0  # for calls in progress when the learner stops

Play = Callable[[], None]
"""Plays for a while, and submits what was played."""

STOPPED = os.EX_TEMPFAIL
"""Exit status of a learner that ends because of another one: it has to be started again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a learner starts and serves: what is no setting of its run."""

    logdir: pathlib.Path
    """Where checkpoints and telemetry go. If it has a checkpoint, the run goes on from it."""
    listen: str
    """HOST:PORT (port 0: any free one) or unix:PATH."""
    fresh: bool = False
    """Start over; an earlier run in `logdir` is moved aside."""
    empty_replay: bool = False
    """Move only the replay aside."""
    init_from: pathlib.Path | None = None
    """Log directory of another run, whose agent a new run starts from as far as it fits; not opened
    if the run is resumed."""
    when_finished: str = "exit"
    """exit, or idle: continue to serve the final parameters."""
    stopped_status: int = 0
    """Exit status of a run that was stopped before its end."""
    own_actors: bool = False
    """All actors are the run's own: the run fails when one would be quarantined."""
    own_evaluator: Literal["auto", "yes", "no"] = "auto"
    """Whether an evaluator is started with the learner. auto: it is seen when one joins."""
    security: ServerSecurity = dataclasses.field(default_factory=ServerSecurity)
    """Which credentials callers need, and the server's own."""
    health_listen: str | None = None
    """HOST:PORT of the health service, in plain text; None: it is not served."""
    metrics_listen: str | None = None
    """HOST:PORT where Prometheus metrics are served."""
    rows_to_log: bool = False
    """Log the rows of telemetry instead of printing them to standard output."""
    peers: Sequence[str] = ()
    """HOST:PORT of each learner that learns together with this one, itself included."""
    peer: int = 0
    """Which of them it is."""
    play: Callable[[LearnerService], contextlib.AbstractContextManager[Play]] | None = None
    """Makes what plays in this process and thread, when the learner needs unrolls; there is no
    server then. None: actors connect."""


def run_learner(config: Config, options: Options) -> int:
    """Serves a fleet of actors and learns until the run is done, or SIGTERM, SIGINT or SIGHUP.

    Returns:
      The exit status: 0 after a finished run, `stopped_status` after a stopped one, 1 after a
      failure, `STOPPED` if a peer was stopped.

    Raises:
      LogDirectoryError: the log directory cannot be written, or another learner writes it.
      CheckpointError: the checkpoint there does not fit `config`, or a new run's `init_from` has
        none.
      StorageError: the replay there is missing or damaged, or does not fit `config`.
      OptionError: there is no such environment, the agent cannot play it, or its messages would
        be too large.
      OSError: an address is invalid or cannot be bound.
      SecurityError: the files of `security` cannot be used, or do not suffice for the addresses.
      PeerLost: a peer has ended, and this learner has to be started again, too.
    """
    process.tune_malloc()
    process.allow_many_files()
    devices.set_up(config)
    options.security.check(
        options.listen,
        health=options.health_listen,
        metrics=options.metrics_listen,
        has_peers=len(options.peers) > 1,
    )
    with EndRequest() as stop:
        return learn(config, options, stop)


def learn(config: Config, options: Options, stop: EndRequest) -> int:
    """Learns as `run_learner`, in a process that is set up already, until `stop`."""
    initial = _initial(options)
    with (
        LogDirectory(options.logdir) as directory,
        contextlib.ExitStack() as closing,
    ):
        joined = Peers.joined(config, options.peers, options.peer, stop)
        if joined is None:
            return options.stopped_status
        group = closing.enter_context(joined)
        taught = _teachers(config, options, group)
        # May raise an OSError that does not concern the log directory.
        plan = make_plan(config, group.replicas, taught, may_exit=options.play is None)
        demonstrations = _demonstrations(config, options, plan, group)
        with log_directory.opening(options.logdir):
            state = build_state(config, options, plan, group, directory, initial, closing)
            state = state._replace(demonstrations=demonstrations)
            teachers.keep(config, options.logdir, taught)
            run = build_service(state, closing)
        try:
            ends_run = train(run, stop, closing)
            return finish(run, stop, ends_run)
        except (NotFiniteError, StorageError) as error:
            _log.error("%s", error)  # no checkpoint: the variables are bad, or the disk is full
            if isinstance(error, NotFiniteError):
                run.reporter.end_row(run.training.learner.counters)  # shows how it came to this
                group.part()  # those of the peers are as bad
            return 1


class State(NamedTuple):
    """What a learner goes on from: its plan, and what its log directory holds."""

    config: Config
    share: Config  # of this peer
    options: Options
    plan: Plan
    group: Peers
    directory: LogDirectory
    records: Records
    resumed: Resumed
    layout: Layout  # of a row, which is an unroll
    replay: Replay | None
    incarnations: Incarnations
    demonstrations: Demonstrations | None = None  # that its first phase learns from


class Run(NamedTuple):
    """A learner's parts, from messages to updates and to telemetry."""

    state: State
    pacing: Pacing | None
    ingest: Ingest
    mix: Mix
    snapshots: Snapshots
    snapshot_maker: SnapshotMaker
    service: LearnerService
    server: Server | None
    training: Training
    publisher: Publisher
    checkpoints: Checkpoints
    best_and_milestones: BestAndMilestones
    telemetry: Telemetry
    evaluations: Evaluations
    writer: Writer
    reporter: Reporter

    def check(self) -> None:
        """Raises an error if a thread has ended by itself; adds a row of telemetry if it is due."""
        if self.server is not None:
            self.server.check()
        self.reporter.end_row_if_due(self.training.learner.counters)


def build_state(
    config: Config,
    options: Options,
    plan: Plan,
    group: Peers,
    directory: LogDirectory,
    initial: Checkpoint | None,
    closing: contextlib.ExitStack,
) -> State:
    """Restores a run from its log directory, or begins one there.

    Args:
      config: the run.
      options: how it starts.
      plan: the objects that `config` describes.
      group: the peers.
      directory: locked for this process.
      initial: what a new run's agent starts from.
      closing: closes the parts at the end.
    """
    logdir = options.logdir
    share = peer_config.of_peer(config, group.index, group.count)
    if options.fresh:  # only now that nothing in the settings can be wrong
        directory.move_run_aside()
    if not checkpoint.exists(logdir):
        directory.move_kept_aside()
    records = Records.begin(config, own_actors=options.own_actors)
    resumed = resume(logdir, plan.phases, records.accounts, initial, group)
    if options.empty_replay or resumed.is_new:  # a peer may have that of an earlier run
        directory.move_replay_aside()
    added, layout = resumed.replay_added, Layout(plan.unroll_spec)
    replay = open_replay(*(share, plan.unroll_spec, layout, directory, added, options.empty_replay))
    if replay is not None:
        closing.callback(replay.close)
    directory.write("config.yaml", values.to_yaml(config))
    incarnation = group.of_first(secrets.randbits(62) + 1)
    return State(
        *(config, share, options, plan, group, directory, records, resumed, layout, replay),
        incarnations=Incarnations(logdir / "incarnations.json", incarnation),
    )


def build_service(state: State, closing: contextlib.ExitStack) -> Run:
    """Makes the service for actors, what learns from their unrolls, and telemetry."""
    config, share, options, plan = state.config, state.share, state.options, state.plan
    records, resumed, replay, group = state.records, state.resumed, state.replay, state.group
    logdir, own = options.logdir, state.incarnations.own
    telemetry = Telemetry(plan.names)
    pacing = make_pacing(share)
    # Unrolls with a permit always have room: none that is due waits behind others.
    ingest = Ingest(pacing.capacity if pacing else share.learner.queue_unrolls)
    keep = share.learner.snapshots
    if options.play is not None:
        keep = "never"  # there is no server that evaluators could join
    elif keep == "auto" and options.own_evaluator != "auto":
        keep = "always" if options.own_evaluator == "yes" else "never"
    snapshots = Snapshots(len(plan.played), keep)
    inference = _inference(state, telemetry) if pacing is None else None
    told = terms(share, plan.phases.agent.variables, plan.unroll_spec, plan.played, plan.spaces)
    if options.play is not None:
        told = told._replace(is_deterministic=True)
    service = LearnerService(
        told,
        Lineage(own, state.incarnations.earlier, _proofs(state)),
        *(records, ingest, plan.schedule, snapshots, pacing),
        ExecutablePolicy(config, plan.spaces),
        *(inference, demand := Demand()),
    )
    closing.callback(service.close)
    # Before the reports on file are read, which settle what is restored here.
    maker = SnapshotMaker(logdir, resumed, plan.phases, plan.spaces, snapshots, own)
    evaluations = Evaluations(
        *(logdir, config, plan.names, snapshots), frames=resumed.learner.counters.frames
    )
    writer = _writer(state, evaluations, service)
    closing.callback(writer.close)
    play = None if options.play is None else closing.enter_context(options.play(service))
    mix = Mix(
        *(ingest, share.mix, state.layout, replay),
        version=resumed.learner.counters.updates,
        pacing=pacing,
        place=None if resumed.learner.reads_rows else resumed.learner.place_rows,
        play=play,
        demonstrations=state.demonstrations if resumed.learner.from_demonstrations else None,
    )
    closing.callback(mix.close)
    closing.callback(ingest.close)
    guard = _guard(state, mix)
    training = Training(plan.phases, resumed.learner, mix, guard, group)
    publisher = Publisher(
        *(service.publish, state.incarnations, plan.phases, guard, demand),
        each_version=pacing is not None or play is not None,
    )
    closing.callback(publisher.close)
    if options.empty_replay:
        resumed = resumed._replace(replay_added=0)
    checkpoints = Checkpoints(
        *(logdir, resumed, plan.spaces, records.accounts, replay), peers=group
    )
    server = None
    if play is None:
        server = Server(
            *(service, options.listen, options.security, options.health_listen),
            observe=lambda method, seconds: telemetry.sample(f"rpc_seconds/{method}", seconds),
        )
    gauges = Gauges(
        *(plan.phases, records, server, ingest, pacing, replay, guard, checkpoints),
        *(snapshots, writer, inference, state.incarnations),
    )
    reporter = Reporter(
        *(telemetry, gauges, writer, plan.names, config.learner.log_seconds),
        updates=_ROW_UPDATES if config.deterministic else None,
        logs_episodes=config.telemetry.log_episodes,
    )
    best_and_milestones = BestAndMilestones(
        *(logdir, resumed, plan.spaces),
        evaluated=snapshots.take_evaluated,
        settings=share.learner,
        keeps_best=group.is_first,
    )
    return Run(
        state=state,
        pacing=pacing,
        ingest=ingest,
        mix=mix,
        snapshots=snapshots,
        snapshot_maker=maker,
        service=service,
        server=server,
        training=training,
        publisher=publisher,
        checkpoints=checkpoints,
        best_and_milestones=best_and_milestones,
        telemetry=telemetry,
        evaluations=evaluations,
        writer=writer,
        reporter=reporter,
    )


def train(run: Run, stop: EndRequest, closing: contextlib.ExitStack) -> str:
    """Serves and learns until the run is done or has to stop. Returns why it failed, or ""."""
    state, training, publisher = run.state, run.training, run.publisher
    options, records, group = state.options, state.records, state.group
    if any(group.meet(options.empty_replay and state.resumed.replay_added > 0)):
        run.checkpoints.save(training.learner)  # no longer counts the replay moved aside
    publisher.publish(training.learner)
    run.snapshot_maker.make_if_due(training.learner)
    if run.server is not None:
        address = run.server.start()
        closing.callback(run.server.stop, _GRACE_SECONDS)
        state.directory.write("address", f"{from_anywhere(address)}\n")
        closing.callback(_remove, options.logdir / "address")
        _log.info("Serving %s on %s.", options.logdir, address)
        security = options.security
        if not is_local(options.listen) and security.insecure:
            if security.token_file is None and security.tls_client_ca is None:
                _log.warning("Insecure: whoever reaches %s may take part in this run.", address)
            elif security.tls_cert is None:
                _log.warning("Insecure: tokens and experience reach %s unencrypted.", address)
    run.telemetry.begin(training.learner.counters)
    for iteration in training.iterations(
        until=lambda: stop.is_set() or bool(records.quarantine.ends_run),
        may_learn=run.snapshot_maker.has_room,
        queued=lambda: run.service.queued,
    ):
        if run.server is not None:
            run.server.check()
        for part in iteration.provenance:
            records.accounts.settle(*part.account)
        publisher.take(iteration, has_time=not (run.mix.is_ready or run.ingest.depth))
        run.reporter.take(iteration)
        run.snapshot_maker.take(iteration)  # before the checkpoint, which counts these frames
        run.best_and_milestones.take(iteration)  # likewise
        run.checkpoints.take(iteration)
        # Last: with an exact lag of 0 nothing is under way until then, nor at the end.
        if run.pacing is not None and iteration.is_whole and not training.is_finished:
            publisher.wait()
            run.service.learned()
        if run.server is None:
            publisher.wait()  # so that which parameters are played with next is no chance
    publisher.wait()
    ends_run = "" if training.is_finished or stop.is_set() else records.quarantine.ends_run
    if ends_run:
        _log.error("Stopping: %s", ends_run)
    elif not training.is_finished:
        _log.info("Stopping: %s.", stop.cause if stop.is_set() else "a peer stops")
    return ends_run


def _remove(file: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # of a disk that has failed, too, which was said before
        file.unlink()


def finish(run: Run, stop: EndRequest, ends_run: str) -> int:
    """Saves what was learned, and ends with evaluators and actors. Returns the exit status."""
    state, training, snapshots = run.state, run.training, run.snapshots
    finished = training.is_finished
    if finished:
        run.ingest.close()  # whoever sends waits until the result is on disk
    elif run.server is not None:
        run.server.stop(_GRACE_SECONDS)
    run.mix.close()
    run.ingest.discard()
    state.records.accounts.drop_queued("run_finished" if finished else "learner_stop")
    if may_save := training.settle():
        run.publisher.publish(training.learner)  # the final parameters
        if finished:
            run.snapshot_maker.make_last(training.learner)
        run.best_and_milestones.consider(training.learner)
        run.checkpoints.save(training.learner)
    state.group.part()
    if finished and not may_save:
        finished, ends_run = False, "none of its variables may be saved"
    if finished:
        run.service.finish()
        snapshots.end()
        shutdown.await_evaluations(snapshots, run.check, stop)
    run.best_and_milestones.keep_evaluated()
    run.reporter.end_row(training.learner.counters, is_last=True)
    run.writer.drain()
    if finished:
        done = training.learner.counters
        counts = f"{done.frames:,} frames, {done.updates:,} updates, {done.episodes:,} episodes"
        _log.info("Finished: %s in %s s.", counts, f"{done.seconds:,.0f}")
        if not done.updates:
            _log.warning("Nothing was learned: replay was still warming up (mix.warm_up_unrolls).")
        run.evaluations.log()
        # Actors of its own are all here; others may be starting.
        own, roster = state.options.own_actors, state.records.roster

        def check() -> None:
            run.check()
            run.best_and_milestones.keep_evaluated()  # an evaluator may have been away

        shutdown.serve_on(
            state.options.when_finished,
            *(lambda: run.server is None or (own and not roster.actors()[0]), check, stop),
        )
        return 0
    if ends_run:
        return 1
    return state.options.stopped_status if stop.is_set() else STOPPED


def _guard(state: State, mix: Mix) -> Guard:
    records = state.records
    return Guard(
        *(state.options.logdir, mix, state.replay),
        blame=functools.partial(records.quarantine.blame, is_culprit=True),
        refused_outputs=records.refused_outputs,
        peers=state.group,
        blank=output_judge.blank(state.plan.unroll_spec),
    )


def _proofs(state: State) -> ReceiptProofs:
    key = load_key(state.options.logdir / log_directory.RECEIPT_KEY)
    return ReceiptProofs(key, state.incarnations.own)


def _inference(state: State, telemetry: Telemetry) -> Inference | None:
    """Returns what acts for callers of `Act`; None if the settings do not allow it."""
    if state.config.learner.inference != "auto":
        return None
    return Inference(
        *(state.share, state.plan.spaces, state.plan.unroll_spec),
        step=lambda: acting_step(state.config, state.plan.spaces),
        observe=lambda name, value: telemetry.sample(f"inference/{name}", value),
    )


def _writer(state: State, evaluations: Evaluations, service: LearnerService) -> Writer:
    """Returns the thread that writes telemetry."""
    config, options = state.config, state.options
    metrics = options.metrics_listen
    played = [task.environment for task in state.plan.played]
    slowest = next((x for x in played if not steps_together(x.id)), played[0])
    advice = pace.advice(slowest, config.actor.num_envs)
    if options.play is not None:
        advice = "without --serial, actors play while the learner learns"
    return Writer(
        *(evaluations, service.evaluators.reports),
        Prometheus(metrics) if metrics is not None else None,
        files=[TensorBoard(options.logdir), JsonLines(options.logdir)],
        own=custom_sinks.make(config, options.logdir),
        # After what may fail, as it takes the terminal; a live view would take it from a debugger.
        live=[
            Console(
                to_log=options.rows_to_log,
                advice=advice,
                phase=state.plan.phases.title,
                is_live=options.play is None,
            ),
        ],
        seconds_per_update=_ROW_SECONDS / _ROW_UPDATES if config.deterministic else None,
    )


def _demonstrations(
    config: Config, options: Options, plan: Plan, group: Peers
) -> Demonstrations | None:
    """Returns what the run's first phase learns from; None if it does not, or has ended."""
    if not plan.phases.begin_with_demonstrations:
        return None
    phase, updates = 1, 0
    if group.is_first and _resumes(options):
        counters = checkpoint.load(options.logdir).counters
        phase, updates = plan.phases.number(counters), counters.updates
    phase, updates = group.of_first((phase, updates))
    if phase > 1:
        return None
    share = peer_config.of_peer(config, group.index, group.count)
    try:
        return open_demonstrations(
            *(share, plan.phases.agent, plan.spaces, Layout(plan.unroll_spec)),
            seed=[share.seed, updates],  # another order than that before a restart
        )
    except ValueError as error:
        raise values.OptionError(str(error)) from error


def _teachers(config: Config, options: Options, group: Peers) -> list[Checkpoint]:
    """Returns the checkpoints of the run's teachers, the same for all peers."""
    found = teachers.read(config, options.logdir if _resumes(options) else None)
    if len(set(group.meet(teachers.digest(found)))) > 1:
        raise CheckpointError(
            f"The peers have read different teachers from {', '.join(config.teacher.logdirs)}: "
            "name a checkpoint that stays as it is, such as LOGDIR/best/NAME, or wait until these "
            "runs have ended."
        )
    return found


def _resumes(options: Options) -> bool:
    return not options.fresh and checkpoint.exists(options.logdir)


def _initial(options: Options) -> Checkpoint | None:
    """Returns what a new run starts from. `init_from` may be in a log directory to be moved."""
    if options.init_from is None:
        return None
    if not _resumes(options):
        return checkpoint.load(options.init_from)
    _log.info("Going on with the run in %s: --init-from is for new ones.", options.logdir)
    return None
