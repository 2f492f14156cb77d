"""Just-in-time rounds: an actor waits for the learner before a round of unrolls, not after it."""

import collections
import time
from collections.abc import Callable

from protos.impala.v1 import learner_pb2 as pb

_ROUNDS = 3  # of which the slowest counts
_MARGIN = 0.1  # of the time that a round takes, for one that takes longer


class JustInTime:
    """Says how long to wait before each round, so that the learner gets it when it needs it.

    Where actors are faster than the learner, unrolls wait for it, and grow old. Receipts say how
    many unrolls are ahead of the next message, and how fast the learner goes through them: so a
    round that takes as long as the last ones may begin as much later as it would wait.

    Args:
      clock: gives seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        """The wait before the round that has begun last."""
        self._clock = clock
        self._began: float | None = None  # that round, before its wait
        self._waited = 0.0  # in it
        self._made: collections.deque[float] = collections.deque(maxlen=_ROUNDS)  # seconds
        self._told: tuple[float, int, float] = (0.0, 0, 0.0)  # when; unrolls ahead; a second

    def begin(self, in_flight: int) -> float:
        """Ends a round and begins the next. Returns the seconds to wait before it.

        Args:
          in_flight: unrolls in messages without a receipt.
        """
        now = self._clock()
        if self._began is not None:
            self._made.append(now - self._began - self._waited)
        told, ahead, speed = self._told
        self.seconds = 0.0
        if self._made and speed > 0.0:
            free = told + (ahead + in_flight) / speed  # when the learner needs more
            self.seconds = max(0.0, free - now - (1.0 + _MARGIN) * max(self._made))
        self._began, self._waited = now, 0.0
        return self.seconds

    def waited(self, seconds: float) -> None:
        """Takes note of a wait for the learner, before or after the round."""
        self._waited += seconds

    def told(self, receipt: pb.Receipt) -> None:
        """Takes note of what a receipt says."""
        self._told = self._clock(), receipt.unrolls_ahead, receipt.unrolls_per_second
