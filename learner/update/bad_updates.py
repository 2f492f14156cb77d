"""Bad updates: files of refused batches, to look at with NumPy.

A file `LOGDIR/bad-updates/<update>.npz` holds what the update depended on: the batch, the weights
of its unrolls, every variable and slot, and `summary`, a JSON text with the configuration, the
counters, the senders, what was not finite and which unrolls were the cause. Where none was, the
name ends in `-skipped`. Each kind has a limit, so that culprits of one actor leave room for others.
"""

import contextlib
import json
import logging
import pathlib

import numpy as np
import tree

from impala.config import values
from impala.logdir import atomic
from impala.types import Batch
from learner.data.mix import Prepared
from learner.update.learner import Learner, Refusal

_log = logging.getLogger(__name__)

_MOST_FILES = 4  # per log directory and kind; the first ones are kept
_SKIPPED = "-skipped"  # suffix of a name: no unroll was the cause


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
    """Returns the end of a log line that names the file of a bad update; "" without a file."""
    return f" The batch is in {written}." if written else ""


def _arrays(learner: Learner, prepared: Prepared, refusal: Refusal) -> dict[str, np.ndarray]:
    summary = {
        "config": values.to_dict(learner.config),
        "algorithm": learner.phase.algorithm,
        "counters": learner.counters._asdict(),
        "learning_rate": refusal.learning_rate,
        "progress": refusal.phase_progress,
        "loss": str(refusal.loss),
        "not_finite": list(refusal.not_finite),
        "culprits": list(refusal.culprits),
        "origins": [list(origin) for origin in prepared.origins],
    }
    return {
        **{f"variables/{name}": value for name, value in learner.variables().items()},
        **_leaves("batch", prepared.batch),
        **_leaves("last_good", learner.last_good),
        **({} if prepared.weights is None else {"weights": prepared.weights}),
        "summary": np.array(json.dumps(summary)),
    }


def _leaves(name: str, batch: Batch | None) -> dict[str, np.ndarray]:
    leaves = [] if batch is None else tree.flatten_with_path(batch)
    return {f"{name}/{'/'.join(map(str, path))}": np.asarray(leaf) for path, leaf in leaves}
