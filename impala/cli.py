"""The `impala` command: a dataclass per command, and the function that runs it.

A composition root: it imports from everywhere and nothing imports it. What a command needs is
imported when it runs, so that help and typos are answered without loading TensorFlow.
"""

import contextlib
import dataclasses
import io
import json
import logging
import os
import pathlib
import signal
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
import tyro
from tyro.conf import Positional, arg

from impala import options, process
from impala.configs import PRESETS, Config, Range
from impala.credentials import SecurityError
from impala.printable import printable
from impala.security import ClientSecurity, ServerSecurity
from impala.supervisor import Program, Supervisor

if TYPE_CHECKING:
    from learner.player import Player

T = TypeVar("T")

_IMPALA = (sys.executable, "-m", "impala")
_ADDRESS = "127.0.0.1:50051"
_STOPPED = os.EX_TEMPFAIL  # exit status of a run that was stopped: the same command goes on
_GRACE_SECONDS = 60.0  # the learner's last checkpoint may take a while
_AGAIN_SECONDS = 30.0  # before actors that ended by themselves are started again

WhenFinished = Literal["exit", "idle"]
LogFormat = Literal["text", "json"]
Port = Annotated[int, Range(0, 65535)]
NumActors = Annotated[int, Range(1, 256)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    preset: Positional[Annotated[str, arg(metavar="{" + ",".join(PRESETS) + "}")]]
    """What the settings below start from: see impala presets."""
    config: pathlib.Path | None = None
    """YAML file of settings, put over the preset. Over it come environment variables such as
    IMPALA_OPTIMISER__LEARNING_RATE=3e-4, and over them the flags."""
    print_config: bool = False
    """Print the settings in force as YAML, for --config, and do nothing else."""
    logdir: pathlib.Path | None = None
    """Where checkpoints and telemetry go, and where a run is resumed from. None: runs/PRESET."""
    fresh: bool = False
    """Start over: an earlier run in the log directory is moved aside."""
    empty_replay: bool = False
    """Go on with an empty replay: an earlier one in the log directory is moved aside."""
    init_from: pathlib.Path | None = None
    """Start a new run with the agent of another one, whose log directory this is, as far as it
    fits. A run that is resumed does not look at it."""
    log_format: LogFormat = "text"
    """text for people, or json: an object in each line."""
    settings: Annotated[Config, arg(name="")] = dataclasses.field(default_factory=Config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(_Run):
    """Trains on this host: a learner and its actors, from one command.

    Exit status: 0 once the run has finished, 75 if it was stopped before its end (the same command
    goes on from its checkpoint), 1 after a failure, 2 if this command line or what it names is
    wrong, 130 if a second Ctrl-C has killed it.
    """

    num_actors: NumActors = 1
    """Actor processes, each with actor.num_envs environments."""
    evaluate: Literal["auto", "yes", "no"] = "auto"
    """Whether an evaluator plays beside the actors; auto: if there are several tasks."""
    render: bool = False
    """Show the first actor's first environment in a window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner(_Run):
    """Serves a fleet of actors and learns from what they send."""

    listen: str = _ADDRESS
    """HOST:PORT, or unix:PATH. Give 0.0.0.0:PORT to be reached from other hosts."""
    when_finished: WhenFinished = "exit"
    """exit, or idle: go on serving the final parameters."""
    stopped_status: Annotated[int, Range(0, 125)] = 0
    """Exit status if a signal stops the run before its end. 0 suits Kubernetes and systemd; give 75
    if a script must tell a stopped run from a finished one."""
    health_listen: str | None = None
    """HOST:PORT where gRPC health alone is served, in plain text, for probes that speak no TLS."""
    metrics_listen: str | None = None
    """HOST:PORT where Prometheus metrics are served."""
    security: ServerSecurity = dataclasses.field(default_factory=ServerSecurity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Actor:
    """Acts for a learner, which says everything an actor needs to know."""

    learner: str = _ADDRESS
    """HOST:PORT of the learner, or unix:PATH."""
    num_actors: NumActors = 1
    """Actor processes on this host."""
    num_envs: Annotated[int, Range(0, 4096)] = 0
    """Environments per process; 0: what the learner says."""
    name: str = ""
    """Unique in the fleet; the process's index is added when there are several. Empty: made from
    the host's name and the process id."""
    index: int | None = None
    """Of this process among those started together, which give it themselves."""
    render: bool = False
    """Show the first environment in a window."""
    when_finished: WhenFinished = "exit"
    """exit, or idle: wait for the learner to start another run."""
    reconnect_timeout: Annotated[float, Range(0.0)] = 0.0
    """Seconds without a learner after which to give up; 0: wait for ever."""
    role: Literal["actor", "evaluator"] = "actor"
    """actor, or evaluator: play whole episodes with frozen parameters and report their returns."""
    metrics_listen: str | None = None
    """HOST:PORT where Prometheus metrics are served; of several processes each has a port of its
    own, this one and those after it."""
    log_format: LogFormat = "text"
    """text for people, or json: an object in each line."""
    security: ClientSecurity = dataclasses.field(default_factory=ClientSecurity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Shows how a learner's run and its fleet are doing."""

    learner: Positional[Annotated[str, arg(metavar="HOST:PORT")]] = _ADDRESS
    """The learner's address, or unix:PATH."""
    watch: Annotated[float, Range(0.0)] = 0.0
    """Show it again every so many seconds, until Ctrl-C; 0: once."""
    json: bool = False
    """Print it as JSON, once; counts are strings, as protobuf writes 64-bit integers."""
    security: ClientSecurity = dataclasses.field(default_factory=ClientSecurity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Plays episodes with a checkpoint's agent and tells their returns."""

    logdir: Positional[Annotated[pathlib.Path, arg(metavar="LOGDIR")]]
    """Log directory of a run that has written a checkpoint."""
    episodes: Annotated[int, Range(1)] = 100
    """Episodes to play."""
    task: int = 0
    """Which of the run's tasks to play, counted from 0."""
    greedy: bool = False
    """The most likely action instead of a sampled one."""
    num_envs: Annotated[int, Range(1, 4096)] = 32
    """Environments that step together (never more than episodes)."""
    json: pathlib.Path | None = None
    """Also write the summary and every episode to this file."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of environments and actions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Records an episode that a checkpoint's agent plays, as a video file."""

    logdir: Positional[Annotated[pathlib.Path, arg(metavar="LOGDIR")]]
    """Log directory of a run that has written a checkpoint."""
    output: pathlib.Path | None = None
    """A .gif file; .mp4 needs imageio with its ffmpeg plugin. None: LOGDIR/episode.gif."""
    task: int = 0
    """Which of the run's tasks to play, counted from 0."""
    greedy: bool = False
    """The most likely action instead of a sampled one."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of environment and actions."""
    max_frames: Annotated[int, Range(1)] = 5_000
    """Images after which the recording ends, even if the episode does not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Draws the curves of runs, and what was forgotten between tasks."""

    logdirs: Positional[Annotated[tuple[pathlib.Path, ...], arg(metavar="LOGDIR [LOGDIR ...]")]]
    """Log directories of runs."""
    output: pathlib.Path = pathlib.Path("plot.png")
    """A file whose ending says what it is: .png, .svg, .pdf."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayUpdate:
    """Computes an update that was not finite again, without actors, and shows whose data it was."""

    file: Positional[Annotated[pathlib.Path, arg(metavar="FILE")]]
    """LOGDIR/bad-updates/UPDATE.npz, which a learner has written. The exit status is 0 if the
    update is, bit for bit, what was seen, and 1 if it is not or the file cannot be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Presets:
    """Lists the presets."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status: 2 means that the line itself is wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    try:
        name = options.choice("The command", argv[0], _COMMANDS)
        command_type, run = _COMMANDS[name]
        return run(_parse(name, command_type, argv[1:]))
    except options.OptionError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 2


def train(command: Train) -> int:
    """Supervises `impala learner` and `impala actor`, which talk over a local socket."""
    if command.print_config:
        return _print_config(command)
    process.outlive_readers()
    _log_to_stderr(command.log_format)
    log = logging.getLogger("impala.train")
    logdir = _logdir(command)
    actors_log = logdir / "actors.log"
    from learner import log_directory

    try:
        log_directory.make(logdir)
    except log_directory.LogDirectoryError as error:
        raise options.OptionError(str(error)) from error
    with (
        tempfile.TemporaryDirectory(prefix="impala-") as directory,
        Supervisor(grace_seconds=_GRACE_SECONDS) as supervisor,
    ):
        socket = pathlib.Path(directory, "learner")
        fresh = ["--fresh"] if command.fresh else []
        empty_replay = ["--empty-replay"] if command.empty_replay else []
        init_from = ["--init-from", str(command.init_from)] if command.init_from else []
        supervisor.start(
            Program(
                name="learner",
                command=[
                    *[*_IMPALA, "learner", command.preset, *fresh, *empty_replay, *init_from],
                    *["--logdir", str(logdir), "--listen", f"unix:{socket}"],
                    *["--log-format", command.log_format, "--stopped-status", str(_STOPPED)],
                ],
                environ=options.to_environment(command.settings),
            )
        )
        programs = _actor_programs(command, socket, actors_log)
        for program in programs.values():
            supervisor.start(program)
        log.info("Training in %s; the actors write to %s.", logdir, actors_log)
        learner_status, status = _STOPPED, 0
        for end in supervisor.watch():
            if end.name == "learner":
                learner_status = end.status
                finished = "training finished", f"the learner ended with status {end.status}"
                supervisor.stop(finished[end.status != 0])
            elif end.restart_seconds is not None:
                log.warning(
                    "The %s ended with status %d (see %s); starting again in %.0f s.",
                    *(end.name, end.status, actors_log, end.restart_seconds),
                )
            elif end.status == 0:  # asked to by somebody, unless the learner has finished too
                supervisor.start(programs[end.name], delay_seconds=_AGAIN_SECONDS)
            elif end.name == "actors" and not supervisor.stopping:
                log.error("The actors keep failing (see %s): stopping the run.", actors_log)
                status = 1
                supervisor.stop("the actors keep failing")
            elif not supervisor.stopping:
                log.error("The %s keeps failing (see %s): going on.", end.name, actors_log)
    if supervisor.interrupted and learner_status == 128 + signal.SIGTERM:
        learner_status = _STOPPED  # it had not begun
    status = 128 + signal.SIGINT if supervisor.killed else status or learner_status
    hint = " The same command goes on with the run." if status == _STOPPED else ""
    level = logging.INFO if status in (0, _STOPPED) else logging.ERROR
    log.log(level, "Ended with status %d: %s.%s", status, supervisor.why, hint)
    return status


def learner(command: Learner) -> int:
    """Runs `learner.run.run_learner`."""
    if command.print_config:
        return _print_config(command)
    with _said_plainly():
        command.security.check(
            command.listen, health=command.health_listen, metrics=command.metrics_listen
        )
    process.outlive_readers()
    _log_to_stderr(command.log_format)
    process.load_tensorflow(use_gpus=True)
    from learner.checkpoint import CheckpointError
    from learner.log_directory import LogDirectoryError
    from learner.run import run_learner
    from learner.storage import StorageError

    try:
        return run_learner(
            command.settings,
            logdir=_logdir(command),
            listen=command.listen,
            fresh=command.fresh,
            empty_replay=command.empty_replay,
            init_from=command.init_from,
            when_finished=command.when_finished,
            stopped_status=command.stopped_status,
            security=command.security,
            health_listen=command.health_listen,
            metrics_listen=command.metrics_listen,
            rows_to_log=command.log_format == "json",
        )
    except (CheckpointError, LogDirectoryError, SecurityError, StorageError) as error:
        raise options.OptionError(str(error)) from error
    except OSError as error:
        if error.errno is None:  # the address; a full disk and its like keep their traceback
            raise options.OptionError(str(error)) from error
        raise


def actor(command: Actor) -> int:
    """Runs one actor in this process, or several in their own."""
    with _said_plainly():
        last = command.num_actors - 1 if command.index is None else command.index
        command.security.check(metrics=_next_port(command.metrics_listen, last))
    process.outlive_readers()
    _log_to_stderr(command.log_format)
    if command.num_actors > 1:
        from actors.fleet import run_fleet

        return run_fleet(command.num_actors, _flags(command))
    process.load_tensorflow(use_gpus=False)
    from actors.client import LearnerError
    from actors.run import run_actor

    index = command.index or 0
    name = command.name if command.index is None else f"{command.name}-{command.index}"
    try:
        return run_actor(
            command.learner,
            index=index,
            name=name if command.name else None,
            num_envs=command.num_envs or None,
            render=command.render and index == 0,
            when_finished=command.when_finished,
            reconnect_timeout=command.reconnect_timeout or None,
            role=command.role,
            security=command.security,
            metrics_listen=_next_port(command.metrics_listen, index),
        )
    except SecurityError as error:
        raise options.OptionError(str(error)) from error
    except OSError as error:
        if error.errno is None:  # an address of ours; others keep their traceback
            raise options.OptionError(str(error)) from error
        raise
    except LearnerError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 1


def status(command: Status) -> int:
    """Prints a table, once or again and again."""
    import rich.console
    import rich.live
    from google.protobuf import json_format

    from actors import status as view
    from actors.client import LearnerError, StatusClient

    try:
        with StatusClient(command.learner, command.security) as client:
            if command.json:
                print(
                    json_format.MessageToJson(
                        client.get(),
                        preserving_proto_field_name=True,
                        always_print_fields_with_no_presence=True,
                    )
                )
                return 0
            table = view.render(command.learner, client.get())
            if not command.watch:
                rich.console.Console().print(table)
                return 0
            with rich.live.Live(table, auto_refresh=False, screen=True) as live:
                while True:
                    time.sleep(command.watch)
                    live.update(view.render(command.learner, client.get()), refresh=True)
    except SecurityError as error:
        raise options.OptionError(str(error)) from error
    except LearnerError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def evaluate(command: Evaluate) -> int:
    """Plays episodes and prints a table."""
    import rich.console
    import rich.table
    import rich.text

    num_envs = min(command.num_envs, command.episodes)
    with _player(command.logdir, command.task, num_envs, render_mode=None) as player:
        from impala import evaluation

        episodes = evaluation.play_episodes(
            player.environment,
            player.agent,
            command.episodes,
            command.greedy,
            command.seed,
        )
    summary = evaluation.summary(episodes)
    print(
        f"{player.task}: {summary.episodes} episodes, "
        f"{'greedy' if command.greedy else 'sampled'}, after {player.counters.frames:,} frames"
    )
    table = rich.table.Table()
    for column in ("", "mean", "std", "min", "max"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row(
        "return",
        *[f"{summary.return_mean:.2f}", f"{summary.return_std:.2f}"],
        *[f"{summary.return_min:.2f}", f"{summary.return_max:.2f}"],
    )
    table.add_row(
        "length",
        *[f"{summary.length_mean:.1f}", f"{summary.length_std:.1f}"],
        *[f"{summary.length_min:d}", f"{summary.length_max:d}"],
    )
    for name, mean in summary.info.items():
        table.add_row(rich.text.Text(f"{printable(name)} (info)"), f"{mean:.2f}")
    rich.console.Console().print(table)
    if command.json is not None:
        result = {
            "environment": player.task,
            "logdir": str(command.logdir),
            "frames_trained": player.counters.frames,
            "updates": player.counters.updates,
            "greedy": command.greedy,
            "seed": command.seed,
            "summary": summary._asdict(),
            "episodes": [episode._asdict() for episode in episodes],
        }
        command.json.parent.mkdir(parents=True, exist_ok=True)
        command.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def record(command: Record) -> int:
    """Plays an episode and writes what it looked like."""
    from impala import video

    output = command.output or command.logdir / "episode.gif"
    try:
        video.check(output)
    except ValueError as error:
        raise options.OptionError(str(error)) from error
    with _player(command.logdir, command.task, num_envs=1, render_mode="rgb_array") as player:
        rewards: list[float] = []
        video.write(output, _images(player, command, rewards))
    print(f"{output}: {len(rewards)} images, return {sum(rewards):.2f}")
    return 0


def plot(command: Plot) -> int:
    """Draws a figure."""
    from impala import plot

    try:
        plot.draw(command.logdirs, command.output)
    except ValueError as error:
        raise options.OptionError(str(error)) from error
    print(command.output)
    return 0


def replay_update(command: ReplayUpdate) -> int:
    """Prints what computing an update again has shown."""
    process.load_tensorflow(use_gpus=True)
    from learner import bad_updates

    try:
        result = bad_updates.again(command.file)
    except ValueError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 1
    print("\n".join(result.lines))
    return 0 if result.identical else 1


def presets(command: Presets) -> int:
    """Prints a table of the presets."""
    import rich.console
    import rich.table

    from impala import tasks

    table = rich.table.Table()
    for column in ("preset", "environment", "network", "frames", "what it is"):
        table.add_column(column, justify="right" if column == "frames" else "left", overflow="fold")
    for name, (line, config) in PRESETS.items():
        network = f"{config.agent.torso}, {config.agent.core}"
        table.add_row(name, config.environment.id, network, f"{tasks.total_frames(config):,}", line)
    rich.console.Console().print(table)
    return 0


_COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "train": (Train, train),
    "learner": (Learner, learner),
    "actor": (Actor, actor),
    "status": (Status, status),
    "evaluate": (Evaluate, evaluate),
    "record": (Record, record),
    "plot": (Plot, plot),
    "replay-update": (ReplayUpdate, replay_update),
    "presets": (Presets, presets),
}
"""Name -> (its flags, the function that runs it)."""


@contextlib.contextmanager
def _player(
    logdir: pathlib.Path, task: int, num_envs: int, render_mode: str | None
) -> Iterator["Player"]:
    """Who plays for `evaluate` and `record`."""
    _log_to_stderr()
    process.load_tensorflow(use_gpus=False)
    from learner.player import Player

    try:
        player = Player(logdir, task, num_envs, render_mode)
    except ValueError as error:
        raise options.OptionError(str(error)) from error
    with contextlib.closing(player):
        yield player


def _images(player: "Player", command: Record, rewards: list[float]) -> Iterator[np.ndarray]:
    """Yields what each time step of an episode looks like, and notes its reward."""
    from impala import evaluation
    from impala.types import StepType

    for step in evaluation.play(player.environment, player.agent, command.greedy, command.seed):
        rewards.append(float(step.timestep.reward[0]))
        yield player.environment.render().copy()
        if step.timestep.step_type[0] == StepType.LAST or len(rewards) == command.max_frames:
            break


def _flags(command: Actor) -> list[str]:
    """Writes an actor's command line for one process of a fleet."""
    flags: list[str] = []
    defaults = options.flatten(Actor())
    for name, value in options.flatten(command).items():
        if name in ("num_actors", "index") or value == defaults[name]:
            continue
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def _actor_programs(command: Train, socket: pathlib.Path, log: pathlib.Path) -> dict[str, Program]:
    """Names the processes that train starts beside the learner."""
    flags = {"actors": ["--num-actors", str(command.num_actors), "--name", "actor"]}
    log_format = ["--log-format", command.log_format]
    if command.render:
        flags["actors"].append("--render")
    several = len(command.settings.tasks.environments) > 1
    if command.evaluate == "yes" or (command.evaluate == "auto" and several):
        flags["evaluator"] = ["--role", "evaluator", "--name", "evaluator"]
    return {
        name: Program(
            name=name,
            command=[*_IMPALA, "actor", "--learner", f"unix:{socket}", *words, *log_format],
            restart=True,
            log=log,
            # A fresh start first moves aside everything that the log directory holds.
            after=socket if command.fresh else None,
        )
        for name, words in flags.items()
    }


@contextlib.contextmanager
def _said_plainly() -> Iterator[None]:
    """Makes usage errors of what is wrong with addresses and credentials."""
    try:
        yield
    except SecurityError as error:
        raise options.OptionError(str(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise options.OptionError(str(error)) from error


def _next_port(listen: str | None, index: int) -> str | None:
    """The address of one process of several: each has its own port, unless any will do."""
    host, _, port = (listen or "").rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdecimal() and int(port) else listen


def _logdir(command: _Run) -> pathlib.Path:
    return command.logdir or pathlib.Path("runs", command.preset)


def _print_config(command: _Run) -> int:
    print(options.to_yaml(command.settings), end="")
    return 0


def _parse(name: str, command_type: type[T], argv: list[str]) -> T:
    """Reads a command's flags over the layers below them.

    Raises:
      OptionError: a misspelt flag, or an impossible value in any layer.
      SystemExit: 2 after tyro has explained a missing or unreadable value, 0 after help.
    """
    default: Any = tyro.MISSING_NONPROP
    if issubclass(command_type, _Run):
        preset, file = _layers(command_type, argv)
        settings = options.layered(preset, file, os.environ) if preset else Config()
        default = command_type(preset=tyro.MISSING, settings=settings)
    command, unknown = _tyro(name, command_type, argv, default)
    if unknown:
        raise options.OptionError(_unknown(name, command_type, unknown[0]))
    options.check_ranges(command)
    if isinstance(command, _Run):
        options.validate(command.settings)
    return command


def _layers(command_type: type[_Run], argv: list[str]) -> tuple[str, pathlib.Path | None]:
    """Finds out which preset and file the defaults come from, before the defaults are known."""
    default = command_type(preset=tyro.MISSING)
    without_help = [word for word in argv if word not in ("-h", "--help")]
    silence = io.StringIO()
    try:
        with contextlib.redirect_stderr(silence), contextlib.redirect_stdout(silence):
            command, _ = _tyro("", command_type, without_help, default)
    except SystemExit:  # something is wrong or missing; the parse in earnest will say what
        return next((word for word in argv if word in PRESETS), ""), None
    return command.preset, command.config


def _tyro(name: str, command_type: type[T], argv: list[str], default: Any) -> tuple[T, list[str]]:
    """Returns the command and what tyro could make nothing of."""
    return tyro.cli(
        command_type,
        prog=f"impala {name}",
        args=argv,
        default=default,
        return_unknown_args=True,
        registry=_registry(),
    )


def _unknown(name: str, command_type: type, word: str) -> str:
    """Words the error about something on the command line that has no meaning."""
    if not word.startswith("-"):
        return f"{name} can make nothing of {word!r}. See impala {name} --help."
    paths = [field.name for field in dataclasses.fields(command_type)]
    if "settings" in paths:
        paths = [path for path in paths if path not in ("preset", "settings")]
        paths += options.flatten(Config())
    flags = [path.replace("_", "-") for path in paths]
    hint = options.nearest(word.split("=")[0].lstrip("-").replace("_", "-"), flags)
    hint = hint.replace("'", "'--", 1) or f"See impala {name} --help."
    return f"{name} has no flag {word.split('=')[0]}. {hint}"


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Returns tyro's rules with ours for choices: a wrong one is told the nearest right one."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def choices(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[str] | None:
        if typing.get_origin(info.type) is not Literal:
            return None
        allowed = typing.get_args(info.type)
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(allowed) + "}",
            instance_from_str=lambda words: options.choice("the value", words[0], allowed),
            is_instance=lambda value: value in allowed,
            str_from_instance=lambda value: [value],
        )

    return registry


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [
        f"  {name:<{width}}  {(cls.__doc__ or '').splitlines()[0]}"
        for name, (cls, _) in _COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: impala COMMAND ...",
            "",
            "IMPALA as a service: a V-trace learner and an elastic fleet of actors.",
            "",
            *lines,
            "",
            "impala COMMAND --help explains a command and its settings.",
            "",
            f"Exit status: 0 done, 1 failed, 2 wrong usage, {_STOPPED} training stopped before its",
            "end (the same command goes on with the run), 128 + N ended by signal N.",
        ]
    )


class _CurrentStderr(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is now: a live console view puts itself in its place."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _JsonFormatter(logging.Formatter):
    """One JSON object per record, for collectors of logs."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _log_to_stderr(log_format: LogFormat = "text") -> None:
    handler = _CurrentStderr()
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        handlers=[handler],
    )
    logging.getLogger("absl").setLevel(logging.ERROR)
