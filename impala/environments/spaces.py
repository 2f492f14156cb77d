"""What an observation is made of: the environment's own part, and what wrappers put beside it.

Wrappers add to an observation by standing it in a Dict as `observation`, beside parts whose names
are known here.
"""

import math
from typing import TypeGuard

import gymnasium as gym
import numpy as np

from impala.types import Nest

Spaces = tuple[gym.Space, gym.Space]
"""Of observations and of actions."""
SEEN = frozenset({"last_action", "last_reward", "time_in_episode"})
"""What the network sees besides the observation."""
ACTION_MASK = "action_mask"
"""Which choices there are; the network does not see it, its policy obeys it."""
FORBIDDEN = -1e9
"""The policy parameter of a choice that there is not; exact in float32."""


def is_wrapped(space: gym.Space) -> TypeGuard[gym.spaces.Dict]:
    """Whether the observation stands in a Dict beside what our wrappers added."""
    if not isinstance(space, gym.spaces.Dict) or "observation" not in space.spaces:
        return False
    others = set(space.spaces) - {"observation"}
    return bool(others) and others <= SEEN | {ACTION_MASK}


def has_action_mask(space: gym.Space) -> bool:
    """Whether observations say which choices there are."""
    return is_wrapped(space) and ACTION_MASK in space.spaces


def choices(space: gym.Space) -> list[int]:
    """How many choices each part of an action has, if any: what an action mask goes through."""
    match space:
        case gym.spaces.Discrete():
            return [int(space.n)]
        case gym.spaces.MultiDiscrete():
            return [int(n) for n in space.nvec.reshape(-1)]
        case gym.spaces.MultiBinary():
            return [2] * math.prod(space.shape)
        case gym.spaces.Dict():
            return [size for part in space.spaces.values() for size in choices(part)]
        case gym.spaces.Tuple():
            return [size for part in space.spaces for size in choices(part)]
    return []


def chosen(space: gym.Space, action: Nest) -> list[int]:
    """Which choice of each part one action is: 0 is the part's first."""
    match space:
        case gym.spaces.Discrete() | gym.spaces.MultiDiscrete():
            return list(np.reshape(action - space.start, -1))
        case gym.spaces.MultiBinary():
            return list(np.reshape(action, -1))
        case gym.spaces.Dict():
            return [i for name, part in space.spaces.items() for i in chosen(part, action[name])]
        case gym.spaces.Tuple():
            return [i for part, of in zip(space, action, strict=True) for i in chosen(part, of)]
    return []


def main_space(space: gym.Space) -> gym.Space:
    """The environment's own part of an observation space."""
    return space["observation"] if is_wrapped(space) else space
