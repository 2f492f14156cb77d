"""`impala train`: runs a learner and its actors on this host."""

import dataclasses
import importlib.util
import logging
import os
import pathlib
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from impala.commands.flags import STOPPED, NumActors, RunFlags, print_config
from impala.config import layers, values
from impala.config.schema import Config
from impala.config.values import OptionError
from impala.parts import components, sections
from impala.parts.components import ENVIRONMENT, is_own
from impala.runtime import listen, process
from impala.runtime.failures import Shown
from impala.runtime.logs import log_to_stderr
from impala.runtime.supervisor import MOST_FAILURES, Exit, Program, Supervisor

_log = logging.getLogger("impala.train")

GRACE_SECONDS = 60.0  # the learner's last checkpoint may take a while
_WRONG = 2  # exit status of wrong usage
_AGAIN_SECONDS = 30.0  # before restarting actors that ended by themselves
_TENSORBOARD = "TensorBoard"
_LOOK = "look at the environment"
_MOST_ACTORS = 256  # as in `NumActors`
_LEARNER_CORES = 3  # that a learner with a GPU uses: the update, batches, messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(RunFlags):
    """Trains on this host: a learner and its actors, from one command.

    Exit status: 0 once the run has finished, 75 if it was stopped before its end (the same command
    without --fresh resumes it), 1 after a failure, 2 if the command line or an environment of your
    own is wrong, 130 if a second Ctrl-C has killed it.
    """

    num_actors: NumActors | Literal["auto"] = "auto"
    """Actor processes, each with actor.num_envs environments; auto: 1, but for Atari games on a
    host with a GPU one for each core but three."""
    evaluate: Literal["auto", "yes", "no"] = "auto"
    """Whether to run an evaluator; auto: if there are several tasks, evaluator.every_frames or
    every_seconds is set, or learner.snapshots is always, and never if learner.snapshots is
    never."""
    render: bool = False
    """Show the first actor's first environment in a window."""
    serial: bool = False
    """Train in this process and thread, with one actor and without gRPC: for breakpoints, prints
    and tracebacks in an environment, network or algorithm of one's own. Two such runs are equal."""
    tensorboard: bool = False
    """Start TensorBoard beside the run, at the first free port from 6006 on; it ends with the run.
    """


class Ended(NamedTuple):
    """How a run ended."""

    status: int  # the exit status of `impala train`
    why: str
    logdir: pathlib.Path


def train(command: Train) -> int:
    """Trains until the run ends. Returns the exit status."""
    if command.print_config:
        return print_config(command)
    process.outlive_readers(waits=False)
    log_to_stderr(command.log_format)
    if command.serial:
        return _train_here(command)
    return run(command, Supervisor(grace_seconds=GRACE_SECONDS)).status


def _train_here(command: Train) -> int:
    from impala.commands import serial

    try:
        status = serial.run(command).status
    except KeyboardInterrupt:
        traceback.print_exc()  # where the run was
        raise
    return process.ended(status)


