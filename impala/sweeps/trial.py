"""A trial: a run of `impala train` with settings of its own, as Ray Tune starts and stops it."""

import contextlib
import json
import os
import pathlib
import shutil
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ray import tune

import impala
from impala.config import layers, values
from impala.logdir import rows
from impala.sweeps.description import Sweep

_POLL_SECONDS = 0.5
# What a member takes over of another's log directory: all that its counters go on from, and what
# was seen and kept on the way.
_COPIED = (
    *("checkpoints", "replay", "metrics*.jsonl", "evaluations*.jsonl", "incarnations.json"),
    *("snapshots", "best", "milestones"),
)
# File beside these: the trial that they come from, and an id; in the log directory of a trial that
# has copied them, also its settings.
_ORIGIN = "origin"
_COPYING = "copying"  # is there as long as not all of them are
# Scalars that need not be in the first rows: of what has not happened yet.
_LATE = (
    *("evaluation/", "episode/", "episodes/", "task/", "worker/", "actor/", "unrolls/"),
    *("messages/", "refused/", "rpc_seconds/", "inference/", "replay/"),
)
_ENOUGH_ROWS = 10  # with updates, to have every other scalar


class TrialError(RuntimeError):
    """A trial cannot be scored."""


class Trial(tune.Trainable):
    """Trains in OUTPUT/trials/ID, and reports each row of telemetry that has a score.

    What a trial needs to go on is in its log directory: a trial that is stopped or killed resumes
    there. Ray's own checkpoints hold a copy of it for another member of a population.
    """

    def setup(  # type: ignore[override]
        self, config: dict[str, Any], sweep: Sweep, output: str, directory: str
    ) -> None:
        """Starts nothing yet.

        Args:
          config: setting -> its value in this trial.
          sweep: which it belongs to.
          output: of the sweep.
          directory: the sweep's working directory, where custom parts may be.
        """
        with contextlib.suppress(FileNotFoundError):  # another host need not have it
            os.chdir(directory)
        self._sweep = sweep
        self._settings = config
        self._directory = trial_directory(pathlib.Path(output), self.trial_id)
        self._run: _Run | None = None
        self._seen = 0  # bytes of telemetry
        self._is_copy = False  # whether Ray would restore it from another trial's checkpoint

    def step(self) -> dict[str, Any]:
        """Waits for the next report: the score after so many frames.

        Raises:
          TrainingError: the run failed.
          TrialError: it was stopped from outside, it ended without a score, or telemetry has no
            scalar of that name.
        """
        if self._run is None:
            self._seen = _size(self._directory)  # of before it was stopped, or has copied another
            # A learner refuses to go on with a finished run under the changed settings of a copy.
            if not (self._is_copy and _has_finished(self._directory)):
                self._run = _Run(self._sweep, self._settings, self._directory)
        while True:
            # Before reading, so that its last row is read.
            is_over = self._run is None or self._run.wait(_POLL_SECONDS)
            if (size := _size(self._directory)) == self._seen and not is_over:
                continue
            self._seen, told = size, rows.read(self._directory)
            name = self._sweep.options.score
            found = scores(told, name)
            known = [value for value in found if value is not None]
            if known and (is_over or found[-1] is not None):
                frames = int(told[-1]["frames"])
                return {
                    "score": known[-1],
                    "frames": frames,
                    "copied": _read(self._directory / _ORIGIN).partition(" ")[0],
                    "is_whole": is_over or frames >= self._sweep.total_frames,
                    "done": is_over,
                    # Ray deletes the other's checkpoint once that one has saved some newer ones.
                    "should_checkpoint": self._is_copy and not is_over,
                }
            if not known and self._is_misspelt(name, told):
                hint = values.nearest(name, dict.fromkeys(each for row in told for each in row))
                self._stop()
                says = f"{self._directory} has no score: no row of its telemetry has {name}. {hint}"
                raise TrialError(says.rstrip())
            if is_over:
                raise TrialError(
                    f"{self._directory} has no score: telemetry has no "
                    f"{name or 'return of an episode that ended'}."
                )

    def _is_misspelt(self, name: str, told: Sequence[rows.Row]) -> bool:
        """Returns whether a scalar that no row has yet would be there by now."""
        phases = self._sweep.config.phases
        if not name or name.startswith(_LATE) or self._settings.get("phases", phases):
            return False
        return sum(row.get("updates", 0) > 0 for row in told) >= _ENOUGH_ROWS

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copies what another trial needs to go on from here; the run is stopped for it."""
        self._stop()
        target = pathlib.Path(checkpoint_dir)
        for path in _there(self._directory):
            _copy(path, target)
        (target / _ORIGIN).write_text(f"{self.trial_id} {uuid.uuid4().hex}")
        self._is_copy = False

    def load_checkpoint(self, checkpoint: str) -> None:  # type: ignore[override]
        """Takes over another trial's agent, optimiser, counters and telemetry, if not its own.

        What this trial has done since it saved, or took over, the same is kept; if the settings are
        new ones, it takes over the same once more. If it was killed while it took something over,
        it takes over what it gets now, be it its own.
        """
        source, ours = pathlib.Path(checkpoint), self._directory / _ORIGIN
        origin = f"{_read(source / _ORIGIN)} {json.dumps(self._settings, sort_keys=True)}"
        is_own = origin.partition(" ")[0] == self.trial_id
        self._is_copy = not is_own
        copying = self._directory / _COPYING
        if (is_own or _read(ours) == origin) and not copying.exists():
            return
        self._stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        copying.touch()
        for path in _there(self._directory):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in _there(source):
            _copy(path, self._directory)
        if not is_own:
            ours.write_text(origin)
        copying.unlink()

    def cleanup(self) -> None:
        """Stops the run, which leaves a checkpoint in its log directory."""
        self._stop()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.stop()
            self._run = None


class _Run:
    """`impala train`, until it ends or is stopped."""

    def __init__(self, sweep: Sweep, settings: Mapping[str, Any], logdir: pathlib.Path):
        self._asked = threading.Event()
        self._error: BaseException | None = None
        arguments = (sweep, settings, logdir)
        self._thread = threading.Thread(target=self._train, args=arguments, name="train")
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Waits for the run's end. Returns whether it has ended.

        Raises:
          TrainingError: it failed.
          TrialError: it was stopped, but not by `stop`.
        """
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Requests the run to write a checkpoint and end."""
        self._asked.set()
        self._thread.join()

    def _train(self, sweep: Sweep, settings: Mapping[str, Any], logdir: pathlib.Path) -> None:
        try:
            trained = impala.train(
                layers.composed_over(sweep.config, values.nested(settings)),
                logdir,
                num_actors=sweep.options.num_actors,
                change_settings=True,  # of a member that has copied
                progress=False,
                stop=self._asked,
            )
            if trained.status == "stopped" and not self._asked.is_set():
                raise TrialError(f"Training in {logdir} was stopped, but not by this sweep.")
        except BaseException as error:
            self._error = error


def _there(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns what of a log directory, or a copy of it, is to be copied."""
    return [path for pattern in _COPIED for path in directory.glob(pattern)]


