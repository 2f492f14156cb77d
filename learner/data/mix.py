"""The mix: makes batches of fresh and replayed unrolls, usually while the previous update runs."""

import heapq
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from impala.config.schema import MixConfig
from impala.logdir.directory import StorageError
from impala.types import Batch, StepType, Unroll
from learner.data.demonstrations import Demonstrations
from learner.data.ingest import Arrival, Ingest
from learner.data.pacing import LAPSED, Pacing
from learner.data.replay import Origin, Replay
from learner.data.rows import Layout, Placed

_log = logging.getLogger(__name__)


class Provenance(NamedTuple):
    """Which unrolls of which message are accounted for with a batch, and how."""

    actor: str
    incarnation: int
    sequence: int
    unrolls: int
    dropped: str | None  # why they were not learned from
    task: int = 0
    lag: int = 0  # of the oldest of them, in updates

    @property
    def account(self) -> "tuple[str, int, int, int, str | None]":
        """What the accounts are told."""
        return self[:5]

    @property
    def message(self) -> tuple[str, int, int]:
        """Which message they were in."""
        return self[:3]


POLICY_LAG = "policy_lag"
DEMONSTRATED = "demonstrated"  # why unrolls that waited for the end of demonstrations are dropped


class Prepared(NamedTuple):
    """A batch, and what to account for once the learner has learned from it.

    That includes every fresh unroll taken for it, also those that were only added to replay.
    """

    batch: Batch | None  # views of rows, [T + 1, B, ...]; None in warm-up, or if all was too old
    origins: Sequence[Origin]  # of its B unrolls
    provenance: Sequence[Provenance]  # in the order of the queue
    unrolls: int  # fresh, and not dropped
    frames: int  # environment frames in them
    steps: int  # agent decisions in them
    arrivals: Sequence[Arrival]  # first used in this batch: their statistics count once
    is_whole: bool  # a batch's number of fresh unrolls was taken, dropped ones not counted
    episodes: int = 0  # that ended in the fresh unrolls
    rows: np.ndarray | None = None  # of `batch`: uint8 [B, row_bytes]
    fresh: Sequence[tuple[Unroll, slice]] = ()  # these unrolls: columns of messages
    placed: Placed | None = None  # those rows where the learner's devices read them
    weights: np.ndarray | None = None  # [B] of the unrolls' losses; None: all 1
    is_demonstrated: bool = False  # all of them are demonstrations, and replayed


class _Chunk(NamedTuple):
    """Adjacent columns of a message."""

    arrival: Arrival
    columns: slice
    dropped: str | None = None
    lag: int = (
        0  # of the oldest when they were taken, in updates; < 0: of a learner that came further
    )

    @property
    def size(self) -> int:
        return self.columns.stop - self.columns.start

    def split(self, count: int) -> "tuple[_Chunk, _Chunk | None]":
        """Returns the first `count` columns, or all if there are fewer, and the rest."""
        middle = self.columns.start + count
        if middle >= self.columns.stop:
            return self, None
        return (
            self._replace(columns=slice(self.columns.start, middle)),
            self._replace(columns=slice(middle, self.columns.stop)),
        )

    def drop(self, why: str) -> "_Chunk":
        """The chunk without its arrays, which may have to wait for a batch."""
        arrival = self.arrival._replace(unroll=None)  # type: ignore[arg-type]
        return self._replace(arrival=arrival, dropped=why)

    def provenance(self) -> Provenance:
        arrival = self.arrival
        return Provenance(
            *(arrival.actor, arrival.incarnation, arrival.sequence, self.size, self.dropped),
            task=arrival.task,
            lag=max(0, self.lag),
        )

    def version(self) -> int:
        return int(self.arrival.unroll.parameter_version[self.columns].min())

    def is_first(self) -> bool:
        return self.columns.start == self.arrival.offset

    def frames(self) -> int:
        return int(self.arrival.unroll.frames[self.columns].sum())

    def episodes(self) -> int:
        step_type = self.arrival.unroll.timestep.step_type
        return int((step_type[1:, self.columns] == StepType.LAST).sum())

    def steps(self) -> int:
        step_type = self.arrival.unroll.timestep.step_type
        return int((step_type[1:, self.columns] != StepType.FIRST).sum())


