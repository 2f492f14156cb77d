"""The learner service, wired from top to bottom: composition root of this package."""

import contextlib
import functools
import json
import logging
import math
import pathlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tree

from impala import build
from impala.config import parts, values
from impala.config.schema import Config, LearnerConfig
from impala.finite import NotFiniteError
from impala.logdir import checkpoint
from impala.logdir import directory as log_directory
from impala.logdir.checkpoint import Checkpoint, CheckpointError, Counters
from impala.logdir.directory import LogDirectory, StorageError
from impala.runtime import process
from impala.runtime.listen import is_local
from impala.runtime.security import ServerSecurity
from impala.runtime.signals import EndRequest
from impala.schedule import phases, tasks
from impala.types import Parameters, StepType, Unroll
from learner.data.ingest import Ingest, wire_specs
from learner.data.mix import Mix, Prepared
from learner.data.replay import Replay
from learner.data.storage import Disk, Memory, Store
from learner.front.accounts import Accounts
from learner.front.bounds import message_bounds
from learner.front.incarnations import Incarnations
from learner.front.info_names import InfoNames
from learner.front.quarantine import Quarantine
from learner.front.receipts import ReceiptProofs, load_key
from learner.front.records import Records
from learner.front.refused_outputs import RefusedOutputs
from learner.front.roster import Roster
from learner.front.server import Server
from learner.front.service import LearnerService, Lineage, Terms
from learner.telemetry.console import Console
from learner.telemetry.evaluations import Evaluations
from learner.telemetry.files import JsonLines, TensorBoard
from learner.telemetry.gauges import Gauges
from learner.telemetry.prometheus import Prometheus
from learner.telemetry.telemetry import Telemetry
from learner.telemetry.writer import Writer
from learner.update.guard import Guard
from learner.update.learner import Learner, Update
from protos import codec

_log = logging.getLogger(__name__)

_NO_SECURITY = ServerSecurity()
_FAREWELL_SECONDS = 5.0  # how long actors may take to hear that training has finished
_LAST_EVALUATION_SECONDS = 120.0  # how long an evaluator may take for a task at the end
_GRACE_SECONDS = 2.0  # how long calls in progress may take when the learner stops


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
    security: ServerSecurity = _NO_SECURITY,
    health_listen: str | None = None,
    metrics_listen: str | None = None,
    rows_to_log: bool = False,
) -> int:
    """Serves a fleet of actors and learns until the run is done, or SIGTERM, SIGINT or SIGHUP.

    Args:
      config: the run. If `logdir` has a checkpoint, the run goes on from it.
      logdir: where checkpoints and telemetry go.
      listen: HOST:PORT (port 0: any free one) or unix:PATH.
      fresh: start over; an earlier run in `logdir` is moved aside.
      empty_replay: move only the replay aside.
      init_from: log directory of another run, whose agent a new run starts from as far as it fits.
      when_finished: "exit", or "idle" to go on serving the final parameters.
      stopped_status: what to return for a run that was stopped before its end.
      security: what is asked of callers.
      health_listen: HOST:PORT where health alone is served, in plain text.
      metrics_listen: HOST:PORT where Prometheus metrics are served.
      rows_to_log: tell the log how the run is doing, instead of standard output.

    Returns:
      The exit status: 0 after a finished run, `stopped_status` after a stopped one, 1 after a
      failure.

    Raises:
      LogDirectoryError: `logdir` cannot be written, or another learner writes it.
      CheckpointError: the checkpoint in `logdir` does not fit `config`, or `init_from` has none.
      StorageError: the replay in `logdir` is missing or damaged, or does not fit `config`.
      OptionError: there is no such environment, or the agent cannot play it.
      OSError: an address is none or cannot be bound.
      SecurityError: the files of `security` cannot be used, or are not enough for the addresses.
    """
    process.tune_malloc()
    process.allow_many_files()
    _set_up_tensorflow(config.learner)
    security.check(listen, health=health_listen, metrics=metrics_listen)
    initial = checkpoint.load(init_from) if init_from is not None else None
    with EndRequest() as stop, LogDirectory(logdir, fresh) as directory:
        with log_directory.opening(logdir):
            run = _Run(config, directory, stop, empty_replay, initial, metrics_listen, rows_to_log)
        try:
            run.serve(listen, security, health_listen)
            for prepared, update in run.updates():
                run.report(prepared, update)
            finished = run.end(when_finished)
        except (NotFiniteError, StorageError) as error:
            _log.error("%s", error)  # and no checkpoint: the variables are bad, or the disk full
            return 1
        finally:
            run.close()
    return 0 if finished else stopped_status


