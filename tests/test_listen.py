"""Addresses that are bound, on hosts that lack some."""

import errno
import socket
from typing import Any

import pytest

from impala.runtime import listen


@pytest.fixture
def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Localhost is 127.0.0.1 and ::1, as by /etc/hosts, but no address of IPv6 can be bound."""
    create = socket.create_server

    def create_server(address: Any, *, family: int, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create(address, family=family, **options)

    def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        of_host = {"localhost": ("127.0.0.1", "::1"), "only-6": ("::1",)}[host]
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", rest)
            for each in of_host
            for rest in [(each, port, 0, 0) if ":" in each else (each, port)]
        ]

    monkeypatch.setattr(socket, "create_server", create_server)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.usefixtures("without_ipv6")
def test_a_name_is_served_on_its_addresses_of_this_host() -> None:
    (bound,) = listen.bind("It", "localhost:0")
    with bound:
        assert bound.getsockname()[0] == "127.0.0.1"


@pytest.mark.usefixtures("without_ipv6")
def test_a_name_of_which_no_address_is_here_is_refused() -> None:
    with pytest.raises(OSError, match=r"cannot be served on 'only-6:0'.*Cannot assign"):
        listen.bind("It", "only-6:0")
