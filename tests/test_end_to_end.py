"""The services as a user starts them: processes, sockets, signals, kills and restarts."""

import json
import os
import pathlib
import re
import signal
import time
from contextlib import ExitStack

import pytest
import services

from actors.channel import StatusClient
from impala.analysis import continual
from impala.logdir import checkpoint

OFTEN = ("--learner.log-seconds", 0.3)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        pytest.param(("--mix.lag-budget", 2), marks=pytest.mark.slow),
        pytest.param(("--mix.exact-lag", 1, "--actor.num-envs", 16), marks=pytest.mark.slow),
    ],
    ids=["as it comes", "lag budget", "exact lag"],
)
def test_a_fleet_survives_kills_of_actors_and_learner(
    tmp_path: pathlib.Path, flags: tuple[object, ...]
) -> None:
    logdir = tmp_path / "run"
    logdir.mkdir()
    with ExitStack() as stack:
        # Given a learner and two actors that train ...
        learner = stack.enter_context(services.learner(logdir, "127.0.0.1:0", *flags))
        address = services.address_of(logdir)
        victim = stack.enter_context(services.actor(logdir, address))
        survivor = stack.enter_context(services.actor(logdir, address))
        row = services.wait_for_row(
            logdir,
            "two actors, with a return and a speed each",
            lambda row: sum(name.endswith("/return_recent") for name in row) >= 3,  # and the task's
        )
        assert row["actor/active"] >= 2
        assert sum(re.match("worker/.*/frames_per_second", name) is not None for name in row) == 2

        # ... when one actor is killed and another one started, then training goes on.
        victim.kill()
        seen = len(services.rows(logdir))
        updates = services.rows(logdir)[-1]["updates"]
        services.wait_for_row(
            logdir, "updates without the victim", lambda row: row["updates"] > updates, after=seen
        )
        substitute = stack.enter_context(services.actor(logdir, address))

        # When the learner is stopped, it leaves a checkpoint with all that it reported ...
        assert services.stop(learner) == 0
        saved = checkpoint.load(logdir).counters
        assert saved.updates >= services.rows(logdir)[-1]["updates"]

        # ... and started again on the same port it goes on from there, with the same actors.
        seen = len(services.rows(logdir))
        learner = stack.enter_context(services.learner(logdir, address, *flags))
        row = services.wait_for_row(
            logdir, "updates after a restart", lambda row: row["updates"] > saved.updates, seen
        )
        assert row["frames"] > saved.frames
        assert min(row["updates"] for row in services.rows(logdir)[seen:]) >= saved.updates
        services.wait_for_row(logdir, "both actors", lambda row: row["actor/active"] >= 2, seen)

        # When it is killed, it goes on from its last checkpoint, and what was lost is counted.
        before = checkpoint.load(logdir).counters
        services.wait_for(
            "a newer checkpoint", lambda: checkpoint.load(logdir).counters.updates > before.updates
        )
        learner.kill()
        learner.wait()
        saved = checkpoint.load(logdir).counters
        seen = len(services.rows(logdir))
        stack.enter_context(services.learner(logdir, address, *flags))
        row = services.wait_for_row(
            logdir, "updates after a kill", lambda row: row["updates"] > saved.updates, seen
        )
        assert min(row["updates"] for row in services.rows(logdir)[seen:]) >= saved.updates
        row = services.wait_for_row(
            logdir,
            "both actors again",
            lambda row: row["actor/active"] >= 2 and "policy_lag/mean" in row,
            seen,
        )
        dropped = sum(n for name, n in row.items() if name.startswith("unrolls/dropped/"))
        assert row["unrolls/received"] == row["unrolls/learned"] + row["unrolls/queued"] + dropped
        assert row["policy_lag/mean"] < 100  # with parameters of the new incarnation
        if flags:
            lags = [row.get("policy_lag/max", 0.0) for row in services.rows(logdir)]
            assert max(lags) == flags[1]

        # The actors leave within seconds when they are told to.
        for actor in (survivor, substitute):
            assert services.stop(actor) == 0


