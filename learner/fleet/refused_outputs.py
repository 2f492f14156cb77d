"""Refused outputs: messages refused for numbers that the actor's network computed.

With bad variables every honest actor sends such numbers, so nobody is blamed before the guard has
tried the learner's own network. Until then the messages are kept here.
"""

import collections
from typing import NamedTuple

_MOST = 256  # kept; beyond it, the oldest are forgotten


class RefusedOutput(NamedTuple):
    """A refused message."""

    actor: str
    why: str  # as in its receipt
    version: int | None  # of the parameters that acted; None if they were an earlier learner's


class RefusedOutputs:
    """Refused outputs that are not judged yet. Every method is thread-safe."""

    def __init__(self) -> None:
        """Starts empty."""
        self._waiting: collections.deque[RefusedOutput] = collections.deque(maxlen=_MOST)

    def add(self, refused: RefusedOutput) -> None:
        """Adds a refused message."""
        self._waiting.append(refused)

    def take(self) -> list[RefusedOutput]:
        """Removes and returns all, the oldest first."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]
