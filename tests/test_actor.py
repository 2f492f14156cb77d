"""A counting environment and a counting agent prove the unroll loop, row by row."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import tree
from scripted import Counter, Script, check_episodes, check_group

from actors import actor as unrolling
from actors import policy
from actors.actor import Actor
from actors.policy import Compiled
from impala import environments
from impala.config.schema import AgentConfig, EnvironmentConfig
from impala.parts import build
from impala.types import ActorUnrolls, Parameters, StepType, Unroll


def growing_versions() -> Iterator[Parameters]:
    """Another version each time that anyone asks."""
    version = 0
    while True:
        version += 1
        yield Parameters(5, version, 0.0, 0, [np.array([version], np.float32)])


def collect(
    environments: list[Script], unroll_length: int, rounds: int, seed: int = 1
) -> list[list[ActorUnrolls]]:
    """Unrolls of `rounds` rounds, copied, by group."""
    versions = growing_versions()
    stream = Actor(lambda task: environments, Compiled(Counter()), unroll_length, seed).run(
        lambda: next(versions)
    )
    groups: list[list[ActorUnrolls]] = [[] for _ in environments]
    for _ in range(rounds):
        for group in groups:
            group.append(copied(next(stream)))
    return groups


def copied(unrolls: ActorUnrolls) -> ActorUnrolls:
    """What the actor yields is overwritten by the next."""
    return unrolls._replace(unroll=tree.map_structure(np.copy, unrolls.unroll))


def test_unrolls_say_what_their_environments_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a clock that goes on by a second whenever it is read."""
    clock = itertools.count()
    monkeypatch.setattr(unrolling, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    groups = [Script(3, first=0), Script(3, first=10)]
    actor = Actor(lambda task: groups, Compiled(Counter()), 4, 1)
    versions = growing_versions()
    stream = actor.run(lambda: next(versions))
    took = [next(stream).environment_seconds for _ in range(6)]
    # Each step is sent and received, and the first unrolls have the reset, too.
    assert took == [9, 9, 8, 8, 8, 8]
    assert actor.stopwatch.steps == 6 * 3 * 4


@pytest.mark.parametrize("unroll_length", [1, 4, 7])
@pytest.mark.parametrize("order", [(0,), (0, 1)])
def test_every_row_is_where_it_belongs(unroll_length: int, order: tuple[int, ...]) -> None:
    num_envs = 3
    environments = [Script(num_envs, first=10 * group) for group in order]
    rounds = 1 + 60 // unroll_length

    groups = collect(environments, unroll_length, rounds)

    for group, unrolls in zip(order, groups, strict=True):
        check_group(unrolls, unroll_length, num_envs, first=10 * group)
        check_episodes(unrolls)


@pytest.mark.parametrize("asked", [("episode", "lives"), ("*",)])
def test_the_info_of_every_step_is_collected_if_asked_for(asked: tuple[str, ...]) -> None:
    """Script's says which episode a step belongs to: of two steps each, then three."""
    actor = Actor(
        *(lambda task: [Script(2, 0)], Compiled(Counter()), 7),
        seed=1,
        step_info=frozenset(asked),
    )
    stream = actor.run(growing_versions().__next__)
    for _ in range(5):
        unrolls = next(stream)
        rows = unrolls.unroll.timestep.observation[1:, :, 1]
        is_step = unrolls.unroll.timestep.step_type[1:] != StepType.FIRST
        assert 7 <= is_step.sum() < 14
        assert unrolls.step_info.keys() == {"episode"}  # nothing is called lives
        np.testing.assert_array_equal(unrolls.step_info["episode"], rows[is_step])


@pytest.mark.parametrize("hidden", [8, 1000])  # in NumPy, and by TensorFlow
def test_actions_are_uniform_until_the_first_update_if_asked_for(hidden: int) -> None:
    # Given a network that always pushes to the right end of [-2, 2] ...
    environment = environments.make(EnvironmentConfig(id="Pendulum-v1"), 64)
    spaces = environment.observation_space, environment.action_space
    config = AgentConfig(hidden_sizes=(hidden, hidden))
    agent = build.agent(config, *spaces, seed=1)
    named = {variable.name: variable for variable in agent.variables}
    named["agent/policy/b:0"].assign([5.0, -5.0])
    weights = [variable.numpy() for variable in agent.variables]
    versions = iter(range(3))
    actor = Actor(
        lambda task: [environment],
        policy.make_policy(agent, config, spaces),
        *(30, 1),
        random_warm_up=True,
    )
    # ... when parameters of versions 0, 1 and 2 are taken ...
    stream = actor.run(lambda: Parameters(5, next(versions), 0.0, 0, weights))
    before, after = (copied(next(stream)).unroll.output.action[1:] for _ in range(2))
    environment.close()
    # ... then it acts uniformly with the first, and as the network with the second.
    shares, _ = np.histogram(before, bins=8, range=(-2.0, 2.0))
    np.testing.assert_allclose(shares / before.size, 1 / 8, atol=0.03)
    assert len(np.unique(before)) == before.size
    assert (after > 1.5).all()


def test_groups_act_in_a_round_with_the_same_version() -> None:
    groups = collect([Script(2, 0), Script(2, 10)], unroll_length=3, rounds=4)
    versions = [[int(u.unroll.parameter_version) for u in group] for group in groups]
    assert versions == [[1, 2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("unroll_length", [1, 2, 4, 7])
def test_parameters_are_fetched_once_a_round(unroll_length: int) -> None:
    versions = growing_versions()
    events: list[str] = []

    class Recorded(Script):
        def send(self, action: np.ndarray) -> None:
            events.append("step")
            super().send(action)

    def take() -> Parameters:
        events.append("take")
        return next(versions)

    environment, prefetch = Recorded(2, 0), lambda: events.append("prefetch")
    actor = Actor(lambda task: [environment], Compiled(Counter()), unroll_length, seed=1)
    stream = actor.run(take, prefetch=prefetch)
    for _ in range(4):
        next(stream)

    before = max(1, 3 * unroll_length // 4)
    a_round = ["take", *["step"] * before, "prefetch", *["step"] * (unroll_length - before)]
    assert events == a_round * 4


def test_each_task_goes_on_where_it_was_left() -> None:
    """Tasks change at the boundary for all groups; no row and no episode of any is lost."""
    unroll_length, num_envs = 4, 3
    plan = [0, 0, 2, 0, 2, 2, 1, 0] * 12
    made: list[int] = []

    def environments(task: int) -> list[Script]:
        made.append(task)
        return [Script(num_envs, first=100 * task), Script(num_envs, first=100 * task + 10)]

    versions, tasks = growing_versions(), iter([*plan, 0])
    stream = Actor(environments, Compiled(Counter()), unroll_length, seed=1).run(
        lambda: next(versions), lambda: next(tasks)
    )
    unrolls = [copied(next(stream)) for _ in range(2 * len(plan))]

    assert [u.task for u in unrolls] == [task for task in plan for _ in range(2)]
    assert made == [0, 2, 1]  # each when it was first played
    for task in made:
        groups = [u for u in unrolls if u.task == task]
        for place in (0, 1):
            group = groups[place::2]
            check_group(group, unroll_length, num_envs, first=100 * task + 10 * place)
            check_episodes(group)


def test_the_seed_decides_environments_and_actions() -> None:
    def actions(seed: int) -> tuple[list[int], list[np.ndarray]]:
        environments = [Script(2, 0), Script(2, 0)]
        groups = collect(environments, unroll_length=8, rounds=2, seed=seed)
        return [s for e in environments for s in e.seeds], [
            np.concatenate([u.unroll.output.action[1:] for u in group]) for group in groups
        ]

    seeds, (one, two) = actions(1)
    assert len(seeds) == 2
    assert seeds[0] != seeds[1]
    assert (one != two).any(), "groups must not share their random numbers"
    again_seeds, (again, _) = actions(1)
    assert again_seeds == seeds
    np.testing.assert_array_equal(again, one)
    other_seeds, (other, _) = actions(2)
    assert other_seeds != seeds
    assert (other != one).any()


def test_parameters_are_assigned_only_when_they_are_others() -> None:
    agent = Counter()
    same = Parameters(5, 1, 0.0, 0, [np.array([1.0], np.float32)])
    stream = Actor(lambda task: [Script(2, 0)], Compiled(agent), 2, seed=0).run(lambda: same)
    next(stream)
    agent.variables[0].assign([42.0])  # would be overwritten by an assignment
    next(stream)
    unroll: Unroll = next(stream).unroll
    np.testing.assert_array_equal(unroll.output.policy[1:, :, 0], 42.0)

    # Another incarnation is another set of parameters, whatever its version.
    stream = Actor(lambda task: [Script(2, 0)], Compiled(agent), 2, seed=0).run(
        iter([same, same._replace(incarnation=6), same._replace(incarnation=6)]).__next__
    )
    assert [next(stream).incarnation for _ in range(2)] == [5, 6]
    np.testing.assert_array_equal(agent.variables[0].numpy(), [1.0])
