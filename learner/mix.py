"""The mix: unrolls from the ingest become batches, while the last update still runs."""

import logging
import queue
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tree

from impala.types import Batch, Nest, StepType, Unroll
from learner.ingest import Arrival, Ingest

_log = logging.getLogger(__name__)


class Provenance(NamedTuple):
    """Which unrolls of which message are in a batch."""

    actor: str
    incarnation: int
    sequence: int
    unrolls: int


class Prepared(NamedTuple):
    """A batch and what the learner accounts for once it has learned from it."""

    batch: Batch  # NumPy, [T + 1, B, ...]
    provenance: Sequence[Provenance]
    frames: int  # environment frames in the fresh rows
    steps: int  # agent decisions in the fresh rows
    arrivals: Sequence[Arrival]  # whose first row is in this batch: their statistics count once


class Mix:
    """Fills batches from the ingest in a thread of its own.

    Every batch gets new arrays: TensorFlow may keep using their memory after it has been handed
    over, so a buffer must never be written again.
    """

    def __init__(self, ingest: Ingest, batch_size: int, depth: int = 1):
        """Starts the thread.

        Args:
          ingest: where fresh unrolls come from.
          batch_size: unrolls per batch, B.
          depth: batches that are made ahead of the update.
        """
        self._ingest = ingest
        self._batch_size = batch_size
        self._ready: queue.Queue[Prepared] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mix", daemon=True)
        self._thread.start()

    def get(self, timeout: float) -> Prepared | None:
        """The next batch, or None after `timeout` seconds without one.

        Raises:
          RuntimeError: the thread that makes batches has died.
        """
        try:
            return self._ready.get(timeout=timeout)
        except queue.Empty:
            if self._error is not None:
                raise RuntimeError("The batch thread has died.") from self._error
            return None

    def close(self) -> None:
        """Stops the thread; batches that were made and not taken are forgotten."""
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            arrival: Arrival | None = None
            start = 0
            while not self._stop.is_set():
                prepared, arrival, start = self._fill(arrival, start)
                while prepared is not None and not self._stop.is_set():
                    try:
                        self._ready.put(prepared, timeout=0.2)
                        break
                    except queue.Full:
                        continue
        except BaseException as error:
            _log.exception("The batch thread has died.")
            self._error = error

    def _fill(
        self, arrival: Arrival | None, start: int
    ) -> tuple[Prepared | None, Arrival | None, int]:
        """Makes one batch, beginning with column `start` of a message that is partly used."""
        unroll: Unroll | None = None
        provenance: list[Provenance] = []
        arrivals: list[Arrival] = []
        filled = 0
        while filled < self._batch_size:
            if arrival is None:
                arrival = self._ingest.get(timeout=0.2)
                if arrival is None:
                    if self._stop.is_set():
                        return None, None, 0
                    continue
                start = arrival.offset
                arrivals.append(arrival)
            num_envs = arrival.unroll.frames.shape[0]
            take = min(num_envs - start, self._batch_size - filled)
            if unroll is None:
                unroll = _empty_like(arrival.unroll, self._batch_size)
            _copy_columns(unroll, filled, arrival.unroll, start, take)
            filled += take
            start += take
            provenance.append(
                Provenance(arrival.actor, arrival.incarnation, arrival.sequence, take)
            )
            if start == num_envs:
                arrival = None
        assert unroll is not None
        prepared = Prepared(
            batch=Batch(unroll=unroll, is_replay=np.zeros(self._batch_size, bool)),
            provenance=provenance,
            frames=int(unroll.frames.sum()),
            steps=int((unroll.timestep.step_type[1:] != StepType.FIRST).sum()),
            arrivals=arrivals,
        )
        return prepared, arrival, start


def _time_major(unroll: Unroll) -> tuple[Nest, Nest]:
    """Splits an unroll into what has time before the batch axis and what has not."""
    return (
        (unroll.timestep, unroll.output),
        (unroll.core_state, unroll.frames, unroll.parameter_version),
    )


def _empty_like(unroll: Unroll, batch_size: int) -> Unroll:
    """Uninitialised arrays like `unroll`'s with `batch_size` in place of E."""
    timed, untimed = _time_major(unroll)
    timed = tree.map_structure(
        lambda x: np.empty((x.shape[0], batch_size, *x.shape[2:]), x.dtype), timed
    )
    untimed = tree.map_structure(lambda x: np.empty((batch_size, *x.shape[1:]), x.dtype), untimed)
    return Unroll(*timed, *untimed)


def _copy_columns(target: Unroll, at: int, source: Unroll, start: int, count: int) -> None:
    """Copies `count` environments from column `start` of `source` to column `at` of `target`."""
    target_timed, target_untimed = _time_major(target)
    source_timed, source_untimed = _time_major(source)
    for into, out_of in zip(tree.flatten(target_timed), tree.flatten(source_timed), strict=True):
        into[:, at : at + count] = out_of[:, start : start + count]
    for into, out_of in zip(
        tree.flatten(target_untimed), tree.flatten(source_untimed), strict=True
    ):
        into[at : at + count] = out_of[start : start + count]
