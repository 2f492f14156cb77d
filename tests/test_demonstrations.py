"""Demonstrations: how they are checked and become unrolls, what is learned from them, and when."""

import dataclasses
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import services
import test_algorithms
from half_trained import STORED

import impala
from impala.agents.agent import Agent
from impala.algorithms.clone import Clone
from impala.commands import main as cli
from impala.config import rules
from impala.config.schema import (
    AgentConfig,
    CloneConfig,
    Config,
    DemonstrationsConfig,
    EnvironmentConfig,
    MixConfig,
    ObjectiveConfig,
)
from impala.config.values import OptionError
from impala.environments import base, demonstrations
from impala.environments.spaces import Spaces
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Counters
from impala.parts import build
from impala.play import dataset
from impala.play.player import Player
from impala.testing.algorithms import AlgorithmConformance, loss_and_gradients
from impala.types import EnvironmentFault, EnvironmentStep, StepType, TimeStep
from learner import run
from learner.data.demonstrations import Demonstrations, open_demonstrations
from learner.data.rows import Layout
from learner.update.peers import Peers

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete
SPACES: Spaces = (Box(-5.0, 5.0, (2,), np.float32), Discrete(3))
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


@dataclasses.dataclass
class Episode:
    """As Minari has them."""

    observations: Any
    actions: Any
    rewards: Any
    terminations: Any
    truncations: Any
    infos: Any = None


def episode(n: int, seed: int = 0, terminated: bool = True) -> Episode:
    rng = np.random.default_rng(seed)
    ends = np.arange(n) == n - 1
    return Episode(
        rng.uniform(-5, 5, (n + 1, 2)).astype(np.float32),
        rng.integers(0, 3, n),
        rng.normal(size=n),
        ends & terminated,
        ends & (not terminated),
    )


class TestClone(AlgorithmConformance):
    """What every algorithm promises."""

    action_space = gym.spaces.Dict({"a": Discrete(3), "b": Box(-1.0, 1.0, (2,), np.float32)})

    def make(self, agent: Agent) -> Clone:
        return Clone(agent, ObjectiveConfig(), CloneConfig())


