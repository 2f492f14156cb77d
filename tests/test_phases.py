"""Algorithms one after another: when it is whose turn, and what is said about nonsense."""

import dataclasses
import logging
import math
import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from impala.agents.agent import Agent
from impala.agents.distributions import EpsilonGreedy
from impala.algorithms.q_learning import QLearning
from impala.config import rules, values
from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig, Config, MixConfig, TasksConfig
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, CheckpointError, Counters
from impala.parts import build, sections
from impala.schedule import phases
from impala.schedule.phases import Phase
from learner.fleet.accounts import Accounts
from learner.update import named_variables
from learner.update.checkpoints import resume
from learner.update.learner import Learner
from learner.update.phases import Phases


def _config(*words: str, total_frames: int = 1000) -> Config:
    return Config(phases=words, total_frames=total_frames)


@pytest.mark.parametrize("words", [("critic:300", "impala"), ("critic:3e2,impala",)])
def test_every_phase_but_the_last_says_how_long(words: tuple[str, ...]) -> None:
    assert phases.make(_config(*words)) == [Phase("critic", 0, 300), Phase("impala", 300, 1000)]


def test_a_run_without_phases_has_one() -> None:
    config = dataclasses.replace(_config(), algorithm="actor_critic")
    assert phases.make(config) == [Phase("actor_critic", 0, 1000)]


def test_each_phase_has_its_own_progress() -> None:
    of_run = phases.make(_config("critic:300", "impala"))
    assert [phases.current(of_run, frames).algorithm for frames in (0, 299, 300, 1000, 1020)] == [
        *["critic", "critic", "impala", "impala", "impala"]
    ]
    assert [of_run[1].progress(frames) for frames in (0, 300, 650, 1020)] == [0, 0, 0.5, 1]


def test_a_run_may_end_by_episodes_before_it_ends_by_frames() -> None:
    config = dataclasses.replace(_config(), total_episodes=20, agent=AgentConfig(hidden_sizes=(8,)))
    of_run = Phases(config, _agent(config.agent))
    for frames, episodes, progress in ((500, 5, 0.5), (500, 15, 0.75), (500, 20, 1), (1000, 5, 1)):
        counters = Counters(frames=frames, episodes=episodes)
        assert of_run.progress(counters) == progress
        assert of_run.are_over(counters) == (progress == 1)


def test_annealing_begins_anew_in_each_turn_of_a_task() -> None:
    turns = TasksConfig(environments=("Catch", 'Catch{"rows":8}'), cycles=2, anneal_anew=True)
    critic, impala = phases.make(dataclasses.replace(_config("critic:300", "impala"), tasks=turns))
    # Turns end after 250, 500, 750 and 1000 frames.
    assert [critic.progress(frames) for frames in (0, 125, 250, 275, 300)] == [0, 0.5, 0, 0.5, 1]
    assert [impala.progress(x) for x in (300, 400, 499, 500, 625, 750, 875, 1000, 1100)] == [
        *[0, 0.5, 0.995, 0, 0.5, 0, 0.5, 1, 1]
    ]


def test_annealing_anew_without_turns_is_refused() -> None:
    turns = TasksConfig(environments=("Catch",), order="simultaneous", anneal_anew=True)
    with pytest.raises(values.OptionError, match=r"anneal_anew is set, but tasks.order is simult"):
        rules.validate(dataclasses.replace(_config(), tasks=turns))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("critc:5", "impala"), "no algorithm 'critc'; there are impala,"),
        (("critic", "impala"), "'critic'; every phase but the last is ALGORITHM:FRAMES"),
        (("critic:many", "impala"), "'critic:many'; every phase but the last"),
        (("critic:2.5", "impala"), "'critic:2.5'; every phase but the last"),
        (("critic:300", "impala:300"), "the last phase takes what the others leave"),
        (("critic:1000", "impala"), "and the run has 1,000 frames"),
    ],
)
def test_what_makes_no_run_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(values.OptionError, match="phases") as error:
        rules.validate(_config(*words))
    assert message in str(error.value)


def test_what_learns_on_policy_alone_takes_no_replay() -> None:
    config = Config(algorithm="actor_critic", mix=MixConfig(replayed=8))
    with pytest.raises(values.OptionError, match=r"mix\.replayed is 8, but actor_critic"):
        rules.validate(config)


