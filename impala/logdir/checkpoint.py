"""Checkpoints: the complete state of a learner, written atomically.

A checkpoint is a directory `LOGDIR/checkpoints/<updates>-<serial>` with `variables.npz` (arrays by
name), `state.json` (counters, accounts of the actors, the configuration, the spaces that the agent
was made for) and `MANIFEST`, with a SHA-256 of each of them. It is written under
another name, flushed to the disk and renamed, so a reader sees all of it or nothing, and a crash
while writing leaves the previous one. The serial number counts saves: it identifies the newest
checkpoint, also after a rollback to an earlier one, and distinguishes two of the same update.

`LOGDIR/best`, `LOGDIR/milestones` and `LOGDIR/snapshots` have checkpoints of the agent alone, in
the same form, from which a run cannot resume. Snapshots wait there to be evaluated.

`state.json` has the version of its schema. Versions of impala with the same major version open each
other's checkpoints, but for those with an unknown setting that changes what is played or learned:
`needs` lists all settings that do.
"""

import hashlib
import io
import json
import logging
import os
import pathlib
import re
import shutil
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from impala import finite
from impala.config import values
from impala.config.schema import Config
from impala.environments import spaces
from impala.environments.spaces import Spaces
from impala.logdir import atomic
from impala.logdir.directory import StorageError
from impala.runtime.installation import VERSION

Kind = Literal["checkpoints", "milestones", "best", "snapshots"]

_log = logging.getLogger(__name__)

SCHEMA = 1, 0
"""Major and minor version of the schema that is written."""

_FILES = ("state.json", "variables.npz")
_MANIFEST = "MANIFEST"  # vouches for the files

_ROOTS: tuple[Kind, ...] = get_args(Kind)
_LEFTOVER = ".partial-"  # prefix of what is being written or deleted; readers ignore it
_NAME = re.compile(r"([0-9]+)-([0-9]+)")  # updates and serial


class CheckpointError(ValueError):
    """A checkpoint is missing, or does not fit the run."""


class IncompatibleCheckpoint(CheckpointError):
    """A checkpoint is intact, but needs another version of impala."""


class Counters(NamedTuple):
    """The counters of a run. Replayed rows and seams are not counted."""

    updates: int = 0  # learner steps; also the version of the parameters
    unrolls: int = 0  # fresh unrolls learned from
    steps: int = 0  # agent decisions in them
    frames: int = 0  # environment frames in them
    seconds: float = 0.0  # spent training, over all restarts
    episodes: int = 0  # that ended in fresh unrolls


class Checkpoint(NamedTuple):
    """The contents of a checkpoint."""

    config: Config
    counters: Counters
    variables: Mapping[str, np.ndarray]  # "agent/...", "algorithm/...", "optimiser/..."
    accounts: Mapping[str, Any]  # learner.fleet.accounts.Accounts.state()
    replay_added: int = 0  # unrolls ever added to replay, which is stored beside the checkpoints
    algorithm: str = "impala"  # that these variables and optimiser belong to
    spaces: Spaces | None = None  # that the agent was made for; None: nobody will play it
    # Settings of custom parts, nested: reading a checkpoint imports none of them, so `config`
    # has them only when it is written; `impala.parts.sections.restore` joins the two.
    own: Mapping[str, Any] = types.MappingProxyType({})
    needs: frozenset[str] = frozenset()  # paths of those that a reader has to know
    incarnation: int = 0  # of the learner that made it; only in snapshots

    @property
    def agent_values(self) -> list[np.ndarray]:
        """Returns the agent's variables in order, as `Parameters.values`."""
        return [value for name, value in self.variables.items() if name.startswith("agent/")]


