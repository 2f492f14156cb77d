"""Replay: whole unrolls, two eviction rules, uniform draws, and nothing lost to a kill."""

import contextlib
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.stateful
import messages
import numpy as np
import pytest
import tree
from hypothesis import settings
from hypothesis import strategies as st

from impala.logdir import checkpoint
from impala.types import Unroll
from learner.data import replay as replay_module
from learner.data.replay import Replay, Rule
from learner.data.rows import Layout
from learner.data.storage import Disk

ACTOR = "actor-0"
FRAMES = 4 * messages.UNROLL_LENGTH  # in each unroll
RULES: tuple[Rule, ...] = ("reservoir", "fifo")
LAYOUT = Layout(messages.spec())


def unrolls(first: int, count: int) -> Unroll:
    """Unrolls that can be told apart: the contents of number n follow from n."""
    singles = [messages.unroll(1, seed=number) for number in range(first, first + count)]
    timed = tree.map_structure(
        lambda *leaves: np.concatenate(leaves, axis=1),
        *[(single.timestep, single.output) for single in singles],
    )
    return Unroll(
        timed[0],
        timed[1],
        core_state=np.concatenate([single.core_state for single in singles]),
        frames=np.full(count, FRAMES, np.int32),
        parameter_version=np.arange(first, first + count),
    )


def rows(first: int, count: int) -> np.ndarray:
    return LAYOUT.rows(unrolls(first, count))


def make(
    disk: Disk | None = None,
    rule: Rule = "reservoir",
    capacity: int = 10,
    memory: int = 2**20,
    seed: int = 0,
) -> Replay:
    frames = capacity * FRAMES
    return Replay(LAYOUT, disk, rule, capacity_frames=frames, memory=memory, seed=seed)


def drawn(replay: Replay, count: int) -> Unroll:
    batch = LAYOUT.empty(count)
    replay.sample(batch)
    return LAYOUT.unroll(batch)


def assert_whole(batch: Unroll) -> None:
    """Every column is the unroll that it says it is, bit for bit."""
    for column, number in enumerate(batch.parameter_version):
        original = unrolls(int(number), 1)
        for name in ("timestep", "output"):
            tree.map_structure(
                lambda a, b, c=column: np.testing.assert_array_equal(a[:, c], b[:, 0]),
                getattr(batch, name),
                getattr(original, name),
            )
        np.testing.assert_array_equal(batch.core_state[column], original.core_state[0])
        assert batch.frames[column] == FRAMES


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_is_drawn_twice_is_kept_once(tmp_path: pathlib.Path, is_on_disk: bool) -> None:
    """Given unrolls that are not in memory, and then room for them there."""
    if is_on_disk:
        replay = make(Disk(tmp_path, "test"), capacity=5, memory=0)
        replay.add(rows(0, 2), ACTOR)
        replay.commit()
        replay.close()
        replay = make(Disk(tmp_path, "test"), capacity=5, memory=4 * LAYOUT.row_bytes)
    else:
        replay = make(capacity=5, memory=3 * LAYOUT.row_bytes)
        first = replay.add(rows(2, 3), ACTOR)  # fill its memory
        replay.add(rows(0, 2), ACTOR)
        replay.remove(range(first, first + 3))
    assert len(replay) == 2
    for _ in range(2):
        batch = drawn(replay, 20)
        assert set(batch.parameter_version) == {0, 1}
        assert_whole(batch)
    assert replay.contents().bytes == 2 * LAYOUT.row_bytes
    replay.close()


def test_a_commit_counts_nothing_that_was_added_while_it_was_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, "test")
    replay, write = make(disk), disk.commit
    replay.add(rows(0, 3), ACTOR)

    def slow(*arguments: Any) -> None:
        replay.add(rows(3, 2), ACTOR)
        write(*arguments)

    monkeypatch.setattr(disk, "commit", slow)
    assert replay.commit() == 3
    disk.close()  # as if it was killed
    again = make(Disk(tmp_path, "test"))
    assert again.contents().added == len(again) == 3
    again.close()


@pytest.mark.parametrize("rule", RULES)
def test_removed_records_are_never_drawn_even_after_a_crash(
    tmp_path: pathlib.Path, rule: Rule
) -> None:
    # Given a full replay, and an unroll of it that was drawn ...
    store = Disk(tmp_path, "test")
    replay = make(store, rule, capacity=10)
    replay.add(rows(0, 30), ACTOR)
    before = messages.held(replay).tolist()
    (poison,) = replay.sample(LAYOUT.empty(1))
    # ... when it is removed, which some that are long gone do not prevent ...
    assert poison.number is not None
    assert replay.remove([poison.number, poison.number, 10_000]) == 1
    assert replay.remove([poison.number]) == 0
    left = [number for number in before if number != poison.number]
    assert messages.held(replay).tolist() == left
    assert replay.contents().frames == 9 * FRAMES
    # ... and the process is killed, then it is gone, and the others are whole.
    store.close()
    replay = make(Disk(tmp_path, "test"), rule, capacity=10)
    assert messages.held(replay).tolist() == left
    assert sorted(drawn(replay, 9).parameter_version) == left
    # Its place is taken by what comes after, and its turn to be evicted passes unnoticed.
    replay.add(rows(30, 270), ACTOR)
    assert len(replay) == 10
    assert_whole(drawn(replay, 10))
    if rule == "fifo":
        assert messages.held(replay).tolist() == list(range(290, 300))
    replay.close()


