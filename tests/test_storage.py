"""A replay on disk that is damaged: nothing loads wrong, no process ends of it, and it goes on."""

import pathlib
import random
import sqlite3
from collections.abc import Callable, Iterator

import messages
import pytest
import test_replay

from impala.logdir.directory import LogDirectory, StorageError
from learner.data.replay import Replay
from learner.data.storage import DamagedError, Disk, Record, State

COUNT = 40
ADDED = 1000  # that the checkpoint counts


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[LogDirectory]:
    """A log directory with a replay."""
    with LogDirectory(tmp_path / "run") as directory:
        replay = test_replay.make(Disk(directory.replay, "test"), capacity=COUNT)
        replay.add(test_replay.rows(0, COUNT), "honest")
        replay.commit()
        replay.close()
        yield directory


def refusing(directory: LogDirectory) -> Replay:
    return test_replay.make(Disk(directory.replay, "test"), capacity=COUNT)


def healing(directory: LogDirectory) -> Replay:
    store = Disk(
        directory.replay, "test", lambda: directory.move_replay_aside("damaged"), counted=ADDED
    )
    return test_replay.make(store, capacity=COUNT)


def edit(directory: LogDirectory, *statements: str) -> None:
    with sqlite3.connect(directory.replay / "replay.sqlite") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def cut(directory: LogDirectory, size: int) -> None:
    path = directory.replay / "replay.sqlite"
    path.write_bytes(path.read_bytes()[:size])


def aside(directory: LogDirectory) -> list[pathlib.Path]:
    return sorted(directory.path.glob("replay.damaged-*"))


AT_START: dict[str, Callable[[LogDirectory], object]] = {
    "an empty file": lambda d: cut(d, 0),
    "half a file": lambda d: cut(d, 40_000),
    "no replay": lambda d: (d.replay / "replay.sqlite").write_bytes(b"something else " * 1000),
    "a key that is none": lambda d: edit(d, "UPDATE heads SET key = x'00' WHERE number = 3"),
    "no frames": lambda d: edit(d, "UPDATE heads SET frames = 0 WHERE number = 3"),
    "another state": lambda d: edit(
        d, "UPDATE meta SET content = replace(content, '40', '41') WHERE name = 'state'"
    ),
    "no identity": lambda d: edit(d, "DELETE FROM meta WHERE name = 'identity'"),
    "no heads": lambda d: edit(d, "DROP TABLE heads"),
}


