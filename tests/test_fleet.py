"""The fleet: actors that die are started again, actors that end stay ended, and all end together.

The fleet runs in a process of its own, as it does in life; small scripts play the actors.
"""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import services

FLEET = """
import logging, signal, sys
from actors.fleet import run_fleet
from impala.runtime.backoff import Backoff
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # unless the tests themselves run under nohup
logging.basicConfig(level=logging.INFO)
sys.exit(run_fleet({num}, ["--learner", "here:1"], command=[sys.executable, {script!r}],
                   backoff=Backoff(0.05, 30.0), give_up_after={give_up_after}))
"""

# Writes one file per start: the index and how often this index was started, holding the pid.
ACTOR = """
import os, pathlib, signal, sys, time
assert sys.argv[1:-1] == ["--learner", "here:1", "--num-actors", "1", "--index"], sys.argv
index, folder = sys.argv[-1], pathlib.Path(__file__).parent / "starts"
number = len(list(folder.glob(index + "-*")))
{prepare}
new = folder / ("new" + index)
new.write_text(str(os.getpid()))
new.rename(folder / f"{{index}}-{{number}}")
{body}
"""


def start_fleet(
    folder: pathlib.Path, num: int, body: str, prepare: str = "", give_up_after: int = 0
) -> subprocess.Popen[str]:
    (folder / "starts").mkdir()
    script = folder / "actor.py"
    script.write_text(ACTOR.format(body=body, prepare=prepare))
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            FLEET.format(num=num, script=str(script), give_up_after=give_up_after),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_wrong_command_lines_are_not_restarted_for_ever(
    tmp_path: pathlib.Path,
) -> None:
    """The last one fails otherwise at first: it may be that only the others are wrong."""
    fleet = start_fleet(tmp_path, 2, "sys.exit(1 if index == '1' and number == 0 else 2)")
    fleet.communicate(timeout=60)
    assert fleet.returncode == 2


def test_killed_actors_are_restarted_ended_ones_are_not(tmp_path: pathlib.Path) -> None:
    # The first start of actor 1 waits to be killed; all others end well.
    body = "if index == '1' and number == 0: time.sleep(60)"
    fleet = start_fleet(tmp_path, 2, body)
    victim = tmp_path / "starts" / "1-0"
    services.wait_for("the victim", victim.exists)
    os.kill(int(victim.read_text()), signal.SIGKILL)
    _, log = fleet.communicate(timeout=30)
    assert fleet.returncode == 0
    assert sorted(p.name for p in (tmp_path / "starts").iterdir()) == ["0-0", "1-0", "1-1"]
    lines = [line for line in log.splitlines() if "ended" in line]
    assert len(lines) == 1
    assert "actor-1 ended with status 137; starting it again" in lines[0]


@pytest.mark.parametrize(
    ("status", "give_up_after", "last"),
    [(3, 3, {"0-2", "1-2"}), (65, 1000, {"0-1", "1-1"})],  # 65: each start would fail
)
def test_a_failing_fleet_gives_up_if_told_to(
    tmp_path: pathlib.Path, status: int, give_up_after: int, last: set[str]
) -> None:
    fleet = start_fleet(tmp_path, 2, f"sys.exit({status})", give_up_after=give_up_after)
    _, log = fleet.communicate(timeout=30)
    assert fleet.returncode == status
    assert "All actors keep failing." in log
    starts = [path.name for path in (tmp_path / "starts").iterdir()]
    assert last <= {*starts} and len(starts) < 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_every_actor_drain(tmp_path: pathlib.Path, number: signal.Signals) -> None:
    prepare = """
def drain(*_):
    (folder / ("drained" + index)).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
"""
    fleet = start_fleet(tmp_path, 2, "time.sleep(60)", prepare)
    starts = tmp_path / "starts"
    services.wait_for(
        "both starts", lambda: (starts / "0-0").exists() and (starts / "1-0").exists()
    )
    fleet.send_signal(number)
    fleet.communicate(timeout=30)
    assert fleet.returncode == 0
    names = sorted(p.name for p in starts.iterdir())
    assert names == ["0-0", "1-0", "drained0", "drained1"]


def test_actors_of_a_fleet_that_is_killed_end_at_once(tmp_path: pathlib.Path) -> None:
    """Also if they are in the middle of an unroll, and hear of SIGTERM at its end."""
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    fleet = start_fleet(tmp_path, 2, "time.sleep(600)", prepare=ignoring)
    actors = [tmp_path / "starts" / f"{index}-0" for index in range(2)]
    services.wait_for("all actors", lambda: all(file.exists() for file in actors))
    fleet.kill()
    fleet.wait()
    pids = [int(file.read_text()) for file in actors]
    services.wait_for("their ends", lambda: not any(map(services.is_alive, pids)))
    fleet.communicate()
