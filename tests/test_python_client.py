"""The actor in clients/python, which has no network of its own: it plays, and it learns."""

import contextlib
import dataclasses
import functools
import importlib
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import messages
import numpy as np
import pytest
import services
from test_node_actor import greedy_return

from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import ChecksConfig, Config
from impala.play import policy_graph
from impala.types import Parameters
from learner.data.ingest import Ingest
from learner.plan import Plan, acting_step, make_plan
from learner.service.executable import Executable, ExecutablePolicy
from learner.service.inference import Inference
from learner.service.server import Server
from learner.service.service import LearnerService
from learner.service.terms import terms
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1.learner_pb2_grpc import LearnerStub

HOME = pathlib.Path(__file__).parents[1] / "clients" / "python"
WAYS = ("executable", "learner")
_UNROLLS = 200


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("Catch", '{"shift": 1}'), ("Mine/Task-v1", "{}"), ("none-v0", "{}")],
)
def test_an_environment_that_it_does_not_have_is_refused(
    name: str, kwargs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HOME)
    with pytest.raises(ValueError, match=f"The learner plays {name}"):
        importlib.import_module("environments").make(name, kwargs)


@contextlib.contextmanager
def _client(learner: str, log: pathlib.Path, *arguments: object) -> Iterator[subprocess.Popen]:
    """Runs the actor; whatever happens, it is gone afterwards. It can import no TensorFlow."""
    stubs = log.with_suffix(".modules")
    stubs.mkdir(exist_ok=True)
    for name in ("tensorflow", "sonnet", "impala", "actors", "learner", "vtrace"):
        (stubs / f"{name}.py").write_text("raise ImportError('not for clients')")
    flags = ("--learner", learner, *map(str, arguments))
    command = [sys.executable, str(HOME / "actor.py"), *flags]
    path = f"{stubs}:{HOME.parents[1]}"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={"PYTHONPATH": path}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class _Made(ExecutablePolicy):
    """What was made in this process, which has TensorFlow."""

    def __init__(self, plan: Plan, config: Config) -> None:
        super().__init__(config, plan.spaces)
        self._plan, self._agent_config = plan, config.agent

    async def get(self) -> Executable:
        import hashlib

        from impala.parts import build

        agent = build.agent(self._agent_config, *self._plan.spaces)
        onnx = policy_graph.made(agent, self._plan.spaces)
        return Executable(hashlib.sha256(onnx).hexdigest(), onnx)


class _Served(NamedTuple):
    address: str
    service: LearnerService
    ingest: Ingest


@contextlib.contextmanager
def _learner(preset: str, version: int = 3, **changed: object) -> Iterator[_Served]:
    """Serves a learner that learns nothing and refuses violations."""
    config = values.overlay(PRESETS[preset][1], changed)
    config = dataclasses.replace(config, checks=ChecksConfig("refuse"))
    plan = make_plan(config)
    agent = plan.phases.agent
    rng = np.random.default_rng(0)
    for variable in agent.trainable_variables:  # a policy that is decided
        variable.assign_add(rng.normal(0.0, 0.2, variable.shape).astype(np.float32))
    told = terms(config, agent.variables, plan.unroll_spec, plan.played, plan.spaces)
    ingest = Ingest(100_000)
    inference = Inference(
        *(config, plan.spaces, plan.unroll_spec), step=lambda: acting_step(config, plan.spaces)
    )
    ways: dict[str, Any] = {"executable": _Made(plan, config), "inference": inference}
    service = messages.service(terms=told, ingest=ingest, config=config, **ways)
    arrays = [np.asarray(variable.numpy()) for variable in agent.variables]
    service.publish(Parameters(messages.LEARNER, version, 0.1, 0, arrays))
    server = Server(service, "127.0.0.1:0")
    try:
        yield _Served(server.start(), service, ingest)
    finally:
        server.stop(0.0)
        service.close()


def test_what_another_learner_takes_no_more_is_not_sent_again_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HOME))
    session = importlib.import_module("session")
    actor = session.Session("127.0.0.1:1", "a")
    reply = pb.JoinReply(fingerprint="f", settings="{}", max_message_bytes=100)
    reply.protocol.CopyFrom(session.PROTOCOL)
    monkeypatch.setattr(
        actor, "_call", lambda *_: pb.JoinReply.FromString(reply.SerializeToString())
    )
    actor._join()
    actor._message, actor._sequence = pb.Unrolls(tensors=[b"x" * 90]), 4
    actor._join()  # it still fits
    reply.max_message_bytes = 50
    with pytest.raises(session.Refused, match="Message 4 has 92 bytes, the learner now takes 50"):
        actor._join()
    # In another run numbers begin anew, or a new message could pass for one of before.
    reply.fingerprint, before = "g", actor.incarnation
    with pytest.raises(session.Interrupted, match="Another run"):
        actor._join()
    assert (actor._message, actor._sequence, actor._acknowledged[0]) == (None, 0, 0)
    assert actor.incarnation != before
    actor._join()


