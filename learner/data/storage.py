"""Storage of a replay's records on disk, safe against crashes.

They are in an SQLite database, which holds the last commit after the process is killed or
the host loses power. Nothing of the file is mapped into memory, so a damaged file causes errors and
not signals. A record has a checksum, which is verified when it is read.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import pathlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
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


_PAGE_BYTES = 16384
_TABLES = (  # heads have their own table, so that all of them can be read quickly
    "CREATE TABLE heads (number INTEGER PRIMARY KEY, key REAL, frames INTEGER, actor TEXT, "
    "size INTEGER, digest BLOB)",
    "CREATE TABLE data (number INTEGER PRIMARY KEY, content BLOB)",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, content TEXT, digest BLOB)",
)
_DIGEST_BYTES = 16
# Errors of SQLite that do not mean damage: a full disk, access, memory.
_NO_DAMAGE = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR),
    *(sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY),
)
_UNREADABLE = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)


class Disk:
    """Records by number, in an SQLite database in a directory.

    One thread may write while others read, which wait for it.
    """

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
        self._new = path.with_name(f"{path.name}.new")  # replaces a damaged one
        self._identity = identity
        self._move_aside = move_aside
        self._counted = counted
        self._state = State()
        self._sqlite: sqlite3.Connection | None = None
        self._lock = threading.Lock()  # held by who uses it
        try:
            self._open()
        except DamagedError as damage:
            self.start_over(damage)

    def state(self) -> State:
        """Returns the state of the last commit."""
        return self._state

    def heads(self) -> Iterator[tuple[int, Head]]:
        """Yields number and head of all records of the last commit, in ascending order.

        Raises:
          DamagedError: they are not what was written; possibly raised only at the end.
        """
        with self._lock, self._examining():
            columns = "number, key, frames, actor, size"
            for number, *values in self._sql(f"SELECT {columns} FROM heads ORDER BY number"):
                yield number, _head(number, *values)

    def get(self, number: int) -> Record:
        """Returns an existing record.

        Raises:
          DamagedError: it is not what was written.
        """
        with self._lock, self._examining():
            row = self._sql(
                "SELECT key, frames, actor, content, digest FROM heads JOIN data "
                "USING (number) WHERE number = ?",
                number,
            ).fetchone()
            if row is None:
                raise ValueError(f"unroll {number} is missing")
            record = Record(*row[:-1])
            if _digest(number, *record) != row[-1]:
                raise ValueError(f"unroll {number} differs from its checksum")
            return record

    def commit(
        self, state: State, added: Mapping[int, Record], removed: Iterable[int] = ()
    ) -> None:
        """Makes changes since the last commit durable, atomically.

        Args:
          state: after them.
          added: the new records.
          removed: numbers of earlier ones; some may be unknown.

        Raises:
          StorageError: the disk cannot be written; DamagedError if damage is the cause.
        """
        digests = {number: _digest(number, *record) for number, record in added.items()}
        with self._lock, self._examining(), self._transaction():
            for number in removed:
                self._sql("DELETE FROM data WHERE number = ?", number)
                self._sql("DELETE FROM heads WHERE number = ?", number)
            for number, (key, frames, actor, data) in added.items():
                self._sql(
                    "INSERT INTO heads VALUES (?, ?, ?, ?, ?, ?)",
                    *(number, key, frames, actor, len(data), digests[number]),
                )
                self._sql("INSERT INTO data VALUES (?, ?)", number, data)
            self._put_meta("state", json.dumps(state._asdict()))
        self._state = state

    def empty(self, added: int) -> None:
        """Removes all records, by another file: each one's removal would go through the journal.

        A kill before the next commit leaves none. If it fails, all are still there.

        Args:
          added: unrolls ever added, which the state is to count.

        Raises:
          StorageError: the disk cannot be written.
        """
        with self._lock, self._examining():
            self.close()
            try:
                self._make(self._file, added)
                self._state = State(added=added)
            finally:
                self._connect(self._file)

    def start_over(self, damage: DamagedError, added: int = 0) -> None:
        """Empties the disk; its numbers continue from `state()` or `added`.

        Args:
          damage: why.
          added: how many records were numbered, with those that are not committed.

        Raises:
          DamagedError: `damage`, if starting over is not allowed.
        """
        if self._move_aside is None:
            raise damage
        _log.error("%s Going on with an empty one.", damage)
        self.close()
        # The new one is complete first: until then, and if that fails, the damaged one stays.
        with self._examining():
            self._new.mkdir(exist_ok=True)
            self._make(self._new / self._file.name, max(self._counted, self._state.added, added))
            self._move_aside()
        self._open()

    def close(self) -> None:
        """Closes the database. Uncommitted changes are lost."""
        if self._sqlite is not None:
            with contextlib.suppress(sqlite3.Error):
                self._sqlite.close()
            self._sqlite = None

    def _open(self) -> None:
        try:
            with self._examining():
                if not self._path.exists() and (self._new / self._file.name).exists():
                    os.rename(self._new, self._path)
                    atomic.flush_directory(self._path.parent)
                self._path.mkdir(parents=True, exist_ok=True)
                if not self._file.exists():
                    self._make(self._file, 0)
                self._connect(self._file)
                theirs = self._meta("identity")
                self._state = State(**json.loads(self._meta("state")))
            if theirs != self._identity:
                raise StorageError(
                    f"The replay in {self._path} is of another run: it was written with "
                    f"{theirs}, this run has {self._identity}. Go back to the old settings, or "
                    "start with an empty one with --empty-replay."
                )
        except BaseException:
            self.close()
            raise

    def _make(self, file: pathlib.Path, added: int) -> None:
        """Creates a file atomically: an empty file counts as damaged."""
        new = file.with_suffix(".new")
        for leftover in (new, _journal(new), _journal(file)):  # from a crash
            leftover.unlink(missing_ok=True)
        try:
            self._connect(new)
            with self._transaction():
                for statement in _TABLES:
                    self._sql(statement)
                self._put_meta("identity", self._identity)
                self._put_meta("state", json.dumps(State(added=added)._asdict()))
        finally:
            self.close()
        _journal(new).unlink(missing_ok=True)
        os.rename(new, file)
        for directory in (file.parent, file.parent.parent):
            atomic.flush_directory(directory)

    def _meta(self, name: str) -> str:
        row = self._sql("SELECT content, digest FROM meta WHERE name = ?", name).fetchone()
        if row is None or _digest(name, row[0]) != row[1]:
            raise ValueError(f"{name} differs from its checksum")
        content: str = row[0]
        return content

    def _put_meta(self, name: str, content: str) -> None:
        digest = _digest(name, content)
        self._sql("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", name, content, digest)

    def _connect(self, file: pathlib.Path) -> None:
        self._sqlite = sqlite3.connect(
            f"{file.absolute().as_uri()}?mode=rwc",
            uri=True,
            isolation_level=None,  # transactions are explicit
            timeout=0.0,
            check_same_thread=False,  # there is a lock
        )
        for pragma in (
            f"page_size = {_PAGE_BYTES}",  # of a new file
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
        except (sqlite3.Error, ValueError, KeyError, TypeError, OverflowError) as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
            if code & 0xFF in _NO_DAMAGE and code not in _UNREADABLE:
                raise StorageError(
                    f"The replay in {self._path} cannot be used ({error}). If its disk is full, "
                    f"free space on it and start the learner again: it goes on. Or {empty} and a "
                    "lower replay.capacity_frames."
                ) from error
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


def _digest(*values: Any) -> bytes:
    """Returns the checksum of values of a row."""
    digest = hashlib.sha256(repr(values[:-1]).encode())
    last = values[-1]
    digest.update(last if isinstance(last, bytes) else repr(last).encode())
    return digest.digest()[:_DIGEST_BYTES]


def _head(number: Any, key: Any, frames: Any, actor: Any, size: Any) -> Head:
    """Returns the head of a row whose checksum is verified only with its data, when it is drawn."""
    types = [type(value) for value in (number, key, frames, actor, size)]
    if types != [int, float, int, str, int] or not (math.isfinite(key) and frames > 0 < size):
        raise ValueError(f"unroll {number} makes no sense")
    return Head(key, frames, actor, size)
