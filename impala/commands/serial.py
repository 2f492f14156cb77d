"""`impala train --serial`: a run in one process and thread, of the parts that its services have.

The learner asks for unrolls when it needs some. The actor then plays here, with the newest
parameters, and its messages go to the service by calls instead of gRPC. So breakpoints and
tracebacks of environments, networks and algorithms are those of any program, and two runs with the
same seed are equal.
"""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from impala.commands import preflight
from impala.commands.flags import STOPPED
from impala.commands.train import Ended, Train, check, ended, is_evaluated
from impala.config import values
from impala.config.schema import Config
from impala.environments import EnvironmentFailed
from impala.parts import sections
from impala.runtime import process
from impala.runtime.signals import EndRequest

if TYPE_CHECKING:
    from impala.types import ActorUnrolls, Parameters
    from learner.service.service import LearnerService

_log = logging.getLogger("impala.train")

_NAME = "actor"


def run(command: Train, *, is_guest: bool = False, asked: threading.Event | None = None) -> Ended:
    """Trains in this thread until the run ends, by Ctrl-C for instance.

    A second Ctrl-C, a second or more after the first, interrupts the run where it is.

    Args:
      command: what to train.
      is_guest: whether the process is a user's program, which goes on afterwards: signals are
        passed on to it, and rows are logged instead of printed.
      asked: stops the run when it is set.

    Raises:
      OptionError: the run cannot start; see `preflight.log_directory`. Or it would need other
        processes.
      Exception: what an environment, a network or an algorithm has raised.
    """
    _refuse(command)
    check(command)
    logdir = preflight.log_directory(command)
    settings = _settings(command)
    process.load_tensorflow(use_gpus=True, is_guest=is_guest)
    from impala.logdir.checkpoint import CheckpointError
    from impala.logdir.directory import LogDirectoryError, StorageError
    from learner.run import Options, learn
    from learner.update import devices

    try:
        devices.set_up(dataclasses.replace(settings, deterministic=True))
    except RuntimeError as error:  # only a guest's has started
        _log.warning("TensorFlow runs already, with its own threads and devices: %s", error)
    stop = EndRequest(passes_on=is_guest, interrupts=True, asked=asked)

    @contextlib.contextmanager
    def play(service: "LearnerService") -> Iterator[Callable[[], None]]:
        with _Actor(service, settings, command.render) as actor:
            yield lambda: None if stop.is_set() else actor.play()

    options = Options(
        logdir=logdir,
        listen="",
        fresh=command.fresh,
        empty_replay=command.empty_replay,
        init_from=command.init_from,
        stopped_status=STOPPED,
        own_actors=True,
        rows_to_log=is_guest or command.log_format == "json",
        play=play,
    )
    _log.info("Training in this process, in %s.", logdir)
    try:
        with stop:
            status = learn(settings, options, stop)
    except (CheckpointError, LogDirectoryError, StorageError) as error:
        raise values.OptionError(str(error)) from error
    except EnvironmentFailed as error:
        cause: BaseException | None = error
        while isinstance(cause, EnvironmentFailed):
            cause = cause.__cause__
        if cause is None:
            raise
    else:
        why = {0: "training finished", STOPPED: stop.cause}.get(status, "the log says why")
        return ended(command, status, why, logdir)
    raise cause  # its traceback ends where it was raised, which is where a debugger looks


def _refuse(command: Train) -> None:
    """Raises OptionError if a run asks for other processes."""
    asks = {
        "num_actors": command.num_actors not in ("auto", 1),
        "evaluate": command.evaluate == "yes",
        "tensorboard": command.tensorboard,
    }
    for name, is_asked in asks.items():
        if is_asked:
            raise values.OptionError(
                f"{name} is {getattr(command, name)}, but a serial run is a learner and one actor "
                f"in one process: leave out {name}, or serial."
            )


def _settings(command: Train) -> Config:
    """Returns the settings of the run, without what needs other processes."""
    settings = command.settings
    if is_evaluated(command):
        _log.info("A serial run has no evaluator: use impala evaluate, also while it trains.")
    if settings.environment.vectorization == "async":
        _log.info("A serial run steps its environments here: environment.vectorization is sync.")
        environment = dataclasses.replace(settings.environment, vectorization="sync")
        settings = dataclasses.replace(settings, environment=environment)
    learner = dataclasses.replace(
        settings.learner,
        inference="never",
        jit_compile=False,  # which takes half a minute, and a thread
    )
    return dataclasses.replace(settings, learner=learner)


