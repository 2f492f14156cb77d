"""Several tasks for one agent: their names, spaces and turns, and what masked actions do."""

import contextlib
import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

from impala.agents import distributions
from impala.config.schema import AgentConfig, AtariConfig, Config, EnvironmentConfig, TasksConfig
from impala.environments import Joint, check_fits, join
from impala.environments.base import Environment, first_timestep, next_timestep
from impala.environments.spaces import choices
from impala.parts import build
from impala.schedule import tasks
from impala.types import EnvironmentStep, StepType, TimeStep

SMALL, LARGE = "Catch", 'Catch{"rows": 6, "columns": 9}'


def config(total_frames: int = 1000, **of_tasks: Any) -> Config:
    return Config(
        environment=EnvironmentConfig(id="Catch", kwargs='{"rows": 4}'),
        tasks=TasksConfig(**of_tasks),
        total_frames=total_frames,
    )


def test_one_environment_is_one_task() -> None:
    environment = config().environment
    assert tasks.make(environment, TasksConfig()) == [tasks.Task("Catch", environment)]


def test_keyword_arguments_of_an_id_override_settings() -> None:
    small, large = tasks.make(
        config().environment, TasksConfig(environments=(SMALL, 'Catch{"columns": 9}'))
    )
    assert (small.name, small.environment.id, small.environment.kwargs) == (
        *("Catch", "Catch"),
        '{"rows": 4}',
    )
    assert large.environment.id == "Catch"
    assert large.environment.kwargs == '{"rows": 4, "columns": 9}'


def test_frames_are_dealt_out_evenly_or_as_told() -> None:
    names = ("a", "b", "c")
    even = config(1000, environments=names, cycles=2)
    assert [tuple(block) for block in tasks.blocks(even)] == [
        *[(0, 0, 166), (1, 166, 332), (2, 332, 498)],
        *[(0, 498, 664), (1, 664, 830), (2, 830, 1000)],
    ]
    told = config(1000, environments=names, frames=(50, 0, 100), cycles=2)
    assert tasks.total_frames(told) == 300
    assert [tuple(block) for block in tasks.blocks(told)] == [
        *[(0, 0, 50), (1, 50, 50), (2, 50, 150)],
        *[(0, 150, 200), (1, 200, 200), (2, 200, 300)],
    ]
    with pytest.raises(ValueError, match=r"2 numbers for 3 tasks"):
        tasks.blocks(config(environments=names, frames=(1, 2)))
    with pytest.raises(ValueError, match=r"tasks.frames is 0, 0, 0: at least one"):
        tasks.Schedule(config(environments=names, frames=(0, 0, 0), order="simultaneous"))
    with pytest.raises(ValueError, match=r"total_frames is 5, too few for 6 turns"):
        tasks.blocks(config(5, environments=names, cycles=2))


def test_one_after_another_each_task_has_its_block() -> None:
    schedule = tasks.Schedule(config(environments=("a", "b"), frames=(100, 50), cycles=2))
    played = {frames: schedule.next(frames) for frames in (0, 99, 100, 149, 150, 249, 250, 299)}
    assert list(played.values()) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert schedule.next(300) == 1  # the run is over; what is still sent is of the last block


def test_all_at_once_each_task_gets_its_share() -> None:
    schedule = tasks.Schedule(
        config(environments=("a", "b", "c"), frames=(200, 100, 0), order="simultaneous")
    )
    counts = [0, 0, 0]
    for _ in range(300):
        task = schedule.next(0)
        schedule.played(task, 7)
        counts[task] += 1
    assert counts == [200, 100, 0]


def test_actors_that_play_at_once_play_different_tasks() -> None:
    """Each has one message under way."""
    schedule = tasks.Schedule(
        config(environments=("a", "b"), frames=(100, 200), order="simultaneous")
    )
    actors = [f"actor-{i}" for i in range(15)]
    playing = {actor: schedule.next(0, actor) for actor in actors}
    sent = []
    for number in range(400):
        actor = actors[7 * number % 15] if number < 200 else actors[number % 3]  # others leave
        sent.append(playing[actor])
        schedule.played(playing[actor], 10)
        playing[actor] = schedule.next(0, actor)
    # Of three messages two are of b, while all play and once those that have left are forgotten.
    for part in (sent[:200], sent[-100:]):
        assert max(len(list(run)) for _, run in itertools.groupby(part)) <= 6
        assert abs(part.count(0) - len(part) / 3) <= 5


