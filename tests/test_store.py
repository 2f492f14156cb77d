"""Copies of checkpoints in a store: whole or none, and a run resumes from them elsewhere."""

import dataclasses
import functools
import logging
import pathlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from services import actor, address_of, learner, stop, wait_for, wait_for_row

from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.logdir import checkpoint, store
from impala.logdir.checkpoint import Checkpoint, Counters
from impala.logdir.directory import LogDirectory, StorageError
from impala.logdir.store import Copier, Store
from impala.runtime.backoff import Backoff

fsspec = pytest.importorskip("fsspec")
memory = pytest.importorskip("fsspec.implementations.memory")

SECONDS = 20.0


class Scene:
    """A run's log directory and its store, in memory."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.logdir = directory / "run"
        self.logdir.mkdir()
        self.url = f"memory://{directory}"
        (self.logdir / "receipt.key").write_bytes(b"k" * 32)
        (self.logdir / "config.yaml").write_text("seed: 0\n")

    def config(self, url: str | None = None, **replaced: Any) -> Config:
        config = dataclasses.replace(PRESETS["catch"][1], **replaced)
        url = self.url if url is None else url
        return dataclasses.replace(
            config,
            learner=dataclasses.replace(config.learner, checkpoint_store=url, checkpoints_kept=2),
        )

    def save(
        self, updates: int, kind: checkpoint.Kind = "checkpoints", added: int = 7, keep: int = 2
    ) -> None:
        saved = Checkpoint(
            PRESETS["catch"][1],
            Counters(updates=updates),
            {"agent/000/w:0": np.full((2, 3), updates, np.float32)},
            accounts={},
            replay_added=added,
        )
        keeps = {"checkpoints": keep, "best": 1}
        checkpoint.save(self.logdir, saved, keeps.get(kind), kind)

    def damage(self, name: str) -> None:
        (self.logdir / "checkpoints" / name / "variables.npz").write_bytes(b"something else")

    def copy(self) -> None:
        with Copier(self.logdir, self.config()):
            pass

    def elsewhere(self, name: str = "elsewhere", **arguments: Any) -> pathlib.Path:
        """The log directory of the same run on another host, after it was restored."""
        logdir = self.logdir.with_name(name)
        with LogDirectory(logdir) as directory:
            store.restore(directory, **{"config": self.config(), **arguments})
        return logdir


@pytest.fixture
def scene(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(store, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(store, "_BACKOFF", Backoff(0.01, 300.0))
    monkeypatch.setattr(store, "_CLOSE_SECONDS", SECONDS)
    return Scene(tmp_path)


class Faulty(memory.MemoryFileSystem):  # type: ignore[name-defined]
    """Fails, or hangs, when it is told to."""

    protocol = "faulty"
    cachable = False
    writes_left = 10**9
    listable = True
    gate = threading.Event()

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        Faulty.gate.wait()
        if Faulty.writes_left <= 0:
            super().pipe_file(path, value[: len(value) // 2], **options)  # torn
            raise OSError("the store is away")
        Faulty.writes_left -= 1
        super().pipe_file(path, value, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if not Faulty.listable:
            raise OSError("the store is away")
        return super().ls(path, detail=detail, **options)


@pytest.fixture
def faulty(scene: Scene) -> Iterator[Scene]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.writes_left, Faulty.listable = 10**9, True
    Faulty.gate.set()
    scene.url = scene.url.replace("memory://", "faulty://")
    yield scene
    Faulty.gate.set()


@pytest.mark.parametrize("scheme", ["memory://", "file://", ""])
def test_a_run_resumes_from_the_store_in_an_empty_log_directory(scene: Scene, scheme: str) -> None:
    scene.url = scene.url.replace("memory://", scheme) + "/a/b"
    for updates in (10, 20, 30):
        scene.save(updates)
    scene.save(25, "best")
    (scene.logdir / "best" / "score.json").write_text("{}")
    scene.save(15, "milestones")
    (scene.logdir / "incarnations.json").write_text("[[5, 1000]]")
    scene.copy()
    there = Store(scene.url)
    assert there.saved("checkpoints") == ["000000000020-000002", "000000000030-000003"]
    assert there.saved("milestones") == ["000000000015-000001"]

    logdir = scene.elsewhere()
    restored, own = checkpoint.load(logdir), checkpoint.load(scene.logdir)
    assert restored.counters == own.counters == Counters(updates=30)
    np.testing.assert_array_equal(
        restored.variables["agent/000/w:0"], own.variables["agent/000/w:0"]
    )
    assert (own.replay_added, restored.replay_added) == (7, 0)  # replay stays where it was
    assert checkpoint.choose(logdir, "best").counters.updates == 25
    for name in ("receipt.key", "incarnations.json", "config.yaml", "best/score.json"):
        assert (logdir / name).read_bytes() == (scene.logdir / name).read_bytes()
    assert (logdir / "receipt.key").stat().st_mode & 0o777 == 0o600
    assert not (logdir / ".restoring").exists()
    assert [path.name for path in checkpoint.of_kind(logdir, "checkpoints")] == [
        "000000000030-000003"  # the same name: the next one is newer than all in the store
    ]


def test_the_store_keeps_as_many_as_the_log_directory(scene: Scene) -> None:
    """Given a run that saves while it is copied, on one host and then on another."""
    there = Store(scene.url)

    def is_best(name: str) -> bool:
        return there.saved("best") == [name]

    with Copier(scene.logdir, scene.config()) as copier:
        for updates in (10, 20, 30):
            scene.save(updates)
            scene.save(updates, "milestones")
            scene.save(updates, "best")
            name = checkpoint.of_kind(scene.logdir, "best")[-1].name
            wait_for("the copy", functools.partial(is_best, name))
        wait_for("all copies", lambda: copier.behind_seconds == 0.0)
    scene.logdir = scene.elsewhere()
    scene.save(40)
    scene.copy()
    assert there.saved("checkpoints") == ["000000000030-000003", "000000000040-000004"]
    assert there.folders("checkpoints") == there.saved("checkpoints")
    assert len(there.saved("milestones")) == 3
    assert there.saved("best") == ["000000000030-000003"]


def test_incomplete_checkpoints_are_left_out_and_named_once(
    faulty: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.save(10)
    (incomplete,) = checkpoint.of_kind(faulty.logdir, "checkpoints")
    (incomplete / checkpoint.FILES[-1]).unlink()
    with Copier(faulty.logdir, faulty.config()) as copier:
        wait_for("the pass", lambda: copier.behind_seconds == 0.0)
        faulty.save(20)
        wait_for("the copy", lambda: Store(faulty.url).saved("checkpoints"))
    assert Store(faulty.url).saved("checkpoints") == ["000000000020-000002"]
    assert sum("is not copied" in text for text in caplog.messages) == 1


def test_an_interrupted_copy_is_no_checkpoint(faulty: Scene) -> None:
    faulty.save(10)
    faulty.copy()
    faulty.save(20)
    for writes in range(3):
        Faulty.writes_left = writes  # of the second checkpoint's three files; a torn one follows
        copier = Copier(faulty.logdir, faulty.config())
        wait_for("the failure", functools.partial(getattr, copier, "failures"))
        copier._closing.set()
        copier._deadline = 0.0
        copier._thread.join(SECONDS)
        assert not copier._thread.is_alive()
        there = Store(faulty.url)
        assert there.folders("checkpoints")[-1] == "000000000020-000002"
        restored = checkpoint.load(faulty.elsewhere(f"after-{writes}"))
        assert restored.counters.updates == 10, writes
    Faulty.writes_left = 10**9
    faulty.copy()
    assert checkpoint.load(faulty.elsewhere()).counters.updates == 20


def test_damage_in_the_store_is_found_by_its_digest(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.save(10)
    scene.save(20)
    scene.copy()
    there = Store(scene.url)
    file = "checkpoints/000000000020-000002/variables.npz"
    content = bytearray(there.read(file) or b"")
    content[len(content) // 2] ^= 1
    there.write(file, bytes(content))
    assert checkpoint.load(scene.elsewhere()).counters.updates == 10
    assert "000000000020-000002" in caplog.text and "differ from its MANIFEST" in caplog.text
    there.write("checkpoints/000000000010-000001/state.json", b"{}")
    with pytest.raises(StorageError, match=r"All checkpoints in .* are damaged"):
        scene.elsewhere("nothing")


def test_damage_in_the_log_directory_is_mended_from_the_store(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """Given the newest one damaged, then all, then those of the store as well."""
    for updates in (10, 20):
        scene.save(updates)
    scene.copy()
    scene.save(30)  # not copied
    (scene.logdir / "replay").mkdir()
    names = ["000000000020-000002", "000000000030-000003"]
    assert [path.name for path in checkpoint.of_kind(scene.logdir, "checkpoints")] == names
    for name in names:
        scene.damage(name)
    restored = checkpoint.load(scene.elsewhere("run"))
    assert (restored.counters.updates, restored.replay_added) == (20, 7)
    assert (scene.logdir / "replay").exists()  # it is as far as that checkpoint
    assert "000000000030-000003 is damaged" in caplog.text

    shutil.rmtree(scene.logdir / "checkpoints" / names[0])
    restored = checkpoint.load(scene.elsewhere("run"))
    assert (restored.counters.updates, restored.replay_added) == (20, 0)
    assert not (scene.logdir / "replay").exists()

    scene.damage(names[0])
    for name in Store(scene.url).saved("checkpoints"):
        Store(scene.url).write(f"checkpoints/{name}/state.json", b"{}")
    with pytest.raises(StorageError, match=r"are damaged, and .* has no intact one. .*--fresh"):
        scene.elsewhere("run")


def test_a_store_that_fails_is_counted_and_tried_again(
    faulty: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Faulty.writes_left = 0
    with Copier(faulty.logdir, faulty.config()) as copier:
        faulty.save(10)
        wait_for("failures", lambda: copier.failures >= 3)
        assert copier.behind_seconds > 0.0
        Faulty.writes_left = 10**9
        wait_for("the copy", lambda: copier.behind_seconds == 0.0)
    assert Store(faulty.url).saved("checkpoints") == ["000000000010-000001"]
    assert caplog.text.count("does not take copies (OSError: the store is away)") == 1
    assert "takes copies again" in caplog.text and "Not copied" not in caplog.text


def test_the_end_of_a_run_waits_briefly_for_a_hanging_store(
    faulty: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_CLOSE_SECONDS", 0.2)
    Faulty.gate.clear()
    copier = Copier(faulty.logdir, faulty.config())
    faulty.save(10)
    wait_for("something to copy", lambda: copier.behind_seconds > 0.0)
    began = time.monotonic()
    copier.close()
    assert time.monotonic() - began < SECONDS
    assert "Not copied to faulty://" in caplog.text
    assert "checkpoints/000000000010-000001" in caplog.text
    Faulty.gate.set()
    copier._thread.join(SECONDS)


def test_an_absent_store_is_refused_without_a_checkpoint(
    faulty: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.save(10)
    faulty.copy()
    Faulty.listable = False
    refused = r"has no intact checkpoint, and .* cannot be read .*is away"
    with pytest.raises(StorageError, match=refused):
        faulty.elsewhere()
    assert checkpoint.load(faulty.elsewhere("run")).counters.updates == 10
    assert "Going on with" in caplog.text
    faulty.damage("000000000010-000001")
    with pytest.raises(StorageError, match=refused):
        faulty.elsewhere("run")


def test_a_store_of_another_run_or_experiment_is_refused(scene: Scene) -> None:
    scene.save(10)
    scene.copy()
    with pytest.raises(StorageError, match=r"--fresh: .* Give the new one another URL"):
        scene.elsewhere(fresh=True)
    with pytest.raises(StorageError, match=r"another experiment \(seed: 0 -> 3\)"):
        scene.elsewhere(config=scene.config(seed=3))
    elsewhere = scene.logdir.with_name("elsewhere")
    assert [path.name for path in elsewhere.iterdir()] == ["lock"]
    assert scene.elsewhere(config=scene.config(seed=3), change_settings=True)
    (scene.logdir / "receipt.key").write_bytes(b"o" * 32)
    with pytest.raises(StorageError, match="another run than"):
        scene.elsewhere("run")


def test_a_log_directory_without_a_key_takes_the_store_s(scene: Scene) -> None:
    scene.save(10)
    scene.copy()
    key = scene.logdir / "receipt.key"
    key.unlink()
    scene.elsewhere("run")
    assert key.read_bytes() == b"k" * 32 and key.stat().st_mode & 0o777 == 0o600


def test_a_store_that_cannot_be_one_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match=r"is the log directory itself"):
        scene.elsewhere("run", config=scene.config(f"file://{scene.logdir}"))
    with pytest.raises(StorageError, match=r"nowhere://a cannot be opened .*nowhere"):
        Store("nowhere://a")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(StorageError, match=r'pip install "impala-rl\[store\]"'):
        Store("memory://a")


@pytest.mark.slow
def test_a_learner_goes_on_where_its_log_directory_is_lost(tmp_path: pathlib.Path) -> None:
    logdir = tmp_path / "run"
    flags = ("--learner.checkpoint-store", f"file://{tmp_path / 'store'}")
    listen = f"unix:{tmp_path / 'socket'}"
    with learner(logdir, listen, *flags) as first, actor(logdir, listen):
        address_of(logdir)
        row = wait_for_row(
            logdir,
            "a copy",
            lambda row: (
                row["updates"] > 100 and row.get("checkpoint/store_behind_seconds", 1.0) == 0.0
            ),
        )
        assert row["checkpoint/store_failures"] == 0
        assert stop(first) == 0
        saved = checkpoint.load(logdir).counters
        shutil.rmtree(logdir)
        with learner(logdir, listen, *flags) as second:
            address_of(logdir)
            restored = checkpoint.load(logdir).counters
            assert restored.updates == saved.updates > 100
            wait_for_row(logdir, "more", lambda row: row["updates"] > saved.updates)
            assert stop(second) == 0
    assert "Restored" in logdir.with_suffix(".learner.log").read_text()
