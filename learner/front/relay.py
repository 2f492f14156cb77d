"""The process in front of the learner's ports: accepts connections and forwards bytes.

It runs as its own script and imports only the standard library, so it starts quickly and attacks on
it take no time from training. The learner listens on Unix sockets that only the two processes can
reach. A connection is forwarded once it has sent the first bytes of a gRPC client, so silent ones
never reach the learner. TLS passes through: the learner verifies certificates.

Each connection to the learner comes from a socket whose name identifies the client, and the learner
reports which ones it has admitted calls of and which it has refused. Until its first admitted call
a connection may send only a handshake and a few calls, and a host may have a limited number of
them. A connection that is refused often is closed, and its host may open new ones only slowly;
connections of that host with admitted calls stay open.
"""

import collections
import contextlib
import errno
import ipaddress
import json
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # first bytes of an HTTP/2 client
CLIENT_HELLO = b"\x16\x03"  # first bytes of a TLS client

HEALTH_CONNECTIONS = 16  # at once, to the learner's health port

_CHUNK = 256 << 10  # bytes forwarded at once, and the largest buffer of a direction
_TICK_SECONDS = 0.05  # between checks of what is due, at most...
_LOOK_SECONDS = 0.02  # ...and at least
_REPORT_SECONDS = 0.2
_FLUSH_SECONDS = 5.0  # to flush a connection after one side has closed
_FORGIVE_SECONDS = 600.0  # without a strike, after which a host's strikes are forgotten
_OWN_FILES = 32  # of this process, besides connections
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing discards unsent data and resets


class Limits(NamedTuple):
    """Limits of connections. A host is an IPv4 address or a /64 of IPv6."""

    connections: int  # to the learner
    health_connections: int = HEALTH_CONNECTIONS
    host_connections: int = 1024  # with an admitted call, and at most half of all
    host_unproven: int = 1024  # without one yet; the oldest is closed for a new one
    host_silent: int = 1024  # that have sent nothing yet; likewise
    host_burst: int = 2048  # new connections at once, as after a learner's restart...
    host_rate: float = 32.0  # ...and per second
    accept_burst: int = 4096  # of all hosts
    accept_rate: float = 1000.0
    silent: int = 4096  # of all hosts; the oldest is closed for a new one
    silent_seconds: float = 5.0
    unproven_bytes: int = 64 << 10  # of a connection without an admitted call...
    unproven_rate: float = 8 << 10  # ...and per second;
    host_bytes: int = 8 << 20  # of all such connections of a host...
    host_bytes_rate: float = 128 << 10  # ...and per second
    refusals: int = 20  # in ten seconds, of a connection...
    host_refusals: int = 100  # ...and of all unproven ones of a host
    min_pause: float = 1.0  # seconds between new connections of a host refused too often;
    max_pause: float = 60.0  # it doubles each time


class Bucket:
    """A token bucket."""

    __slots__ = ("_capacity", "_left", "_rate", "_stamp")

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        self._capacity = self._left = capacity
        self._rate = rate
        self._stamp = now

    def left(self, now: float) -> float:
        """Returns the tokens left."""
        grown = self._left + self._rate * (now - self._stamp)
        self._left, self._stamp = min(self._capacity, grown), now
        return self._left

    def take(self, now: float, count: float = 1.0) -> bool:
        """Takes tokens. Returns False, and takes none, if there are too few."""
        if self.left(now) < count:
            return False
        self._left -= count
        return True

    def is_full(self, now: float) -> bool:
        """Returns whether the bucket is full."""
        return self.left(now) >= self._capacity


class _Host:
    """The state of one host."""

    __slots__ = (
        "budget",
        "joins",
        "next_at",
        "pause",
        "proven",
        "refusals",
        "silent",
        "struck_at",
        "unproven",
    )

    def __init__(self, limits: Limits, now: float) -> None:
        # Keys of its connections, the oldest first.
        self.silent: dict[int, None] = {}
        self.unproven: dict[int, None] = {}
        self.proven: dict[int, None] = {}
        self.joins = Bucket(limits.host_burst, limits.host_rate, now)
        self.budget = Bucket(limits.host_bytes, limits.host_bytes_rate, now)
        self.refusals = Bucket(limits.host_refusals, limits.host_refusals / 10.0, now)
        self.pause = 0.0  # between new connections
        self.next_at = 0.0  # no new connection before this time
        self.struck_at = 0.0


