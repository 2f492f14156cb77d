"""`impala plot`: plots learning curves of runs."""

import dataclasses
import pathlib
from typing import Annotated

from tyro.conf import Positional, arg

from impala.commands import outputs
from impala.config import values

_MOST_NAMED = 10  # log directories in a message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Draws learning curves of runs, and forgetting between tasks."""

    logdirs: Positional[
        Annotated[tuple[pathlib.Path, ...], arg(metavar="LOGDIR [LOGDIR ...]")]
    ] = ()
    """Log directories of runs. Runs that differ only in the seed are one curve."""
    output: pathlib.Path = pathlib.Path("plot.png")
    """Output file, in the format of its suffix: .png, .svg, .pdf."""


def plot(command: Plot) -> int:
    """Draws a figure."""
    if not command.logdirs:
        raise values.OptionError(
            "plot needs the log directories of runs: impala plot LOGDIR [LOGDIR ...]. "
            f"{runs_there()}"
        )
    from impala.analysis import plot

    outputs.check(command.output)
    try:
        with outputs.writing(command.output):
            plot.draw(command.logdirs, command.output)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    print(command.output)
    return 0


def runs_there() -> str:
    """Returns the log directories that the user may have meant, as text."""
    there = sorted(str(file.parent) for file in pathlib.Path("runs").glob("*/config.yaml"))
    more = f", and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
    return f"There are: {', '.join(there[:_MOST_NAMED])}{more}." if there else "runs has none."
