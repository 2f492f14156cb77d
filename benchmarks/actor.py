"""What one actor does against a sink that accepts everything, and the same of another version.

The actor is the real one, `actors.run`, with its gRPC client. The sink has a process of its own: it
gives receipts and newer parameters, and looks at nothing. Costs are CPU time, so that what runs
beside them on a machine counts for little.

This file is also the program that is run for each measurement, by its path: `impala`, `actors` and
`protos` come from whichever folder stands in PYTHONPATH.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

_OURS = pathlib.Path(__file__).parents[1]
_WARM_UP_SECONDS = 2.0
_START_SECONDS = 120.0


class Acted(NamedTuple):
    """What one actor did. A step is one of one environment."""

    frames_per_second: float
    cpu: float  # microseconds a step, of the process
    environment: float  # of these: `send` and `recv` of environments
    inference: float  # choosing actions
    assembling: float  # the rest of the unroll loop
    wire: float  # making messages, and all other threads
    environment_alone: float  # microseconds a step of random play, in the same process
    share_of_environment: float  # of the steps per CPU second of random play


def measure(
    presets: Sequence[str], seconds: float, rounds: int, against: pathlib.Path | None = None
) -> dict[str, list[tuple[Acted, Acted | None]]]:
    """Measures each preset in turn, ours and then the other one's, `rounds` times.

    Args:
      presets: their names.
      seconds: of each measurement.
      rounds: measurements of each.
      against: folder of a checkout of another version.

    Returns:
      For each preset and round what ours did, and what the other one did, if there is one.
    """
    measured: dict[str, list[tuple[Acted, Acted | None]]] = {preset: [] for preset in presets}
    for _ in range(rounds):
        for preset, each in measured.items():
            theirs = None if against is None else _run(against, preset, seconds)
            ours = _run(_OURS, preset, seconds)
            each.append((ours, theirs))
            print(_line(preset, ours, theirs), flush=True)
    return measured


def table(measured: dict[str, list[tuple[Acted, Acted | None]]]) -> str:
    """Markdown: medians over the rounds."""
    lines = [
        f"| preset | | {' | '.join(name.replace('_', ' ') for name in Acted._fields)} |",
        f"|---|---|{'---:|' * len(Acted._fields)}",
    ]
    for preset, rounds in measured.items():
        for name, acted in zip(("ours", "theirs"), zip(*rounds, strict=True), strict=True):
            if None not in acted:
                cells = [f"{statistics.median(field):,.3g}" for field in zip(*acted, strict=True)]
                lines.append(f"| {preset} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _line(preset: str, ours: Acted, theirs: Acted | None) -> str:
    said = f"{preset}: {ours.frames_per_second:,.0f} frames/s, {ours.cpu:.1f} µs of CPU a step"
    if theirs is None:
        return said
    return (
        f"{said}; theirs {theirs.frames_per_second:,.0f} and {theirs.cpu:.1f}: "
        f"{ours.frames_per_second / theirs.frames_per_second:.2f} times the frames/s, "
        f"{theirs.cpu / ours.cpu:.2f} times the frames per CPU second"
    )


def _run(root: pathlib.Path, preset: str, seconds: float) -> Acted:
    """One measurement of the version in a folder, in processes of its own."""
    environ = {**os.environ, "PYTHONPATH": str(root), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-P", __file__, preset, str(seconds)]
    done = subprocess.run(
        command, env=environ, cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"The actor of {root} ended with {done.returncode}.\n{done.stderr[-3000:]}"
        )
    return Acted(**json.loads(done.stdout.splitlines()[-1]))


# What happens in a process of its own.


class _Over(Exception):
    """Everything is measured."""


class _Stopwatch:
    """CPU time of the actor's main thread by what it is spent on, while it is switched on."""

    def __init__(self) -> None:
        self.is_on = False
        self.spent = {"environment": 0.0, "inference": 0.0, "wire": 0.0}
        self._inside: list[float] = []  # what was spent in what was called, for each call

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts as `what`, without that of what counts otherwise."""

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

    def acted(self, environment_alone: float) -> dict[str, float]:
        """The fields of `Acted`."""
        first, second = (
            [b - a for a, b in zip(begin, end, strict=True)]
            for begin, end in zip(self._marks[:-1], self._marks[1:], strict=True)
        )
        wall, process, _, frames, steps = first
        cpu = 1e6 * process / steps
        _, timed_process, timed_main, _, timed_steps = second
        spent = {what: 1e6 * s / timed_steps for what, s in self._stopwatch.spent.items()}
        spent["wire"] += 1e6 * (timed_process - timed_main) / timed_steps
        return {
            **spent,
            "frames_per_second": frames / wall,
            "cpu": cpu,
            "assembling": 1e6 * timed_process / timed_steps - sum(spent.values()),
            "environment_alone": environment_alone,
            "share_of_environment": environment_alone / cpu,
        }


def main() -> int:
    """Measures one actor of a preset against a sink, and prints `Acted` as JSON."""
    preset, seconds = sys.argv[1], float(sys.argv[2])
    from impala.runtime import process

    if hasattr(process, "bound_numpy_threads"):  # as the command does
        process.bound_numpy_threads()
    process.load_tensorflow(use_gpus=False)

    from actors import actor, run
    from actors.client import LearnerClient
    from impala.config import presets
    from impala.parts import build

    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    sink = spawn.Process(target=_sink, args=(preset, there), daemon=True)
    sink.start()
    if not here.poll(_START_SECONDS):
        raise RuntimeError("The sink does not start.")
    address = here.recv()

    stopwatch = _Stopwatch()
    measurement = _Measurement(seconds, stopwatch)
    make, send = build.environment, LearnerClient.send

    def environment(*args: Any, **kwargs: Any) -> Any:
        made: Any = make(*args, **kwargs)
        made.send = stopwatch.timed("environment", made.send)
        made.recv = stopwatch.timed("environment", made.recv)
        return made

    def counted(client: LearnerClient, unrolls: Any) -> None:
        measurement.sent(unrolls)
        send(client, unrolls)

    group: Any = getattr(actor, "Group", None) or vars(actor)["_Group"]  # in older versions
    patched: list[tuple[Any, str, Callable[..., Any]]] = [
        (build, "environment", environment),
        (group, "act", stopwatch.timed("inference", group.act)),
        (LearnerClient, "send", stopwatch.timed("wire", counted)),
    ]
    for owner, name, function in patched:
        setattr(owner, name, function)
    with contextlib.suppress(_Over):
        run.run_actor(address)
    stopwatch.is_on = False
    config = presets.PRESETS[preset][1]
    print(json.dumps(measurement.acted(_environment_alone(config, seconds / 2))))
    sink.kill()
    return 0


def _environment_alone(config: Any, seconds: float) -> float:
    """Microseconds of CPU a step of random play, in groups as large as the actor's."""
    import numpy as np

    from impala.parts import build

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


