"""Batches hold every unroll once, in order, whatever the sizes of messages and batches."""

import asyncio
import threading
import time
from collections import Counter

import numpy as np
import pytest
import services
import tree
from services import WAIT

from impala.config.schema import MixConfig
from impala.logdir.directory import StorageError
from impala.types import AgentOutput, ArraySpec, Batch, StepType, TimeStep, Unroll
from learner.data.demonstrations import Demonstrations
from learner.data.ingest import Arrival, Ingest
from learner.data.mix import Mix, Prepared
from learner.data.replay import Replay
from learner.data.rows import Layout, Placed

T = 3


def _arrival(sequence: int, num_envs: int, first_id: int, offset: int = 0) -> Arrival:
    """A message whose every number says which unroll (id) and row it belongs to."""
    ids = np.arange(first_id, first_id + num_envs)
    rows = np.arange(T + 1)[:, None] * 1000 + ids  # [T + 1, E]
    step_type = np.full((T + 1, num_envs), StepType.MID, np.int8)
    step_type[2] = StepType.FIRST  # one seam in each unroll
    unroll = Unroll(
        timestep=TimeStep(
            observation={"a": rows[..., None].repeat(2, -1), "b": rows.astype(np.uint16)},
            reward=rows.astype(np.float32),
            discount=np.ones((T + 1, num_envs), np.float32),
            step_type=step_type,
        ),
        output=AgentOutput(
            action=rows.astype(np.int64),
            policy=rows[..., None].astype(np.float32),
            baseline=rows.astype(np.float32),
        ),
        core_state=(ids.astype(np.float32)[:, None],),
        frames=ids.astype(np.int32),
        parameter_version=ids.astype(np.int64) + 7,
    )
    return Arrival(
        unroll=unroll,
        actor=f"actor-{sequence % 2}",
        incarnation=5,
        sequence=sequence,
        task=0,
        offset=offset,
        episodes=[],
        elapsed_seconds=0.0,
        waited_seconds=0.0,
    )


def _layout() -> Layout:
    like = _arrival(0, 1, 0).unroll
    timed = tree.map_structure(
        lambda x: ArraySpec((x.shape[0], *x.shape[2:]), x.dtype), (like.timestep, like.output)
    )
    state = tree.map_structure(lambda x: ArraySpec(x.shape[1:], x.dtype), like.core_state)
    return Layout(Unroll(timed[0], timed[1], core_state=state, frames=(), parameter_version=()))


LAYOUT = _layout()


def _put(ingest: Ingest, arrivals: list[Arrival]) -> None:
    async def put_all() -> None:
        for arrival in arrivals:
            async with ingest.room(arrival.unroll.frames.shape[0]):
                ingest.put(arrival)

    asyncio.run(put_all())


def _batch(prepared: Prepared) -> Batch:
    assert prepared.batch is not None
    return prepared.batch


def _take(mix: Mix, count: int) -> list[Prepared]:
    batches = []
    for _ in range(count):
        prepared = mix.get(timeout=10.0)
        assert prepared is not None
        batches.append(prepared)
    return batches


def test_it_plays_in_its_callers_thread_until_a_batch_is_full() -> None:
    # Given a player that gives nothing every second time ...
    ingest, threads = Ingest(capacity=1000), []

    def play() -> None:
        threads.append(threading.get_ident())
        if len(threads) % 2 == 0:
            _put(ingest, [_arrival(len(threads), 3, 3 * len(threads))])

    mix = Mix(ingest, MixConfig(fresh=4), LAYOUT, play=play)
    try:
        # ... when batches of 4 are made of messages of 3, then each call that plays for nothing
        # returns, and the next one goes on with what there is.
        found = [mix.get(timeout=60.0) for _ in range(5)]
    finally:
        mix.close()
    made = [prepared for prepared in found if prepared is not None]
    assert [prepared is not None for prepared in found] == [False, False, True, False, True]
    frames = np.concatenate([_batch(prepared).unroll.frames for prepared in made])
    assert frames.tolist() == [6, 7, 8, 12, 13, 14, 18, 19]
    assert set(threads) == {threading.get_ident()} and len(threads) == 6