def run(command: Train, context: Supervisor, output: Callable[[str], None] | None = None) -> Ended:
    """Supervises `impala learner` and `impala actor`, which communicate over a local socket.

    Args:
      command: what to train.
      context: supervises the processes.
      output: called with each line of the learner's output; None: it goes to this process's output.

    Raises:
      OptionError: the run cannot start; see `preflight.log_directory`. Or it is deterministic and
        has several actors, is to be evaluated without snapshots, or cannot be shown.
    """
    from impala.commands import preflight
    from impala.schedule import tasks

    check(command)
    logdir = preflight.log_directory(command)
    actors_log = logdir / "actors.log"
    if not command.fresh:  # or else the learner moves it aside first
        try:
            open(actors_log, "ab").close()
        except OSError as error:
            raise OptionError(f"{actors_log} cannot be written: {error.strerror}.") from error
    with (
        tempfile.TemporaryDirectory(
            prefix="impala-", dir=listen.temporary_directory()
        ) as temporary,
        context as supervisor,
    ):
        directory = pathlib.Path(temporary)
        settings = command.settings
        parts = {*sections.allowed(settings).names, settings.demonstrations.source}
        # Which parts teachers' networks have is not known here.
        environ = components.for_children(
            directory / "parts", None if settings.teacher.logdirs else parts
        )
        socket, failures = directory / "learner", Shown(directory / "failures")
        programs = _actor_programs(command, socket, actors_log, failures.path, environ)
        watch = _Watch(supervisor, programs, failures, actors_log)

        def begin() -> None:
            supervisor.start(_learner_program(command, logdir, directory, socket, output, environ))
            for program in programs.values():
                supervisor.start(program)
            if command.tensorboard:
                supervisor.start(_tensorboard_program(logdir, socket if command.fresh else None))
            _log.info("%s", _plan(command))
            _log.info(
                "Training %s for %s frames in %s; the actors write to %s.",
                *(_what(command.settings), f"{tasks.total_frames(command.settings):,}"),
                *(logdir, actors_log),
            )

        look_log = directory / "look.log"  # a fresh start moves what is in the log directory aside
        if _has_own_environment(command.settings):
            supervisor.start(_look_program(command, directory, look_log, failures.path, environ))
        else:
            begin()
        for end in supervisor.watch(failures.show):
            if end.name != _LOOK:
                watch.take(end)
            elif watch.lets_begin(end, look_log):
                begin()
    status, why = watch.result()
    return ended(command, status, why, logdir, supervisor.why)


def ended(
    command: Train, status: int, why: str, logdir: pathlib.Path, said: str | None = None
) -> Ended:
    """Logs how a run has ended, and how it goes on.

    Args:
      command: that has ended.
      status: its exit status.
      why: it has ended.
      logdir: its log directory.
      said: the reason for the log; None: `why`.
    """
    once = {"--fresh": command.fresh, "--empty-replay": command.empty_replay}
    without = " and ".join(flag for flag, is_on in once.items() if is_on)
    same = f"The same command without {without}" if without else "The same command"
    hint = f" {same} goes on with the run." if status == STOPPED else ""
    level = logging.INFO if status in (0, STOPPED) else logging.ERROR
    _log.log(level, "Ended with status %d: %s.%s", status, said or why, hint)
    return Ended(status, why, logdir)


class _Watch:
    """Decides what the end of each program means for the run."""

    def __init__(
        self,
        supervisor: Supervisor,
        programs: Mapping[str, Program],
        failures: Shown,
        actors_log: pathlib.Path,
    ) -> None:
        self._supervisor = supervisor
        self._programs = programs  # actors and evaluator, by name
        self._failures = failures
        self._actors_log = actors_log
        self._learner_status = STOPPED
        self._cause = ""  # why the run has failed without the learner
        self._status = 1  # of such a run

    def lets_begin(self, look: Exit, log: pathlib.Path) -> bool:
        """Returns whether training begins after a look at the environment, or stops the run."""
        refused = "the environment fails before training"
        if look.status == _WRONG and self._failures.last:
            self._cause, self._status = f"{refused}: {self._failures.last}", _WRONG
            self._supervisor.stop(refused)
        elif look.status not in (0, _WRONG) and not self._supervisor.stopping:
            _log.warning(
                "The %s ended with status %d; training begins nevertheless. It said: %s",
                *(look.name, look.status, log.read_text("utf-8", "replace").strip() or "nothing"),
            )
        return not self._supervisor.stopping

    def take(self, end: Exit) -> None:
        """Logs an end; restarts the program, or stops the run."""
        if end.name == "learner":
            self._learner_status = end.status
            ended = f"the learner ended with status {end.status}"
            self._supervisor.stop(ended if end.status else "training finished")
        elif end.name == _TENSORBOARD:
            if not self._supervisor.stopping:
                _log.warning("TensorBoard ended with status %d; the run goes on.", end.status)
        elif end.restart_seconds is not None and not end.is_hopeless:
            _log.warning(
                "The %s ended with status %d (see %s); starting again in %.0f s.",
                *(end.name, end.status, self._actors_log, end.restart_seconds),
            )
        elif end.status == 0:  # by request, unless the learner has finished too
            self._supervisor.start(self._programs[end.name], delay_seconds=_AGAIN_SECONDS)
        elif not self._supervisor.stopping:
            failing, known = f"the {end.name} keeps failing", ""
            if end.name == "actors":
                failing = "the actors keep failing"
                known = f": {self._failures.last or 'none has said why'}"
            self._cause = f"{failing}{known} (see {self._actors_log})"
            _log.error("T%s. Stopping the run.", self._cause[1:])
            self._supervisor.stop(failing)

    def result(self) -> tuple[int, str]:
        """Returns the exit status of the run, and why it ended."""
        supervisor, status = self._supervisor, self._learner_status
        if supervisor.interrupted and status == 128 + signal.SIGTERM:
            status = STOPPED  # it was killed before it began
        if supervisor.killed:
            status = 128 + signal.SIGINT
        elif self._cause:
            status = self._status
        return status, self._cause or supervisor.why


