"""Held actions: what is played, summed, discounted and counted, and who says how long."""

from typing import Any

import gymnasium as gym
import hold
import numpy as np
import pytest
import tensorflow as tf

from impala import environments
from impala.config.schema import AgentConfig, EnvironmentConfig, RepeatConfig
from impala.environments.repeat import ActionRepeat
from impala.parts import build
from impala.types import EnvironmentStep, StepType

Step = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class Counting(gym.Env[np.ndarray, np.int64]):
    """Frame i of an episode of seven pays 10 i and is seen as i."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(5)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        self.frame = 0
        self.actions: list[int] = []
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> Step:
        self.actions.append(int(action))
        self.frame += 1
        observation = np.full(1, self.frame, np.float32)
        return observation, 10.0 * self.frame, self.frame == 7, False, {"frame": self.frame}


gym.register("Paid-v0", entry_point="test_repeat:Counting")


def test_a_fixed_repeat_sums_the_rewards() -> None:
    env = ActionRepeat(Counting(), RepeatConfig(most=3))
    assert env.action_space == gym.spaces.Discrete(5)
    env.reset()
    observation, reward, terminated, _, info = env.step(2)
    assert (observation.tolist(), reward, terminated) == ([3.0], 60.0, False)
    assert (info["frames"], info["frame"], info["discount"]) == (3, 3, 1.0)
    env.step(1)
    # The episode ends in frame 7, and no further frame is played.
    observation, reward, terminated, _, info = env.step(4)
    assert (observation.tolist(), reward, terminated, info["frames"]) == ([7.0], 70.0, True, 1)
    assert isinstance(env.unwrapped, Counting)
    assert env.unwrapped.actions == [2, 2, 2, 1, 1, 1, 4]


def test_a_learned_repeat_is_one_more_choice() -> None:
    env = ActionRepeat(Counting(), RepeatConfig(most=4, learned=True))
    repeat = gym.spaces.Discrete(4, start=1)
    assert env.action_space == gym.spaces.Dict({"action": Counting.action_space, "repeat": repeat})
    env.reset()
    played = [env.step({"action": 3, "repeat": k})[4]["frames"] for k in (1, 4, 4)]
    assert played == [1, 4, 2]  # seven frames in all


def test_rewards_within_a_step_are_discounted_if_asked() -> None:
    env = ActionRepeat(Counting(), RepeatConfig(most=3, discount=0.5))
    env.reset()
    _, reward, _, _, info = env.step(0)
    assert reward == 10 + 0.5 * 20 + 0.25 * 30
    assert info["discount"] == 0.25  # with the learner's 0.5 that is 0.5^3


def test_the_agent_is_told_frames_and_discounts() -> None:
    config = EnvironmentConfig(
        id="Paid-v0", repeat=RepeatConfig(most=4, learned=True, discount=0.5)
    )
    environment = environments.make(config, 2)
    environment.reset(0)

    def step(*repeats: int) -> EnvironmentStep:
        action = {"action": np.zeros(2, np.int64), "repeat": np.array(repeats)}
        environment.send(action)
        return environment.recv()

    first = step(1, 4)
    assert first.frames.tolist() == [1, 4]
    assert first.timestep.discount.tolist() == [1.0, 0.125]
    assert first.timestep.reward.tolist() == [10.0, 10 + 10 + 7.5 + 5]
    second = step(4, 4)
    assert second.frames.tolist() == [4, 3]
    assert second.timestep.step_type.tolist() == [StepType.MID, StepType.LAST]
    assert second.timestep.discount.tolist() == [0.125, 0.0]  # termination stays one
    third = step(2, 1)
    assert third.frames.tolist() == [2, 0]  # a reset plays none
    assert third.timestep.step_type.tolist() == [StepType.LAST, StepType.FIRST]
    assert third.timestep.discount.tolist() == [0.0, 1.0]


def test_an_environments_mask_allows_every_repeat() -> None:
    config = EnvironmentConfig(id="hold:Masked-v0", repeat=RepeatConfig(most=2, learned=True))
    environment = environments.make(config, 8)
    assert isinstance(environment.observation_space, gym.spaces.Dict)
    assert environment.observation_space["action_mask"].shape == (5,)
    agent = build.agent(
        AgentConfig(hidden_sizes=(4,)), environment.observation_space, environment.action_space
    )
    timestep = environment.reset(0)
    repeats = set()
    for count in range(30):
        output, _ = agent.step(timestep, (), tf.constant([3, count]))
        action = {name: part.numpy() for name, part in output.action.items()}
        mask = timestep.observation["action_mask"]
        assert mask[:, 3:].all()
        assert mask[np.arange(8), action["action"]].all()
        repeats |= set(action["repeat"].tolist())
        environment.send(action)
        timestep = environment.recv().timestep
        assert (timestep.reward == 0.0).all()  # nothing forbidden was played in any frame
    assert repeats == {1, 2}


def test_a_held_action_ends_where_it_becomes_forbidden() -> None:
    env = ActionRepeat(hold.Masked(), RepeatConfig(most=50))
    observation, _ = env.reset(seed=1)
    held: list[int] = []
    while len(held) < 200:
        action = int(np.argmax(observation["action_mask"]))
        observation, reward, _, truncated, info = env.step(action)
        assert reward == 0.0
        assert truncated or observation["action_mask"][action] == 0
        held.append(info["frames"])
        if truncated:
            observation, _ = env.reset()
    assert {1, 2, 3} <= set(held)


class Lives(Counting):
    """Loses a life in its second frame."""

    def step(self, action: np.int64) -> Step:
        observation, reward, terminated, truncated, info = super().step(action)
        info = {**info, "discount": float(self.frame != 2)}
        return observation, reward, terminated, truncated, info


def test_what_an_environment_discounts_within_a_hold_counts() -> None:
    env = ActionRepeat(Lives(), RepeatConfig(most=3, discount=0.5))
    env.reset()
    _, reward, _, _, info = env.step(0)
    assert (reward, info["discount"], info["frames"]) == (10 + 0.5 * 20, 0.0, 2)
    # The rest of the hold would count for nothing.
    _, reward, _, _, info = env.step(0)
    assert (reward, info["discount"]) == (30 + 0.5 * 40 + 0.25 * 50, 0.25)


class Over(hold.Masked):
    """Forbids everything when the episode is over."""

    def _observation(self) -> dict[str, Any]:
        observation = super()._observation()
        if self._count == 10:
            observation["action_mask"] = np.zeros(3, np.int8)
        return observation


gym.register("Over-v0", entry_point="test_repeat:Over")


def test_nothing_need_be_allowed_when_an_episode_is_over() -> None:
    environment = environments.make(EnvironmentConfig(id="Over-v0"), 2)
    timestep = environment.reset(0)
    for _ in range(25):
        environment.send(np.argmax(timestep.observation["action_mask"], axis=1))
        timestep = environment.recv().timestep


@pytest.mark.parametrize("id", ["Catch", "ALE/Pong-v5"])
def test_games_that_cannot_repeat_say_so(id: str) -> None:
    config = EnvironmentConfig(id=id, repeat=RepeatConfig(most=2))
    with pytest.raises(ValueError, match=rf"not {id}\. ALE games skip frames with"):
        environments.make(config, 1)


def test_a_mask_that_forbids_everything_is_refused() -> None:
    class Hopeless(hold.Masked):
        def _observation(self) -> dict[str, Any]:
            return {"observation": 0, "action_mask": np.zeros(3, np.int8)}

    gym.register("Hopeless-v0", entry_point=lambda **kwargs: Hopeless(**kwargs))
    environment = environments.make(EnvironmentConfig(id="Hopeless-v0"), 2)
    with pytest.raises(RuntimeError, match="action_mask of environment 0 forbids all of part 0"):
        environment.reset(0)
