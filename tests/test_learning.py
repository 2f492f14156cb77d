"""It learns: whole runs from the command line, evaluated over 100 episodes. Slow.

`make test-slow` prints what each run came to and how long it took. Presets that train for twenty
minutes or more are run by `python -m ledger run`, and test_ledger.py checks what their records say.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import services
import tensorflow as tf
import tree

from impala.analysis import continual
from impala.logdir import checkpoint
from impala.parts import build
from impala.play.player import Player
from impala.types import StepType
from ledger.experiments import EXPERIMENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def _train(tmp_path: pathlib.Path, preset: str, seed: int, *flags: object) -> float:
    """Trains a preset from scratch; the mean return of 100 greedy episodes afterwards."""
    logdir = _trained(tmp_path, preset, seed, *flags)
    summary = _evaluated(logdir, "--greedy", "--episodes", 100, "--allow", "hold")
    print(f"return {summary['return_mean']:.2f}")
    return float(summary["return_mean"])


def _trained(tmp_path: pathlib.Path, preset: str, seed: int, *flags: object) -> pathlib.Path:
    """Trains a preset from scratch; the log directory."""
    logdir = tmp_path / preset
    start = time.monotonic()
    trained = services.run(*("train", preset, "--logdir", logdir, "--seed", seed, *flags))
    took = time.monotonic() - start
    assert trained.returncode == 0, trained.stdout + trained.stderr
    words = " ".join(map(str, (preset, *flags)))
    print(f"\n{words}, seed {seed}, after {took:.0f} s: ", end="")
    return logdir


def _evaluated(logdir: pathlib.Path, *flags: object) -> Mapping[str, Any]:
    """What `impala evaluate` says of a run."""
    report = logdir / "report.json"
    evaluated = services.run("evaluate", logdir, *flags, "--json", report)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    summary: Mapping[str, Any] = json.loads(report.read_text())["summary"]
    return summary


@pytest.fixture
def hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the programs import tests/hold.py, which registers Hold-v0."""
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))


@pytest.mark.parametrize("seed", range(1, 6))
def test_catch(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "catch", seed) >= 0.99


@pytest.mark.parametrize("seed", range(1, 6))
def test_cartpole(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "cartpole", seed) >= 475.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_actor_critic_cartpole(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "cartpole-a3c", seed) >= 475.0


def _bandit(tmp_path: pathlib.Path, preset: str, seed: int, *flags: object) -> Mapping[str, Any]:
    """Trains on bandits; a summary of 3,000 others, with sampled actions and frozen weights."""
    logdir = _trained(tmp_path, preset, seed, *flags)
    pulls = json.loads((logdir / "metrics.jsonl").read_text().splitlines()[-1])["frames"]
    summary = _evaluated(logdir, "--episodes", 3000, "--num-envs", 1000)
    regret = summary["info"]["regret"]
    print(f"{pulls:,} pulls, return {summary['return_mean']:.2f}, regret {regret:.2f}")
    return summary


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("preset", "problem", "most"),
    [
        ("bandit", "DependentEasy", 1.3),
        ("bandit", "DependentUniform", 2.3),
        ("bandit", "DependentMedium", 2.0),
        ("bandit-independent", "Independent", 2.4),
    ],
)
def test_bandits_of_two_arms(
    tmp_path: pathlib.Path, preset: str, problem: str, most: float, seed: int
) -> None:
    summary = _bandit(tmp_path, preset, seed, "--environment.id", f"Bandit/{problem}-v0")
    assert summary["info"]["regret"] <= most


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bandit_of_eleven_arms(tmp_path: pathlib.Path, seed: int) -> None:
    assert _bandit(tmp_path, "bandit-eleven", seed)["return_mean"] >= 0.9 * 20.55


def test_who_is_not_told_the_reward_learns_nothing_of_bandits(tmp_path: pathlib.Path) -> None:
    summary = _bandit(tmp_path, "bandit", 1, "--environment.no-last-reward")
    assert summary["info"]["regret"] == pytest.approx(25.0, abs=1.5)  # that of chance


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_q_learning_cartpole(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "cartpole-q", seed) >= 475.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_soft_actor_critic_pendulum(tmp_path: pathlib.Path, seed: int) -> None:
    assert _train(tmp_path, "pendulum", seed) >= -180.0


def _hold(tmp_path: pathlib.Path, seed: int, most: int, *flags: str) -> float:
    """Trains on a task whose point is how long an action is held; see tests/hold.py."""
    hold = ("--environment.id", "hold:Hold-v0", "--total-frames", 300_000)
    repeat = ("--environment.repeat.most", most, *flags)
    return _train(tmp_path, "catch", seed, *hold, *repeat)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_learned_repeat_holds_an_action_as_long_as_it_should(
    tmp_path: pathlib.Path, hold_is_found: None, seed: int
) -> None:
    assert _hold(tmp_path, seed, 8, "--environment.repeat.learned") >= 0.95


