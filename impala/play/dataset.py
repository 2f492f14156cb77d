"""Datasets: episodes of an agent, as demonstrations for others to learn from."""

import contextlib
import shutil
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import tree

from impala.environments.demonstrations import DISCOUNT, minari_for
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
    try:
        minari.dataset.minari_dataset.parse_dataset_id(name)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name} is no name of a dataset: give parts of two or more letters, digits, - and _, "
            "with a version at the end, as in catch/mine-v0."
        ) from error
    if (path := minari.storage.get_dataset_path(name)).exists():
        raise ValueError(f"There is a dataset {name} already: choose another name or version.")
    most = player.config.evaluator.max_steps
    policy = Policy(player, greedy, seed)
    space, returns, buffers = policy.observation_space, list[float](), list[Any]()
    for part in (main_space(space), policy.action_space):
        _check_keys(part)

    def own(observation: Nest) -> Nest:
        observation = observation["observation"] if is_wrapped(space) else observation
        return tree.map_structure(np.array, observation)  # valid for one step

    with contextlib.closing(policy.environment()) as environment:
        cut_off = 0
        while len(buffers) < episodes:
            observation, _ = environment.reset(seed=None if buffers or cut_off else seed)
            policy.reset()
            seen, done = [own(observation)], list[Nest]()
            rewards, ends, discounts = list[float](), list[list[bool]](), [1.0]
            while not (ends and any(ends[-1])):
                action = policy(observation)
                observation, reward, *end, info = environment.step(action)
                seen.append(own(observation))
                done.append(action)
                rewards.append(float(reward))
                discounts.append(0.0 if end[0] else float(info["discount"]))
                ends.append([end[0], end[1] or len(rewards) == most])
            if faults := [fault for fault in environment.faults if fault.cuts]:
                cut_off += 1
                if cut_off > episodes:
                    raise ValueError(
                        f"The environment has failed in {cut_off} episodes, which are not stored: "
                        f"{faults[-1].detail}"
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
                    infos={DISCOUNT: np.array(discounts, np.float32)},
                )
            )
            returns.append(sum(rewards))
    with warnings.catch_warnings(), contextlib.ExitStack() as failed:
        warnings.simplefilter("ignore")  # it knows no author, and no environment to evaluate in
        failed.callback(shutil.rmtree, path, ignore_errors=True)
        minari.create_dataset_from_buffers(
            *(name, buffers),
            observation_space=main_space(space),
            action_space=policy.action_space,
            jpeg_encoding=False,  # which changes pixels
        )
        failed.pop_all()
    return returns


def _stacked(rows: list[Nest]) -> Any:
    return tree.map_structure(lambda *leaves: np.stack(leaves), *rows)


def _check_keys(space: gym.Space) -> None:
    """Refuses keys that the files of Minari would take for paths."""
    if not isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return
    parts = space.spaces if isinstance(space, gym.spaces.Dict) else dict(enumerate(space))
    for key, part in parts.items():
        if "/" in str(key):
            raise ValueError(f"Minari cannot store {key!r}, a key with a slash: rename it.")
        _check_keys(part)
