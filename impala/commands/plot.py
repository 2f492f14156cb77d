"""`impala plot`: plots learning curves of runs."""

import dataclasses
import pathlib
from typing import Annotated

from tyro.conf import Positional, arg

from impala.commands import outputs
from impala.config import values

_MOST_NAMED = 10  # log directories in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsFlags:
    """The flag of the commands that compare runs."""

    logdirs: Positional[
        Annotated[tuple[pathlib.Path, ...], arg(metavar="LOGDIR [LOGDIR ...]")]
    ] = ()
    """Log directories of runs. Runs that differ only in the seed are one curve."""

    def check(self, command: str) -> None:
        """Raises OptionError, which names runs that are there, if no log directory was given."""
        if not self.logdirs:
            raise values.OptionError(
                f"{command} needs the log directories of runs: impala {command} LOGDIR "
                f"[LOGDIR ...]. {_runs_there()}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot(RunsFlags):
    """Draws learning curves of runs, and forgetting between tasks."""

    output: pathlib.Path = pathlib.Path("plot.png")
    """Output file, in the format of its suffix: .png, .svg, .pdf."""


def plot(command: Plot) -> int:
    """Draws a figure."""
    command.check("plot")
    from impala.analysis import plot

    outputs.check(command.output)
    try:
        with outputs.writing(command.output):
            plot.draw(command.logdirs, command.output)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    print(command.output)
    return 0


def _runs_there() -> str:
    """Returns the log directories that the user may have meant, as text."""
    there = sorted(str(file.parent) for file in pathlib.Path("runs").glob("*/config.yaml"))
    more = f", and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
    return f"There are: {', '.join(there[:_MOST_NAMED])}{more}." if there else "runs has none."
