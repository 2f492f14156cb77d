"""What the commands that play with a checkpoint share: their flags, its agent, its environments."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from impala.components import Allowed
from impala.config import values
from impala.runtime import process
from impala.runtime.logs import log_to_stderr
from impala.schedule import tasks

if TYPE_CHECKING:
    from impala.environments import Environment
    from impala.logdir.player import Player


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayerFlags:
    """Flags that say whose agent plays, and what."""

    logdir: Positional[Annotated[pathlib.Path, arg(metavar="LOGDIR")]]
    """Log directory of a run that has written a checkpoint."""
    checkpoint: str = "newest"
    """Which of its checkpoints: newest, best, a number of updates, or a checkpoint's path."""
    task: int = 0
    """Which of the run's tasks to play, counted from 0."""
    allow: tuple[str, ...] = ()
    """What may be imported if the checkpoint names it, beside installed entry points of the group
    impala.components: each MODULE, for what it defines, or MODULE:ATTRIBUTE."""


def open_player(command: PlayerFlags) -> "Player":
    """Loads TensorFlow, without GPUs, and the agent that plays.

    Raises:
      OptionError: there is no such checkpoint or task.
    """
    from impala.logdir import checkpoint  # Here, so that help loads no Gymnasium.

    log_to_stderr()
    try:
        saved = checkpoint.choose(command.logdir, command.checkpoint)
        tasks.choose(saved.config, command.task)  # What is missing is said before TensorFlow loads.
        process.load_tensorflow(use_gpus=False)
        from impala.logdir.player import Player

        return Player(saved, command.task, Allowed(command.allow))
    except ValueError as error:
        raise values.OptionError(str(error)) from error


def environment_of(
    player: "Player", num_envs: int, render_mode: str | None = None
) -> "Environment":
    """Makes the environments that the agent plays in.

    Raises:
      OptionError: they cannot be made.
    """
    try:
        return player.environment(num_envs, render_mode)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
