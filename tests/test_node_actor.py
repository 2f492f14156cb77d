"""The actor in clients/node, for which the learner acts: it learns.

`test_conform.py` puts it through the cases of the compliance kit.
"""

import json
import pathlib

import node
import numpy as np
import services
from fake_learner import FakeLearner

import impala


def _trained(logdir: pathlib.Path, preset: str, *flags: object) -> None:
    """Trains a preset with the Node actor as the only one, to the end."""
    node.needed()
    logdir.mkdir()
    log = logdir.with_suffix(".learner.log")
    learner = services.impala(
        *("learner", preset, "--logdir", logdir, "--listen", "127.0.0.1:0", *flags), log=log
    )
    with learner as learning, node.actor(services.address_of(logdir), logdir) as playing:
        assert services.end_of(playing) == 0, node.log(logdir)
        assert services.end_of(learning) == 0, log.read_text()
    assert "violation" not in log.read_text()


def greedy_return(logdir: pathlib.Path, episodes: int, steps: int) -> float:
    """The mean return of as many episodes, of as many steps, of the trained agent."""
    policy = impala.load(logdir, greedy=True)
    environments = policy.environment(num_envs=episodes)
    observations, _ = environments.reset(seed=0)
    returns, ended = np.zeros(episodes), np.zeros(episodes, bool)
    for _ in range(steps):
        observations, rewards, terminated, truncated, _ = environments.step(policy(observations))
        returns += rewards
        ended |= terminated | truncated
    assert ended.all()
    return float(returns.mean())


def test_it_trains_catch_as_the_only_actor(tmp_path: pathlib.Path) -> None:
    _trained(tmp_path / "run", "catch", "--total-frames", 200_000)
    assert greedy_return(tmp_path / "run", episodes=200, steps=9) >= 0.99


def test_it_stops_where_a_run_that_it_could_not_play_has_finished(tmp_path: pathlib.Path) -> None:
    settings = {"needs": ["environment.unknown"], "tasks": [{}, {}], "actor": {"num_envs": 1}}
    with FakeLearner(settings=settings) as learner:
        learner.finished = True
        with node.actor(learner.address, tmp_path / "run") as playing:
            assert services.end_of(playing) == 0, node.log(tmp_path / "run")


def test_its_lock_file_names_no_place_to_download_from() -> None:
    text = (node.HOME / "package-lock.json").read_text("utf-8")
    assert "://" not in text
    packages = json.loads(text)["packages"]
    assert len(packages) > 2
    assert all("resolved" not in package for package in packages.values())
    assert all("integrity" in package for path, package in packages.items() if path)
