"""Runs that are compared: read from their log directories, grouped without the seed, and named.

Runs that differ only in the seed are one group. Several groups are named by the settings in which
they differ, or by their directories where these are too many.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from impala.analysis import continual
from impala.analysis.curves import Curve, Curves, ascending
from impala.config import layers, values
from impala.config.presets import PRESETS
from impala.config.schema import Config
from impala.logdir import rows
from impala.logdir.rows import Row

_MOST_SETTINGS = 6  # in a name
_DEFAULTS = values.flatten(Config())


@functools.cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    """Name -> all settings of a built-in preset, by their dotted paths."""
    return {name: values.flatten(config) for name, (_, config) in PRESETS.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What a log directory holds of a run."""

    logdir: pathlib.Path
    settings: Mapping[str, Any]  # dotted path -> value, of all; empty: they cannot be read
    rows: Sequence[Row]  # of telemetry
    evaluated: continual.Run | None  # None: it has no evaluations
    per_step: bool = False  # compared by rewards per step, as no episode has ended in another run

    @functools.cached_property
    def standings(self) -> tuple[str, Sequence[Row]]:
        """What tells how well it does in training, and for each of its rows that by task."""
        return rows.standings(self.rows, self.per_step)

    @functools.cached_property
    def experiment(self) -> Mapping[str, Any]:
        """Settings that change what is played or learned, without the seed."""
        if not self.settings:
            return {"": str(self.logdir.resolve())}  # not grouped with others
        return {path: value for path, value in self.settings.items() if _matters(path)}

    @functools.cached_property
    def nearest(self) -> tuple[str, Mapping[str, Any]]:
        """The preset with the fewest other settings, and these as it has them, without the seed."""
        others = {
            name: {
                path: of_preset.get(path, "none")
                for path, value in self.settings.items()
                if path != "seed" and not (path in of_preset and of_preset[path] == value)
            }
            for name, of_preset in _presets().items()
        }
        return min(others.items(), key=lambda pair: len(pair[1]))


Groups = Mapping[str, Sequence[Run]]
"""Name -> runs that differ only in the seed."""


def read(logdir: pathlib.Path) -> Run:
    """Reads a log directory.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    try:
        return _read(logdir)
    except OSError as error:
        raise ValueError(f"{logdir} cannot be read: {error.strerror}.") from error


def _read(logdir: pathlib.Path) -> Run:
    if not logdir.is_dir():
        raise ValueError(f"There is no log directory {logdir}.")
    try:
        stored = layers.read_yaml(logdir / "config.yaml")
        built_in = values.flatten(values.from_stored(Config, stored))
        settings = {**values.flatten(stored), **built_in}
        settings = {path: values.canonical(value) for path, value in settings.items()}
    except values.OptionError:
        settings = {}
    try:
        evaluated = continual.read(logdir)
    except (continual.NoEvaluations, values.OptionError):
        return Run(logdir, settings, rows.read(logdir), None)
    # Without curves, all evaluations are of tasks that the run no longer has.
    return Run(logdir, settings, rows.read(logdir), evaluated if evaluated.curves else None)


def grouped(runs: Iterable[Run]) -> Groups:
    """Groups runs that differ only in the seed, under names of their own; all by one measure."""
    runs = list(runs)
    if len({run.standings[0] for run in runs if run.rows}) > 1:
        runs = [dataclasses.replace(run, per_step=True) for run in runs]
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = str(sorted(run.experiment.items(), key=str))
        while run.settings.get("seed") in [
            each.settings.get("seed") for each in found.get(key, ())
        ]:
            key += " once more"  # no other seed, so not to be averaged
        found.setdefault(key, []).append(run)
    groups = list(found.values())
    paths = differing([group[0] for group in groups])
    known = all(group[0].settings for group in groups)
    by_settings = known and 0 < len(paths) <= _MOST_SETTINGS
    names = [
        described({path: group[0].experiment.get(path, "none") for path in paths})
        if by_settings
        else _directory(group)
        for group in groups
    ]
    return {
        name if names.count(name) == 1 else str(group[0].logdir.resolve()): group
        for name, group in zip(names, groups, strict=True)
    }


class Training(NamedTuple):
    """How well groups of runs do in training: for each task, a curve per run that has played it."""

    what: str  # what is measured
    over_frames: Mapping[str, Curves]
    over_seconds: Mapping[str, Curves]


def training(groups: Groups) -> Training:
    """Returns the mean returns of the last 100 training episodes, or the mean rewards of a step
    where there are none.

    Raises:
      ValueError: a run has neither yet.
    """
    what = ""
    over: dict[str, dict[str, dict[str, list[Curve]]]] = {"frames": {}, "seconds": {}}
    for name, run in [(name, run) for name, group in groups.items() for run in group]:
        what, standings = run.standings
        tasks = dict.fromkeys(task for standing in standings for task in standing)
        if not tasks:
            raise ValueError(
                f"{run.logdir} has no episode and no reward yet, in training or evaluation."
            )
        for task in tasks:
            pairs = zip(run.rows, standings, strict=True)
            of_task = [(row, standing[task]) for row, standing in pairs if task in standing]
            returns = np.array([value for _, value in of_task])
            for key, curves in over.items():
                curve = ascending(np.array([row[key] for row, _ in of_task]), returns)
                curves.setdefault(task, {}).setdefault(name, []).append(curve)
    return Training(what, over["frames"], over["seconds"])


def evaluations(groups: Groups) -> Mapping[str, Curves]:
    """Returns the returns of evaluations over frames: for each task, a curve per run."""
    found: dict[str, dict[str, list[Curve]]] = {}
    for name, run in [(name, run) for name, group in groups.items() for run in group]:
        for task, curve in ({} if run.evaluated is None else run.evaluated.curves).items():
            curves = found.setdefault(task, {}).setdefault(name, [])
            curves.append(ascending(curve.frames, curve.returns))
    return found


def differing(runs: Sequence[Run]) -> list[str]:
    """Returns the paths of the settings in which experiments differ, as far as they are known."""
    experiments = [run.experiment for run in runs if run.settings]
    paths = dict.fromkeys(path for experiment in experiments for path in experiment)
    return [
        path
        for path in paths
        if any(each.get(path) != experiments[0].get(path) for each in experiments)
    ]


def described(settings: Mapping[str, Any]) -> str:
    """Returns settings as text, such as "optimiser.learning_rate 0.001, mix.replayed 8"."""
    return ", ".join(f"{path} {text(value)}" for path, value in settings.items())


def text(value: Any) -> str:
    """Returns a setting or a score as text, rounded."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _matters(path: str) -> bool:
    if path == "seed":
        return False
    return path not in _DEFAULTS or not values.is_operational(Config, path)


def _directory(group: Sequence[Run]) -> str:
    """Returns the name of a group's directory, without the seed if it has several."""
    names = [run.logdir.resolve().name for run in group]
    if len(names) == 1:
        return names[0]
    without_seed = {re.sub(r"[-_.]?seed[-_.=]?\d+", "", name) for name in names}
    return without_seed.pop() if len(without_seed) == 1 else f"{names[0]}, ..."