class Mix:
    """Fills batches from the ingest and from replay.

    It has a thread of its own, unless it has fresh unrolls played in the thread that gets batches.
    Fresh unrolls are copied from their message into rows of the batch, replayed ones from the rows
    of replay. TensorFlow may keep using the memory that it is given, so every batch has new rows.
    Another thread copies them to a device while the next batch is made.
    """

    def __init__(
        self,
        ingest: Ingest,
        config: MixConfig,
        layout: Layout,
        replay: Replay | None = None,
        version: int = 0,
        pacing: Pacing | None = None,
        place: Callable[[Layout, np.ndarray], Placed] | None = None,
        play: Callable[[], None] | None = None,
        demonstrations: Demonstrations | None = None,
    ):
        """Starts the thread.

        Args:
          ingest: source of fresh unrolls.
          config: how many unrolls of each kind make a batch. Until replay holds `warm_up_unrolls`
            or is full, fresh unrolls are only added to replay and there is no batch.
          layout: of rows.
          replay: receives fresh unrolls and provides replayed ones.
          version: of the parameters that the first batch updates.
          pacing: tells which unrolls are due when. Without it they are taken in order.
          place: copies rows to the learner's devices; None: these read them where they are.
          play: plays, and puts what was played into the ingest, if it can. It is called in `get`,
            which then makes the batch, too. None: others put unrolls into the ingest.
          demonstrations: all that batches are made of, until `begin_phase`; the ingest waits then.

        Raises:
          ValueError: the configuration asks for replayed unrolls, but there is no replay.
        """
        if config.replayed and replay is None:
            raise ValueError(f"mix.replayed is {config.replayed}, but there is no replay.")
        self._ingest = ingest
        self._config = config
        self._layout = layout
        self._replay = replay
        self._version = version  # that the batch being made will update
        self._version_lock = threading.Lock()
        self._not_before = -1  # version that unrolls have to be made with
        self._has_dropped = False
        self._more = 0  # batches that are due from replay alone
        self._pacing = pacing
        self._place = place
        self._play = play
        self._demonstrations = demonstrations
        self._placing = ThreadPoolExecutor(1, "place")
        self._taken: list[_Chunk] = []  # for the batch being made
        # What was taken out of the ingest: when it is due, how many had come before, what it is.
        # Without pacing, that is what is left of one message.
        self._waiting: list[tuple[int, int, _Chunk]] = []
        self._numbers = itertools.count()
        self._oldest = 0  # number in replay of the first unroll that may be learned from
        self._ready: queue.Queue[tuple[Prepared, Future[Placed] | None]] = queue.Queue(1)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mix", daemon=True)
        if play is None:
            self._thread.start()

    def get(self, timeout: float) -> Prepared | None:
        """Returns the next batch, or None after `timeout` seconds without one.

        If this mix has unrolls played, it returns None where that gave none.

        Raises:
          StorageError: replay cannot be written or read.
          RuntimeError: the thread that makes batches has died of another error.
        """
        if self._play is not None:
            made = self._make()
        else:
            try:
                made = self._ready.get(timeout=timeout)
            except queue.Empty:
                made = None
        if made is None:
            if isinstance(self._error, StorageError):
                raise self._error from None
            if self._error is not None:
                raise RuntimeError(f"The batch thread has died: {self._error}") from self._error
            return None
        prepared, placing = made
        if prepared.is_demonstrated and self._demonstrations is None:
            self.shift_version(-1)  # made before the phase began
            return None
        if placing is not None:
            prepared = prepared._replace(placed=placing.result())
        return self._weighted(prepared)

    @property
    def is_ready(self) -> bool:
        """Whether a batch is ready."""
        return not self._ready.empty()

    def begin_phase(self, version: int, empties_replay: bool) -> None:
        """Ends demonstrations, and empties replay. What batches hold of either does not count.

        Args:
          version: of the parameters. What was played with earlier ones during demonstrations is
            dropped: the policy is another one now.
          empties_replay: whether to empty it.
        """
        if self._demonstrations is not None:
            self._not_before = version  # before the mix's thread takes what waits
            self._demonstrations = None
        if empties_replay and self._replay is not None:
            self._oldest = self._replay.clear()

    def _weighted(self, prepared: Prepared) -> Prepared:
        """Returns a batch with weights, if something in it was replayed from an earlier phase."""
        if prepared.batch is None or self._oldest == 0:
            return prepared
        numbers = np.array([origin.number for origin in prepared.origins])
        is_gone = prepared.batch.is_replay & (numbers < self._oldest)
        if not is_gone.any():
            return prepared
        return prepared._replace(weights=(~is_gone).astype(np.float32))

    def shift_version(self, updates: int) -> None:
        """Corrects the count of versions by updates that do not match the batches taken.

        Args:
          updates: 1 for an update without a batch, -1 for a batch without an update.
        """
        with self._version_lock:
            self._version += updates

    def close(self) -> None:
        """Stops the thread; prepared batches are discarded."""
        self._stop.set()
        if self._play is None:
            self._thread.join(timeout=10.0)
        self._placing.shutdown()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                made = self._make()
                while made is not None and not self._stop.is_set():
                    try:
                        self._ready.put(made, timeout=0.2)
                        break
                    except queue.Full:
                        continue
        except StorageError as error:
            self._error = error  # raised to whoever gets batches, who says it
        except BaseException as error:
            _log.exception("The batch thread has died.")
            self._error = error

    def _make(self) -> tuple[Prepared, Future[Placed] | None] | None:
        """Returns one batch, and its way to a device; None if unrolls for it are missing."""
        if (prepared := self._prepare()) is None:
            return None
        placing = None
        if self._place is not None and prepared.rows is not None:
            placing = self._placing.submit(self._place, self._layout, prepared.rows)
        return prepared, placing

    def _prepare(self) -> Prepared | None:
        """Returns one batch, or None if unrolls for it are missing."""
        config, replay = self._config, self._replay
        if (demonstrations := self._demonstrations) is not None:
            return self._demonstrated(demonstrations)
        if self._more:
            return self._again()
        if (taken := self._take()) is None:
            return None
        fresh = [chunk for chunk in taken if not chunk.dropped]
        if not fresh:
            return _prepared(None, taken)
        if config.replayed:
            assert replay is not None
            is_warm = len(replay) >= config.warm_up_unrolls or replay.is_full
            if not (is_warm and len(replay)):
                self._remember(fresh)
                return _prepared(None, taken)

        rows = self._layout.empty(config.batch_size)
        filled = config.batch_size - config.replayed
        replayed: list[Origin] = []
        if config.replayed:
            assert replay is not None
            try:
                replayed = replay.sample(rows[filled:])
            except LookupError:  # Replay was damaged, is empty now, and warms up again.
                self._remember(fresh)
                return _prepared(None, taken)
        # After the draw, so that no unroll is both fresh and replayed in one batch.
        origins = self._remember(fresh, rows if config.learn_from_fresh else None)
        self._more = config.updates - 1
        return self._batch(rows, filled, taken, [*origins[:filled], *replayed])

    def _demonstrated(self, demonstrations: Demonstrations) -> Prepared:
        """Returns a batch of demonstrations: for no actor, but their frames and steps count."""
        rows = self._layout.empty(self._config.batch_size)
        demonstrations.draw(rows)
        made = self._batch(rows, 0, [], [Origin("demonstrations", None)] * len(rows))
        assert made.batch is not None
        unroll = made.batch.unroll
        return made._replace(
            frames=int(unroll.frames.sum()),
            steps=int((unroll.timestep.step_type[1:] != StepType.FIRST).sum()),
            fresh=[(unroll, slice(None))],
            is_whole=True,
            is_demonstrated=True,
        )

    def _again(self) -> Prepared:
        """Returns another batch from replay alone."""
        assert self._replay is not None
        rows = self._layout.empty(self._config.batch_size)
        try:
            origins = self._replay.sample(rows)
        except LookupError:  # Replay was damaged, is empty now, and warms up again.
            self._more = 0
            return _prepared(None, [])
        self._more -= 1
        return self._batch(rows, 0, [], origins)

    def _batch(
        self, rows: np.ndarray, fresh: int, taken: Sequence[_Chunk], origins: Sequence[Origin]
    ) -> Prepared:
        """Returns a batch whose first rows are fresh."""
        self.shift_version(1)
        batch = Batch(self._layout.unroll(rows), np.arange(len(rows)) >= fresh)
        placed = Placed(self._layout, rows) if self._place is None else None
        return _prepared(batch, taken, origins)._replace(rows=rows, placed=placed)

    def _take(self) -> list[_Chunk] | None:
        """Takes the fresh unrolls of a batch out of the ingest, in order; None if some are missing.

        The result also has the chunks that are too old to be learned from, which do not count.
        """
        while missing := self._config.fresh - sum(c.size for c in self._taken if not c.dropped):
            if (chunk := self._next(missing)) is None:
                return None
            self._taken.append(chunk)
            if chunk.dropped and missing == self._config.fresh:
                break  # nothing but that: to be accounted for at once
        taken, self._taken = self._taken, []
        return taken

    def _next(self, count: int) -> _Chunk | None:
        """The first unrolls that wait, at most `count`, or some to be dropped; None: look again."""
        self._fetch()
        if not (most := min(count, self._most())):
            return None
        due, number, chunk = heapq.heappop(self._waiting)
        with self._version_lock:
            lag = self._version - chunk.version()
        if not chunk.dropped and chunk.version() < self._not_before:
            return chunk._replace(lag=lag).drop(DEMONSTRATED)
        if chunk.dropped or self._is_too_old(lag):
            return self._drop(chunk._replace(lag=lag))
        chunk, rest = chunk._replace(lag=lag).split(most)
        if rest is not None:
            heapq.heappush(self._waiting, (due, number, rest))
        if self._pacing is not None:
            self._pacing.taken(chunk.size)
        return chunk

    def _most(self) -> int:
        """How many unrolls of those that are due first may be taken now."""
        if not self._waiting:
            return 0
        due, _, chunk = self._waiting[0]
        if self._pacing is None or chunk.dropped:
            return chunk.size
        return max(0, min(chunk.size, self._pacing.most(due)))

    def _fetch(self) -> None:
        """Takes messages out of the ingest: one if none waits; all, if they have to be sorted."""
        while self._pacing is not None or not self._waiting:
            can_take = self._most() > 0
            if self._pacing is not None and not can_take:
                self._pacing.expire()
            if self._play is not None and not can_take and not self._ingest.depth:
                self._play()
            arrival = self._ingest.get(timeout=0.2 if not can_take and self._play is None else 0.0)
            if arrival is None:
                return
            middle = arrival.unroll.frames.shape[0] - arrival.unpermitted
            whole = _Chunk(arrival, slice(arrival.offset, middle + arrival.unpermitted))
            chunk, rest = whole.split(middle - arrival.offset)
            if chunk.size:
                heapq.heappush(self._waiting, (arrival.due, next(self._numbers), chunk))
                if self._pacing is not None:
                    self._pacing.fetched(arrival.due, chunk.size)
            if rest is not None:
                lapsed = rest._replace(dropped=LAPSED)
                heapq.heappush(self._waiting, (-1, next(self._numbers), lapsed))

    def _is_too_old(self, lag: int) -> bool:
        """Also of what a learner made that came further, before it was killed."""
        limit = self._config.max_policy_lag
        return limit > 0 and not 0 <= lag <= limit

    def _drop(self, chunk: _Chunk) -> _Chunk:
        if chunk.dropped is None and not self._has_dropped:
            self._has_dropped = True
            _log.warning(
                "Unrolls of %s were made with version %d, but it is update %d's turn: dropped, as "
                "mix.max_policy_lag is %d. unrolls/dropped/policy_lag counts them.",
                *(chunk.arrival.actor, chunk.version(), chunk.version() + chunk.lag),
                self._config.max_policy_lag,
            )
        return chunk.drop(chunk.dropped or POLICY_LAG)

    def _remember(self, chunks: Sequence[_Chunk], rows: np.ndarray | None = None) -> list[Origin]:
        """Copies fresh unrolls into rows, and adds them to replay, if there is one.

        Args:
          chunks: the unrolls.
          rows: the first of which are theirs; None: they are only added to replay.

        Returns:
          Their origins.
        """
        origins: list[Origin] = []
        if rows is None:
            rows = self._layout.empty(sum(chunk.size for chunk in chunks))
        for chunk in chunks:
            arrival, own = chunk.arrival, rows[len(origins) : len(origins) + chunk.size]
            self._layout.write(arrival.unroll, chunk.columns, own)
            numbers: Iterator[int | None] = itertools.repeat(None)
            if self._replay is not None:
                numbers = itertools.count(self._replay.add(own, arrival.actor))
            origins += (Origin(arrival.actor, next(numbers)) for _ in range(chunk.size))
        return origins


def _prepared(
    batch: Batch | None, taken: Sequence[_Chunk], origins: Sequence[Origin] = ()
) -> Prepared:
    fresh = [chunk for chunk in taken if not chunk.dropped]
    return Prepared(
        batch,
        origins,
        provenance=[chunk.provenance() for chunk in taken],
        unrolls=sum(chunk.size for chunk in fresh),
        frames=sum(chunk.frames() for chunk in fresh),
        steps=sum(chunk.steps() for chunk in fresh),
        arrivals=[chunk.arrival for chunk in taken if chunk.is_first()],
        is_whole=bool(fresh),
        episodes=sum(chunk.episodes() for chunk in fresh),
        fresh=[(chunk.arrival.unroll, chunk.columns) for chunk in fresh],
    )
