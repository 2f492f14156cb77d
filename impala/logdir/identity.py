"""Identifies the experiment in a log directory, and protects it from being continued by another.

A run may be continued for longer, with another learning rate or with other services. With another
environment, seed, algorithm or network it is another experiment, whose telemetry and checkpoints
must not be mixed with the first one's.
"""

import pathlib
import re
from typing import Any

from impala.config import layers, values
from impala.config.schema import Config, PolicyGradientConfig
from impala.logdir import checkpoint
from impala.logdir.directory import LogDirectoryError
from impala.parts import sections
from impala.schedule import tasks

_WITH_VARIABLES = (
    *("teacher.kl_target", "critic.trains", "optimiser.centred"),
    *("sac.value_network", "sac.critic_hidden_sizes", "sac.learn_temperature"),
)
_EXPERIMENT = (
    *("environment", "tasks.environments", "tasks.order", "seed", "algorithm", "phases"),
    *("agent", "objective", "optimiser.name", "teacher.logdirs", "demonstrations"),
)
_MOST_NAMED = 4  # differences in a message
_MOST_CHARACTERS = 40  # of each part of a name


def default(preset: str, config: Config) -> pathlib.Path:
    """Returns the default log directory of a run: runs/PRESET-ENVIRONMENT-seedN.

    The environment is named without its namespace, such as Pong-v5; several tasks are named by
    their number.
    """
    played = config.tasks.environments or (config.environment.id,)
    environment = _word(played[0]) if len(played) == 1 else f"{len(played)}-tasks"
    return pathlib.Path("runs", f"{_word(preset)}-{environment}-seed{config.seed}")


def decides_variables(path: str, config: Config) -> bool:
    """Returns whether a setting decides which variables a loss or an optimiser has."""
    section, _, name = path.partition(".")
    of_policy = isinstance(getattr(config, section, None), PolicyGradientConfig)
    return path in _WITH_VARIABLES or (of_policy and name == "entropy_target")


def differences(logdir: pathlib.Path, config: Config) -> list[str]:
    """Returns how an experiment differs from that of a run, such as "seed: 0 -> 1".

    Settings unknown to the run, because another version began it, are omitted.

    Args:
      logdir: of the run.
      config: of the experiment.

    Raises:
      CheckpointError: neither config.yaml nor a checkpoint can be read.
    """
    stored = _stored(logdir)
    read = values.flatten(values.to_dict(values.from_stored(Config, stored)))
    before = {path: read.get(path, value) for path, value in values.flatten(stored).items()}
    after = values.flatten(values.to_dict(config))
    after = {path: value for path, value in after.items() if _is_of_experiment(path, config)}
    if found := values.differences(before, after):
        return found
    return _differences_of_turns(logdir, values.from_stored(Config, stored), config)


def check(logdir: pathlib.Path, config: Config) -> None:
    """Refuses to continue a run of another experiment.

    Raises:
      LogDirectoryError: names the settings that differ, and the options.
      CheckpointError: as `differences`.
    """
    if not checkpoint.exists(logdir) or not (found := differences(logdir, config)):
        return
    more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    raise LogDirectoryError(
        f"{logdir} holds another experiment ({'; '.join(found[:_MOST_NAMED])}{more}). Give this "
        "one another --logdir, start over with --fresh (the other one is moved aside), or go on "
        "with the changed settings with --change-settings."
    )


def _differences_of_turns(logdir: pathlib.Path, before: Config, after: Config) -> list[str]:
    """Returns how other turns of tasks would rewrite what a run has been trained on."""
    in_turn = after.tasks.order == "sequential" and len(after.tasks.environments) > 1
    if not in_turn or tasks.blocks(before) == tasks.blocks(after):
        return []
    end = min(checkpoint.load(logdir).counters.frames, tasks.total_frames(before))

    def ends(config: Config) -> list[int]:
        return [min(block.end, end) for block in tasks.blocks(config) if block.start < end]

    if ends(before) == ends(after):
        return []
    there, here = values.shown(ends(before)), values.shown(ends(after))
    return [
        f"the tasks' turns, which ended at {there} frames, would have ended at {here}: "
        "--tasks.frames and --tasks.cycles keep them"
    ]


def _stored(logdir: pathlib.Path) -> dict[str, Any]:
    """Returns the settings of a run's last start."""
    try:
        data = layers.read_yaml(logdir / "config.yaml")
    except values.OptionError:
        data = {}
    if not (isinstance(data, dict) and data):
        saved = checkpoint.load(logdir)
        data = {**values.to_dict(saved.config), **saved.own}
    return data


def _is_of_experiment(path: str, config: Config) -> bool:
    roots = (*_EXPERIMENT, *sections.for_actors(config))
    is_within = any(path == root or path.startswith(f"{root}.") for root in roots)
    is_part = is_within or decides_variables(path, config)
    return is_part and not values.is_operational(type(config), path)


def _word(name: str) -> str:
    """Returns the last part of a name, in characters that are safe in shells and file systems."""
    last = re.split(r"[/:]", name.partition("{")[0])[-1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip(".-")[:_MOST_CHARACTERS] or "run"
