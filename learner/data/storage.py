"""Storage of a replay's records: in memory, or on disk, safe against crashes.

On disk they are in an SQLite database, which holds the last commit after the process is killed or
the host loses power. Nothing of the file is mapped into memory, so a damaged file causes errors and
not signals. Everything in it has a checksum, so damage is detected.
"""

import abc
import contextlib
import hashlib
import json
import logging
import math
import os
import pathlib
import sqlite3
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from impala.logdir import atomic
from impala.logdir.directory import StorageError

_log = logging.getLogger(__name__)


class DamagedError(StorageError):
    """The contents of a replay's disk are not what was written there."""


class Record(NamedTuple):
    """One stored unroll."""

    key: float  # decides when it is evicted
    frames: int  # environment frames in it
    actor: str  # its sender
    data: bytes  # compressed


class Head(NamedTuple):
    """A record without its data."""

    key: float
    frames: int
    actor: str
    size: int  # of the data, in bytes


class State(NamedTuple):
    """A replay's state beside its records."""

    added: int = 0  # unrolls ever added
    threshold: float = math.inf  # smallest key that was ever evicted


class Store(abc.ABC):
    """Records by number."""

    @abc.abstractmethod
    def state(self) -> State:
        """Returns the state of the last commit."""

    @abc.abstractmethod
    def heads(self) -> Iterator[tuple[int, Head]]:
        """Yields number and head of all records of the last commit, in ascending order.

        Raises:
          DamagedError: they are not what was written; possibly raised only at the end.
        """

    @abc.abstractmethod
    def get(self, number: int) -> Record:
        """Returns an existing record.

        Raises:
          DamagedError: it is not what was written.
        """

    @abc.abstractmethod
    def put(self, number: int, record: Record) -> None:
        """Adds a record."""

    @abc.abstractmethod
    def delete(self, number: int) -> None:
        """Removes an existing record."""

    @abc.abstractmethod
    def commit(self, state: State) -> None:
        """Makes all changes since the last commit durable, atomically.

        Raises:
          StorageError: the store cannot be written; DamagedError if damage is the cause.
        """

    @abc.abstractmethod
    def start_over(self, damage: DamagedError) -> None:
        """Empties the store; its numbers continue from `state()`.

        Raises:
          DamagedError: `damage`, if starting over is not allowed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the store. Uncommitted changes are lost."""


