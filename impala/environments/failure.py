"""How an environment failed: what it raised, and where in its own code."""


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
