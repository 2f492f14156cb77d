"""Breaks a fleet of real processes for as long as asked, and counts what became of every unroll.

`make soak ARGS="--minutes 30 --seed 1 --report faults.md"`: a learner with replay on disk, three
actors and three witnesses, all but one of them behind a network that can be broken. A fault every
few seconds, of a kind drawn at random; after each the run has to go on, and everyone has to send,
but for actors that are still starting. At the end, what each witness got receipts for has to be in
the learner's accounts, to the unit.
"""

import argparse
import collections
import contextlib
import itertools
import json
import pathlib
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import services
from chaos.proxy import Proxy
from chaos.witness import Ledger, Witness

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
)


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

    def _crash(self) -> None:
        self.learner.kill()
        self.learner.wait()
        self.crashes.append(time.monotonic())


FAULTS = (
    *(Fleet.kill_an_actor, Fleet.stop_an_actor, Fleet.freeze_an_actor, Fleet.kill_a_witness),
    *(Fleet.kill_the_learner, Fleet.stop_the_learner, Fleet.freeze_the_learner),
    *(Fleet.partition_the_network, Fleet.cut_the_network, Fleet.slow_the_network),
    Fleet.fill_the_disk,
)


def _end_well(process: "subprocess.Popen[bytes]") -> None:
    if (status := services.stop(process)) != 0:
        raise AssertionError(f"{process.args!r} ended with status {status} on SIGTERM.")


def _freeze(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def soak(
    minutes: float, seed: int, directory: pathlib.Path, most_faults: int = sys.maxsize
) -> Iterator[str]:
    """Yields the lines of a report as it goes on.

    Raises:
      AssertionError: something did not survive, or an unroll was lost or counted twice.
    """
    rng = random.Random(seed)
    survived: dict[str, list[float]] = collections.defaultdict(list)
    with contextlib.ExitStack() as stack:
        fleet = Fleet(directory, stack)
        fleet.wait_until_it_goes_on(0.0)
        fleet.wait_for_everyone()
        end = time.monotonic() + 60.0 * minutes
        bag: list[Callable[[Fleet, random.Random], None]] = []
        while time.monotonic() < end and sum(map(len, survived.values())) < most_faults:
            if not bag:  # every kind comes equally often
                bag = rng.sample(FAULTS, len(FAULTS))
            fault = bag.pop()
            time.sleep(rng.uniform(0.0, 2.0))
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
    yield f"| **together** | **{sum(map(len, survived.values()))}** | |"
    yield ""
    yield from account(fleet)


def account(fleet: Fleet) -> Iterator[str]:
    """Yields what became of every unroll of a fleet that has ended.

    Raises:
      AssertionError: one was lost or counted twice.
    """
    saved = checkpoint.load(fleet.logdir)
    yield from _accounts(saved.accounts)
    ledgers = [ledger for witness in fleet.witnesses for ledger in witness.ledgers]
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
        f"Witnesses: {len(ledgers)} incarnations got receipts for {acknowledged:,} unrolls; of "
        f"{exact} the learner accounts for exactly as many, of the others (killed before the "
        "learner crashed, or between a message and its receipt) for no more than they sent."
    )


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="end after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="impala-soak-") as directory:
        lines = list(
            soak(arguments.minutes, arguments.seed, pathlib.Path(directory), arguments.faults)
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.report is not None:
        arguments.report.write_text(text)


if __name__ == "__main__":
    main()
