"""What a sweep's file says: the settings that are searched, how, and what each trial takes.

Nothing here imports Ray: a mistake in the file is found before it is loaded.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from impala.config import layers, rules, values
from impala.config.schema import Config, Count, Positive, Range, Share
from impala.config.values import OptionError
from impala.logdir import identity
from impala.parts import sections
from impala.schedule import tasks

Kind = Literal["choice", "grid", "uniform", "log_uniform"]
KINDS: tuple[Kind, ...] = ("choice", "grid", "uniform", "log_uniform")

SEED = "seed"
"""The setting over whose values scores are averaged, instead of compared."""

RAY = "ray"
"""Ray's own folder in a sweep's output, which is there once the sweep has begun."""

# What a member of a population cannot take over from one whose setting was another.
_SHAPES = (
    *("agent.", "environment.", "tasks.", "algorithm", "phases", "learner.unroll_length"),
    *("optimiser.name", "replay.rule", "replay.storage"),
)
_LENGTHS = ("total_frames", "total_episodes", "tasks.", "phases")  # trials are compared by frames


@dataclasses.dataclass(frozen=True, kw_only=True)
class AshaConfig:
    """Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934)."""

    grace_frames: Positive = 100_000
    """Frames that every trial is trained for; each next decision comes `reduction` times later."""
    reduction: Annotated[int, Range(2)] = 3
    """One of so many trials goes on after a decision."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PbtConfig:
    """Population-based training (Jaderberg et al. 2017, arXiv 1711.09846; IMPALA's section 5.3)."""

    every_frames: Positive = 1_000_000
    """Frames of a member between two decisions."""
    share: Annotated[float, Range(0.01, 0.5)] = 0.25
    """Share of members, the worst, that copy agent, optimiser and counters of one of the best."""
    resample: Share = 0.25
    """Probability that a copied setting is drawn anew; otherwise numbers change by a fifth, and a
    choice becomes its neighbour."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """All of a sweep's file but `settings` and `search`."""

    preset: str = ""
    """Preset, or MODULE:ATTRIBUTE, that every trial starts from."""
    trials: Positive = 1
    """Samples of what is searched; of a population, its members. Each is tried with the whole
    grid."""
    sampler: Literal["random", "optuna"] = "random"
    scheduler: Literal["none", "asha", "pbt"] = "none"
    asha: AshaConfig = AshaConfig()
    pbt: PbtConfig = PbtConfig()
    score: str = ""
    """A scalar of telemetry, to be large; empty: the mean over tasks of the mean return of the last
    100 episodes in training."""
    num_actors: Annotated[int, Range(1, 256)] = 1
    """Actors of each trial."""
    cpus: Annotated[float, Range(0.01)] = 2.0
    """Cores that Ray sets aside for each trial: learner and actors."""
    gpus: Annotated[float, Range(0.0)] = 0.0
    """GPUs, or a share of one, for each trial's learner."""
    seed: Count = 1
    """Seed of what is drawn. The seed of the trials is a setting."""


@dataclasses.dataclass(frozen=True)
class Space:
    """The values of a setting that are tried."""

    kind: Kind
    values: tuple[Any, ...]  # of a range: its ends

    @property
    def is_range(self) -> bool:
        """Whether every number between two ends may be tried."""
        return self.kind in ("uniform", "log_uniform")

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return all(type(value) is int for value in self.values)

    def nearest(self, value: Any) -> Any:
        """Returns a number of a range nearest to this one."""
        low, high = self.values
        inside = min(max(value, low), high)
        return round(inside) if self.is_whole else inside


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep's file says, checked."""

    options: Options
    settings: Mapping[str, Any]
    """Settings of every trial, nested, over the preset's."""
    search: Mapping[str, Space]
    """Name of a setting, such as optimiser.learning_rate -> its values."""
    config: Config
    """Configuration of every trial, except what is searched."""

    @property
    def total_frames(self) -> int:
        """Environment frames of a trial that goes on to its end."""
        return tasks.total_frames(self.config)


def read(file: pathlib.Path) -> Sweep:
    """Reads a sweep's file.

    Raises:
      OptionError: it cannot be read, or says what no trial can be made of.
    """
    data = layers.read_yaml(file)
    try:
        return parse(data)
    except OptionError as error:
        raise OptionError(f"{file}: {error}") from None


def parse(data: Any) -> Sweep:
    """Returns what a sweep's file says.

    Raises:
      OptionError: an unknown name, a value that a setting cannot have, nothing to search, or a
        combination that there is not.
    """
    if not isinstance(data, Mapping):
        raise OptionError("A sweep holds preset, search and more by name; see docs/sweeps.md.")
    rest = dict(data)
    settings, search = rest.pop("settings", {}), rest.pop("search", {})
    options = values.from_dict(Options, rest)
    if not options.preset:
        raise OptionError("preset is missing: name one of impala presets, or MODULE:ATTRIBUTE.")
    base = layers.find_preset(options.preset)[1]
    config = layers.composed_over(base, settings, "settings: ")
    if not isinstance(search, Mapping) or not search:
        raise OptionError(
            "search is missing: the values to try of each setting, for example "
            "{optimiser.learning_rate: {log_uniform: [1e-5, 1e-2]}}."
        )
    known = values.flatten(config)
    spaces = {name: _space(name, space, config, known) for name, space in search.items()}
    sweep = Sweep(options, settings, spaces, config)
    _check_combination(sweep)
    rules.check_overridden(spaces, config, varies=spaces)
    if not {"algorithm", "phases"} & {*spaces}:
        rules.check_read(spaces, config)
    return sweep