class Memory(Store):
    """Keeps records in memory; they are lost with the process."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}

    def state(self) -> State:
        return State()

    def heads(self) -> Iterator[tuple[int, Head]]:
        return iter(())

    def get(self, number: int) -> Record:
        return self._records[number]

    def put(self, number: int, record: Record) -> None:
        self._records[number] = record

    def delete(self, number: int) -> None:
        del self._records[number]

    def commit(self, state: State) -> None:
        pass

    def start_over(self, damage: DamagedError) -> None:
        raise damage

    def close(self) -> None:
        self._records.clear()


_PAGE_BYTES = 16384
_SCHEMA = {  # heads have their own table, so that all of them can be read quickly
    "data": "CREATE TABLE data (number INTEGER PRIMARY KEY, content BLOB NOT NULL)",
    "heads": "CREATE TABLE heads (number INTEGER PRIMARY KEY, content BLOB NOT NULL)",
    "meta": "CREATE TABLE meta (number INTEGER PRIMARY KEY, content BLOB NOT NULL)",
}
_IDENTITY, _STATE = 1, 2  # rows of meta
_APPLICATION, _VERSION = 0x496D5265, 1  # in the header of the file: application id and layout
_HEAD = struct.Struct("<dQQ16s")  # key, frames, size and digest of the data; the actor follows
_DIGEST_BYTES = 16
# Errors of SQLite that do not mean damage: a full disk, access, memory.
_NO_DAMAGE = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
    *(sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY),
)
_UNREADABLE = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)


class Disk(Store):
    """Keeps records in an SQLite database in a directory; uncommitted ones are in memory."""

    def __init__(
        self,
        path: pathlib.Path,
        identity: str,
        move_aside: Callable[[], object] | None = None,
        counted: int = 0,
    ):
        """Opens the directory, or makes it.

        Args:
          path: the directory; one process at a time may use it.
          identity: what the records have in common, such as the fingerprint of a spec.
          move_aside: moves a damaged directory away, after which the store starts over empty; None:
            damage is an error.
          counted: unrolls known to have been added: where the numbers of an empty store that
            replaces a damaged one start.

        Raises:
          StorageError: it holds records of another identity, is damaged or cannot be opened.
        """
        self._path = path
        self._file = path / "replay.sqlite"
        self._identity = identity
        self._move_aside = move_aside
        self._uncommitted: dict[int, Record | None] = {}  # None: deleted
        self._counted = counted
        self._count = self._total = 0  # of the records, and of their digests
        self._state = State()
        self._sqlite: sqlite3.Connection | None = None
        try:
            self._open(State())
        except DamagedError as damage:
            self.start_over(damage)

    def state(self) -> State:
        return self._state

    def heads(self) -> Iterator[tuple[int, Head]]:
        before, count, total = -1, 0, 0
        with self._examining():
            for number, content in self._sql("SELECT number, content FROM heads ORDER BY number"):
                if not before < number < self._state.added:
                    raise ValueError(f"unroll {number} is not in its place")
                head, _ = _head(number, content)
                yield number, head
                before, count, total = number, count + 1, total ^ _last_digest(content)
            if (count, total) != (self._count, self._total):
                raise ValueError(f"{count} unrolls are there, {self._count} other ones should be")

    def get(self, number: int) -> Record:
        record = self._uncommitted.get(number)
        if record is None:
            with self._examining():
                rows = self._sql(
                    "SELECT heads.content, data.content FROM heads JOIN data USING (number) "
                    "WHERE number = ?",
                    number,
                ).fetchall()
                if not rows:
                    raise ValueError(f"unroll {number} is missing")
                head, digest = _head(number, rows[0][0])
                data = rows[0][1]
                if not isinstance(data, bytes) or _digest(data) != digest:
                    raise ValueError(f"unroll {number} differs from its checksum")
                record = Record(head.key, head.frames, head.actor, data)
        return record

    def put(self, number: int, record: Record) -> None:
        self._uncommitted[number] = record

    def delete(self, number: int) -> None:
        self._uncommitted[number] = None

    def commit(self, state: State) -> None:
        count, total = self._count, self._total
        with self._examining(), self._transaction():
            for number, record in self._uncommitted.items():
                if record is None:
                    self._sql("DELETE FROM data WHERE number = ?", number)
                    deleted = self._sql(
                        "DELETE FROM heads WHERE number = ? RETURNING content", number
                    ).fetchall()
                    for (content,) in deleted:
                        _head(number, content)
                        count, total = count - 1, total ^ _last_digest(content)
                else:
                    head = _HEAD.pack(
                        *(record.key, record.frames, len(record.data), _digest(record.data))
                    )
                    content = _sealed(f"unroll {number}", head + record.actor.encode())
                    self._sql("INSERT INTO heads VALUES (?, ?)", number, content)
                    self._sql("INSERT INTO data VALUES (?, ?)", number, record.data)
                    count, total = count + 1, total ^ _last_digest(content)
            self._sql(
                "UPDATE meta SET content = ? WHERE number = ?",
                *(_state_row(state, count, total), _STATE),
            )
        self._state, self._count, self._total = state, count, total
        self._uncommitted.clear()

    def start_over(self, damage: DamagedError) -> None:
        if self._move_aside is None:
            raise damage
        _log.error("%s Going on with an empty one.", damage)
        self.close()
        self._uncommitted.clear()
        with self._examining():
            self._move_aside()
        self._open(State(added=max(self._counted, self._state.added)))

    def close(self) -> None:
        if self._sqlite is not None:
            with contextlib.suppress(sqlite3.Error):
                self._sqlite.close()
            self._sqlite = None

    def _open(self, initial: State) -> None:
        theirs = b""
        try:
            with self._examining():
                self._path.mkdir(parents=True, exist_ok=True)
                if not self._file.exists():
                    self._make(initial)
                theirs = self._examine()
            if theirs.decode() != self._identity:
                raise StorageError(
                    f"The replay in {self._path} is of another run: it was written with "
                    f"{theirs.decode()}, this run has {self._identity}. Go back to the old "
                    "settings, or start with an empty one with --empty-replay."
                )
        except BaseException:
            self.close()
            raise

    def _make(self, initial: State) -> None:
        """Creates the file atomically: an empty file counts as damaged."""
        new = self._file.with_suffix(".new")
        for leftover in (new, _journal(new), _journal(self._file)):  # from a crash
            leftover.unlink(missing_ok=True)
        self._connect(new)
        with self._transaction():
            for statement in _SCHEMA.values():
                self._sql(statement)
            identity = _sealed("identity", self._identity.encode())
            self._sql("INSERT INTO meta VALUES (?, ?)", _IDENTITY, identity)
            self._sql("INSERT INTO meta VALUES (?, ?)", _STATE, _state_row(initial, 0, 0))
        self.close()
        _journal(new).unlink(missing_ok=True)
        os.rename(new, self._file)
        for directory in (self._path, self._path.parent):
            atomic.flush_directory(directory)

    def _examine(self) -> bytes:
        """Opens the file and reads everything but records. Returns its identity."""
        with open(self._file, "rb") as file:
            header = file.read(100)
        if _fixed(header) != _fixed(_header()):
            raise ValueError("its header is not that of a replay")
        self._connect(self._file)
        schema = self._sql("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        if dict(schema) != _SCHEMA:
            raise ValueError("its tables are not those of a replay")
        rows = dict(self._sql("SELECT number, content FROM meta"))
        state = json.loads(_unsealed("state", rows.get(_STATE)))
        self._state = State(state["added"], state["threshold"])
        self._count, self._total = state["count"], int(state["total"], 16)
        return _unsealed("identity", rows.get(_IDENTITY))

    def _connect(self, file: pathlib.Path) -> None:
        self._sqlite = sqlite3.connect(
            f"{file.absolute().as_uri()}?mode=rwc",
            uri=True,
            isolation_level=None,  # transactions are explicit
            timeout=0.0,
            check_same_thread=False,  # the replay holds a lock
        )
        for pragma in (
            f"page_size = {_PAGE_BYTES}",  # of a new file
            f"application_id = {_APPLICATION}" if file != self._file else "application_id",
            f"user_version = {_VERSION}" if file != self._file else "user_version",
            "locking_mode = EXCLUSIVE",
            "journal_mode = TRUNCATE",
            "synchronous = FULL",  # a commit returns once it is on the disk
            "mmap_size = 0",  # with mmap, a truncated file would cause SIGBUS
            "cell_size_check = ON",
            "trusted_schema = OFF",
            "cache_size = -16384",  # KiB
        ):
            self._sql(f"PRAGMA {pragma}").fetchall()

    def _sql(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if self._sqlite is None:
            raise StorageError(f"The replay in {self._path} is closed.")
        return self._sqlite.execute(statement, values)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._sql("BEGIN IMMEDIATE")
        try:
            yield
            self._sql("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._sql("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _examining(self) -> Iterator[None]:
        """Turns errors of SQLite or the system, and failed checks, into StorageErrors."""
        empty = "start with an empty one with --empty-replay"
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            if code & 0xFF in _NO_DAMAGE and code not in _UNREADABLE:
                raise StorageError(
                    f"The replay in {self._path} cannot be used ({error}). If its disk is full, "
                    "free space on it or lower replay.capacity_frames, and start the learner "
                    "again: it goes on."
                ) from error
            raise DamagedError(
                f"The replay in {self._path} is damaged ({error}). Restore it, or {empty}."
            ) from error
        except (ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
            raise DamagedError(
                f"The replay in {self._path} is damaged ({error}). Restore it, or {empty}."
            ) from error
        except OSError as error:
            raise StorageError(
                f"The replay in {self._path} cannot be opened ({error.strerror}). Mend that, or "
                f"{empty}."
            ) from error


def _journal(file: pathlib.Path) -> pathlib.Path:
    """Returns the path of SQLite's rollback journal, which a crash may leave."""
    return file.with_name(f"{file.name}-journal")


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]