def check(command: Train) -> None:
    """Raises OptionError if flags contradict each other, or cannot be fulfilled here."""
    settings, actors = command.settings, num_actors(command)
    if command.render:
        _check_window(settings)
    if settings.deterministic and actors > 1:
        raise OptionError(
            f"num_actors is {actors}, but which of several actors joins first is left to chance: a "
            "deterministic run has one actor."
        )
    if command.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise OptionError(
            "--tensorboard needs TensorBoard, which this Python does not have: leave the flag out, "
            "or install the package tensorboard."
        )
    if command.evaluate == "yes" and settings.learner.snapshots == "never":
        raise OptionError(
            "learner.snapshots is never, but evaluate is yes: evaluators need snapshots. Leave one "
            "of the two out."
        )


def _check_window(settings: Config) -> None:
    """Makes the environments that actors are going to show, except custom ones.

    Raises:
      OptionError: one cannot be shown in a window.
    """
    from impala import environments
    from impala.schedule import tasks

    for task in tasks.make(settings.environment, settings.tasks):
        if not is_own(task.environment.id):
            try:
                environments.make(task.environment, 1, render_mode="human").close()
            except ValueError as error:
                raise OptionError(f"--render: {error}") from error


def _what(settings: Config) -> str:
    """Returns the algorithms and environments of a run, as text."""
    algorithms = settings.phases or (settings.algorithm,)
    environments = settings.tasks.environments or (settings.environment.id,)
    return f"{', '.join(algorithms)} on {', '.join(environments)}"


def _has_own_environment(settings: Config) -> bool:
    """Returns whether something is played that is not built in, and so may have mistakes."""
    from impala.schedule import tasks

    played = [task.environment.id for task in tasks.make(settings.environment, settings.tasks)]
    return any(is_own(id) and id not in ENVIRONMENT.built_in for id in played)


def _look_program(
    command: Train,
    directory: pathlib.Path,
    log: pathlib.Path,
    failures: pathlib.Path,
    environ: Mapping[str, str],
) -> Program:
    """Returns the program that plays the environment before anything else is started.

    It plays as many steps as an unroll has: a mistake among them would end every actor.
    """
    settings = command.settings
    file = directory / "look.yaml"
    file.write_text(values.to_yaml(settings), encoding="utf-8")
    return Program(
        name=_LOOK,
        command=[
            *(*process.IMPALA, "check", "cartpole", "--config", str(file), "--no-network"),
            *("--steps", str(settings.learner.unroll_length), "--failures", str(failures)),
        ],
        environ={**_without_settings(), **environ},
        log=log,
    )


def _without_settings() -> dict[str, str | None]:
    """Returns no values for the variables of settings, which a file has already."""
    return {name: None for name in os.environ if name.startswith(layers.ENVIRONMENT_PREFIX)}


