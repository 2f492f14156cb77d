"""Limits how often something may happen: token buckets, by host of a caller."""

import ipaddress
import time
import urllib.parse

_MAX_HOSTS = 10_000  # idle hosts that a `Rate` remembers


class Bucket:
    """A token bucket. It has no clock: `now` is in seconds."""

    __slots__ = ("_capacity", "_left", "_rate", "_stamp")

    def __init__(self, capacity: float, rate: float, now: float) -> None:
        self._capacity = self._left = capacity
        self._rate = rate
        self._stamp = now

    def take(self, now: float) -> bool:
        """Takes a token. Returns False if there is none."""
        if self._refilled(now) < 1.0:
            return False
        self._left -= 1.0
        return True

    def is_full(self, now: float) -> bool:
        """Returns whether the bucket is full."""
        return self._refilled(now) >= self._capacity

    def _refilled(self, now: float) -> float:
        grown = self._left + self._rate * (now - self._stamp)
        self._left, self._stamp = min(self._capacity, grown), now
        return self._left


class Rate:
    """Limits how often each host may do something. Of one event loop.

    Args:
      at_once: largest burst.
      per_second: sustained rate.
    """

    def __init__(self, at_once: float, per_second: float) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._left: dict[str, Bucket] = {}

    def take(self, host: str) -> bool:
        """Counts one use. Returns False if it exceeds the rate."""
        now = time.monotonic()
        if host not in self._left:
            if len(self._left) >= _MAX_HOSTS:
                self._left = {name: b for name, b in self._left.items() if not b.is_full(now)}
            self._left[host] = Bucket(self._at_once, self._per_second, now)
        return self._left[host].take(now)


def host_of(peer: str) -> str:
    """Returns the host of a gRPC peer: an IPv4 address, a /64 of IPv6, or unix."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    ip = ipaddress.ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))
