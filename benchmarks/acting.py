"""Measures three ways to act: with parameters, with the executable policy, and at the learner.

Callers act upon the same observations again and again, without an environment: parameters as our
own actors do (NumPy or TensorFlow), the graph in ONNX Runtime, and `Act` over a Unix socket as an
actor without a network does. All processes are started once; then they are measured in turn, each
for a while, so that what else the machine does falls on all alike.
"""

import multiprocessing
import pathlib
import queue
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import tree

from impala.config import presets
from impala.config import schema as configs
from impala.environments.spaces import Spaces
from impala.parts import build
from impala.runtime import process
from impala.schedule import tasks
from impala.types import Parameters, StepType, TimeStep

ENVIRONMENTS = (1, 32)
_CALLERS = 4
_ROUNDS = 5
_Measured = Mapping[tuple[str, int], float]


def measure(seconds: float) -> dict[str, _Measured]:
    """Measures each preset; `seconds` for all rounds of one way with one number of environments.

    Returns:
      Of each preset: agent steps per second, the median of the rounds, by way and by environments.
    """
    return {
        preset: _measure(presets.PRESETS[preset][1], seconds / _ROUNDS)
        for preset in ("catch", "atari")
    }


def table(measured: Mapping[str, _Measured]) -> str:
    """Returns a table in Markdown."""
    columns = [(preset, number) for preset in measured for number in ENVIRONMENTS]
    lines = ["| | " + " | ".join(f"{preset}, {number}" for preset, number in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for way in dict.fromkeys(way for way, _ in next(iter(measured.values()))):
        steps = [f"{measured[preset][way, number]:,.0f}" for preset, number in columns]
        lines.append(f"| {way} | {' | '.join(steps)} |")
    return "\n".join(lines)


def _measure(config: configs.Config, seconds: float) -> _Measured:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="impala-bench-") as directory:
        address = f"unix:{directory}/socket"
        starts: list[tuple[Callable[..., None], Any]] = [
            (_serve, address),
            (_with_parameters, None),
            (_with_graph, None),
            *[(_at_learner, address)] * _CALLERS,
        ]
        pipes, processes = [], []
        try:
            for number, (run, argument) in enumerate(starts):
                ours, theirs = context.Pipe()
                processes.append(
                    context.Process(target=run, args=(theirs, config, argument, number))
                )
                processes[-1].start()
                pipes.append(ours)
                if run is _serve:
                    ours.recv()  # it serves
            _, parameters, graph, *callers = pipes
            ways = {
                "parameters": [parameters],
                "executable policy": [graph],
                "at the learner, 1 actor": callers[:1],
                f"at the learner, {_CALLERS} actors": callers,
            }
            found: dict[tuple[str, int], list[float]] = {}
            for _ in range(_ROUNDS):
                for number in ENVIRONMENTS:
                    for way, used in ways.items():
                        for pipe in used:
                            pipe.send((number, seconds))
                        rates = [pipe.recv() for pipe in used]
                        found.setdefault((way, number), []).append(sum(rates))
            return {key: statistics.median(rates[1:]) for key, rates in found.items()}
        finally:
            for each in processes:
                each.kill()
                each.join()


def _answers(pipe: Connection, act: Callable[[int], Callable[[], None]]) -> None:
    """Measures what `act` returns for a number of environments, whenever that is asked for."""
    while True:
        number, seconds = pipe.recv()
        step = act(number)
        step()
        steps, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            step()
            steps += number
        pipe.send(steps / (time.monotonic() - began))


def _started(config: configs.Config) -> tuple[Spaces, Any]:
    """Returns the spaces and the agent of a run, in a process that has one thread for it."""
    process.tune_malloc()
    process.load_tensorflow(use_gpus=False)
    process.set_threads(1)
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    return spaces, build.agent(config.agent, *spaces)


def _timestep(spaces: Spaces, num_envs: int) -> TimeStep:
    samples = [spaces[0].sample() for _ in range(num_envs)]
    ones = np.ones(num_envs, np.float32)
    seen = tree.map_structure(lambda *leaves: np.stack(leaves), *samples)
    return TimeStep(seen, 0.0 * ones, ones, np.full(num_envs, StepType.MID, np.int8))


def _with_parameters(pipe: Connection, config: configs.Config, _: None, seed: int) -> None:
    """As our own actors."""
    spaces, agent = _started(config)
    from actors import policy

    policies = policy.of(agent, config.agent, spaces)
    policies.assign([variable.numpy() for variable in agent.variables])

    def act(num_envs: int) -> Callable[[], None]:
        timestep = _timestep(spaces, num_envs)
        acting = policies.begin(timestep, [seed, num_envs])

        def step() -> None:
            acting.act(timestep)

        return step

    _answers(pipe, act)


def _with_graph(pipe: Connection, config: configs.Config, _: None, seed: int) -> None:
    """As an actor that runs the executable policy, in one thread."""
    spaces, agent = _started(config)
    import onnxruntime

    from impala.acting import ActingStep
    from impala.play import policy_graph

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    graph = policy_graph.made(agent, spaces, config.agent)
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    described = ActingStep(agent, spaces, config.agent)
    states = [name for name in described.outputs if name.startswith("next/")]
    parameters = {
        f"parameters/{i}": np.asarray(variable.numpy())
        for i, variable in enumerate(agent.variables)
    }
    random = np.random.default_rng(seed)

    def act(num_envs: int) -> Callable[[], None]:
        timestep = _timestep(spaces, num_envs)
        leaves = [*tree.flatten(timestep.observation), timestep.step_type]
        leaves += [x.numpy() for x in tree.flatten(agent.initial_state(num_envs))]
        names = [spec.name for spec in described.inputs]
        given = {**dict(zip(names, leaves, strict=False)), **parameters}
        drawn = described.inputs[len(leaves) : described.num_inputs]

        def step() -> None:
            for spec in drawn:
                given[spec.name] = random.random((num_envs, *spec.shape[1:]), np.float32)
            said = dict(zip(described.outputs, session.run(None, given), strict=True))
            for name in states:
                given[name.removeprefix("next/")] = said[name]

        return step

    _answers(pipe, act)


def _at_learner(pipe: Connection, config: configs.Config, address: str, seed: int) -> None:
    """As an actor that has the learner act: without TensorFlow."""
    import grpc

    from protos import codec
    from protos.impala.v1 import learner_pb2 as pb
    from protos.impala.v1 import learner_pb2_grpc as pb_grpc

    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
    stub = pb_grpc.LearnerStub(channel)
    named: dict[str, Any] = {"actor": f"bench-{seed}", "incarnation": seed + 1}
    reply = stub.Join(pb.JoinRequest(protocol=codec.PROTOCOL_VERSION, role=pb.ROLE_ACTOR, **named))
    num_states, length = reply.num_core_state_specs, reply.unroll_length
    states = reply.unroll_specs[len(reply.unroll_specs) - num_states :]

    def act(num_envs: int) -> Callable[[], None]:
        timestep = _timestep(spaces, num_envs)
        tensors = codec.encode([*tree.flatten(timestep.observation), timestep.step_type])
        requests: queue.SimpleQueue[pb.ActRequest | None] = queue.SimpleQueue()
        replies = stub.Act(iter(requests.get, None))
        zeros = [np.zeros((num_envs, *s.shape), codec.numpy_dtype(s.dtype)) for s in states]
        row, memory = 0, codec.encode(zeros)

        def step() -> None:
            nonlocal row, memory
            requests.put(
                pb.ActRequest(
                    **named,
                    begins=row % length == 0,
                    num_envs=num_envs,
                    tensors=[*tensors, *memory],
                )
            )
            said = next(replies).tensors
            row, memory = row + 1, said[len(said) - num_states :]

        return step

    _answers(pipe, act)


def _serve(pipe: Connection, config: configs.Config, address: str, seed: int) -> None:
    """Is a learner that only acts."""
    process.tune_malloc()
    process.load_tensorflow(use_gpus=False)
    from learner.data.ingest import Ingest
    from learner.evaluation.snapshots import Snapshots
    from learner.fleet.receipts import ReceiptProofs
    from learner.fleet.records import Records
    from learner.plan import acting_step, plan_of
    from learner.service.inference import Inference
    from learner.service.server import Server
    from learner.service.service import LearnerService, Lineage
    from learner.service.terms import terms

    plan = plan_of(config)
    variables = plan.phases.agent.variables
    incarnation = secrets.randbits(62) + 1
    service = LearnerService(
        terms(config, variables, plan.unroll_spec, plan.played, plan.spaces),
        Lineage(incarnation, {}, ReceiptProofs(secrets.token_bytes(), incarnation)),
        *(Records.begin(config), Ingest(1), plan.schedule, Snapshots(1, "never")),
        inference=Inference(
            *(config, plan.spaces, plan.unroll_spec),
            step=lambda: acting_step(config, plan.spaces),
        ),
    )
    values: Sequence[np.ndarray] = [variable.numpy() for variable in variables]
    service.publish(Parameters(incarnation, 1, 0.0, 0, values))
    server = Server(service, address)
    pathlib.Path(address.removeprefix("unix:")).unlink(missing_ok=True)
    server.start()
    pipe.send("serving")
    while True:
        time.sleep(1.0)
        server.check()
