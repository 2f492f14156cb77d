"""Parameters that the actors of one host share: one of them pulls, the others read what it got.

What was pulled is a file for each learner, in a directory of this user alone and in memory if the
host has such a file system. It is replaced atomically, so that a reader sees one version, whoever
dies. Who pulls holds a lock that the kernel releases when it dies; who waits for it does so for a
few seconds, and then pulls by itself. Who leaves deletes the file, and the others pull again.
Nothing that goes wrong here keeps an actor from pulling.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import pathlib
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from typing import BinaryIO, NamedTuple

from google.protobuf.message import DecodeError

from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

Call = Callable[[pb.GetParametersRequest], pb.GetParametersReply]

_MEMORY = pathlib.Path("/dev/shm")  # where Linux has a file system in memory
_HEADER, _ASKED = struct.Struct("<Qd"), 8  # of `_Header`, and the place of its second field
# An actor asks when three quarters of an unroll are done, and takes what there is at its boundary.
# It need not ask if another one has, within a quarter of its own interval: then what there is at
# the boundary is on average not older than what it would have pulled.
_QUARTER, _MOST_SECONDS = 0.25, 0.25
_WAIT_SECONDS = 10.0  # for one that pulls, which may be frozen
_LOOK_SECONDS = 0.005
_FORGET_SECONDS = 3600.0  # after which a file that nobody replaces is deleted


class _Header(NamedTuple):
    version: int
    asked: float  # when, on the monotonic clock, which a host's processes share


class SharedPulls:
    """This process's view of what its host has pulled. Thread-safe but for `pull`."""

    def __init__(self, learner: str, directory: pathlib.Path | None = None) -> None:
        """Makes the directory.

        Args:
          learner: its address. Peers have one incarnation, but one of them may have a version
            before another.
          directory: which nobody else can write; None: that of this user on this host.
        """
        root = _MEMORY if os.access(_MEMORY, os.W_OK) else pathlib.Path(tempfile.gettempdir())
        self._directory = root / f"impala-{os.getuid()}" if directory is None else directory
        self._learner = hashlib.sha256(learner.encode()).hexdigest()[:8]
        self._incarnation = 0  # of the learner that was asked last
        self._asked = time.monotonic() - _MOST_SECONDS / _QUARTER
        self._is_usable = _is_private(self._directory)

    def pull(
        self, incarnation: int, request: pb.GetParametersRequest, call: Call
    ) -> pb.GetParametersReply | None:
        """Pulls parameters newer than those held, once for all actors of this host.

        Args:
          incarnation: of the learner.
          request: what is to be asked.
          call: asks the learner; what it raises is raised.

        Returns:
          The answer; None if another actor has got newer ones, which `newer` returns.
        """
        if incarnation != self._incarnation:
            self.leave()
            self._incarnation = incarnation
        now = time.monotonic()
        # Since when another actor must have asked, so that this one need not.
        since = now - min(_MOST_SECONDS, _QUARTER * (now - self._asked))
        self._asked = now
        if not self._is_usable:
            return call(request)
        held = request.newer_than if request.learner_incarnation == incarnation else -1

        def has_newer() -> bool:
            found = self._header(incarnation)
            return found is not None and found.version > held and found.asked >= since

        path = self._path(incarnation).with_suffix(".lock")
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(open(path, "ab"))
            except OSError:
                return call(request)
            while not has_newer():
                is_puller = _locks(lock)
                if is_puller and has_newer():  # the one before has just finished
                    break
                if is_puller or time.monotonic() > now + _WAIT_SECONDS:
                    return self._call(incarnation, request, held, call)
                time.sleep(_LOOK_SECONDS)
        return None

    def newer(self, incarnation: int, held: int) -> pb.GetParametersReply | None:
        """Returns parameters newer than version `held` that this host has, if any."""
        found = self._header(incarnation) if self._is_usable else None
        if found is None or found.version <= held:
            return None
        path = self._path(incarnation)
        try:
            return pb.GetParametersReply.FromString(path.read_bytes()[_HEADER.size :])
        except (OSError, DecodeError):
            with contextlib.suppress(OSError):  # the host has crashed while it was written
                path.unlink()
        return None

    def leave(self) -> None:
        """Deletes what the learner that was asked last has sent: memory that nobody would free."""
        if self._is_usable:
            path = self._path(self._incarnation)
            for each in (path, path.with_suffix(".lock")):
                with contextlib.suppress(OSError):  # another actor has left before
                    each.unlink()

    def _header(self, incarnation: int) -> "_Header | None":
        try:
            with open(self._path(incarnation), "rb", buffering=0) as file:
                found = _Header(*_HEADER.unpack(file.read(_HEADER.size)))
        except (OSError, struct.error):
            return None
        return found if found.asked <= time.monotonic() else None  # of before the host's last start

    def _call(
        self, incarnation: int, request: pb.GetParametersRequest, held: int, call: Call
    ) -> pb.GetParametersReply | None:
        """Asks for what is newer than all that this host has."""
        found, asked = self._header(incarnation), time.monotonic()
        if found is None or found.version <= held:
            reply = call(request)
        else:
            newest = pb.GetParametersRequest()
            newest.CopyFrom(request)
            newest.learner_incarnation, newest.newer_than = incarnation, found.version
            reply = call(newest)
            if not reply.HasField("parameters") and not reply.finished:
                self._note(incarnation, asked)
                return None
        is_of_learner = reply.parameters.learner_incarnation == incarnation
        if reply.HasField("parameters") and is_of_learner and not reply.finished:
            self._put(incarnation, asked, reply)
        return reply

    def _note(self, incarnation: int, asked: float) -> None:
        """Notes that nothing newer was there at a time."""
        with (
            contextlib.suppress(OSError),
            open(self._path(incarnation), "r+b", buffering=0) as file,
        ):
            file.seek(_ASKED)
            file.write(struct.pack("<d", asked))

    def _put(self, incarnation: int, asked: float, reply: pb.GetParametersReply) -> None:
        path = self._path(incarnation)
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
        found = self._header(incarnation)
        if found is not None and found.version > reply.parameters.version:
            return  # one that did not wait for this pull has got newer ones
        try:
            header = _HEADER.pack(reply.parameters.version, asked)
            partial.write_bytes(header + reply.SerializeToString())
            now = partial.stat().st_mtime  # on the file system's clock
            os.replace(partial, path)
            self._forget(now)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            self._is_usable = False
            _log.warning(
                "%s: this actor pulls its parameters alone from now on (%s).", path, error.strerror
            )

    def _forget(self, now: float) -> None:
        """Deletes what nobody has replaced for long: of learners that are gone."""
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > _FORGET_SECONDS:
                    path.unlink()

    def _path(self, incarnation: int) -> pathlib.Path:
        return self._directory / f"{incarnation:016x}-{self._learner}"


def _locks(file: BinaryIO) -> bool:
    """Returns whether this process is the one that pulls, until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_private(directory: pathlib.Path) -> bool:
    """Makes a directory. Returns whether it is this user's, and nobody else can write there."""
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as error:
        _log.info("No parameters are shared in %s (%s).", directory, error.strerror)
        return False
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return True
    _log.warning(
        "No parameters are shared: %s is not a directory of this user with mode 700. Delete it.",
        directory,
    )
    return False
