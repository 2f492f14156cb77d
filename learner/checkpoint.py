"""Checkpoints: everything a learner needs to go on where it was, written atomically.

A checkpoint is a directory `LOGDIR/checkpoints/<updates>` with `variables.npz` (arrays by name)
and `state.json` (counters, accounts of the actors, the configuration). It is written under
another name, flushed to the disk and renamed, so a reader sees all of it or nothing, and a crash
while writing leaves the one before.
"""

import json
import logging
import os
import pathlib
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from impala import options
from impala.configs import Config

T = TypeVar("T")

_log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint is missing, or does not fit the run."""


class Counters(NamedTuple):
    """How far a run is. Replayed rows and seams count nowhere."""

    updates: int = 0  # learner steps; also the version of the parameters
    unrolls: int = 0  # fresh unrolls learned from
    steps: int = 0  # agent decisions in them
    frames: int = 0  # environment frames in them
    seconds: float = 0.0  # spent training, over all restarts


class Checkpoint(NamedTuple):
    """What was read from or goes to the disk."""

    config: Config
    counters: Counters
    variables: Mapping[str, np.ndarray]  # "agent/...", "algorithm/...", "optimiser/..."
    accounts: Mapping[str, Any]  # learner.accounts.Accounts.state()
    replay_added: int = 0  # unrolls ever added to replay, which lies beside the checkpoints
    algorithm: str = "impala"  # whose variables and optimiser these are

    @property
    def agent_values(self) -> list[np.ndarray]:
        """The agent's variables in order, as `Parameters.values`."""
        return list(of_agent(self.variables).values())


def save(directory: pathlib.Path, checkpoint: Checkpoint, keep: int) -> pathlib.Path:
    """Writes a checkpoint into LOGDIR and deletes all but the newest `keep`.

    Args:
      directory: LOGDIR.
      checkpoint: what to write; `counters.updates` names it.
      keep: how many to keep, this one included.

    Returns:
      The directory of the new checkpoint.
    """
    root = directory / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"{checkpoint.counters.updates:012d}"
    partial = root / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    with open(partial / "variables.npz", "wb") as file:
        np.savez(file, **checkpoint.variables)  # type: ignore[arg-type]
        _flush(file)
    with open(partial / "state.json", "w", encoding="utf-8") as file:
        state = {
            "counters": checkpoint.counters._asdict(),
            "accounts": checkpoint.accounts,
            "replay_added": checkpoint.replay_added,
            "algorithm": checkpoint.algorithm,
            "config": options.to_dict(checkpoint.config),
        }
        json.dump(state, file)
        _flush(file)
    if final.exists():  # same number of updates, such as a second stop without an update between
        shutil.rmtree(final)
    os.rename(partial, final)
    _flush_directory(root)
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old)
    return final


def load(directory: pathlib.Path) -> Checkpoint:
    """Reads the newest intact checkpoint of LOGDIR.

    Raises:
      CheckpointError: there is none.
    """
    unreadable = ""
    for path in reversed(_complete(directory / "checkpoints")):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            unreadable = f"{path} cannot be read ({type(error).__name__}: {error})"
            _log.warning("Checkpoint %s: trying the one before.", unreadable)
    if unreadable:
        raise CheckpointError(
            f"No checkpoint of {directory} can be read. {unreadable}. Another version of impala "
            "may have written it; start over with --fresh."
        )
    raise CheckpointError(
        f"{directory} has no checkpoint. Give the log directory of a run that has written one "
        "(the first is written after learner.checkpoint_seconds, or when the run is stopped)."
    )


def exists(directory: pathlib.Path) -> bool:
    """Whether LOGDIR has any complete checkpoint."""
    return bool(_complete(directory / "checkpoints"))


def named(prefix: str, variables: Sequence[Any]) -> dict[str, Any]:
    """Names variables by their place and their own name: "agent/003/linear/w:0" and so on."""
    return {f"{prefix}/{i:03d}/{v.name}": v for i, v in enumerate(variables)}


def assign(values: Mapping[str, np.ndarray], variables: Mapping[str, Any]) -> None:
    """Puts saved values into variables.

    Raises:
      CheckpointError: a name or a shape does not fit, so the saved run had another network,
        algorithm or optimiser.
    """
    hint = "This run has another network, algorithm or optimiser; start over with --fresh."
    if unmatched := sorted(variables.keys() ^ values.keys()):
        raise CheckpointError(
            f"Only one of the checkpoint and the run has {unmatched[0]!r}. {hint}"
        )
    for name, variable in variables.items():
        if tuple(variable.shape) != values[name].shape:
            raise CheckpointError(
                f"{name!r} has shape {values[name].shape} in the checkpoint and "
                f"{tuple(variable.shape)} in the run. {hint}"
            )
    for name, variable in variables.items():
        variable.assign(values[name])


def initialise(variables: Sequence[Any], saved: Checkpoint) -> list[str]:
    """Puts the values of another run's agent into variables of the same name and shape.

    Returns:
      Lines that say what was taken, and what was not and why.

    Raises:
      CheckpointError: nothing fits.
    """
    values = {_own_name(name): value for name, value in of_agent(saved.variables).items()}
    taken, lines = [], []
    for variable in variables:
        value = values.pop(variable.name, None)
        if value is None:
            lines.append(f"New: {variable.name} {tuple(variable.shape)}.")
        elif value.shape != tuple(variable.shape):
            lines.append(f"New: {variable.name} {tuple(variable.shape)}, which was {value.shape}.")
        else:
            variable.assign(value)
            taken.append(variable.name)
    lines += [f"Not taken: {name} {value.shape}." for name, value in values.items()]
    if not taken:
        raise CheckpointError(f"Nothing of that agent fits this one. {' '.join(lines)}")
    return [f"Taken from {saved.counters.frames:,} frames: {', '.join(taken)}.", *lines]


def of_agent(named: Mapping[str, T]) -> dict[str, T]:
    """The agent's part of what `named` has named."""
    return {name: value for name, value in named.items() if name.startswith("agent/")}


def _own_name(name: str) -> str:
    """The variable's own part of a name that `named` gave."""
    return name.split("/", 2)[2]


def _read(path: pathlib.Path) -> Checkpoint:
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    # NumPy would leave the file open if it is damaged. Reading checks each CRC.
    with open(path / "variables.npz", "rb") as file, np.load(file, allow_pickle=False) as arrays:
        variables = {name: arrays[name] for name in arrays.files}
    return Checkpoint(
        config=options.from_dict(Config, state["config"]),
        counters=Counters(**state["counters"]),
        variables=variables,
        accounts=state["accounts"],
        replay_added=state["replay_added"],
        algorithm=state["algorithm"],
    )


def _complete(root: pathlib.Path) -> list[pathlib.Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in root.glob("*") if path.name.isdigit())


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
