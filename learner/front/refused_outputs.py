"""Refused outputs: messages refused for numbers that the actor's network computed.

Bad variables make every honest actor send such numbers, so nobody is blamed before the guard has
looked at the learner's own network; until then they wait here.
"""

import collections
from typing import NamedTuple

_MOST = 256  # that wait; beyond that the oldest are forgotten


class RefusedOutput(NamedTuple):
    """A message that was refused."""

    actor: str
    why: str  # as its receipt says it
    version: int  # of the parameters that acted; 0 if they were an earlier learner's


class RefusedOutputs:
    """Those that wait to be judged. Every method is thread-safe."""

    def __init__(self) -> None:
        """Starts empty."""
        self._waiting: collections.deque[RefusedOutput] = collections.deque(maxlen=_MOST)

    def add(self, refused: RefusedOutput) -> None:
        """Takes note of one."""
        self._waiting.append(refused)

    def take(self) -> list[RefusedOutput]:
        """Returns those that wait, the oldest first; they wait no more."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]