def save(
    directory: pathlib.Path,
    checkpoint: Checkpoint,
    keep: int | None,
    kind: Kind = "checkpoints",
) -> pathlib.Path:
    """Writes a checkpoint into LOGDIR and deletes all of its kind but the newest `keep`.

    Earlier checkpoints exist until this one is complete, even after a crash.

    Args:
      directory: LOGDIR.
      checkpoint: the contents; `counters.updates` is part of its name.
      keep: how many to keep, including this one; None: all.
      kind: the folder to write to. A run resumes from `checkpoints`.

    Returns:
      The directory of the new checkpoint.

    Raises:
      StorageError: it cannot be written, for instance because the disk is full.
      NotFiniteError: a variable holds NaN or infinity.
    """
    finite.check(checkpoint.variables, "No checkpoint is written")
    root = directory / kind
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        final = _new_path(directory, kind, checkpoint.counters.updates)
        partial = root / f"{_LEFTOVER}{final.name}"
        partial.mkdir()
        try:
            for name, content in _contents(checkpoint).items():
                atomic.write(partial / name, content)
            atomic.flush_directory(partial)
            os.rename(partial, final)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)  # on a full disk, space is freed
            raise
        atomic.flush_directory(root)
        atomic.flush_directory(directory)
    except OSError as error:
        raise StorageError(
            f"No checkpoint can be written to {root} ({error.strerror or error}). The ones there "
            "are intact. Free space on its disk and start the learner again: it goes on from the "
            "newest."
        ) from error
    for old in of_kind(directory, kind)[:-keep] if keep is not None else ():
        delete(old)
    return final