def test_training_ends_by_itself_and_can_be_evaluated(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    trained = services.run(*("train", "catch", "--logdir", logdir, "--total-frames", 5_000))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "E0000" not in trained.stderr  # TensorFlow has no error to log
    saved = checkpoint.load(logdir)
    assert saved.counters.frames >= 5_000
    row = services.rows(logdir)[-1]
    assert row["frames"] == saved.counters.frames
    assert row["steps"] == pytest.approx(row["frames"], rel=0.01)  # Catch: a frame is a step

    report = tmp_path / "report.json"
    evaluated = services.run("evaluate", logdir, "--episodes", 20, "--json", report)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    returns = [episode["episode_return"] for episode in json.loads(report.read_text())["episodes"]]
    assert len(returns) == 20
    assert set(returns) <= {-1.0, 1.0}

    # A second `train` finds the run finished and says so, instead of learning on.
    again = services.run("train", "catch", "--logdir", logdir, "--total-frames", 5_000)
    assert again.returncode == 0, again.stdout + again.stderr
    assert checkpoint.load(logdir).counters == saved.counters


def test_a_finished_learner_idles_with_an_empty_queue(tmp_path: pathlib.Path) -> None:
    """Given an actor that is faster than the learner until the end."""
    logdir = tmp_path / "run"
    logdir.mkdir()
    flags = ("--total-frames", 20_000, "--when-finished", "idle", "--mix.fresh", 8)
    network = ("--agent.hidden-sizes", 1024, 1024, "--learner.threads", 1)
    with services.learner(logdir, "127.0.0.1:0", *flags, *network):
        address = services.address_of(logdir)
        with services.actor(logdir, address) as actor:
            assert services.end_of(actor) == 0
        with StatusClient(address) as client:
            status = client.get()
        assert status.finished and status.queued == 0
        assert status.received == status.learned + sum(status.dropped.values())
        assert status.dropped["run_finished"] > 0


def test_train_leaves_a_checkpoint_however_it_is_ended(
    tmp_path: pathlib.Path,
) -> None:
    logdir = tmp_path / "run"
    arguments = ("train", "catch", "--logdir", logdir, "--total-frames", 1_000_000_000, *OFTEN)
    with services.on_a_terminal(
        *[*arguments, "--evaluate", "yes", "--evaluator.every-frames", 10_000]
    ) as (training, terminal):
        services.wait_for_row(logdir, "updates", lambda row: row["updates"] > 0)
        services.wait_for_row(logdir, "an evaluation", lambda row: "evaluation/Catch/return" in row)
        terminal.close()  # the window: SIGHUP, and from now on nothing can be shown
        assert services.end_of(training) == os.EX_TEMPFAIL
    saved = checkpoint.load(logdir).counters
    assert saved.updates > 0
    seen = len(services.rows(logdir))
    with services.impala(*arguments, log=tmp_path / "second.log") as training:
        services.wait_for_row(
            logdir, "more updates", lambda row: row["updates"] > saved.updates, after=seen
        )
        os.killpg(training.pid, signal.SIGINT)  # as a CI job that is cancelled
        time.sleep(0.005)
        os.killpg(training.pid, signal.SIGTERM)
        assert services.end_of(training) == os.EX_TEMPFAIL
    assert min(row["updates"] for row in services.rows(logdir)[seen:]) >= saved.updates
    assert checkpoint.load(logdir).counters.seconds > saved.seconds
    log = (tmp_path / "second.log").read_text()
    assert "learner.run: Stopping: SIGTERM received." in log  # the supervisor asks so
    assert "impala.train: Ended with status 75: SIGINT received." in log


@pytest.mark.slow
def test_three_tasks_survive_restarts_with_complete_curves(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    logdir.mkdir()
    names = ["Catch", 'Catch{"rows": 9, "shift": 1}', 'Catch{"rows": 8, "columns": 7}']
    frames = 30_000
    arguments = [
        *["--tasks.environments", *names, "--tasks.frames", *[frames] * 3],
        *["--mix.fresh", 16, "--mix.replayed", 16],
        *["--evaluator.every-frames", 5_000, "--evaluator.episodes", 8],
    ]
    with ExitStack() as stack:
        # Given a learner with replay, an evaluator and two actors ...
        learner = stack.enter_context(services.learner(logdir, "127.0.0.1:0", *arguments))
        address = services.address_of(logdir)
        stack.enter_context(services.actor(logdir, address, "--role", "evaluator"))
        victim, _ = [stack.enter_context(services.actor(logdir, address)) for _ in range(2)]
        services.wait_for_row(logdir, "frames", lambda row: row["frames"] > frames / 2)

        # ... when an actor and the learner are killed, and others started in their places ...
        victim.kill()
        stack.enter_context(services.actor(logdir, address))
        row = services.wait_for_row(logdir, "the second task", lambda r: r["frames"] > frames)
        learner.kill()
        learner.wait()
        added = checkpoint.load(logdir).replay_added
        assert 0 < added <= row["replay/added"] + 10_000
        seen = len(services.rows(logdir))
        learner = stack.enter_context(services.learner(logdir, address, *arguments))
        row = services.wait_for_row(logdir, "replay", lambda r: "replay/added" in r, seen)
        assert row["replay/added"] >= added
        assert services.end_of(learner) == 0

    # ... then the run ends, and every task was seen from the beginning to the end.
    run = continual.read(logdir)
    assert list(run.curves) == names
    for curve in run.curves.values():
        assert len(curve.frames) >= 5
        assert curve.frames[0] < frames
        assert curve.frames[-1] >= 3 * frames
    assert services.rows(logdir)[-1]["frames"] >= 3 * frames
    drawn = services.run("plot", logdir, "--output", tmp_path / "plot.svg")
    assert drawn.returncode == 0, drawn.stderr


@pytest.mark.slow
def test_a_critic_learns_first_and_another_run_starts_from_it(
    tmp_path: pathlib.Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    often = ("--learner.log-seconds", 0.1)
    phased = services.run(
        *("train", "catch", "--logdir", first, "--agent.separate-baseline", *often),
        *("--phases", "critic:6000", "impala", "--total-frames", 12_000),
    )
    assert phased.returncode == 0, phased.stdout + phased.stderr
    assert "frames on: impala" in phased.stderr
    assert "critic trains 7,489 parameters (baseline_mlp 7,424, baseline 65)" in phased.stderr
    rows = [row for row in services.rows(first) if services.check_losses(row)]
    alone = [row["frames"] for row in rows if "loss/total" not in row]
    assert alone and max(alone) < 7_000
    assert len(alone) < len(rows)
    assert {row["phase/number"] for row in rows} == {1.0, 2.0}

    other = services.run(
        *("train", "catch", "--logdir", second, "--init-from", first, *often),
        *("--algorithm", "actor_critic", "--mix.max-policy-lag", 2, "--total-frames", 12_000),
    )
    assert other.returncode == 0, other.stdout + other.stderr
    assert "of this agent's weights from one of 12," in other.stderr
    assert "Not taken: baseline_mlp/linear_0/w:0" in other.stderr
    last = services.rows(second)[-1]
    assert max(row.get("policy_lag/max", 0) for row in services.rows(second)) <= 2
    dropped = sum(n for name, n in last.items() if name.startswith("unrolls/dropped/"))
    assert last["unrolls/received"] == last["unrolls/learned"] + last["unrolls/queued"] + dropped


@pytest.mark.slow
def test_a_run_ends_when_its_own_actors_send_what_is_refused(tmp_path: pathlib.Path) -> None:
    trained = services.run(
        *("train", "catch", "--limits.reward", "0.5", "--logdir", tmp_path / "run")
    )
    assert trained.returncode == 1, trained.stdout + trained.stderr
    (said,) = [line for line in trained.stderr.splitlines() if "timestep/reward holds" in line]
    assert "ERROR learner.run: Stopping: actor is to blame for range: timestep/reward" in said
    assert "Raise limits.reward" in said
    assert "Ended with status 1" in trained.stderr
