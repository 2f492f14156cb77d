"""Bad updates: files of refused batches, from which an update can be computed again.

A file `LOGDIR/bad-updates/<update>.npz` holds everything that the update depends on (the batch,
the weights and the senders of its unrolls, every variable and slot, the configuration, the
counters) and its results: the bits of the loss and a digest of each gradient. Where no unroll was
the cause, the name ends in `-skipped`. The number of each kind is limited separately, so that one
actor's culprits leave room for the other.
"""

import contextlib
import hashlib
import json
import logging
import pathlib
import platform
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tree

from impala.config import values
from impala.logdir import atomic
from impala.logdir.checkpoint import Counters
from impala.parts import build, sections
from impala.parts.components import Allowed
from impala.runtime import process
from impala.schedule import phases, tasks
from impala.types import Batch
from learner.data.mix import Prepared
from learner.update.learner import Learner, Refusal

_NOTHING = Allowed()
_log = logging.getLogger(__name__)

_MOST_FILES = 4  # per log directory and kind; the first ones are kept
_SKIPPED = "-skipped"  # suffix of a name: no unroll was the cause
_FORMAT = "impala bad update 1"


class BadUpdateError(ValueError):
    """A file holds no bad update, or is damaged."""


class Again(NamedTuple):
    """The result of computing an update again."""

    lines: list[str]  # a description
    identical: bool  # whether it equals the recorded result bit for bit


