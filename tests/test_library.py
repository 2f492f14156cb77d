"""`import impala` is light; a loaded policy acts as `impala evaluate` does; runs are trained."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tree
import yaml
from gymnasium.utils.env_checker import check_env
from half_trained import STORED, evaluated

import impala
from impala.commands import library
from impala.commands import train as commands_train
from impala.config.schema import AgentConfig
from impala.environments import base
from impala.logdir import checkpoint
from impala.parts import build
from impala.play import policy as policy_module
from impala.play.player import Player
from impala.play.policy import Policy
from impala.runtime import process
from impala.runtime.supervisor import Supervisor

# What is offered.


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys; import impala; impala.Config().seed; impala.preset('catch')\n"
        "impala.curve\n"
        "assert not {'tensorflow', 'sonnet', 'gymnasium', 'grpc'} & set(sys.modules)\n"
        "impala.Environment\n"
        "assert not {'tensorflow', 'sonnet', 'grpc'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_v_trace_can_be_used_alone() -> None:
    zeros = np.zeros((2, 1), np.float32)
    returns = impala.vtrace.from_importance_weights(
        zeros, zeros, zeros, zeros, bootstrap_value=np.ones(1, np.float32)
    )
    np.testing.assert_array_equal(returns.vs, np.zeros((2, 1)))


# A policy in a custom loop.


def _one_by_one(policy: impala.Policy, environment: gym.Env, seed: int) -> Iterator[float]:
    """Returns of episodes, in the loop that everybody writes."""
    observation, _ = environment.reset(seed=seed)
    total = 0.0
    while True:
        observation, reward, terminated, truncated, _ = environment.step(policy(observation))
        total += float(reward)
        if terminated or truncated:
            yield total
            total = 0.0
            observation, _ = environment.reset()
            policy.reset()


def _together(
    policy: impala.Policy, environments: gym.vector.VectorEnv, seed: int, episodes: int
) -> list[float]:
    """Returns of the first episodes of each environment, in the loop for vector environments."""
    observations, _ = environments.reset(seed=seed)
    rewards = np.zeros(environments.num_envs)
    ended = np.zeros(environments.num_envs, bool)
    totals = np.zeros(environments.num_envs)
    finished: list[list[float]] = [[] for _ in totals]
    while min(map(len, finished)) < episodes:
        actions = policy(observations, rewards)
        observations, rewards, terminations, truncations, _ = environments.step(actions)
        policy.reset(ended)  # where the last step ended an episode, this one has begun another
        ended = terminations | truncations
        totals += rewards
        for i in np.flatnonzero(ended):
            finished[i].append(float(totals[i]))
        totals[ended] = 0.0
    return [total for own in finished for total in own[:episodes]]


@pytest.mark.parametrize(
    ("name", "episodes", "greedy"),
    [("catch", 20, False), ("cartpole", 3, False), ("bandit", 10, False), ("bandit", 10, True)],
)
def test_the_five_lines_play_what_evaluate_plays(name: str, episodes: int, greedy: bool) -> None:
    policy = impala.load(STORED / name, greedy=greedy, seed=7)
    environment = policy.environment()
    returns = _one_by_one(policy, environment, seed=7)

    played = [next(returns) for _ in range(episodes)]

    environment.close()
    assert len(set(played)) > 1
    assert played == evaluated(name, 1, episodes, greedy, seed=7)


@pytest.mark.parametrize(
    ("name", "episodes", "greedy"),
    [("catch", 4, False), ("cartpole", 1, False), ("bandit", 3, False), ("bandit", 3, True)],
)
def test_a_batch_plays_what_evaluate_plays(name: str, episodes: int, greedy: bool) -> None:
    policy = impala.load(STORED / name, greedy=greedy, seed=7)
    environments = policy.environment(num_envs=5)

    played = _together(policy, environments, 7, episodes)

    environments.close()
    assert len(set(played)) > 1
    assert played == evaluated(name, 5, 5 * episodes, greedy, seed=7)


def test_environments_that_gymnasium_makes_will_do() -> None:
    # Given seeds as evaluate gives them to its environments ...
    one, several = int(base.seeds(7, 1)[0]), int(base.seeds(7, 5)[0])
    cartpole = impala.load(STORED / "cartpole", seed=7)
    returns = _one_by_one(cartpole, gym.make("CartPole-v1"), one)
    assert [next(returns) for _ in range(2)] == evaluated("cartpole", 1, 2, False, 7)

    # ... then also an agent that sees its last action and reward and the time plays the same,
    # although nothing of that is in the observation.
    bandit = impala.load(STORED / "bandit", seed=7)
    bandits = gym.make_vec(
        *("Bandit/DependentUniform-v0", 5), vectorization_mode="vector_entry_point", pulls=20
    )
    assert _together(bandit, bandits, several, 3) == evaluated("bandit", 5, 15, False, 7)


def test_what_cannot_be_acted_on_is_refused() -> None:
    policy = impala.load(STORED / "cartpole")
    with pytest.raises(ValueError, match=r"observation has shape \(3,\), expected \(4,\)"):
        policy(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"observation\[1, 2\] is nan; it must be a finite number"):
        policy([[0.0] * 4, [0.0, 0.0, float("nan"), 0.0]])
    with pytest.raises(
        ValueError, match=r"observation is a text, .*play in an environment made by"
    ):
        policy("left")
    with pytest.raises(ValueError, match=r"observation is complex128, expected float32"):
        policy(np.zeros(4, complex))
    assert policy(np.zeros((2, 4))).shape == (2,)
    with pytest.raises(ValueError, match=r"of one environment\(s\), the one before of 2"):
        policy(np.zeros(4))
    policy.reset()
    assert policy(np.zeros(4)).shape == ()

    catch = impala.load(STORED / "catch")
    board = np.full(catch.observation_space.shape or (), 300, np.uint16)
    with pytest.raises(ValueError, match=r"observation.* is 300; .* number that uint8 can hold"):
        catch(board)

    bandit = impala.load(STORED / "bandit")
    with pytest.raises(ValueError, match=r"observation.* is 9; it must be in Discrete"):
        bandit(9)
    for shown in (np.zeros(4, int), np.zeros(3, int), 0):  # which sees the last action
        assert bandit(shown).shape == np.shape(shown)
        bandit.reset()
    bandit(0)  # an episode begins: there is no last reward yet
    with pytest.raises(ValueError, match=r"call policy\(observation, reward\)"):
        bandit(0)
    with pytest.raises(ValueError, match="no checkpoint"):
        impala.load(STORED)


def test_a_policy_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("a package is missing")

    monkeypatch.setattr("impala.environments.make", refuse)
    policy = impala.load(STORED / "cartpole")
    assert policy(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(ValueError, match="a package is missing"):
        policy.environment()


def test_value_and_distribution_change_nothing() -> None:
    """Nor is what they say that of another observation, memory or reward."""
    policy, asked = (impala.load(STORED / "bandit", seed=7) for _ in range(2))
    environment, probabilities, values = policy.environment(num_envs=5), [], []
    observations, _ = environment.reset(seed=7)
    rewards = np.zeros(5)
    for _ in range(30):
        of_others = asked.distribution(observations, rewards), asked.value(observations, rewards)
        action = policy(observations, rewards)
        np.testing.assert_array_equal(asked(observations, rewards), action)
        probabilities.append(of_others[0])
        values.append(of_others[1])
        observations, rewards, *_ = environment.step(action)
    environment.close()
    assert np.shape(values) == (30, 5) and np.std(values, axis=0).min() > 0.0
    np.testing.assert_allclose(np.sum(probabilities, axis=-1), 1.0, rtol=1e-5)
    assert len(np.unique(np.round(probabilities, 5))) > 30


def test_many_policies_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policies = [impala.load(STORED / "catch", seed=7) for _ in range(6)]
    observation, _ = policies[0].environment().reset(seed=2)
    values = [policy.value(observation) for policy in policies]
    monkeypatch.setattr("impala.play.evaluation.Flat", None)
    assert [policy.value(observation) for policy in policies] == values


def test_the_value_of_a_critic_is_what_it_has_trained() -> None:
    """Whatever the policy, whose Q-values no update of a critic changes."""
    player = Player(checkpoint.choose(STORED / "catch"))
    agent = AgentConfig(policy="epsilon_greedy", hidden_sizes=(8,))
    player.agent, player.algorithm = build.agent(agent, *player.spaces), "critic"
    policy = Policy(player)
    observation, _ = policy.environment().reset(seed=2)
    output = policy._output(observation, None)[1]
    assert policy.value(observation) == output.baseline[0]


def test_a_distribution_is_that_of_the_sampled_actions() -> None:
    policy = impala.load(STORED / "catch", seed=7)
    observation, _ = policy.environment().reset(seed=2)
    board = np.repeat(np.asarray(observation)[np.newaxis], 4_000, axis=0)
    probabilities = policy.distribution(board[:1])[0]
    policy.reset()
    shares = np.bincount(policy(board), minlength=3) / len(board)
    np.testing.assert_allclose(shares, probabilities, atol=0.02)
    assert np.ptp(probabilities) > 0.05
    policy.reset()
    assert policy.value(observation).shape == ()  # of one environment there is no axis
    assert policy.distribution(observation).shape == (3,)
    policy.algorithm = "sac"
    with pytest.raises(ValueError, match="sac has trained no value"):
        policy.value(observation)


@pytest.mark.parametrize("greedy", [False, True])
def test_evaluate_returns_what_the_command_plays(greedy: bool) -> None:
    returns = impala.evaluate(STORED / "catch", episodes=9, num_envs=4, greedy=greedy, seed=7)
    assert returns.tolist() == evaluated("catch", 4, 9, greedy, seed=7)
    with pytest.raises(ValueError, match="episodes is 0; it must be at least 1"):
        impala.evaluate(STORED / "catch", episodes=0)


def test_a_curve_is_of_evaluations_or_else_of_training(tmp_path: pathlib.Path) -> None:
    # Given a run that went back to a checkpoint after 200 frames ...
    (tmp_path / "config.yaml").write_text("environment: {id: Catch}")
    rows = [(0, -1.0), (100, 0.0), (200, 0.5), (100, 0.25), (300, 1.0)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"frames": frames, "seconds": 1.0, "episode/Catch/return_recent": recent})
            + "\n"
            for frames, recent in rows
        )
    )
    # ... then its curve has the later part, and that of evaluations comes first.
    frames, returns, measure = impala.curve(tmp_path)
    assert (frames.tolist(), returns.tolist()) == ([0, 100, 300], [-1.0, 0.25, 1.0])
    assert measure == "return, mean of the last 100 episodes"
    line = {"task": "Catch", "learner": 1, "frames": 200, "returns": [1.0, 0.0]}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line))
    found = impala.curve(str(tmp_path))
    assert (found.frames.tolist(), found.returns.tolist()) == ([200], [0.5])
    assert found.measure == "return, mean of an evaluation"
    with pytest.raises(ValueError, match="no log directory"):
        impala.curve(tmp_path / "none")
    with pytest.raises(ValueError, match="task"):
        impala.curve(tmp_path, task=1)


def test_loading_leaves_the_gpus_to_others() -> None:
    code = (
        "import os, sys; import impala; impala.load(sys.argv[1])\n"
        "import tensorflow as tf; hidden = []\n"
        "tf.config.set_visible_devices = lambda *given: hidden.append(given)\n"
        "impala.load(sys.argv[1])\n"
        "assert os.environ.get('CUDA_VISIBLE_DEVICES') == sys.argv[2]\n"
        "assert hidden == [([], 'GPU')], hidden\n"
    )
    command = [sys.executable, "-c", code, str(STORED / "catch"), "0"]
    done = subprocess.run(
        command, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["catch", "cartpole", "bandit"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of gym: spaces without bounds, and the like
def test_the_environment_is_one_of_gymnasiums(name: str) -> None:
    environment = impala.load(STORED / name).environment()
    check_env(environment, skip_render_check=True)
    # A reset in the middle of an episode begins another one; the same seed, the same episode.
    first, _ = environment.reset(seed=3)
    environment.step(environment.action_space.sample())
    again, _ = environment.reset(seed=3)
    assert gym.utils.env_checker.data_equivalence(first, again)
    environment.close()


# Training.

_PRETENDER = """
import json, os, pathlib, signal, sys, time
role, words = sys.argv[1:][:1], sys.argv[2:]
if role == ["learner"] and "STARTING" not in os.environ:
    def leave(*_):
        print("saved", flush=True)
        sys.exit(int(words[words.index("--stopped-status") + 1]))
    signal.signal(signal.SIGTERM, leave)
    logdir = pathlib.Path(next(word[9:] for word in words if word.startswith("--logdir=")))
    settings = pathlib.Path(words[words.index("--config") + 1]).read_text()
    (logdir / "settings.yaml").write_text(settings)
    (logdir / "words").write_text(" ".join(words))
    row = {"frames": 900, "seconds": 1.0, "updates": 3, "episode/Catch/return_recent": 0.5}
    again = {"frames": 900, "seconds": 1.0, "updates": 3}  # as of a learner that had nothing to do
    (logdir / "metrics.jsonl").write_text(json.dumps(row) + "\\n" + json.dumps(again) + "\\n")
    print("learning", flush=True)
    if "FINISHES" in os.environ:
        sys.exit(int(os.environ["FINISHES"]))
