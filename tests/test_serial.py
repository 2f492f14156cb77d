"""`impala train --serial`: one thread, in which a debugger works and runs are equal."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import services

from impala.commands import serial
from impala.commands.parsing import parse
from impala.commands.train import Train
from impala.config.values import OptionError
from impala.logdir import checkpoint

_WALK = """
import gymnasium as gym, numpy as np

class Walk(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), float(action), self.steps == 9, False, {}

class Stops(Walk):
    stopped = False

    def step(self, action):
        if self.steps == 4 and not Stops.stopped:
            Stops.stopped = True
            print("at the fifth step")
            breakpoint()
        return super().step(action)

class Fails(Walk):
    def step(self, action):
        return {}["gear"]
"""
_LINE = _WALK.splitlines().index('        return {}["gear"]') + 1
_COMMAND = (sys.executable, "-m", "impala", "train", "catch", "--serial", "--logdir", "run")


@pytest.fixture(autouse=True)
def _walk(tmp_path: pathlib.Path) -> None:
    (tmp_path / "walk.py").write_text(_WALK)


def test_a_debugger_stops_in_an_environment_on_a_terminal(tmp_path: pathlib.Path) -> None:
    ours, theirs = os.openpty()
    words = ("--environment.id", "walk:Stops", "--total-frames", "600")
    with subprocess.Popen(
        [*_COMMAND, *words], cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        said = b""
        for answer in (b"p 100 + self.steps\n", b"continue\n"):
            while not said.endswith(b"(Pdb) "):
                said += os.read(ours, 1 << 16)
            os.write(ours, answer)
            said += b"\n"
        while True:
            try:
                said += os.read(ours, 1 << 16)
            except OSError:  # the process has ended
                break
    os.close(ours)
    lines = said.decode().replace("\r", "").splitlines()
    assert process.returncode == 0, said
    assert "at the fifth step" in lines and "104" in lines
    assert "-> return super().step(action)" in lines


def test_a_mistake_ends_with_the_file_and_line_of_it(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [*_COMMAND, "--environment.id", "walk:Fails"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    *_, place, line, error = (line for line in done.stderr.splitlines() if "~~^" not in line)
    assert place == f'  File "{tmp_path}/walk.py", line {_LINE}, in step'
    assert (line.strip(), error) == ('return {}["gear"]', "KeyError: 'gear'")


def test_ctrl_c_saves(tmp_path: pathlib.Path) -> None:
    """While the learner learns, the actor waits."""
    logdir = tmp_path / "run"
    words = ("train", "catch", "--serial", "--logdir", logdir, "--learner.log-seconds", 0.3)
    more = ("--agent.hidden-sizes", 512, 512, "--total-frames", 1_000_000_000)
    with services.impala(*words, *more, log=tmp_path / "log") as process:
        services.wait_for_row(
            logdir,
            "updates, for which the actor waits",
            lambda row: row["updates"] > 5 and row.get("actor/wait_share", 0.0) > 0.1,
        )
        status = services.stop(process, signal.SIGINT)
    counters = checkpoint.load(logdir).counters
    assert status == os.EX_TEMPFAIL and counters.updates > 5
    assert services.rows(logdir)[-1]["frames"] == counters.frames


_TWICE = """
import impala

for logdir in ("one", "other"):
    trained = impala.train("catch", logdir, serial=True, seed=3, progress=False, **SETTINGS)
    assert trained.status == "finished", trained
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"total_frames": 60_000},
        pytest.param(
            {
                "total_frames": 9_000,
                "mix": {"fresh": 8, "replayed": 8, "lag_budget": 3},
                "actor": {"num_envs": 24},
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_runs_are_equal_and_learn(settings: dict[str, object], tmp_path: pathlib.Path) -> None:
    script = f"SETTINGS = {settings!r}\n{_TWICE}"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    one = _equal(tmp_path / "one", tmp_path / "other")
    assert one.counters.frames >= settings["total_frames"]  # type: ignore[operator]
    if one.counters.frames >= 60_000:  # at first it catches one ball in five
        assert services.rows(tmp_path / "one")[-1]["episode/Catch/return_recent"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_it_is_the_deterministic_run_of_processes(lag: int, tmp_path: pathlib.Path) -> None:
    mix = ("--mix.replayed", 8, "--mix.warm-up-unrolls", 40, "--mix.exact-lag", lag)
    words = ("train", "catch", "--deterministic", "--total-frames", 9_000, *mix)
    for logdir, more in (("one", ()), ("other", ("--serial",))):
        done = services.run(*words, *more, "--logdir", tmp_path / logdir)
        assert done.returncode == 0, done.stdout + done.stderr
    _equal(tmp_path / "one", tmp_path / "other")


def _equal(one: pathlib.Path, other: pathlib.Path) -> checkpoint.Checkpoint:
    """Checks that the last checkpoints of two runs are equal, and returns it."""
    first, second = checkpoint.load(one), checkpoint.load(other)
    assert first.counters._replace(seconds=0.0) == second.counters._replace(seconds=0.0)
    assert first.variables.keys() == second.variables.keys()
    for name, value in first.variables.items():
        np.testing.assert_array_equal(value, second.variables[name], err_msg=name)
    return first


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--num-actors", "2"), "num_actors is 2, but a serial run is a learner and one actor"),
        (("--evaluate", "yes"), "leave out evaluate, or serial"),
        (("--tensorboard",), "leave out tensorboard, or serial"),
    ],
)
def test_what_needs_other_processes_is_refused(words: tuple[str, ...], error: str) -> None:
    with pytest.raises(OptionError, match=error):
        serial.run(parse("train", Train, ["catch", "--serial", *words]))


_STAGES = """
import impala

def train(stage, replayed, rate=1e-3, **settings):
    return impala.train(
        "catch", "run", serial=True, progress=False, total_frames=600 * stage,
        mix={"replayed": replayed, "warm_up_unrolls": 40}, optimiser={"learning_rate": rate},
        **settings,
    )

assert train(1, 8).frames >= 600
assert train(2, 0, empty_replay=True).frames >= 1200
assert train(3, 8).frames >= 1800
assert train(3, 8).status == "finished"
try:
    train(3, 8, rate=1e-4)
except ValueError as error:
    assert "optimiser.learning_rate: 0.001 -> 0.0001" in str(error)
else:
    raise AssertionError("A finished run took other settings.")
"""


def test_a_run_goes_on_until_it_has_finished(tmp_path: pathlib.Path) -> None:
    """An emptied replay is not missed when replay begins again; a finished run learns no more."""
    subprocess.run([sys.executable, "-c", _STAGES], cwd=tmp_path, check=True)
    assert "learning_rate: 0.001\n" in (tmp_path / "run/config.yaml").read_text()