def _plays(way: str, preset: str, log: pathlib.Path, version: int = 3, **changed: object) -> None:
    with _learner(preset, version, **changed) as learner:
        service = learner.service
        with _client(learner.address, log, "--act", way, "--num-envs", 4) as playing:
            services.wait_for("unrolls", lambda: _status(service).received >= _UNROLLS)
            service.finish()
            assert services.end_of(playing) == 0, log.read_text()
    status = _status(service)
    assert not status.rejected and not status.violations, log.read_text()
    episodes = []
    while (arrival := learner.ingest.get(0.0)) is not None:
        episodes += arrival.episodes
        assert (arrival.unroll.parameter_version == version).all()
    assert episodes


def _has_learned(least: float, row: dict[str, float]) -> bool:
    return row["unrolls/learned"] > least


def _status(service: LearnerService) -> pb.RunStatus:
    return service.get_status()


@pytest.mark.parametrize("way", WAYS)
def test_it_plays_without_a_violation(tmp_path: pathlib.Path, way: str) -> None:
    _plays(way, "catch", tmp_path / "log")


@pytest.mark.parametrize("way", WAYS)
def test_another_process_of_its_name_ends_it(tmp_path: pathlib.Path, way: str) -> None:
    """Also where only `Act` says so, as no unroll can be finished."""
    log = tmp_path / "log"
    with _learner("catch") as learner:
        flags = ("--act", way, "--num-envs", 4, "--name", "twin")
        with (
            _client(learner.address, log, *flags) as playing,
            grpc.insecure_channel(learner.address) as channel,
        ):
            services.wait_for("unrolls", lambda: _status(learner.service).received)
            LearnerStub(channel).Join(messages.join_request("twin", 777))
            assert services.end_of(playing) == 1
    assert "another process has joined as twin" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("preset", "version", "agent"),
    [
        ("pendulum", 0, {}),
        ("pendulum", 1, {}),
        ("cartpole-q", 1, {}),
        ("cartpole", 1, {"core": "lstm", "lstm_size": 16}),
    ],
)
def test_it_plays_without_a_violation_whatever_the_agent_is(
    tmp_path: pathlib.Path, way: str, preset: str, version: int, agent: dict[str, object]
) -> None:
    _plays(way, preset, tmp_path / "log", version, agent=agent)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_with_a_learner_that_was_restarted(tmp_path: pathlib.Path, way: str) -> None:
    logdir, address = tmp_path / "run", f"unix:{tmp_path / 'socket'}"
    logdir.mkdir()
    log = tmp_path / "actor.log"
    flags = ("--checks.on-violation", "refuse")
    with contextlib.ExitStack() as actor:
        learned = 0.0
        for _ in range(2):
            with services.learner(logdir, address, *flags):
                services.address_of(logdir)
                if not log.exists():
                    actor.enter_context(_client(address, log, "--act", way))
                before = len(services.rows(logdir))
                more = functools.partial(_has_learned, learned + 300)
                row = services.wait_for_row(logdir, "unrolls", more, after=before)
                learned = row["unrolls/learned"]
                assert not [name for name in row if "violations" in name or "rejected" in name]
    assert "waits for" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_it_trains_catch_as_the_only_actor(tmp_path: pathlib.Path, way: str) -> None:
    logdir, log = tmp_path / "run", tmp_path / "learner.log"
    logdir.mkdir()
    flags = ("--total-frames", 200_000, "--checks.on-violation", "refuse")
    began = time.monotonic()
    learner = services.impala(
        *("learner", "catch", "--logdir", logdir, "--listen", "127.0.0.1:0", *flags), log=log
    )
    with learner as learning:
        address = services.address_of(logdir)
        with _client(address, tmp_path / "actor.log", "--act", way) as playing:
            assert services.end_of(playing) == 0, (tmp_path / "actor.log").read_text()
            assert services.end_of(learning) == 0, log.read_text()
    print(f"{way}: {time.monotonic() - began:.0f} s")
    assert "violation" not in log.read_text()
    assert greedy_return(logdir, episodes=200, steps=9) >= 0.99
