"""Loops that are played elsewhere and ask for actions: sessions, unrolls, and how they end."""

import contextlib
import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import messages
import numpy as np
import pytest
import services
import test_run_actor
from fake_learner import FakeLearner

import impala
from impala.config import rules, values
from impala.config.presets import PRESETS
from impala.logdir import rows
from impala.types import Parameters, StepType, Unroll
from learner.plan import make_plan
from learner.service.server import Server
from learner.service.service import LearnerService
from learner.service.terms import terms

learner = test_run_actor.learner  # a fixture

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "external.py"
T = 5
COUNTS: dict[str, dict[str, Any]] = {
    "observation_space": {
        "type": "Dict",
        "spaces": {
            "count": {"type": "Box", "shape": [2], "low": 0, "high": 1000},
            "level": {"type": "Discrete", "n": 3, "start": 1},
        },
    },
    "action_space": {"type": "Discrete", "n": 2},
}


def _observation(who: int, step: int) -> dict[str, Any]:
    """As a loop gives it: plain numbers, of which NumPy makes arrays."""
    return {"count": [float(who), float(step)], "level": 1 + step % 3}


class Run(NamedTuple):
    service: LearnerService
    address: str
    unrolls: list[Unroll]  # as they were taken in, in order
    episodes: list[float]  # their returns


@contextlib.contextmanager
def _run(**settings: Any) -> Iterator[Run]:
    """A learner's service and server, which refuses every violation and learns nothing."""
    config = rules.validate(
        values.overlay(
            PRESETS["catch"][1],
            {
                "environment": {"id": "External", "kwargs": json.dumps(COUNTS), **settings},
                "learner": {"unroll_length": T},
                "checks": {"on_violation": "refuse"},
            },
        )
    )
    plan = make_plan(config)
    variables = plan.phases.agent.variables
    service = messages.service(
        terms=terms(config, variables, plan.unroll_spec, plan.played, plan.spaces), config=config
    )
    service.publish(Parameters(messages.LEARNER, 0, 0.0, 0, [v.numpy() for v in variables]))
    server = Server(service, "127.0.0.1:0")
    run = Run(service, server.start(), [], [])
    over = threading.Event()

    def take() -> None:
        while not over.is_set():
            if (arrival := service._ingest.get(0.02)) is not None:
                run.unrolls.append(arrival.unroll)
                run.episodes.extend(episode.episode_return for episode in arrival.episodes)

    taker = threading.Thread(target=take)
    taker.start()
    try:
        yield run
    finally:
        over.set()
        taker.join()
        server.stop(0.0)
        service.close()


def _play(session: impala.Session, who: int, lengths: list[int]) -> None:
    """Plays episodes of these lengths; the reward of a step is its number."""
    for length in lengths:
        for step in range(length):
            assert session.act(_observation(who, step)) in (0, 1)
            session.reward(0.25 * (step + 1))
            session.reward(0.75 * (step + 1))
        session.end(_observation(who, length), truncated=length == 4)


