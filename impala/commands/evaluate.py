"""`impala evaluate`: plays episodes with a checkpoint's agent."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from impala.config import values
from impala.config.schema import Range
from impala.runtime import process
from impala.runtime.logs import log_to_stderr
from impala.runtime.printable import printable

if TYPE_CHECKING:
    from impala.logdir.player import Player


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Plays episodes with a checkpoint's agent and tells their returns."""

    logdir: Positional[Annotated[pathlib.Path, arg(metavar="LOGDIR")]]
    """Log directory of a run that has written a checkpoint."""
    episodes: Annotated[int, Range(1)] = 100
    """Episodes to play."""
    task: int = 0
    """Which of the run's tasks to play, counted from 0."""
    greedy: bool = False
    """The most likely action instead of a sampled one."""
    num_envs: Annotated[int, Range(1, 4096)] = 32
    """Environments that step together (never more than episodes)."""
    json: pathlib.Path | None = None
    """Also write the summary and every episode to this file."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of environments and actions."""


def evaluate(command: Evaluate) -> int:
    """Plays episodes and prints a table."""
    import rich.console
    import rich.table
    import rich.text

    num_envs = min(command.num_envs, command.episodes)
    with open_player(command.logdir, command.task, num_envs, render_mode=None) as player:
        from impala import evaluation

        episodes = evaluation.play_episodes(
            player.environment,
            player.agent,
            command.episodes,
            command.greedy,
            command.seed,
        )
    summary = evaluation.summary(episodes)
    print(
        f"{player.task}: {summary.episodes} episodes, "
        f"{'greedy' if command.greedy else 'sampled'}, after {player.counters.frames:,} frames"
    )
    table = rich.table.Table()
    for column in ("", "mean", "std", "min", "max"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row(
        "return",
        *[f"{summary.return_mean:.2f}", f"{summary.return_std:.2f}"],
        *[f"{summary.return_min:.2f}", f"{summary.return_max:.2f}"],
    )
    table.add_row(
        "length",
        *[f"{summary.length_mean:.1f}", f"{summary.length_std:.1f}"],
        *[f"{summary.length_min:d}", f"{summary.length_max:d}"],
    )
    for name, mean in summary.info.items():
        table.add_row(rich.text.Text(f"{printable(name)} (info)"), f"{mean:.2f}")
    rich.console.Console().print(table)
    if command.json is not None:
        result = {
            "environment": player.task,
            "logdir": str(command.logdir),
            "frames_trained": player.counters.frames,
            "updates": player.counters.updates,
            "greedy": command.greedy,
            "seed": command.seed,
            "summary": summary._asdict(),
            "episodes": [episode._asdict() for episode in episodes],
        }
        command.json.parent.mkdir(parents=True, exist_ok=True)
        command.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


@contextlib.contextmanager
def open_player(
    logdir: pathlib.Path, task: int, num_envs: int, render_mode: str | None
) -> Iterator["Player"]:
    """Who plays for `evaluate` and `record`."""
    log_to_stderr()
    process.load_tensorflow(use_gpus=False)
    from impala.logdir.player import Player

    try:
        player = Player(logdir, task, num_envs, render_mode)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    with contextlib.closing(player):
        yield player
