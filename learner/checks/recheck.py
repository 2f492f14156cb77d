"""Recomputes a share of the unrolls, beside everything else."""

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from learner.checks.mistakes import Mistake
from learner.checks.network import Claim, Recomputation
from protos.impala.v1 import learner_pb2 as pb
from protos.network import NotDescribed

_log = logging.getLogger(__name__)

_HELD_BYTES = 64 << 20  # of parameters
_HELD_AT_LEAST = 2  # versions
_LEAST_SECONDS = 0.1  # between two unrolls
_MOST_SENDERS = 1000  # that take turns
_FORGOTTEN_SECONDS = 60.0  # after which a sender that sends nothing has no turn
_IN_A_ROW = 3  # unrolls of a sender that differ before it is named


class Recheck:
    """Recomputes unrolls one at a time, of one sender after another. Of one event loop.

    Args:
      reply: what the actors of a run were told.
      share: of a core's time that it may take; 0: nothing is recomputed.
      found: called by another thread with an actor and its mistake.
      clock: monotonic, in seconds.
    """

    def __init__(
        self,
        reply: pb.JoinReply,
        share: float,
        found: Callable[[str, Mistake], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recomputation: Recomputation | None = None
        if share:
            try:
                self._recomputation = Recomputation(reply)
            except NotDescribed as error:
                _log.info("What actors compute is not recomputed: %s", error)
        self._share = share
        self._found = found
        self._clock = clock
        self._held: collections.OrderedDict[int, Sequence[np.ndarray]] = collections.OrderedDict()
        self._held_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._busy = threading.Event()
        self._next = 0.0
        # When each was heard, who had a turn longest ago first.
        self._senders: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._differed: dict[str, int] = {}  # sender -> unrolls in a row
        self.done = 0
        """Unrolls recomputed."""

    def handed_out(self, version: int, values: Sequence[np.ndarray]) -> None:
        """Keeps parameters that actors have got, and forgets older ones."""
        if self._recomputation is None or version in self._held:
            return
        self._held[version] = values
        self._held_bytes += _bytes(values)
        while self._held_bytes > _HELD_BYTES and len(self._held) > _HELD_AT_LEAST:
            _, forgotten = self._held.popitem(last=False)
            self._held_bytes -= _bytes(forgotten)

    def offer(self, message: pb.Unrolls, arrays: Mapping[str, np.ndarray], num_states: int) -> None:
        """Recomputes one unroll of a message, if it is this sender's turn and there is time.

        Args:
          message: of this learner's parameters; its tensors are not read.
          arrays: its tensors by name: [T + 1, E, ...], then the core state.
          num_states: how many of them are core state.
        """
        values = self._held.get(message.parameter_version)
        if values is None or self._busy.is_set() or self._clock() < self._next:
            return
        assert self._recomputation is not None
        if not self._has_turn(message.actor):
            return
        env = self.done % message.num_envs
        leaves = list(arrays.values())
        claim = Claim(
            {
                name: leaf[:, env].copy()
                for name, leaf in arrays.items()
                if name.startswith("timestep/observation")
            },
            arrays["timestep/step_type"][:, env].copy(),
            arrays["output/policy"][:, env].copy(),
            arrays["output/baseline"][:, env].copy(),
            [leaf[env].copy() for leaf in leaves[len(leaves) - num_states :]],
        )
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="recheck")
        self._busy.set()
        self._thread.submit(self._recompute, message.actor, values, claim)

    def _has_turn(self, sender: str) -> bool:
        """Returns whether a sender is not of the half that had a turn last; it then has one."""
        now = self._clock()
        is_new = sender not in self._senders
        self._senders[sender] = now
        gone = [name for name, heard in self._senders.items() if now > heard + _FORGOTTEN_SECONDS]
        for name in gone:
            del self._senders[name]
        waiting = itertools.islice(self._senders, (len(self._senders) + 1) // 2)
        if not (is_new or sender in waiting):
            return False
        self._senders.move_to_end(sender)
        if len(self._senders) > _MOST_SENDERS:
            self._senders.popitem(last=False)
        return True

    def close(self) -> None:
        """Ends the thread."""
        self._recomputation = None
        self._held.clear()
        if self._thread is not None:
            self._thread.shutdown()

    def _recompute(self, actor: str, values: Sequence[np.ndarray], claim: Claim) -> None:
        began = time.thread_time()
        try:
            recomputation = self._recomputation
            if recomputation is not None:
                self._judge(actor, recomputation.check(values, claim))
                self.done += 1
        except Exception:
            _log.exception("An unroll could not be recomputed; none is from now on.")
            self._recomputation = None
            self._held = collections.OrderedDict()
        finally:
            spent = time.thread_time() - began
            self._next = self._clock() + max(_LEAST_SECONDS, spent / self._share)
            self._busy.clear()

    def _judge(self, actor: str, mistake: Mistake | None) -> None:
        """Names a sender whose unrolls have differed several times in a row."""
        if mistake is None:
            self._differed.pop(actor, None)
            return
        if len(self._differed) > _MOST_SENDERS:
            self._differed.clear()
        self._differed[actor] = self._differed.get(actor, 0) + 1
        if self._differed[actor] >= _IN_A_ROW:
            self._found(actor, mistake)


def _bytes(values: Sequence[np.ndarray]) -> int:
    return sum(value.nbytes for value in values)