@pytest.mark.parametrize("damage", AT_START)
def test_damage_that_is_found_at_the_start(
    directory: LogDirectory, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    AT_START[damage](directory)
    with pytest.raises(DamagedError, match=r"damaged.*--empty-replay") as error:
        refusing(directory)
    assert "\n" not in str(error.value)
    assert not aside(directory)

    replay = healing(directory)
    assert len(replay) == 0 and not replay.is_full
    assert replay.contents().added >= COUNT  # so that it is not taken for one that was lost
    assert len(aside(directory)) == 1
    assert "is damaged" in caplog.text and "Going on with an empty one" in caplog.text
    replay.add(test_replay.rows(0, 3), "honest")
    replay.commit()
    replay.close()
    assert len(refusing(directory)) == 3


WHEN_DRAWN: dict[str, Callable[[LogDirectory], object]] = {
    "another's data": lambda d: edit(
        d, "UPDATE data SET content = (SELECT content FROM data WHERE number = 4) WHERE number = 3"
    ),
    "another actor": lambda d: edit(d, "UPDATE heads SET actor = 'h0nest' WHERE number = 3"),
    "no data": lambda d: edit(d, "DELETE FROM data WHERE number = 3"),
}


@pytest.mark.parametrize("damage", WHEN_DRAWN)
def test_damage_that_is_found_in_a_draw(directory: LogDirectory, damage: str) -> None:
    WHEN_DRAWN[damage](directory)
    replay = refusing(directory)
    with pytest.raises(DamagedError, match=r"unroll 3 .*--empty-replay"):
        test_replay.drawn(replay, COUNT)
    replay.close()

    replay = healing(directory)
    assert len(replay) == COUNT
    with pytest.raises(LookupError, match="damaged and is empty now"):
        test_replay.drawn(replay, COUNT)
    assert len(replay) == 0 and len(aside(directory)) == 1
    with pytest.raises(LookupError, match="add unrolls"):
        test_replay.drawn(replay, 1)
    replay.add(test_replay.rows(0, COUNT), "honest")
    test_replay.assert_whole(test_replay.drawn(replay, COUNT))
    assert messages.held(replay).tolist() == list(range(ADDED, ADDED + COUNT))
    replay.close()


def _sql(replay: Replay, statement: str) -> None:
    assert replay._disk is not None
    replay._disk._sql(statement)


@pytest.mark.parametrize("goes_on", [False, True])
def test_damage_that_is_found_in_a_commit(directory: LogDirectory, goes_on: bool) -> None:
    replay = healing(directory) if goes_on else refusing(directory)
    _sql(replay, "DROP TABLE heads")
    replay.add(test_replay.rows(COUNT, COUNT), "honest")  # evicts some of these
    if goes_on:
        assert replay.commit() == ADDED
        assert len(replay) == 0 and len(aside(directory)) == 1
    else:
        with pytest.raises(DamagedError, match="no such table"):
            replay.commit()
    replay.close()


def test_no_number_is_given_twice_for_damage(directory: LogDirectory) -> None:
    store = Disk(directory.replay, "test", lambda: directory.move_replay_aside("damaged"))
    replay = test_replay.make(store, capacity=COUNT)
    replay.add(test_replay.rows(COUNT, COUNT), "honest")
    added = replay.contents().added
    _sql(replay, "DROP TABLE heads")
    replay.commit()
    assert len(replay) == 0 and replay.add(test_replay.rows(0, 1), "honest") == added
    replay.close()


def test_no_flipped_bit_is_drawn(directory: LogDirectory) -> None:
    """In pages of every kind; what is not in use may change without anybody noticing."""
    path = directory.replay / "replay.sqlite"
    intact = path.read_bytes()
    rng = random.Random(0)
    outcomes = []
    for _ in range(60):
        content = bytearray(intact)
        page = rng.randrange(len(content) // 4096)
        at = 4096 * page + rng.choice([rng.randrange(4096), rng.randrange(64)])
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            replay = refusing(directory)
            numbers = messages.held(replay).tolist()
            batch = test_replay.drawn(replay, COUNT)
        except DamagedError:
            outcomes.append("refused")
            continue
        finally:
            path.with_name("replay.sqlite-journal").unlink(missing_ok=True)
        test_replay.assert_whole(batch)
        assert sorted(batch.parameter_version) == numbers == list(range(COUNT))
        outcomes.append("intact")
        replay.close()
    assert outcomes.count("refused") > 5


def test_a_full_disk_is_not_taken_for_damage(directory: LogDirectory) -> None:
    store = Disk(directory.replay, "test", lambda: pytest.fail("moved aside"))
    pages = store._sql("PRAGMA page_count").fetchone()[0]
    store._sql(f"PRAGMA max_page_count = {pages}").fetchall()
    added = {
        number: Record(0.5, 4, "honest", random.Random(number).randbytes(10_000))
        for number in range(COUNT, 2 * COUNT)
    }
    with pytest.raises(StorageError, match=r"full.*it goes on") as error:
        store.commit(State(2 * COUNT), added)
    assert not isinstance(error.value, DamagedError)
    store._sql("PRAGMA max_page_count = 1000000").fetchall()
    store.commit(State(2 * COUNT), added)  # nothing was lost
    store.close()
    assert [number for number, _ in Disk(directory.replay, "test").heads()] == list(
        range(2 * COUNT)
    )


def test_one_process_at_a_time(directory: LogDirectory) -> None:
    replay = refusing(directory)
    replay.commit()
    with pytest.raises(StorageError, match="locked"):
        healing(directory)
    assert not aside(directory)
    replay.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_disk_that_is_full_while_damage_is_replaced_loses_no_count(
    directory: LogDirectory, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Or a kill between the two steps: the next start finds no fewer unrolls than were added."""
    edit(directory, "DELETE FROM data WHERE number = 3")
    replay = healing(directory)
    with monkeypatch.context() as full:
        if when == "before":
            full.setattr(Disk, "_put_meta", _raises(sqlite3.OperationalError("disk is full")))
        else:
            full.setattr(Disk, "_open", _raises(StorageError("killed")))
        with pytest.raises(StorageError):
            test_replay.drawn(replay, COUNT)
    replay.close()
    assert len(aside(directory)) == (when == "after")

    replay = healing(directory)
    assert replay.contents().added >= (ADDED if when == "after" else COUNT)
    replay.close()


def _raises(error: Exception) -> Callable[..., None]:
    def fails(*given: object) -> None:
        raise error

    return fails
