"""Stored runs that learned a little, so that returns differ from episode to episode."""

import pathlib

from impala.logdir import checkpoint
from impala.play import evaluation
from impala.play.player import Player

STORED = pathlib.Path(__file__).parent
"""Catch, CartPole, and a bandit for an LSTM that sees its last action and reward."""


def evaluated(name: str, num_envs: int, episodes: int, greedy: bool, seed: int) -> list[float]:
    """Returns of episodes as `impala evaluate` plays them."""
    player = Player(checkpoint.choose(STORED / name))
    environment = player.environment(num_envs)
    played = evaluation.play_episodes(environment, player.agent, episodes, greedy, seed)
    environment.close()
    return [episode.episode_return for episode in played]