class _Actor:
    """An actor that calls the service of its own process; a context, which ends both.

    The service's calls are coroutines, and in a notebook the thread has an event loop that runs
    already. So they have a thread of their own, for which this one waits.

    Args:
      service: the learner's.
      settings: of the run.
      render: whether the first environment is shown.
    """

    def __init__(self, service: "LearnerService", settings: Config, render: bool) -> None:
        self._service, self._settings, self._render = service, settings, render
        self._loop, self._thread = asyncio.Runner(), ThreadPoolExecutor(1, "service")
        self._closing = contextlib.ExitStack()
        self._unrolls: Iterator[ActorUnrolls] | None = None
        self._permit = 0  # number of that of the round that is being made
        self._left = 0  # unrolls of that round, still to be sent
        self._played = 0.0  # when, after which it waits for the learner
        self._waited = 0.0  # seconds, since the last message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()
        self._thread.submit(self._loop.close).result()
        self._thread.shutdown()

    def play(self) -> None:
        """Plays and submits the unrolls of one group, unless they need a permit and get none."""
        import tensorflow as tf

        if self._played:
            self._waited += time.monotonic() - self._played
        with tf.device("/CPU:0"):  # a GPU is the learner's
            self._play()
        self._played = time.monotonic()

    def _play(self) -> None:
        if self._unrolls is None:
            self._join()
        assert self._unrolls is not None
        session = self._session
        if session.needs_permits and self._left <= 0:
            session.want_permit(self._num_envs)
            self._pull()
            if session.permit is None:
                return
        self._send(next(self._unrolls))

    def _join(self) -> None:
        from actors import client
        from actors.run import ActorSetup, make_actor
        from actors.session import Session

        now = time.monotonic()
        self._session = Session(
            "this process", name=_NAME, incarnation=client.new_incarnation(), now=now
        )
        reply = self._service.join(self._session.join_request())
        self._session.joined(reply, now)
        setup = ActorSetup(reply, "actor", sections.allowed(self._settings, of_actors=True))
        self._num_envs = setup.actor.num_envs
        actor = make_actor(
            *(setup, self._num_envs, reply.limits.num_envs, self._render, self._closing)
        )
        self._unrolls = actor.run(
            self._parameters,
            lambda: self._session.task,
            whole_rounds=self._session.needs_permits,
        )

    def _parameters(self) -> "Parameters":
        """Returns the newest parameters; a round of unrolls that has a permit begins."""
        session = self._session
        if session.needs_permits:
            self._permit, self._left = session.begin_round().number, self._num_envs
        else:
            self._pull()
        assert session.parameters is not None
        return session.parameters

    def _pull(self) -> None:
        from protos.impala.v1 import learner_pb2 as pb

        pull = self._session.pull()
        permit = self._call(self._service.permit(pull.request)) if pull.request.round else None
        reply = self._service.get_parameters(pull.request, permit)
        self._session.pulled(pull, pb.GetParametersReply.FromString(reply))

    def _send(self, unrolls: "ActorUnrolls") -> None:
        from actors import messages
        from protos import codec
        from protos.impala.v1 import learner_pb2 as pb

        session = self._session
        assert session.reply is not None
        message, tensors = messages.unrolls(_NAME, session.incarnation, session.reply, unrolls)
        message.permit = self._permit
        self._left -= message.num_envs
        session.append(message, time.monotonic(), self._waited, tensors)
        self._waited = 0.0
        sent = session.next_message(session.connection)
        assert sent is not None
        views, rest = codec.split(sent)
        receipt = self._call(self._service.submit(pb.Unrolls.FromString(rest), views))
        session.receive(receipt, time.monotonic())
        if not (session.is_open or session.finished):
            raise RuntimeError(f"The learner takes no more of this actor: {receipt.detail}")

    def _call(self, coroutine: Any) -> Any:
        return self._thread.submit(self._loop.run, coroutine).result()