def _copy(path: pathlib.Path, into: pathlib.Path) -> None:
    copy = shutil.copytree if path.is_dir() else shutil.copy2
    copy(path, into / path.name)


def _read(file: pathlib.Path) -> str:
    return file.read_text() if file.exists() else ""


def _size(logdir: pathlib.Path) -> int:
    """Returns the bytes of telemetry."""
    return sum(path.stat().st_size for path in logdir.glob("metrics*.jsonl"))


def _has_finished(logdir: pathlib.Path) -> bool:
    """Returns whether telemetry has the end of the run, after which nothing is learned."""
    told = rows.read(logdir)
    return bool(told) and told[-1].get("progress", 0.0) >= 1.0


def trial_directory(output: pathlib.Path, trial: str) -> pathlib.Path:
    """Returns the log directory of a trial."""
    return output / "trials" / trial


def scores(told: Sequence[rows.Row], name: str) -> list[float | None]:
    """Returns the score at each row of telemetry; None where there is none.

    Args:
      told: all rows of a trial: those after it was resumed lack the tasks that are not trained.
      name: as `Options.score`.
    """
    if name:
        return [row.get(name) for row in told]
    newest: rows.Row = {}  # of each task
    found: list[float | None] = []
    for row in told:
        newest |= rows.recent_returns(row)
        found.append(sum(newest.values()) / len(newest) if newest else None)
    return found
