"""Measures what two peers take in, and two learners that know nothing of each other.

All are processes of this machine with one TensorFlow thread each. Synthetic actors, which do not
act, send as fast as they get receipts. Both pairs learn from batches of the same size in each
process, and take turns, because the speed of a shared machine changes.
"""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import socket
import statistics
from collections.abc import Sequence

from benchmarks import learner, synthetic
from benchmarks.setting import Options
from impala.config import presets
from impala.config.schema import Config

_ACTORS = 4  # of each learner
_ROUNDS = 3
_WARM_UP_SECONDS = 5.0


def measure(config: Config, options: Options) -> dict[str, float]:
    """Measures both pairs with the deep network, for `seconds` in each round.

    Returns:
      Unrolls a second of both pairs, medians over rounds, and their ratio.
    """
    config = dataclasses.replace(config, agent=presets.PRESETS["atari-deep"][1].agent)
    apart, together = [], []
    for _ in range(_ROUNDS):
        apart.append(_rate(config, options.seconds, are_peers=False))
        together.append(_rate(config, options.seconds, are_peers=True))
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
    flags: list[list[str]] = [[], []]
    if are_peers:  # their settings are those of the whole
        mix = dataclasses.replace(config.mix, fresh=2 * config.mix.fresh)
        queue = dataclasses.replace(config.learner, queue_unrolls=2 * config.learner.queue_unrolls)
        config = dataclasses.replace(config, mix=mix, learner=queue)
        peers = ["--peers", ",".join(_free_addresses(2)), "--security.open-peers", "--peer"]
        flags = [[*peers, "0"], [*peers, "1"]]
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(learner.started(config, None, each)) for each in flags]
        addresses = [learner.address(logdir, process) for logdir, process in started]
        pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(1))
        rate: float = pool.apply_async(_feed, (addresses, seconds)).get(timeout=600.0 + seconds)
        return rate


def _feed(addresses: Sequence[str], seconds: float) -> float:
    """Returns how many unrolls a second learners take from actors that send without a pause."""
    names = [(address, f"synthetic-{i}") for address in addresses for i in range(_ACTORS)]
    received, versions = [0] * len(names), [0] * len(names)

    async def send(index: int) -> None:
        async for receipt in synthetic.receipts(*names[index]):
            received[index] += synthetic.ENVS
            versions[index] = receipt.newest_version

    async def feed() -> float:
        sending = [asyncio.create_task(send(index)) for index in range(len(names))]

        async def wait(seconds: float) -> None:
            done, _ = await asyncio.wait(
                sending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()

        while not all(versions):  # the first update is compiled
            await wait(0.5)
        await wait(_WARM_UP_SECONDS)
        before = sum(received)
        await wait(seconds)
        return (sum(received) - before) / seconds

    return asyncio.run(feed())


def _free_addresses(count: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(count)]
        return [f"localhost:{probe.getsockname()[1]}" for probe in probes]
