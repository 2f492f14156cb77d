"""Stored runs that learned a little, so that returns differ from episode to episode."""

import pathlib

from impala import evaluation
from impala.logdir.player import Player

STORED = pathlib.Path(__file__).parent / "stored" / "half-trained"
"""Catch, CartPole, and a bandit for an LSTM that sees its last action and reward."""


def evaluated(name: str, num_envs: int, episodes: int, greedy: bool, seed: int) -> list[float]:
    """Returns of episodes as `impala evaluate` plays them."""
    player = Player(STORED / name)
    environment = player.environment(num_envs)
    played = evaluation.play_episodes(environment, player.agent, episodes, greedy, seed)
    environment.close()
    return [episode.episode_return for episode in played]
