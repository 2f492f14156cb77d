"""The contract of environments, for every kind that there is, and what is special about each.

A new environment gets its tests, `EnvironmentConformance`, by listing itself in `CONTRACT`.
"""

import dataclasses
import itertools
from contextlib import closing
from typing import Any

import ale_py
import counting
import gymnasium as gym
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

from impala import environments
from impala.config.schema import (
    ActorConfig,
    AtariConfig,
    EnvironmentConfig,
    LimitsConfig,
    RepeatConfig,
)
from impala.environments import base, catch, gymnasium, spaces, to_gymnasium
from impala.environments.atari import Atari
from impala.environments.base import Environment
from impala.environments.wrappers import Checked, WithHistory
from impala.schedule.tasks import Task, frames_per_step
from impala.testing.environments import EnvironmentConformance, column, numbered, play
from impala.types import EnvironmentStep, Nest, StepType, TimeStep

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


class NestedEnv(gym.Env):
    """Dict and Tuple observations and actions; it insists on getting actions of its space."""

    def __init__(self, length: int = 4) -> None:
        self._length = length
        self.observation_space = gym.spaces.Dict(
            {
                "camera": gym.spaces.Box(0, 255, (4, 3), np.uint8),
                "body": gym.spaces.Tuple(
                    [gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(5, start=2)]
                ),
                "switches": gym.spaces.MultiBinary(3),
                "order": gym.spaces.Text(8),
            }
        )
        self.action_space = gym.spaces.Dict(
            {
                "tools": gym.spaces.MultiDiscrete([2, 3]),
                "move": gym.spaces.Tuple(
                    [gym.spaces.Discrete(3, start=1), gym.spaces.Box(1, 2, (2,), np.float32)]
                ),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self._step = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._step += 1
        return self.observation_space.sample(), 1.0, self._step == self._length, False, {}


class FaultyEnv(gym.Env):
    """Goes wrong at step 3, in the way it is told."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        if fault == "space":
            self.observation_space = gym.spaces.Sequence(gym.spaces.Discrete(2))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self._step = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        observation, reward = np.zeros(2, np.float32), 0.0
        if self._step == 3:
            match self._fault:
                case "observation":
                    observation = np.array([0.0, np.nan], np.float32)
                case "shape":
                    observation = np.zeros(3, np.float32)
                case "crash":
                    raise KeyError("gear")
                case _:
                    reward = float(self._fault)
        return observation, reward, False, False, {}


gym.register("Nested-v0", "test_environments:NestedEnv")
gym.register("Faulty-v0", "test_environments:FaultyEnv", disable_env_checker=True)

CONTRACT = {
    "catch": EnvironmentConfig(id="Catch"),
    "pendulum": EnvironmentConfig(id="Pendulum-v1", kwargs='{"max_episode_steps": 20}'),
    "nested": EnvironmentConfig(id="Nested-v0"),
    "counting": EnvironmentConfig(id=counting.register_counting()),
    "processes": EnvironmentConfig(id="counting:Counting-v0", vectorization="async"),
    "pong": EnvironmentConfig(
        id="ALE/Pong-v5", atari=AtariConfig(max_frames_per_episode=150, sticky_actions=0.25)
    ),
    "breakout": EnvironmentConfig(id="ALE/Breakout-v5"),
    "pong of gym": EnvironmentConfig(
        id="ALE/Pong-v5",
        atari=AtariConfig(
            *(2, 4, False, 0.25),  # frames of an action, no maximum over frames, sticky actions
            max_frames_per_episode=150,
        ),
    ),
    "bandit": EnvironmentConfig(
        id="Bandit/Independent-v0", kwargs='{"pulls": 9}', vectorization="own"
    ),
    "cartpole_own": EnvironmentConfig(id="CartPole-v1", vectorization="own"),
    "minatar": EnvironmentConfig(id="MinAtar/Breakout-v1"),
    "minigrid": EnvironmentConfig(id="MiniGrid-Empty-Random-5x5-v0"),
    "nested_held": EnvironmentConfig(id="Nested-v0", repeat=RepeatConfig(most=3, learned=True)),
}
CONTRACT |= {
    f"{name} with history": dataclasses.replace(
        config, last_action=True, last_reward=True, time_in_episode=True
    )
    for name, config in CONTRACT.items()
    if name in ("catch", "nested")
}


class _Contract(EnvironmentConformance):
    """What every environment promises, with the wrappers around it."""

    config: EnvironmentConfig

    def make(self, num_envs: int) -> Environment:
        return environments.make(self.config, num_envs, actor=ActorConfig(env_threads=2))

    def test_the_learner_takes_as_many_frames_as_it_plays(self) -> None:
        _, steps = self.played()
        limits = LimitsConfig(frames_per_step=3 if "ounting" in self.config.id else 1)
        most = frames_per_step(Task(self.config.id, self.config), limits)
        assert max(step.frames.max() for step in steps) == most == self.most_frames


def _contract(name: str, config: EnvironmentConfig) -> type[_Contract]:
    """The suite of one kind of environment."""
    frames = {"ALE/Pong-v5": 4, "ALE/Breakout-v5": 4}.get(config.id, config.repeat.most)
    return type(
        f"Test{name.title().replace('_', '').replace(' ', '')}",
        (_Contract,),
        {
            "config": config,
            "num_steps": 700 if config.id == "ALE/Breakout-v5" else 160,
            "most_frames": 3 if "ounting" in config.id else frames,
        },
    )


for _suite in itertools.starmap(_contract, CONTRACT.items()):
    globals()[_suite.__name__] = _suite


@pytest.mark.parametrize("last_action", [False, True])
def test_calls_out_of_order_are_refused(last_action: bool) -> None:
    config = EnvironmentConfig(id="Catch", last_action=last_action)
    with closing(environments.make(config, 2)) as environment:
        batched = gym.vector.utils.batch_space(environment.action_space, 2)
        batched.seed(0)
        with pytest.raises(RuntimeError, match=r"is new.*send comes after reset"):
            environment.send(batched.sample())
        environment.reset(0)
        with pytest.raises(RuntimeError, match=r"recv comes after send"):
            environment.recv()
        environment.send(batched.sample())
        with pytest.raises(RuntimeError, match=r"is stepping"):
            environment.send(batched.sample())
        environment.recv()
    with pytest.raises(RuntimeError, match="is closed"):
        environment.recv()


class TestSeeds:
    def test_no_two_environments_of_neighbouring_seeds_share_one(self) -> None:
        drawn = np.concatenate([base.seeds(seed, 16) for seed in range(8)])
        assert len(set(drawn)) == 8 * 16
        assert (drawn >= 0).all() and (drawn < 2**31).all()

    def test_a_seed_does_not_depend_on_how_many_there_are(self) -> None:
        assert (base.seeds(5, 3) == base.seeds(5, 9)[:3]).all()

    def test_a_negative_seed_is_refused(self) -> None:
        with pytest.raises(ValueError, match="seed is -1"):
            base.seeds(-1, 2)


class TestEpisodeEnds:
    def test_termination_at_the_time_limit_is_termination(self) -> None:
        yes, no = np.array([True]), np.array([False])
        timestep = base.next_timestep(np.zeros(1), np.zeros(1), yes, yes, first=no)
        assert timestep.discount == 0 and timestep.step_type == LAST

    def test_the_counting_environment_counts(self) -> None:
        config = EnvironmentConfig(id=counting.register_counting())
        with closing(environments.make(config, 3)) as environment:
            steps = play(environment, 60)
        for i, seed in enumerate(base.seeds(7, 3)):
            # When we walk through the stream, counting along from the seed alone ...
            episode, step = 0, 0
            for said in steps:
                row = numbered(said.timestep, i)
                # ... then every row says what the rule says.
                assert (row.observation == [seed, episode, step]).all()
                assert row.reward == step
                assert said.frames[i] == (counting.frames_of(step) if step else 0)
                length = counting.episode_length(seed, episode)
                cut_off = counting.ends_by_time_limit(seed, episode)
                if step == 0:
                    assert row.step_type == FIRST
                elif step < length:
                    assert row.step_type == MID and row.discount == 1
                else:
                    assert row.step_type == LAST and row.discount == cut_off
                step = step + 1 if step < length else 0
                episode += step == 0


class TestGymnasium:
    def test_infos_of_different_types_are_numbers_or_left_out(self) -> None:
        class Says(gym.Env):
            observation_space = gym.spaces.Box(0, 1, (), np.float32)
            action_space = gym.spaces.Discrete(2)

            def __init__(self, info: dict[str, Any]) -> None:
                self._info = info

            def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
                return np.zeros((), np.float32), self._info

            def step(self, _: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
                return np.zeros((), np.float32), 0.0, False, False, self._info

        infos = [
            {"discount": 1, "x": np.zeros(3), "a": 1, "b": 1.0, "c": np.bool_(True), "d": {"e": 1}},
            {"discount": 0.5, "x": np.zeros(5), "a": None, "b": "one", "c": np.array(0.25)},
        ]
        made = iter(infos)
        with closing(
            gymnasium.in_turn(lambda is_first: Says(next(made)), 2, "Says", 0)
        ) as environment:
            environment.reset(0)
            environment.send(np.zeros(2, np.int64))
            step = environment.recv()
        np.testing.assert_array_equal(step.timestep.discount, [1.0, 0.5])
        wanted = {"a": [1.0, np.nan], "b": [1.0, np.nan], "c": [1.0, 0.25]}
        np.testing.assert_equal({k: v.tolist() for k, v in step.info.items()}, wanted)

    @pytest.mark.parametrize(
        ("id", "nearest"),
        [
            ("PongNoframeskip-v4", "ALE/Pong-v5"),  # of the old Gym
            ("MsPacman-ramDeterministic-v4", "ALE/MsPacman-v5"),
            ("Pong-v5", "ALE/Pong-v5"),
            ("cartpole", "CartPole-v1"),
            ("CartPole-v2", "CartPole-v1"),
            ("LunarLander-v1", "LunarLander-v3"),
            ("catch", "Catch."),
        ],
    )
    def test_a_misspelt_id_gets_the_nearest_one(self, id: str, nearest: str) -> None:
        for _ in range(2):  # looking for it loads ALE, which registers the old ids
            with pytest.raises(ValueError, match=f"'{id}', which is not .* Nearest: {nearest}"):
                environments.check(id)

    def test_a_module_that_is_not_there_is_named(self) -> None:
        with pytest.raises(ValueError, match="there is no module 'nowhere_at_all'"):
            environments.make(EnvironmentConfig(id="nowhere_at_all:Game-v0"), 1)

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ("{gravity: 9.8}", "not a JSON object"),
            ("[9.8]", "not a JSON object"),
            ('{"gravty": 9.8}', "CartPole-v1 refuses it.*gravty"),
        ],
    )
    def test_bad_kwargs_are_refused(self, kwargs: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            environments.make(EnvironmentConfig(id="CartPole-v1", kwargs=kwargs), 1)

    def test_a_space_without_a_fixed_size_is_refused(self) -> None:
        config = EnvironmentConfig(id="Faulty-v0", kwargs='{"fault": "space"}')
        with pytest.raises(
            ValueError, match=r"Faulty-v0: observation has the space Sequence.*Box.*pad"
        ):
            environments.make(config, 1)


class TestChecked:
    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("nan", "reward of environment 0 is nan"),
            ("-inf", "reward of environment 0 is -inf"),
            ("1e300", "reward of environment 0 is inf"),
            ("observation", "observation of environment 0 is not finite"),
            ("shape", "shape"),
            ("crash", "KeyError: 'gear'"),
        ],
    )
    def test_what_goes_wrong_is_named_with_its_step(self, fault: str, message: str) -> None:
        config = EnvironmentConfig(id="Faulty-v0", kwargs=f'{{"fault": "{fault}"}}')
        with closing(environments.make(config, 2)) as environment:
            environment.reset(0)
            for _ in range(2):
                environment.send(np.array([0, 1]))
                environment.recv()
            environment.send(np.array([0, 1]))
            with pytest.raises(RuntimeError, match=f"Faulty-v0 failed at step 3.*{message}"):
                environment.recv()
            with pytest.raises(RuntimeError, match="is broken"):
                environment.send(np.array([0, 1]))

    @pytest.mark.parametrize(
        ("action", "message"),
        [
            (np.array([0, 3]), r"action 3 for environment 1 of Catch is not in Discrete\(3\)"),
            (np.array([-1, 0]), "action -1 for environment 0"),
            (np.array([0, 1, 2]), r"shape \(3,\), expected \(2,\)"),
            (np.array([0.0, 1.0]), "float64, expected int64"),
        ],
    )
    def test_an_action_outside_the_space_is_refused(self, action: Any, message: str) -> None:
        with closing(environments.make(EnvironmentConfig(id="Catch"), 2)) as environment:
            environment.reset(0)
            with pytest.raises(ValueError, match=message):
                environment.send(action)
            environment.send(np.array([0, 2], np.int32))  # and a corrected one is taken
            environment.recv()

    def test_an_action_of_another_structure_is_refused(self) -> None:
        with closing(environments.make(EnvironmentConfig(id="Nested-v0"), 1)) as environment:
            environment.reset(0)
            with pytest.raises(ValueError, match=r"action has \['move'\]; expected .*'tools'"):
                environment.send({"move": (np.array([1]), np.ones((1, 2), np.float32))})


class TestCatch:
    @pytest.mark.parametrize(("follow", "reward"), [(True, 1.0), (False, -1.0)])
    def test_who_follows_the_ball_catches_it(self, follow: bool, reward: float) -> None:
        with closing(environments.make(EnvironmentConfig(id="Catch"), 8)) as environment:
            board = environment.reset(1).observation
            ball = board[:, 0].argmax(axis=1)
            assert len(set(ball)) > 1, "balls fall from different columns"
            # When the player goes to the ball, or to the wall that is farther from it ...
            target = ball if follow else np.where(ball < 2, 4, 0)
            for step in range(1, 10):
                paddle = board[:, -1].argmax(axis=1)
                environment.send(np.sign(target - paddle) + 1)
                timestep = environment.recv().timestep
                board = timestep.observation
                if step < 9:
                    assert (timestep.reward == 0).all()
            # ... then the reward comes with the ball, at step 9.
            assert (timestep.step_type == LAST).all() and (timestep.discount == 0).all()
            assert (timestep.reward == reward).all()

    @pytest.mark.parametrize(("shift", "columns"), [(0, [1, 2, 3]), (1, [2, 3, 1]), (2, [3, 1, 2])])
    def test_shift_turns_the_meaning_of_the_actions(self, shift: int, columns: list[int]) -> None:
        environment = catch.Catch(3, shift=shift)
        assert (environment.reset(0).observation[:, -1].argmax(axis=1) == 2).all()
        environment.send(np.array([0, 1, 2]))
        paddle = environment.recv().timestep.observation[:, -1].argmax(axis=1)
        assert paddle.tolist() == columns

    @pytest.mark.parametrize(
        "kwargs",
        [
            '{"rows": 1}',
            '{"columns": "5"}',
            '{"colums": 5}',
            '{"shift": -1}',
            '{"marked": 1}',
            '{"shift": 3}',
            '{"reward": 0}',
            '{"reward": "1"}',
        ],
    )
    def test_boards_that_cannot_be_are_refused(self, kwargs: str) -> None:
        with pytest.raises(ValueError, match="Catch"):
            environments.make(EnvironmentConfig(id="Catch", kwargs=kwargs), 1)

    def test_the_picture_is_the_board(self) -> None:
        environment = catch.Catch(1)
        board = environment.reset(0).observation[0]
        picture = environment.render()
        assert picture.shape == (160, 80, 3) and picture.dtype == np.uint8
        assert (picture[8::16, 8::16] == 255 * board[:, :, np.newaxis]).all()


def atari(num_envs: int = 2, game: str = "Pong", threads: int = 1, **settings: Any) -> Environment:
    config = EnvironmentConfig(id=f"ALE/{game}-v5", atari=AtariConfig(**settings))
    return environments.make(config, num_envs, actor=ActorConfig(env_threads=threads))


class TestAtari:
    def test_it_plays_what_ale_plays_frame_for_frame(self) -> None:
        # Given ALE's vector environment with the same settings and seeds, as the slow truth ...
        num_envs, num_steps = 4, 700
        truth = AtariVectorEnv(
            "breakout",
            num_envs,
            num_threads=1,
            stack_num=1,
            reward_clipping=False,
            use_fire_reset=False,
            repeat_action_probability=0.25,
            max_num_frames_per_episode=700,
        )
        observation, info = truth.reset(seed=base.seeds(11, num_envs))
        frame_number, noops = info["frame_number"].copy(), np.zeros(num_envs, np.int64)
        settings = {"sticky_actions": 0.25, "max_frames_per_episode": 700}
        random = np.random.default_rng(0)
        total = np.zeros(num_envs, np.int64)
        seen = {"terminated": 0, "truncated": 0, "life lost": 0}
        with closing(atari(num_envs, "Breakout", threads=2, **settings)) as environment:
            timestep = environment.reset(11)
            assert (timestep.observation[..., 0] == observation[:, 0]).all()
            lives = info["lives"]
            ended = np.zeros(num_envs, np.bool_)
            for _ in range(num_steps):
                action = random.integers(4, size=num_envs)
                environment.send(action)
                step = environment.recv()
                observation, reward, terminated, truncated, info = truth.step(action)
                # ... then every row agrees with it,
                timestep = step.timestep
                assert (info["env_id"] == np.arange(num_envs)).all()
                assert (timestep.observation[..., 0] == observation[:, 0]).all()
                assert (timestep.reward == reward).all()
                assert (step.info["lives"] == info["lives"]).all()
                assert ((timestep.step_type == LAST) == (terminated | truncated)).all()
                # a lost life is discount 0 on a row after which the game goes on,
                lost = (info["lives"] < lives) & ~ended
                assert ((timestep.discount == 0) == (terminated | lost)).all()
                only_lost = lost & ~terminated & ~truncated
                assert (timestep.step_type[only_lost] == MID).all()
                seen["terminated"] += terminated.sum()
                seen["truncated"] += (truncated & ~terminated).sum()
                seen["life lost"] += only_lost.sum()
                total += step.frames
                noops += np.where(ended, info["episode_frame_number"], 0)
                lives, ended = info["lives"], terminated | truncated
        assert all(seen.values()), seen
        # and the frames and the no-ops of the resets are all the frames ALE has counted.
        assert (total + noops == info["frame_number"] - frame_number).all()

    def test_a_lost_life_may_mean_nothing(self) -> None:
        with closing(atari(game="Breakout", life_loss_ends=False)) as environment:
            steps = play(environment, 300)
        lives = np.stack([step.info["lives"] for step in steps[1:]])
        last = column(steps, "step_type")[1:] == LAST
        assert (np.diff(lives, axis=0) < 0).sum() > last.sum()
        assert ((column(steps, "discount")[1:] == 0) == last).all()

    def test_a_restricted_action_set_counts_from_0(self) -> None:
        # Given the actions 3 and 0 of Pong only, in this order ...
        with closing(atari(actions=(3, 0))) as few, closing(atari()) as all_of_them:
            assert few.action_space == gym.spaces.Discrete(2)
            few.reset(5)
            all_of_them.reset(5)
            for chosen in ([0, 1], [0, 0], [1, 0]) * 10:
                few.send(np.array(chosen))
                all_of_them.send(np.array([3, 0])[chosen])
                # ... then 0 plays 3, and 1 plays 0.
                one, other = few.recv().timestep, all_of_them.recv().timestep
                assert (one.observation == other.observation).all()

    @pytest.mark.parametrize("actions", [(0, 6), (2, 2)])
    def test_actions_that_it_does_not_have_are_refused(self, actions: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"the 6 actions of ALE/Pong-v5 are 0 to 5"):
            atari(actions=actions)

    def test_a_game_without_a_button_plays_its_actions_as_without(self) -> None:
        """So that it can be a task beside others."""
        pressed = np.array([1, 10, 11, 12, 13, 14, 15, 16, 17])
        assert all("FIRE" in list(ale_py.Action.__members__)[action] for action in pressed)
        with (
            closing(atari(1, game="Skiing", full_action_set=True)) as one,
            closing(atari(1, game="Skiing", full_action_set=True)) as other,
            closing(atari(1, game="Skiing")) as another,
        ):
            assert one.action_space == gym.spaces.Discrete(18)
            for environment in (one, other, another):
                environment.reset(5)
            differ = False
            for action, plain in zip(pressed, (0, 2, 3, 4, 5, 6, 7, 8, 9), strict=True):
                for _ in range(8):
                    for environment, sent in ((one, action), (other, plain), (another, 0)):
                        environment.send(np.array([sent]))
                    seen = [each.recv().timestep.observation for each in (one, other, another)]
                    assert (seen[0] == seen[1]).all()
                    differ |= (seen[1] != seen[2]).any()
            assert differ  # actions do something

    def test_a_table_restricts_actions_by_game(self) -> None:
        # Given Pong with the table, whose three actions are 0, 2 and 3 of its own six ...
        with (
            closing(atari(action_table=True)) as few,
            closing(atari(actions=(0, 2, 3))) as by_index,
        ):
            assert few.action_space == gym.spaces.Discrete(3)
            few.reset(5)
            by_index.reset(5)
            for chosen in ([0, 1], [2, 0], [1, 2]) * 10:
                few.send(np.array(chosen))
                by_index.send(np.array(chosen))
                # ... then both play the same game.
                one, other = few.recv().timestep, by_index.recv().timestep
                assert (one.observation == other.observation).all()
        with closing(atari(game="Breakout", action_table=True)) as environment:
            assert environment.action_space == gym.spaces.Discrete(3)

    def test_an_action_may_last_for_a_random_number_of_frames(self) -> None:
        """Given the same game, of which each frame is a step."""
        usual = {"max_pool": False, "noop_max": 0}
        with (
            closing(atari(1, "Breakout", frame_skip=2, frame_skip_most=4, **usual)) as held,
            closing(atari(1, "Breakout", frame_skip=1, **usual)) as single,
        ):
            held.reset(5)
            single.reset(int(base.seeds(5, 1)[0]))
            lengths = []
            for action in [1, 2, 3, 0] * 60:
                held.send(np.array([action]))
                step = held.recv()
                lengths.append(int(step.frames[0]))
                frames = []
                for _ in range(lengths[-1]):
                    single.send(np.array([action]))
                    frames.append(single.recv().timestep)
                seen = step.timestep
                assert (seen.observation == frames[-1].observation).all()
                assert seen.reward[0] == sum(frame.reward[0] for frame in frames)
                assert seen.discount[0] == min(frame.discount[0] for frame in frames)
            assert set(lengths) == {2, 3, 4} and abs(np.mean(lengths) - 3.0) < 0.2
        with pytest.raises(ValueError, match=r"frame_skip_most is 3, frame_skip 4.*no-max-pool"):
            atari(frame_skip_most=3)

    @pytest.mark.parametrize(("game", "actions"), [("Breakout", (0, 2, 3)), ("Tennis", (0, 2))])
    def test_a_restriction_without_needed_fire_is_refused(
        self, game: str, actions: tuple[int, ...]
    ) -> None:
        with pytest.raises(ValueError, match=r"leaves out FIRE: without it nothing happens in ALE"):
            atari(game=game, actions=actions)
        with closing(atari(game=game, actions=(*actions, 1))) as environment:
            assert environment.action_space == gym.spaces.Discrete(len(actions) + 1)

    def test_a_table_and_indices_are_not_both_taken(self) -> None:
        with pytest.raises(ValueError, match=r"leave out one of them"):
            atari(action_table=True, actions=(0, 1))

    def test_an_unknown_game_gets_the_nearest_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'ALE/MsPackman-v5'.*ALE/MsPacman-v5"):
            atari(game="MsPackman")

    def test_kwargs_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"environment\.atari"):
            environments.make(EnvironmentConfig(id="ALE/Pong-v5", kwargs='{"mode": 1}'), 1)

    def test_the_screen_shows_the_game_that_is_played(self) -> None:
        # Given a game whose random moments are many, and a screen that follows it, which fails if
        # reward, lives or frame ever differ (0.25 would be the emulator's own default) ...
        settings = AtariConfig(sticky_actions=0.5, max_frames_per_episode=900, frame_skip=1)
        environment = Atari("ALE/Breakout-v5", settings, 2, render_mode="rgb_array")
        with closing(Checked(environment, "Breakout")) as checked:
            checked.reset(3)
            random = np.random.default_rng(0)
            ends = 0
            for _ in range(1000):
                checked.send(random.integers(4, size=2))
                timestep = checked.recv().timestep
                ends += timestep.step_type[0] == LAST
                # ... then the agent's grey frame, at 84x84, looks like the screen.
                picture = checked.render()
                grey = picture.mean(axis=2)[::3, ::2][:70, :80]
                frame = timestep.observation[0, :, :, 0]
                rows, columns = np.arange(70) * 84 // 70, np.arange(80) * 84 // 80
                correlation = np.corrcoef(grey.ravel(), frame[rows][:, columns].ravel())[0, 1]
                assert correlation > 0.7
            assert picture.shape == (210, 160, 3) and picture.dtype == np.uint8
            assert ends > 0

    def test_without_a_render_mode_there_is_no_picture(self) -> None:
        with closing(atari(1)) as environment:
            environment.reset(0)
            with pytest.raises(ValueError, match="give a render_mode"):
                environment.render()


class TestMinAtar:
    def test_actions_that_a_game_does_not_read_are_left_out(self) -> None:
        for kwargs, actions in (("{}", 3), ('{"use_minimal_action_set": false}', 6)):
            config = EnvironmentConfig(id="MinAtar/Breakout-v1", kwargs=kwargs)
            with closing(environments.make(config, 1)) as environment:
                assert environment.action_space == gym.spaces.Discrete(actions)

    def test_a_game_can_be_looked_at(self) -> None:
        config = EnvironmentConfig(id="MinAtar/Breakout-v1")
        with closing(environments.make(config, 2, render_mode="rgb_array")) as environment:
            environment.reset(0)
            picture = environment.render()
        assert picture.shape == (160, 160, 3) and picture.dtype == np.uint8
        assert (
            len(np.unique(picture.reshape(-1, 3), axis=0)) >= 3
        )  # nothing and two kinds of things


class Scripted(Environment):
    """Says what it is told to, step after step."""

    def __init__(self, action_space: gym.Space, timesteps: list[TimeStep]) -> None:
        self.observation_space = gym.spaces.Box(0, 9, (), np.float32)
        self.action_space = action_space
        self.num_envs = len(timesteps[0].reward)
        self._timesteps = iter(timesteps)

    def reset(self, seed: int) -> TimeStep:
        return next(self._timesteps)

    def send(self, action: Nest) -> None:
        pass

    def recv(self) -> EnvironmentStep:
        return EnvironmentStep(next(self._timesteps), np.ones(self.num_envs, np.int32), {})

    def render(self) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        pass


def script(*step_types: list[int]) -> list[TimeStep]:
    """Time steps of these types; step t of environment e has reward 10 t + e."""
    return [
        TimeStep(
            np.zeros(len(types), np.float32),
            np.where(np.array(types) == FIRST, 0, 10 * t + np.arange(len(types))).astype("f4"),
            np.ones(len(types), np.float32),
            np.array(types, np.int8),
        )
        for t, types in enumerate(step_types)
    ]


class TestWithHistory:
    def test_it_remembers_the_last_step_of_an_episode(self) -> None:
        timesteps = script([0, 0], [1, 1], [2, 1], [0, 1], [1, 2])
        environment = WithHistory(
            Scripted(gym.spaces.Discrete(4), timesteps),
            ("last_action", "last_reward", "time_in_episode"),
        )
        said = [environment.reset(0).observation]
        for action in ([3, 0], [2, 1], [1, 2], [0, 3]):
            environment.send(np.array(action))
            said.append(environment.recv().timestep.observation)
        assert [s["last_action"].tolist() for s in said] == [
            [-1, -1],
            [3, 0],
            [2, 1],
            [-1, 2],
            [0, 3],
        ]
        assert [s["last_reward"].tolist() for s in said] == [
            [0, 0],
            [10, 11],
            [20, 21],
            [0, 31],
            [40, 41],
        ]
        assert [s["time_in_episode"].tolist() for s in said] == [
            [0, 0],
            [1, 1],
            [2, 2],
            [0, 3],
            [1, 4],
        ]

    def test_no_action_is_below_the_choices_and_zero_otherwise(self) -> None:
        space = gym.spaces.Dict(
            {
                "move": gym.spaces.Discrete(3, start=5),
                "tools": gym.spaces.MultiDiscrete([2, 3]),
                "force": gym.spaces.Box(1.0, 2.0, (2,), np.float32),
                "turn": gym.spaces.Box(-1.0, 2.0, (), np.float32),
            }
        )
        environment = WithHistory(Scripted(space, script([0])), ("last_action", "last_reward"))
        last_action = environment.reset(0).observation["last_action"]
        assert last_action["move"].tolist() == [4]
        assert last_action["tools"].tolist() == [[-1, -1]]
        assert last_action["force"].tolist() == [[0.0, 0.0]]
        assert isinstance(environment.observation_space, gym.spaces.Dict)
        assert environment.observation_space["last_action"].contains(numbered(last_action, 0))


class TestOutward:
    def test_a_step_that_is_cut_off_keeps_its_discount(self) -> None:
        # Given environments that discount by 0.5, of which one is cut off and one terminates ...
        def made(num_envs: int) -> Scripted:
            first, last = script([FIRST] * num_envs, [LAST] * num_envs)
            discount = np.array([0.5, 0.0], np.float32)[:num_envs]
            return Scripted(gym.spaces.Discrete(2), [first, last._replace(discount=discount)])

        # ... when they are played as Gymnasium's ...
        several = to_gymnasium.SeveralEnvs(lambda: made(2))
        several.reset(seed=0)
        observation, reward, terminated, truncated, info = several.step(np.zeros(2, np.int64))
        assert (terminated.tolist(), truncated.tolist()) == ([False, True], [True, False])
        np.testing.assert_array_equal(info["discount"], [0.5, np.nan])
        # ... then what they say makes the same step.
        given = {name: info[name] for name in ("frames", "discount")}
        never = np.zeros(2, np.bool_)
        step = base.environment_step(observation, reward, terminated, truncated, never, given)
        assert step.timestep.discount.tolist() == [0.5, 0.0]
        single = to_gymnasium.SingleEnv(lambda: made(1))
        single.reset(seed=0)
        assert single.step(0)[2:] == (False, True, {"frames": 1, "discount": 0.5})


def test_no_environments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_envs is 0"):
        environments.make(EnvironmentConfig(id="Catch"), 0)


def test_choices_of_nested_actions_begin_at_0() -> None:
    box, bits = gym.spaces.Box(0.0, 1.0, (2,)), gym.spaces.MultiBinary(2)
    parts = gym.spaces.MultiDiscrete([2, 3], start=[5, 7]), bits, box
    space = gym.spaces.Dict(a=gym.spaces.Discrete(3, start=1), b=gym.spaces.Tuple(parts))
    action = {"a": 3, "b": (np.array([6, 7]), np.array([0, 1]), np.zeros(2))}
    assert spaces.chosen(space, action) == [2, 1, 0, 0, 1]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of gym, which goes on
def test_what_cannot_be_shown_blames_no_setting() -> None:
    with pytest.raises(ValueError, match="Bandit/DependentEasy-v0 cannot be shown") as caught:
        environments.make(
            EnvironmentConfig(id="Bandit/DependentEasy-v0"), 1, render_mode="rgb_array"
        )
    assert "environment.kwargs" not in str(caught.value)
