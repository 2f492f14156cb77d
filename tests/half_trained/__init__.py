"""Stored runs that learned a little, so that returns differ from episode to episode."""

import dataclasses
import pathlib

from impala.config.schema import NormaliseConfig
from impala.logdir import checkpoint
from impala.parts import build
from impala.play import evaluation
from impala.play.player import Player
from impala.schedule import tasks

STORED = pathlib.Path(__file__).parent
"""Catch, CartPole, and a bandit for an LSTM that sees its last action and reward."""


def evaluated(name: str, num_envs: int, episodes: int, greedy: bool, seed: int) -> list[float]:
    """Returns of episodes as `impala evaluate` plays them."""
    player = Player(checkpoint.choose(STORED / name))
    environment = player.environment(num_envs)
    played = evaluation.play_episodes(environment, player.agent, episodes, greedy, seed)
    environment.close()
    return [episode.episode_return for episode in played]


def normalised(name: str) -> checkpoint.Checkpoint:
    """A stored run as if it had been trained on normalised observations."""
    saved = checkpoint.choose(STORED / name)
    statistics = NormaliseConfig(mean=(0.25,), deviation=(0.5,), clip=4.0)
    environment = dataclasses.replace(saved.config.environment, normalise=statistics)
    config = dataclasses.replace(saved.config, environment=environment)
    spaces = build.spaces(tasks.make(environment, config.tasks))
    return saved._replace(config=config, spaces=spaces)