class BadUpdates:
    """Writes files to a directory, up to the limit of each kind."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        for partial in directory.glob("*.partial"):  # from a crash
            with contextlib.suppress(OSError):
                partial.unlink()
        skipped = [path.stem.endswith(_SKIPPED) for path in directory.glob("*.npz")]
        self._left = {kind: _MOST_FILES - skipped.count(kind) for kind in (False, True)}

    def write(self, learner: Learner, prepared: Prepared, refusal: Refusal) -> pathlib.Path | None:
        """Writes a batch that was just refused; a failure is only logged.

        Returns:
          The file; None if it was not written.
        """
        is_skipped = not refusal.culprits
        if self._left[is_skipped] <= 0:
            return None
        name, kind = f"{learner.counters.updates + 1:012d}", _SKIPPED if is_skipped else ""
        path = self.directory / f"{name}{kind}.npz"
        for i in range(1, _MOST_FILES):
            if path.exists():  # another batch of the same update
                path = self.directory / f"{name}-{i}{kind}.npz"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with atomic.replacing(path) as file:
                np.savez(file, **_arrays(learner, prepared, refusal))  # type: ignore[arg-type]
        except OSError as error:
            self._left = dict.fromkeys(self._left, 0)
            _log.warning("No bad update can be written to %s (%s).", path, error)
            return None
        self._left[is_skipped] -= 1
        return path


def hint(written: pathlib.Path | None) -> str:
    """Returns the end of a log line that tells how to inspect a bad update; "" without a file."""
    return f" impala replay-update {written} computes it again." if written else ""


def again(path: pathlib.Path, allow: Allowed = _NOTHING) -> Again:
    """Computes a bad update again, with a new agent, algorithm and optimiser.

    Args:
      path: of the file.
      allow: what may be imported if the file names it, beside installed entry points.

    Raises:
      BadUpdateError: the file cannot be read, is of another kind, or is damaged.
      ValueError: its environment cannot be made here.
    """
    arrays, said = _read(path)
    if said["device"] == "CPU":
        process.hide_gpus()
    if said["threads"] != _threads():
        process.set_threads(*said["threads"])
    if said["bfloat16"]:
        process.use_bfloat16()
    config = sections.from_dict(said["config"], allow)
    counters = Counters(**said["counters"])
    own = sections.found(config)
    played = tasks.make(config.environment, config.tasks)
    spaces = build.spaces(played, own, numbered=config.agent.popart)
    agent = build.agent(config.agent, *spaces, seed=config.seed, own=own)
    algorithm = build.algorithm(said["algorithm"], config, agent)
    learner = Learner(
        algorithm, config, phases.current(phases.make(config), counters.frames), counters
    )
    learner.assign(_part(arrays, "variables"))
    spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
    like = Batch(spec._replace(frames=0, parameter_version=0), is_replay=0)
    batch: Batch = tree.unflatten_as(like, list(_part(arrays, "batch").values()))
    last = list(_part(arrays, "last_good").values())
    if last:
        learner.last_good = tree.unflatten_as(like, last)

    seen = _seen(said)
    result = learner.update(batch, arrays.get("weights"))
    if not isinstance(result, Refusal):
        lines = [*_head(said), "Computed again, everything is finite: differs from what was seen."]
        return Again([*lines, *_where(said)], identical=False)
    identical = _seen_now(result) == seen
    lines = [
        *_head(said),
        f"Loss: {result.loss} (bits {_bits(result.loss)}).",
        f"Not finite: {', '.join(result.not_finite) or 'nothing'}.",
    ]
    for i in result.culprits:
        actor, number = said["origins"][i]
        version = int(batch.unroll.parameter_version[i])
        kind = f"replayed, number {number}" if batch.is_replay[i] else "fresh"
        lines.append(f"Culprit: unroll {i}, of {actor!r}, version {version}, {kind}.")
    if not result.culprits:
        lines.append("Culprits: none stands out.")
    if identical:
        lines.append("Computed again: identical to what was seen, bit for bit.")
    else:
        lines += [f"Computed again: differs in {', '.join(_differences(seen, result))}."]
        lines += _where(said)
    return Again(lines, identical)


def _arrays(learner: Learner, prepared: Prepared, refusal: Refusal) -> dict[str, np.ndarray]:
    said = {
        "format": _FORMAT,
        "config": values.to_dict(learner.config),
        "algorithm": learner.phase.algorithm,
        "counters": learner.counters._asdict(),
        "learning_rate": refusal.learning_rate,
        "progress": refusal.phase_progress,
        "loss": _bits(refusal.loss),
        "not_finite": list(refusal.not_finite),
        "digests": dict(refusal.digests),
        "culprits": list(refusal.culprits),
        "origins": [list(origin) for origin in prepared.origins],
        "threads": _threads(),
        "bfloat16": process.uses_bfloat16(),
        "device": "GPU" if tf.config.get_visible_devices("GPU") else "CPU",
        "machine": _machine(),
    }
    arrays = {
        **{f"variables/{name}": value for name, value in learner.variables().items()},
        **_leaves("batch", prepared.batch),
        **_leaves("last_good", learner.last_good),
        **({} if prepared.weights is None else {"weights": prepared.weights}),
        "said": np.frombuffer(json.dumps(said).encode(), np.uint8),
    }
    return {**arrays, "digest": np.frombuffer(_digest(arrays), np.uint8)}


def _read(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as members:
            arrays = {name: members[name] for name in members.files}
        digest = arrays.pop("digest").tobytes()
        said = json.loads(arrays["said"].tobytes())
    except OSError as error:
        raise BadUpdateError(f"{path} cannot be read ({error.strerror}).") from None
    except Exception:  # of any kind: the contents are unknown
        raise BadUpdateError(f"{path} holds no bad update, or is damaged.") from None
    if digest != _digest(arrays):
        raise BadUpdateError(f"{path} is damaged: its contents differ from their digest.")
    if said.get("format") != _FORMAT:
        raise BadUpdateError(f"{path} was written by another version of impala.")
    return arrays, said


def _leaves(name: str, batch: Batch | None) -> dict[str, np.ndarray]:
    leaves = [] if batch is None else tree.flatten(batch)
    return {f"{name}/{i:03d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}


def _part(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(f"{prefix}/"): array
        for name, array in arrays.items()
        if name.startswith(f"{prefix}/")
    }


def _digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _bits(loss: np.float32) -> str:
    return np.float32(loss).tobytes()[::-1].hex()


def _seen(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "the loss": said["loss"],
        **{f"the gradient of {name}": digest for name, digest in said["digests"].items()},
        "what is not finite": said["not_finite"],
        "the culprits": said["culprits"],
    }


def _seen_now(refusal: Refusal) -> dict[str, Any]:
    return _seen({**refusal._asdict(), "loss": _bits(refusal.loss)})


def _differences(seen: Mapping[str, Any], refusal: Refusal) -> list[str]:
    now = _seen_now(refusal)
    return [name for name in seen if seen[name] != now.get(name)]


def _head(said: Mapping[str, Any]) -> list[str]:
    updates, frames = said["counters"]["updates"], said["counters"]["frames"]
    return [
        f"Update {updates + 1:,} ({said['algorithm']}) at {frames:,} frames, learning rate "
        f"{said['learning_rate']:.3g}, {len(said['origins'])} unrolls."
    ]


def _where(said: Mapping[str, Any]) -> list[str]:
    return [f"It was seen on {said['machine']}; this is {_machine()}."]


def _threads() -> list[int]:
    """Returns TensorFlow's numbers of threads, within an operation and across operations."""
    threading = tf.config.threading
    return [
        threading.get_intra_op_parallelism_threads(),
        threading.get_inter_op_parallelism_threads(),
    ]


def _machine() -> str:
    """Describes what rounding depends on: processor and TensorFlow."""
    model = platform.machine()
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model} with TensorFlow {tf.__version__}"
