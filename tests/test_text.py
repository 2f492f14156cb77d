"""Text in observations: as the words that occur, or as the first characters."""

from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from impala import environments
from impala.config.schema import EnvironmentConfig
from impala.environments import text
from impala.environments.failure import EnvironmentFailed


class Mission(gym.Space[str]):
    """A space of texts that is not Gymnasium's, as MiniGrid's."""

    def __init__(self) -> None:
        super().__init__(dtype=str)


class Told(gym.Env):
    """Observes what it was made with."""

    def __init__(self, said: Any, mission: bool = False) -> None:
        self._said = said
        texts = Mission() if mission else gym.spaces.Text(40, charset="bad fce")
        self.observation_space = gym.spaces.Dict({"a": gym.spaces.Tuple([texts])})
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return {"a": (self._said,)}, {}


def observed(*said: str, characters: int = 0, mission: bool = False) -> np.ndarray:
    """What is observed of texts, one in each row."""
    own = Told("", mission).observation_space
    rows = [text.TextAsNumbers(Told(each, mission), characters).reset()[0]["a"][0] for each in said]
    space = text.as_numbers(own, characters)["a"][0]  # type: ignore[index]
    assert all(space.contains(row) for row in rows)
    return np.stack(rows)


@pytest.mark.parametrize("mission", [False, True])
def test_words_are_told_apart_and_their_order_is_not(mission: bool) -> None:
    same, other, more, none = (
        observed("a bad cab", each, mission=mission)
        for each in ("CAB, bad a", "a bad ace", "a bad cab fed", "")
    )
    np.testing.assert_array_equal(*same)
    assert (other[0] != other[1]).sum() == 4  # two entries of each word
    assert (more[0] <= more[1]).all() and more[1].sum() == 8
    assert not none[1].any()


def test_words_have_the_same_numbers_on_every_host() -> None:
    assert observed("faded")[0].nonzero()[0].tolist() == [27, 137]


def test_characters_are_numbered_in_the_order_of_the_space() -> None:
    """Space is 1, a 2, b 3, c 4, d 5, e 6, f 7; 0 is no character or an unknown one."""
    found = observed("a bad cab", "f!", "", characters=5)
    np.testing.assert_array_equal(found, [[2, 1, 3, 2, 5], [7, 0, 0, 0, 0], [0] * 5])
    first, second = observed("bad", "bae", characters=3, mission=True)
    np.testing.assert_array_equal(second - first, [0, 0, 1])


def test_what_is_no_text_is_refused_by_name() -> None:
    config = EnvironmentConfig(id="test_text:Told", kwargs='{"said": null}')
    with (
        closing(environments.make(config, 2)) as environment,
        pytest.raises(EnvironmentFailed, match=r"None where its space has text, Text\("),
    ):
        environment.reset(0)
