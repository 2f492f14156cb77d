"""Bandits: what arms pay, what regret is, and strategies whose regret is known."""

from typing import Literal

import gymnasium as gym
import numpy as np
import pytest

from impala import environments
from impala.config.schema import EnvironmentConfig
from impala.environments.bandit import PROBLEMS, BanditVector
from impala.types import StepType

EPISODES = 4000


@pytest.mark.parametrize(
    ("problem", "regret"),
    [  # of 100 random pulls, computed from the arms' distributions of Wang et al. 2016
        *(("Independent", 100 / 6), ("DependentUniform", 25.0), ("DependentEasy", 40.0)),
        *(("DependentMedium", 25.0), ("DependentHard", 10.0)),
    ],
)
def test_random_pulls_have_their_known_regret(problem: str, regret: float) -> None:
    vector, rng = BanditVector(EPISODES, problem, pulls=100), np.random.default_rng(0)
    vector.reset(seed=5)
    for _ in range(100):
        info = vector.step(rng.integers(2, size=EPISODES))[4]
    error = info["regret"].std() / np.sqrt(EPISODES)
    assert info["regret"].mean() == pytest.approx(regret, abs=4 * error)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_an_episode_is_a_number_of_pulls_of_one_bandit(problem: str) -> None:
    vector = BanditVector(50, problem, pulls=6)
    vector.reset(seed=1)
    assert isinstance(vector.single_action_space, gym.spaces.Discrete)
    arms = vector.single_action_space.n
    assert arms == (11 if problem == "ElevenArms" else 2)
    actions = np.random.default_rng(0).integers(arms, size=(14, 50))
    actions[[0, 7]] = 0
    before, bests = np.zeros(50), []
    for t in range(14):
        _, reward, terminated, truncated, info = vector.step(actions[t])
        place = t % 7  # six pulls, then the reset of the next step
        assert terminated.all() == (place == 5) == terminated.any()
        assert not truncated.any()
        assert info["_regret"].all() == (place != 6)
        if place == 0:
            bests.append(info["best"].copy())
        if place == 6:
            assert not reward.any()
            assert not info["regret"].any()
        else:
            lost = info["regret"] - before
            assert ((lost == 0) == (info["best"] == 1)).all()
            assert (lost >= 0).all()
        before = info["regret"]
    assert (bests[0] != bests[1]).any()  # another bandit in the next episode


def test_the_eleventh_arm_tells_the_target() -> None:
    vector = BanditVector(200, "ElevenArms", pulls=5)
    vector.reset(seed=3)
    _, told, _, _, _ = vector.step(np.full(200, 10))
    targets = np.rint(10 * told).astype(int) - 1
    assert set(targets) == set(range(10))
    total = told
    for _ in range(4):
        _, reward, _, _, info = vector.step(targets)
        assert (reward == 5.0).all()
        assert (info["best"] == 1).all()
        total = total + reward
    assert total.mean() == pytest.approx(20.55, abs=0.1)
    _, reward, _, _, _ = BanditVectorWith(targets).step((targets + 1) % 10)
    assert (reward == 1.0).all()


class BanditVectorWith(BanditVector):
    """The same targets again."""

    def __init__(self, targets: np.ndarray) -> None:
        super().__init__(len(targets), "ElevenArms", pulls=5)
        self.reset(seed=3)


@pytest.mark.parametrize("vectorization", ["sync", "own"])
def test_an_agent_sees_what_it_did_and_what_that_gave(
    vectorization: Literal["sync", "own"],
) -> None:
    config = EnvironmentConfig(
        id="Bandit/DependentEasy-v0",
        kwargs='{"pulls": 3}',
        vectorization=vectorization,
        last_action=True,
        last_reward=True,
        time_in_episode=True,
    )
    environment = environments.make(config, 4)
    timestep = environment.reset(7)
    for t in range(9):
        action = np.array([0, 1, 0, 1])
        environment.send(action)
        step = environment.recv()
        timestep = step.timestep
        seen = timestep.observation
        assert seen["observation"].tolist() == [0] * 4
        place = (t + 1) % 4
        assert seen["time_in_episode"].tolist() == [place] * 4
        assert seen["last_action"].tolist() == ([-1] * 4 if place == 0 else action.tolist())
        assert seen["last_reward"].tolist() == timestep.reward.tolist()
        types = {0: StepType.FIRST, 3: StepType.LAST}
        assert timestep.step_type.tolist() == [types.get(place, StepType.MID)] * 4
        assert step.frames.tolist() == [int(place != 0)] * 4
        assert timestep.discount.tolist() == [float(place != 3)] * 4
    environment.close()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [('{"problem": "Dependent"}', "there are Independent"), ('{"pulls": 0}', "pulls is 0")],
)
@pytest.mark.parametrize("vectorization", ["sync", "own"])
def test_impossible_bandits_are_refused(
    kwargs: str, message: str, vectorization: Literal["sync", "own"]
) -> None:
    config = EnvironmentConfig(
        id="Bandit/Independent-v0", kwargs=kwargs, vectorization=vectorization
    )
    with pytest.raises(ValueError, match=message):
        environments.make(config, 2)
