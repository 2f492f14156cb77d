"""`impala status`: what a person reads of a fleet, and what is said when nobody answers."""

import io
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import messages
import numpy as np
import pytest
import rich.console
import services

from actors import channel, session
from actors import status as view
from impala.commands import main as cli
from impala.commands.status import watch
from impala.types import Parameters
from learner.service.server import Server
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc

STATUS = pb.RunStatus(
    parameter_version=1234,
    frames=8_000_000,
    progress=0.4,
    queued=12,
    queue_capacity=16,
    received=1000,
    learned=980,
    dropped={"learner_crash": 8},
    rejected={"range": 2},
    members=[
        pb.Member(
            name="host-1",
            role=pb.ROLE_ACTOR,
            joins=1,
            unrolls=600,
            frames=48_000,
            frames_per_second=3010.4,
            parameter_version=1230,
            active=True,
            recent_return=-20.25,
        ),
        pb.Member(
            name="host-2",
            role=pb.ROLE_ACTOR,
            joins=3,
            silent_seconds=300.0,
            rejected=2,
            last_rejection="range: [bold]action[/bold] holds 9",
        ),
        pb.Member(name="judge", role=pb.ROLE_EVALUATOR, joins=1, silent_seconds=20.0, active=True),
    ],
)


def _text(status: pb.RunStatus, width: int = 160) -> str:
    console = rich.console.Console(file=io.StringIO(), width=width)
    console.print(view.render("learner:50051", status))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_says_who_does_what() -> None:
    lines = _text(STATUS).splitlines()
    assert lines[0] == (
        "learner:50051: 40.0% done, 8,000,000 frames, version 1,234, queue 12 of 16 unrolls"
    )
    assert "1,000 received, 980 learned from, 8 dropped (8 learner_crash)" in lines[1]
    assert lines[2] == "messages: 2 rejected (2 range), 0 duplicates"
    assert lines[3] == "1 of 2 actors active, 3,010 frames/s together"
    first, second, judge = (
        next(line for line in lines if name in line) for name in ("host-1", "host-2", "judge")
    )
    for part in ("actor", "now", "3,010", "-20.25", "48,000", " 4 "):
        assert part in first
    assert "5 min ago" in second
    assert second.split()[-2:] == ["2", "2"]  # came back and was rejected twice
    # As it came, not as markup:
    assert "host-2 was last rejected for range: [bold]action[/bold] holds 9" in lines
    assert "evaluator" in judge
    assert "20 s ago" in judge


def test_an_empty_fleet_and_a_finished_run_say_so() -> None:
    text = _text(pb.RunStatus(finished=True))
    assert "finished" in text
    assert "nobody has joined" in text


@pytest.fixture
def address() -> Iterator[str]:
    service = messages.service()
    service.publish(Parameters(messages.LEARNER, 3, 0.5, 10, [np.ones((2, 3), np.float32)]))
    server = Server(service, "127.0.0.1:0")
    try:
        yield server.start()
    finally:
        server.stop(0.0)


