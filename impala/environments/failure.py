"""How an environment failed: what it raised, and where in its own code."""

import builtins
import logging
from typing import Any

from impala.parts.components import described, where_defined, where_raised

_log = logging.getLogger(__name__)


class EnvironmentFailed(RuntimeError):
    """An environment has raised an exception, or given values that no agent can use.

    Args:
      message: for people: which environment, when and why.
      error: the type and text of what it raised.
      where: as of `components.where_raised`.
    """

    def __init__(self, message: str, error: str, where: str) -> None:
        super().__init__(message)
        self.error, self.where = error, where

    @property
    def is_mistake(self) -> bool:
        """Whether it is a fault of the environment's code, not of what the code needs."""
        kind = getattr(builtins, self.error.partition(":")[0], OSError)
        return issubclass(kind, Exception) and not issubclass(kind, OSError | MemoryError)


def failure_of(
    error: BaseException, name: str, code: Any = None, method: str = "step"
) -> tuple[str, str]:
    """Returns what an environment raised, as TYPE: TEXT, and where.

    If it was not raised in a user's file, because the environment has not raised it but returned
    what cannot be used, the text begins with the name, and the place is that of the method.

    Args:
      error: what was raised.
      name: of the environment.
      code: the user's environment; None if it is not known.
      method: of the environment, which was called.
    """
    if isinstance(error, EnvironmentFailed):
        return error.error, error.where
    where = where_raised(error)
    text = f"{error}" if where else f"{name}: {error}"
    return f"{type(error).__name__}: {text}", where or where_defined(code, method)


def close(environment: Any, name: str) -> None:
    """Closes an environment; an error is only logged, since it would hide why it is closed.

    Args:
      environment: of any kind.
      name: of the environment, for the log.
    """
    try:
        environment.close()
    except Exception as error:
        _log.warning("%s could not be closed: %s", name, described(error))
