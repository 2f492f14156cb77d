"""Measures the throughput of honest actors under attack, with and without Envoy.

`python -m benchmarks.attack`: a learner that requires tokens serves synthetic actors without a
pause. In turn, in windows of one run, there is a stranger without a token from another loopback
address, or a process that uses the same CPU time for nothing: so the comparison excludes the
attacker's own computation on the same machine. Shares are of totals over all windows; that of
unrolls per CPU second shows the cost at the learner on a machine that others use as well. In the
end the learner's accounts are compared with the receipts of the honest actors.
"""

import argparse
import asyncio
import collections
import contextlib
import functools
import itertools
import math
import multiprocessing
import pathlib
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Generator
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

import grpc
import numpy as np

from benchmarks import synthetic
from benchmarks.learner import learner as run_learner
from benchmarks.setting import CONFIG, cpu_seconds, resident_bytes
from deploy import loopback
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_ACTORS, _WARM_UPDATES = 8, 20
_WAIT = 120.0
_SILENT = 2000  # connections that a stranger holds open
_STRANGER = "127.0.1.1"  # another host than that of the honest actors
_TOKENS = {"actor": "actor-token-of-the-benchmark", "reader": "reader-token-of-the-benchmark"}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and settings


def main() -> None:
    """Prints a table: a row for each attack and way to the learner."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=20, help="windows of each kind")
    parser.add_argument("--attacks", nargs="+", choices=_ATTACKS, default=list(_ATTACKS))
    parser.add_argument("--ways", nargs="+", default=["direct", "envoy"])
    arguments = parser.parse_args()
    print(
        "| attack | way | calls or connections/s | share left of unrolls/s "
        "| of unrolls per CPU second of the learner | unrolls/s, attacked and not |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for way in arguments.ways:
        _measure(way, arguments.attacks, arguments.seconds, arguments.rounds)


def _measure(way: str, attacks: list[str], seconds: float, rounds: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:

        def start(target: Callable[..., None], *given: object) -> int:
            process = spawn.Process(target=target, args=given, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            assert process.pid is not None
            return process.pid

        tokens = "".join(f"{role} {token}\n" for role, token in _TOKENS.items())
        direct, learner = stack.enter_context(run_learner(CONFIG, tokens=tokens))
        address = direct
        if way == "envoy":
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            address, _ = stack.enter_context(loopback.envoy(direct, pathlib.Path(directory)))
        received, is_warm, is_over = spawn.Value("Q"), spawn.Event(), spawn.Event()
        start(_play, address, received, is_warm, is_over)
        burning, cores = spawn.Event(), spawn.Value("d")
        burner = start(_burn, burning, cores)
        if not is_warm.wait(_WAIT):
            raise RuntimeError("The honest actors do not get anywhere.")

        def window(pid: int, is_on: Event) -> np.ndarray:
            """Returns unrolls, the learner's CPU seconds, and those of a load."""

            def now() -> np.ndarray:
                return np.array([received.value, cpu_seconds(learner.pid), cpu_seconds(pid)])

            is_on.set()
            before = now()
            time.sleep(seconds)
            used = now() - before
            is_on.clear()
            if learner.poll() is not None:
                raise RuntimeError(f"The learner ended with status {learner.returncode}.")
            return used

        for kind in attacks:
            is_on, count = spawn.Event(), spawn.Value("Q")
            stranger = start(_attack, kind, address, is_on, count)
            attacked, quiet = np.zeros(3), np.zeros(3)
            for _ in range(rounds):
                attacked += (used := window(stranger, is_on))
                cores.value = used[2] / seconds
                quiet += window(burner, burning)
            elapsed = seconds * rounds
            of_cpu = attacked[0] / attacked[1] / (quiet[0] / quiet[1])
            print(
                f"| {kind} | {way} | {count.value / elapsed:,.0f} "
                f"| **{attacked[0] / quiet[0]:.2f}** | {of_cpu:.2f} "
                f"| {attacked[0] / elapsed:,.0f}, {quiet[0] / elapsed:,.0f} |",
                flush=True,
            )
        is_over.set()
        time.sleep(2.0)
        with grpc.insecure_channel(direct) as channel:
            status = pb_grpc.LearnerStub(channel).GetStatus(
                pb.GetStatusRequest(),
                timeout=_WAIT,
                metadata=[("authorization", f"Bearer {_TOKENS['reader']}")],
            )
        print(f"{way}: {status.received} unrolls received, {received.value} receipts;", end=" ")
        print(f"learner {resident_bytes(learner.pid) / 1e6:,.0f} MB; {dict(status.refused)}")
        if status.received != received.value:
            raise RuntimeError("The accounts are not exact.")