@pytest.mark.parametrize("rule", RULES)
def test_a_cleared_replay_is_a_new_one_that_goes_on_counting(
    tmp_path: pathlib.Path, rule: Rule
) -> None:
    replay = make(Disk(tmp_path, "a run"), rule, capacity=4)
    replay.add(rows(0, 9), ACTOR)
    assert len(replay) == 4

    assert replay.clear() == 9

    assert len(replay) == 0 and not replay.is_full
    with pytest.raises(LookupError, match="empty"):
        drawn(replay, 1)
    assert replay.add(rows(9, 4), ACTOR) == 9
    replay.commit()
    replay.close()
    again = make(Disk(tmp_path, "a run"), rule, capacity=4)
    assert sorted(drawn(again, 4).parameter_version) == [9, 10, 11, 12]  # none is refused
    assert again.contents()[:2] == (4, 4 * FRAMES) and again.contents().added == 13


CAPACITY, TIMES, BINS = 300, 20, 20
CRITICAL = 43.8  # of chi squared with 19 degrees of freedom: passed by 999 uniform samples in 1000


def chi_squared(numbers: np.ndarray, of: int) -> float:
    """How far the numbers below `of` are from spread evenly over BINS bins."""
    observed, _ = np.histogram(numbers, BINS, (0, of))
    expected = len(numbers) / BINS
    return float(((observed - expected) ** 2 / expected).sum())


def test_a_reservoir_is_uniform_over_everything_ever_added() -> None:
    added = TIMES * CAPACITY
    block = rows(0, 100)
    held = []
    for seed in range(3):
        replay = make(capacity=CAPACITY, seed=seed)
        for _ in range(added // 100):
            replay.add(block, ACTOR)
        assert len(replay) == CAPACITY
        held.append(messages.held(replay))
    assert chi_squared(np.concatenate(held), added) < CRITICAL


@pytest.mark.parametrize("rule", RULES)
def test_a_smaller_capacity_evicts_at_the_next_start(tmp_path: pathlib.Path, rule: Rule) -> None:
    replay = make(Disk(tmp_path, "test"), rule, capacity=10)
    replay.add(rows(0, 30), ACTOR)
    before = messages.held(replay)
    replay.commit()
    replay.close()
    replay = make(Disk(tmp_path, "test"), rule, capacity=4)
    assert len(replay) == 4
    assert set(messages.held(replay)) <= set(before)
    if rule == "fifo":
        assert messages.held(replay).tolist() == [26, 27, 28, 29]
    assert_whole(drawn(replay, 4))
    replay.close()


def test_an_unroll_that_is_larger_than_the_replay_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"16 frames .* not fit .*replay.capacity_frames"):
        make(capacity=0).add(rows(0, 1), ACTOR)


class Story(hypothesis.stateful.RuleBasedStateMachine):
    """Any sequence of adding, drawing, committing, restarting and crashing."""

    rule: Rule
    capacity = 6
    memory = 2**20

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.open()
        self.committed = self.seen()

    def open(self) -> None:
        self.store = Disk(pathlib.Path(self.directory.name), "test")
        self.replay = make(self.store, self.rule, self.capacity, self.memory)

    def seen(self) -> tuple[list[int], int]:
        return messages.held(self.replay).tolist(), self.replay.contents().added

    @hypothesis.stateful.rule(count=st.integers(1, 9))
    def add(self, count: int) -> None:
        self.replay.add(rows(self.replay.contents().added, count), ACTOR)

    @hypothesis.stateful.rule(count=st.integers(1, 9))
    def sample(self, count: int) -> None:
        if len(self.replay):
            batch = drawn(self.replay, count)
            assert_whole(batch)
            assert set(batch.parameter_version) <= set(messages.held(self.replay))
            if count <= len(self.replay):
                assert len(set(batch.parameter_version)) == count

    @hypothesis.stateful.rule()
    def commit(self) -> None:
        self.replay.commit()
        self.committed = self.seen()

    @hypothesis.stateful.rule()
    def restart(self) -> None:
        self.replay.commit()
        self.replay.close()
        self.open()
        self.committed = self.seen()

    @hypothesis.stateful.rule()
    def crash(self) -> None:
        self.store.close()
        self.open()
        assert self.seen() == self.committed

    @hypothesis.stateful.invariant()
    def it_holds_what_its_rule_says(self) -> None:
        numbers, added = self.seen()
        assert len(numbers) == len(set(numbers)) == min(added, self.capacity)
        assert all(0 <= number < added for number in numbers)
        assert self.replay.contents().frames == len(numbers) * FRAMES
        assert self.replay.is_full == (added > self.capacity)
        if self.rule == "fifo":
            assert numbers == list(range(max(0, added - self.capacity), added))

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()


