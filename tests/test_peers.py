"""Learners that are peers: a share of the run for each, and whole runs with and without kills."""

import contextlib
import dataclasses
import json
import pathlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import services
from chaos.witness import Witness
from test_meeting import addresses

from actors.channel import StatusClient
from actors.session import LearnerError
from impala.config.presets import PRESETS
from impala.config.schema import MixConfig, ReplayConfig
from impala.config.values import OptionError
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, Counters
from learner import peer_config, run
from learner.update import checkpoints
from protos.impala.v1 import learner_pb2 as pb

RECOVERY_SECONDS = 180.0  # in which peers start again, on a busy machine
STOPPED = 75

CATCH = PRESETS["catch"][1]


# The share of a peer.


def test_the_shares_of_all_peers_are_the_whole() -> None:
    config = dataclasses.replace(
        CATCH,
        seed=7,
        mix=MixConfig(fresh=16, replayed=32, warm_up_unrolls=101),
        replay=ReplayConfig(capacity_frames=1000),
    )
    peer_config.check(config, 4)
    parts = [peer_config.of_peer(config, i, 4) for i in range(4)]
    assert sum(part.mix.fresh for part in parts) == 16
    assert sum(part.mix.batch_size for part in parts) == config.mix.batch_size
    assert [part.mix.warm_up_unrolls for part in parts] == [26] * 4
    assert [part.replay.capacity_frames for part in parts] == [250] * 4
    assert [part.seed for part in parts] == [7, 8, 9, 10]
    assert [part.learner.snapshots for part in parts] == ["auto", "never", "never", "never"]
    assert peer_config.of_peer(config, 0, 1) == config


@pytest.mark.parametrize(
    ("mix", "count", "why"),
    [
        ({"fresh": 9}, 2, r"mix\.fresh is 9, which 2 peers cannot share evenly"),
        ({"fresh": 8, "replayed": 9}, 2, r"mix\.replayed is 9"),
        ({"fresh": 16, "lag_budget": 2}, 2, r"mix\.fresh 8: actor\.num_envs is 32"),
    ],
)
def test_what_cannot_be_shared_is_refused(mix: dict[str, Any], count: int, why: str) -> None:
    actor = dataclasses.replace(CATCH.actor, num_envs=32)
    config = dataclasses.replace(CATCH, mix=dataclasses.replace(MixConfig(), **mix), actor=actor)
    with pytest.raises(OptionError, match=why):
        peer_config.check(config, count)


def test_peers_keep_the_accounts_the_first_resumes_from(
    tmp_path: pathlib.Path,
) -> None:
    """Given a first peer whose disk is full, after the other has saved."""

    def save(updates: int) -> None:
        made = Checkpoint(CATCH, Counters(updates), {"agent/000/w:0": np.zeros(3)}, accounts={})
        checkpoint.save(tmp_path, made, keep=2)

    save(900)
    save(1000)
    for attempt in range(3):
        saved = checkpoints._at_most(Counters(1000), tmp_path)
        assert saved is not None and saved.counters.updates == 1000
        save(1100 + attempt)
    # A first peer that has lost everything costs the others nothing.
    assert checkpoints._at_most(Counters(), tmp_path) is None
    assert len(checkpoint.of_kind(tmp_path, "checkpoints")) == 2


def test_which_phase_a_run_is_in_is_told_by_the_first_peer_alone(tmp_path: pathlib.Path) -> None:
    """Given a peer whose only checkpoint is damaged, in a run past its demonstrations."""
    made = Checkpoint(CATCH, Counters(9), {"agent/000/w:0": np.zeros(3)}, accounts={})
    saved = checkpoint.save(tmp_path, made, keep=2)
    (saved / "variables.npz").write_bytes(b"damaged")
    phases: Any = SimpleNamespace(begin_with_demonstrations=True)
    group: Any = SimpleNamespace(is_first=False, of_first=lambda own: (2, 5))
    options = run.Options(logdir=tmp_path, listen="127.0.0.1:0")
    plan: Any = SimpleNamespace(phases=phases)
    assert run._demonstrations(CATCH, options, plan, group) is None


