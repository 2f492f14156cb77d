"""The compliance kit: our actors pass it, and it says what the page says."""

import asyncio
import contextlib
import hashlib
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import golden
import grpc
import messages
import node
import onnx
import pytest
import services
from fake_learner import FakeLearner

from impala.commands.main import main
from impala.config import values
from impala.config.presets import PRESETS
from impala.conform import golden as kit_golden
from impala.conform import learner_cases, sentences
from impala.conform.cases import Kit
from impala.conform.learner import Learner, serving
from impala.conform.learner_cases import LearnerKit
from impala.conform.report import Report
from impala.runtime.security import ClientSecurity
from impala.types import Parameters
from learner.plan import acting_step, plan_of
from learner.service.inference import Inference
from learner.service.server import Server
from learner.service.terms import terms
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc


def _told(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return services.run("conform", *arguments)


def _passes(preset: str, actor: str, seconds: float = 60.0) -> None:
    told = _told(
        *("--listen", "127.0.0.1:0", "--preset", preset, "--actor", actor, "--seconds", seconds)
    )
    assert told.returncode == 0, told.stdout + told.stderr
    number = sum(map(len, sentences.SENTENCES.values()))
    assert f"{number} sentences of docs/wire-protocol.md: {number} passed." in told.stdout


def _in_node() -> str:
    return f"{node.needed()} {node.HOME / 'actor.js'} --learner {{address}}"


def _in_python() -> str:
    return f"{sys.executable} -m impala actor --learner {{address}}"


def test_the_actor_in_node_passes() -> None:
    _passes("catch", _in_node())


@pytest.mark.slow
@pytest.mark.parametrize("preset", golden.RUNS)
def test_the_actor_in_python_passes_with_an_executable_policy(preset: str) -> None:
    home = node.HOME.parent / "python"
    path = f"env PYTHONPATH={home.parents[1]}"
    _passes(preset, f"{path} {sys.executable} {home / 'actor.py'} --learner {{address}}")


@pytest.mark.slow
def test_the_actor_in_node_passes_with_numbers_as_actions() -> None:
    _passes("pendulum", _in_node())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["catch", "pendulum"])
def test_our_own_actor_passes(preset: str) -> None:
    _passes(preset, _in_python())


@pytest.mark.parametrize("preset", golden.RUNS)
def test_our_own_learner_passes(preset: str) -> None:
    """Its service and its server, which refuses mistakes; nothing is learned from what it takes."""
    config = values.overlay(PRESETS[preset][1], {"checks": {"on_mistake": "refuse"}})
    plan = plan_of(config)
    variables = plan.phases.agent.variables
    inference = Inference(
        *(config, plan.spaces, plan.unroll_spec), step=lambda: acting_step(config, plan.spaces)
    )
    service = messages.service(
        terms=terms(config, variables, plan.unroll_spec, plan.played, plan.spaces),
        config=config,
        inference=inference,
    )
    parameters = [variable.numpy() for variable in variables]
    service.publish(Parameters(messages.LEARNER, 7, 0.0, 0, parameters))
    server = Server(service, "127.0.0.1:0")
    try:
        told = LearnerKit(server.start(), ClientSecurity(), 20.0, print).run()
    finally:
        server.stop(0.0)
        service.close()
    assert [row for row in told.rows() if row.result != "passed"] == []


def test_a_learner_that_takes_everything_is_found_out() -> None:
    with FakeLearner() as learner:
        reply = kit_golden.run("catch").reply
        learner.unroll_specs, learner.unroll_length = reply.unroll_specs, reply.unroll_length
        learner.answer = lambda message: learner.receipt(message, pb.STATUS_ACCEPTED)
        told = LearnerKit(learner.address, ClientSecurity(), 20.0, print)
        # It says nothing of spaces, so the kit cannot make a message of its own.
        told._probe.connect()
        told._probe.reply.MergeFrom(
            pb.JoinReply(
                observation_space=reply.observation_space,
                action_space=reply.action_space,
                limits=reply.limits,
            )
        )
        told._bad()
    failed = {row.sentence for row in told.report.rows() if row.result == "FAILED"}
    assert failed == set(learner_cases.LEARNER_SENTENCES[learner_cases.BAD][:-2])


