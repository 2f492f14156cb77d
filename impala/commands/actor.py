"""`impala actor`: runs one actor in this process, or several in their own."""

import dataclasses
import pathlib
from typing import Annotated, Literal

from impala.commands.flags import ADDRESS, Allow, NumActors, WhenFinished, next_port, plainly
from impala.config import values
from impala.config.schema import Range
from impala.parts.components import Allowed
from impala.runtime import listen, process
from impala.runtime.logs import LogFormat, log_to_stderr, say_failure
from impala.runtime.security import ClientSecurity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Actor:
    """Acts for a learner, which provides all settings of the run.

    Exit status: 0 once the run has finished or the actor was stopped, 1 after a failure, 2 if the
    command line is wrong, 65 if the environment has failed before the first unroll was complete, as
    it would after another start.
    """

    learner: str = ADDRESS
    """HOST:PORT of the learner, or unix:PATH. HOST:PORT,HOST:PORT,... of learners that are peers:
    the processes of --num-actors are divided evenly among them."""
    num_actors: NumActors = 1
    """Actor processes on this host."""
    num_envs: Annotated[int, Range(0, 4096)] = 0
    """Environments per process, a multiple of actor.num_groups or 1; 0: the number that the learner
    gives. Not for evaluators."""
    name: str = ""
    """Name, unique in the fleet; several processes append their index. Empty: made from the
    host's name and the process id."""
    index: int | None = None
    """Set by --num-actors for each of its processes."""
    render: bool = False
    """Show the first environment in a window. Not for evaluators."""
    when_finished: WhenFinished = "exit"
    """exit, or idle: wait for the learner to start another run."""
    reconnect_timeout: Annotated[float, Range(0.0)] = 0.0
    """Seconds without a learner after which to give up; 0: wait for ever."""
    give_up_after: Annotated[int, Range(0)] = 0
    """With several processes: end once each of them has failed so many times in a row; 0: start
    them again for ever."""
    role: Literal["actor", "evaluator"] = "actor"
    """actor, or evaluator: play episodes with snapshots of the agent and report their returns."""
    bfloat16: bool = True
    """Compute the torso in bfloat16 if that is faster on this CPU (AMX, or AVX-512 BF16 of AMD),
    whatever learner.bfloat16 says. The learner is sent the policy that acted, rounding included.
    Evaluators always compute in float32."""
    share_pulls: bool = True
    """Pull parameters once for all actors of this user on this host. --no-share-pulls: each pulls
    its own."""
    metrics_listen: str | None = None
    """HOST:PORT where Prometheus metrics are served; with several processes, each has its own port,
    counted up from this one."""
    failures: pathlib.Path | None = None
    """File to which a line is appended for each failure of an environment, and for the error that
    ends the process: the error and its place. `impala train` shows them."""
    log_format: LogFormat = "text"
    """text, or json: one object per line."""
    allow: Allow = ()
    """Code that this process may import if the learner names it, besides installed entry points of
    the group impala.components: MODULE, for what it defines, or MODULE:ATTRIBUTE."""
    security: ClientSecurity = dataclasses.field(default_factory=ClientSecurity)


def actor(command: Actor) -> int:
    """Runs one actor in this process, or several in their own."""
    process.outlive_readers(waits=False)
    log_to_stderr(command.log_format)
    with plainly():
        last = command.num_actors - 1 if command.index is None else command.index
        command.security.check(metrics=next_port(command.metrics_listen, last))
        learners = listen.dialled(command.learner)
    if command.index is None and command.num_actors % len(learners):
        raise values.OptionError(
            f"--num-actors is {command.num_actors}, which {len(learners)} learners cannot share "
            f"evenly: use a multiple of {len(learners)}."
        )
    if command.role == "evaluator" and (command.render or command.num_envs):
        raise values.OptionError(
            f"{'--render' if command.render else '--num-envs'} is for actors, but --role is "
            "evaluator, which shows nothing and plays in as many environments as the learner says "
            "(evaluator.episodes, at most actor.num_envs): leave it out. impala record shows an "
            "agent."
        )
    if command.num_actors > 1:
        from actors.fleet import run_fleet

        return run_fleet(command.num_actors, _flags(command), give_up_after=command.give_up_after)
    metrics_listen = next_port(command.metrics_listen, command.index or 0)
    with plainly():
        listen.check_free("Metrics", metrics_listen)
    process.load_tensorflow(use_gpus=False)
    from actors.run import Options, run_actor
    from actors.session import LearnerError

    index = command.index or 0
    name = command.name if command.index is None else f"{command.name}-{command.index}"
    options = Options(
        index=index,
        name=name if command.name else None,
        num_envs=command.num_envs or None,
        render=command.render and index == 0,
        when_finished=command.when_finished,
        reconnect_timeout=command.reconnect_timeout or None,
        role=command.role,
        allow=Allowed(command.allow),
        security=command.security,
        metrics_listen=metrics_listen,
        failures=command.failures,
        bfloat16=command.bfloat16,
        share_pulls=command.share_pulls,
    )
    try:
        with plainly():
            return run_actor(learners[index % len(learners)], options)
    except LearnerError as error:
        say_failure(str(error))
        return 1


def _flags(command: Actor) -> list[str]:
    """Returns the command line of one process of a fleet."""
    flags: list[str] = []
    defaults = values.flatten(Actor())
    for name, value in values.flatten(command).items():
        if name in ("num_actors", "index", "give_up_after") or value == defaults[name]:
            continue
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
            continue
        flags += [f"{flag}={word}" for word in (value if isinstance(value, tuple) else (value,))]
    return flags