time.sleep(600)
"""


@pytest.fixture
def _pretenders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `train` start programs that only pretend to be a learner and actors."""
    (tmp_path / "pretender.py").write_text(_PRETENDER)
    command = (sys.executable, "-S", str(tmp_path / "pretender.py"))
    monkeypatch.setattr(process, "IMPALA", command)


@pytest.mark.usefixtures("_pretenders")
def test_training_takes_settings_and_tells_how_far_it_came(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINISHES", "0")
    monkeypatch.setenv("IMPALA_OPTIMISER__EPSILON", "0.5")  # of the command line, not of Python
    dotted: dict[str, Any] = {"agent.hidden_sizes": [5], "environment.atari.width": 40}
    trained = impala.train(
        "catch",
        tmp_path / "run",
        seed=3,
        optimiser={"learning_rate": 0.25},
        mix=impala.MixConfig(fresh=7),
        **dotted,
        environment={"atari": {"height": 50}},
        empty_replay=True,
    )
    assert trained == ("finished", tmp_path / "run", 900, 3, {"Catch": 0.5})
    settings = yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text())
    assert settings["seed"] == 3
    assert settings["optimiser"]["learning_rate"] == 0.25
    assert settings["optimiser"]["epsilon"] == impala.preset("catch").optimiser.epsilon
    assert settings["mix"]["fresh"] == 7
    assert settings["agent"]["hidden_sizes"] == [5]
    atari = settings["environment"]["atari"]
    assert (atari["width"], atari["height"]) == (40, 50)
    assert settings["learner"]["snapshots"] == "auto"  # not what it came to in this run
    words = (tmp_path / "run" / "words").read_text().split()
    assert "--empty-replay" in words
    assert words[words.index("--own-evaluator") + 1] == "no"
    assert "learning\n" in capsys.readouterr().out


