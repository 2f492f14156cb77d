"""Breaks a fleet of real processes for as long as asked, and counts what became of every unroll.

`make soak ARGS="--minutes 30 --seed 1 --report faults.md"`: a learner with replay on disk, three
actors and three witnesses, all but one of them behind a network that can be broken. A fault every
few seconds, of a kind drawn at random; after each the run has to go on, and everyone has to send,
but for actors that are still starting. At the end, what each witness got receipts for has to be in
the learner's accounts, to the unit. With `--one-learner` no fault ends the learner, and what it
holds of memory, threads and files is reported as well.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import services
from chaos.proxy import Proxy
from chaos.witness import Ledger, Witness, poison

from actors.channel import StatusClient
from actors.session import LearnerError
from impala.logdir import checkpoint
from protos.impala.v1 import learner_pb2 as pb

_RECOVERY_SECONDS = 120.0  # within which the run has to go on after a fault, and an actor to start
# One thread and long updates: actors wait for them, and leave a core to processes that start.
_LEARNER = (
    *("--mix.fresh", 16, "--mix.replayed", 16, "--replay.capacity-frames", 100_000),
    *("--agent.hidden-sizes", 512, 512, "--learner.threads", 1),
    *("--learner.checkpoint-seconds", 5.0, "--learner.log-seconds", 1.0),
    # So large that the guard at the update has to find what passes the door.
    *("--limits.reward", 1e30),
)
_SAMPLE_SECONDS = 60.0
_ROW_MINUTES = 15


class Fleet:
    """The processes, and what can happen to them."""

    def __init__(self, directory: pathlib.Path, stack: contextlib.ExitStack) -> None:
        self.logdir = directory / "run"
        self.logdir.mkdir()
        self._stack = stack
        self._names = itertools.count()
        self.crashes: list[float] = []  # of the learner, when
        self.learner = self._start_learner("127.0.0.1:0")
        self.address = services.address_of(self.logdir)
        self.proxy = stack.enter_context(Proxy(int(self.address.rpartition(":")[2])))
        behind = f"127.0.0.1:{self.proxy.port}"
        self._started: dict[str, float] = {}  # actors, and when
        self.actors = dict(self._start_actor(behind) for _ in range(3))  # by name
        self.witnesses = [
            Witness(address, f"witness-{i}")
            for i, address in enumerate((self.address, behind, behind))
        ]
        for witness in self.witnesses:
            witness.start()
        self.poison: list[Ledger] = []  # of callers that are gone

    # What can happen. Each gives the learner's last checkpoint a chance to be out of date.

    def kill_an_actor(self, rng: random.Random) -> None:
        self._replace_actor(rng.choice(sorted(self.actors)), lambda actor: actor.kill())

    def stop_an_actor(self, rng: random.Random) -> None:
        """The oldest: one that is not there yet knows no other end than by the signal."""
        del rng
        self._replace_actor(max(self.actors, key=self._age), _end_well)

    def freeze_an_actor(self, rng: random.Random) -> None:
        _freeze(self.actors[rng.choice(sorted(self.actors))], rng.uniform(2.0, 8.0))

    def kill_a_witness(self, rng: random.Random) -> None:
        rng.choice(self.witnesses).kill()

    def kill_the_learner(self, rng: random.Random) -> None:
        self._crash()
        time.sleep(rng.uniform(0.0, 5.0))
        self.learner = self._start_learner(self.address)

    def stop_the_learner(self, rng: random.Random) -> None:
        del rng
        _end_well(self.learner)
        self.learner = self._start_learner(self.address)

    def freeze_the_learner(self, rng: random.Random) -> None:
        _freeze(self.learner, rng.uniform(2.0, 8.0))

    def partition_the_network(self, rng: random.Random) -> None:
        self.proxy.partition()
        time.sleep(rng.uniform(2.0, 20.0))
        self.proxy.heal()

    def cut_the_network(self, rng: random.Random) -> None:
        self.proxy.cut()
        time.sleep(rng.uniform(0.0, 5.0))
        self.proxy.heal()

    def slow_the_network(self, rng: random.Random) -> None:
        self.proxy.delay(rng.uniform(0.05, 0.5))
        time.sleep(rng.uniform(2.0, 8.0))
        self.proxy.heal()

    def fill_the_disk(self, rng: random.Random) -> None:
        """Files can no longer grow: the learner has to end, and not as if all were well."""
        del rng
        _, hard = resource.prlimit(self.learner.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.learner.pid, resource.RLIMIT_FSIZE, (1, hard))
        if self.learner.wait(timeout=_RECOVERY_SECONDS) == 0:
            raise AssertionError("The learner could not write and ended with status 0.")
        self.crashes.append(time.monotonic())
        self.learner = self._start_learner(self.address)

    def poison_the_learner(self, rng: random.Random) -> None:
        """Rewards whose loss is not finite: their unrolls are dropped, and the run goes on."""
        self._poison(rng.choice([1e20, 1e25, 1e30]) * rng.choice([1, -1]), rng.randint(1, 20))

    def send_what_is_not_finite(self, rng: random.Random) -> None:
        """Nothing of it is accepted, and the caller is sent away before it could send it all."""
        count = 20
        receipts = self._poison(rng.choice([float("nan"), float("inf")]), count)
        if len(receipts) >= count or any(each.status == pb.STATUS_ACCEPTED for each in receipts):
            raise AssertionError(f"What is not finite got {receipts}.")

    # What is to be seen.

    def wait_until_it_goes_on(self, saved: float) -> float:
        """Waits until there are updates and everyone sends; the seconds that took.

        Counters never fall below `saved`. An actor that is still starting is not waited for.
        """
        start = time.monotonic()
        seen: set[tuple[int, int]] = set()  # version and frames

        def goes_on() -> bool:
            if (status := self._status()) is not None:
                seen.add((status.parameter_version, status.frames))
            return len({version for version, _ in seen}) > 1

        services.wait_for("the run to go on", goes_on, _RECOVERY_SECONDS)
        self.wait_for_everyone(lambda name: self._age(name) > _RECOVERY_SECONDS)
        least = min(frames for _, frames in seen)
        if least < saved:
            raise AssertionError(f"{saved} frames were in a checkpoint, now there are {least}.")
        for process in (self.learner, *self.actors.values()):
            if process.poll() is not None:
                raise AssertionError(f"{process.args!r} ended with status {process.returncode}.")
        for witness in self.witnesses:
            if witness.error is not None:
                raise witness.error
        return time.monotonic() - start

    def saved_frames(self) -> float:
        """In the newest checkpoint."""
        if not checkpoint.exists(self.logdir):
            return 0.0
        return checkpoint.load(self.logdir).counters.frames

    def end(self) -> None:
        """Stops everything as an operator would."""
        for witness in self.witnesses:
            witness.stop()
            assert not witness.is_alive(), witness.name
            if witness.error is not None:
                raise witness.error
        for process in (*self.actors.values(), self.learner):
            _end_well(process)

    def _start_learner(self, listen: str) -> "subprocess.Popen[bytes]":
        process: subprocess.Popen[bytes] = self._stack.enter_context(
            services.learner(self.logdir, listen, *_LEARNER)
        )
        services.address_of(self.logdir)
        return process

    def wait_for_everyone(self, included: Callable[[str], bool] = lambda name: True) -> None:
        """Waits until every witness sends, and every actor that is included."""

        def all_send() -> bool:
            if (status := self._status()) is None:
                return False
            members = {member.name: member for member in status.members}
            names = (*filter(included, self.actors), *(witness.name for witness in self.witnesses))
            return all(
                name in members and members[name].unrolls and members[name].silent_seconds < 5.0
                for name in names
            )

        services.wait_for("everyone to send", all_send, _RECOVERY_SECONDS)

    def _status(self) -> pb.RunStatus | None:
        try:
            with StatusClient(self.address) as client:
                return client.get()
        except LearnerError:
            return None

    def _age(self, actor: str) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started[actor]

    def _start_actor(self, address: str) -> "tuple[str, subprocess.Popen[bytes]]":
        name = f"actor-{next(self._names)}"
        process: subprocess.Popen[bytes] = self._stack.enter_context(
            services.actor(self.logdir, address, "--name", name, "--num-envs", 4)
        )
        self._started[name] = time.monotonic()
        return name, process

    def _replace_actor(self, name: str, end: Callable[["subprocess.Popen[bytes]"], None]) -> None:
        end(self.actors.pop(name))
        name, process = self._start_actor(f"127.0.0.1:{self.proxy.port}")
        self.actors[name] = process

    def _poison(self, reward: float, count: int) -> list[pb.Receipt]:
        ledger, receipts = poison(self.address, f"poison-{next(self._names)}", reward, count)
        self.poison.append(ledger)
        return receipts

    def _crash(self) -> None:
        self.learner.kill()
        self.learner.wait()
        self.crashes.append(time.monotonic())


ENDS_THE_LEARNER = (Fleet.kill_the_learner, Fleet.stop_the_learner, Fleet.fill_the_disk)
FAULTS = (
    *(Fleet.kill_an_actor, Fleet.stop_an_actor, Fleet.freeze_an_actor, Fleet.kill_a_witness),
    *(Fleet.partition_the_network, Fleet.cut_the_network, Fleet.slow_the_network),
    *(Fleet.freeze_the_learner, Fleet.poison_the_learner, Fleet.send_what_is_not_finite),
)


def _end_well(process: "subprocess.Popen[bytes]") -> None:
    if (status := services.stop(process)) != 0:
        raise AssertionError(f"{process.args!r} ended with status {status} on SIGTERM.")


def _freeze(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def soak(
    minutes: float,
    seed: int,
    directory: pathlib.Path,
    most_faults: int = sys.maxsize,
    one_learner: bool = False,
) -> Iterator[str]:
    """Yields the lines of a report.

    Args:
      minutes: to break the fleet for.
      seed: of the faults.
      directory: of the run.
      most_faults: spread over the minutes, if that makes the pauses longer.
      one_learner: leaves out faults that end the learner, and reports what it holds.

    Raises:
      AssertionError: something did not survive, or an unroll was lost or counted twice.
    """
    rng = random.Random(seed)
    survived: dict[str, list[float]] = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:
        fleet = Fleet(directory, stack)
        fleet.wait_until_it_goes_on(0.0)
        fleet.wait_for_everyone()
        start = time.monotonic()
        end = start + 60.0 * minutes
        kinds = FAULTS if one_learner else FAULTS + ENDS_THE_LEARNER
        bag: list[Callable[[Fleet, random.Random], None]] = []
        held: list[Held] = []
        faults = 0
        while time.monotonic() < end and faults < most_faults:
            if not bag:  # every kind comes equally often
                bag = rng.sample(kinds, len(kinds))
            fault = bag.pop()
            faults += 1
            due = start + faults / most_faults * 60.0 * minutes
            time.sleep(max(rng.uniform(0.0, 2.0), due - time.monotonic()))
            if one_learner and time.monotonic() - start >= _SAMPLE_SECONDS * len(held):
                held.append(Held.of(fleet.learner.pid, time.monotonic() - start))
            saved = fleet.saved_frames()
            fault(fleet, rng)
            seconds = fleet.wait_until_it_goes_on(saved)
            survived[fault.__name__].append(seconds)
            print(f"{fault.__name__.replace('_', ' ')}: {seconds:.1f} s", flush=True)
        fleet.wait_for_everyone()
        fleet.end()
    yield "| fault | survived | until the next updates, median and longest, s |"
    yield "|---|---:|---:|"
    for name, times in sorted(survived.items()):
        middle = sorted(times)[len(times) // 2]
        yield f"| {name.replace('_', ' ')} | {len(times)} | {middle:.1f}, {max(times):.1f} |"
    yield f"| **together** | **{faults}** | |"
    yield ""
    if held:
        yield from _table(held)
    yield from account(fleet)


class Held(NamedTuple):
    """What a process has, some seconds after the start of the faults."""

    seconds: float
    mib: float  # resident
    threads: int
    files: int  # open, connections among them

    @classmethod
    def of(cls, pid: int, seconds: float) -> "Held":
        proc = pathlib.Path(f"/proc/{pid}")
        pages = int((proc / "statm").read_text().split()[1])
        mib = pages * resource.getpagesize() / 2**20
        return cls(seconds, mib, *(len(os.listdir(proc / name)) for name in ("task", "fd")))


def _table(held: list[Held]) -> Iterator[str]:
    """Yields a row every some minutes, and how memory grows after the first of them."""
    yield "| minute | memory, MiB | threads | files |"
    yield "|---:|---:|---:|---:|"
    rows = [each for i, each in enumerate(held) if i % _ROW_MINUTES == 0]
    for each in [*rows, held[-1]]:
        yield f"| {each.seconds / 60:.0f} | {each.mib:.0f} | {each.threads} | {each.files} |"
    yield ""
    later = held[_ROW_MINUTES:]
    if len(later) > 1:
        hours = [each.seconds / 3600 for each in later]
        slope = np.polyfit(hours, [each.mib for each in later], 1)[0]
        yield f"Memory after minute {_ROW_MINUTES}: {slope:+.1f} MiB an hour (least squares)."
        yield ""


def account(fleet: Fleet) -> Iterator[str]:
    """Yields what became of every unroll of a fleet that has ended.

    Raises:
      AssertionError: one was lost or counted twice.
    """
    saved = checkpoint.load(fleet.logdir)
    yield from _accounts(saved.accounts)
    ledgers = [ledger for witness in fleet.witnesses for ledger in witness.ledgers] + fleet.poison
    yield from _witnessed(ledgers, saved.accounts, max(fleet.crashes, default=0.0))
    yield f"Frames learned from: {saved.counters.frames:,}."


def _accounts(state: Mapping[str, Any]) -> Iterator[str]:
    learned, dropped = state["learned"], state["dropped"]
    received = learned + sum(dropped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    yield f"Received {received:,} unrolls = {learned:,} learned from + {reasons or 'none'} dropped."
    rejected = json.dumps(state["rejected"])
    yield f"Rejected messages: {rejected}; duplicates: {state['duplicates']:,}."


def _witnessed(ledgers: list[Ledger], state: Mapping[str, Any], last_crash: float) -> Iterator[str]:
    """Compares what was acknowledged with what was accounted for."""
    accounted = {
        (name, incarnation): unrolls for name, incarnation, unrolls, *_ in state["ledgers"]
    }
    exact = 0
    for ledger in ledgers:
        found = accounted.get((ledger.name, ledger.incarnation), 0)
        survived = ledger.ended is None
        if survived and found != ledger.acknowledged:
            raise AssertionError(f"{found} unrolls are accounted for of {ledger}.")
        if found > ledger.sent or (
            found < ledger.acknowledged and ledger.ended is not None and ledger.ended > last_crash
        ):
            raise AssertionError(f"{found} unrolls are accounted for of {ledger}.")
        exact += found == ledger.acknowledged
    acknowledged = sum(ledger.acknowledged for ledger in ledgers)
    yield (
        f"Witnesses and poisoners: {len(ledgers)} incarnations got receipts for "
        f"{acknowledged:,} unrolls; of {exact} the learner accounts for exactly as many, "
        "of the others (killed before the learner crashed, or between a message and its receipt) "
        "for no more than they sent."
    )


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--faults", type=int, default=sys.maxsize, help="so many, spread over the minutes"
    )
    parser.add_argument(
        "--one-learner",
        action="store_true",
        help="no fault ends the learner; what it holds is told",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="impala-soak-") as directory:
        lines = list(
            soak(
                *(arguments.minutes, arguments.seed, pathlib.Path(directory)),
                *(arguments.faults, arguments.one_learner),
            )
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
