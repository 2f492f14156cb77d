"""The door: listens for callers, identifies peers, and tracks who was admitted or refused.

`GuardedDoor` puts a process (`learner.front.relay`) in front, which is told of both and limits what
strangers may use before anything reaches the learner.
"""

import collections
import contextlib
import json
import logging
import os
import pathlib
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from impala.runtime import listen as addresses
from learner.front import relay

_log = logging.getLogger(__name__)

_TRAINING_FILES = 64  # checkpoints, replay, telemetry
_METRICS_FILES = 64  # `impala.runtime.exporter`: 32 connections, and those being opened or closed
_RESERVED_FILES = _TRAINING_FILES + _METRICS_FILES + relay.HEALTH_CONNECTIONS
_MIN_CONNECTIONS = 4  # with fewer, serving is impossible
_MAX_CONNECTIONS = 10_000
_MIN_PAUSE = 0.2  # seconds before the process in front is restarted; doubled each time,
_MAX_PAUSE = 30.0  # ...up to this; reset after it has run for
_GOOD_SECONDS = 60.0
_LOG_SECONDS = 10.0  # between two log messages about throttled hosts
_END_SECONDS = 10.0  # to flush the last bytes


class Door:
    """A door without a process in front: the server listens itself. Thread-safe."""

    def __init__(self, listen: str, health_listen: str | None) -> None:
        """Opens nothing yet.

        Args:
          listen: HOST:PORT or unix:PATH.
          health_listen: HOST:PORT where only health is served.
        """
        self.listen, self.health_listen = listen, health_listen
        self._refused: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def bind(self) -> tuple[str, str | None]:
        """Returns the addresses on which the server is to listen, for calls and for health.

        Raises:
          OSError: an address cannot be bound.
        """
        return self.listen, self.health_listen

    def open(self, address: str, health_address: str | None) -> tuple[str, str | None]:
        """Accepts callers, once the server serves.

        Args:
          address: the address that the server has bound.
          health_address: likewise for health.

        Returns:
          The addresses for clients.
        """
        return address, health_address

    def check(self) -> None:
        """Raises RuntimeError if callers are no longer accepted."""

    def close(self) -> None:
        """Accepts no more callers. Connections end once the server's last data is sent."""

    def host(self, peer: str) -> str:
        """Returns the host of a gRPC peer, as limits count hosts."""
        return peer.rpartition(":")[0]

    def name(self, peer: str) -> str:
        """Returns the address of a peer, for messages."""
        return peer

    def admitted(self, peer: str) -> None:
        """Notes that a call of a peer was admitted."""

    def refused(self, peer: str, reason: str) -> None:
        """Notes that a call of a peer was refused."""
        self._count({reason: 1})

    def cancelled(self, peer: str) -> None:
        """Notes that a peer cancelled a call, which honest ones do occasionally."""

    def refusals(self) -> Mapping[str, int]:
        """Returns how many connections and calls were refused, by reason."""
        with self._lock:
            return dict(self._refused)

    def _count(self, refused: Mapping[str, int]) -> None:
        with self._lock:
            self._refused.update(refused)


def make(listen: str, health_listen: str | None, guarded: bool, is_encrypted: bool) -> Door:
    """Returns the door for these addresses.

    Args:
      listen: HOST:PORT or unix:PATH.
      health_listen: HOST:PORT where only health is served.
      guarded: whether to put a process in front if other hosts may reach an address.
      is_encrypted: whether clients speak TLS on `listen`.
    """
    is_reached = addresses.socket_path(listen) is None or health_listen is not None
    if guarded and is_reached and sys.platform.startswith("linux"):
        return GuardedDoor(listen, health_listen, is_encrypted)
    return Door(listen, health_listen)


class _Peer(NamedTuple):
    """A caller that came through the process in front."""

    number: str  # of its connection
    address: str
    port: str


