"""`impala plot`: the curves of runs."""

import dataclasses
import pathlib
from typing import Annotated

from tyro.conf import Positional, arg

from impala.config import values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """Draws the curves of runs, and what was forgotten between tasks."""

    logdirs: Positional[Annotated[tuple[pathlib.Path, ...], arg(metavar="LOGDIR [LOGDIR ...]")]]
    """Log directories of runs."""
    output: pathlib.Path = pathlib.Path("plot.png")
    """A file whose ending says what it is: .png, .svg, .pdf."""


def plot(command: Plot) -> int:
    """Draws a figure."""
    from impala.logdir import plot

    try:
        plot.draw(command.logdirs, command.output)
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    print(command.output)
    return 0
