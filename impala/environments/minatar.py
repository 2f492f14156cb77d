"""MinAtar's games, registered with Gymnasium as MinAtar/<Game>-v1.

Young and Tian 2019, arXiv 1903.03176. The package is an extra. It announces its games in a way that
Gymnasium no longer looks at, so they are registered here.
"""

from typing import Any

import gymnasium as gym
import numpy as np

GAMES = {
    "Asterix": "asterix",
    "Breakout": "breakout",
    "Freeway": "freeway",
    "Seaquest": "seaquest",
    "SpaceInvaders": "space_invaders",
}
"""Name in an id -> name in the package."""

_CELL = 16  # pixels


def register() -> None:
    """Makes the games known to Gymnasium."""
    for name, game in GAMES.items():
        gym.register(
            f"MinAtar/{name}-v1",
            entry_point="impala.environments.minatar:make",
            kwargs={"game": game, "use_minimal_action_set": True},
        )


def make(**kwargs: Any) -> gym.Env:
    """One game, as its authors play it (actions stick with 0.1) unless told otherwise.

    Raises:
      ImportError: MinAtar is not installed.
    """
    from minatar.gym import BaseEnv  # Here, since it loads pandas and SciPy.

    return Picture(BaseEnv(**kwargs))


class Picture(gym.Wrapper):
    """Shows a game as an image that a video can hold, instead of shares of white, cell by cell."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "render_fps": 20}

    def render(self) -> Any:
        cells: Any = self.env.render()  # [10, 10, 3]
        if self.render_mode != "rgb_array":
            return cells
        return (255 * cells).astype(np.uint8).repeat(_CELL, axis=0).repeat(_CELL, axis=1)
