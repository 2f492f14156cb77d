"""Demonstrations: episodes that others have played, checked and joined to one stream of rows.

An episode is what Minari calls so: n `rewards`, `actions`, `terminations` and `truncations`, and
n + 1 `observations`, of which Dicts and Tuples have arrays of so many rows. `infos` may have a
`discount`, as `impala record` writes it: n + 1 numbers from 0 to 1, how much the future counts
after each step, such as 0 at a lost life; the first means nothing.
"""

import contextlib
import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import tree

from impala.environments import base
from impala.environments.spaces import SEEN, Spaces, added, limits, main_space, written
from impala.environments.wrappers import History
from impala.parts import components
from impala.parts.components import Allowed
from impala.types import Nest, StepType, TimeStep

MINARI = "minari:"
DISCOUNT = "discount"
"""The name in `infos`."""
_INSIDE = 0.99  # of a box, which actions are moved into
_SHARE = gym.spaces.Box(0.0, 1.0, (), np.float32)
_FIELDS = ("observations", "actions", "rewards", "terminations", "truncations")


class Stream(NamedTuple):
    """Episodes one after another: row t has the time step that the action in row t led to."""

    timestep: TimeStep  # [N, ...]
    action: Nest  # [N, ...], zeros where an episode begins

    @property
    def num_episodes(self) -> int:
        """How many it joins."""
        return int((self.timestep.step_type == StepType.FIRST).sum())

    @property
    def num_steps(self) -> int:
        """Those in which something was done."""
        return len(self.timestep.reward) - self.num_episodes


def load(name: str) -> tuple[Spaces | None, Iterator[Any]]:
    """Opens a dataset, and imports what it names.

    Args:
      name: minari:DATASET; or MODULE:ATTRIBUTE, a function without arguments that returns an
        iterable of episodes.

    Returns:
      Its spaces, None if it does not say, and its episodes.

    Raises:
      ValueError: it is not there, or a package for it is missing.
    """
    if ":" not in name:
        raise ValueError(
            f"demonstrations.source is {name}: say minari:{name} if that is a dataset of Minari, "
            "or MODULE:FUNCTION."
        )
    if not name.startswith(MINARI):
        found = components.load(name, Allowed((name,)))
        if not callable(found):
            raise ValueError(f"{name} is {found!r}, not a function that returns episodes.")
        return None, _episodes(name, found)
    minari = minari_for(name)
    try:
        dataset = minari.load_dataset(name.removeprefix(MINARI))
    except Exception as error:  # of any kind: others' files stand beside it
        raise ValueError(
            f"{name} cannot be opened ({type(error).__name__}). minari list local shows the "
            "datasets on this host, and minari download fetches others."
        ) from error
    return (dataset.observation_space, dataset.action_space), dataset.iterate_episodes()


def _episodes(name: str, function: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yields what a user's function returns; its errors say where they were raised."""
    try:
        if (episodes := function()) is None:
            raise ValueError("it returned None: return or yield episodes")
        yield from episodes
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{name} raised {type(error).__name__} at {where.filename}:{where.lineno}: {error}"
        ) from error


