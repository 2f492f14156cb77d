"""Runs one actor process: joins the learner, builds agent and environments, and acts to the end.

Composition root of the actor: only here does configuration become objects.
"""

import contextlib
import dataclasses
import functools
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from impala.config.values import OptionError
from impala.parts.components import Allowed, where_raised
from impala.runtime import process
from impala.runtime.credentials import Role
from impala.runtime.exporter import Exporter
from impala.runtime.failures import Failure, note
from impala.runtime.hang import HangWatch, making_environments
from impala.runtime.security import ClientSecurity
from impala.runtime.signals import EndRequest
from impala.runtime.supervisor import REPEATS
from impala.types import Unroll

if TYPE_CHECKING:  # heavy modules are imported only when the process needs them
    from actors.actor import Actor
    from actors.client import LearnerClient
    from actors.evaluator import EvaluatorClient
    from impala.environments.base import Environment
    from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

_NO_SECURITY = ClientSecurity()
_NOTHING = Allowed()
_DRAIN_SECONDS = 5.0
_IDLE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a process acts: what the learner does not say."""

    index: int = 0
    """Number of this process on its host; part of its name."""
    name: str | None = None
    """Unique in the fleet; None: host, process id and index."""
    num_envs: int | None = None
    """Environments of this actor; None: the number that the learner gives."""
    render: bool = False
    """Show environment 0."""
    when_finished: Literal["exit", "idle"] = "exit"
    """exit, or wait for the next run at the same address."""
    reconnect_timeout: float | None = None
    """Seconds without a learner after which to give up; None: never."""
    role: Literal["actor", "evaluator"] = "actor"
    """An actor streams unrolls; an evaluator plays whole episodes with snapshots of the agent."""
    allow: Allowed = _NOTHING
    """What may be imported if the learner names it, beside installed entry points."""
    security: ClientSecurity = _NO_SECURITY
    """The credentials to present, and how to verify the learner."""
    metrics_listen: str | None = None
    """HOST:PORT where Prometheus metrics are served."""
    failures: pathlib.Path | None = None
    """File to which a line is added for each failure of an environment, and for the exception that
    ends the actor."""
    bfloat16: bool = False
    """Compute the torso of an actor in bfloat16 if that is faster on this CPU."""
    share_pulls: bool = False
    """Share pulls of parameters with the other actors of this user on this host."""


_Outcome = Literal["finished", "stopped", "finished before joining"]


class _Notes:
    """Records failures in a file, if there is one."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self._path = path
        self.has_acted = False
        """Whether an unroll is complete."""

    def add(self, what: Failure | str) -> None:
        """Records a failure, or a notice."""
        if self._path is not None:
            note(self._path, what)


def run_actor(learner: str, options: Options | None = None) -> int:
    """Acts for the learner until training has finished, or SIGTERM, SIGINT or SIGHUP.

    Args:
      learner: host:port or unix:PATH.
      options: how to act; None: the defaults.

    Returns:
      Exit status 0.

    Raises:
      actors.session.LearnerError: the actor cannot go on.
      EnvironmentFailed: an environment has failed.
      SystemExit: with `supervisor.REPEATS`, if that was before the first unroll was complete.
      OptionError: the learner's groups cannot share `num_envs`.
      OSError: `metrics_listen` cannot be bound.
      SecurityError: the files of `security` cannot be used, or `metrics_listen` is open to others.
    """
    options = options or Options()
    role = options.role
    options.security.check(metrics=options.metrics_listen)
    with _Signals(at_once=role == "evaluator") as signals, _noted(options.failures, role) as notes:
        make_client = _set_up(learner, options)
        from actors.client import new_incarnation

        incarnation, is_waiting = new_incarnation(), False
        while True:
            outcome = _session(make_client(incarnation=incarnation), options, signals, notes)
            if outcome == "stopped":
                return 0
            if outcome == "finished":
                incarnation, is_waiting = new_incarnation(), False
            if not is_waiting:
                _log.info("the learner at %s has finished", learner)
                is_waiting = True
            if options.when_finished == "exit":
                return 0
            if signals.wait(_IDLE_SECONDS):
                _log.info("Stopping: %s.", signals.cause)
                return 0


def _set_up(learner: str, options: Options) -> "Callable[..., LearnerClient | EvaluatorClient]":
    """Configures this process. Returns what makes a client, given its incarnation."""
    process.tune_malloc()
    process.allow_many_files()
    process.hide_gpus()
    process.set_threads(intra_op=1)
    if options.bfloat16 and options.role == "actor":
        process.use_bfloat16()
    from actors import client as wire
    from actors.evaluator import EvaluatorClient
    from actors.metrics import ActorMetrics
    from actors.shared import SharedPulls

    metrics = ActorMetrics()
    if options.metrics_listen is not None:
        exporter = Exporter(options.metrics_listen, metrics.registry)
        _log.info("serving metrics on %s", exporter.address)
    make: Callable[..., LearnerClient | EvaluatorClient] = EvaluatorClient
    if options.role == "actor":
        shared = SharedPulls(learner) if options.share_pulls else None
        make = functools.partial(wire.LearnerClient, shared=shared)
    return functools.partial(
        make,
        learner,
        name=options.name or wire.actor_name(options.index),
        reconnect_timeout=options.reconnect_timeout,
        security=options.security,
        metrics=metrics,
    )


