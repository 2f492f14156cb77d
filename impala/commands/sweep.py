"""`impala sweep`: tries many settings, on this host or a Ray cluster."""

import dataclasses
import functools
import importlib.util
import logging
import pathlib
from typing import TYPE_CHECKING, Annotated, TextIO

from tyro.conf import Positional, arg

from impala.commands.flags import STOPPED
from impala.config import layers
from impala.config.values import OptionError
from impala.logdir import atomic, directory

if TYPE_CHECKING:
    from impala.sweeps import description

_COPY = "sweep.yaml"  # of the file, in the output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """Tries many settings: grid, random, Optuna, ASHA, population-based training.

    Ray Tune starts each trial as `impala train` with settings of its own. What a sweep's file says
    is on the page docs/sweeps.md. Exit status: 0 done, 1 if no trial could be scored, 2 wrong
    usage, 75 if it was stopped before its end (the same command goes on with it).
    """

    file: Positional[Annotated[pathlib.Path, arg(metavar="FILE.yaml")]]
    """Which settings are searched, and how."""
    output: pathlib.Path | None = None
    """Directory of the trials and results; None: sweeps/NAME of NAME.yaml. In a cluster, on a file
    system that all hosts share."""
    address: str | None = None
    """Address of a Ray cluster, HOST:6379, or auto; None: RAY_ADDRESS, or only this host.
    """


def sweep(command: Sweep) -> int:
    """Runs a sweep, or goes on with it. Returns the exit status."""
    from impala.sweeps import description

    described = description.read(command.file)
    output = (command.output or pathlib.Path("sweeps", command.file.stem)).resolve()
    if importlib.util.find_spec("ray") is None:
        raise OptionError(
            "impala sweep needs Ray Tune, which this Python does not have: "
            'pip install "impala-rl[tune]"'
        )
    logging.getLogger("ray").setLevel(logging.ERROR)
    with _locked(output):
        _claim(output, command.file, has_begun=(output / description.RAY).exists())
        return _run(described, output, command.address)


def _run(described: "description.Sweep", output: pathlib.Path, address: str | None) -> int:
    from impala.sweeps import results, tuning

    print(f"Sweep of {described.options.preset} in {output}", flush=True)
    found, is_whole = tuning.run(described, output, address, functools.partial(print, flush=True))
    results.write(found, described, output)
    if found:
        print(f"\n{results.table(found, described)}\n")
        print(f"Best: impala evaluate {output}/best; all: {output}/results.csv, results.png")
        print(f"On a page: impala report {output}/trials/*")
    if not is_whole:
        print("Stopped before its end. The same command goes on with the sweep.")
        return STOPPED
    return 0 if found else 1


def _locked(output: pathlib.Path) -> TextIO:
    """Makes the output, and locks it until the returned file is closed.

    Raises:
      OptionError: another command has locked it, or it cannot be locked or written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        return directory.lock(output, "impala sweep", "--output")
    except directory.LogDirectoryError as error:
        raise OptionError(str(error)) from None
    except OSError as error:
        raise OptionError(f"{output} cannot be written: {error.strerror}.") from None


def _claim(output: pathlib.Path, file: pathlib.Path, has_begun: bool) -> None:
    """Copies the file into the output, or checks that the sweep that has begun there is the same.

    Raises:
      OptionError: it is another one, or the output cannot be written.
    """
    copy = output / _COPY
    try:
        if not (has_begun and copy.exists()):
            atomic.write(copy, file.read_bytes())
        elif layers.read_yaml(copy) != layers.read_yaml(file):
            raise OptionError(
                f"{output} holds a sweep that {copy} began, and {file} says something else: "
                "give another --output, or move that directory away."
            )
    except OSError as error:
        raise OptionError(f"{output} cannot be written: {error.strerror}.") from None
