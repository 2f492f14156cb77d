"""Copies of a run's checkpoints at any path that fsspec opens, such as s3://BUCKET/RUN.

The log directory stays local. While a learner runs, a thread copies what is kept there to the same
names below the path: checkpoints, the best agent, milestones, and the small files with which a run
goes on. A learner whose log directory has no intact checkpoint, or an older one than the store,
resumes from there. A checkpoint's MANIFEST is copied last and deleted first, so what lacks it is
none; the digests in it are verified when it is restored.
"""

import contextlib
import importlib
import logging
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from impala.config.schema import Config
from impala.logdir import atomic, checkpoint, identity
from impala.logdir.checkpoint import CheckpointError, Kind
from impala.logdir.directory import RECEIPT_KEY, LogDirectory, StorageError
from impala.runtime.backoff import Backoff

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SMALL_FILES = (RECEIPT_KEY, "incarnations.json", "config.yaml", "best/score.json")
_STAGING = ".restoring"  # folder of LOGDIR; nobody reads it
_LIST_SECONDS, _RESTORE_SECONDS = 60.0, 900.0  # longest waits when a learner starts
_CLOSE_SECONDS = 30.0  # longest wait when it ends; `impala train` kills it after a minute
_LOOK_SECONDS = 1.0  # between looks at the log directory
_BACKOFF = Backoff(2.0, 300.0)  # between failures


class Store:
    """A folder of any file system of fsspec: files by their path in a log directory."""

    def __init__(self, url: str) -> None:
        """Opens nothing yet.

        Args:
          url: of the folder, which need not exist, or a local path.

        Raises:
          StorageError: fsspec, or what it needs for this kind of URL, is not installed; or there is
            no such kind.
        """
        self.url = url
        try:
            fsspec = importlib.import_module("fsspec.core")
        except ModuleNotFoundError as error:
            raise StorageError(
                "learner.checkpoint_store needs a package that is not installed: "
                f'pip install "impala-rl[store]" ({error})'
            ) from error
        try:
            self._fs, self._root = fsspec.url_to_fs(url)
        except Exception as error:  # each file system has errors of its own
            raise StorageError(
                f"learner.checkpoint_store {url} cannot be opened ({error}). Give a path, or a URL "
                "that fsspec knows, such as s3://BUCKET/RUN."
            ) from error

    def is_at(self, directory: pathlib.Path) -> bool:
        """Returns whether the folder is this local directory."""
        protocols = self._fs.protocol
        is_local = "file" in ([protocols] if isinstance(protocols, str) else protocols)
        return is_local and pathlib.Path(self._root).resolve() == directory.resolve()

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if there is none."""
        try:
            content: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, not necessarily in one step."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, content)

    def folders(self, kind: Kind) -> list[str]:
        """Returns the names of checkpoints in the order of their saves, also of parts of them."""
        self._fs.invalidate_cache()
        try:
            there = self._fs.ls(self._path(kind), detail=False)
        except FileNotFoundError:
            return []
        return checkpoint.in_order(path.rstrip("/").rpartition("/")[2] for path in there)

    def saved(self, kind: Kind) -> list[str]:
        """Returns the names of checkpoints that were copied whole, in the order of their saves."""
        manifests = {
            name: self.read(f"{kind}/{name}/{checkpoint.FILES[-1]}") for name in self.folders(kind)
        }
        return [name for name, text in manifests.items() if text and checkpoint.is_whole(text)]

    def delete(self, kind: Kind, name: str) -> None:
        """Deletes a checkpoint or a part of one, which is none from the first step on."""
        folder = self._path(f"{kind}/{name}")
        for path, recursive in ((f"{folder}/{checkpoint.FILES[-1]}", False), (folder, True)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(path, recursive=recursive)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def restore(
    directory: LogDirectory, config: Config, fresh: bool = False, change_settings: bool = False
) -> None:
    """Copies the newest intact checkpoint of the store to the log directory, if it is newer.

    Replay is not in the store: the run goes on with an empty one. It keeps
    its replay if it only gets back a checkpoint that was damaged.

    Args:
      directory: of the run, which may be empty.
      config: of the run; names the store, or none.
      fresh: whether the run is to start over, which a store with another one does not allow.
      change_settings: whether it may go on as another experiment.

    Raises:
      StorageError: the log directory has no intact checkpoint and the store cannot be read or has
        only damaged ones; the store has another run's or another experiment's; or it is LOGDIR.
      CheckpointError: its newest intact one needs another version of impala.
    """
    if not config.learner.checkpoint_store:
        return
    shutil.rmtree(directory.path / _STAGING, ignore_errors=True)
    store = Store(config.learner.checkpoint_store)
    if store.is_at(directory.path):
        raise StorageError(
            f"learner.checkpoint_store {store.url} is the log directory itself. Give another path."
        )
    own = _newest_intact(directory.path)
    try:
        stored, key = _within(
            _LIST_SECONDS, lambda: (store.saved("checkpoints"), store.read(RECEIPT_KEY))
        )
        if not stored:
            return
        _check_run(store, directory.path, key, fresh=fresh)
        names = stored
        if own is not None:
            names = checkpoint.in_order([*stored, own.name])
            names = names[names.index(own.name) + 1 :]
        if names:
            _within(_RESTORE_SECONDS, lambda: _fetch(store, directory.path, names))
    except (CheckpointError, StorageError):
        raise
    except Exception as error:  # each file system has errors of its own
        if own is None:
            raise StorageError(
                f"{directory.path} has no intact checkpoint, and learner.checkpoint_store "
                f"{store.url} cannot be read ({_shown(error)}). Start the learner again when it "
                "can be, or with --fresh and without that setting to begin a new run."
            ) from error
        _log.warning("%s cannot be read (%s). Going on with %s.", store.url, _shown(error), own)
        return
    if names:
        _take_over(store, directory, config, change_settings, may_be_older=own is not None)


def _newest_intact(logdir: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest intact checkpoint of a log directory."""
    for path in reversed(checkpoint.of_kind(logdir, "checkpoints")):
        try:
            checkpoint.contents_of(path)
            return path
        except (OSError, ValueError) as error:
            _log.warning("%s is damaged (%s).", path, _shown(error))
    return None


