"""Measures what two peers take in, and two learners that know nothing of each other.

All are processes of this machine with one TensorFlow thread each. Synthetic actors, which do not
act, send as fast as they get receipts (`benchmarks.fleet`). Both pairs learn from batches of the
same size in each process, and take turns, because the speed of a shared machine changes.
"""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks import fleet
from impala.config import values
from impala.config.schema import Config

_ACTORS = 4  # of each learner
_ROUNDS = 3


def measure(config: Config, seconds: float) -> dict[str, float]:
    """Returns unrolls a second of both pairs, medians over rounds, and their ratio.

    Args:
      config: of an unconnected learner.
      seconds: for each pair in each round.
    """
    together: list[float] = []
    apart: list[float] = []
    for _ in range(_ROUNDS):
        apart.append(_rate(config, seconds, are_peers=False))
        together.append(_rate(config, seconds, are_peers=True))
        print(f"apart {apart[-1]:.1f}, together {together[-1]:.1f} unrolls/s", flush=True)
    ratios = [a / b for a, b in zip(together, apart, strict=True)]
    return {
        "two unconnected learners: unrolls per second": statistics.median(apart),
        "two peers: unrolls per second": statistics.median(together),
        "ratio": statistics.median(ratios),
        "ratio, lowest": min(ratios),
        "ratio, highest": max(ratios),
    }


def _rate(config: Config, seconds: float, *, are_peers: bool) -> float:
    """Returns how many unrolls a second two learners take in."""
    with _two(config, are_peers) as learners, multiprocessing.get_context("spawn").Pool(1) as pool:
        rate: float = pool.apply_async(_feed, (learners, seconds)).get(timeout=600.0 + seconds)
        return rate


def _feed(learners: list[tuple[str, int]], seconds: float) -> float:
    async def feed() -> float:
        served = await asyncio.gather(
            *(fleet.run(address, _ACTORS, seconds, pid) for address, pid in learners)
        )
        return sum(each.unrolls_per_second for each in served)

    return asyncio.run(feed())


@contextlib.contextmanager
def _two(config: Config, are_peers: bool) -> Iterator[list[tuple[str, int]]]:
    """Runs two learners without an end, and yields their addresses and process ids."""
    peers = []
    if are_peers:  # their settings are those of the whole
        mix = dataclasses.replace(config.mix, fresh=2 * config.mix.fresh)
        queue = dataclasses.replace(config.learner, queue_unrolls=2 * config.learner.queue_unrolls)
        config = dataclasses.replace(config, mix=mix, learner=queue)
        peers = ["--peers", ",".join(_free_addresses(2)), "--security.open-peers"]
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / "config.yaml").write_text(values.to_yaml(config))
        processes = []
        for i in (0, 1):
            log = stack.enter_context(open(directory / f"{i}.log", "wb"))
            command = [
                *(sys.executable, "-m", "impala", "learner", "atari"),
                *("--logdir", f"{directory}/{i}", "--config", f"{directory}/config.yaml"),
                *("--listen", "127.0.0.1:0", "--total-frames", "1000000000000"),
                *(*peers, *(("--peer", str(i)) if peers else ())),
            ]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield [
            (fleet.address(directory / str(i), process), process.pid)
            for i, process in enumerate(processes)
        ]


def _free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(count)]
        return [f"localhost:{probe.getsockname()[1]}" for probe in probes]