def _space(name: str, data: Any, config: Config, known: Mapping[str, Any]) -> Space:
    """Returns the values of a setting, each of which a trial could have."""
    if not isinstance(name, str):  # as yes: or 1: in YAML
        raise OptionError(
            f"search: {name!r} is no text; it must be the name of a setting, such as "
            "optimiser.learning_rate."
        )
    if name not in known:
        hint = values.nearest(name, known) or "impala train --help lists them."
        raise OptionError(f"search: there is no setting {name!r}. {hint}")
    if not isinstance(data, Mapping) or len(data) != 1:
        raise OptionError(
            f"search.{name} is {data!r}; it must be one of {', '.join(KINDS)} with a list, for "
            "example {choice: [1, 2]} or {log_uniform: [1e-5, 1e-2]}."
        )
    (word, listed), *_ = data.items()
    kind = values.choice(f"search.{name}", word, KINDS)
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise OptionError(f"search.{name}.{kind} is {listed!r}; it must be a list of values.")
    found = tuple(_checked(name, value, config) for value in listed)
    space = Space(kind, found)  # type: ignore[arg-type]
    if space.is_range:
        _check_range(name, space)
    return space


def _checked(name: str, value: Any, config: Config) -> Any:
    """Returns a value as the setting has it.

    Raises:
      OptionError: the setting cannot have it.
    """
    try:
        changed = rules.validate(layers.put_over(config, values.nested({name: value})))
    except OptionError as error:
        raise OptionError(f"search.{name}: {error}") from None
    return values.plain(values.flatten(changed)[name])


def _check_range(name: str, space: Space) -> None:
    where = f"search.{name}.{space.kind}"
    is_number = all(isinstance(x, int | float) and not isinstance(x, bool) for x in space.values)
    if len(space.values) != 2 or not is_number or not space.values[0] < space.values[1]:
        raise OptionError(
            f"{where} is {list(space.values)}; it must be the smallest and the largest number."
        )
    if space.kind == "log_uniform" and space.values[0] <= 0:
        raise OptionError(f"{where} begins at {space.values[0]}; it must begin above 0.")


def _check_combination(sweep: Sweep) -> None:
    options, config = sweep.options, sweep.config
    searched = sweep.search.get("deterministic")
    if options.num_actors > 1 and True in (
        searched.values if searched else (config.deterministic,)
    ):
        raise OptionError(
            f"num_actors is {options.num_actors}, but a deterministic run has one actor: set "
            "num_actors to 1, or deterministic to false."
        )
    has_grid = any(space.kind == "grid" for space in sweep.search.values())
    if has_grid and (options.sampler == "optuna" or options.scheduler == "pbt"):
        other = "sampler: optuna" if options.sampler == "optuna" else "scheduler: pbt"
        raise OptionError(f"A grid is tried as a whole, which {other} does not do: use choice.")
    if SEED in sweep.search and (options.sampler == "optuna" or options.scheduler != "none"):
        other = (
            "sampler: optuna" if options.sampler == "optuna" else f"scheduler: {options.scheduler}"
        )
        raise OptionError(
            f"search.seed: {other} compares single trials, so it would look for lucky seeds; set "
            "settings.seed, or average over seeds with sampler: random and scheduler: none."
        )
    for name in sweep.search:
        if options.scheduler != "none" and name.startswith(_LENGTHS):
            raise OptionError(
                f"search.{name}: scheduler: {options.scheduler} compares trials after as many "
                "frames, so all have to be as long; search it with scheduler: none."
            )
    if options.scheduler == "asha":
        _check_decisions("asha.grace_frames", options.asha.grace_frames, sweep)
    if options.scheduler != "pbt":
        return
    if options.sampler != "random":
        raise OptionError("A population's first settings are random: use sampler: random.")
    if options.trials < 2:
        raise OptionError(f"trials is {options.trials}; a population needs at least 2 members.")
    own = sections.for_actors(config)
    for name in sweep.search:
        is_own = name.partition(".")[0] in own
        decides = identity.decides_variables(name, config)
        if is_own or decides or name.startswith(_SHAPES):
            raise OptionError(
                f"search.{name}: a member cannot copy an agent of one with another {name}; search "
                "it with another scheduler."
            )
    _check_decisions("pbt.every_frames", options.pbt.every_frames, sweep)


def _check_decisions(name: str, frames: int, sweep: Sweep) -> None:
    """Refuses a first decision of a scheduler that would come when trials have ended."""
    if frames >= sweep.total_frames:
        raise OptionError(
            f"{name} is {frames}, but a trial ends after {sweep.total_frames} frames, so "
            f"scheduler: {sweep.options.scheduler} would decide nothing: set it to "
            f"{max(1, sweep.total_frames // 10)}, for instance."
        )