class Hosts:
    """Decides what each host may use. It has no clock: `now` is in seconds.

    A connection is silent, then unproven, then proven. The oldest one that is not proven is closed
    for a new one, so that no stranger can lock out the others on its host.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._hosts: dict[str, _Host] = {}
        self._pruned = now

    def arrives(self, name: str, key: int, now: float) -> str | None:
        """Counts a new connection. Returns the reason if it must be refused."""
        if now - self._pruned > 60.0:
            self._prune(now)
        host = self._hosts.get(name)
        if host is None:
            host = self._hosts[name] = _Host(self._limits, now)
        if host.pause and now - host.struck_at > _FORGIVE_SECONDS:
            host.pause = 0.0
        if now < host.next_at:
            return "slowed_host"
        if self.has_all(name):
            return "too_many"
        if not host.joins.take(now):
            return "too_fast"
        if host.pause:
            host.next_at = now + host.pause
        host.silent[key] = None
        return None

    def has_all(self, name: str) -> bool:
        """Returns whether a host has as many connections with an admitted call as it may have."""
        return len(self._hosts[name].proven) >= self._limits.host_connections

    def too_many(self, name: str) -> int | None:
        """Returns the connection to close if a host has too many without an admitted call."""
        host = self._hosts[name]
        if len(host.silent) > self._limits.host_silent:
            return next(iter(host.silent))
        if len(host.unproven) > self._limits.host_unproven:
            return next(iter(host.unproven))
        return None

    def speaks(self, name: str, key: int) -> None:
        """Notes that a connection was forwarded."""
        host = self._hosts[name]
        del host.silent[key]
        host.unproven[key] = None

    def proves(self, name: str, key: int) -> None:
        """Notes the first admitted call of a connection."""
        host = self._hosts[name]
        del host.unproven[key]
        host.proven[key] = None

    def leaves(self, name: str, key: int) -> None:
        """Notes the end of a connection."""
        host = self._hosts[name]
        for some in (host.silent, host.unproven, host.proven):
            some.pop(key, None)

    def budget(self, name: str) -> Bucket:
        """Returns the budget of bytes for all unproven connections of a host."""
        return self._hosts[name].budget

    def may_be_refused(self, name: str, now: float) -> bool:
        """Counts a refused call of an unproven connection. Returns False if it was one too many."""
        return self._hosts[name].refusals.take(now)

    def strikes(self, name: str, now: float) -> float:
        """Throttles a host. Returns the seconds between its new connections from now on."""
        host = self._hosts[name]
        if now - host.struck_at > _FORGIVE_SECONDS:
            host.pause = 0.0
        host.pause = min(self._limits.max_pause, max(self._limits.min_pause, 2.0 * host.pause))
        host.struck_at, host.next_at = now, now + host.pause
        return host.pause

    def __len__(self) -> int:
        return len(self._hosts)

    def _prune(self, now: float) -> None:
        """Forgets hosts without any state."""
        self._pruned = now
        self._hosts = {
            name: host
            for name, host in self._hosts.items()
            if host.silent
            or host.unproven
            or host.proven
            or (host.pause and now - host.struck_at <= _FORGIVE_SECONDS)
            or not host.joins.is_full(now)
        }


def host_of(address: str) -> str:
    """Returns the host of an IP address, as limits count hosts."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


class Port(NamedTuple):
    """A port of the learner that is served through this process."""

    fds: list[int]  # of the listening sockets
    path: str  # of the Unix socket on which the learner listens
    begins: str  # first bytes that a client must send, in Latin-1
    is_health: bool