def test_the_loss_is_the_surprise_at_the_demonstrated_action() -> None:
    """-log pi(a), and half the squared error to the return; whatever policy was recorded."""
    agent = test_algorithms.table_agent()
    config = CloneConfig(policy_cost=2.0, baseline_cost=0.6)
    algorithm = Clone(agent, ObjectiveConfig(discount=0.9), config)
    arrays = test_algorithms.make_arrays()
    batch = test_algorithms.make_batch(arrays, agent)
    output, gradients = loss_and_gradients(algorithm, batch)

    logits, values = agent.policy.numpy().astype(np.float64), agent.baseline.numpy()
    steps, size = arrays["reward"].shape[0] - 1, arrays["reward"].shape[1]
    expected, by_policy = np.zeros((steps, size)), np.zeros(logits.shape)
    by_baseline = np.zeros(values.shape)
    for b in range(size):
        following = float(values[steps, b])
        for t in reversed(range(steps)):
            if arrays["step_type"][t + 1, b] == FIRST:
                following = float(values[t, b])
                continue
            following = arrays["reward"][t + 1, b] + 0.9 * arrays["discount"][t + 1, b] * following
            p = np.exp(logits[t, b]) / np.exp(logits[t, b]).sum()
            action = int(arrays["action"][t + 1, b])
            error = float(values[t, b]) - following
            expected[t, b] = -2.0 * np.log(p[action]) + 0.6 * 0.5 * error**2
            by_policy[t, b] = 2.0 * (p - np.eye(len(p))[action])
            by_baseline[t, b] = 0.6 * error
    np.testing.assert_allclose(output.loss, expected, rtol=1e-4, atol=1e-4)
    by_name = {id(v): g for v, g in zip(algorithm.learned_variables, gradients, strict=True)}
    np.testing.assert_allclose(by_name[id(agent.policy)], by_policy, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(by_name[id(agent.baseline)], by_baseline, rtol=1e-4, atol=1e-4)


def test_episodes_become_a_stream() -> None:
    """With what the agent sees of the past, and time limits told from terminations."""
    seen = gym.spaces.Dict(
        {
            "observation": SPACES[0],
            "last_action": Discrete(4, start=-1),
            "last_reward": Box(-np.inf, np.inf, (), np.float32),
        }
    )
    two = [episode(3, 1), episode(2, 2, terminated=False)]
    found = demonstrations.stream("mine", SPACES, two, (seen, SPACES[1]))
    timestep = found.timestep
    assert timestep.step_type.tolist() == [FIRST, MID, MID, LAST, FIRST, MID, LAST]
    assert timestep.discount.tolist() == [1, 1, 1, 0, 1, 1, 1]
    rewards = [0, *two[0].rewards, 0, *two[1].rewards]
    np.testing.assert_allclose(timestep.reward, rewards, rtol=1e-6)
    actions = [0, *two[0].actions, 0, *two[1].actions]
    assert found.action.tolist() == actions
    observed = np.concatenate([two[0].observations, two[1].observations])
    np.testing.assert_array_equal(timestep.observation["observation"], observed)
    last = [-1, *two[0].actions, -1, *two[1].actions]
    assert timestep.observation["last_action"].tolist() == last
    np.testing.assert_allclose(timestep.observation["last_reward"], rewards, rtol=1e-6)


def changed(n: int = 3, **leaves: Callable[[np.ndarray], np.ndarray]) -> Episode:
    made = episode(n)
    return dataclasses.replace(
        made, **{name: change(np.array(getattr(made, name))) for name, change in leaves.items()}
    )


def put(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def at_one(array: np.ndarray) -> np.ndarray:
        array[1] = value
        return array

    return at_one


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([], "mine has no episodes: nothing can be cloned"),
        ([changed(0)], "Episode 0 of mine has no steps"),
        (
            [episode(2), changed(observations=lambda x: x[:-1])],
            "Episode 1 of mine has 3 rows of observation instead of 4: the last one, which the "
            "last step led to, is missing",
        ),
        ([changed(observations=put(np.nan))], "observation nan at step 1: it must be finite"),
        ([changed(observations=lambda x: x[:, :1])], r"observation has shape \(4, 1\), expected"),
        ([changed(observations=put(7.0))], "observation 7.0 at step 1, outside of -5.0 to 5.0"),
        ([changed(actions=put(3))], "has action 3 at step 1, outside of 0 to 2"),
        ([changed(actions=lambda x: x + 0.5)], "has action of float64, which Discrete.3. cannot"),
        ([changed(rewards=put(np.inf))], "has a reward of inf at step 1"),
        ([changed(terminations=put(1))], "ends at step 1, but has 3 steps"),
        ([changed(truncations=lambda x: x[:1])], "3 rewards, 3 terminations, 1 truncations"),
        (
            [object()],
            "Episode 0 of mine is a object without observations, actions, rewards, .*Namespace",
        ),
    ],
)
def test_what_no_environment_could_give_is_refused(episodes: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        demonstrations.stream("mine", None, episodes, SPACES)


def test_other_spaces_are_refused() -> None:
    other = SPACES[0], Discrete(2)
    with pytest.raises(ValueError, match=r"mine see Box.* do Discrete\(2\); this run sees Box"):
        demonstrations.stream("mine", other, [episode(2)], SPACES)
    masked = gym.spaces.Dict({"observation": SPACES[0], "action_mask": gym.spaces.MultiBinary(3)})
    with pytest.raises(ValueError, match="mine have no action_mask, which this run's agent needs"):
        demonstrations.stream("mine", None, [episode(2)], (masked, SPACES[1]))


def module(monkeypatch: pytest.MonkeyPatch, episodes: list[Episode]) -> str:
    made = types.ModuleType("demonstrated")
    made.episodes = lambda: iter(episodes)  # type: ignore[attr-defined]
    made.number = 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "demonstrated", made)
    return "demonstrated:episodes"