_OBJECTS = """
import sys
import gymnasium as gym
import impala
from impala.agents.torsos import MLP

class Slow(gym.Wrapper):  # which no other process can import
    def __init__(self, length=9):
        super().__init__(gym.wrappers.TimeLimit(gym.make("CartPole-v1"), length))

class Own(MLP):
    def __init__(self, settings, name=None):
        super().__init__(impala.AgentConfig(hidden_sizes=(8,)), name=name)

def train(logdir, environment, **settings):
    trained = impala.train(
        "catch", logdir, environment=environment, total_frames=2_000, progress=False,
        agent={"torso": Own}, **settings
    )
    assert trained.status == "finished", trained
    returns = impala.evaluate(logdir, episodes=2, num_envs=2)
    print(*trained.returns, *returns)

if __name__ == "__main__":
    train("run-serial", lambda: Slow(4), serial=True)
    own = {"id": Slow, "kwargs": {"length": 5}, "vectorization": "async"}
    train("run-processes", own, num_actors=2, actor={"num_envs": 2})
"""


@pytest.mark.slow
def test_classes_and_functions_of_a_program_are_trained_with(tmp_path: pathlib.Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "own.py").write_text(_OBJECTS)
    command = [sys.executable, str(tmp_path / "program" / "own.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "__main__:_lambda_ 4.0 4.0",
        "__main__:Slow 5.0 5.0",
    ]
    with pytest.raises(ValueError, match="has given it to its run"):
        impala.load(tmp_path / "run-processes", allow="__main__")


@pytest.mark.usefixtures("_pretenders")
def test_training_that_fails_says_why(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINISHES", "7")
    with pytest.raises(impala.TrainingError, match=r"(?s)run failed: .* status 7\..*  learning"):
        impala.train("catch", tmp_path / "run", progress=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match=r"There is no setting 'optimiser\.lr'"):
        impala.train("catch", tmp_path / "run", optimiser={"lr": 1.0})
    with pytest.raises(ValueError, match=r"no setting 'lr'; ours is optimiser\.learning_rate\."):
        impala.train("catch", tmp_path / "run", lr=1.0)
    with pytest.raises(ValueError, match=r"tasks\.environments is .*, which overrides it"):
        impala.train("atari-multi", tmp_path / "run", environment="Catch")
    with pytest.raises(ValueError, match="q_learning, which does not read it"):
        impala.train("cartpole-q", tmp_path / "run", impala={"entropy_cost": 0.5})
    with pytest.raises(ValueError, match="q_learning, which does not read it"):
        impala.train("cartpole-q", tmp_path / "run", impala=impala.ImpalaConfig())
    (tmp_path / "other/actors.log").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"actors\.log cannot be written: Is a directory"):
        impala.train("catch", tmp_path / "other")
    wrong: list[dict[str, Any]] = [
        *({"num_actors": number} for number in (0, 1.5, "all", True)),
        *({"evaluate": 1}, {"evaluate": "Yes"}, {"fresh": "no"}, {"change_settings": 1}),
    ]
    for arguments in wrong:
        ((name, value),) = arguments.items()
        with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be"):
            impala.train("catch", tmp_path / "run", **arguments)
    with pytest.raises(ValueError, match="is no part: give a class or a function"):
        impala.train("catch", tmp_path / "run", environment=functools.partial(gym.make, "Catch"))
    with pytest.raises(ValueError, match="Did you mean 'catch'"):
        impala.train("cacht")
    with pytest.raises(ValueError, match="give its run a logdir"):
        impala.train(impala.Config())


@pytest.mark.usefixtures("_pretenders")
def test_training_in_a_thread_is_stopped_by_an_event(tmp_path: pathlib.Path) -> None:
    stop, trained = threading.Event(), []

    def train() -> None:
        trained.append(impala.train(impala.Config(), tmp_path / "run", stop=stop, progress=False))

    thread = threading.Thread(target=train)
    thread.start()
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert thread.is_alive()
    stop.set()
    thread.join(60.0)
    assert [each.status for each in trained] == ["stopped"]


@pytest.mark.usefixtures("_pretenders")
def test_training_can_be_stopped_while_the_learner_is_starting(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STARTING", "1")  # it has no handler of SIGTERM yet
    stop = threading.Event()
    stop.set()
    trained = impala.train("catch", tmp_path / "run", stop=stop, progress=False)
    assert trained == ("stopped", tmp_path / "run", 0, 0, {})


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where a shell that runs the tests in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_pretenders", "_interruptible")
def test_ctrl_c_interrupts_once_the_run_has_stopped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    run = commands_train.run

    def interrupted(
        command: commands_train.Train, supervisor: Supervisor, output: Callable[[str], None]
    ) -> commands_train.Ended:
        def interrupt(line: str) -> None:
            output(line)
            if line == "learning":
                os.kill(os.getpid(), signal.SIGINT)

        return run(command, supervisor, interrupt)

    monkeypatch.setattr(library, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        impala.train("catch", tmp_path / "run")
    assert "saved\n" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("inner", [{"observation": 1.0}, {"observation": {"a": 1.0}}])
def test_an_observation_may_have_a_part_of_that_name(inner: dict[str, Any]) -> None:
    """In a loop of one's own, which gives the environment's observation without ours around it."""

    def space_of(value: Any) -> gym.Space:
        if isinstance(value, dict):
            return gym.spaces.Dict({key: space_of(part) for key, part in value.items()})
        return gym.spaces.Box(-9.0, 9.0, (), np.float32)

    space = gym.spaces.Dict(observation=space_of(inner), last_reward=space_of(0.0))
    for given in (inner, {"observation": inner}, {"observation": inner, "last_reward": 3.0}):
        _, values = policy_module._look(space, given)
        tree.assert_same_structure(values["observation"], inner)