class Sums(Environment):
    """Shows the sum of the actions so far, in every place; an episode has three steps."""

    def __init__(self, num_envs: int, num_actions: int, shape: tuple[int, ...]) -> None:
        self.num_envs = num_envs
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(num_actions)
        self._num_actions = num_actions
        self._shape = shape
        self._sums = np.zeros(num_envs, np.int64)
        self._count = 0

    def reset(self, seed: int) -> TimeStep:
        return first_timestep(self._seen(), self.num_envs)

    def send(self, action: np.ndarray) -> None:
        assert (action < self._num_actions).all()
        self._sums += action

    def recv(self) -> EnvironmentStep:
        self._count += 1
        first = np.full(self.num_envs, self._count % 4 == 0)
        ended = np.full(self.num_envs, self._count % 4 == 3)
        never = np.zeros(self.num_envs, bool)
        timestep = next_timestep(self._seen(), np.zeros(self.num_envs), ended, never, first)
        return EnvironmentStep(timestep, np.ones(self.num_envs, np.int32), {})

    def render(self) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _seen(self) -> np.ndarray:
        ones = np.ones((self.num_envs, *self._shape), np.uint8)
        return (1 + self._sums.reshape(-1, *[1] * (ones.ndim - 1))).astype(np.uint8) * ones


def spaces_of(*environments: Environment) -> list[tuple[gym.Space, gym.Space]]:
    return [(each.observation_space, each.action_space) for each in environments]


def test_observations_are_padded_and_actions_masked() -> None:
    small, large = Sums(2, 3, (2, 3)), Sums(2, 5, (4, 1))
    observation_space, action_space = join(["small", "large"], spaces_of(small, large))
    assert isinstance(observation_space, gym.spaces.Dict)
    assert observation_space["observation"].shape == (4, 3)
    assert action_space == gym.spaces.Discrete(5)

    environment = Joint(small, observation_space, action_space)
    seen = environment.reset(0).observation
    assert seen["observation"].tolist() == [[[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]] * 2
    assert seen["action_mask"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert observation_space.contains({name: value[0] for name, value in seen.items()})

    environment.send(np.array([2, 1]))
    seen = environment.recv().timestep.observation
    assert seen["observation"][:, 0, 0].tolist() == [3, 2]


def test_tasks_alike_need_no_mask_and_no_wrapper() -> None:
    same = EnvironmentConfig(id="Catch")
    of_run = [tasks.Task("one", same), tasks.Task("other", same)]
    joint = build.spaces(of_run)
    environment = build.environment(same, 1, joint=joint)
    assert not isinstance(environment, Joint)
    assert (environment.observation_space, environment.action_space) == joint


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (("Pong", "MsPacman"), "action 1 is FIRE in ALE/Pong-v5 and UP in ALE/MsPacman-v5"),
        (("Pong", "Breakout"), "4 is RIGHTFIRE in ALE/Pong-v5 and missing in ALE/Breakout-v5"),
    ],
)
def test_differing_games_join_by_the_full_action_set_only(
    ids: tuple[str, ...], message: str
) -> None:
    """A minimal set gives the same index to different actions."""
    schedule = TasksConfig(environments=tuple(f"ALE/{id}-v5" for id in ids))
    with pytest.raises(ValueError, match="full_action_set") as caught:
        build.spaces(tasks.make(EnvironmentConfig(), schedule))
    assert message in str(caught.value)

    whole = EnvironmentConfig(atari=AtariConfig(full_action_set=True))
    observation_space, action_space = build.spaces(tasks.make(whole, schedule))
    assert action_space == gym.spaces.Discrete(18)
    assert isinstance(observation_space, gym.spaces.Box)  # no mask