def test_a_learner_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--learner", "127.0.0.1:1", "--seconds", "0.3"]) == 1
    assert "Join was answered with UNAVAILABLE" in capsys.readouterr().out


def test_who_does_not_come_or_ends_fails_in_time(tmp_path: pathlib.Path) -> None:
    """Nobody joins, and an actor that ends at once."""
    for actor in ("", "false"):
        told = _told("--listen", "127.0.0.1:0", "--seconds", 0.3, "--actor", actor)
        assert told.returncode == 1
        assert "did not join" in told.stdout
        assert "it did not come to it" in told.stdout
        assert not re.search(r"^  passed", told.stdout, re.M)


async def _called(learner: Learner) -> tuple[pb.GetExecutablePolicyReply, ...]:
    """Asks for the executable policy twice, then to be acted for."""
    async with serving(learner, "127.0.0.1:0") as address, grpc.aio.insecure_channel(address) as to:
        stub = pb_grpc.LearnerStub(to)
        got = await stub.GetExecutablePolicy(pb.GetExecutablePolicyRequest())
        again = await stub.GetExecutablePolicy(pb.GetExecutablePolicyRequest(digest=got.digest))
        with pytest.raises(grpc.aio.AioRpcError, match="FAILED_PRECONDITION") as refused:
            await stub.Act(iter([pb.ActRequest()])).read()
        assert "does not act for others" in str(refused.value.details())
        return got, again


def test_kit_serves_its_executable_policy_and_does_not_act() -> None:
    run = kit_golden.run("catch")
    got, again = asyncio.run(_called(Learner(run, lambda message, mistake: None)))
    digest = hashlib.sha256(run.onnx).hexdigest()
    assert got == pb.GetExecutablePolicyReply(digest=digest, onnx=run.onnx)
    assert again == pb.GetExecutablePolicyReply(digest=digest)
    inputs: Any = onnx.load_from_string(got.onnx).graph.input
    names = {value.name for value in inputs}
    shown = ["timestep/observation", "timestep/step_type"]
    parameters = [f"parameters/{number}" for number in range(len(run.reply.parameter_specs))]
    assert names == {"uniform", *shown, *parameters}


async def _left_in_the_middle(learner: Learner) -> None:
    """An actor ends its stream, and cancels it while the kit cleans up. Then the kit breaks all."""

    async def no_messages() -> AsyncIterator[pb.Unrolls]:
        return
        yield

    stream = asyncio.create_task(learner.StreamUnrolls(no_messages(), None))
    while not stream.done():
        await asyncio.sleep(0)
        stream.cancel()
    await asyncio.wait_for(learner.break_streams(), 10.0)


def test_a_stream_that_is_cancelled_while_it_ends_is_over() -> None:
    asyncio.run(
        _left_in_the_middle(Learner(kit_golden.run("catch"), lambda message, mistake: None))
    )


async def _sends(learner: Learner, message: bytes) -> str:
    async with serving(learner, "127.0.0.1:0") as address, grpc.aio.insecure_channel(address) as to:
        stream = to.stream_stream("/impala.v1.Learner/StreamUnrolls")()
        await stream.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(stream.read(), 60.0)
        return f"{refused.value.code().name}: {refused.value.details()}"


def test_bytes_that_are_no_message_are_refused_and_told() -> None:
    kit = Kit("catch", 20.0, "", print)
    answer = asyncio.run(_sends(kit._learner, b"\xff no message"))
    assert answer.startswith("INVALID_ARGUMENT: its bytes are no Unrolls")
    kit._sum_up()
    (row,) = [row for row in kit.report.rows() if row.sentence == sentences.VALID]
    assert (row.result, row.case) == ("FAILED", sentences.STREAM)