class GuardedDoor(Door):
    """A door with a process in front, which listens and forwards what speaks as a gRPC client.

    The process is restarted whenever it dies. The listening sockets stay open, so only its current
    connections are lost.
    """

    def __init__(
        self,
        listen: str,
        health_listen: str | None,
        is_encrypted: bool,
        limits: relay.Limits | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
          listen: HOST:PORT, or unix:PATH, on which the server listens itself.
          health_listen: HOST:PORT where only health is served.
          is_encrypted: whether clients speak TLS on `listen`.
          limits: of connections; None: derived from this process's limit of open files.
        """
        super().__init__(listen, health_listen)
        self._begins = (relay.CLIENT_HELLO if is_encrypted else relay.PREFACE).decode("latin-1")
        self._limits = limits
        self._address = listen  # that callers dial
        self._health_address: str | None = None
        self._tag = secrets.token_hex(4)
        self._sockets: list[socket.socket] = []
        self._ports: list[relay.Port] = []
        self._directory: pathlib.Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._error: str | None = None
        self._logged = -_LOG_SECONDS

    def bind(self) -> tuple[str, str | None]:
        if self._limits is None:
            self._limits = relay.Limits(connections=_room_for_connections())
        directory = tempfile.mkdtemp(prefix="impala-", dir=addresses.temporary_directory())
        self._directory = pathlib.Path(directory)  # private
        preface = relay.PREFACE.decode("latin-1")
        try:
            if addresses.socket_path(self.listen) is None:
                own = self._listen_on("The learner", self.listen, "grpc", self._begins)
            else:
                own = self._address = self.listen
            if self.health_listen is None:
                return own, None
            return own, self._listen_on("Health", self.health_listen, "health", preface)
        except OSError:
            self.close()
            raise

    def open(self, address: str, health_address: str | None) -> tuple[str, str | None]:
        del address, health_address
        self._start()
        self._thread = threading.Thread(target=self._keep, name="door", daemon=True)
        self._thread.start()
        return self._address, self._health_address

    def check(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)

    def close(self) -> None:
        self._closing.set()
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)
        if self._thread is not None:
            self._thread.join()
        for each in self._sockets:
            each.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def host(self, peer: str) -> str:
        named = self._parse(peer)
        return super().host(peer) if named is None else relay.host_of(named.address)

    def name(self, peer: str) -> str:
        named = self._parse(peer)
        return super().name(peer) if named is None else f"{named.address} port {named.port}"

    def admitted(self, peer: str) -> None:
        self._tell("admitted", peer)

    def refused(self, peer: str, reason: str) -> None:
        super().refused(peer, reason)
        self._tell("refused", peer)

    def cancelled(self, peer: str) -> None:
        self._tell("refused", peer)

    def _listen_on(self, what: str, listen: str, name: str, begins: str) -> str:
        """Listens for the process in front. Returns the address for the server to listen on."""
        sockets = addresses.bind(what, listen)
        self._sockets += sockets
        path = str((self._directory or pathlib.Path()) / name)
        is_health = name == "health"
        fds = [each.fileno() for each in sockets]
        self._ports.append(relay.Port(fds, path, begins, is_health))
        if is_health:
            self._health_address = addresses.bound(listen, sockets)
        else:
            self._address = addresses.bound(listen, sockets)
        return f"unix:{path}"

    def _parse(self, peer: str) -> "_Peer | None":
        """Parses the name that the relay gave to a socket; None for a direct caller."""
        tag, *rest = urllib.parse.unquote(peer.removeprefix("unix-abstract:")).split("/")
        return _Peer(*rest) if tag == self._tag and len(rest) == 3 else None

    def _tell(self, what: str, peer: str) -> None:
        """Notifies the process in front without waiting: a lost message will be repeated."""
        control, named = self._control, self._parse(peer)
        if control is not None and named is not None:
            with contextlib.suppress(OSError):
                control.send(f"{what} {named.number}".encode(), socket.MSG_DONTWAIT)

    def _start(self) -> None:
        assert self._limits is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "tag": self._tag,
            "limits": self._limits._asdict(),
            "ports": [port._asdict() for port in self._ports],
        }
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", relay.__file__),
                        *(str(theirs.fileno()), json.dumps(settings)),
                    ],
                    pass_fds=[theirs.fileno(), *(each.fileno() for each in self._sockets)],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # ends with its socket, not by Ctrl-C
                )
        except OSError:
            ours.close()
            raise
        self._control = ours
        if self._closing.is_set():  # close() may have run before there was a control socket
            ours.shutdown(socket.SHUT_WR)

    def _keep(self) -> None:
        """Restarts the process in front until the door is closed."""
        pause = _MIN_PAUSE
        try:
            while True:
                begun = time.monotonic()
                try:
                    if self._control is None:
                        self._start()
                    why = f"ended with status {self._hear_until_its_end()}"
                except OSError as error:
                    why = f"cannot be started ({error})"
                if self._closing.is_set():
                    return
                if time.monotonic() - begun >= _GOOD_SECONDS:
                    pause = _MIN_PAUSE
                _log.error(
                    "The process in front of %s %s: starting it in %.1f s. Until then no caller "
                    "comes in; if this goes on, look for a lack of memory or of processes.",
                    *(self._address, why, pause),
                )
                if self._closing.wait(pause):
                    return
                pause = min(_MAX_PAUSE, 2.0 * pause)
        except Exception as error:
            _log.exception("The process in front of %s is left alone.", self._address)
            self._error = f"The process in front of {self._address} is left alone: {error}"

    def _hear_until_its_end(self) -> int:
        """Receives reports until the process in front ends. Returns its status."""
        control, process = self._control, self._process
        assert control is not None and process is not None
        with control:
            while message := _received(control):
                self._hear(json.loads(message))
            self._control = None
        try:
            return process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _hear(self, report: dict[str, dict[str, float]]) -> None:
        self._count({reason: int(count) for reason, count in report["refused"].items()})
        now = time.monotonic()
        if report["slowed"] and now - self._logged >= _LOG_SECONDS:
            self._logged = now
            for host, seconds in report["slowed"].items():
                _log.warning(
                    "%s was refused too often: a new connection every %.0f s from now on.",
                    *(host, seconds),
                )


def _received(control: socket.socket) -> bytes:
    try:
        return control.recv(1 << 16)
    except OSError:
        return b""


def _room_for_connections() -> int:
    """Returns for how many connections this process has file descriptors left.

    Raises:
      OSError: too few.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    has_list = pathlib.Path("/proc/self/fd").exists()
    taken = len(os.listdir("/proc/self/fd" if has_list else "/dev/fd"))
    room = most - taken - _RESERVED_FILES
    if room < _MIN_CONNECTIONS:
        raise OSError(
            f"This process may open {most} files, has {taken} open and needs {_RESERVED_FILES} "
            f"for training, metrics and health, which leaves {max(0, room)} for connections: "
            f"allow it {taken + _RESERVED_FILES + 64} or more (ulimit -n)."
        )
    return min(room, _MAX_CONNECTIONS)
