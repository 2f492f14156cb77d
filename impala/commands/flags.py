"""What several commands share: flags of a run, addresses, exit statuses."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, arg

from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import Config, Range
from impala.runtime.credentials import SecurityError
from impala.runtime.logs import LogFormat

ADDRESS = "127.0.0.1:50051"
STOPPED = os.EX_TEMPFAIL  # exit status of a run that was stopped: the same command goes on
WhenFinished = Literal["exit", "idle"]
Port = Annotated[int, Range(0, 65535)]
NumActors = Annotated[int, Range(1, 256)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of the commands that start a run."""

    uses_gpus: ClassVar[bool] = False  # of the process itself

    preset: Positional[Annotated[str, arg(metavar="{" + ",".join(PRESETS) + "}")]]
    """What the settings below start from: see impala presets; or one of your own, as
    MODULE:ATTRIBUTE."""
    config: pathlib.Path | None = None
    """YAML file of settings, put over the preset. Over it come environment variables such as
    IMPALA_OPTIMISER__LEARNING_RATE=3e-4, and over them the flags."""
    print_config: bool = False
    """Print the settings in force as YAML, for --config, and do nothing else."""
    logdir: pathlib.Path | None = None
    """Where checkpoints and telemetry go, and where a run is resumed from. None:
    runs/PRESET-ENVIRONMENT-seedN."""
    fresh: bool = False
    """Start over: an earlier run in the log directory is moved aside."""
    change_settings: bool = False
    """Go on with the run in the log directory although its environment, seed, algorithm, network or
    objective was another one. Other settings may change without this flag."""
    empty_replay: bool = False
    """Go on with an empty replay: an earlier one in the log directory is moved aside."""
    init_from: pathlib.Path | None = None
    """Start a new run with the agent of another one, as far as it fits: the log directory of that
    run, or one of its checkpoints. A run that is resumed does not look at it."""
    log_format: LogFormat = "text"
    """text for people, or json: an object in each line."""
    settings: Annotated[Config, arg(name="")] = dataclasses.field(default_factory=Config)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Makes usage errors of what is wrong with addresses and credentials."""
    try:
        yield
    except SecurityError as error:
        raise values.OptionError(str(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise values.OptionError(str(error)) from error


def next_port(listen: str | None, index: int) -> str | None:
    """The address of one process of several: each has its own port, unless any will do."""
    host, _, port = (listen or "").rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdecimal() and int(port) else listen


def print_config(command: RunFlags) -> int:
    """Prints the settings in force as YAML. Returns the exit status."""
    print(values.to_yaml(command.settings), end="")
    return 0