def _learner_program(
    command: Train,
    logdir: pathlib.Path,
    directory: pathlib.Path,
    socket: pathlib.Path,
    output: Callable[[str], None] | None,
    environ: Mapping[str, str],
) -> Program:
    """Returns the learner's program, with the settings in a file in `directory`."""
    switches = {
        "--fresh": command.fresh,
        "--change-settings": command.change_settings,
        "--empty-replay": command.empty_replay,
    }
    words = [name for name, is_on in switches.items() if is_on]
    if command.init_from is not None:
        words.append(f"--init-from={command.init_from}")
    file = directory / "config.yaml"
    file.write_text(values.to_yaml(command.settings), encoding="utf-8")
    return Program(
        name="learner",
        command=[
            *[*process.IMPALA, "learner", command.preset, "--config", str(file), *words],
            *[f"--logdir={logdir}", "--listen", f"unix:{socket}"],
            *["--log-format", command.log_format, "--stopped-status", str(STOPPED)],
            *["--own-actors", "--own-evaluator", "yes" if is_evaluated(command) else "no"],
        ],
        environ={**_without_settings(), **environ},
        output=output,
    )


def num_actors(command: Train) -> int:
    """Returns how many actors are started.

    On a CPU the learner is the limit, and small environments fill it from one core.
    """
    if command.num_actors != "auto":
        return command.num_actors
    settings = command.settings
    played = settings.tasks.environments or (settings.environment.id,)
    is_atari = all(name.startswith("ALE/") for name in played)
    if settings.deterministic or not is_atari or not process.has_gpu():
        return 1
    return min(_MOST_ACTORS, max(1, process.available_cores() - _LEARNER_CORES))


def _plan(command: Train) -> str:
    """Returns what of this host is used, and how, as a sentence."""
    settings, actors, cores = command.settings, num_actors(command), process.available_cores()
    mix = settings.mix
    batch = [f"{mix.fresh} fresh"] if mix.learn_from_fresh else []
    batch += [f"{mix.replayed} replayed"] if mix.replayed else []
    return (
        f"{'A GPU' if process.has_gpu() else 'No GPU'}, {cores} core{'s'[: cores != 1]}: {actors} "
        f"actor{'s'[: actors != 1]} of {settings.actor.num_envs} environments, batches of "
        f"{' and '.join(batch)} unrolls of {settings.learner.unroll_length} steps."
    )


def _tensorboard_program(logdir: pathlib.Path, after: pathlib.Path | None) -> Program:
    """Returns TensorBoard's program, which logs its address and nothing else."""

    def output(line: str) -> None:
        if " at http" in line:
            _log.info("%s", line.partition(" (Press")[0])

    return Program(
        name=_TENSORBOARD,
        command=[sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir / "tensorboard")],
        environ={"CUDA_VISIBLE_DEVICES": ""},  # the GPU is the learner's
        output=output,
        after=after,
    )


def is_evaluated(command: Train) -> bool:
    """Returns whether the run has an evaluator."""
    settings = command.settings
    several = len(settings.tasks.environments) > 1
    has_interval = settings.evaluator.every_frames > 0 or settings.evaluator.every_seconds > 0.0
    wanted = {"always": True, "never": False, "auto": several or has_interval}
    return command.evaluate == "yes" or (
        command.evaluate == "auto" and wanted[settings.learner.snapshots]
    )


def _actor_programs(
    command: Train,
    socket: pathlib.Path,
    log: pathlib.Path,
    failures: pathlib.Path,
    environ: Mapping[str, str],
) -> dict[str, Program]:
    """Returns the other programs, by name."""
    several = num_actors(command) > 1
    flags = {"actors": ["--num-actors", str(num_actors(command)), "--name", "actor"]}
    if several:  # which are started again by their own supervisor, until it gives up
        flags["actors"] += ["--give-up-after", str(MOST_FAILURES)]
    common = ["--log-format", command.log_format, "--failures", str(failures)]
    if not command.settings.learner.bfloat16:
        common.append("--no-bfloat16")
    if command.render:
        flags["actors"].append("--render")
    if is_evaluated(command):
        flags["evaluator"] = ["--role", "evaluator", "--name", "evaluator"]
    if foreign := sections.allowed(command.settings, of_actors=True).names:
        common += [word for name in foreign for word in ("--allow", name)]
    return {
        name: Program(
            name=name,
            command=[*process.IMPALA, "actor", "--learner", f"unix:{socket}", *words, *common],
            restart=not (several and name == "actors"),
            log=log,
            environ=environ,
            # A fresh start first moves the contents of the log directory aside.
            after=socket if command.fresh else None,
        )
        for name, words in flags.items()
    }
