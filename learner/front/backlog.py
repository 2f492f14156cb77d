"""The backlog: what has come and is in no batch yet, and how fast unrolls go into batches.

Receipts tell actors both, so that they can begin a round just in time (`actor.just_in_time`).
"""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

from learner.fleet.accounts import Accounts
from protos.impala.v1 import learner_pb2 as pb

_SAMPLE_SECONDS = 0.2
_SAMPLES = 16  # of which the first and the last tell the speed
_PAUSE_SECONDS = 3.0  # without a receipt: the learner has compiled, or stood still, and goes on


class Backlog:
    """What is waiting for the learner, by the accounts. Of one event loop.

    Args:
      accounts: count what was received, and what was learned from or dropped.
      in_batches: unrolls that are in batches, but not settled, while the learner does not wait.
      clock: monotonic, in seconds.
    """

    def __init__(
        self, accounts: Accounts, in_batches: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._accounts = accounts
        self._in_batches = in_batches
        self._clock = clock
        self._outside = 0  # unrolls in messages that wait for room
        self._samples: collections.deque[tuple[float, int]] = collections.deque(maxlen=_SAMPLES)

    @contextlib.contextmanager
    def waiting(self, unrolls: int) -> Iterator[None]:
        """Counts the unrolls of a message that waits for room."""
        self._outside += unrolls
        try:
            yield
        finally:
            self._outside -= unrolls

    def tell(self, receipt: pb.Receipt) -> None:
        """Writes into a receipt what is ahead of the next message, and the speed."""
        now, totals = self._clock(), self._accounts.totals()
        settled = totals.received - totals.queued
        if self._samples and now > self._samples[-1][0] + _PAUSE_SECONDS:
            self._samples.clear()  # what it did in a pause says nothing of its speed
        if not self._samples or now >= self._samples[-1][0] + _SAMPLE_SECONDS:
            self._samples.append((now, settled))
        since, before = self._samples[0]
        ahead = totals.queued + self._outside - self._in_batches
        if now > since and settled > before and ahead > 0:
            receipt.unrolls_ahead = ahead
            receipt.unrolls_per_second = (settled - before) / (now - since)