@pytest.mark.parametrize(("num_envs", "batch_size"), [(4, 4), (3, 5), (7, 2), (1, 6), (6, 6)])
def test_every_unroll_is_in_one_batch_in_order_and_whole(num_envs: int, batch_size: int) -> None:
    # Given twelve messages whose numbers tell where they come from ...
    messages = 12
    ingest = Ingest(capacity=1000)
    _put(ingest, [_arrival(i + 1, num_envs, i * num_envs) for i in range(messages)])
    count = messages * num_envs // batch_size
    # ... when the mix makes batches of them ...
    mix = Mix(ingest, MixConfig(fresh=batch_size), LAYOUT)
    try:
        batches = _take(mix, count)
        assert mix.get(timeout=0.05) is None  # what is left does not fill a batch
    finally:
        mix.close()
    # ... then column k of all batches in a row is unroll k, in every leaf.
    expected = _arrival(0, count * batch_size, 0).unroll
    for got, leaf in zip(
        zip(*(tree.flatten(_batch(p).unroll) for p in batches), strict=True),
        tree.flatten(expected),
        strict=True,
    ):
        axis = 1 if leaf.shape[0] == T + 1 and leaf.ndim > 1 and leaf.shape[1] > 1 else 0
        np.testing.assert_array_equal(np.concatenate(got, axis=axis), leaf)
        assert got[0].dtype == leaf.dtype
    for prepared in batches:
        assert not _batch(prepared).is_replay.any()
        assert prepared.frames == _batch(prepared).unroll.frames.sum()
        assert prepared.steps == batch_size * (T - 1)  # the seam is not a step
    # And the provenance accounts for each unroll of each message.
    accounted: Counter[int] = Counter()
    for prepared in batches:
        assert sum(p.unrolls for p in prepared.provenance) == batch_size
        for provenance in prepared.provenance:
            accounted[provenance.sequence] += provenance.unrolls
    assert all(accounted[s] == num_envs for s in range(1, count * batch_size // num_envs + 1))
    # Each message's statistics count once.
    arrivals = [arrival.sequence for prepared in batches for arrival in prepared.arrivals]
    assert arrivals == sorted(set(arrivals))


def test_a_dead_batch_thread_is_reported() -> None:
    class Broken(Ingest):
        def get(self, timeout: float) -> Arrival | None:
            raise OSError("no more")

    mix = Mix(Broken(capacity=1), MixConfig(fresh=1), LAYOUT)
    with pytest.raises(RuntimeError, match="batch thread has died") as caught:
        for _ in range(100):
            mix.get(timeout=0.1)
    assert isinstance(caught.value.__cause__, OSError)
    mix.close()


def _replay(capacity: int = 1000) -> Replay:
    """A replay of unrolls like those of `_arrival`, each of which says it has a frame."""
    return Replay(LAYOUT, None, "fifo", capacity_frames=capacity, memory=2**20)


def _framed(sequence: int, num_envs: int, first_id: int) -> Arrival:
    arrival = _arrival(sequence, num_envs, first_id)
    return arrival._replace(unroll=arrival.unroll._replace(frames=np.ones(num_envs, np.int32)))


def _numbers(prepared: Prepared) -> list[int]:
    """Which unrolls are in a batch."""
    assert prepared.batch is not None
    return (_batch(prepared).unroll.parameter_version - 7).tolist()


def test_a_batch_is_placed_while_the_next_is_made() -> None:
    ingest, placing, may_end = Ingest(100), threading.Event(), threading.Event()

    def place(layout: Layout, rows: np.ndarray) -> Placed:
        placing.set()
        assert may_end.wait(WAIT)
        return Placed(layout, rows.copy())

    mix = Mix(ingest, MixConfig(fresh=4), LAYOUT, place=place)
    _put(ingest, [_arrival(sequence, 4, 4 * sequence) for sequence in range(2)])
    assert placing.wait(WAIT)
    deadline = time.monotonic() + WAIT
    while ingest.depth:  # the second was taken although the first is not placed
        assert time.monotonic() < deadline
        time.sleep(0.01)
    may_end.set()
    for _ in range(2):
        prepared = mix.get(timeout=WAIT)
        assert prepared is not None and prepared.placed is not None
        np.testing.assert_array_equal(prepared.placed.rows, prepared.rows)
    mix.close()


def test_rows_that_cannot_be_placed_end_the_run() -> None:
    def place(layout: Layout, rows: np.ndarray) -> Placed:
        raise MemoryError("the device is full")

    ingest = Ingest(100)
    mix = Mix(ingest, MixConfig(fresh=4), LAYOUT, place=place)
    _put(ingest, [_arrival(0, 4, 0)])
    with pytest.raises(MemoryError, match="the device is full"):
        mix.get(timeout=WAIT)
    mix.close()


def test_half_fresh_half_replayed() -> None:
    # Given a replay that may begin with four unrolls, and twelve fresh ones ...
    ingest, replay = Ingest(capacity=100), _replay()
    _put(ingest, [_framed(i + 1, 4, 4 * i) for i in range(3)])
    mix = Mix(ingest, MixConfig(fresh=2, replayed=2, warm_up_unrolls=4), LAYOUT, replay)
    try:
        first, second, *batches = _take(mix, 6)
    finally:
        mix.close()
    # ... then the first four only go to replay, and count ...
    for prepared in (first, second):
        assert prepared.batch is None
        assert (prepared.unrolls, prepared.frames, prepared.steps) == (2, 2, 2 * (T - 1))
    # ... and then every batch has the next two, and two that came before them.
    for i, prepared in enumerate(batches):
        assert prepared.batch is not None
        numbers = _numbers(prepared)
        assert numbers[:2] == [4 + 2 * i, 5 + 2 * i]
        assert len(set(numbers)) == 4
        assert max(numbers[2:]) < 4 + 2 * i
        assert prepared.batch.is_replay.tolist() == [False, False, True, True]
        assert (prepared.unrolls, prepared.frames) == (2, 2)
        # Replayed columns are whole: their rows say the same number as their version.
        rows = _batch(prepared).unroll.output.baseline
        assert (rows == np.arange(T + 1)[:, None] * 1000 + numbers).all()
    assert len(replay) == 12
    assert [part.sequence for p in (first, second, *batches) for part in p.provenance] == [
        *[1, 1, 2, 2, 3, 3]
    ]


def test_several_updates_follow_each_taking_of_fresh_unrolls() -> None:
    ingest, replay = Ingest(capacity=100), _replay()
    _put(ingest, [_framed(i + 1, 4, 4 * i) for i in range(3)])
    config = MixConfig(fresh=4, replayed=6, learn_from_fresh=False, warm_up_unrolls=2, updates=3)
    mix = Mix(ingest, config, LAYOUT, replay)
    try:
        warm_up, *batches = _take(mix, 7)
        assert mix.get(timeout=0.05) is None  # nothing more until more is played
    finally:
        mix.close()
    assert warm_up.batch is None
    assert [prepared.unrolls for prepared in batches] == [4, 0, 0, 4, 0, 0]
    assert [len(each.fresh) for each in (warm_up, *batches)] == [1, 1, 0, 0, 1, 0, 0]
    assert [len(prepared.provenance) for prepared in batches] == [1, 0, 0, 1, 0, 0]
    for prepared in batches:
        assert prepared.batch is not None
        assert prepared.batch.is_replay.tolist() == [True] * 6
    # What was fresh to the first of three may be replayed in the other two.
    assert max(_numbers(batches[0])) < 4
    assert 4 <= max(max(_numbers(prepared)) for prepared in batches[1:3]) < 8


def test_replayed_unrolls_need_a_replay() -> None:
    with pytest.raises(ValueError, match=r"mix\.replayed is 3"):
        Mix(Ingest(capacity=1), MixConfig(replayed=3), LAYOUT)


def test_a_replay_that_cannot_be_written_is_reported_as_such(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(Replay):
        def add(self, rows: np.ndarray, actor: str) -> int:
            raise StorageError("No space left.")

    ingest, replay = Ingest(capacity=100), Full(LAYOUT, None, "fifo", capacity_frames=9, memory=0)
    _put(ingest, [_framed(1, 4, 0)])
    mix = Mix(ingest, MixConfig(fresh=4, replayed=1), LAYOUT, replay)
    with pytest.raises(StorageError, match="No space left"):
        for _ in range(100):
            mix.get(timeout=0.1)
    mix.close()
    assert not [record for record in caplog.records if record.exc_info]


def _made_with(version: int, arrival: Arrival) -> Arrival:
    """The arrival, all of one version of the parameters."""
    unroll = arrival.unroll
    versions = np.full_like(unroll.parameter_version, version)
    return arrival._replace(unroll=unroll._replace(parameter_version=versions))


def test_unrolls_beyond_the_lag_limit_are_dropped() -> None:
    # Given messages of two unrolls, of several versions, for the updates 10, 11 and 12 ...
    ingest = Ingest(capacity=100)
    for sequence, version in enumerate([10, 3, 9, 5, 12], start=1):
        _put(ingest, [_made_with(version, _arrival(sequence, 2, 2 * sequence))])

    # ... when at most two updates may lie between ...
    mix = Mix(ingest, MixConfig(fresh=2, max_policy_lag=2), LAYOUT, version=10)
    try:
        prepared = _take(mix, 5)
    finally:
        mix.close()
    batches = [each for each in prepared if each.batch is not None]

    # ... then 9 is learned by update 11, for which it is two updates behind, and 3 and 5 by none.
    assert [list(_batch(b).unroll.parameter_version) for b in batches] == [
        [10, 10],
        [9, 9],
        [12, 12],
    ]
    whole = [part for each in prepared for part in each.provenance]
    assert [(p.sequence, p.unrolls, p.dropped) for p in whole] == [
        *[(1, 2, None), (2, 2, "policy_lag"), (3, 2, None), (4, 2, "policy_lag"), (5, 2, None)]
    ]
    # Nothing of them counts, but that their episodes were played.
    assert [each.unrolls for each in prepared] == [2, 0, 2, 0, 2]
    assert [each.frames for each in prepared] == [2 + 3, 0, 6 + 7, 0, 10 + 11]
    assert [a.sequence for each in prepared for a in each.arrivals] == [1, 2, 3, 4, 5]


def test_demonstrations_come_first_and_what_was_played_meanwhile_is_dropped() -> None:
    # Given demonstrations, and messages of two unrolls that wait, of several versions ...
    unrolls = _made_with(-1, _arrival(1, 4, 100)).unroll
    ingest = Ingest(capacity=100)
    for sequence, version in enumerate([0, 7, 2, 8], start=1):
        _put(ingest, [_made_with(version, _arrival(sequence, 2, 2 * sequence))])
    demonstrations = Demonstrations(LAYOUT.rows(unrolls), seed=[0])
    mix = Mix(ingest, MixConfig(fresh=2), LAYOUT, demonstrations=demonstrations)
    try:
        # ... when batches of demonstrations are made until version 7, and then others ...
        cloned = _take(mix, 3)
        assert ingest.depth == 8
        mix.begin_phase(7, empties_replay=True)
        while (first := mix.get(timeout=10.0)) is None:  # what was made ahead
            pass
        prepared = [first, *_take(mix, 3)]
    finally:
        mix.close()
    # ... then those count for no actor, but as frames; and batches of what is older are dropped.
    for each in cloned:
        assert each.is_demonstrated and each.is_whole and not each.provenance and not each.unrolls
        batch = _batch(each)
        assert batch.is_replay.all() and (batch.unroll.parameter_version == -1).all()
        assert each.frames == batch.unroll.frames.sum() > 0
    assert not any(each.is_demonstrated for each in prepared)
    whole = [part for each in prepared for part in each.provenance]
    assert [(p.sequence, p.unrolls, p.dropped) for p in whole] == [
        *[(1, 2, "demonstrated"), (2, 2, None), (3, 2, "demonstrated"), (4, 2, None)]
    ]
    learned = [each for each in prepared if each.batch is not None]
    assert [list(_batch(b).unroll.parameter_version) for b in learned] == [[7, 7], [8, 8]]


def test_batches_fill_on_behind_what_is_too_old() -> None:
    """Version 99 is of a learner that had come further, and went back to its checkpoint."""
    ingest = Ingest(capacity=100)
    for sequence, version in enumerate([10, 3, 99, 10], start=1):
        _put(ingest, [_made_with(version, _arrival(sequence, 1, sequence))])
    mix = Mix(ingest, MixConfig(fresh=2, max_policy_lag=2), LAYOUT, version=10)
    try:
        (prepared,) = _take(mix, 1)
    finally:
        mix.close()
    np.testing.assert_array_equal(_batch(prepared).unroll.frames, [1, 4])
    parts = [(p.sequence, p.dropped) for p in prepared.provenance]
    assert parts == [(1, None), (2, "policy_lag"), (3, "policy_lag"), (4, None)]


def test_a_replay_of_which_everything_was_removed_warms_up_again() -> None:
    ingest, replay = Ingest(capacity=100), _replay(capacity=4)
    _put(ingest, [_framed(i + 1, 4, 4 * i) for i in range(2)])
    mix = Mix(ingest, MixConfig(fresh=4, replayed=1, warm_up_unrolls=4), LAYOUT, replay)
    try:
        assert [prepared.batch is None for prepared in _take(mix, 2)] == [True, False]
        assert replay.remove(range(100)) == 4
        _put(ingest, [_framed(i + 1, 4, 4 * i) for i in range(2, 4)])
        assert [prepared.batch is None for prepared in _take(mix, 2)] == [True, False]
    finally:
        mix.close()


def test_what_an_earlier_phase_stored_is_not_learned_from_again() -> None:
    # Given a batch of fresh and replayed unrolls that was made before a phase began ...
    ingest, replay = Ingest(capacity=100), _replay()
    _put(ingest, [_framed(i + 1, 4, 4 * i) for i in range(2)])
    mix = Mix(ingest, MixConfig(fresh=4, replayed=2, warm_up_unrolls=4), LAYOUT, replay)
    try:
        (warm_up,) = _take(mix, 1)
        services.wait_for("the batch", lambda: len(replay) == 8)
        mix.begin_phase(0, empties_replay=True)
        # ... then what it has of replay counts for nothing ...
        (prepared,) = _take(mix, 1)
        # ... and later batches, after another warm-up, replay what was added since.
        _put(ingest, [_framed(i + 1, 4, 4 * i) for i in range(2, 5)])
        later = _take(mix, 3)
    finally:
        mix.close()
    assert warm_up.batch is None and warm_up.weights is None
    assert prepared.weights is not None
    assert prepared.weights.tolist() == [1, 1, 1, 1, 0, 0] and prepared.weights.dtype == np.float32
    assert (prepared.unrolls, _numbers(prepared)[:4]) == (4, [4, 5, 6, 7])
    assert [each.batch is None for each in later] == [True, False, False]
    for each in later[1:]:
        assert each.weights is None and min(_numbers(each)) >= 8