# Whole runs.


class Peer:
    """A learner that is started again whenever it has failed, as a supervisor does."""

    def __init__(self, directory: pathlib.Path, index: int, flags: Sequence[object]):
        self.logdir = directory / f"peer-{index}"
        self.logdir.mkdir()
        self.address = f"unix:{directory}/learner-{index}"
        self.statuses: list[int] = []  # of those that have ended
        self._flags = ("--logdir", self.logdir, "--listen", self.address, "--peer", index, *flags)
        self.is_last = False
        """Whether nobody starts it again."""
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, number: int) -> None:
        """Sends a signal to the one that runs now."""
        if self._process is not None:
            self._process.send_signal(number)

    def await_end(self, before: int) -> None:
        """Waits until more have ended by themselves than before."""
        services.wait_for("a peer to end", lambda: len(self.statuses) > before)

    def end(self, number: int | None) -> None:
        """Waits for its end: by a signal, after which nobody starts it again, or by itself."""
        if number is not None:
            self.is_last = True
            self.send(number)
        services.wait_for("the end of a peer", lambda: not self._thread.is_alive())

    def status(self) -> pb.RunStatus | None:
        """The state of its run, if it can be reached."""
        try:
            with StatusClient(self.address) as client:
                return client.get()
        except LearnerError:
            return None

    def _run(self) -> None:
        log = self.logdir.with_suffix(".log")
        while not (self.is_last or 0 in self.statuses):
            with services.impala("learner", *self._flags, log=log) as self._process:
                self.statuses.append(self._process.wait())
            time.sleep(0.2)