def _sink(preset: str, ready: Connection) -> None:
    """Serves a learner that takes everything, until it is killed."""
    import grpc

    from impala.config import presets
    from impala.parts import build
    from impala.schedule import tasks
    from learner.service import settings
    from protos import codec
    from protos.impala.v1 import learner_pb2 as pb
    from protos.impala.v1 import learner_pb2_grpc as pb_grpc

    config = presets.PRESETS[preset][1]
    played = tasks.make(config.environment, config.tasks)
    spaces = build.spaces(played)
    agent = build.agent(config.agent, *spaces)
    unroll_spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
    joined = pb.JoinReply(
        protocol=codec.PROTOCOL_VERSION,
        learner_incarnation=1,
        seed=1,
        settings=settings.for_actors(config, played),
        fingerprint="none",
        unroll_length=config.learner.unroll_length,
        unroll_specs=codec.specs(unroll_spec),
        parameter_specs=codec.specs(agent.variables),
        max_unrolls_in_flight=config.learner.max_in_flight,
        max_message_bytes=1 << 30,
    )
    tensors = codec.encode([variable.numpy() for variable in agent.variables])

    class Sink(pb_grpc.LearnerServicer):
        """Gives newer parameters whenever it is asked."""

        version = 0

        def Join(self, request: Any, context: Any) -> pb.JoinReply:
            return joined

        def GetParameters(self, request: Any, context: Any) -> pb.GetParametersReply:
            self.version += 1
            return pb.GetParametersReply(
                parameters=pb.Parameters(
                    learner_incarnation=1, version=self.version, tensors=tensors
                )
            )

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
    pb_grpc.add_LearnerServicer_to_server(Sink(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.send(f"127.0.0.1:{port}")
    threading.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
