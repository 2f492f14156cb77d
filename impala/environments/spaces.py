"""Spaces: what an observation is made of, what choices an action has, and both as plain data.

Wrappers add to an observation by standing it in a Dict as `observation`, beside parts whose names
are known here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import gymnasium as gym
import numpy as np

from impala.types import Nest

Spaces = tuple[gym.Space, gym.Space]
"""Spaces of observations and of actions."""
SEEN = frozenset({"last_action", "last_reward", "time_in_episode"})
"""What the network sees besides the observation."""
ACTION_MASK = "action_mask"
"""Which choices there are; the network does not see it, its policy obeys it."""
TASK = "popart_task"
"""The number of the task played, counted from 0; it chooses an output of the baseline's head, and
nothing else depends on it."""
FORBIDDEN = -1e9
"""The policy parameter of a choice that there is not; exact in float32."""


def is_wrapped(space: gym.Space) -> TypeGuard[gym.spaces.Dict]:
    """Whether the observation stands in a Dict beside what our wrappers added."""
    if not isinstance(space, gym.spaces.Dict) or "observation" not in space.spaces:
        return False
    others = set(space.spaces) - {"observation"}
    return bool(others) and others <= SEEN | {ACTION_MASK, TASK}


def added(space: gym.Space) -> set[str]:
    """Names of what our wrappers have added to the environment's own observation."""
    return set(space.spaces) - {"observation"} if is_wrapped(space) else set()


def has_action_mask(space: gym.Space) -> bool:
    """Whether observations say which choices there are."""
    return is_wrapped(space) and ACTION_MASK in space.spaces


def num_tasks(space: gym.Space) -> int:
    """How many tasks observations tell apart; 1 if they name none."""
    return int(space[TASK].n) if is_wrapped(space) and TASK in space.spaces else 1  # type: ignore[attr-defined]


def written(space: gym.Space) -> str:
    """Returns a space as one line of text."""
    return " ".join(str(space).split())


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


