"""The next minor version of impala, made up: it has settings that this one does not know.

`python newer.py write LOGDIR JSON` saves a checkpoint with the settings of JSON;
`read LOGDIR` prints the newest checkpoint's settings as JSON, and what it does not know of them;
`impala ARGUMENTS` is that version's command line.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from google.protobuf.message import Message

from impala.config import schema
from impala.runtime import installation

OPERATIONAL = schema.OPERATIONAL


@dataclasses.dataclass(frozen=True)
class AgentConfig(schema.AgentConfig):
    """With one more setting of what is learned."""

    layer_norm: bool = False
    """Normalise each layer."""


@dataclasses.dataclass(frozen=True)
class LearnerConfig(schema.LearnerConfig):
    """With one more setting that is only operational."""

    tidy_seconds: Annotated[float, OPERATIONAL] = 60.0
    """Seconds between two tidyings."""
    log_seconds: Annotated[float, OPERATIONAL] = 5.0
    """As before, but of any length."""


@dataclasses.dataclass(frozen=True)
class CuriosityConfig:
    """A section that is new altogether."""

    cost: float = 0.0
    """Weight of it; 0 is off."""
    sizes: tuple[int, ...] = ()
    """Widths of its layers."""


@dataclasses.dataclass(frozen=True)
class Config(schema.Config):
    """The configuration of that version."""

    agent: AgentConfig = AgentConfig()
    learner: LearnerConfig = LearnerConfig()
    curiosity: CuriosityConfig = CuriosityConfig()


def become() -> None:
    """Makes this process one of that version. Nothing else of impala may be imported before."""
    for new in (AgentConfig, LearnerConfig, Config):
        setattr(schema, new.__name__, new)
    installation.VERSION = "9.9"
    from impala.logdir import checkpoint

    checkpoint.SCHEMA = 1, 1
    from protos import codec
    from protos import settings as wire

    codec.PROTOCOL_VERSION.minor += 1
    fill = wire.fill

    def fill_more(message: Message, settings: Mapping[str, Any], path: str = "") -> None:
        """As that version's message would be filled: with a field more, whose number is 100."""
        known = {name: value for name, value in settings.items() if name != "layer_norm"}
        if known != settings:
            message.MergeFromString(bytes([0xA0, 0x06, settings["layer_norm"]]))
        fill(message, known, path)

    wire.fill = fill_more


def write(logdir: str, settings: str) -> None:
    """Saves a checkpoint of Catch with these settings."""
    from impala.config import values
    from impala.logdir import checkpoint

    config = values.overlay(Config(), {"environment": {"id": "Catch"}, "seed": 7})
    config = values.overlay(config, json.loads(settings))
    counters = checkpoint.Counters(updates=1)
    checkpoint.save(pathlib.Path(logdir), checkpoint.Checkpoint(config, counters, {}, {}), keep=3)


def read(logdir: str) -> None:
    """Prints what the newest checkpoint says."""
    from impala.config import values
    from impala.logdir import checkpoint

    saved: Any = checkpoint.load(pathlib.Path(logdir))
    print(json.dumps({"config": values.to_dict(saved.config), "unknown": dict(saved.unknown)}))


def impala(*arguments: str) -> None:
    """Runs the command line."""
    from impala.commands.main import main

    sys.exit(main(arguments))


if __name__ == "__main__":
    become()
    commands: dict[str, Callable[..., None]] = {"write": write, "read": read, "impala": impala}
    commands[sys.argv[1]](*sys.argv[2:])