# The honest actors.


def _play(address: str, received: "Synchronized[int]", is_warm: Event, is_over: Event) -> None:
    async def play(name: str) -> None:
        async for receipt in synthetic.receipts(address, name, _TOKENS["actor"]):
            received.value += synthetic.ENVS
            if receipt.newest_version >= _WARM_UPDATES:
                is_warm.set()
            if is_over.is_set():
                return

    async def play_all() -> None:
        await asyncio.gather(*(play(f"honest-{i}") for i in range(_ACTORS)))

    asyncio.run(play_all())


# The strangers write HTTP/2 themselves, as gRPC's client limits itself and binds no address.


def _frame(kind: int, flags: int, stream: int, contents: bytes) -> bytes:
    size = struct.pack(">I", len(contents))[1:]
    return size + struct.pack(">BBI", kind, flags, stream) + contents


def _call(stream: int, reset: bool) -> bytes:
    """Returns the frames of a call of Join without a token; taken back at once, if `reset`."""
    fields = {
        **{":method": "POST", ":scheme": "http", ":path": "/impala.v1.Learner/Join"},
        **{":authority": "learner", "te": "trailers", "content-type": "application/grpc"},
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    end = _frame(3, 0, stream, struct.pack(">I", 8)) if reset else _frame(0, 1, stream, bytes(5))
    return _frame(1, 4, stream, block) + end


def _connected(address: str) -> socket.socket:
    port = int(address.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), 0.5, source_address=(_STRANGER, 0))


def _calls(address: str, reset: bool) -> Generator[None]:
    """Calls again and again, over a new connection when one is closed."""
    while True:
        with contextlib.suppress(OSError), _connected(address) as line:
            line.sendall(_PREFACE)
            heard = b""
            for stream in itertools.count(1, 2):
                line.settimeout(0.5)
                line.sendall(_call(stream, reset))
                heard = _acknowledge(line, heard)
                yield
        yield


def _acknowledge(line: socket.socket, heard: bytes) -> bytes:
    """Acknowledges settings and pings, as gRPC requires. Returns the rest of what was heard."""
    line.settimeout(0.0)
    with contextlib.suppress(BlockingIOError):
        heard += line.recv(1 << 16)
        if not heard:
            raise ConnectionResetError
    while len(heard) >= 9 + (size := int.from_bytes(heard[:3], "big")):
        if heard[3] in (4, 6) and not heard[4]:
            line.sendall(_frame(heard[3], 1, 0, heard[9 : 9 + size] if heard[3] == 6 else b""))
        heard = heard[9 + size :]
    return heard


def _silent(address: str) -> Generator[None]:
    """Connects and says nothing; beyond a limit the oldest connection is closed."""
    held: collections.deque[socket.socket] = collections.deque()
    try:
        while True:
            with contextlib.suppress(OSError):
                held.append(_connected(address))
            if len(held) > _SILENT:
                held.popleft().close()
            yield
    finally:
        for each in held:
            each.close()


_ATTACKS: dict[str, tuple[Callable[[str], Generator[None]], float]] = {
    "refused calls, 500/s": (functools.partial(_calls, reset=False), 500.0),
    "refused calls": (functools.partial(_calls, reset=False), math.inf),
    "calls taken back": (functools.partial(_calls, reset=True), math.inf),
    "silent connections": (_silent, 1000.0),
}
"""Kind -> attack, and how often a second."""


def _attack(kind: str, address: str, is_on: Event, count: "Synchronized[int]") -> None:
    """Attacks while it is switched on."""
    attack, per_second = _ATTACKS[kind]
    while is_on.wait():
        acts, due = attack(address), time.perf_counter()
        while is_on.is_set():
            next(acts)
            count.value += 1
            due += 1.0 / per_second
            time.sleep(max(0.0, due - time.perf_counter()) if per_second < math.inf else 0.0)
        acts.close()


def _burn(is_on: Event, cores: "Synchronized[float]") -> None:
    """Uses the given CPU time per second while it is switched on."""
    while is_on.wait():
        begun, used = time.perf_counter(), time.process_time()
        while is_on.is_set():
            if time.process_time() - used < cores.value * (time.perf_counter() - begun):
                sum(range(10_000))
            else:
                time.sleep(0.002)


if __name__ == "__main__":
    main()
