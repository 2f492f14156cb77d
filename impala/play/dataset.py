"""Datasets: episodes of an agent, as demonstrations for others to learn from."""

import contextlib
import re
import warnings
from typing import Any

import numpy as np
import tree

from impala.environments.demonstrations import minari_for
from impala.environments.spaces import is_wrapped, main_space
from impala.play.player import Player
from impala.play.policy import Policy
from impala.types import Nest


def record(player: Player, name: str, episodes: int, greedy: bool, seed: int) -> list[float]:
    """Plays episodes and stores them as a dataset of Minari.

    It has the environment's own observations, without what wrappers add to them, and no episodes
    that a failure of the environment has cut off.

    Args:
      player: who plays.
      name: of the dataset, such as catch/mine-v0.
      episodes: how many.
      greedy: use the most likely actions instead of sampled ones.
      seed: of environment and actions.

    An episode is truncated after `evaluator.max_steps` of the run.

    Returns:
      The return of each.

    Raises:
      ValueError: Minari is not installed, the name is taken or invalid, or failures of the
        environment have cut off more than `episodes` episodes.
    """
    minari = minari_for(f"The dataset {name}")
    if not re.fullmatch(r"([\w-]+/)*[\w-]+-v\d+", name):
        raise ValueError(
            f"{name} is no name of a dataset: end it with a version, as in catch/mine-v0."
        )
    if minari.storage.get_dataset_path(name).exists():
        raise ValueError(f"There is a dataset {name} already: choose another name or version.")
    most = player.config.evaluator.max_steps
    policy = Policy(player, greedy, seed)
    space, returns, buffers = policy.observation_space, list[float](), list[Any]()

    def own(observation: Nest) -> Nest:
        observation = observation["observation"] if is_wrapped(space) else observation
        return tree.map_structure(np.array, observation)  # valid for one step

    with contextlib.closing(policy.environment()) as environment:
        cut_off = 0
        while len(buffers) < episodes:
            observation, _ = environment.reset(seed=None if buffers or cut_off else seed)
            policy.reset()
            seen, done = [own(observation)], list[Nest]()
            rewards, ends = list[float](), list[list[bool]]()
            while not (ends and any(ends[-1])):
                action = policy(observation)
                observation, reward, *end, _ = environment.step(action)
                seen.append(own(observation))
                done.append(action)
                rewards.append(float(reward))
                ends.append([end[0], end[1] or len(rewards) == most])
            if environment.faults:
                cut_off += 1
                if cut_off > episodes:
                    raise ValueError(
                        f"The environment has failed in {cut_off} episodes, which are not stored: "
                        f"{environment.faults[-1].detail}"
                    )
                continue
            terminations, truncations = (list(each) for each in zip(*ends, strict=True))
            buffers.append(
                minari.data_collector.EpisodeBuffer(
                    id=len(buffers),
                    observations=_stacked(seen),
                    actions=_stacked(done),
                    rewards=rewards,
                    terminations=terminations,
                    truncations=truncations,
                )
            )
            returns.append(sum(rewards))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it knows no author, and no environment to evaluate in
        minari.create_dataset_from_buffers(
            name, buffers, observation_space=main_space(space), action_space=policy.action_space
        )
    return returns


def _stacked(rows: list[Nest]) -> Any:
    return tree.map_structure(lambda *leaves: np.stack(leaves), *rows)