class _Side:
    """One of a connection's two sockets, and the data still to be written to it."""

    __slots__ = ("left", "mask", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.left: memoryview | None = None
        self.mask = 0  # events to watch for


class _Connection:
    """A client's connection and, once forwarded, the one to the learner."""

    __slots__ = (
        *("budget", "client", "deadline", "first", "host", "is_proven", "is_throttled"),
        *("key", "learner", "name", "port", "refusals"),
    )

    def __init__(
        self,
        key: int,
        client: socket.socket,
        host: str,
        name: str,
        port: Port,
        now: float,
        limits: Limits,
    ) -> None:
        self.key = key
        self.client = _Side(client)
        self.learner: _Side | None = None
        self.host = host
        self.name = name  # of the socket to the learner
        self.port = port
        self.first = b""  # received before it was forwarded
        self.is_proven = False
        self.is_throttled = False
        self.deadline = now + limits.silent_seconds
        self.budget = Bucket(limits.unproven_bytes, limits.unproven_rate, now)
        self.refusals = Bucket(limits.refusals, limits.refusals / 10.0, now)


OnEvent = Callable[[_Connection, int], None]


class Relay:
    """The event loop of this process."""

    def __init__(self, control: socket.socket, ports: list[Port], limits: Limits, tag: str) -> None:
        """Watches nothing yet.

        Args:
          control: messages from and to the learner; this process ends when it is closed.
          ports: the ports to serve.
          limits: of connections.
          tag: prefix of the names of sockets.
        """
        now = time.monotonic()
        self._control = control
        self._limits = limits
        self._tag = tag
        self._hosts = Hosts(limits, now)
        self._accepts = Bucket(limits.accept_burst, limits.accept_rate, now)
        self._listeners = [(socket.socket(fileno=fd), port) for port in ports for fd in port.fds]
        self._is_accepting = False
        self._numbers = iter(range(1, sys.maxsize))
        self._all: dict[int, _Connection] = {}
        # Each with the oldest first.
        self._silent: dict[int, _Connection] = {}
        self._unproven: dict[int, _Connection] = {}
        self._ending: dict[int, _Connection] = {}  # being flushed
        self._throttled: dict[int, _Connection] = {}
        self._passed_on = collections.Counter[bool]()  # is_health -> connections to the learner
        self._refused = collections.Counter[str]()
        self._slowed: dict[str, float] = {}
        self._reported = self._looked = now
        self._buffer = bytearray(_CHUNK)
        self._view = memoryview(self._buffer)
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        for listener, _ in self._listeners:
            listener.setblocking(False)
        control.setblocking(False)
        self._is_over = False

    def run(self) -> None:
        """Serves until the learner closes its end of the control socket."""
        self._accept(True)
        while not self._is_over:
            for key, mask in self._selector.select(_TICK_SECONDS):
                key.data(mask)
            self._look(time.monotonic())
        self._accept(False)
        self._selector.unregister(self._control)
        end = time.monotonic() + _FLUSH_SECONDS
        while self._has_left() and time.monotonic() < end:
            for key, mask in self._selector.select(_TICK_SECONDS):
                key.data(mask)

    def _has_left(self) -> bool:
        """Returns whether data from the learner is still to be sent to a client."""
        return any(each.client.left is not None for each in self._all.values())

    # Messages from the learner.

    def _on_control(self, _: int) -> None:
        """Handles a message: admitted KEY, or refused KEY."""
        while True:
            try:
                message = self._control.recv(64)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._is_over = True
                return
            what, number = message.decode("ascii").split(" ")
            connection = self._all.get(int(number))
            if connection is not None:
                if what == "admitted":
                    self._admitted(connection)
                else:
                    self._was_refused(connection, time.monotonic())

    def _admitted(self, connection: _Connection) -> None:
        if connection.is_proven:
            return
        if self._hosts.has_all(connection.host):  # others were admitted since it came
            self._refuse(connection, "too_many")
            return
        connection.is_proven = True
        self._hosts.proves(connection.host, connection.key)
        self._unproven.pop(connection.key, None)
        self._throttled.pop(connection.key, None)
        connection.is_throttled = False
        self._watch(connection)

    def _was_refused(self, connection: _Connection, now: float) -> None:
        is_fine = connection.refusals.take(now)
        if not connection.is_proven:
            is_fine = self._hosts.may_be_refused(connection.host, now) and is_fine
        if not is_fine:
            self._refused["misbehaved"] += 1
            self._slowed[connection.host] = self._hosts.strikes(connection.host, now)
            self._close(connection, reset=True)

    def _report(self, now: float) -> None:
        """Reports to the learner what was refused since the last report."""
        self._reported = now
        if not self._refused and not self._slowed:
            return
        some = dict(list(self._slowed.items())[:20])
        report = json.dumps({"refused": self._refused, "slowed": some}).encode()
        with contextlib.suppress(OSError):  # next time, or never
            self._control.send(report)
            self._refused.clear()
            self._slowed.clear()

    # What is due.

    def _look(self, now: float) -> None:
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        while self._silent and (first := next(iter(self._silent.values()))).deadline <= now:
            self._refuse(first, "silent")
        while self._ending and (first := next(iter(self._ending.values()))).deadline <= now:
            self._close(first)
        for connection in list(self._throttled.values()):
            least = 0.1 * self._limits.unproven_bytes
            of_host = self._hosts.budget(connection.host)
            if connection.budget.left(now) >= least and of_host.left(now) >= least:
                del self._throttled[connection.key]
                connection.is_throttled = False
                self._watch(connection)
        if not self._is_accepting and self._accepts.left(now) >= 1.0:
            self._accept(True)
        if now - self._reported >= _REPORT_SECONDS:
            self._report(now)

    # New connections.

    def _accept(self, on: bool) -> None:
        if on == self._is_accepting:
            return
        self._is_accepting = on
        for listener, port in self._listeners:
            if on:
                self._selector.register(
                    listener,
                    selectors.EVENT_READ,
                    lambda _, listener=listener, port=port: self._on_client(listener, port),
                )
            else:
                self._selector.unregister(listener)

    def _on_client(self, listener: socket.socket, port: Port) -> None:
        for _ in range(32):
            now = time.monotonic()
            if not self._accepts.take(now):
                self._accept(False)
                return
            try:
                client, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._make_room()
                    self._accept(False)  # for a moment
                    return
                continue  # the client has gone already
            self._take_in(client, address[0], address[1], port, now)

    def _take_in(
        self, client: socket.socket, address: str, number: int, port: Port, now: float
    ) -> None:
        client.setblocking(False)
        with contextlib.suppress(OSError):  # a client that has gone already is noticed later
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, key = host_of(address), next(self._numbers)
        if (why := self._hosts.arrives(host, key, now)) is not None:
            self._refused[why] += 1
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        name = f"{self._tag}/{key}/{address.partition('%')[0]}/{number}"
        connection = _Connection(key, client, host, name, port, now, self._limits)
        self._all[key] = self._silent[key] = connection
        if len(self._silent) > self._limits.silent:
            self._refuse(next(iter(self._silent.values())), "silent")
        self._limit(host)
        if key in self._all:
            self._watch(connection)

    def _limit(self, host: str) -> None:
        """Closes the oldest connection of a host that has too many."""
        if (oldest := self._hosts.too_many(host)) is not None:
            self._refuse(self._all[oldest], "silent" if oldest in self._silent else "too_many")

    def _make_room(self) -> None:
        """Closes the least valuable connection."""
        for each in (self._silent, self._unproven):
            if each:
                self._refuse(next(iter(each.values())), "no_room")
                return

    def _refuse(self, connection: _Connection, why: str) -> None:
        self._refused[why] += 1
        self._close(connection, reset=True)

    # First bytes.

    def _on_first(self, connection: _Connection) -> None:
        """Checks a connection's first bytes, and forwards it if they are valid."""
        begins = connection.port.begins.encode("latin-1")
        try:
            said = connection.client.sock.recv(len(begins) - len(connection.first))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._close(connection)
            return
        connection.first += said
        if not begins.startswith(connection.first):
            self._refuse(connection, "not_grpc")
        elif connection.first == begins:
            self._pass_on(connection)

    def _pass_on(self, connection: _Connection) -> None:
        is_health = connection.port.is_health
        most = self._limits.health_connections if is_health else self._limits.connections
        if self._passed_on[is_health] >= most:
            others = (each for each in self._unproven.values() if each.port.is_health == is_health)
            if (oldest := next(others, None)) is None:
                self._refuse(connection, "no_room")
                return
            self._refuse(oldest, "no_room")
        learner = None
        try:
            learner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            learner.setblocking(False)
            learner.bind(f"\0{connection.name}")
            learner.connect(connection.port.path)
            learner.send(connection.first)  # a few bytes into an empty buffer
        except OSError:  # it is stopping, or too many wait there, or there are too many files
            if learner is not None:
                learner.close()
            self._refuse(connection, "not_serving")
            return
        del self._silent[connection.key]
        self._unproven[connection.key] = connection
        self._hosts.speaks(connection.host, connection.key)
        self._passed_on[is_health] += 1
        connection.learner = _Side(learner)
        connection.first = b""
        self._limit(connection.host)
        if connection.key in self._all:
            self._watch(connection)
            self._on_client_side(connection, selectors.EVENT_READ)

    # Forwarding.

    def _watch(self, connection: _Connection) -> None:
        """Watches both sockets for the events that can be handled next."""
        client, learner = connection.client, connection.learner
        ends = connection.key in self._ending
        mask = 0
        if not (connection.is_throttled or ends or (learner is not None and learner.left)):
            mask |= selectors.EVENT_READ
        if client.left is not None:
            mask |= selectors.EVENT_WRITE
        self._set(client, mask, connection, self._on_client_side)
        if learner is not None:
            mask = 0
            if not (ends or client.left):
                mask |= selectors.EVENT_READ
            if learner.left is not None:
                mask |= selectors.EVENT_WRITE
            self._set(learner, mask, connection, self._on_learner_side)

    def _set(self, side: _Side, mask: int, connection: _Connection, on_event: OnEvent) -> None:
        if mask == side.mask:
            return
        if not mask:
            self._selector.unregister(side.sock)
        elif not side.mask:
            self._selector.register(side.sock, mask, lambda events: on_event(connection, events))
        else:
            self._selector.modify(side.sock, mask, self._selector.get_key(side.sock).data)
        side.mask = mask

    def _on_client_side(self, connection: _Connection, events: int) -> None:
        if connection.key not in self._all:  # closed since select() returned
            return
        if connection.learner is None:
            self._on_first(connection)
            return
        if events & selectors.EVENT_WRITE and not self._flush(connection, connection.client):
            return
        if events & selectors.EVENT_READ:
            most = _CHUNK
            if not connection.is_proven:
                now = time.monotonic()
                of_host = self._hosts.budget(connection.host)
                most = int(min(_CHUNK, connection.budget.left(now), of_host.left(now)))
                if most < 1:
                    connection.is_throttled = True
                    self._throttled[connection.key] = connection
                    self._watch(connection)
                    return
            count = self._move(connection, connection.client, connection.learner, most)
            if not connection.is_proven:
                connection.budget.take(now, count)
                of_host.take(now, count)

    def _on_learner_side(self, connection: _Connection, events: int) -> None:
        learner = connection.learner
        if connection.key not in self._all or learner is None:
            return
        if events & selectors.EVENT_WRITE and not self._flush(connection, learner):
            return
        if events & selectors.EVENT_READ:
            self._move(connection, learner, connection.client, _CHUNK)

    def _move(self, connection: _Connection, source: _Side, sink: _Side, most: int) -> int:
        """Forwards received bytes. Returns how many."""
        if sink.left is not None or connection.key in self._ending:
            return 0
        try:
            count = source.sock.recv_into(self._view[:most])
        except BlockingIOError:
            return 0
        except OSError:
            self._close(connection)
            return 0
        if not count:
            self._end(connection)
            return 0
        try:
            sent = sink.sock.send(self._view[:count])
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return count
        if sent < count:
            sink.left = memoryview(bytes(self._view[sent:count]))
            self._watch(connection)
        return count

    def _flush(self, connection: _Connection, sink: _Side) -> bool:
        """Writes buffered data. Returns False if that has ended the connection."""
        if sink.left is not None:
            try:
                sink.left = sink.left[sink.sock.send(sink.left) :] or None
            except BlockingIOError:
                return True
            except OSError:
                self._close(connection)
                return False
            if sink.left is None:
                if connection.key in self._ending:
                    self._end(connection)
                    return False
                self._watch(connection)
        return True

    # Ends.

    def _end(self, connection: _Connection) -> None:
        """Closes a connection of which one side has ended, after flushing it."""
        sides = (connection.client, connection.learner)
        if not any(side is not None and side.left is not None for side in sides):
            self._close(connection)
        elif connection.key not in self._ending:
            connection.deadline = time.monotonic() + _FLUSH_SECONDS
            self._ending[connection.key] = connection
            self._watch(connection)

    def _close(self, connection: _Connection, reset: bool = False) -> None:
        if self._all.pop(connection.key, None) is None:
            return
        for some in (self._silent, self._unproven, self._ending, self._throttled):
            some.pop(connection.key, None)
        self._hosts.leaves(connection.host, connection.key)
        if connection.learner is not None:
            self._passed_on[connection.port.is_health] -= 1
        for side in filter(None, (connection.client, connection.learner)):
            if side.mask:
                self._selector.unregister(side.sock)
            side.mask = 0
        with contextlib.suppress(OSError):
            if reset:
                connection.client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for side in filter(None, (connection.client, connection.learner)):
            side.sock.close()


def main(arguments: list[str]) -> None:
    """Runs `relay.py CONTROL SETTINGS`: a file descriptor, and JSON of `learner.front.door`."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # sent to the process group; the learner decides
    control = socket.socket(fileno=int(arguments[0]))
    settings = json.loads(arguments[1])
    limits = Limits(**settings["limits"])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Two for each connection to the learner, one for a silent one.
    files = most - _OWN_FILES
    connections = min(limits.connections, files // 3)
    limits = limits._replace(
        connections=connections,
        host_connections=min(limits.host_connections, connections // 2),
        silent=min(limits.silent, files // 4),
    )
    ports = [Port(**port) for port in settings["ports"]]
    Relay(control, ports, limits, settings["tag"]).run()


if __name__ == "__main__":
    main(sys.argv[1:])
