"""The settings that a learner sends to its actors, as JSON.

They are those of everything that actors build. `agreed` is the text by which a restarted learner
knows whether the experience of running actors is still valid. It leaves out defaults, so that a new
version with more settings changes nothing, and settings of how actors and evaluators work, so that
running ones continue.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from impala.config import values
from impala.config.schema import Config, EvaluatorConfig
from impala.parts import sections
from impala.schedule import tasks
from impala.schedule.tasks import Task

# Settings that are not told, but that actors have to know of where they are not at their default.
_PACING = {"mix.lag_budget", "mix.exact_lag", "deterministic"}


def for_actors(config: Config, played: Sequence[Task]) -> str:
    """Returns the settings for actors, a JSON object as `JoinReply` in learner.proto describes.

    Args:
      config: the run's configuration.
      played: its tasks.
    """
    parts = sections.for_actors(config)
    chosen: list[tuple[str, Any]] = [("environment", task.environment) for task in played]
    chosen += [(name, getattr(config, name)) for name in ("agent", "evaluator", *parts)]
    needs = {
        f"{section}.{path}"
        for section, of_section in chosen
        for path in values.settings_that_matter(of_section)
    }
    needs |= values.changed(config).keys() & _PACING
    return json.dumps(
        {
            "tasks": [
                {"name": task.name, "environment": values.to_dict(task.environment)}
                for task in played
            ],
            "agent": values.to_dict(config.agent),
            "actor": values.to_dict(config.actor),
            "evaluator": values.to_dict(_evaluator(config)),
            "parts": parts,
            "needs": sorted(needs),
        }
    )


def agreed(config: Config, played: Sequence[Task]) -> str:
    """Returns the settings in `for_actors` that experience depends on, as one line of JSON.

    These are the non-default settings of tasks, agent and custom parts that change what is
    played or learned, and whether unrolls need permits.
    """
    matter = values.settings_that_matter
    told: dict[str, Any] = {
        "tasks": [(task.name, matter(task.environment)) for task in played],
        "agent": matter(config.agent),
    }
    told |= {name: matter(getattr(config, name)) for name in sections.for_actors(config)}
    if config.is_paced:
        told["is_paced"] = True
    return json.dumps(told, sort_keys=True)


def _evaluator(config: Config) -> EvaluatorConfig:
    """Returns the evaluator's settings, with 0 replaced by the number of frames it stands for."""
    every_frames = tasks.evaluation_frames(config)
    return dataclasses.replace(config.evaluator, every_frames=every_frames)