def _session(
    client: "LearnerClient | EvaluatorClient",
    options: Options,
    signals: "_Signals",
    notes: _Notes,
) -> _Outcome:
    """Acts in one run of the learner."""
    from actors import client as wire
    from actors.connection import RunFinished, Stopped

    setup = None
    with client:
        try:
            signals.stops(client.stop)
            setup = ActorSetup(client.join(), options.role, options.allow, is_watched=True)
            if isinstance(client, wire.LearnerClient):
                _act(client, setup, options, notes)
            else:
                _evaluate(client, setup, options.allow)
        except RunFinished:
            signals.stops(None)
            return "finished" if setup is not None else "finished before joining"
        except (Stopped, _Interrupted):
            _log.info("Stopping: %s.", signals.cause)
        if not client.drain(_DRAIN_SECONDS):
            _log.warning("left without the receipts of the last unrolls")
        return "stopped"


class _Interrupted(BaseException):
    """A signal reached an evaluator, which abandons its episodes. No error of an environment."""


class _Signals(EndRequest):
    """Stops the running operation on a signal: by a call, or `at_once` by an exception."""

    def __init__(self, at_once: bool) -> None:
        super().__init__(self._stop_it, interrupts=True)
        self._at_once = at_once
        self._stop: Callable[[], None] | None = None

    def stops(self, stop: Callable[[], None] | None) -> None:
        """Sets what a signal, also one already received, calls; None: nothing."""
        self._stop = stop
        if stop is not None and self.is_set():
            stop()

    def _stop_it(self) -> None:
        if self._stop is None:
            return
        self._stop()
        if self._at_once:
            raise _Interrupted


class ActorSetup:
    """The agent and, as needed, the environments that a JoinReply asks for.

    Args:
      reply: from the learner.
      role: of this process.
      allow: what may be imported if the learner names it.
      is_watched: whether the process ends if an environment that is made to see its spaces hangs.
    """

    def __init__(
        self, reply: "pb.JoinReply", role: Role, allow: Allowed, *, is_watched: bool = False
    ) -> None:
        from actors import settings
        from impala.parts import build, sections

        self.tasks, config = settings.read(reply, role, allow)
        self.actor = config.actor
        self.seed = reply.seed
        self.unroll_length: int = reply.unroll_length
        self.config = config.agent
        self.own = sections.found(config)
        seconds = config.actor.hang_seconds * len(self.tasks)
        with making_environments(seconds) if is_watched else contextlib.nullcontext():
            self.spaces = build.spaces(self.tasks, self.own, numbered=config.agent.popart)
        self.agent = build.agent(config.agent, *self.spaces, own=self.own)
        self._check(reply, build.unroll_spec(self.agent, *self.spaces, self.unroll_length))

    def environment(
        self, task: int, num_envs: int, first: int = 0, render: bool = False
    ) -> "Environment":
        """Returns a group of a task's environments, numbered from `first`. The caller closes it."""
        from impala.parts import build

        return build.environment(
            self.tasks[task].environment,
            num_envs,
            actor=self.actor,
            first=first,
            render_mode="human" if render else None,
            joint=self.spaces,
            task=task,
            own=self.own,
        )

    def _check(self, reply: "pb.JoinReply", unroll_spec: Unroll) -> None:
        """Checks that the learner and this process have built the same specs."""
        from protos import codec

        _check_specs("unroll", codec.specs(unroll_spec), reply.unroll_specs)
        _check_specs("parameter", codec.specs(self.agent.variables), reply.parameter_specs)


def _check_specs(
    what: str, ours: Sequence["pb.TensorSpec"], theirs: Sequence["pb.TensorSpec"]
) -> None:
    """Compares TensorSpecs pairwise. Raises LearnerError; names only serve the message."""
    from actors.session import LearnerError
    from protos.impala.v1 import learner_pb2 as pb

    if len(ours) != len(theirs):
        raise LearnerError(
            f"this actor has {len(ours)} {what} tensors, the learner {len(theirs)}: "
            "run the same version of impala on both sides"
        )
    for mine, learners in zip(ours, theirs, strict=True):
        if (mine.dtype, list(mine.shape)) != (learners.dtype, list(learners.shape)):
            raise LearnerError(
                f"{what} tensor {learners.name!r} is {pb.DType.Name(mine.dtype)} "
                f"{list(mine.shape)} here and {pb.DType.Name(learners.dtype)} "
                f"{list(learners.shape)} at the learner: "
                "run the same version of impala and of the environment on both sides"
            )