def test_a_critic_explains_what_a_policy_will_earn(tmp_path: pathlib.Path) -> None:
    """Of one that has learned for a while: how soon a random one drops the pole is mostly chance.

    One that balances it tells nothing either: most of its episodes are cut off, and what would have
    come then nobody knows.
    """
    first, then = tmp_path / "policy", tmp_path / "critic"
    common = ("train", "cartpole", "--seed", 1)
    for flags in (
        ("--logdir", first, "--total-frames", 50_000),
        (
            *("--logdir", then, "--init-from", first, "--total-frames", 300_000),
            *("--algorithm", "critic", "--agent.separate-baseline"),
        ),
    ):
        trained = services.run(*common, *flags)
        assert trained.returncode == 0, trained.stdout + trained.stderr
    for before, after in zip(
        *(Player(checkpoint.choose(logdir)).agent.policy_variables for logdir in (first, then)),
        strict=True,
    ):
        np.testing.assert_array_equal(before.numpy(), after.numpy(), strict=True)
    before, after = (_explained_variance(then, trained=trained) for trained in (False, True))
    print(f"\nexplained variance against Monte Carlo returns: {before:.3f}, then {after:.3f}")
    assert before < 0.1
    assert after > 0.25


def _explained_variance(logdir: pathlib.Path, trained: bool, steps: int = 2000) -> float:
    """Of the discounted sum of what came after each state, by V; by a new one, if not `trained`.

    What would have come after a time limit nobody knows: those episodes do not count.
    """
    player = Player(checkpoint.choose(logdir))
    with contextlib.closing(player.environment(32)) as environment:
        objective, agent = player.config.objective, player.agent
        if not trained:
            other = build.agent(
                player.config.agent, environment.observation_space, environment.action_space
            )
            for variable, value in zip(
                agent.baseline_variables, other.baseline_variables, strict=True
            ):
                variable.assign(value)
        timestep, state = environment.reset(1), agent.initial_state(32)
        values, rewards, types, ended = [], [], [], []
        for step in range(steps):
            copy = tree.map_structure(lambda leaf: tf.constant(np.array(leaf)), timestep)
            output, state = agent.step(copy, state, tf.constant([1, step]))
            types.append(timestep.step_type.copy())
            ended.append(timestep.discount == 0.0)
            values.append(output.baseline.numpy())
            environment.send(output.action.numpy())
            timestep = environment.recv().timestep
            rewards.append(objective.reward_scale * timestep.reward)
    pairs = []
    for e in range(32):
        returns = None  # unknown
        for t in reversed(range(steps)):
            if types[t][e] == StepType.LAST:
                returns = 0.0 if ended[t][e] else None
            elif returns is not None:
                returns = rewards[t][e] + objective.discount * returns
                pairs.append((values[t][e], returns))
    predicted, actual = np.array(pairs).T
    return float(1.0 - np.var(actual - predicted) / np.var(actual))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_popart_is_needed_for_very_different_rewards(tmp_path: pathlib.Path, seed: int) -> None:
    """Two boards of Catch in which the actions mean something else, told apart by a mark."""
    boards = ('Catch{"marked": true}', 'Catch{"marked": true, "shift": 1, "reward": 1000}')
    flags = ("--tasks.environments", *boards, "--tasks.order", "simultaneous", "--evaluate", "no")
    worst = {}
    for popart in ("popart", "no-popart"):
        logdir = _trained(tmp_path / popart, "catch", seed, *flags, f"--agent.{popart}")
        returns = [
            _evaluated(logdir, "--task", task, "--greedy", "--episodes", 100)["return_mean"]
            for task in range(len(boards))
        ]
        print(f"returns {', '.join(f'{each:.2f}' for each in returns)}")
        worst[popart] = min(returns[0], returns[1] / 1000.0)
    assert worst["popart"] >= 0.95
    assert worst["no-popart"] <= 0.5


def test_tasks_in_turn_are_forgotten_but_with_clear_are_not(
    tmp_path: pathlib.Path,
) -> None:
    """Means over three seeds: areas of one arm differ by up to 0.2 between runs."""
    forgotten, areas = {}, {}
    for arm in ("sequential", "clear"):
        preset, *flags = EXPERIMENTS["clear-catch"].arms[arm]
        logdirs = [_trained(tmp_path / arm / f"{x}", preset, x, *flags) for x in (1, 2, 3)]
        runs = [continual.read(logdir) for logdir in logdirs]
        forgotten[arm] = np.mean([_forgotten(run) for run in runs])
        areas[arm] = np.mean([_area(run) for run in runs])
        print(f"{arm} forgets {forgotten[arm]:.2f}, area {areas[arm]:.2f}")
    assert forgotten["sequential"] >= 0.25
    assert forgotten["clear"] <= 0.15
    assert areas["clear"] >= areas["sequential"] + 0.1


def _forgotten(run: continual.Run) -> float:
    return float(np.mean(list(continual.forgetting(run).values())))


def _area(run: continual.Run) -> float:
    """The mean return over the run, over tasks."""
    return float(np.mean([curve.area(run.blocks[-1].end) for curve in run.curves.values()]))