BOX = gym.spaces.Box(0, 1, (3,), np.float32)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ((BOX, gym.spaces.Discrete(2)), (BOX, BOX), "their actions are"),
        (
            (gym.spaces.Box(0, 9, (3,), np.uint8), gym.spaces.Discrete(2)),
            (BOX, gym.spaces.Discrete(2)),
            "same dtype",
        ),
        (
            (gym.spaces.Box(0, 1, (3, 3), np.float32), gym.spaces.Discrete(2)),
            (BOX, gym.spaces.Discrete(2)),
            "number of dimensions",
        ),
        (
            (BOX, gym.spaces.Discrete(2)),
            (BOX, gym.spaces.Discrete(2, start=1)),
            "choices with the same start",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused_with_the_reason(
    one: tuple[gym.Space, gym.Space], other: tuple[gym.Space, gym.Space], message: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"first and second cannot be tasks of one run.*{message}"
    ):
        join(["first", "second"], [one, other])


def test_parts_of_masked_actions_keep_their_order() -> None:
    """That of the mask's entries."""
    parts = {"z": gym.spaces.Discrete(2), "a": gym.spaces.Discrete(3)}
    action = gym.spaces.Dict(list(parts.items()))
    seen = gym.spaces.Dict({"observation": BOX, "action_mask": gym.spaces.MultiBinary(5)})
    _, joined = join(["first", "second"], [(seen, action), (seen, action)])
    assert choices(joined) == choices(action) == [2, 3]
    other = gym.spaces.Dict(sorted(parts.items()))
    with pytest.raises(ValueError, match="their actions are"):
        join(["first", "second"], [(seen, action), (seen, other)])


def test_an_agent_obeys_the_mask() -> None:
    small, large = Sums(8, 2, (2,)), Sums(8, 6, (3,))
    spaces = join(["small", "large"], spaces_of(small, large))
    agent = build.agent(AgentConfig(hidden_sizes=(4,)), *spaces)
    environment = Joint(small, *spaces)
    timestep = environment.reset(0)
    for count in range(20):
        output, _ = agent.step(timestep, (), tf.constant([7, count]))
        assert output.action.numpy().max() <= 1
        assert (tf.nn.softmax(output.policy).numpy()[:, 2:] == 0.0).all()
        environment.send(output.action.numpy())
        timestep = environment.recv().timestep
        assert timestep.step_type[0] in list(StepType)


def test_a_mask_may_be_of_truths() -> None:
    outputs = tf.constant([[1.0, 2.0, 3.0]])
    allowed = tf.constant([[True, False, True]])
    masked = distributions.for_space(gym.spaces.Discrete(3)).mask(outputs, allowed)
    assert masked.numpy().argmax() == 2 and masked.numpy()[0, 1] < -1e8


def test_a_mask_must_be_as_large_as_there_are_choices() -> None:
    mask = gym.spaces.MultiBinary(4)
    observations = gym.spaces.Dict({"observation": BOX, "action_mask": mask})
    actions = gym.spaces.Dict({"aim": gym.spaces.Box(-1, 1, (2,)), "fire": gym.spaces.Discrete(2)})
    with pytest.raises(ValueError, match=r"2 choices in all its parts .* the shape \(2,\)"):
        build.agent(AgentConfig(), observations, actions)


def test_tasks_may_see_the_past() -> None:
    """Whose numbers have no dimension."""
    past = EnvironmentConfig(id="Catch", last_reward=True, time_in_episode=True)
    of_run = [tasks.Task(name, past) for name in ("one", "other")]
    joint = build.spaces(of_run)
    assert isinstance(joint[0], gym.spaces.Dict)
    assert [joint[0][name].shape for name in ("last_reward", "time_in_episode")] == [(), ()]
    environment = build.environment(past, 2, joint=joint)
    seen = environment.reset(0).observation
    assert joint[0].contains({name: np.asarray(value[0]) for name, value in seen.items()})


@pytest.mark.parametrize(
    ("space", "exactly", "fits"),
    [
        (gym.spaces.Box(-9, 9, (4,), np.float32), True, True),  # other bounds
        (gym.spaces.Box(0, 1, (3,), np.float32), True, False),
        (gym.spaces.Box(0, 1, (3,), np.float32), False, True),  # padded
        (gym.spaces.Box(0, 1, (5,), np.float32), False, False),
        (gym.spaces.Box(0, 1, (4,), np.float64), False, False),
        (gym.spaces.Dict(a=gym.spaces.Box(0, 1, (4,), np.float32)), False, False),
        (gym.spaces.Discrete(4), False, False),
    ],
)
def test_an_environment_that_has_changed_is_refused(
    space: gym.Space, exactly: bool, fits: bool
) -> None:
    known = gym.spaces.Box(0, 1, (4,), np.float32)
    action = gym.spaces.Discrete(3)
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="but was Box"):
        check_fits((space, action), (known, action), exactly=exactly)


def test_other_actions_are_refused_unless_a_mask_forbids_what_is_missing() -> None:
    known, action = gym.spaces.Box(0, 1, (4,), np.float32), gym.spaces.Discrete(3)
    masked = gym.spaces.Dict(observation=known, action_mask=gym.spaces.MultiBinary(3))
    box, narrower = (gym.spaces.Box(-x, x, (2,), np.float32) for x in (2.0, 1.0))
    fewer, others = gym.spaces.Discrete(2), gym.spaces.Discrete(3, start=1)
    check_fits((known, fewer), (masked, action), exactly=False)
    for own, joint, exactly in (
        ((known, fewer), (known, action), False),
        ((known, others), (masked, action), False),
        ((known, gym.spaces.Discrete(4)), (masked, action), False),
        ((known, narrower), (known, box), False),
        ((known, action), (masked, action), True),  # its mask has gone
        (
            (known, gym.spaces.MultiDiscrete([2, 2])),
            (known, gym.spaces.MultiDiscrete([2, 3])),
            False,
        ),
    ):
        with pytest.raises(ValueError, match="play an environment with the same spaces"):
            check_fits(own, joint, exactly=exactly)