@contextlib.contextmanager
def _noted(path: pathlib.Path | None, role: Role) -> Iterator[_Notes]:
    """Yields what records failures, and records the one that ends the body."""
    notes = _Notes(path)
    try:
        yield notes
    except Exception as error:
        from impala.environments.failure import EnvironmentFailed

        if not isinstance(error, EnvironmentFailed):
            notes.add(Failure(f"{type(error).__name__}: {error}", where_raised(error), role))
            raise
        notes.add(Failure(error.error, error.where))
        if role != "actor" or notes.has_acted or not error.is_mistake:
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(REPEATS)


def _act(
    client: "LearnerClient",
    setup: "ActorSetup",
    options: Options,
    notes: _Notes,
) -> None:
    from impala.environments import pace

    total = options.num_envs or setup.actor.num_envs
    environments = contextlib.ExitStack()
    actor = make_actor(setup, total, client.join().limits.num_envs, options.render, environments)
    paced = client.join().needs_permits
    unrolls = actor.run(
        *(client.parameters, client.task, client.prefetch),
        whole_rounds=paced,
    )
    stopwatch, before = actor.stopwatch, (0.0, 0)

    def slow(seconds: float) -> bool:
        taken, steps = stopwatch.seconds - before[0], stopwatch.steps - before[1]
        if clause := pace.slow(taken / seconds, taken / steps if steps else 0.0):
            advice = pace.advice(setup.tasks[client.task()].environment, total)
            notice = f"No unroll for {seconds:.0f} s, since {clause}: {advice}."
            _log.warning("%s", notice)
            notes.add(notice)
        return bool(clause)

    hang = HangWatch(setup.actor.hang_seconds, "unroll", slow=slow)
    with hang, hang.closing(environments.close):
        while True:
            client.await_turn(total)  # the lack of parameters is no environment that hangs
            before = stopwatch.seconds, stopwatch.steps
            with hang.watched():
                of_one_group = next(unrolls)
            for fault in of_one_group.faults:
                notes.add(Failure(fault.error, fault.where))
            notes.has_acted = True
            client.send(of_one_group)  # waits for the learner for as long as it has to


def make_actor(
    setup: "ActorSetup", total: int, most: int, render: bool, closing: contextlib.ExitStack
) -> "Actor":
    """Returns what plays in all environments of an actor.

    Args:
      setup: of the learner that it plays for.
      total: environments.
      most: of them in a group.
      render: whether environment 0 is shown.
      closing: closes the environments.

    Raises:
      OptionError: the learner's groups cannot share so many environments.
    """
    from actors import policy
    from actors.actor import Actor

    groups = 1 if total == 1 else setup.actor.num_groups
    if total % groups:
        raise OptionError(
            f"--num-envs is {total}, but the learner's actor.num_groups is {groups}, and the "
            f"groups have the same size: give a multiple of {groups}, such as "
            f"{-(-total // groups) * groups}."
        )
    groups = next(n for n in range(groups, total + 1) if total % n == 0 and total // n <= most)

    def environments(task: int) -> "list[Environment]":
        each = total // groups
        return [
            closing.enter_context(
                contextlib.closing(
                    setup.environment(task, each, group * each, render and group == 0)
                )
            )
            for group in range(groups)
        ]

    return Actor(
        environments,
        policy.make_policy(setup.agent, setup.config, setup.spaces),
        *(setup.unroll_length, setup.seed),
        random_warm_up=setup.config.random_warm_up,
        step_info=frozenset(setup.actor.step_info),
    )


def _evaluate(client: "EvaluatorClient", setup: ActorSetup, allow: Allowed) -> None:
    from actors import settings
    from impala.play.evaluation import play_episodes

    with HangWatch(setup.actor.hang_seconds, "step") as hang:
        while True:
            assignment = client.next_assignment()
            # A learner that has come back may have other settings of evaluations.
            _, told = settings.read(client.join(), "evaluator", allow)
            config = told.evaluator
            num_envs = min(config.episodes, told.actor.num_envs)
            values = assignment.parameters.values
            for variable, value in zip(setup.agent.variables, values, strict=True):
                variable.assign(value)
            with hang.watched():
                environment = setup.environment(assignment.task, num_envs)
            with hang.closing(environment.close):
                episodes = play_episodes(
                    *(environment, setup.agent, config.episodes, config.greedy, assignment.seed),
                    max_steps=config.max_steps,
                    watched=hang.watched,
                )
            client.report_evaluation(assignment, episodes)
