"""Replay: whole past unrolls, evicted by one of two rules and drawn uniformly.

Both rules keep the unrolls with the smallest keys. The key of an unroll is random (reservoir: the
contents are a uniform sample of everything ever added, Vitter 1985) or counts down (fifo: the
contents are the newest). No key is drawn twice, so a replay that was closed or killed resumes
exactly, as long as its records and its `State` were written together.

Unrolls are rows of one array in memory, and a draw copies rows. What has no room there is
compressed. A thread compresses what goes to the disk, and writes it.
"""

import dataclasses
import heapq
import math
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal, NamedTuple

import numpy as np
import zstandard

from learner.data.rows import Layout
from learner.data.storage import DamagedError, Disk, Record, State

Rule = Literal["reservoir", "fifo"]

_LEVEL = 1  # of zstd: pixel frames shrink to a hundredth, in microseconds each

# A commit follows so many unrolls, if so much time has passed; a crash loses those since the last.
_COMMIT_UNROLLS, _COMMIT_BYTES, _COMMIT_SECONDS = 1000, 2**28, 10.0

_NOWHERE = -1  # the slot of what is not in memory


class Contents(NamedTuple):
    """The size of a replay's contents."""

    unrolls: int
    frames: int  # environment frames in them
    bytes: int  # of memory, without what is compressed
    added: int  # unrolls ever added
    share_of_history: float  # held / added; 0 if nothing was added


class Origin(NamedTuple):
    """Where one unroll of a batch comes from."""

    actor: str
    number: int | None  # in replay, which may have evicted it; None without replay


@dataclasses.dataclass(slots=True)
class _Held:
    """An unroll that is held."""

    key: float  # decides when it is evicted
    frames: int
    actor: str
    slot: int  # its row in memory, or _NOWHERE
    packed: bytes | None = None  # compressed, if it is neither in memory nor on the disk