def _learner(config: Config, agent: Agent, phase: Phase, counters: Counters) -> Learner:
    return Learner(build.algorithm(phase.algorithm, config, agent), config, phase, counters)


def _agent(config: AgentConfig) -> Agent:
    catch = PRESETS["catch"][1].environment
    environment = build.environment(catch, num_envs=1)
    environment.close()
    return build.agent(config, environment.observation_space, environment.action_space)


def test_a_phase_anneals_over_itself_and_counts_on() -> None:
    config = _config("critic:400", "impala")
    phase = phases.make(config)[1]
    learner = _learner(config, _agent(AgentConfig()), phase, Counters(updates=7, frames=400))
    assert learner.phase_progress == 0.0
    learner.count(unrolls=1, frames=300, steps=300, seconds=1.0)
    assert learner.phase_progress == 0.5
    assert (learner.counters.updates, learner.counters.frames) == (7, 700)


@pytest.mark.parametrize(
    ("algorithm", "separate", "said"),
    [
        ("impala", False, "impala trains 444 parameters (baseline 9, policy 27, mlp 408)."),
        (
            "critic",
            False,
            "critic trains 417 parameters (mlp 408, baseline 9), and leaves 27 parameters "
            "(policy 27) as they are.",
        ),
        (
            "critic",
            True,
            "critic trains 417 parameters (baseline_mlp 408, baseline 9), and leaves 435 "
            "parameters (policy 27, mlp 408) as they are.",
        ),
    ],
)
def test_the_log_counts_what_a_phase_trains_by_network(
    algorithm: str, separate: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(_config(), algorithm=algorithm)
    agent = _agent(AgentConfig(hidden_sizes=(8,), separate_baseline=separate))
    with caplog.at_level(logging.INFO):
        Phases(config, agent).learner_at(Counters())
    assert caplog.messages == [said]


def _saved(agent: Agent) -> Checkpoint:
    named = named_variables.named("agent", agent.variables)
    values = {name: variable.numpy() for name, variable in named.items()}
    return Checkpoint(Config(), Counters(frames=90), values, {})


def test_a_new_run_takes_what_fits_of_another_agent() -> None:
    small = _agent(AgentConfig(hidden_sizes=(8,)))
    large = _agent(AgentConfig(hidden_sizes=(8, 4), separate_baseline=True))
    for variable in small.variables:
        variable.assign(tf.fill(variable.shape, 3.0))

    share, lines = named_variables.initialise(large.variables, _saved(small), AgentConfig())

    taken = {v.name for v in large.variables if np.all(v.numpy() == 3.0)}
    assert taken == {*("mlp/linear_0/w:0", "mlp/linear_0/b:0", "agent/policy/b:0")} | {
        "agent/baseline/b:0"
    }
    numbers = sum(math.prod(v.shape) for v in large.variables if v.name in taken)
    assert share == numbers / sum(math.prod(v.shape) for v in large.variables) < 0.5
    assert lines[0].startswith(
        f"Taken: {share:.0%} of this agent's weights from one of 90 frames: "
    )
    assert "New: agent/policy/w:0 (4, 3), which was (8, 3)." in lines
    assert "New: baseline_mlp/linear_0/b:0 (8,)." in lines


def test_heads_of_normalised_values_are_not_mixed_with_plain() -> None:
    normalised = _agent(AgentConfig(hidden_sizes=(8,), popart=True))
    agent = _agent(AgentConfig(hidden_sizes=(8,)))
    for variable in normalised.variables:
        variable.assign(tf.fill(variable.shape, 3.0))

    _, lines = named_variables.initialise(agent.variables, _saved(normalised), AgentConfig())

    others = {v.name for v in agent.variables if not np.all(v.numpy() == 3.0)}
    assert others == {"agent/baseline/w:0", "agent/baseline/b:0"}
    assert any("normalised values" in line for line in lines)


def test_q_values_are_no_policy() -> None:
    of_values = AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy")
    values_of, agent = _agent(of_values), _agent(AgentConfig(hidden_sizes=(8,)))
    for variable in values_of.variables:
        variable.assign(tf.fill(variable.shape, 3.0))
    saved = _saved(values_of)._replace(config=Config(agent=of_values))

    _, lines = named_variables.initialise(agent.variables, saved, AgentConfig())

    others = {v.name for v in agent.variables if not np.all(v.numpy() == 3.0)}
    assert {"agent/policy/w:0", "agent/policy/b:0"} <= others
    assert "mlp/linear_0/w:0" not in others
    assert any("was epsilon_greedy, agent.policy is stochastic" in line for line in lines)


def test_weights_for_other_numbers_are_warned_of(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = _agent(AgentConfig(hidden_sizes=(8,)))
    config = Config(agent=AgentConfig(hidden_sizes=(8,)))
    raw = dataclasses.replace(config.agent, standardise_images=False)
    initial = _saved(agent)._replace(config=dataclasses.replace(config, agent=raw))
    for shape, expected in (((9,), []), ((16, 16), ["agent.standardise_images was False"])):
        space = gym.spaces.Box(0, 255, shape, np.uint8)
        initial = initial._replace(spaces=(space, gym.spaces.Discrete(3)))
        resume(tmp_path, Phases(config, agent), Accounts(max_in_flight=2), initial)
        told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert [line[:34] for line in told] == expected


def test_statistics_of_other_observations_are_not_taken() -> None:
    config = AgentConfig(hidden_sizes=(8,), normalise_observations=True)
    of_three, of_five = (
        build.agent(config, gym.spaces.Box(-9.0, 9.0, (size,)), gym.spaces.Discrete(3))
        for size in (3, 5)
    )
    for variable in of_three.variables:
        variable.assign(tf.fill(variable.shape, 7.0))
    _, lines = named_variables.initialise(of_five.variables, _saved(of_three), AgentConfig())
    assert any("other observations" in line for line in lines)
    statistics = {v.name: v.numpy() for v in of_five.variables if "normaliser" in v.name}
    assert statistics.pop("normaliser/count:0") == 0.0
    assert not any(np.any(value == 7.0) for value in statistics.values())


def test_what_did_not_fit_is_named_too() -> None:
    large, small = _agent(AgentConfig(hidden_sizes=(8, 8))), _agent(AgentConfig(hidden_sizes=(8,)))
    _, lines = named_variables.initialise(small.variables, _saved(large), AgentConfig())
    assert "Not taken: mlp/linear_1/w:0 (8, 8)." in lines


def test_an_agent_of_which_nothing_fits_is_refused() -> None:
    agent = _agent(AgentConfig())
    with pytest.raises(CheckpointError, match="Nothing of that agent fits"):
        named_variables.initialise(
            agent.variables, Checkpoint(Config(), Counters(), {}, {}), AgentConfig()
        )


def _checkpoint(learner: Learner, config: Config) -> Checkpoint:
    algorithm = learner.phase.algorithm
    return Checkpoint(config, learner.counters, learner.variables(), {}, 0, algorithm)


def test_a_checkpoint_of_the_phase_before_gives_the_agent_alone() -> None:
    """One that was written just before a crash; the next phase has another optimiser anyway."""
    config = _config("critic:400", "impala")
    critic, impala = phases.make(config)
    before = _learner(config, _agent(AgentConfig(hidden_sizes=(8,))), critic, Counters(frames=400))
    agent = _agent(AgentConfig(hidden_sizes=(8,)))
    for variable in agent.variables:
        variable.assign(tf.fill(variable.shape, 5.0))
    after = _learner(config, agent, impala, Counters())

    after.restore(_checkpoint(before, config))

    assert after.counters.frames == 400
    for name, value in named_variables.of_agent(before.variables()).items():
        np.testing.assert_array_equal(after.variables()[name], value)


def test_a_checkpoint_of_the_same_phase_must_fit_as_a_whole() -> None:
    config = _config("critic:400", "impala")
    phase = phases.make(config)[1]
    learner = _learner(config, _agent(AgentConfig()), phase, Counters())
    saved = _checkpoint(learner, config)
    without = {name: v for name, v in saved.variables.items() if "optimiser" not in name}
    with pytest.raises(CheckpointError, match="another network, algorithm or optimiser"):
        learner.restore(saved._replace(variables=without))


def test_a_target_network_begins_as_the_agent_that_was_restored(tmp_path: pathlib.Path) -> None:
    """Given the checkpoint of a critic in a run that is to go on with Q-learning.

    Its exploration is another: epsilon falls from 1 again.
    """
    config = dataclasses.replace(
        Config(algorithm="critic"), agent=AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy")
    )
    critic = Phases(config, _agent(config.agent)).learner_at(Counters())
    for variable in critic._algorithm.agent.variables:
        variable.assign(tf.fill(variable.shape, 3.0))
    accounts = Accounts(max_in_flight=2)
    saved = _checkpoint(critic, config)._replace(accounts=accounts.state())
    checkpoint.save(tmp_path, saved, keep=3)

    q_learning = dataclasses.replace(config, algorithm="q_learning")
    phases_of_run = Phases(q_learning, _agent(config.agent))
    learner = resume(tmp_path, phases_of_run, accounts, None).learner

    assert isinstance(learner._algorithm, QLearning)
    for agent in (learner._algorithm.agent, learner._algorithm._target):
        assert all((variable.numpy() == 3.0).all() for variable in agent.trainable_variables)
    assert isinstance(learner._algorithm.agent.distribution, EpsilonGreedy)
    assert learner._algorithm.agent.distribution.progress.numpy() == 0.0


def test_epsilon_falls_from_1_in_each_phase_and_goes_on_in_a_run_that_resumes() -> None:
    agent = _agent(AgentConfig(hidden_sizes=(8,), policy="epsilon_greedy"))
    config = dataclasses.replace(_config(), algorithm="q_learning")
    assert isinstance(agent.distribution, EpsilonGreedy)
    agent.distribution.progress.assign(0.75)  # of the phase before, or of another run's agent

    learner = Phases(config, agent).learner_at(Counters())

    assert agent.distribution.progress.numpy() == 0.0
    agent.distribution.progress.assign(0.5)
    saved = _checkpoint(learner, config)
    agent.distribution.progress.assign(0.0)
    learner.restore(saved)
    assert agent.distribution.progress.numpy() == 0.5


@pytest.mark.parametrize(
    ("length", "done", "flag"),
    [
        ({"total_frames": 500}, Counters(frames=500), "--total-frames"),
        ({"total_episodes": 5}, Counters(frames=90, episodes=5), "--total-episodes"),
        (
            {"tasks": {"environments": ["Catch"], "frames": [300]}},
            Counters(frames=300),
            "--tasks.frames or --tasks.cycles",
        ),
    ],
)
def test_a_finished_run_says_which_flag_makes_it_longer(
    tmp_path: pathlib.Path, length: dict[str, Any], done: Counters, flag: str
) -> None:
    config = values.overlay(Config(), {"agent": {"hidden_sizes": [8]}, **length})
    accounts = Accounts(max_in_flight=2)
    learner = Phases(config, _agent(config.agent)).learner_at(done)
    saved = _checkpoint(learner, config)._replace(accounts=accounts.state(), counters=done)
    checkpoint.save(tmp_path, saved, keep=3)

    changed = values.overlay(config, {"optimiser": {"learning_rate": 0.5}})
    with pytest.raises(CheckpointError, match=rf"learning_rate: .* -> 0.5. Raise {flag},"):
        resume(tmp_path, Phases(changed, _agent(config.agent)), accounts, None)


def test_changed_settings_of_own_parts_are_told_and_of_no_use_to_a_finished_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "examples")
    caplog.set_level(logging.INFO)
    config = sections.compose(
        Config(algorithm="custom_algorithm:Slow", agent=AgentConfig(hidden_sizes=(8,)))
    )
    changed = values.overlay(config, {"slow": {"step": 0.3}})
    accounts = Accounts(max_in_flight=2)
    for done in (Counters(frames=40), Counters(frames=config.total_frames)):
        learner = Phases(config, _agent(config.agent)).learner_at(done)
        saved = _checkpoint(learner, config)._replace(accounts=accounts.state(), counters=done)
        checkpoint.save(tmp_path, saved, keep=1)
        if done.frames < config.total_frames:
            resume(tmp_path, Phases(changed, _agent(config.agent)), accounts, None)
            assert "Changed since that checkpoint: slow.step: 0.05 -> 0.3." in caplog.text
        else:
            with pytest.raises(CheckpointError, match=r"slow\.step: 0\.05 -> 0\.3"):
                resume(tmp_path, Phases(changed, _agent(config.agent)), accounts, None)
