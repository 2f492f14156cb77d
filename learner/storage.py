"""Where the records of a replay lie: in memory, or on disk where a crash cannot damage them.

On disk they are in an LMDB: copy-on-write pages under a transaction, so that a process that is
killed, or a host that loses power, leaves the state of the last commit.
"""

import abc
import contextlib
import json
import math
import pathlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

import lmdb

_MAP_BYTES = 2**40  # addresses that LMDB may use, not memory and not disk
_HEADER = struct.Struct("<dIH")  # key, frames, bytes of the name of the actor that follow
_STATE, _IDENTITY = b"meta/state", b"meta/identity"  # unrolls have names of eight bytes


class StorageError(RuntimeError):
    """A replay on disk cannot be opened, written or read; says what to do."""


class Record(NamedTuple):
    """One stored unroll."""

    key: float  # what decides when it is evicted
    frames: int  # environment frames in it
    actor: str  # who sent it
    data: bytes  # compressed


class State(NamedTuple):
    """What a replay must remember beside its records."""

    added: int = 0  # unrolls ever added
    threshold: float = math.inf  # smallest key that was ever evicted


class Store(abc.ABC):
    """Records by number."""

    @abc.abstractmethod
    def state(self) -> State:
        """As of the last commit."""

    @abc.abstractmethod
    def records(self) -> Iterator[tuple[int, Record]]:
        """All records of the last commit, with their numbers in ascending order."""

    @abc.abstractmethod
    def get(self, number: int) -> Record:
        """One record that is there."""

    @abc.abstractmethod
    def put(self, number: int, record: Record) -> None:
        """Adds a record."""

    @abc.abstractmethod
    def delete(self, number: int) -> None:
        """Removes a record that is there."""

    @abc.abstractmethod
    def commit(self, state: State) -> None:
        """Makes everything since the last commit durable, all of it or nothing."""

    @abc.abstractmethod
    def close(self) -> None:
        """Frees what it uses. What was not committed is lost."""


class Memory(Store):
    """In memory; lost with the process."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def state(self) -> State:
        return State()

    def records(self) -> Iterator[tuple[int, Record]]:
        return iter(())

    def get(self, number: int) -> Record:
        return self._records[number]

    def put(self, number: int, record: Record) -> None:
        self._records[number] = record

    def delete(self, number: int) -> None:
        del self._records[number]

    def commit(self, state: State) -> None:
        pass

    def close(self) -> None:
        self._records.clear()


class Disk(Store):
    """In an LMDB directory; what was not committed yet is in memory."""

    def __init__(self, path: pathlib.Path, identity: str):
        """Opens the directory, or makes it.

        Args:
          path: the directory; one process at a time may use it.
          identity: what the records must have in common, such as the fingerprint of a spec.

        Raises:
          StorageError: it holds records of another identity, or is no replay.
        """
        identity += ", records with actors"  # an older store has none, and cannot be read
        self._path = path
        self._uncommitted: dict[int, Record | None] = {}  # None: deleted
        path.mkdir(parents=True, exist_ok=True)
        try:
            self._lmdb = lmdb.open(str(path), map_size=_MAP_BYTES, max_dbs=0, readahead=False)
            with self._lmdb.begin(write=True) as transaction:
                theirs = transaction.get(_IDENTITY)
                if theirs is None:
                    transaction.put(_IDENTITY, identity.encode())
        except lmdb.Error as error:
            raise StorageError(
                f"The replay in {path} cannot be opened ({error}). Restore it, or start with an "
                "empty one with --empty-replay."
            ) from error
        if theirs is not None and theirs != identity.encode():
            self._lmdb.close()
            raise StorageError(
                f"The replay in {path} is of another run: it was written with "
                f"{theirs.decode()}, this run has {identity}. Go back to the old settings, or "
                "start with an empty one with --empty-replay."
            )

    def state(self) -> State:
        with self._reading() as transaction:
            data = transaction.get(_STATE)
            return State() if data is None else State(*json.loads(bytes(data)))

    def records(self) -> Iterator[tuple[int, Record]]:
        with self._reading() as transaction:
            for name, value in transaction.cursor():
                if len(name) == 8:
                    yield int.from_bytes(name, "big"), _record(value)

    def get(self, number: int) -> Record:
        record = self._uncommitted.get(number)
        if record is None:
            with self._reading() as transaction:
                record = _record(transaction.get(number.to_bytes(8, "big")))
        return record

    def put(self, number: int, record: Record) -> None:
        self._uncommitted[number] = record

    def delete(self, number: int) -> None:
        self._uncommitted[number] = None

    def commit(self, state: State) -> None:
        try:
            with self._lmdb.begin(write=True) as transaction:
                for number, record in self._uncommitted.items():
                    name = number.to_bytes(8, "big")
                    if record is None:
                        transaction.delete(name)
                    else:
                        actor = record.actor.encode()
                        header = _HEADER.pack(record.key, record.frames, len(actor))
                        transaction.put(name, header + actor + record.data)
                transaction.put(_STATE, json.dumps(state).encode())
        except lmdb.Error as error:
            raise StorageError(
                f"The replay in {self._path} cannot be written ({error}). Free space on its disk, "
                "or lower replay.capacity_frames, and start the learner again: it goes on."
            ) from error
        self._uncommitted.clear()

    def close(self) -> None:
        self._lmdb.close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        """A transaction whose values are views that are valid inside it."""
        try:
            with self._lmdb.begin(buffers=True) as transaction:
                yield transaction
        except (lmdb.Error, struct.error, ValueError) as error:
            raise StorageError(
                f"The replay in {self._path} is damaged ({error}). Restore it, or start with an "
                "empty one with --empty-replay."
            ) from error


def _record(value: bytes | memoryview | None) -> Record:
    if value is None:
        raise ValueError("an unroll is missing")
    key, frames, size = _HEADER.unpack_from(value)
    data = bytes(value[_HEADER.size :])
    return Record(key, frames, data[:size].decode(), data[size:])