@pytest.mark.parametrize("held_in_memory", [0, 2, 100])
@pytest.mark.parametrize("rule", RULES)
def test_any_story_keeps_the_rules(rule: Rule, held_in_memory: int) -> None:
    memory = held_in_memory * LAYOUT.row_bytes
    machine = type("Story", (Story,), {"rule": rule, "memory": memory})
    hypothesis.stateful.run_state_machine_as_test(
        machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None)
    )


# For each line that it reads, a process to be killed: forked, for what it imports takes seconds.
_VICTIMS = """
import json, os, pathlib, sys
sys.path[:0] = json.loads(sys.argv[1])
import test_replay
for _ in sys.stdin:
    victim = os.fork()
    if not victim:
        test_replay.add_for_ever(pathlib.Path(sys.argv[2]), sys.argv[3])
    _, status = os.waitpid(victim, 0)
    print("ended with", status, flush=True)
"""


@contextlib.contextmanager
def _victims(logdir: pathlib.Path, rule: Rule) -> Iterator[Callable[[float], None]]:
    """Gives a function that has unrolls added for so many seconds, then kills who does it."""
    paths = json.dumps([str(pathlib.Path(__file__).parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", _VICTIMS, paths, str(logdir), rule],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        asked, said = process.stdin, process.stdout
        assert asked is not None and said is not None

        def kill_one_after(seconds: float) -> None:
            print(file=asked, flush=True)
            victim = int(said.readline())
            time.sleep(seconds)
            os.kill(victim, signal.SIGKILL)
            assert said.readline() == f"ended with {int(signal.SIGKILL)}\n"

        try:
            yield kill_one_after
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def add_for_ever(logdir: pathlib.Path, rule: Rule) -> None:
    """Says its process, then adds unrolls and writes checkpoints as fast as it can."""
    from impala.config.presets import PRESETS

    replay = make(Disk(logdir / "replay", "test"), rule, capacity=50)
    print(os.getpid(), flush=True)
    for updates in itertools.count(replay.contents().added):
        replay.add(rows(replay.contents().added, 3), ACTOR)
        if updates % 5 == 0:
            replay.commit()
            added = replay.contents().added
            counters = checkpoint.Counters(updates=added)
            saved = checkpoint.Checkpoint(PRESETS["catch"][1], counters, {}, {}, added)
            checkpoint.save(logdir, saved, keep=2)


def test_a_killed_learner_comes_back_with_its_replay(tmp_path: pathlib.Path) -> None:
    rng, rule = random.Random(0), RULES[0]
    added = kills = 0
    with _victims(tmp_path, rule) as kill_one_after:
        while kills < 10 or added <= 200:
            kill_one_after(rng.uniform(0.0, 0.15))
            kills += 1

            replay = make(Disk(tmp_path / "replay", "test"), rule, capacity=50)
            contents = replay.contents()
            if checkpoint.exists(tmp_path):
                assert contents.added >= checkpoint.load(tmp_path).replay_added
            assert contents.added >= added
            assert contents.unrolls == min(50, contents.added)
            if contents.unrolls:
                batch = drawn(replay, contents.unrolls)  # all of it, each once
                assert_whole(batch)
                assert sorted(batch.parameter_version) == messages.held(replay).tolist()
            added = contents.added
            replay.close()


def test_a_cleared_replay_takes_no_room_on_disk(tmp_path: pathlib.Path) -> None:
    replay = make(Disk(tmp_path, "test"), capacity=2000)
    replay.add(rows(0, 2000), ACTOR)
    replay.commit()
    full = (tmp_path / "replay.sqlite").stat().st_size
    replay.clear()
    replay.add(rows(0, 3), ACTOR)
    replay.commit()
    replay.close()
    assert (tmp_path / "replay.sqlite").stat().st_size < full / 5
    replay = make(Disk(tmp_path, "test"), capacity=2000)
    assert (len(replay), replay.contents().added, replay.is_full) == (3, 2003, False)
    replay.close()


def test_a_commit_is_due_by_bytes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_COMMIT_BYTES", 10 * LAYOUT.row_bytes)
    monkeypatch.setattr(replay_module, "_COMMIT_SECONDS", 0.0)
    replay = make(Disk(tmp_path, "test"), capacity=100)
    begun = []
    for first, count in ((0, 9), (9, 1)):
        replay.add(rows(first, count), ACTOR)
        begun.append(replay._writing is not None)
    assert begun == [False, True]
    replay.close()
