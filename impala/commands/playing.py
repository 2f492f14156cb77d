"""What the commands that play with a checkpoint share: flags, agent, environments."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from impala.commands import outputs
from impala.commands.flags import Allow
from impala.config import values
from impala.parts.components import Allowed
from impala.runtime import process
from impala.runtime.logs import log_to_stderr
from impala.schedule import tasks

if TYPE_CHECKING:
    from impala.environments import Environment
    from impala.play.player import Player


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayerFlags:
    """Flags that choose the agent and the task to play."""

    logdir: Positional[Annotated[pathlib.Path, arg(metavar="LOGDIR")]]
    """Log directory of a run that has a checkpoint."""
    checkpoint: str = "newest"
    """Checkpoint to use: newest, best, a number of updates, or a path."""
    task: int = 0
    """Task to play, counted from 0."""
    allow: Allow = ()
    """Code that may be imported if the checkpoint names it, besides installed entry points of the
    group impala.components: MODULE, for what it defines, or MODULE:ATTRIBUTE."""


def open_player(command: PlayerFlags, output: pathlib.Path | None = None) -> "Player":
    """Loads TensorFlow, without GPUs, and the agent of a checkpoint.

    Args:
      command: which one.
      output: a file that is going to be written.

    Raises:
      OptionError: there is no such checkpoint or task, or the file cannot be written.
    """
    from impala.logdir import checkpoint  # here, so that help loads no Gymnasium

    log_to_stderr()
    try:
        saved = checkpoint.choose(command.logdir, command.checkpoint)
        tasks.choose(saved.config, command.task)  # fails before TensorFlow is loaded
        if output is not None:
            outputs.check(output)
        process.load_tensorflow(use_gpus=False)
        from impala.play.player import Player

        return Player(saved, command.task, Allowed(command.allow))
    except ValueError as error:
        raise values.OptionError(str(error)) from error


@contextlib.contextmanager
def played() -> Iterator[None]:
    """Turns a failure of the environment, in the body, into an error of one line.

    Raises:
      OptionError: an environment has failed.
    """
    from impala.environments import EnvironmentFailed
    from impala.runtime.failures import Failure

    try:
        yield
    except EnvironmentFailed as error:
        failure = Failure(error.error, error.where)
        raise values.OptionError(f"An environment has failed: {failure}.") from error


def environment_of(
    player: "Player", num_envs: int, render_mode: str | None = None
) -> "Environment":
    """Returns environments for the agent.

    Raises:
      OptionError: they cannot be made.
    """
    try:
        return player.environment(num_envs, render_mode)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