def test_unrolls_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins with the row that the one before ended with; the last one at the beginning."""
    space = Box(0, 255, (6, 6, 1), np.uint8)
    rng = np.random.default_rng(0)

    def frames(n: int) -> Episode:
        made = episode(n)
        return dataclasses.replace(made, observations=rng.integers(0, 255, (n + 1, 6, 6, 1)))

    name = module(monkeypatch, [frames(5), frames(4)])
    config = Config(
        environment=EnvironmentConfig(id="Catch"),
        agent=AgentConfig(torso="mlp", frame_stack=3),
        demonstrations=DemonstrationsConfig(source=name),
    )
    length = 4
    learner = dataclasses.replace(config.learner, unroll_length=length)
    config = dataclasses.replace(config, learner=learner)
    spaces = space, Discrete(3)
    agent = build.agent(config.agent, *spaces)
    layout = Layout(build.unroll_spec(agent, *spaces, length))
    made = open_demonstrations(config, agent, spaces, layout, seed=[0])
    assert len(made._rows) == 3
    stream = demonstrations.stream(name, *demonstrations.load(name), spaces)
    unroll = layout.unroll(made._rows)
    for k in range(3):
        rows = (4 * k + np.arange(5)) % 11
        np.testing.assert_array_equal(
            unroll.timestep.observation[:, k], stream.timestep.observation[rows]
        )
        np.testing.assert_array_equal(unroll.output.action[:, k], stream.action[rows])
    assert unroll.frames.tolist() == [4, 3, 3]  # without the seams
    assert (unroll.parameter_version == -1).all()
    whole = stream.timestep._replace(
        **{n: getattr(stream.timestep, n)[:, np.newaxis] for n in stream.timestep._fields}
    )
    state = agent.initial_state(1)
    for k in (1, 2):  # the state before the first row of an unroll
        before = whole._replace(**{n: getattr(whole, n)[: 4 * k] for n in whole._fields})
        _, (expected,) = agent.unroll(before, state)
        np.testing.assert_array_equal(unroll.core_state[0][k], expected[0])


def test_actions_at_the_edge_of_a_box_are_moved_inside() -> None:
    space = gym.spaces.Dict({"a": Discrete(3), "b": Box(-1.0, 3.0, (1,), np.float32)})
    one = episode(3)
    one.actions = {"a": np.array([0, 2, 1]), "b": np.array([[3.0], [-1.0], [0.5]])}
    (_, action) = demonstrations.stream("mine", None, [one], (SPACES[0], space))
    assert action["a"][1:].tolist() == [0, 2, 1]
    np.testing.assert_allclose(action["b"][1:, 0], [2.98, -0.98, 0.5], rtol=1e-6)


def test_each_unroll_is_drawn_once_in_a_pass() -> None:
    rows = np.arange(5, dtype=np.uint8)[:, np.newaxis]
    made, drawn = Demonstrations(rows, seed=[3]), np.zeros((4, 1), np.uint8)
    seen = []
    for _ in range(5):
        made.draw(drawn)
        seen += drawn[:, 0].tolist()
    passes = [seen[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(one) == [0, 1, 2, 3, 4] for one in passes)
    assert len(set(map(tuple, passes))) > 1


def test_a_restart_draws_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else a learner that is stopped often would see the same first ones each time."""
    seeds = []
    monkeypatch.setattr(run, "Layout", lambda unroll_spec: None)
    monkeypatch.setattr(run, "open_demonstrations", lambda *_, seed: seeds.append(seed))
    for counters in (Counters(), Counters(updates=7)):
        saved = types.SimpleNamespace(counters=counters)
        monkeypatch.setattr(checkpoint, "load", lambda _, saved=saved: saved)
        monkeypatch.setattr(checkpoint, "exists", lambda _: True)
        phases = types.SimpleNamespace(
            begin_with_demonstrations=True, number=lambda counters: 1, agent=None
        )
        plan: Any = types.SimpleNamespace(phases=phases, spaces=None, unroll_spec=())
        options: Any = types.SimpleNamespace(fresh=False, logdir=None)
        run._demonstrations(Config(seed=3), options, plan, Peers())
    assert seeds == [[3, 0], [3, 7]]


def test_what_is_infinite_is_refused_without_bounds() -> None:
    spaces = Box(-np.inf, np.inf, (2,), np.float32), Discrete(3)
    for value in (np.inf, 1e300):
        wrong = episode(3)
        wrong.observations = wrong.observations.astype(np.float64)
        wrong.observations[2, 0] = value
        with pytest.raises(ValueError, match="has observation inf at step 2: it must be"):
            demonstrations.stream("mine", None, [wrong], spaces)


def test_too_many_are_refused_as_soon_as_that_is_seen() -> None:
    def endless() -> Iterator[Episode]:
        while True:
            yield episode(10)

    with pytest.raises(ValueError, match=r"more than 2,000 bytes .* after 8 episodes: raise it"):
        demonstrations.stream("mine", None, endless(), SPACES, most_bytes=2000)


