"""Environments as people have them: each kind of observation and action trains, in one process."""

import dataclasses
import json
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import tree

from actors import policy
from actors.actor import Actor
from impala import environments
from impala.config.presets import PRESETS
from impala.config.schema import AgentConfig, EnvironmentConfig
from impala.parts import build
from impala.schedule import phases
from impala.types import Batch, Parameters
from learner.update.learner import Learner, Update

spaces = gym.spaces

FLAGS = spaces.Box(0, 1, (3, 2), np.bool_)  # type: ignore[arg-type]  # Gymnasium makes such a box
HALF_OPEN = spaces.Box(np.array([-np.inf, 0.0], "f"), np.array([1.0, np.inf], "f"))
UNEQUAL = spaces.Box(np.array([[-1e-3, 0.0]], "f"), np.array([[1e-3, 1e6]], "f"))
LISTS = spaces.Dict({"a": HALF_OPEN, "b": spaces.Tuple([FLAGS])})
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)

CASES: dict[str, tuple[gym.Space, gym.Space]] = {
    "parts that are lists; two boxes": (LISTS, spaces.Tuple([BOX, BOX])),
    "nothing to see or choose": (spaces.Discrete(1), spaces.Discrete(1)),
    "huge float64; mixed parts": (
        spaces.Box(-np.inf, np.inf, (3,), np.float64),
        spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3), spaces.Box(0.0, 50.0, (1,))]),
    ),
    "hundreds of parts": (spaces.MultiDiscrete([4] * 130), spaces.MultiDiscrete([3] * 255)),
    "small integers": (
        spaces.Tuple([spaces.MultiDiscrete([3, 4], np.int16), spaces.Discrete(5, dtype=np.uint16)]),
        spaces.MultiDiscrete([3, 4], np.uint8),
    ),
    "one number; 10,000 actions": (spaces.Box(-1.0, 1.0, ()), spaces.Discrete(10_000, start=-5)),
    "image and text; unequal bounds": (
        spaces.Dict({"image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "task": spaces.Text(9)}),
        UNEQUAL,
    ),
}


class Played(gym.Env):
    """Shows anything that its observation space has, and insists on actions of its action space."""

    def __init__(self, case: str) -> None:
        self.observation_space, self.action_space = CASES[case]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return self._shown(), 1.0, bool(self.np_random.random() < 0.2), False, {}

    def _shown(self) -> Any:
        shown = self.observation_space.sample()
        if self.observation_space is LISTS:
            return {"a": shown["a"].tolist(), "b": [shown["b"][0].tolist()]}
        return 1e9 * shown if self.observation_space.dtype == np.float64 else shown


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_seen_and_done_trains(case: str) -> None:
    # Given an agent whose torso is chosen for what it sees, and two environments ...
    catch = PRESETS["catch"][1]
    of_agent = AgentConfig("auto", hidden_sizes=(8,), normalise_observations="huge" in case)
    config = dataclasses.replace(catch, agent=of_agent)
    played = EnvironmentConfig("test_any_environment:Played", json.dumps({"case": case}))
    with closing(environments.make(played, 2)) as environment:
        of = environment.observation_space, environment.action_space
        agent = build.agent(config.agent, *of)
        algorithm = build.algorithm(config.algorithm, config, agent)
        learner = Learner(algorithm, config, phases.make(config)[0])
        version = 0

        def parameters() -> Parameters:
            return Parameters(1, version, 0.0, 0, [v.numpy() for v in agent.variables])

        acting = policy.make_policy(agent, config.agent, of)
        unrolls = Actor(lambda task: [environment], acting, 9, seed=3).run(parameters)
        for _ in range(3):
            # ... when they play and what they played is learned, ...
            unroll = tree.map_structure(np.copy, next(unrolls).unroll)
            unroll = unroll._replace(parameter_version=np.full(2, version))
            if agent.normaliser is not None:
                seen = unroll.timestep.observation
                agent.normaliser.update([agent.normaliser.moments(seen)])
            before = [variable.numpy() for variable in agent.trainable_variables]
            # ... then each update is good, and moves the agent.
            assert isinstance(learner.update(Batch(unroll, np.zeros(2, np.bool_))), Update)
            version += 1
            moved = zip(before, agent.trainable_variables, strict=True)
            assert any((x != y.numpy()).any() for x, y in moved)