def by_size(sizes: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the parts of each size, so that one operation can compute them.

    Args:
      sizes: of parts whose entries stand in one row, part after part.

    Returns:
      For each size n: the numbers of the K parts that have it [K], and their columns [K, n].
    """
    sizes = sizes.astype(np.int64)  # unsigned ones would give positions as float64
    begins = sizes.cumsum() - sizes
    groups = [(np.flatnonzero(sizes == size), np.arange(size)) for size in np.unique(sizes)]
    return [(parts, begins[parts, np.newaxis] + entries) for parts, entries in groups]


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


def limits(space: gym.Space) -> tuple[Any, Any]:
    """Returns the lowest and the highest values in a space that is neither a Dict nor a Tuple."""
    match space:
        case gym.spaces.Box():
            return space.low, space.high
        case gym.spaces.Discrete():
            return space.start, space.start + space.n - 1
        case gym.spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
    return 0, 1  # MultiBinary


def leaves(
    space: gym.Space, name: str = "", *, is_sorted: bool = True
) -> Iterator[tuple[str, gym.Space]]:
    """Yields the leaves of a space and their paths.

    Args:
      space: of an observation or an action.
      name: what their paths begin with.
      is_sorted: keys of a Dict are sorted, as in nests of its values; otherwise they have the order
        of the space, which is that of policy parameters.
    """
    match space:
        case gym.spaces.Dict():
            for key in sorted(space.spaces) if is_sorted else space.spaces:
                yield from leaves(space[key], f"{name}/{key}", is_sorted=is_sorted)
        case gym.spaces.Tuple():
            for number, part in enumerate(space.spaces):
                yield from leaves(part, f"{name}/{number}", is_sorted=is_sorted)
        case _:
            yield name, space


def main_space(space: gym.Space) -> gym.Space:
    """The environment's own part of an observation space."""
    return space["observation"] if is_wrapped(space) else space


def to_dict(space: gym.Space) -> dict[str, Any]:
    """Returns a space as plain data, which JSON can hold and `from_dict` reads.

    The bounds of a Box are one number if all are the same, else a list in C order; None stands for
    no bound.

    Raises:
      ValueError: a space of a kind without a fixed size, such as Text, which no agent can play.
    """
    match space:
        case gym.spaces.Box():
            bounds = {"low": _bounds(space.low), "high": _bounds(space.high)}
            return {
                "type": "Box",
                "shape": list(space.shape),
                "dtype": space.dtype.name,
                **bounds,
            }
        case gym.spaces.Discrete():
            n, start = int(space.n), int(space.start)
            return {"type": "Discrete", "n": n, "start": start, "dtype": space.dtype.name}
        case gym.spaces.MultiDiscrete():
            nvec, start = space.nvec.tolist(), space.start.tolist()
            return {
                "type": "MultiDiscrete",
                "nvec": nvec,
                "start": start,
                "dtype": space.dtype.name,
            }
        case gym.spaces.MultiBinary():
            return {"type": "MultiBinary", "n": np.asarray(space.n).tolist()}
        case gym.spaces.Dict():
            parts = {name: to_dict(part) for name, part in space.spaces.items()}
            return {"type": "Dict", "spaces": parts}
        case gym.spaces.Tuple():
            return {"type": "Tuple", "spaces": [to_dict(part) for part in space.spaces]}
    raise ValueError(
        f"{space} cannot be stored: use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple."
    )


def from_dict(data: Mapping[str, Any]) -> gym.Space:
    """Returns the space that `to_dict` has turned into plain data.

    The dtype (float32 or int64), bounds and starts may be left out.

    Raises:
      ValueError: no such data, or of a space that this version does not know.
    """
    match data:
        case {"type": "Box", "shape": shape}:
            dtype = np.dtype(data.get("dtype", "float32"))
            least, most = _unbounded(dtype)
            low = _array(data.get("low"), least, shape, dtype)
            high = _array(data.get("high"), most, shape, dtype)
            return gym.spaces.Box(low, high, dtype=dtype)
        case {"type": "Discrete", "n": n}:
            dtype = data.get("dtype", "int64")
            return gym.spaces.Discrete(n, start=data.get("start", 0), **_unless_int64(dtype))
        case {"type": "MultiDiscrete", "nvec": nvec}:
            dtype = np.dtype(data.get("dtype", "int64"))
            return gym.spaces.MultiDiscrete(nvec, start=data.get("start"), dtype=dtype.type)
        case {"type": "MultiBinary", "n": n}:
            return gym.spaces.MultiBinary(n)
        case {"type": "Dict", "spaces": Mapping() as parts}:  # pairs keep their order
            return gym.spaces.Dict([(name, from_dict(part)) for name, part in parts.items()])
        case {"type": "Tuple", "spaces": [*parts]}:
            return gym.spaces.Tuple([from_dict(part) for part in parts])
    raise ValueError(f"{str(data)[:200]} is not a space that this version knows.")


def _bounds(values: np.ndarray) -> Any:
    """Bounds of a Box as a number or list of numbers, None where there is none."""
    numbers = [value if math.isfinite(value) else None for value in values.reshape(-1).tolist()]
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _unbounded(dtype: np.dtype) -> tuple[Any, Any]:
    """The least and the most that a Box of a dtype can hold."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return (False, True) if dtype.kind == "b" else (-np.inf, np.inf)


def _array(bounds: Any, unbounded: Any, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Bounds of a Box, [*shape], from what `_bounds` has returned."""
    numbers = bounds if isinstance(bounds, list) else [bounds] * math.prod(shape)
    filled = [unbounded if number is None else number for number in numbers]
    return np.array(filled, dtype).reshape(shape)


def _unless_int64(dtype: str) -> dict[str, Any]:
    """The dtype of a Discrete, which only newer versions of Gymnasium let one choose."""
    return {} if dtype == "int64" else {"dtype": np.dtype(dtype).type}