@contextlib.contextmanager
def two(directory: pathlib.Path, preset: str, *flags: object) -> Iterator[list[Peer]]:
    where = ",".join(addresses(2))
    both = [
        Peer(
            directory,
            i,
            (*flags, "--learner.threads", 1, "--peers", where, "--security.open-peers", preset),
        )
        for i in (0, 1)
    ]
    try:
        yield both
    finally:
        for peer in both:
            peer.end(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_peers_with_two_actors_each_train(tmp_path: pathlib.Path) -> None:
    with contextlib.ExitStack() as stack, two(tmp_path, "catch") as both:
        for i in range(4):
            peer = both[i % 2]
            stack.enter_context(services.actor(peer.logdir, peer.address, "--name", f"actor-{i}"))
        for peer in both:
            peer.end(None)
        assert [peer.statuses for peer in both] == [[0], [0]]

    # Both have the same agent, which has learned, and counted what both have received.
    saved = [checkpoint.load(peer.logdir) for peer in both]
    assert saved[0].counters == saved[1].counters
    for name, value in saved[0].variables.items():
        assert (value == saved[1].variables[name]).all(), name
    assert saved[0].counters.unrolls == sum(each.accounts["learned"] for each in saved)
    report = tmp_path / "report.json"
    evaluated = services.run("evaluate", both[0].logdir, "--greedy", "--json", report)
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(report.read_text())["summary"]["return_mean"] >= 0.99

    # The first one's telemetry has queue, lag and waiting of both.
    row = services.rows(both[0].logdir)[-2]
    for i in (0, 1):
        assert {f"peer/{i}/queued", f"peer/{i}/waited_seconds/mean"} <= row.keys()
        assert 0 <= row[f"peer/{i}/policy_lag"] < 100


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_peer_ends_the_other_and_both_go_on(tmp_path: pathlib.Path, frozen: int) -> None:
    flags = ("--total-frames", 1_000_000_000, "--learner.checkpoint-seconds", 1)
    with contextlib.ExitStack() as stack, two(tmp_path, "catch", *flags) as both:
        for i, peer in enumerate(both):
            stack.enter_context(services.actor(peer.logdir, peer.address, "--name", f"actor-{i}"))

        def version() -> int:
            states = [peer.status() for peer in both]
            return min(0 if state is None else state.parameter_version for state in states)

        # Given peers that have a checkpoint, and one that does not answer any more...
        services.wait_for("both to learn", lambda: version() > 50, RECOVERY_SECONDS)
        services.wait_for(
            "checkpoints", lambda: all(checkpoint.exists(peer.logdir) for peer in both)
        )
        log = both[1 - frozen].logdir.with_suffix(".log")
        before = len(log.read_text())
        both[frozen].send(signal.SIGSTOP)
        # ...then the other says who is lost and ends, to be started again, and waits for it...
        both[1 - frozen].await_end(0)
        assert both[1 - frozen].statuses == [STOPPED] and both[frozen].statuses == []
        said = log.read_text()[before:]
        of_both = both[0]._flags
        name = str(of_both[of_both.index("--peers") + 1]).split(",")[frozen]
        assert f"{name} is lost (silent for 10 s): this process ends, too, and has to be" in said
        assert "Traceback" not in said
        services.wait_for(
            "the other to wait", lambda: log.read_text().count("waiting for the others") == 2
        )
        # ...and when it goes on, it ends too, and both resume from the checkpoint.
        saved = checkpoint.load(both[0].logdir).counters.updates
        both[frozen].send(signal.SIGCONT)
        both[frozen].await_end(0)
        services.wait_for("both to go on", lambda: version() > saved, RECOVERY_SECONDS)
        for peer in both:
            assert peer.statuses[0] == STOPPED


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_peers_that_are_killed_go_on_together_and_lose_no_count(tmp_path: pathlib.Path) -> None:
    rng = random.Random(1)
    flags = (
        *("--total-frames", 1_000_000_000, "--mix.replayed", 32),
        *("--learner.log-seconds", 1, "--learner.checkpoint-seconds", 3),
    )
    with contextlib.ExitStack() as stack, two(tmp_path, "catch", *flags) as both:
        witnesses = [Witness(both[i % 2].address, f"witness-{i}") for i in range(4)]
        for i, witness in enumerate(witnesses):
            witness.start()
            peer = both[i % 2]
            stack.enter_context(services.actor(peer.logdir, peer.address, "--name", f"actor-{i}"))

        def go_on() -> None:
            """Both have the same learner's incarnation, and versions that grow."""
            seen = set[int]()

            def goes_on() -> bool:
                states = [peer.status() for peer in both]
                if None in states:
                    return False
                first, second = (state for state in states if state is not None)
                if first.learner_incarnation == second.learner_incarnation:
                    seen.add(second.parameter_version)
                return len(seen) > 2

            services.wait_for("the peers to go on", goes_on, RECOVERY_SECONDS)

        # Given 20 kills, of either of them...
        for _ in range(20):
            go_on()
            time.sleep(rng.uniform(0.0, 6.0))
            killed = rng.choice(both)
            other = both[1 - both.index(killed)]
            ended = len(other.statuses)
            killed.send(signal.SIGKILL)
            other.await_end(ended)
        go_on()

        # ...when they are stopped at last, which is said to one of them...
        for witness in witnesses:
            witness.stop()
        both[0].is_last = both[1].is_last = True
        both[0].end(signal.SIGTERM)
        both[1].end(None)
        assert both[0].statuses[-1] == 0
        assert both[1].statuses[-1] == STOPPED
        assert {*both[0].statuses[:-1], *both[1].statuses[:-1]} == {-signal.SIGKILL, STOPPED}
        assert sum(peer.statuses.count(-signal.SIGKILL) for peer in both) == 20

    # ...then each of them accounts for everything that it gave a receipt for.
    for peer, own in zip(both, (witnesses[::2], witnesses[1::2]), strict=True):
        state = checkpoint.load(peer.logdir).accounts
        accounted = {name: unrolls for name, _, unrolls, *_ in state["ledgers"]}
        for witness in own:
            assert witness.error is None
            assert accounted[witness.name] == witness.ledgers[-1].acknowledged > 0
    saved = [checkpoint.load(peer.logdir) for peer in both]
    assert saved[0].counters == saved[1].counters
