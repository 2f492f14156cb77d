"""`impala record`: records a video, or a dataset, of what a checkpoint's agent plays."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np

from impala.commands import outputs
from impala.commands.playing import PlayerFlags, environment_of, open_player, played
from impala.config import values
from impala.config.schema import Range

if TYPE_CHECKING:
    from impala.environments import Environment
    from impala.play.player import Player


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(PlayerFlags):
    """Records an episode played by a checkpoint's agent as a video file, or a dataset of them."""

    output: pathlib.Path | None = None
    """A .gif file; .mp4 needs imageio with its ffmpeg plugin. None: LOGDIR/episode.gif."""
    greedy: bool = False
    """Use the most likely action instead of a sampled one."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of environment and actions."""
    max_frames: Annotated[int, Range(1)] = 5_000
    """Largest number of images, after which the recording ends."""
    dataset: str = ""
    """Record no video but a dataset of this name, such as catch/mine-v0, with Minari (extra:
    minari), from which demonstrations.source learns."""
    episodes: Annotated[int, Range(1)] = 100
    """Episodes of the dataset."""


def record(command: Record) -> int:
    """Plays an episode and writes the video, or episodes and writes a dataset."""
    _check(command)
    if command.dataset:
        return _dataset(command)
    from impala.play import video

    output = command.output or command.logdir / "episode.gif"
    try:
        video.check(output)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    player = open_player(command, output)
    rewards: list[float] = []
    with (
        played(),
        contextlib.closing(environment_of(player, 1, "rgb_array")) as environment,
        outputs.writing(output),
        outputs.replacing(output) as file,
    ):
        video.write(file, _images(player, environment, command, rewards))
    print(f"{output}: {len(rewards)} images, return {sum(rewards):.2f}")
    return 0


def _check(command: Record) -> None:
    """Refuses flags of the other kind of recording."""
    kind, given = "a dataset", {"--episodes": command.episodes != Record.episodes}
    if command.dataset:
        given = {
            "--output": command.output is not None,
            "--max-frames": command.max_frames != Record.max_frames,
        }
        kind = "a video"
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise values.OptionError(
            f"{flag} is for {kind}: leave it out, or {'leave out' if command.dataset else 'give'} "
            "--dataset."
        )


def _dataset(command: Record) -> int:
    player = open_player(command)
    from impala.play import dataset

    try:
        with played():
            returns = dataset.record(
                player, command.dataset, command.episodes, command.greedy, command.seed
            )
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    print(f"{command.dataset}: {len(returns)} episodes, mean return {np.mean(returns):.2f}")
    return 0


def _images(
    player: "Player", environment: "Environment", command: Record, rewards: list[float]
) -> Iterator[np.ndarray]:
    """Yields the image of each time step of an episode, and appends its reward to `rewards`."""
    from gymnasium.error import DependencyNotInstalled

    from impala.play import evaluation
    from impala.types import StepType

    for step in evaluation.play(environment, player.agent, command.greedy, command.seed):
        rewards.append(float(step.timestep.reward[0]))
        try:
            picture = environment.render().copy()
        except NotImplementedError as error:  # as Gymnasium's, where a class defines none
            raise values.OptionError(
                f"{player.task} cannot be recorded: it has no render. Define render(self), which "
                "returns uint8 [height, width, 3]."
            ) from error
        except Exception as error:
            if "OpenGL" in str(error):
                raise values.OptionError(
                    f"{player.task} cannot be recorded, as nothing draws here: {error}. MuJoCo "
                    "takes MUJOCO_GL=egl with a GPU's driver, and a display otherwise."
                ) from error
            if isinstance(error, DependencyNotInstalled | ImportError | ValueError):
                raise values.OptionError(f"{player.task} cannot be recorded: {error}") from error
            raise
        yield picture
        if step.timestep.step_type[0] == StepType.LAST or len(rewards) == command.max_frames:
            break