def test_sessions_of_any_length_make_correct_unrolls() -> None:
    with _run(last_action=True, last_reward=True) as run:
        with impala.connect(run.address, name="loop") as client:
            slow = client.session()
            slow.act(_observation(9, 0))  # and then nothing for as long as the others play
            players = [
                threading.Thread(target=_play, args=(client.session(), who, [3, 1, 4, 20, 5]))
                for who in (1, 2)
            ]
            for player in players:
                player.start()
            for player in players:
                player.join()
            for _ in range(8):  # episodes shorter than an unroll, a session each
                with client.session() as session:
                    _play(session, 3, [2])
            dropped = client.session()
            dropped.act(_observation(4, 0))
            dropped.reward(7.0)
            dropped.close()  # in the middle of an episode
            client.session().close()  # the next one is not used
            with client.session() as session:
                _play(session, 5, [12, 5])
            slow.reward(1.0)
            slow.end(_observation(9, 1))
            _play(slow, 9, [12, 5])
        status = run.service.get_status()
    (member,) = status.members
    assert (member.name, dict(member.violations), member.rejected) == ("loop", {}, 0)
    assert dict(status.rejected) == {}
    assert member.environment_faults == 1
    assert "closed before the end" in member.last_fault
    # What does not fill an unroll any more is lost; these are of all that do.
    assert {*run.episodes} - {15.0} == {1.0, 3.0, 6.0, 7.0, 10.0, 78.0, 210.0}
    assert (run.episodes.count(210.0), run.episodes.count(78.0)) == (2, 2)
    for unroll in run.unrolls:
        timestep = unroll.timestep
        count, kinds = timestep.observation["observation"]["count"][:, 0], timestep.step_type[:, 0]
        for row in range(1, T + 1):
            is_cut_off = (count[row] == count[row - 1]).all()
            if kinds[row] == StepType.FIRST:
                assert (count[row, 1], timestep.reward[row]) == (0.0, 0.0)
            elif not is_cut_off:
                assert count[row, 1] == count[row - 1, 1] + 1.0  # nothing is skipped
                assert timestep.reward[row] == count[row, 1]
            last = timestep.observation["last_reward"][row]
            assert last == (0.0 if kinds[row] == StepType.FIRST else timestep.reward[row, 0])
            is_over = kinds[row] == StepType.LAST and not is_cut_off
            goes_on = not is_over or count[row, 1] == 4.0  # truncated
            assert timestep.discount[row] == float(goes_on)


def test_a_call_that_is_wrong_says_so_and_nothing_has_happened() -> None:
    with _run() as run, impala.connect(run.address) as client:
        session = client.session()
        good = _observation(1, 0)
        for wrong, words in (
            ({"count": [1.0, 1001.0]}, r"count\[1\] is 1001.0, outside of its space, 0.0 to 1000"),
            ({"count": [1.0, float("nan")]}, r"count\[1\] is nan, outside"),
            ({"count": [1.0]}, r"count has shape \(1,\), expected \(2,\)"),
            ({"level": 4}, "level is 4, outside of its space, 1 to 3"),
            ({"level": 1.5}, "level is float64, its space int64"),
            ({"more": 1}, "expected the keys"),
        ):
            with pytest.raises(ValueError, match=words):
                session.act({**good, **wrong})
        with pytest.raises(ValueError, match="reward comes after act"):
            session.reward(1.0)
        with pytest.raises(ValueError, match="end comes after act"):
            session.end(good)
        session.act(good)
        with pytest.raises(ValueError, match=r"learner takes -1e\+06 to 1e\+06: scale it, or"):
            session.reward(2e6)
        with pytest.raises(ValueError, match="takes"):
            session.reward(float("nan"))
        with pytest.raises(ValueError, match=r"The reward is None; it must be a number\."):
            session.reward(None)  # type: ignore[arg-type]
        session.reward(1.0)
        with pytest.raises(ValueError, match="level is 0"):
            session.end({**good, "level": 0})
        with pytest.raises(ValueError, match=r"The info 'map' is 'cave'; it must be a number\."):
            session.end(good, info={"map": "cave"})  # type: ignore[dict-item]
        session.end(_observation(1, 1))
        _play(session, 1, [T])
        services.wait_for("an unroll", lambda: run.unrolls)
        assert run.unrolls[0].timestep.reward[1] == 1.0
        session.close()
        with pytest.raises(RuntimeError, match="The session is closed"):
            session.act(good)
        other = client.session()
        client.close()
        with pytest.raises(RuntimeError, match="The client is closed"):
            other.act(good)


def test_training_that_ends_is_told() -> None:
    with _run() as run, impala.connect(run.address) as client:
        session = client.session()
        session.act(_observation(0, 0))
        run.service.finish()
        with pytest.raises(impala.RunFinished):
            for _ in range(1000):
                session.act(_observation(0, 1))
                time.sleep(0.01)