class Replay:
    """A bounded store of unrolls. Every method is thread-safe."""

    def __init__(
        self,
        layout: Layout,
        disk: Disk | None,
        rule: Rule,
        *,
        capacity_frames: int,
        memory: int,
        seed: int = 0,
    ):
        """Opens a replay on the contents of a disk.

        Args:
          layout: of the unrolls' rows.
          disk: keeps them; None: they are lost with the process. If its records are found damaged,
            now or later, the replay continues empty if the disk allows it.
          rule: which unrolls are evicted when there is no room.
          capacity_frames: largest number of environment frames held.
          memory: bytes for rows; what does not fit is compressed.
          seed: of keys and draws; combined with the number of unrolls ever added, so that a resumed
            replay does not draw the same keys again.

        Raises:
          StorageError: the records are damaged.
        """
        self._rule = rule
        self._disk = disk
        self._capacity_frames = capacity_frames
        self._layout = layout
        # An unroll has one frame at least. The system gives memory when it is first written to.
        self._rows = layout.empty(min(memory // layout.row_bytes, capacity_frames))
        self._commit_unrolls = max(1, min(_COMMIT_UNROLLS, _COMMIT_BYTES // layout.row_bytes))
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="replay")
        self._writing: Future[None] | None = None

        self._seed = seed
        self._state = State()
        try:
            self._load()
        except DamagedError as damage:
            self._start_over(damage)

    def add(self, rows: np.ndarray, actor: str) -> int:
        """Adds unrolls.

        Args:
          rows: uint8 [N, row_bytes].
          actor: their sender.

        Returns:
          The number of the first unroll; the others are numbered consecutively. The replay decides
          which of them it keeps.

        Raises:
          ValueError: a single unroll is larger than the capacity.
          StorageError: the disk cannot be written.
        """
        # An unroll of seams alone has no frames, but must count towards the capacity.
        frames = np.maximum(1, self._layout.frames(rows)).tolist()
        if (most := max(frames)) > self._capacity_frames:
            raise ValueError(
                f"An unroll of {most} frames does not fit into a replay of "
                f"{self._capacity_frames}: raise replay.capacity_frames."
            )
        with self._lock:
            self._settle()
            first = self._state.added
            kept = [(i, held) for i, n in enumerate(frames) if (held := self._hold_new(n, actor))]
            # Rows of what was evicted at once are free again, and may be another's.
            kept = [(i, held) for i, held in kept if self._held.get(first + i) is held]
            in_memory = [(held.slot, i) for i, held in kept if held.slot != _NOWHERE]
            if in_memory:
                slots, places = zip(*in_memory, strict=True)
                whole = len(places) == len(rows)
                self._rows[list(slots)] = rows if whole else rows[list(places)]
            for i, held in kept:
                if held.slot == _NOWHERE:
                    held.packed = self._compressor.compress(rows[i])
            if self._is_commit_due():
                self._begin_commit()
            return first

    def sample(self, rows: np.ndarray) -> list[Origin]:
        """Writes unrolls into rows, uint8 [N, row_bytes].

        They are drawn uniformly, without replacement if there are enough.

        Returns:
          The drawn unrolls, in the order of the rows.

        Raises:
          LookupError: the replay is empty, possibly because it was found damaged and has started
            over.
          StorageError: a drawn unroll is damaged, or cannot be read.
        """
        with self._lock:
            if not self._numbers:
                raise LookupError("The replay is empty: add unrolls before sampling.")
            size, count = len(self._numbers), len(rows)
            places = self._rng.choice(size, count, replace=size < count, shuffle=False)
            numbers = [self._numbers[place] for place in places.tolist()]
            drawn = [self._held[number] for number in numbers]
            slots = np.array([held.slot for held in drawn])
            if (missing := np.flatnonzero(slots == _NOWHERE)).size:
                there = np.flatnonzero(slots != _NOWHERE)
                rows[there] = self._rows[slots[there]]
                try:
                    for i in missing.tolist():
                        self._read(numbers[i], rows[i])
                except DamagedError as damage:
                    self._start_over(damage)
                    raise LookupError("The replay was damaged and is empty now.") from damage
            else:
                # "clip": "raise" would copy everything twice.
                np.take(self._rows, slots, axis=0, out=rows, mode="clip")
            return [Origin(held.actor, n) for n, held in zip(numbers, drawn, strict=True)]

    def remove(self, numbers: Iterable[int]) -> int:
        """Removes unrolls permanently, and commits.

        Args:
          numbers: of the unrolls, as `sample` returned them; evicted ones are ignored.

        Returns:
          How many were removed.

        Raises:
          StorageError: the disk cannot be written.
        """
        with self._lock:
            held = {number for number in numbers if number in self._held}
            for number in held:
                self._release(number)
        if held:  # Their keys stay in the heap until their turn to be evicted.
            self.commit()
        return len(held)

    def commit(self) -> int:
        """Commits everything added, and waits for it.

        Returns:
          How many unrolls were ever added, of which the disk has all that are held.

        Raises:
          StorageError: the disk cannot be written.
        """
        own = None
        while own is None:
            with self._lock:
                self._settle()
                if (other := self._writing) is None:
                    own = self._begin_commit()
            if other is not None:
                wait([other])
        error = own.exception()
        with self._lock:
            self._settle()
            if error is not None and not isinstance(error, DamagedError):
                raise error  # even if another thread has settled it
            # What was added while this was written is not on the disk.
            return self._state.added if self._disk is None else self._disk.state().added

    def close(self) -> None:
        """Closes the disk. Uncommitted unrolls are lost."""
        self._writer.shutdown()
        with self._lock:
            if self._disk is not None:
                self._disk.close()

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def is_full(self) -> bool:
        """Returns whether an unroll was ever evicted or refused."""
        return self._state.threshold < math.inf

    def contents(self) -> Contents:
        """Returns the size of the current contents."""
        with self._lock:
            added = self._state.added
            return Contents(
                unrolls=len(self._numbers),
                frames=self._frames,
                bytes=(self._used - len(self._free)) * self._layout.row_bytes,
                added=added,
                share_of_history=len(self._numbers) / added if added else 0.0,
            )

    def clear(self) -> int:
        """Removes all unrolls. What is added later is held as by a new replay.

        Returns:
          How many unrolls were ever added, which is the number of the next one.
        """
        with self._lock:
            for number in list(self._numbers):
                self._release(number)
            self._evicted_next.clear()
            self._is_cleared = True
            self._state = self._state._replace(threshold=math.inf)
            return self._state.added

    def _load(self) -> None:
        """Reads the heads of the disk's records."""
        self._state = State() if self._disk is None else self._disk.state()
        self._committed, self._committed_at = self._state.added, time.monotonic()
        self._rng = np.random.default_rng([self._seed, self._state.added])
        self._held: dict[int, _Held] = {}  # by number
        self._numbers: list[int] = []  # of the unrolls held, unordered
        self._places: dict[int, int] = {}  # number -> its place in _numbers
        self._evicted_next: list[tuple[float, int]] = []  # heap of (-key, number)
        self._frames = 0
        self._used = 0  # rows from here on were never used
        self._free: list[int] = []  # rows before
        self._pinned: set[int] = set()  # rows that are being written
        self._unpinned: list[int] = []  # those of them that will be free
        self._new: set[int] = set()  # held, but not on the disk
        self._gone: set[int] = set()  # on the disk, but not held
        self._is_cleared = False  # since the last commit, so that nothing there is held
        self._new_written: dict[int, _Held] = {}  # by the commit under way
        self._gone_written: set[int] = set()  # by the commit under way
        self._is_cleared_written = False
        for number, head in () if self._disk is None else self._disk.heads():
            self._hold(number, _Held(head.key, head.frames, head.actor, _NOWHERE))
        self._make_room()

    def _start_over(self, damage: DamagedError) -> None:
        assert self._disk is not None
        if self._writing is not None:
            wait([self._writing])
            self._writing = None
        self._disk.start_over(damage, self._state.added)
        self._load()

    def _hold_new(self, frames: int, actor: str) -> _Held | None:
        """Counts an unroll. Returns it if it is held, with its contents still to come."""
        number = self._state.added
        key = self._rng.random() if self._rule == "reservoir" else float(-number)
        self._state = self._state._replace(added=number + 1)
        if key >= self._state.threshold:  # It would have been evicted by now.
            return None
        held = _Held(key, frames, actor, _NOWHERE)
        self._hold(number, held)
        if self._disk is not None:
            self._new.add(number)
        self._make_room()
        if number not in self._held:
            return None
        held.slot = self._free_slot()
        return held

    def _free_slot(self) -> int:
        """Takes a row; _NOWHERE if there is none."""
        if self._free:
            return self._free.pop()
        if self._used == len(self._rows):
            return _NOWHERE
        self._used += 1
        return self._used - 1

    def _hold(self, number: int, held: _Held) -> None:
        self._held[number] = held
        self._places[number] = len(self._numbers)
        self._numbers.append(number)
        heapq.heappush(self._evicted_next, (-held.key, number))
        self._frames += held.frames

    def _make_room(self) -> None:
        while self._frames > self._capacity_frames:
            negative_key, number = heapq.heappop(self._evicted_next)
            if number in self._held:  # and was not removed
                self._state = self._state._replace(threshold=-negative_key)
                self._release(number)

    def _release(self, number: int) -> None:
        held = self._held.pop(number)
        self._frames -= held.frames
        if held.slot in self._pinned:
            self._unpinned.append(held.slot)
        elif held.slot != _NOWHERE:
            self._free.append(held.slot)
        if number in self._new:
            self._new.remove(number)
        elif self._disk is not None:
            self._gone.add(number)
        place, last = self._places.pop(number), self._numbers.pop()
        if last != number:  # The last one fills the gap.
            self._numbers[place] = last
            self._places[last] = place

    def _read(self, number: int, row: np.ndarray) -> None:
        """Writes an unroll that is not in memory into a row, and keeps it if there is room."""
        held = self._held[number]
        if held.slot != _NOWHERE:  # it was drawn twice, and has been read
            row[:] = self._rows[held.slot]
            return
        packed = held.packed
        if packed is None:
            assert self._disk is not None
            packed = self._disk.get(number).data
        row[:] = np.frombuffer(self._decompressor.decompress(packed), np.uint8)
        held.slot = self._free_slot()
        if held.slot != _NOWHERE:
            self._rows[held.slot] = row
            if self._disk is None:
                held.packed = None

    def _is_commit_due(self) -> bool:
        return (
            self._disk is not None
            and self._writing is None
            and self._state.added - self._committed >= self._commit_unrolls
            and time.monotonic() - self._committed_at >= _COMMIT_SECONDS
        )

    def _begin_commit(self) -> "Future[None]":
        self._committed, self._committed_at = self._state.added, time.monotonic()
        self._new_written = {n: dataclasses.replace(self._held[n]) for n in self._new}
        self._gone_written, self._new, self._gone = self._gone, set(), set()
        self._pinned = {held.slot for held in self._new_written.values()} - {_NOWHERE}
        self._is_cleared_written, self._is_cleared = self._is_cleared, False
        written = self._state, self._new_written, self._gone_written, self._is_cleared_written
        self._writing = self._writer.submit(self._write, *written)
        return self._writing

    def _write(
        self, state: State, new: Mapping[int, _Held], gone: Iterable[int], is_cleared: bool
    ) -> None:
        """Writes a commit, in the thread of its own. The lock is not held."""
        if self._disk is None:
            return
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        records = {
            number: Record(
                *(held.key, held.frames, held.actor),
                held.packed or compressor.compress(self._rows[held.slot]),
            )
            for number, held in new.items()
        }
        if is_cleared:
            self._disk.empty(state.added)
            gone = ()
        self._disk.commit(state, records, gone)

    def _settle(self) -> None:
        """Accounts for a commit that has ended.

        Raises:
          StorageError: it has failed.
        """
        if self._writing is None or not self._writing.done():
            return
        error, self._writing = self._writing.exception(), None
        self._free += self._unpinned
        self._pinned, self._unpinned = set(), []
        still = {number for number in self._new_written if number in self._held}
        if error is None:
            for number in still if self._disk is not None else ():
                self._held[number].packed = None
            return
        self._new |= still
        self._gone = (self._gone | self._gone_written) - self._new_written.keys()
        self._is_cleared |= self._is_cleared_written
        if isinstance(error, DamagedError):
            self._start_over(error)
        else:
            raise error