class _Run:
    """The parts of a learner and how they are joined. Lives as long as `run_learner`."""

    def __init__(
        self,
        config: Config,
        directory: LogDirectory,
        stop: EndRequest,
        empty_replay: bool,
        initial: Checkpoint | None,
        metrics_listen: str | None,
        rows_to_log: bool,
    ):
        self._config = config
        self._directory = directory
        self._logdir = logdir = directory.path
        self._stop = stop
        self._incarnation = secrets.randbits(62) + 1

        try:
            self._tasks = tasks.make(config.environment, config.tasks)
            schedule = tasks.Schedule(config)
            self._phases = phases.make(config)
            self._spaces = spaces = build.spaces(self._tasks)
            agent = build.agent(config.agent, *spaces, seed=config.seed, own=parts.found(config))
            for phase in self._phases:  # a later one shall not fail hours from now
                build.algorithm(phase.algorithm, config, agent)
        except ValueError as error:
            raise values.OptionError(str(error)) from error
        self._agent = agent
        self._accounts = Accounts(max_in_flight=config.learner.max_in_flight)
        unroll_spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
        self._unknown: Mapping[str, Any] = {}  # settings of a newer version, in the checkpoint
        self._learner, self._replay_added = self._resume(initial)
        if empty_replay:
            directory.move_replay_aside()
        self._replay = _open_replay(config, unroll_spec, directory, self._replay_added)
        self._check_replay(empty_replay)
        directory.write("config.yaml", values.to_yaml(config, self._unknown))

        for_actors = {
            name: values.to_dict(getattr(config, name))
            for name in ("environment", "tasks", "agent", "actor", "evaluator")
        } | parts.for_actors(config)
        if not config.evaluator.every_frames:
            for_actors["evaluator"]["every_frames"] = max(1, tasks.total_frames(config) // 50)
        self._incarnations = Incarnations(logdir / "incarnations.json", self._incarnation)
        self._ingest = Ingest(config.learner.queue_unrolls)
        self._records = Records(
            self._accounts,
            Roster(),
            Quarantine(config.quarantine),
            InfoNames(config.limits.info_names),
            refused_outputs := RefusedOutputs(),
        )
        terms = Terms(
            unroll_spec,
            codec.specs(agent.variables),
            json.dumps(for_actors, sort_keys=True),
            seed=config.seed,
            max_envs_per_message=config.learner.max_envs_per_message,
            max_in_flight=config.learner.max_in_flight,
            bounds=message_bounds(config, self._tasks, spaces[1]),
        )
        proofs = ReceiptProofs(load_key(logdir / "receipt.key"), self._incarnation)
        lineage = Lineage(self._incarnation, self._incarnations.earlier, proofs)
        self._service = LearnerService(terms, lineage, self._records, self._ingest, schedule)
        self._mix = Mix(
            self._ingest, config.mix, self._replay, version=self._learner.counters.updates
        )
        self._guard = Guard(
            config.guard,
            logdir,
            self._mix,
            self._replay,
            blame=self._records.quarantine.blame,
            refused_outputs=refused_outputs,
        )
        self._server: Server | None = None
        self._telemetry = Telemetry()
        names = [task.name for task in self._tasks]
        self._evaluations = Evaluations(logdir, config, names, self._incarnation)
        self._writer = Writer(
            self._evaluations,
            self._service.evaluations,
            Prometheus(metrics_listen) if metrics_listen is not None else None,
            live=[Console(tasks.total_frames(config), to_log=rows_to_log)],
            files=[TensorBoard(logdir), JsonLines(logdir)],
        )
        self._gauges = Gauges(self._records, self._ingest, self._replay, self._writer, self._guard)
        self._saved_counters = self._learner.counters
        self._due = checkpoint.Due(config.learner.checkpoint_seconds, checkpoint.exists(logdir))
        if empty_replay and self._replay_added:
            self._save()  # so that the checkpoint no longer counts what was moved aside

    def serve(self, listen: str, security: ServerSecurity, health_listen: str | None) -> None:
        """Lets actors in."""
        self._publish()
        server = Server(
            self._service,
            listen,
            security,
            health_listen,
            observe=lambda method, seconds: self._telemetry.sample(
                f"rpc_seconds/{method}", seconds
            ),
            guarded=True,
        )
        address = server.start()
        self._server = server
        self._directory.write("address", f"{address}\n")
        _log.info("Serving %s on %s.", self._logdir, address)
        if not is_local(listen) and security.insecure:
            _log.warning("Insecure: whoever reaches %s may take part in this run.", address)

    def updates(self) -> Iterator[tuple[Prepared, Update | None]]:
        """Learns until the run is done or stopped; no update while replay warms up."""
        last = time.monotonic()
        self._telemetry.begin(self._learner.counters)
        while not self._stop.is_set() and not self._is_finished():
            assert self._server is not None
            self._server.check()
            waiting = time.monotonic()
            prepared = self._mix.get(timeout=0.5)
            now = time.monotonic()
            self._telemetry.waited(now - waiting)
            if self._guard.judge_outputs(self._learner):
                self._publish()
            if prepared is None:
                self._report_if_due()
                self._save_if_due()
                continue
            prepared, update = self._guard.learn(self._learner, prepared)
            if update is not None:
                self._telemetry.sample("learner/update_seconds", time.monotonic() - now)
            self._learner.count(
                unrolls=prepared.unrolls,
                frames=prepared.frames,
                steps=prepared.steps,
                seconds=now - last,
            )
            last = now
            for part in prepared.provenance:
                self._accounts.settle(*part)
            if self._learner.progress >= 1.0:
                self._next_phase()
            self._publish()
            yield prepared, update

    def report(self, prepared: Prepared, update: Update | None) -> None:
        """Takes note of an update; a row of telemetry and a checkpoint when they are due."""
        telemetry = self._telemetry
        if prepared.batch is not None and update is not None:
            self._due.updated()
            for name, value in update.metrics.items():
                telemetry.mean(name, value)
            telemetry.mean("learning_rate", update.learning_rate)
            before = self._learner.counters.updates - 1  # the version that the batch moved
            versions = prepared.batch.unroll.parameter_version
            # After a restart, actors may still act with a version ahead of the checkpoint's.
            is_replay, unroll = prepared.batch.is_replay, prepared.batch.unroll
            telemetry.policy_lag(np.maximum(0, before - versions), is_replay)
            fresh = (unroll.timestep.step_type[1:] != StepType.FIRST) & ~is_replay
            actions = tree.map_structure(lambda x: x[1:][fresh], unroll.output.action)
            telemetry.newest("action", actions)
            for name, values in update.histograms.items():
                telemetry.newest(name, values[unroll.timestep.step_type[1:] != StepType.FIRST])
        for arrival in prepared.arrivals:
            telemetry.episodes(self._tasks[arrival.task].name, arrival.episodes)
            telemetry.actor(arrival.elapsed_seconds, arrival.waited_seconds)
            telemetry.sample("ingest/seconds", time.monotonic() - arrival.received)
        self._report_if_due()
        self._save_if_due()

    def end(self, when_finished: str) -> bool:
        """Leaves a checkpoint; a run that is done also tells its actors. Returns if it is done."""
        assert self._server is not None
        finished = self._is_finished()
        if self._stop.is_set():
            _log.info("Stopping: %s.", self._stop.cause)
        if finished:
            self._service.finish()
        else:
            self._server.stop(_GRACE_SECONDS)
        self._accounts.drop_queued("run_finished" if finished else "learner_stop")
        if self._guard.settle(self._learner):
            self._publish()  # what an evaluator is to play last, if they have gone back
            self._save()
        if finished:
            self._await_last_evaluation()
        self._write_row(is_last=True)
        self._writer.drain()
        if finished:
            _log.info("Finished: %s.", self._learner.counters)
            for task, standing in self._evaluations.standing.items():
                numbers = ", ".join(f"{name} {n:.2f}" for name, n in standing._asdict().items())
                _log.info("%s: %s.", task, numbers)
            end = math.inf if when_finished == "idle" else time.monotonic() + _FAREWELL_SECONDS
            while time.monotonic() < end and not self._stop.wait(0.5):
                self._server.check()
                self._report_if_due()
        return finished

    def _await_last_evaluation(self) -> None:
        """Lets an evaluator, if there is one, play every task with the final parameters."""
        if not self._service.has_evaluators:
            return
        assert self._server is not None
        missing = {task.name for task in self._tasks}
        deadline = time.monotonic() + _LAST_EVALUATION_SECONDS
        while missing and not self._stop.wait(0.2) and time.monotonic() < deadline:
            self._server.check()
            self._writer.check()
            version = self._learner.counters.updates
            if missing & (played := self._evaluations.played(self._incarnation, version)):
                missing -= played
                deadline = time.monotonic() + _LAST_EVALUATION_SECONDS
        if missing:
            _log.warning("No evaluation of the final parameters on %s.", ", ".join(missing))

    def close(self) -> None:
        """Ends server and threads, also after a failure."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._writer.close)
            if self._replay is not None:
                last_first.callback(self._replay.close)
            last_first.callback(self._mix.close)
            last_first.callback(self._ingest.close)
            if self._server is not None:
                last_first.callback(self._server.stop, _GRACE_SECONDS)

    def _is_finished(self) -> bool:
        return self._learner.counters.frames >= self._phases[-1].end

    def _learner_at(self, counters: Counters) -> Learner:
        """Learns what it is time for."""
        phase = phases.current(self._phases, counters.frames)
        algorithm = build.algorithm(phase.algorithm, self._config, self._agent)
        return Learner(algorithm, self._config, phase, counters)

    def _next_phase(self) -> None:
        """Goes on with the next algorithm, if there is one: the agent stays, the rest is new."""
        if not self._is_finished():
            before, is_safe = self._learner, self._guard.settle(self._learner)
            self._learner = self._learner_at(before.counters)
            self._learner.last_good = before.last_good
            frames, algorithm = self._learner.counters.frames, self._learner.phase.algorithm
            _log.info("From %s frames on: %s.", f"{frames:,}", algorithm)
            if is_safe:
                self._save()  # a checkpoint holds the variables of its own phase

    def _resume(self, initial: Checkpoint | None) -> tuple[Learner, int]:
        """A learner as in the newest checkpoint, if there is one, and how much replay that counts.

        A new run starts from what fits of the agent of another run, if asked to.
        """
        checkpoint.remove_leftovers(self._logdir)
        if not checkpoint.exists(self._logdir):
            if initial is not None:
                for line in checkpoint.initialise(self._agent.variables, initial):
                    _log.info("%s", line)
            return self._learner_at(Counters()), 0
        if initial is not None:
            _log.info("Going on with the run in %s: --init-from is for new ones.", self._logdir)
        saved = checkpoint.load(self._logdir)
        self._unknown = saved.unknown
        learner = self._learner_at(saved.counters)
        learner.restore(saved)
        try:
            self._accounts.restore(saved.accounts)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The accounts in the checkpoint of {self._logdir} make no sense ({error!r}). "
                "Another version of impala may have written it; start over with --fresh."
            ) from error
        _log.info("Resumed %s at %s.", self._logdir, saved.counters)
        for change in values.differences(saved.config, self._config):
            _log.info("Changed since that checkpoint: %s.", change)
        return learner, saved.replay_added

    def _check_replay(self, may_be_lost: bool) -> None:
        """Compares replay with what the checkpoint counted; after a crash it holds more."""
        if self._replay is None:
            return
        counted, added = self._replay_added, self._replay.summary().added
        if added >= counted:
            return
        found = f"The checkpoint counts {counted:,} unrolls added to replay, found are {added:,}."
        if not may_be_lost and self._config.replay.storage == "disk":
            raise StorageError(
                f"{found} Restore {self._logdir / 'replay'}, or go on with an empty one with "
                "--empty-replay."
            )
        _log.warning("%s Going on with those.", found)

    def _progress(self) -> float:
        return min(1.0, self._learner.counters.frames / self._phases[-1].end)

    def _publish(self) -> None:
        counters = self._learner.counters
        self._incarnations.reserve(counters.updates)
        self._service.publish(
            Parameters(
                incarnation=self._incarnation,
                version=counters.updates,
                progress=self._progress(),
                frames=counters.frames,
                values=self._learner.agent_values(),
            ),
            skipped_updates=self._guard.skipped_updates,
            rollbacks=self._guard.rollbacks,
        )

    def _save_if_due(self) -> None:
        """Also while nothing comes in; but then not the same thing twice."""
        has_moved = self._learner.counters != self._saved_counters
        if self._due.reached and has_moved and not self._guard.in_doubt:
            self._save()

    def _save(self) -> None:
        if self._replay is not None:
            self._replay_added = self._replay.commit()
        saved = Checkpoint(
            self._config,
            self._learner.counters,
            self._learner.variables(),
            self._accounts.state(),
            self._replay_added,
            self._learner.phase.algorithm,
            self._spaces,
            self._unknown,
        )
        path = checkpoint.save(self._logdir, saved, self._config.learner.checkpoints_kept)
        self._due.saved()
        self._saved_counters = saved.counters
        _log.info("Checkpoint %s at %s frames.", path, f"{saved.counters.frames:,}")

    def _report_if_due(self) -> None:
        if self._telemetry.due(self._config.learner.log_seconds):
            self._write_row()

    def _write_row(self, is_last: bool = False) -> None:
        """Ends an interval of telemetry."""
        assert self._server is not None
        gauges = {
            "progress": self._progress(),
            "checkpoint/age_seconds": self._due.age,
            **{f"refused/{reason}": n for reason, n in self._server.refusals().items()},
        }
        interval = self._telemetry.end(self._learner.counters, gauges | self._gauges.read())
        self._writer.put(interval, is_last)


def _open_replay(
    config: Config, unroll_spec: Unroll, directory: LogDirectory, counted: int
) -> Replay | None:
    """The replay, if the mix has a use for it; the checkpoint counts so many unrolls in it."""
    if not config.mix.replayed:
        return None
    store: Store
    if config.replay.storage == "disk":
        specs, _ = wire_specs(unroll_spec)
        identity = f"rule {config.replay.rule}, unrolls {codec.fingerprint(specs, (), '')}"
        move_aside = functools.partial(directory.move_replay_aside, "damaged")
        goes_on = config.replay.on_damage == "empty"
        store = Disk(directory.replay, identity, move_aside if goes_on else None, counted)
    else:
        store = Memory()
    replay = Replay(
        unroll_spec,
        store,
        config.replay.rule,
        capacity_frames=config.replay.capacity_frames,
        capacity_bytes=config.replay.capacity_bytes or None,
        seed=config.seed,
    )
    _log.info("Replay holds %s of %s unrolls.", f"{len(replay):,}", f"{replay.summary().added:,}")
    return replay


def _set_up_tensorflow(config: LearnerConfig) -> None:
    """Takes only as much of a GPU's memory as is needed, and as many threads as configured."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
        _log.info("Learning on %s.", gpu.name)
    process.set_threads(config.threads or process.available_cores())
    if config.bfloat16:
        kind = "bfloat16" if process.use_bfloat16() else "float32: this CPU has no bfloat16"
        _log.info("Convolutions and products are computed in %s.", kind)
