"""What benchmarks refuse to measure."""

import pytest

from benchmarks import actor
from benchmarks.setting import CONFIG, Options


def test_an_actor_whose_environments_have_threads_is_not_measured() -> None:
    """Their time would count as messages'."""
    with pytest.raises(SystemExit, match=r"atari, ALE/Pong-v5, steps in threads.* cartpole"):
        actor.measure(CONFIG, Options(seconds=1.0, preset="atari"))
