"""Tasks that never end: Catch without episodes, and what stands for returns there."""

import pathlib
import subprocess
from typing import Any

import messages
import numpy as np
import pytest
import rich.console
import services
from test_evaluation import Counting, Scripted
from test_kept import PLAYED, Story

from actors import status
from impala import environments
from impala.analysis import plot
from impala.config.schema import EnvironmentConfig
from impala.environments.base import Environment
from impala.logdir import json_lines, rows
from impala.logdir.checkpoint import Counters
from impala.play import evaluation
from impala.types import StepType
from learner.fleet.roster import Roster
from learner.telemetry import console
from learner.telemetry.telemetry import Telemetry
from protos.impala.v1 import learner_pb2 as pb

CATCH = EnvironmentConfig(id="Catch/Continuing")


def _rewards(environment: Environment, steps: int, follows: bool) -> np.ndarray:
    """Plays: follows the ball, or moves at random. Returns rewards [steps, E]."""
    random, rewards = np.random.default_rng(0), []
    board = environment.reset(3).observation
    for _ in range(steps):
        moves = random.integers(3, size=len(board))
        if follows:
            columns = np.arange(board.shape[2])
            paddle = (board[:, -1] * columns).max(axis=1)
            above = board[:, :-1].any(axis=1)
            ball = np.where(above.any(axis=1), (above * columns).max(axis=1), paddle)
            moves = np.sign(ball - paddle) + 1
        environment.send(moves)
        timestep = environment.recv().timestep
        assert (timestep.step_type == StepType.MID).all() and (timestep.discount == 1.0).all()
        board = timestep.observation
        rewards.append(timestep.reward.copy())
    environment.close()
    return np.array(rewards)


def test_catch_goes_on_with_the_next_ball() -> None:
    rewards = _rewards(environments.make(CATCH, 4), 200, follows=True)
    assert rewards.mean() == 0.1
    assert (np.flatnonzero(rewards[:, 0])[:3] == [8, 18, 28]).all()
    at_random = _rewards(environments.make(CATCH, 64), 2000, follows=False)
    assert at_random.mean() == pytest.approx(-0.06, abs=0.004)
    small = EnvironmentConfig(id=CATCH.id, kwargs='{"rows": 4, "reward": 2.0}')
    assert _rewards(environments.make(small, 1), 100, follows=True).mean() > 0.0
    with pytest.raises(ValueError, match="Catch"):
        environments.make(EnvironmentConfig(id=CATCH.id, kwargs='{"rows": 1}'), 1)


def test_an_evaluation_of_what_never_ends_ends() -> None:
    never: Any = Scripted([[2, 10**9], [10**9]])
    episodes = evaluation.play_episodes(never, Counting(), 5, True, 0, max_steps=7)  # type: ignore
    assert [(each.length, each.episode_return) for each in episodes] == [
        *[(2, 2.0), (7, 7.0), (7, 7.0)],
        *[(7, 7.0), (7, 7.0)],
    ]
    summary = evaluation.summary(episodes)
    assert summary.reward_per_step == 1.0
    assert (summary.length_mean, summary.length_max) == (6.0, 7)


def test_best_agent_is_kept_by_rewards_until_episodes_end(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path)
    story.goes_on_to(100, [], rewards=(-6.0, 100))
    assert story.best == 10
    assert story.goes_on_to(200, [], rewards=(-7.0, 100)).best == 10
    assert story.goes_on_to(300, [-3.0] * 30, rewards=(5.0, 100)).best == 30
    assert story.score == {**PLAYED, "return": 0.05, "by": "rewards", "frames": 300}
    assert story.goes_on_to(400, [-3.0] * 100, rewards=(0.0, 100)).best == 40  # by returns
    assert story.goes_on_to(500, [], rewards=(9.0, 100)).best == 40
    again = Story(tmp_path, frames=500).goes_on_to(700, [], rewards=(9.0, 100))
    assert (again.best, again.score["by"]) == (40, "training")


def test_status_shows_rewards_where_there_are_no_returns() -> None:
    roster = Roster()
    for sent in range(150):
        rewards = (-1.0 if sent < 50 else 0.5, 10)
        roster.sent("a", unrolls=2, frames=10, version=1, size=1, rewards=rewards)
    assert roster.members()[0].reward_per_step == 0.05  # of the last hundred messages
    service = messages.service()
    service._records.roster.joined("a", "actor")
    service._records.roster.sent("a", unrolls=1, frames=9, version=0, size=1, rewards=(-0.5, 9))
    written = rich.console.Console(width=150, record=True)
    told = service.get_status()
    told.members.add(name="b", role=pb.ROLE_ACTOR, recent_return=2.5, reward_per_step=0.25)
    written.print(status.render("here", told))
    lines = {line.split()[0]: line for line in written.export_text().splitlines() if line.split()}
    assert "reward/step" in lines["name"]
    assert "-0.0556" in lines["a"]
    assert "2.50" in lines["b"] and "0.25" not in lines["b"]


def test_rows_and_plots_have_rewards_without_returns(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = Telemetry()
    for total, steps in ((-3.0, 10), (1.0, 30), (0.0, 0)):
        telemetry.rewards("Catch/Continuing", total, steps)
    row, _ = telemetry.end(Counters(frames=40), {"progress": 0.4}).row()
    assert row["task/Catch/Continuing/reward_per_step"] == -0.05
    shown = console.Console()
    shown.write(row)
    shown.close()
    assert "frames 40 (40.0%)  reward per step -0.0500  " in capsys.readouterr().out
    appender = json_lines.Appender(tmp_path / "metrics.jsonl")
    for seconds in (1.0, 2.0):
        appender.write({**row, "seconds": seconds, "frames": 40 * seconds})
    appender.close()
    what, standings = rows.standings(rows.read(tmp_path))
    assert (what, standings) == ("reward per step", [{"Catch/Continuing": -0.05}] * 2)
    (tmp_path / "config.yaml").write_text("environment: {id: Catch/Continuing}\n")
    drawn = plot.figure([tmp_path])
    assert drawn.axes[0].get_ylabel() == "reward per step"
    assert np.array(drawn.axes[0].lines[0].get_ydata()).tolist() == [-0.05, -0.05]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_catch_without_episodes_is_learned(tmp_path: pathlib.Path) -> None:
    """From the reward per step of random play, -0.06, to nearly the best, 0.1."""
    logdir = tmp_path / "run"
    done: subprocess.CompletedProcess[str] = services.run(
        *("train", "catch", "--environment.id", CATCH.id, "--seed", 101, "--logdir", logdir),
        *("--evaluate", "yes", "--evaluator.episodes", 10, "--evaluator.max-steps", 200),
        *("--evaluator.every-frames", 100_000, "--learner.log-seconds", 2),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    per_step = [each for row in rows.read(logdir) for each in rows.rewards_per_step(row).values()]
    evaluated = json_lines.read(logdir / "evaluations.jsonl", lambda line: np.mean(line["returns"]))
    in_evaluation = [float(mean) / 200 for mean in evaluated]
    print(f"reward per step in training {per_step[0]:.4f} to {per_step[-1]:.4f}, ", end="")
    print("in evaluations " + ", ".join(f"{each:.4f}" for each in in_evaluation))
    assert in_evaluation[0] < -0.03 and per_step[-1] >= 0.095
    assert max(in_evaluation[1:]) >= 0.095
