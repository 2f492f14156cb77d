"""Addresses to listen on: how they are written, and who can reach them.

Everything that listens is checked here before anything is bound, because gRPC accepts port 99999
(modulo 65536) and names of services for ports.
"""

import errno
import ipaddress
import os
import re
import socket
import tempfile
import time
from typing import NamedTuple

MAX_PORT = 65535
BACKLOG = 1024  # connections that wait to be accepted

_MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path, a limit of Linux
_MAX_TEMPORARY = 80  # of a directory's path, which leaves enough for a socket in one below it
_LINGER_SECONDS = 1.0  # for which the ports of a killed process may stay in use
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix-abstract:", "xds:")  # of gRPC
_HOST = re.compile(r"\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+", re.ASCII)  # IPv6 in brackets, IPv4, or a name


class Address(NamedTuple):
    """A host and a port of this machine."""

    host: str  # without brackets
    port: int  # 0: any free one


def parse(what: str, listen: str) -> Address:
    """Parses HOST:PORT.

    Args:
      what: the service at this address, for error messages.
      listen: the address.

    Raises:
      OSError: the address is invalid; the message explains why.
    """
    host, _, port = listen.rpartition(":")
    if not _HOST.fullmatch(host):
        why = "the host is missing or is none (an IPv6 address stands in brackets)"
    elif not (port.isascii() and port.isdecimal()):
        why = f"the port {port!r} is not a number"
    elif len(port) > 5 or int(port) > MAX_PORT:
        why = f"the port {port[:20]} is beyond {MAX_PORT}"
    else:
        return Address(host.strip("[]"), int(port))
    raise OSError(
        f"{what} cannot be served on {listen!r}, {why}: give HOST:PORT of this machine with a port "
        f"from 0 (any free one) to {MAX_PORT}."
    )


def bind(what: str, listen: str) -> socket.socket:
    """Listens on HOST:PORT.

    0.0.0.0 and [::] both stand for all addresses of this host, IPv4 and IPv6; of a name, only the
    IPv4 address counts.

    Raises:
      OSError: the address cannot be bound; the message explains why.
    """
    host, port = parse(what, listen)
    is_everywhere = host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_everywhere or ":" in host else socket.AF_INET
    address = ("::" if is_everywhere else host, port)
    try:
        return socket.create_server(
            address, family=family, backlog=BACKLOG, dualstack_ipv6=is_everywhere
        )
    except OSError as error:
        raise OSError(
            f"{what} cannot be served on {listen!r} ({error}): give HOST:PORT of this machine with "
            "a port that is free (0 finds one)."
        ) from error


def check_free(what: str, listen: str | None) -> None:
    """Checks that an address can be bound, before anything expensive is done.

    Args:
      what: the service at this address, for error messages.
      listen: HOST:PORT, or unix:PATH, where another process may be listening; None is not checked.

    Raises:
      OSError: the address cannot be bound; the message explains why.
    """
    if listen is None:
        return
    path = socket_path(listen)
    deadline = time.monotonic() + _LINGER_SECONDS
    while True:
        try:
            if path is None:
                bind(what, listen).close()
            else:
                _check_unused(what, path)
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


def _check_unused(what: str, path: str) -> None:
    """Checks that nobody listens on a socket, whose file would be replaced."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        if caller.connect_ex(path) in (0, errno.EAGAIN):  # EAGAIN: with many callers
            raise OSError(
                f"{what} cannot be served on 'unix:{path}': another process listens there. Choose "
                "another path, or end that process."
            )


def check_dialled(address: str) -> None:
    """Checks the form of a learner's address.

    Raises:
      OSError: it is neither HOST:PORT nor unix:PATH nor a name with one of gRPC's schemes.
    """
    if socket_path(address) is not None or address.startswith(_SCHEMES):
        return
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= MAX_PORT
    if not (_HOST.fullmatch(host) and is_port):
        raise OSError(
            f"{address!r} is not the address of a learner: give HOST:PORT with a port from 1 to "
            f"{MAX_PORT}, or unix:PATH."
        )


def dialled(addresses: str) -> list[str]:
    """Returns the addresses of one learner, or of several as HOST:PORT,HOST:PORT.

    Raises:
      OSError: as `check_dialled`, of each of them.
    """
    is_one = socket_path(addresses) is not None or addresses.startswith(_SCHEMES)
    found = [addresses] if is_one else addresses.split(",")
    for each in found:
        check_dialled(each)
    return found


def socket_path(listen: str) -> str | None:
    """Returns the path of unix:PATH; None for another address.

    Raises:
      OSError: a socket cannot have this path.
    """
    path = listen.removeprefix("unix:")
    if path == listen:
        return None
    size = len(os.fsencode(path))
    if not 1 <= size <= _MAX_SOCKET_PATH or "\0" in path:
        raise OSError(
            f"The socket path {path!r} has {size} bytes, at least 1 and at most {_MAX_SOCKET_PATH} "
            "are possible: choose another one."
        )
    return path


def from_anywhere(address: str) -> str:
    """Returns an address for who may have another working directory, if a socket can have it."""
    if (path := socket_path(address)) is None:
        return address
    whole = os.path.abspath(path)
    return f"unix:{whole}" if len(os.fsencode(whole)) <= _MAX_SOCKET_PATH else address


def temporary_directory() -> str:
    """Returns where to make temporary directories for sockets: /tmp if TMPDIR has a long path."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _MAX_TEMPORARY else "/tmp"


def is_local(listen: str) -> bool:
    """Returns whether only processes of this host can reach an address."""
    if listen.startswith("unix:"):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
