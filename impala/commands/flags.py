"""Flags, addresses and exit statuses that several commands share."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from tyro.conf import Positional, UseAppendAction, arg

from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import Config, Range
from impala.runtime.credentials import SecurityError
from impala.runtime.logs import LogFormat

ADDRESS = "127.0.0.1:50051"
STOPPED = os.EX_TEMPFAIL  # exit status of a stopped run, which the same command resumes
WhenFinished = Literal["exit", "idle"]
NumActors = Annotated[int, Range(1, 256)]
Allow = UseAppendAction[tuple[str, ...]]  # one value, so that what follows it is not taken for one


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingsFlags:
    """Flags of the commands that read the settings of a run."""

    uses_gpus: ClassVar[bool] = False  # of the process itself

    preset: Positional[Annotated[str, arg(metavar="{" + ",".join(PRESETS) + "}")]]
    """Preset to start from: see impala presets; or your own, as MODULE:ATTRIBUTE."""
    config: pathlib.Path | None = None
    """YAML file of settings, which override the preset. Environment variables such as
    IMPALA_OPTIMISER__LEARNING_RATE=3e-4 override these, and flags override all."""
    settings: Annotated[Config, arg(name="")] = dataclasses.field(default_factory=Config)

    @classmethod
    def words(cls, argv: list[str]) -> list[str]:
        """Returns a command line with its abbreviations written out."""
        return argv


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags(SettingsFlags):
    """Flags of the commands that start a run."""

    print_config: bool = False
    """Print the resulting settings as YAML, for --config, and exit."""
    logdir: pathlib.Path | None = None
    """Directory of checkpoints and telemetry, from which a run also resumes. None:
    runs/PRESET-ENVIRONMENT-seedN."""
    fresh: bool = False
    """Start over; an earlier run in the log directory is moved aside."""
    change_settings: bool = False
    """Resume the run in the log directory although what defines the experiment differs:
    environment, tasks and their past turns, seed, algorithm or phases, network, objective,
    optimiser.name, teachers, demonstrations, or what decides which variables there are, such as
    impala.entropy_target. Other settings may change without this flag."""
    empty_replay: bool = False
    """Resume with an empty replay; an earlier one in the log directory is moved aside."""
    init_from: pathlib.Path | None = None
    """Start a new run with the agent of another one, as far as it fits: the log directory of that
    run, or one of its checkpoints. Ignored when a run is resumed."""
    log_format: LogFormat = "text"
    """text, or json: one object per line."""


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Turns errors about addresses and credentials into usage errors."""
    try:
        yield
    except SecurityError as error:
        raise values.OptionError(str(error)) from error
    except OSError as error:
        if error.errno is not None:  # a full disk and its like, not an address
            raise
        raise values.OptionError(str(error)) from error


def next_port(listen: str | None, index: int) -> str | None:
    """Returns the address of one of several processes: each has its own port, except port 0."""
    host, _, port = (listen or "").rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdecimal() and int(port) else listen


def print_config(command: RunFlags) -> int:
    """Prints the settings in force as YAML. Returns the exit status."""
    print(values.to_yaml(command.settings), end="")
    return 0
