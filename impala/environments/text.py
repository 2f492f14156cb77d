"""Text in observations as numbers of a fixed size: which words occur, or the first characters.

Words are hashed, so that no vocabulary has to be known: Weinberger et al. 2009, arXiv 0902.2206.
"""

import functools
import hashlib
import re
import string
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from impala.environments.spaces import leaves
from impala.types import Nest

_ENTRIES = 256  # of a bag of words: a byte of a word's hash is the number of one


class TextAsNumbers(gym.ObservationWrapper):
    """An environment whose texts are observed as numbers, see `as_numbers`.

    Args:
      environment: a single one.
      characters: as for `as_numbers`.
    """

    def __init__(self, environment: gym.Env, characters: int) -> None:
        super().__init__(environment)
        self._characters = characters
        self.observation_space = as_numbers(environment.observation_space, characters)

    def observation(self, observation: Any) -> Nest:
        return self._numbers(self.env.observation_space, observation)

    def _numbers(self, space: gym.Space, value: Any) -> Nest:
        """Returns an observation with its texts as numbers; where it is not as its space says, that
        is refused elsewhere.
        """
        match space, value:
            case gym.spaces.Dict(), Mapping():
                parts = space.spaces
                return {
                    key: self._numbers(parts[key], part) if key in parts else part
                    for key, part in value.items()
                }
            case gym.spaces.Tuple(), (tuple() | list()) if len(value) == len(space.spaces):
                return tuple(map(self._numbers, space.spaces, value))
        if not _is_text(space):
            return value
        if not isinstance(value, str):
            raise ValueError(f"the observation has {value!r} where its space has text, {space}")
        if not self._characters:
            return _words(value)
        numbers = np.zeros(self._characters, np.int64)
        alphabet = _alphabet(space)
        for i, character in enumerate(value[: self._characters]):
            numbers[i] = alphabet.get(character, 0)
        return numbers


def as_numbers(space: gym.Space, characters: int) -> gym.Space:
    """Returns the space of observations whose texts are seen as numbers.

    Args:
      space: of one environment, with texts or without.
      characters: how many characters of a text are seen, MultiDiscrete: 0 where there is none or an
        unknown one, else 1 + its place among the space's characters (Python's printable ones, if it
        does not say which). 0: which words occur, MultiBinary: each sets two of 256 entries.
    """
    match space:
        case gym.spaces.Dict():
            return gym.spaces.Dict(
                {key: as_numbers(part, characters) for key, part in space.spaces.items()}
            )
        case gym.spaces.Tuple():
            return gym.spaces.Tuple([as_numbers(part, characters) for part in space.spaces])
    if not _is_text(space):
        return space
    if not characters:
        return gym.spaces.MultiBinary(_ENTRIES)
    return gym.spaces.MultiDiscrete([len(_alphabet(space)) + 1] * characters)


def has_text(space: gym.Space) -> bool:
    """Returns whether there is a text in an observation."""
    return any(_is_text(leaf) for _, leaf in leaves(space))


def _is_text(space: gym.Space) -> bool:
    """Returns whether elements are of `str`: those of Text, and of MiniGrid's missions."""
    return space.dtype is not None and space.dtype.kind == "U"


def _alphabet(space: gym.Space) -> dict[str, int]:
    characters = getattr(space, "character_set", string.printable)
    return {character: 1 + i for i, character in enumerate(sorted(characters))}


@functools.lru_cache(maxsize=10_000)  # an episode's text is often the same in each of its steps
def _words(text: str) -> np.ndarray:
    """Returns 1 in two entries for each word, so that hardly any two words look the same."""
    bag = np.zeros(_ENTRIES, np.int8)
    for word in re.findall(r"\w+", text.lower()):
        bag[list(hashlib.blake2b(word.encode(), digest_size=2).digest())] = 1
    bag.flags.writeable = False
    return bag