def _check_run(store: Store, logdir: pathlib.Path, key: bytes | None, fresh: bool) -> None:
    if fresh:
        raise StorageError(
            f"--fresh: learner.checkpoint_store {store.url} has the checkpoints of the run before. "
            "Give the new one another URL, or delete them."
        )
    if not checkpoint.exists(logdir):
        return
    path = logdir / RECEIPT_KEY
    own = path.read_bytes() if path.exists() else None
    if own is not None and key is not None and own != key:
        raise StorageError(
            f"learner.checkpoint_store {store.url} has the checkpoints of another run than "
            f"{logdir}. Give each run a URL of its own."
        )
    if own is None and key is not None:
        atomic.write(path, key, mode=0o600)


def _fetch(store: Store, logdir: pathlib.Path, names: list[str]) -> None:
    """Copies the newest intact one of these checkpoints, and what belongs to it, to _STAGING."""
    staging = logdir / _STAGING

    def copy(name: str) -> None:
        if (content := store.read(name)) is not None:
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            atomic.write(staging / name, content, mode=0o600 if name == RECEIPT_KEY else 0o666)

    for name in reversed(names):
        for file in checkpoint.FILES:
            copy(f"checkpoints/{name}/{file}")
        try:
            checkpoint.read(staging / "checkpoints" / name)
        except checkpoint.IncompatibleCheckpoint:
            raise
        except Exception as error:  # of any kind
            _log.warning("%s is damaged in %s (%s).", name, store.url, _shown(error))
            shutil.rmtree(staging / "checkpoints" / name, ignore_errors=True)
            continue
        break
    for name in store.saved("best")[-1:]:
        for file in checkpoint.FILES:
            copy(f"best/{name}/{file}")
    for name in _SMALL_FILES:
        copy(name)


def _take_over(
    store: Store,
    directory: LogDirectory,
    config: Config,
    change_settings: bool,
    may_be_older: bool,
) -> None:
    """Moves what was fetched to its place, the checkpoint last."""
    logdir, staging = directory.path, directory.path / _STAGING
    fetched = checkpoint.of_kind(staging, "checkpoints")
    if not fetched:
        shutil.rmtree(staging, ignore_errors=True)
        if may_be_older:
            return  # each was named in a warning
        raise StorageError(
            f"All checkpoints in {store.url} are damaged, and {logdir} has no intact one. Start "
            "with --fresh and without learner.checkpoint_store, or with another one, to begin a "
            "new run."
        )
    if not change_settings and (found := identity.differences(staging, config)):
        shutil.rmtree(staging, ignore_errors=True)
        raise StorageError(
            f"learner.checkpoint_store {store.url} holds another experiment ({'; '.join(found)}). "
            "Give this one another URL, or go on with the changed settings with "
            "--change-settings."
        )
    damaged = logdir / "checkpoints" / fetched[-1].name
    if damaged.exists():  # the rest of LOGDIR fits it
        checkpoint.delete(damaged)
    else:
        directory.move_replay_aside()
        checkpoint.forget_replay(fetched[-1])
        for name in _SMALL_FILES:
            if (staging / name).exists():
                (logdir / name).parent.mkdir(exist_ok=True)
                (staging / name).replace(logdir / name)
        if best := checkpoint.of_kind(staging, "best"):
            for old in checkpoint.of_kind(logdir, "best"):
                checkpoint.delete(old)
            checkpoint.adopt(best[-1], logdir, "best")
    checkpoint.adopt(fetched[-1], logdir, "checkpoints")  # only now there is a run to resume
    shutil.rmtree(staging, ignore_errors=True)
    _log.info("Restored %s of %s to %s.", fetched[-1].name, store.url, logdir)