def test_errors_of_a_function_say_where_they_were_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Iterator[Episode]:
        yield episode(2)
        raise FileNotFoundError("levels.txt")

    made = types.ModuleType("failing")
    made.fails, made.nothing = fails, lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "failing", made)
    for name, message in (
        ("failing:fails", r"raised FileNotFoundError at .*test_demonstrations.py:\d+: levels.txt"),
        ("failing:nothing", "failing:nothing raised ValueError at .*: it returned None: return"),
    ):
        with pytest.raises(ValueError, match=message):
            demonstrations.stream(name, *demonstrations.load(name), SPACES)


def test_what_is_no_function_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, [])
    with pytest.raises(ValueError, match="demonstrated:number is 5, not a function that returns"):
        demonstrations.load("demonstrated:number")
    with pytest.raises(ValueError, match="say minari:catch/mine-v0 if that is a dataset"):
        demonstrations.load("catch/mine-v0")
    with pytest.raises(ValueError, match=r"minari:no/such-v0 cannot be opened .*minari list local"):
        demonstrations.load("minari:no/such-v0")
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ValueError, match=r"needs Minari: pip install 'impala-rl\[minari\]'"):
        demonstrations.load("minari:no/such-v0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"demonstrations": DemonstrationsConfig()}, "demonstrations.source is not set: name them"),
        ({"phases": ("critic:100", "clone")}, "let it be the first phase"),
        ({"phases": ("critic:100", "impala")}, "demonstrations.source is minari:x, but critic and"),
        ({"mix": MixConfig(exact_lag=0)}, "leave out deterministic, mix.exact_lag"),
        ({"agent": AgentConfig(policy="epsilon_greedy")}, "which clone cannot learn: set it to"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    config = Config(
        environment=EnvironmentConfig(id="Catch"),
        phases=("clone:100", "impala"),
        demonstrations=DemonstrationsConfig(source="minari:x"),
    )
    with pytest.raises(OptionError, match=message):
        rules.validate(dataclasses.replace(config, **settings))


def test_episodes_that_a_failure_cut_off_are_not_recorded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    returns: list[float] = []

    class Failing(base.Wrapper):
        """Its first and its third episode end by a failure."""

        def changed(self, timestep: TimeStep) -> TimeStep:
            return timestep

        def recv(self) -> EnvironmentStep:
            step = super().recv()
            if step.timestep.step_type[0] != StepType.LAST:
                return step
            returns.append(float(step.timestep.reward[0]))
            fault = EnvironmentFault(0, "crashed", "KeyError: 'map'")
            return step._replace(faults=[fault] if len(returns) in failing else [])

    failing, made = {1, 3}, Player.environment
    monkeypatch.setattr(Player, "environment", lambda *words: Failing(made(*words)))
    player = impala.load(STORED / "catch")._player
    recorded = dataset.record(player, "catch/failing-v0", 3, False, 1)
    assert recorded == [returns[i] for i in (1, 3, 4)]
    failing = {*range(100)}
    with pytest.raises(ValueError, match="has failed in 3 episodes, which are not stored"):
        dataset.record(player, "catch/failing-v1", 2, False, 1)


def test_an_agent_is_recorded_and_cloned(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And then learns by itself; what actors played before that is not learned from."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    recorded = services.run("record", STORED / "catch", "--dataset", "catch/half-v0", "--greedy")
    assert recorded.returncode == 0, recorded.stderr
    assert "catch/half-v0: 100 episodes, mean return" in recorded.stdout
    words = ["train", "catch", "--logdir", tmp_path / "run", "--learner.log-seconds", "0.5"]
    words += [
        "--demonstrations.source",
        "minari:catch/half-v0",
        "--phases",
        "clone:60000",
        "impala",
    ]
    done = services.run(*words, "--total-frames", "70_000")
    assert done.returncode == 0, done.stderr
    assert "  phase 1 of 2, clone  " in done.stdout and "  phase 2 of 2, impala  " in done.stdout
    rows = services.rows(tmp_path / "run")
    checked = [services.check_losses(row) for row in rows]
    assert any(checked)
    of_policy = "clone/loss_mean/policy"
    cloning = [row[of_policy] for row in rows if of_policy in row]
    assert cloning[-1] < 0.2 < cloning[0]
    learning = [row for row in rows if "loss_mean/policy_gradient" in row]
    assert learning and learning[-1]["loss_mean/policy_gradient"] != 0.0
    capfd.readouterr()
    assert cli.main(["record", str(STORED / "catch"), "--dataset", "catch/half-v0"]) == 2
    assert "catch/half-v0" in capfd.readouterr().err
    cloned = ["--phases", "clone:100", "impala", "--demonstrations.source=minari:catch/half-v0"]
    assert cli.main(["check", "catch", *cloned]) == 0
    says = "  clones    100 episodes of minari:catch/half-v0, 900 steps, which fit"
    assert says in capfd.readouterr().out
    assert cli.main(["check", "cartpole", *cloned]) == 2
    assert "and do Discrete(3); this run sees Box(" in capfd.readouterr().err


def test_what_a_step_leaves_of_the_future_is_kept() -> None:
    """As at a lost life, after which an episode goes on."""
    lost = dataclasses.replace(episode(3), infos={"discount": [1.0, 1.0, 0.0, 0.0]})
    found = demonstrations.stream("mine", SPACES, [lost], SPACES)
    assert found.timestep.discount.tolist() == [1, 1, 0, 0]
    wrong = dataclasses.replace(lost, infos={"discount": [1.0, 2.0, 1.0, 1.0]})
    with pytest.raises(ValueError, match=r"has discount 2.0 at step 1, outside of 0.0 to 1.0"):
        demonstrations.stream("mine", SPACES, [wrong], SPACES)


def test_choices_of_another_integer_are_the_same() -> None:
    """Those of Minari are always int64."""
    spaces = SPACES[0], Discrete(3, dtype=np.int32)
    stream = demonstrations.stream("mine", SPACES, [episode(3)], spaces)
    assert stream.action.dtype == np.int32


class _Noise:
    """An environment whose episodes have two steps, of which the first costs a life."""

    faults = ()

    def __init__(self, space: gym.Space) -> None:
        self.space = space
        self.seen: list[Any] = []

    def close(self) -> None:
        pass

    def reset(self, **seed: Any) -> Any:
        self.seen.append(self.space.sample())
        return self.seen[-1], {}

    def step(self, action: Any) -> Any:
        observation, _ = self.reset()
        is_over = len(self.seen) % 3 == 0  # after two steps
        return observation, 1.0, is_over, False, {"discount": np.nan if is_over else 0.0}


def _record(monkeypatch: pytest.MonkeyPatch, path: pathlib.Path, space: gym.Space) -> _Noise:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(path))
    noise = _Noise(space)
    policy = mock.Mock(return_value=np.int64(1), observation_space=space, action_space=Discrete(3))
    policy.environment.return_value = noise
    monkeypatch.setattr(dataset, "Policy", lambda *given: policy)
    dataset.record(types.SimpleNamespace(config=Config()), "a-team/x-v0", 2, False, 1)  # type: ignore
    return noise


@pytest.mark.parametrize("shape", [(84, 84, 1), (40, 40, 3)])
def test_images_are_recorded_as_they_are_with_lost_lives(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    space = Box(0, 255, shape, np.uint8)
    noise = _record(monkeypatch, tmp_path, space)
    of_dataset, episodes = demonstrations.load("minari:a-team/x-v0")
    found = demonstrations.stream("it", of_dataset, episodes, (space, Discrete(3)))
    np.testing.assert_array_equal(found.timestep.observation, np.stack(noise.seen))
    assert found.timestep.discount.tolist() == [1, 0, 0] * 2


def test_what_minari_cannot_store_is_refused_before_it_is_played(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="cannot store 'walker/joints', a key with a slash"):
        _record(monkeypatch, tmp_path, gym.spaces.Dict({"walker/joints": SPACES[0]}))
    assert not any(tmp_path.iterdir())
    player: Any = types.SimpleNamespace(config=Config())
    for name in ("a/x-v0", "catch/mine", "catch/my.own-v0"):
        with pytest.raises(ValueError, match=f"{name} is no name of a dataset"):
            dataset.record(player, name, 2, False, 1)


def test_a_dataset_that_cannot_be_written_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str, *given: Any, **others: Any) -> None:
        (tmp_path / name).mkdir(parents=True)
        raise OSError("no space")

    monkeypatch.setattr("minari.create_dataset_from_buffers", make)
    with pytest.raises(OSError, match="no space"):
        _record(monkeypatch, tmp_path, SPACES[0])
    assert not (tmp_path / "a-team" / "x-v0").exists()