@contextlib.contextmanager
def _kit_of_an_idle_actor(
    directory: pathlib.Path,
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process of a kit, and the number of that of the actor that it has started."""
    pid = directory / "pid"
    actor = shlex.join(["sh", "-c", f"echo $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 600"])
    arguments = ("conform", "--listen", "127.0.0.1:0", "--seconds", 600, "--actor", actor)
    with services.impala(*arguments, log=directory / "log") as kit:
        services.wait_for("the actor", lambda: pid.exists() or kit.poll() is not None)
        assert pid.exists(), (directory / "log").read_text()
        yield kit, int(pid.read_text())


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_kit_and_its_actor(tmp_path: pathlib.Path, first: signal.Signals) -> None:
    """Also a pair of them, which is what `timeout` under `make` sends."""
    with _kit_of_an_idle_actor(tmp_path) as (kit, actor):
        kit.send_signal(first)
        assert services.stop(kit) == 128 + first
        assert not services.is_alive(actor)


def test_the_actor_of_a_kit_that_is_killed_ends(tmp_path: pathlib.Path) -> None:
    with _kit_of_an_idle_actor(tmp_path) as (kit, actor):
        kit.kill()
        services.wait_for("its end", lambda: not services.is_alive(actor))


_DIES = """
import pathlib, sys, time
from impala.conform.probe import Probe
from impala.runtime.security import ClientSecurity
marker = pathlib.Path(sys.argv[2])
if marker.exists():
    sys.exit(7)
probe = Probe(sys.argv[1], ClientSecurity(), 20.0)
request = probe.request()
probe.reply = probe.join(request)
while not probe.parameters.tensors:
    probe.parameters = probe.pull().parameters
    time.sleep(0.05)
marker.touch()
probe.send([probe.message(request)])
sys.exit(7)
"""


_GIVES_UP = """
import sys
from impala.conform.probe import Probe
from impala.runtime.security import ClientSecurity
probe = Probe(sys.argv[1], ClientSecurity(), 20.0)
probe.join(probe.request())
sys.exit(1)
"""


def test_mistakes_of_an_actor_that_sends_nothing_are_not_tested() -> None:
    """It joins, does not like what it is told, and gives up."""
    actor = shlex.join([sys.executable, "-c", _GIVES_UP, "{address}"])
    kit = Kit("catch", 20.0, actor, print)
    report = asyncio.run(kit.run("127.0.0.1:0", only=(sentences.JOIN, sentences.MISTAKES)))
    of_mistakes = [row for row in report.rows() if row.case == sentences.MISTAKES]
    assert {row.result for row in of_mistakes} == {"not tested"}, report.text()


def test_cases_that_a_dead_actor_does_not_come_to_are_not_tested(tmp_path: pathlib.Path) -> None:
    """It joins, sends a message and ends; started again, it ends at once."""
    actor = shlex.join([sys.executable, "-c", _DIES, "{address}", str(tmp_path / "marker")])
    kit = Kit("catch", 20.0, actor, print)
    only = (sentences.JOIN, sentences.MISTAKES, sentences.PARAMETERS, sentences.BROKEN)
    report = asyncio.run(kit.run("127.0.0.1:0", only=only))
    rows = {row.case: row for row in report.rows()}
    assert rows[sentences.JOIN].result == "passed", report.text()
    assert rows[sentences.MISTAKES].result == "FAILED"
    why = "the actor ended with status 7, and did not play on after a case that failed"
    for case in (sentences.PARAMETERS, sentences.BROKEN):
        assert (rows[case].result, rows[case].detail) == ("not tested", why)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Give --listen ADDRESS to try an actor"),
        (("--listen", "127.0.0.1:0", "--learner", "127.0.0.1:1"), "or --learner ADDRESS"),
        (("--listen", "nowhere"), "the host is missing"),
        (("--listen", "127.0.0.1:0", "--actor", "'"), "No closing quotation"),
        (("--listen", "127.0.0.1:0", "--actor", "no-such"), "there is no program 'no-such'"),
        (("--listen", "127.0.0.1:0", "--seconds", "0"), "seconds"),
    ],
)
def test_a_wrong_command_line_is_explained(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_report_names_the_first_failure_of_each_sentence() -> None:
    report = Report({"one": ("a", "b"), "two": ("c",), "three": ("d",)})
    report.failed("one", "because", "b")
    report.failed("one", "and then", "b")
    report.done("one")
    report.done("two", "no way to")
    assert [row[1:] for row in report.rows()] == [
        ("a", "passed", ""),
        ("b", "FAILED", "because"),
        ("c", "not tested", "no way to"),
        ("d", "not tested", "it did not come to it"),
    ]
    assert not report.is_good
    assert (
        "4 sentences of docs/wire-protocol.md: 1 passed, 1 FAILED, 2 not tested." in report.text()
    )
