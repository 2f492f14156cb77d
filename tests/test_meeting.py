"""Processes that meet: all here, the same data everywhere, and nobody waits for the dead."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import services
from services import WAIT

from impala.runtime.meeting import Meeting, PeerLost, Refused

NEVER = bool  # what waits is never told to stop


def addresses(count: int, host: str = "localhost") -> list[str]:
    """Of ports that were free a moment ago."""
    return [f"{host}:{services.free_port()}" for _ in range(count)]


@contextlib.contextmanager
def met(
    count: int, facts: Sequence[Any] = (), host: str = "localhost", **kwargs: Any
) -> Iterator[list[Meeting]]:
    """So many that have met, each of which a thread stands for."""
    where = addresses(count, host)
    all_facts = [*facts, *[{}] * (count - len(facts))]
    meetings = [Meeting(where, i, all_facts[i], **kwargs) for i in range(count)]
    try:
        assert all(together(meetings, lambda each: each.begin(NEVER)))
        yield meetings
    finally:
        for each in meetings:
            each.close()


def together(meetings: Sequence[Meeting], do: Any) -> list[Any]:
    with ThreadPoolExecutor(len(meetings)) as threads:
        under_way: list[Future[Any]] = [threads.submit(do, each) for each in meetings]
        return [each.result(timeout=WAIT) for each in under_way]


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_all_get_what_each_of_them_says(host: str) -> None:
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    with met(3, host=host) as meetings:
        for i in range(20):
            own = {each: [k, i, 2**62 + i, 0.1 * i, None] for k, each in enumerate(meetings)}
            found = together(meetings, lambda each, own=own: each.meet(own[each]))
            assert found == [[own[each] for each in meetings]] * 3
        large = together(meetings, lambda each: each.meet([0.5] * 400_000))
        assert large == [[[0.5] * 400_000] * 3] * 3

        # When they part, nobody counts as lost.
        together(meetings, lambda each: each.part())


@pytest.mark.parametrize("leaving", [0, 1])
def test_who_waits_learns_that_another_has_parted(leaving: int) -> None:
    with met(2) as meetings, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(meetings[1 - leaving].meet, None)
        parting = threading.Thread(target=meetings[leaving].part, daemon=True)
        parting.start()
        with pytest.raises(PeerLost, match="has left"):
            waiting.result(timeout=WAIT)
        meetings[1 - leaving].close()
        parting.join(timeout=WAIT)
        assert not parting.is_alive()


@pytest.mark.parametrize("said", [b"[1, [5]]", b"[0.5, {}]", b"[" * 100_000, b"{}", b"[true, {}]"])
def test_a_caller_that_says_something_else_changes_nothing(said: bytes) -> None:
    where = addresses(2)
    first, second = (Meeting(where, i, {}) for i in (0, 1))
    host, _, port = where[0].partition(":")
    stop = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        begun = threads.submit(first.begin, stop.is_set)
        for _ in range(100):
            with contextlib.suppress(ConnectionRefusedError):
                with socket.create_connection((host, int(port)), timeout=WAIT) as stranger:
                    stranger.sendall(said + b"\n")
                    with contextlib.suppress(ConnectionError):
                        assert stranger.recv(1) == b""  # it hangs up
                break
            time.sleep(0.1)
        else:
            stop.set()
            pytest.fail("nobody has listened")
        assert threads.submit(second.begin, NEVER).result(timeout=WAIT)
        assert begun.result(timeout=WAIT)
    for each in (first, second):
        each.close()


def test_one_with_other_settings_is_refused_and_the_others_wait() -> None:
    where = addresses(2)
    stop = threading.Event()
    first = Meeting(where, 0, {"mix.fresh": 32, "seed": 1})
    with ThreadPoolExecutor(1) as threads:
        begun = threads.submit(first.begin, stop.is_set)
        with pytest.raises(Refused, match=r"mix\.fresh is 16 at .*, but 32 at the first peer"):
            Meeting(where, 1, {"mix.fresh": 16, "seed": 1}).begin(NEVER)

        stop.set()
        assert begun.result(timeout=WAIT) is False
    first.close()