class Copier:
    """Keeps a store like a log directory, in a thread, until it is closed.

    Nothing that the store does reaches training: what fails is logged, counted and tried again.
    """

    def __init__(self, logdir: pathlib.Path, config: Config) -> None:
        """Starts copying.

        Args:
          logdir: of the run.
          config: names the store, and how many checkpoints it keeps.

        Raises:
          StorageError: as `Store`.
        """
        self.failures = 0
        """Attempts that have failed."""
        self._store = Store(config.learner.checkpoint_store)
        self._logdir = logdir
        self._kept: tuple[tuple[Kind, int | None], ...] = (
            *(("checkpoints", config.learner.checkpoints_kept), ("best", 1), ("milestones", None)),
        )
        self._small: dict[str, bytes | None] = {}  # as they are in the store
        self._there: dict[Kind, list[str]] = {}  # in the store, in order; filled at the first pass
        self._damaged: set[pathlib.Path] = set()
        self._behind_since: float | None = time.monotonic()
        self._closing = threading.Event()
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    @property
    def behind_seconds(self) -> float:
        """Returns for how long something has waited to be copied; 0: everything is there."""
        since = self._behind_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Waits until all is copied, at most half a minute; what was not is logged."""
        self._deadline = time.monotonic() + _CLOSE_SECONDS
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)
        try:
            missing = [f"{path.parent.name}/{path.name}" for _, path in self._missing()]
        except CheckpointError as error:
            missing = [str(error)]
        if missing or self._thread.is_alive():
            _log.error(
                "Not copied to %s: %s. They are in %s, from where the next start on this host "
                "copies them.",
                *(self._store.url, ", ".join(missing) or "all of the small files", self._logdir),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        pause, failures = _LOOK_SECONDS, 0  # in a row
        while True:
            is_closing = self._closing.is_set()
            try:
                self._copy_all()
                if failures:
                    _log.info("%s takes copies again.", self._store.url)
                pause, failures = _LOOK_SECONDS, 0
            except Exception as error:  # each file system has errors of its own
                self.failures += 1
                if self._behind_since is None:
                    self._behind_since = time.monotonic()
                if not failures:
                    _log.warning(
                        "%s does not take copies (%s). Training goes on, and it is tried again.",
                        *(self._store.url, _shown(error)),
                    )
                failures += 1
                pause = _BACKOFF.pause(1 if is_closing else failures)
            if is_closing and (not failures or time.monotonic() + pause > self._deadline):
                return
            if is_closing:
                time.sleep(pause)
            else:
                self._closing.wait(pause)

    def _copy_all(self) -> None:
        if not self._there:
            self._begin()
        while missing := self._missing():
            if self._behind_since is None:
                self._behind_since = time.monotonic()
            self._copy_small_files()  # first: those that a resumed run needs
            self._copy(*missing[0])  # then look again: a newer one may have been saved meanwhile
        self._copy_small_files()
        self._behind_since = None
        for kind, keep in self._kept:
            for old in self._superfluous(kind, keep) if keep is not None else ():
                self._store.delete(kind, old)
                self._there[kind].remove(old)

    def _begin(self) -> None:
        """Lists what is there, and deletes what a learner that was killed has copied in part."""
        there = {kind: self._store.saved(kind) for kind, _ in self._kept}
        for kind, names in there.items():
            for name in self._store.folders(kind):
                if name not in names:
                    self._store.delete(kind, name)
        self._small = {name: self._store.read(name) for name in _SMALL_FILES}
        self._there = there

    def _missing(self) -> list[tuple[Kind, pathlib.Path]]:
        """Returns what is not in the store, the newest of the most important first."""
        return [
            (kind, path)
            for kind, keep in self._kept
            for path in reversed(checkpoint.of_kind(self._logdir, kind)[-keep if keep else None :])
            if path.name not in self._there.get(kind, ()) and path not in self._damaged
        ]

    def _superfluous(self, kind: Kind, keep: int) -> list[str]:
        """Returns what the store need not keep: what is older, or newer, than the log directory's.

        Newer ones are of an earlier run, or of a state that this one did not go on from.
        """
        there, own = self._there[kind], checkpoint.of_kind(self._logdir, kind)
        newest = own[-1].name if own else None
        end = there.index(newest) + 1 if newest in there else len(there)
        return [*there[: max(0, end - keep)], *there[end:]]

    def _copy(self, kind: Kind, path: pathlib.Path) -> None:
        try:
            contents = checkpoint.contents_of(path)
        except (FileNotFoundError, ValueError) as error:
            if path.is_dir():  # else it was deleted meanwhile, as a newer one was saved
                self._damaged.add(path)
                _log.warning("%s is not copied (%s).", path, _shown(error))
            return
        for file, content in contents.items():
            self._store.write(f"{kind}/{path.name}/{file}", content)
        self._there[kind] = checkpoint.in_order([*self._there[kind], path.name])

    def _copy_small_files(self) -> None:
        for name in _SMALL_FILES:
            try:
                content = (self._logdir / name).read_bytes()
            except FileNotFoundError:
                continue
            if self._small.get(name) != content:
                self._store.write(name, content)
                self._small[name] = content


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Returns what a function does, whose file system may hang.

    Raises:
      TimeoutError: it has not ended.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _shown(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
