"""`impala evaluate`: plays episodes with a checkpoint's agent."""

import contextlib
import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Annotated

from impala.commands import outputs
from impala.commands.playing import PlayerFlags, environment_of, open_player, played
from impala.config.schema import Range
from impala.config.values import OptionError
from impala.runtime.printable import printable

if TYPE_CHECKING:
    from impala.play.evaluation import FirstEpisodes
    from impala.play.player import Player
    from impala.types import Episode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(PlayerFlags):
    """Plays episodes with a checkpoint's agent and prints their returns."""

    episodes: Annotated[int, Range(1)] = 100
    """Episodes to play."""
    greedy: bool = False
    """Use the most likely action instead of a sampled one."""
    num_envs: Annotated[int, Range(1, 4096)] = 32
    """Environments that step together (never more than episodes)."""
    json: pathlib.Path | None = None
    """Also write the summary and every episode to this file."""
    steps: Annotated[int, Range(0)] = 0
    """Number of environments of which the file also has reward and infos of each step of the first
    episode, null where there was no finite number; at most num_envs and episodes."""
    max_steps: Annotated[int, Range(0)] = 0
    """Agent steps after which an episode is cut off, and what follows counts as the next one; 0:
    as many as in the evaluations of the run (evaluator.max_steps)."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of environments and actions."""


def play(
    command: Evaluate, player: "Player", first: "FirstEpisodes | None" = None
) -> "list[Episode]":
    """Plays episodes.

    Args:
      command: how many, and how.
      player: has the agent.
      first: keeps the steps of first episodes; None: nothing is kept.

    Raises:
      OptionError: the environments cannot be made.
    """
    from impala.play import evaluation

    num_envs = min(command.num_envs, command.episodes)
    with contextlib.closing(environment_of(player, num_envs)) as environment:
        return evaluation.play_episodes(
            *(environment, player.agent, command.episodes, command.greedy, command.seed),
            first=first,
            max_steps=command.max_steps or player.config.evaluator.max_steps,
        )


def evaluate(command: Evaluate) -> int:
    """Plays episodes and prints a table."""
    import rich.console
    import rich.table
    import rich.text

    num_envs = min(command.num_envs, command.episodes)
    if command.steps > num_envs:
        raise OptionError(
            f"steps is {command.steps}; it must be at most {num_envs}, the smaller of num_envs and "
            "episodes."
        )
    if command.steps and command.json is None:
        raise OptionError("--steps needs --json, the file that the steps are written to.")
    player = open_player(command, command.json)
    from impala.play import evaluation

    with played():
        episodes = play(command, player, first := evaluation.FirstEpisodes(command.steps))
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
    table.add_row("reward per step", f"{summary.reward_per_step:.4f}")
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
            "steps": first.steps,
        }
        outputs.write(command.json, f"{json.dumps(result, indent=2)}\n".encode())
    return 0