def _sealed(label: str, content: bytes) -> bytes:
    """Returns content followed by a digest of it and its label."""
    return content + _digest(label.encode() + content)


def _unsealed(label: str, value: Any) -> bytes:
    """Returns the content of a value from `_sealed`.

    Raises:
      ValueError: label or content differ from the sealed ones.
    """
    if isinstance(value, bytes):
        content = value[:-_DIGEST_BYTES]
        if value == _sealed(label, content):
            return content
    raise ValueError(f"{label} differs from its checksum")


def _last_digest(sealed: bytes) -> int:
    """Returns the digest of a sealed value as a number, to be combined by exclusive or."""
    return int.from_bytes(sealed[-_DIGEST_BYTES:])


def _head(number: int, value: Any) -> tuple[Head, bytes]:
    """Returns a head, and the digest of the data."""
    content = _unsealed(f"unroll {number}", value)
    key, frames, size, digest = _HEAD.unpack_from(content)
    return Head(key, frames, content[_HEAD.size :].decode(), size), digest


def _state_row(state: State, count: int, total: int) -> bytes:
    row = {**state._asdict(), "count": count, "total": f"{total:x}"}
    return _sealed("state", json.dumps(row).encode())


def _header() -> bytes:
    """Returns the fixed header of a replay's file: https://sqlite.org/fileformat2.html, 1.3."""
    return struct.pack(
        ">16sH6B20xI4x5I28x",
        *(b"SQLite format 3\0", _PAGE_BYTES, 1, 1, 0, 64, 32, 32),
        *(4, 0, 1, _VERSION, 0, _APPLICATION),
    )


def _fixed(header: bytes) -> bytes:
    """Returns those parts of a header that never change."""
    return header[:24] + header[44:48] + header[52:92]