def test_the_command_prints_a_table_or_json(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with grpc.insecure_channel(address) as channel:
        learner_pb2_grpc.LearnerStub(channel).Join(messages.join_request(actor="host-7"))
    assert cli.main(["status", address]) == 0
    assert "host-7" in capsys.readouterr().out
    assert cli.main(["status", address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["parameter_version"], told["members"][0]["name"]) == ("3", "host-7")


def test_the_table_says_how_long_a_step_takes_where_that_is_known() -> None:
    known = pb.RunStatus()
    known.CopyFrom(STATUS)
    known.members[0].step_seconds = 0.00512
    assert "5.12 ms" in next(line for line in _text(known).splitlines() if "host-1" in line)
    assert " step " in _text(known) and " step " not in _text(STATUS)


def _lines(table: rich.console.Group) -> list[str]:
    console = rich.console.Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_watching_survives_a_restart_of_the_learner() -> None:
    first = Server(messages.service(), "127.0.0.1:0")
    address = first.start()
    with channel.StatusClient(address) as client:
        tables = watch("here", client.get)
        assert _lines(next(tables))[0].startswith("here: 0.0% done")
        first.stop(0.0)
        for _ in range(2):
            away = _lines(next(tables))
            assert away[0].startswith("No answer for ")
            assert "no status of the learner" in away[0]
            assert any(line.startswith("here: 0.0% done") for line in away)  # as it was
        again = Server(messages.service(), address)
        again.start()
        try:
            services.wait_for("an answer", lambda: _lines(next(tables))[0].startswith("here: "))
        finally:
            again.stop(0.0)


def test_watching_ends_when_the_learner_refuses() -> None:
    answers: Iterator[pb.RunStatus | Exception] = iter(
        [pb.RunStatus(), session.LearnerRefused("the token is unknown")]
    )

    def get() -> pb.RunStatus:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    tables = watch("here", get)
    next(tables)
    with pytest.raises(session.LearnerRefused):
        next(tables)


def test_ctrl_c_ends_watching_with_status_0(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("impala.commands.status.time.sleep", interrupted)
    assert cli.main(["status", address, "--watch", "2"]) == 0


def test_a_log_directory_names_its_learner(
    address: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "address").write_text(f"{address}\n")
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "50.0% done, 10 frames" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "address").write_bytes(b"\xff\xfe")
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "address is no address that a learner has written" in capsys.readouterr().err
    (tmp_path / "address").unlink()
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "which a learner writes while it serves" in capsys.readouterr().err


def test_watching_a_log_directory_finds_a_learner_that_is_elsewhere_now(
    address: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "address"
    file.write_text(f"{address}\n")
    other = Server(messages.service(), "127.0.0.1:0")
    steps: list[Callable[[], object]] = [
        file.unlink,
        lambda: file.write_text(f"{other.start()}\n"),
        lambda: None,
    ]
    shown: list[str] = []

    def sleep(seconds: float) -> None:
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    def update(live: Any, table: rich.console.Group, **kwargs: Any) -> None:
        shown.append(_lines(table)[0])

    monkeypatch.setattr("impala.commands.status.time.sleep", sleep)
    monkeypatch.setattr("rich.live.Live.update", update)
    try:
        assert cli.main(["status", str(tmp_path), "--watch", "2"]) == 0
    finally:
        other.stop(0.0)
    assert shown[0].startswith("No answer for ") and "No answer" not in shown[1]


def test_what_went_wrong_is_said_and_nothing_else() -> None:
    quiet = _text(STATUS)
    for word in (
        "skipped",
        "rolled back",
        "refused",
        "info",
        "blamed",
        "quarantined",
        "fault",
        "violation",
    ):
        assert word not in quiet
    bad = pb.Member(
        name="bad",
        role=pb.ROLE_ACTOR,
        active=True,
        blamed=7,
        quarantined_seconds=90.0,
        environment_faults=3,
        last_fault="2 hung: no answer",
        violations={"row_0": 8, "seam": 1},
        last_violation="seam: timestep/reward is 1.0 in row 3",
    )
    text = _text(
        pb.RunStatus(
            members=[bad, *STATUS.members],
            phase="1 of 2, clone",
            skipped_updates=12,
            rollbacks=1,
            refused={"streams": 3, "joins": 1},
            dropped_info_names=9600,
            violations={"row_0": 8, "seam": 1},
            checked=1200,
        )
    )
    assert "updates: 12 skipped as not finite, 1 rolled back to a checkpoint" in text
    assert "0.0% done, phase 1 of 2, clone, 0 frames" in text
    found = "violations: 9 found (8 row_0, 1 seam) in 1,200 messages"
    assert found in text
    assert "strangers: 4 refused (1 joins, 3 streams)" in text
    assert "episode info: 9,600 numbers not recorded" in text
    header, bad_line = (
        next(line for line in text.splitlines() if word in line) for word in ("last seen", "bad")
    )
    assert "blamed" in header and "faults" in header
    assert [" 7 " in bad_line, " 3 " in bad_line] == [True, True]
    assert "bad is quarantined for 90 s" in text
    assert "bad's last environment fault: 2 hung: no answer" in text
    assert "bad: 9 violations (8 row_0, 1 seam), the last one seam: timestep/reward is 1.0" in text


def test_a_learner_that_is_not_there_is_an_error_that_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["status", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