def test_a_loop_that_does_nothing_for_minutes_counts_as_active() -> None:
    with _run() as run, impala.connect(run.address) as client:
        client.session().act(_observation(0, 0))
        roster, now = run.service._records.roster, [time.monotonic()]
        roster._clock = lambda: now[0]
        now[0] += 600.0
        (member,) = roster.members()
        services.wait_for("a sign of life", lambda: roster.members()[0].active)
        assert member.silent_seconds >= 590.0
        assert roster.members()[0].silent_seconds < 1.0


def test_what_no_loop_can_play_is_refused(learner: FakeLearner) -> None:
    learner.settings["tasks"].append({"name": "Another", "environment": {"id": "Catch"}})
    with pytest.raises(ValueError, match="has the tasks Catch, Another; a loop plays one"):
        impala.connect(learner.address)
    learner.permit = lambda request: 0
    with pytest.raises(ValueError, match=r"start it without mix\.lag_budget"):
        impala.connect(learner.address)
    learner.refusal = "no"
    with pytest.raises(impala.LearnerError, match="refused"):
        impala.connect(learner.address)


CARTS = json.dumps(
    {
        "observation_space": {"type": "Box", "shape": [4]},
        "action_space": {"type": "Discrete", "n": 2},
    }
)


def _learner(logdir: pathlib.Path, listen: str, *arguments: object) -> Any:
    return services.impala(
        *("learner", "cartpole", "--logdir", logdir, "--listen", listen, "--seed", 101),
        *("--environment.id", "External", "--environment.kwargs", CARTS, *arguments),
        log=logdir.with_suffix(".log"),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loop_outside_outlives_its_learner(tmp_path: pathlib.Path) -> None:
    """The learner is killed while eight carts are played, and started again."""
    logdir, socket = tmp_path / "run", tmp_path / "socket"
    flags = ("--total-frames", 60_000, "--learner.checkpoint-seconds", 2)
    refuse = ("--checks.on-violation", "refuse", "--learner.log-seconds", 1)
    with _learner(logdir, f"unix:{socket}", *flags, *refuse) as killed:
        services.wait_for("the socket", socket.exists)
        loop = subprocess.Popen(
            [sys.executable, str(EXAMPLE), f"unix:{socket}"], stdout=subprocess.DEVNULL
        )
        services.wait_for("a checkpoint", lambda: list((logdir / "checkpoints").glob("0*")))
        time.sleep(3.0)
        assert killed.poll() is None
        killed.kill()
        killed.wait()
    with _learner(logdir, f"unix:{socket}", *flags, *refuse) as learner:
        assert services.end_of(loop) == 0
        assert services.end_of(learner) == 0
    (row,) = rows.read(logdir)[-1:]
    assert row["unrolls/received"] == row["unrolls/learned"] + sum(
        value for name, value in row.items() if name.startswith("unrolls/dropped/")
    )
    assert not any(name.startswith("messages/violations") for name in row)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_loop_outside_learns_cartpole(tmp_path: pathlib.Path) -> None:
    """The example's process, and another that is killed; then greedy episodes of Gymnasium's."""
    logdir = tmp_path / "run"
    with _learner(logdir, "127.0.0.1:0") as process:
        address = services.address_of(logdir)
        loop = [sys.executable, str(EXAMPLE), address, "--seed", "101"]
        killed = subprocess.Popen([*loop, "--carts", "1"])
        played = subprocess.Popen(loop, stdout=subprocess.PIPE, text=True)
        time.sleep(30.0)
        assert killed.poll() is None
        killed.kill()
        killed.wait()
        returns = float(played.communicate()[0])
        assert process.wait(60.0) == 0
    policy = impala.load(logdir, greedy=True)
    environment, lengths = gym.make("CartPole-v1"), []
    for seed in range(100):
        observation, _ = environment.reset(seed=seed)
        policy.reset()
        length, over = 0, False
        while not over:
            observation, _, terminated, truncated, _ = environment.step(policy(observation))
            length, over = length + 1, terminated or truncated
        lengths.append(length)
    print(f"training return {returns:.1f}, greedy return {np.mean(lengths):.1f}")
    assert np.mean(lengths) >= 475.0
