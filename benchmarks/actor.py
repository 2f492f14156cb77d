"""Measures one actor against a learner that accepts everything.

The actor is the real one, `actors.run`, with its gRPC client. What stands for the learner has a
process of its own: it gives receipts and newer parameters, and looks at nothing. Costs are CPU
time, so that what runs beside them on a machine counts for little. To compare two commits, take
turns.
"""

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any

import grpc
import numpy as np

from benchmarks.setting import Options
from impala.config import presets
from impala.config.schema import Config
from impala.parts import build
from impala.runtime import process
from impala.schedule import tasks
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_WARM_UP_SECONDS = 2.0
_START_SECONDS = 120.0


def measure(config: Config, options: Options) -> dict[str, float]:
    """Measures an actor of a preset: a whole step of one environment, and its parts.

    * environment: `send` and `recv` of environments;
    * inference: choosing actions;
    * wire: making messages, and all threads but the main one;
    * assembling: the rest of the unroll loop.

    Raises:
      SystemExit: environments of the preset step in threads of their own.
    """
    config = presets.PRESETS[options.preset][1]
    if config.environment.id.startswith("ALE/"):
        raise SystemExit(
            f"benchmarks: actor counts the time of an environment in the main thread, but that of "
            f"the preset {options.preset}, {config.environment.id}, steps in threads of its own. "
            "Use a preset without Atari, such as --preset cartpole; make bench ARGS=training "
            "measures Atari."
        )
    process.bound_numpy_threads()
    process.load_tensorflow(use_gpus=False)
    from actors import actor, run
    from actors.client import LearnerClient

    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=_accept, args=(config, there), daemon=True).start()
    if not here.poll(_START_SECONDS):
        raise RuntimeError("The process that stands for the learner does not start.")

    stopwatch = _Stopwatch()
    measurement = _Measurement(options.seconds / 3, stopwatch)
    make, send = build.environment, LearnerClient.send

    def environment(*args: Any, **kwargs: Any) -> Any:
        made: Any = make(*args, **kwargs)
        made.send = stopwatch.timed("environment", made.send)
        made.recv = stopwatch.timed("environment", made.recv)
        return made

    def counted(client: LearnerClient, unrolls: Any) -> None:
        measurement.sent(unrolls)
        send(client, unrolls)

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (build, "environment", environment),
        (actor.Group, "act", stopwatch.timed("inference", actor.Group.act)),
        (LearnerClient, "send", stopwatch.timed("wire", counted)),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    with contextlib.suppress(_Over):
        run.run_actor(here.recv())
    stopwatch.is_on = False
    alone = _environment_alone(config, options.seconds / 6)
    measured = measurement.measured()
    return {
        **measured,
        "environment alone, µs a step": alone,
        "share of the environment alone": alone / measured["CPU, µs a step"],
    }


class _Over(Exception):
    """Everything is measured."""


class _Stopwatch:
    """CPU time of the actor's main thread by what it is spent on, while it is switched on."""

    def __init__(self) -> None:
        self.is_on = False
        self.spent = {"environment": 0.0, "inference": 0.0, "wire": 0.0}
        self._inside: list[float] = []  # what was spent in what was called, for each call

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function whose time counts as `what`, but for that of timed functions in it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            self._inside.append(0.0)
            begun = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - begun
                self.spent[what] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return call


class _Measurement:
    """Counts what is sent: first for the rate, then as long again with the stopwatch on."""

    def __init__(self, seconds: float, stopwatch: _Stopwatch) -> None:
        self._seconds, self._stopwatch = seconds, stopwatch
        self._warm: float | None = None
        self._marks: list[tuple[float, float, float, int, int]] = []
        self._frames = self._steps = 0

    def sent(self, unrolls: Any) -> None:
        """Counts one message; raises `_Over` when that was the last."""
        now = time.perf_counter()
        self._frames += int(unrolls.unroll.frames.sum())
        self._steps += (unrolls.unroll.timestep.reward.shape[0] - 1) * len(unrolls.unroll.frames)
        if self._warm is None:
            self._warm = now + _WARM_UP_SECONDS
        if now < self._warm + len(self._marks) * self._seconds:
            return
        self._marks.append(
            (now, time.process_time(), time.thread_time(), self._frames, self._steps)
        )
        self._stopwatch.is_on = len(self._marks) == 2
        if len(self._marks) == 3:
            raise _Over

    def measured(self) -> dict[str, float]:
        """Returns frames per second, and microseconds of CPU time a step."""
        (wall, cpu, _, frames, steps), (_, timed_cpu, timed_main, _, timed_steps) = (
            [b - a for a, b in zip(begin, end, strict=True)]
            for begin, end in zip(self._marks[:-1], self._marks[1:], strict=True)
        )
        spent = dict(self._stopwatch.spent)
        spent["wire"] += timed_cpu - timed_main
        spent["assembling"] = timed_cpu - sum(spent.values())
        return {
            "frames/s": frames / wall,
            "CPU, µs a step": 1e6 * cpu / steps,
            **{f"{what}, µs a step": 1e6 * s / timed_steps for what, s in spent.items()},
        }


def _environment_alone(config: Config, seconds: float) -> float:
    """Returns microseconds of CPU a step of random play, in groups as large as the actor's."""
    num_envs = config.actor.num_envs // config.actor.num_groups
    environment = build.environment(config.environment, num_envs)
    environment.reset(seed=1)
    space = environment.action_space
    space.seed(1)
    actions = [np.stack([space.sample() for _ in range(num_envs)]) for _ in range(1000)]
    steps, begun = 0, time.thread_time()
    while (spent := time.thread_time() - begun) < seconds:
        for action in actions:
            environment.send(action)
            environment.recv()
        steps += len(actions) * num_envs
    environment.close()
    return 1e6 * spent / steps


def _accept(config: Config, ready: Connection) -> None:
    """Serves a learner that takes everything, until the process is killed."""
    from learner.service import settings

    played = tasks.make(config.environment, config.tasks)
    spaces = build.spaces(played)
    agent = build.agent(config.agent, *spaces)
    joined = pb.JoinReply(
        protocol=codec.PROTOCOL_VERSION,
        learner_incarnation=1,
        seed=1,
        settings=settings.for_actors(config, played),
        fingerprint="none",
        unroll_length=config.learner.unroll_length,
        unroll_specs=codec.specs(build.unroll_spec(agent, *spaces, config.learner.unroll_length)),
        parameter_specs=codec.specs(agent.variables),
        max_unrolls_in_flight=config.learner.max_in_flight,
        max_message_bytes=1 << 30,
        limits=pb.Limits(num_envs=config.learner.max_envs_per_message),
    )
    tensors = codec.encode([variable.numpy() for variable in agent.variables])

    class Accepting(pb_grpc.LearnerServicer):
        """Gives newer parameters whenever it is asked."""

        version = 0

        def Join(self, request: Any, context: Any) -> pb.JoinReply:
            return joined

        def GetParameters(self, request: Any, context: Any) -> pb.GetParametersReply:
            self.version += 1
            newest = pb.Parameters(learner_incarnation=1, version=self.version, tensors=tensors)
            return pb.GetParametersReply(parameters=newest)

        def StreamUnrolls(self, requests: Iterator[Any], context: Any) -> Iterator[pb.Receipt]:
            for message in requests:
                yield pb.Receipt(
                    sequence=message.sequence,
                    status=pb.STATUS_ACCEPTED,
                    learner_incarnation=1,
                    newest_version=self.version,
                )

    server = grpc.server(
        futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)]
    )
    pb_grpc.add_LearnerServicer_to_server(Accepting(), server)
    ready.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    threading.Event().wait()
