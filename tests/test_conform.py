"""The compliance kit: our actors pass its cases, and an actor with a violation does not."""

import asyncio
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import node
import pytest
import services

from impala.commands.main import main
from impala.config.presets import PRESETS
from impala.conform.cases import MESSAGES, REQUIREMENTS, Kit, Row
from impala.conform.learner import Learner, Run, serving

PYTHON = node.HOME.parent / "python"


def _actor(*words: object) -> str:
    return shlex.join([*map(str, words), "--learner", "{address}"])


def _client(script: pathlib.Path, way: str) -> str:
    path = f"{PYTHON.parents[1]}:{PYTHON}"
    return _actor("env", f"PYTHONPATH={path}", sys.executable, script, "--act", way)


def _passes(preset: str, actor: str) -> None:
    told = services.run(
        *("conform", "--listen", "127.0.0.1:0", "--preset", preset, "--actor", actor),
        *("--seconds", 60),
    )
    assert told.returncode == 0, told.stdout + told.stderr
    passed = [line.split(maxsplit=1) for line in told.stdout.splitlines()]
    assert passed == [["passed", case] for case in REQUIREMENTS]


def test_the_actor_in_node_passes() -> None:
    _passes("catch", _actor(node.needed(), node.HOME / "actor.js"))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["executable", "learner"])
@pytest.mark.parametrize("preset", ["catch", "pendulum"])
def test_the_actor_in_python_passes(preset: str, way: str) -> None:
    _passes(preset, _client(PYTHON / "actor.py", way))


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["catch", "pendulum"])
def test_our_own_actor_passes(preset: str) -> None:
    _passes(preset, _actor(sys.executable, "-m", "impala", "actor"))


def _rows(actor: str, only: tuple[str, ...]) -> dict[str, Row]:
    kit = Kit(PRESETS["catch"][1], 60.0, actor, lambda line: print(line, file=sys.stderr))
    rows = asyncio.run(kit.run("127.0.0.1:0", only=only))
    return {row.case: row for row in rows}


_VIOLATIONS = {
    "a reward in a seam": (
        """
import actor, group
write = group.Group._write
def wrong(self, row, env, seen, step_type, reward, discount):
    write(self, row, env, seen, step_type, 0.5, discount)
group.Group._write = wrong
actor.main()
""",
        "the rewards in its rows",
    ),
    "outputs a row late": (
        """
import actor, agents
act = agents.AtLearner.act
def wrong(self, given):
    said = act(self, given)
    before, self.before = getattr(self, "before", said), said
    return before
agents.AtLearner.act = wrong
actor.main()
""",
        "computed of row t - 1",
    ),
}


@pytest.mark.parametrize("violation", _VIOLATIONS)
def test_an_actor_with_a_violation_fails(tmp_path: pathlib.Path, violation: str) -> None:
    program, named = _VIOLATIONS[violation]
    script = tmp_path / "violationn.py"
    script.write_text(program)
    rows = _rows(_client(script, "learner"), ("Joining", MESSAGES))
    assert rows["Joining"].result == "passed"
    assert (rows[MESSAGES].result, named in rows[MESSAGES].detail) == ("FAILED", True), rows


def test_an_actor_that_ends_fails_in_time() -> None:
    rows = _rows("false", tuple(REQUIREMENTS))
    assert "ended with status 1, and did not join" in rows["Joining"].detail
    assert {row.result for row in rows.values()} == {"FAILED", "not tested"}


async def _sends(learner: Learner, message: bytes) -> str:
    async with serving(learner, "127.0.0.1:0") as address, grpc.aio.insecure_channel(address) as to:
        stream = to.stream_stream("/impala.v1.Learner/StreamUnrolls")()
        await stream.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(stream.read(), 60.0)
        return f"{refused.value.code().name}: {refused.value.details()}"


def test_bytes_that_are_no_message_are_refused() -> None:
    learner = Learner(Run(PRESETS["catch"][1]))
    answer = asyncio.run(_sends(learner, b"\xff no message"))
    assert answer.startswith("INVALID_ARGUMENT: its bytes are no Unrolls")
    assert len(learner.wrong) == 1


@contextmanager
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
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
