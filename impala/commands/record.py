"""`impala record`: a video of an episode that a checkpoint's agent plays."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np
from tyro.conf import Positional, arg

from impala.commands.evaluate import open_player
from impala.config import values
from impala.config.schema import Range

if TYPE_CHECKING:
    from impala.logdir.player import Player


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Records an episode that a checkpoint's agent plays, as a video file."""

    logdir: Positional[Annotated[pathlib.Path, arg(metavar="LOGDIR")]]
    """Log directory of a run that has written a checkpoint."""
    output: pathlib.Path | None = None
    """A .gif file; .mp4 needs imageio with its ffmpeg plugin. None: LOGDIR/episode.gif."""
    task: int = 0
    """Which of the run's tasks to play, counted from 0."""
    greedy: bool = False
    """The most likely action instead of a sampled one."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of environment and actions."""
    max_frames: Annotated[int, Range(1)] = 5_000
    """Images after which the recording ends, even if the episode does not."""


def record(command: Record) -> int:
    """Plays an episode and writes what it looked like."""
    from impala.logdir import video

    output = command.output or command.logdir / "episode.gif"
    try:
        video.check(output)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    with open_player(command.logdir, command.task, num_envs=1, render_mode="rgb_array") as player:
        rewards: list[float] = []
        video.write(output, _images(player, command, rewards))
    print(f"{output}: {len(rewards)} images, return {sum(rewards):.2f}")
    return 0


def _images(player: "Player", command: Record, rewards: list[float]) -> Iterator[np.ndarray]:
    """Yields what each time step of an episode looks like, and notes its reward."""
    from impala import evaluation
    from impala.types import StepType

    for step in evaluation.play(player.environment, player.agent, command.greedy, command.seed):
        rewards.append(float(step.timestep.reward[0]))
        yield player.environment.render().copy()
        if step.timestep.step_type[0] == StepType.LAST or len(rewards) == command.max_frames:
            break
