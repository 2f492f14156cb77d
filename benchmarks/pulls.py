"""Measures pulls of parameters by the actors of one host: each for itself, and sharing them.

The service is that of a learner, which publishes a version at a fixed rate and does nothing else.
The actors are real clients, in several processes (`benchmarks.host`), that play nothing.
"""

import itertools
import multiprocessing
import pathlib
import tempfile
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks import host
from benchmarks.ingest import service_of
from impala.config.schema import Config
from impala.runtime import process
from learner.service.server import Server

_UPDATES = 11.0  # published in a second
_START_SECONDS = 15.0
_MOST_SECONDS = 180.0  # that anything should take
_PER_PROCESS = 10  # actors


class Pulled(NamedTuple):
    """What the actors of a host have pulled."""

    actors: int
    is_shared: bool
    pulls_per_second: float  # answered with parameters
    megabytes_per_second: float
    learner_cores: float  # CPU time per second, of the service and its publishing
    host_cores: float  # of all actors
    age_updates: float  # of what an actor begins a round with: mean,
    oldest_updates: float  # ...and 99th percentile
    round_seconds: float  # mean; `host.ROUND_SECONDS` if nothing is late


def measure(config: Config, seconds: float, sizes: tuple[int, ...] = (1, 10, 100)) -> list[Pulled]:
    """Measures hosts with so many actors, without and with sharing."""
    process.tune_malloc()
    return [
        _measure(config, seconds, size, is_shared)
        for size, is_shared in itertools.product(sizes, (False, True))
    ]


def _measure(config: Config, seconds: float, num_actors: int, is_shared: bool) -> Pulled:
    spawn = multiprocessing.get_context("spawn")
    newest = spawn.Value("q", 0, lock=False)
    service, _, ingest, parameters = service_of(config)
    get_parameters, told = service.get_parameters, np.zeros(2)  # pulls and bytes

    def counted(*arguments: Any) -> bytes:
        reply = get_parameters(*arguments)
        told[:] += len(reply) > 1000, len(reply)
        return reply

    setattr(service, "get_parameters", counted)  # noqa: B010
    stop = threading.Event()

    def publish() -> None:
        for version in itertools.count(1):
            if stop.wait(1.0 / _UPDATES):
                return
            service.publish(parameters._replace(version=version))
            newest.value = version

    server, publisher = Server(service, "127.0.0.1:0"), threading.Thread(target=publish)
    address = server.start()
    publisher.start()
    shares = [
        range(first, min(first + _PER_PROCESS, num_actors))
        for first in range(0, num_actors, _PER_PROCESS)
    ]
    try:
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as name,
            spawn.Pool(len(shares), host.keep, (newest,)) as pool,
        ):
            directory = pathlib.Path(name) / "shared" if is_shared else None
            begin = time.monotonic() + _START_SECONDS
            jobs = [
                pool.apply_async(host.act, (address, share, begin, begin + seconds, directory))
                for share in shares
            ]
            time.sleep(begin - time.monotonic())
            spent, before = time.process_time(), told.copy()
            time.sleep(begin + seconds - time.monotonic())
            spent = time.process_time() - spent
            pulls, num_bytes = map(float, told - before)
            hosts = [job.get(timeout=_MOST_SECONDS) for job in jobs]
    finally:
        stop.set()
        publisher.join()
        server.stop(0.0)
        ingest.close()
    ages = np.concatenate([ages for _, ages in hosts])
    return Pulled(
        actors=num_actors,
        is_shared=is_shared,
        pulls_per_second=pulls / seconds,
        megabytes_per_second=num_bytes / seconds / 1e6,
        learner_cores=spent / seconds,
        host_cores=sum(cpu for cpu, _ in hosts) / seconds,
        age_updates=float(ages.mean()),
        oldest_updates=float(np.percentile(ages, 99)),
        round_seconds=seconds * num_actors / len(ages),
    )
