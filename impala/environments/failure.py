"""How an environment failed: what it raised, and where in its own code."""

import pathlib
import sysconfig
import traceback

import gymnasium
import numpy

_HERE = pathlib.Path(__file__).parent.parent
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib"))
_FRAMEWORK = (f"{_HERE}/", *(f"{path}/" for m in (gymnasium, numpy) for path in m.__path__))


class EnvironmentFailed(RuntimeError):
    """An environment has raised an exception, or given values that no agent can use.

    Args:
      message: for people: which environment, when and why.
      error: the type and text of what it raised.
      where: as of `where_raised`.
    """

    def __init__(self, message: str, error: str, where: str) -> None:
        super().__init__(message)
        self.error, self.where = error, where


def where_raised(error: BaseException) -> str:
    """Returns FILE:LINE, in FUNCTION: the last frame of an exception that is in a user's file.

    That is the last one outside of installed packages, or else outside of Gymnasium and this one;
    empty if there is none.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_FRAMEWORK)]
    own = [frame for frame in outside if not frame.filename.startswith(_LIBRARIES)]
    for frame in (own or outside)[-1:]:
        return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return ""