def make_best(path: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Moves a checkpoint to LOGDIR/best, and deletes the one there.

    Returns:
      Its new path.

    Raises:
      StorageError: it cannot be moved.
    """
    final = _new_path(directory, "best", _order(path)[1])
    try:
        final.parent.mkdir(exist_ok=True)
        os.rename(path, final)
        atomic.flush_directory(final.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be moved to {final} ({error.strerror}).") from error
    for old in of_kind(directory, "best")[:-1]:
        delete(old)
    return final


def of_kind(directory: pathlib.Path, kind: Kind) -> list[pathlib.Path]:
    """Returns the checkpoints in a folder of LOGDIR, in the order in which they were saved.

    Raises:
      CheckpointError: they cannot be listed.
    """
    root = directory / kind
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read ({error.strerror}).") from error
    return sorted((root / name for name in names if _NAME.fullmatch(name)), key=_order)


def delete(path: pathlib.Path) -> None:
    """Deletes a checkpoint, which is invisible once its first file is removed."""
    partial = path.with_name(f"{_LEFTOVER}{path.name}")
    try:
        os.rename(path, partial)
        shutil.rmtree(partial)
    except OSError as error:
        _log.warning("%s cannot be deleted (%s).", path, error.strerror)


def delete_later(directory: pathlib.Path, kind: Kind, updates: int) -> None:
    """Deletes the checkpoints in a folder of LOGDIR that count more updates."""
    for path in of_kind(directory, kind):
        if _order(path)[1] > updates:
            delete(path)


def remove_leftovers(directory: pathlib.Path) -> None:
    """Removes partial files of a crash from LOGDIR. Only for the directory's single writer."""
    for root in _ROOTS:
        for path in (directory / root).glob(f"{_LEFTOVER}*"):
            shutil.rmtree(path, ignore_errors=True)


def load(
    directory: pathlib.Path,
    is_fit: Callable[[Checkpoint], bool] = lambda _: True,
    unfit: str = "its network's outputs are beyond limits",
) -> Checkpoint:
    """Reads the newest intact checkpoint of LOGDIR.

    Nothing is parsed before its digest is verified. Damaged ones are skipped, with one log message.

    Args:
      directory: LOGDIR, or the path of a checkpoint, which is then the only one.
      is_fit: whether to accept an intact checkpoint; otherwise it is skipped too.
      unfit: why, for the log.

    Raises:
      CheckpointError: there is none, or the newest intact one needs another version of impala.
    """
    root = directory / "checkpoints"

    def find() -> list[pathlib.Path]:
        return [directory] if _is_one(directory) else of_kind(directory, "checkpoints")[::-1]

    loaded, damaged = _first_intact(find, is_fit, unfit)
    if loaded is not None:
        if damaged:
            _log.warning(
                "Damaged in %s: %s. Going back to update %d.",
                *(root, "; ".join(damaged), loaded.counters.updates),
            )
        return loaded
    if damaged and _is_one(directory):
        raise CheckpointError(f"The checkpoint is of no use: {damaged[0]}.")
    if damaged:
        raise CheckpointError(
            f"No checkpoint in {root} is of use: {'; '.join(damaged)}. Start over with --fresh."
        )
    raise CheckpointError(
        f"{directory.absolute()} has no checkpoint. Give the log directory of a run that has "
        "written one (the first is written within 30 s of the first update, or when the run is "
        "stopped)."
    )


def _first_intact(
    find: Callable[[], list[pathlib.Path]],
    is_fit: Callable[[Checkpoint], bool] = lambda _: True,
    unfit: str = "",
) -> tuple[Checkpoint | None, list[str]]:
    """Returns the first intact checkpoint that fits, and what is wrong with those before it."""
    damaged, paths = [], find()
    for path in paths:
        try:
            loaded = read(path)
        except IncompatibleCheckpoint:
            raise
        except Exception as error:  # of any kind
            damaged.append(f"{path.name} ({_in_one_line(error)})")
            continue
        if is_fit(loaded):
            return loaded, damaged
        damaged.append(f"{path.name} (intact, but {unfit})")
    if find() != paths:  # replaced while they were being read
        return _first_intact(find, is_fit, unfit)
    return None, damaged


def read(path: pathlib.Path) -> Checkpoint:
    """Reads one checkpoint. Nothing is parsed before its digest is verified.

    Raises:
      IncompatibleCheckpoint: it is intact, but needs another version of impala.
      Exception: of any kind: it is damaged.
    """
    contents = {name: (path / name).read_bytes() for name in _FILES}
    if (path / _MANIFEST).read_bytes() != _manifest(contents):
        raise ValueError(f"its files differ from its {_MANIFEST}")
    state = json.loads(contents["state.json"].decode())
    config = _config(path, state)
    own = {name: state["config"][name] for name in state["own"]}
    with np.load(io.BytesIO(contents["variables.npz"]), allow_pickle=False) as arrays:
        variables = {name: arrays[name] for name in arrays.files}
    return Checkpoint(
        config=config,
        counters=Counters(**state["counters"]),
        variables=variables,
        accounts=state["accounts"],
        replay_added=state["replay_added"],
        algorithm=state["algorithm"],
        spaces=_spaces(path, state),
        own=own,
        needs=frozenset(path for path in state["needs"] if path.partition(".")[0] in own),
        incarnation=state["incarnation"],
    )


def choose(directory: pathlib.Path, text: str = "newest") -> Checkpoint:
    """Reads the checkpoint of LOGDIR that the user has named.

    Args:
      directory: LOGDIR.
      text: newest; best; a number of updates; or a checkpoint's path.

    Raises:
      CheckpointError: there is none of that name (the message lists the existing ones), or it is
        damaged or needs another version of impala.
    """
    if text == "newest":
        return load(directory)
    loaded, damaged = _first_intact(lambda: _named(directory, text))
    if loaded is not None:
        return loaded
    why = f"damaged: {'; '.join(damaged)}" if damaged else "not there"
    raise CheckpointError(f"The checkpoint {text!r} of {directory} is {why}. {_what_is(directory)}")


def _named(directory: pathlib.Path, text: str) -> list[pathlib.Path]:
    """Returns the checkpoints that `choose` may read: best, a number of updates, or a path."""
    if text != "best" and not text.isdecimal():
        return [path for path in (pathlib.Path(text), directory / text) if _is_one(path)]
    if text == "best":
        return of_kind(directory, "best")[::-1]  # the older one may not have been deleted
    there = [path for root in _ROOTS for path in of_kind(directory, root)]
    return [path for path in there if _order(path)[1] == int(text)]


def exists(directory: pathlib.Path) -> bool:
    """Returns whether LOGDIR has any checkpoint, intact or not.

    Raises:
      CheckpointError: they cannot be listed.
    """
    return bool(of_kind(directory, "checkpoints"))


def _contents(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Returns the files of a checkpoint."""
    major, minor = SCHEMA
    state = {
        "schema": {"major": major, "minor": minor},
        "version": VERSION,
        "counters": checkpoint.counters._asdict(),
        "accounts": checkpoint.accounts,
        "replay_added": checkpoint.replay_added,
        "algorithm": checkpoint.algorithm,
        "config": values.to_dict(checkpoint.config),
        "own": [part.section for part in checkpoint.config.own if part.section],
        "needs": sorted(values.settings_that_matter(checkpoint.config)),
        "spaces": checkpoint.spaces and [spaces.to_dict(space) for space in checkpoint.spaces],
        "incarnation": checkpoint.incarnation,
    }
    arrays = io.BytesIO()
    np.savez(arrays, **checkpoint.variables)  # type: ignore[arg-type]
    contents = {"state.json": json.dumps(state).encode(), "variables.npz": arrays.getvalue()}
    return {**contents, _MANIFEST: _manifest(contents)}


def _manifest(contents: Mapping[str, bytes]) -> bytes:
    """Returns digests for `sha256sum --check`."""
    lines = [f"{hashlib.sha256(contents[name]).hexdigest()}  {name}\n" for name in _FILES]
    return "".join(lines).encode()


def _config(path: pathlib.Path, state: Mapping[str, Any]) -> Config:
    """Returns the settings of a checkpoint, without those of custom parts.

    Raises:
      IncompatibleCheckpoint: another version has written it, whose settings do not fit this one.
    """
    needs = [path for path in state["needs"] if path.partition(".")[0] not in state["own"]]
    try:
        if state["schema"]["major"] != SCHEMA[0]:
            raise values.OptionError("These are different major versions.")
        return values.from_stored(Config, state["config"], needs)
    except values.OptionError as error:
        raise _incompatible(path, state, error) from error


def _incompatible(path: pathlib.Path, state: Mapping[str, Any], why: object) -> CheckpointError:
    theirs = f"{state['schema']['major']}.{state['schema']['minor']}"
    return IncompatibleCheckpoint(
        f"{path} was written by impala {state['version']} with schema {theirs}, this is impala "
        f"{VERSION} with schema {SCHEMA[0]}.{SCHEMA[1]}. {why} Open it with impala "
        f"{state['version']}, or start over with --fresh."
    )


def _spaces(path: pathlib.Path, state: Mapping[str, Any]) -> Spaces | None:
    if state["spaces"] is None:
        return None
    try:
        observation, action = map(spaces.from_dict, state["spaces"])
    except ValueError as error:
        raise _incompatible(path, state, error) from error
    return observation, action


def _order(path: pathlib.Path) -> tuple[int, int]:
    """Returns serial number and updates: the newest checkpoint is the largest."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[2]), int(match[1])


def _is_one(path: pathlib.Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and (path / _FILES[0]).is_file()


def _new_path(directory: pathlib.Path, kind: Kind, updates: int) -> pathlib.Path:
    """Returns the path of a new checkpoint in a folder of LOGDIR."""
    serial = max((_order(path) for path in of_kind(directory, kind)), default=(0, 0))[0] + 1
    return directory / kind / f"{updates:012d}-{serial:06d}"


def _what_is(directory: pathlib.Path) -> str:
    """Lists the checkpoints of LOGDIR, for an error message."""
    updates = {root: [_order(path)[1] for path in of_kind(directory, root)] for root in _ROOTS}
    if not any(updates.values()):
        return f"{directory.absolute()} has no checkpoint."
    best = [f"best ({n} updates)" for n in updates["best"]]
    numbers = sorted({n for of_root in updates.values() for n in of_root})
    newest = [f"newest ({n} updates)" for n in updates["checkpoints"][-1:]]
    return f"There are: {', '.join([*newest, *best, *map(str, numbers)])}; or give a path."


def _in_one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{pathlib.Path(error.filename or '').name}: {error.strerror}"
    return " ".join(f"{type(error).__name__}: {error}".split())