def minari_for(what: str) -> Any:
    """Returns the module minari.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module("minari")
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} needs Minari: pip install 'impala-rl[minari]'.") from error


def stream(
    name: str,
    of_dataset: Spaces | None,
    episodes: Iterable[Any],
    spaces: Spaces,
    most_bytes: int = sys.maxsize,
) -> Stream:
    """Joins episodes to a stream of what an agent sees and does.

    Args:
      name: of the dataset, for messages.
      of_dataset: its spaces, if it says.
      episodes: in order.
      spaces: of the agent.
      most_bytes: that they may take.

    Raises:
      ValueError: they are of other spaces, hold what an environment could not give, are too many,
        or there are none; names the dataset, the episode and the step.
    """
    observation_space, action_space = main_space(spaces[0]), spaces[1]
    ours = observation_space, action_space
    if of_dataset is not None and [*map(_int64, of_dataset)] != [*map(_int64, ours)]:
        raise ValueError(
            f"The demonstrations of {name} see {written(of_dataset[0])} and do "
            f"{written(of_dataset[1])}; this run sees {written(observation_space)} and does "
            f"{written(action_space)}. Both must be the same."
        )
    parts = added(spaces[0])
    if lacking := sorted(parts - SEEN):
        raise ValueError(
            f"The demonstrations of {name} have no {', '.join(lacking)}, which this run's agent "
            "needs."
        )
    streams, size = [], 0
    for number, episode in enumerate(episodes):
        with _located(f"Episode {number} of {name}"):
            one = _stream(episode, observation_space, action_space)
            streams.append(_with_history(one, action_space, parts) if parts else one)
        size += sum(leaf.nbytes for leaf in tree.flatten(streams[-1]))
        if size > most_bytes:
            raise ValueError(
                f"The demonstrations of {name} take more than {most_bytes:,} bytes of memory, "
                f"which replay.memory allows, after {number + 1} episodes: raise it, or give fewer."
            )
    if not streams:
        raise ValueError(f"{name} has no episodes: nothing can be cloned.")
    joined: Stream = tree.map_structure(lambda *each: np.concatenate(each), *streams)
    return joined


def _int64(space: gym.Space) -> gym.Space:
    """Returns a space whose choices are int64, as those of Minari always are."""
    match space:
        case gym.spaces.Dict():
            return gym.spaces.Dict({key: _int64(part) for key, part in space.spaces.items()})
        case gym.spaces.Tuple():
            return gym.spaces.Tuple([_int64(part) for part in space])
        case gym.spaces.Discrete():
            return gym.spaces.Discrete(int(space.n), start=int(space.start))
        case gym.spaces.MultiDiscrete():
            return gym.spaces.MultiDiscrete(space.nvec, start=space.start)
    return space


def _stream(episode: Any, observation_space: gym.Space, action_space: gym.Space) -> Stream:
    """Returns the n + 1 rows of an episode."""
    if lacking := [name for name in _FIELDS if not hasattr(episode, name)]:
        raise ValueError(
            f"is a {type(episode).__name__} without {', '.join(lacking)}: give it these "
            "attributes, by types.SimpleNamespace(**fields) for instance"
        )
    rewards = np.asarray(episode.rewards, np.float32)
    n = len(rewards)
    if not n:
        raise ValueError("has no steps")
    ends = np.asarray(episode.terminations, bool), np.asarray(episode.truncations, bool)
    if [len(x) for x in ends] != [n, n]:
        raise ValueError(
            f"has {n} rewards, {len(ends[0])} terminations, {len(ends[1])} truncations"
        )
    if (early := np.flatnonzero((ends[0] | ends[1])[:-1])).size:
        raise ValueError(f"ends at step {early[0]}, but has {n} steps")
    if not np.isfinite(rewards).all():
        step = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(f"has a reward of {rewards[step]} at step {step}")
    observation = base.map_leaves(
        functools.partial(_rows, n + 1), "observation", observation_space, episode.observations
    )
    action = base.map_leaves(functools.partial(_rows, n), "action", action_space, episode.actions)
    action = base.map_leaves(_inside, "action", action_space, action)
    discount = np.concatenate([np.ones(1, np.float32), 1.0 - ends[0].astype(np.float32)])
    infos = getattr(episode, "infos", None)
    if isinstance(infos, Mapping) and DISCOUNT in infos:
        discount *= _rows(n + 1, "discount", _SHARE, infos[DISCOUNT])
    step_type = np.full(n + 1, StepType.MID, np.int8)
    step_type[0], step_type[-1] = StepType.FIRST, StepType.LAST
    first = np.zeros(1, np.float32)
    return Stream(
        TimeStep(
            observation,
            reward=np.concatenate([first, rewards]),
            discount=discount,
            step_type=step_type,
        ),
        tree.map_structure(lambda x: np.concatenate([np.zeros_like(x[:1]), x]), action),
    )


def _rows(count: int, name: str, space: gym.Space, value: Any) -> np.ndarray:
    """Returns `count` elements of a space, [count, ...], in its dtype."""
    given = np.asarray(value)
    if len(given) != count:
        why = ": the last one, which the last step led to, is missing" if name[0] == "o" else ""
        raise ValueError(f"has {len(given)} rows of {name} instead of {count}{why}")
    base.check_shape(name, space, given, (count,))
    with np.errstate(over="ignore"):
        array = given.astype(space.dtype)
    if array.dtype.kind in "biu" and (array != given).any():
        raise ValueError(f"has {name} of {given.dtype}, which {space} cannot hold")
    low, high = (np.broadcast_to(limit, array.shape) for limit in limits(space))
    with np.errstate(invalid="ignore"):
        good = (array >= low) & (array <= high)
    if array.dtype.kind == "f":
        good &= np.isfinite(array)
    if not good.all():
        place = tuple(map(int, np.argwhere(~good)[0]))
        if not np.isfinite(array[place]):
            raise ValueError(f"has {name} {array[place]} at step {place[0]}: it must be finite")
        raise ValueError(
            f"has {name} {array[place]} at step {place[0]}, outside of {low[place]} to "
            f"{high[place]}"
        )
    return array


def _inside(name: str, space: gym.Space, action: np.ndarray) -> np.ndarray:
    """Returns actions of a box a little inside of it.

    At the edge, where controls saturate, squashed Gaussians are far out: a few such actions would
    draw the policy there from what was done otherwise.
    """
    if not isinstance(space, gym.spaces.Box):
        return action
    centre, half = space.high / 2 + space.low / 2, space.high / 2 - space.low / 2
    inside = np.clip(action, centre - _INSIDE * half, centre + _INSIDE * half)
    return inside.astype(action.dtype)


def _with_history(stream: Stream, action_space: gym.Space, parts: Collection[str]) -> Stream:
    """Adds what an agent sees of the past to the rows of an episode."""
    timestep, count = stream.timestep, len(stream.timestep.reward)
    is_first = timestep.step_type == StepType.FIRST
    seen = History(action_space, count, parts).before(is_first, stream.action, timestep.reward)
    if "time_in_episode" in seen:
        seen["time_in_episode"] = np.arange(count, dtype=np.int32)
    observation = {"observation": timestep.observation, **seen}
    return stream._replace(timestep=timestep._replace(observation=observation))


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Names the episode in an error."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{where} {error}.") from error
