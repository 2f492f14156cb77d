"""What the runs of a sequence of tasks come to: areas, forgetting, transfer, and CLEAR's claims.

A task's score is the area under its curve of evaluations, 0 for the untrained policy and 1 for the
task trained alone for as many frames; an arm's is the mean over tasks. Forgetting and transfer are
CORA's, see `impala.analysis.continual`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from impala.analysis import continual
from impala.schedule import tasks
from ledger import statistics
from ledger.records import Record
from ledger.sequences import SEPARATE
from ledger.statistics import Interval

Arms = Mapping[str, Sequence[Record]]  # arm -> its records, by seed
Scores = Mapping[str, Mapping[int, float]]  # arm -> seed -> score


def areas(arms: Arms) -> Scores:
    """Returns the score of each arm in which every task is trained, for each seed.

    Returns:
      Nothing while an arm that trains a task alone has no records: it says what 1 is.
    """
    runs = {arm: {x.seed: statistics.continual_run(x) for x in arms[arm]} for arm in arms}
    every = [run for of_seeds in runs.values() for run in of_seeds.values()]
    scales = {}  # task -> area of the untrained policy, and of the task alone
    for number, task in enumerate(every[0].tasks if every else ()):
        alone = [_area(run, task) for run in runs.get(f"{SEPARATE}{number}", {}).values()]
        if not alone:
            return {}
        scales[task] = (_mean([run.curves[task].returns[0] for run in every]), _mean(alone))
    return {
        arm: {
            seed: _mean(
                [continual.normalised(_area(run, x), *scale) for x, scale in scales.items()]
            )
            for seed, run in of_seeds.items()
        }
        for arm, of_seeds in runs.items()
        if not arm.startswith(SEPARATE)
    }


def _area(run: continual.Run, task: str) -> float:
    return run.curves[task].area(max(float(curve.frames[-1]) for curve in run.curves.values()))


_SEEDS = 6  # with fewer, no exact test of two arms comes to 5% after Holm's correction of seven
_LEVEL = 0.05  # of all claims of an experiment together


class Claim(NamedTuple):
    """A claim of the paper, as a number that is above or below a limit if it holds.

    The number is one weighted sum of arms' mean scores over another, which is above 0.
    """

    text: str
    quantity: str
    above: Mapping[str, float]  # arm -> weight
    below: Mapping[str, float]
    paper: str
    limit: float
    is_above: bool

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that it is about."""
        return tuple({**self.above, **self.below})

    def of_seeds(self, scores: Scores) -> dict[str, list[float]]:
        """Returns its arms' scores, one of each seed."""
        return {arm: [*scores[arm].values()] for arm in self.arms}

    def number(self, scores: Mapping[str, Any]) -> Any:
        """Returns the number that arms' mean scores give."""
        return _weighted(self.above, scores) / _weighted(self.below, scores)

    def p(self, scores: Scores) -> float:
        """Returns the p of the number being the limit: above - limit * below is 0."""
        weights = {
            arm: self.above.get(arm, 0.0) - self.limit * self.below.get(arm, 0.0)
            for arm in self.arms
        }
        return statistics.welch(self.of_seeds(scores), weights)

    def verdict(self, found: Interval | None, p: float) -> str:
        """Returns whether a number is on the claim's side of the limit, given its corrected p."""
        if found is None:
            return "not measured"
        if found.seeds < _SEEDS:
            return f"open: fewer than {_SEEDS} seeds"
        if p >= _LEVEL:
            return "open"
        return "holds" if (found.mean > self.limit) == self.is_above else "does not hold"


def _weighted(weights: Mapping[str, float], scores: Mapping[str, Any]) -> Any:
    return sum(weight * scores[arm] for arm, weight in weights.items())


def _ratio(
    text: str, arm: str, other: str, paper: str, *, limit: float = 1.0, is_above: bool
) -> Claim:
    """Returns a claim about an arm's score divided by another's."""
    return Claim(text, f"{arm} / {other}", {arm: 1.0}, {other: 1.0}, paper, limit, is_above)


CLAIMS = (
    _ratio("Tasks in turn are forgotten", "sequential", "simultaneous", "0.55", is_above=False),
    Claim(
        "CLEAR prevents most of it",
        "what clear closes of the gap, at equal compute",
        {"clear": 1.0, "sequential-equal-compute": -1.0},
        {"simultaneous-equal-compute": 1.0, "sequential-equal-compute": -1.0},
        "0.82",
        limit=0.5,
        is_above=True,
    ),
    _ratio(
        "It does so not by computing more",
        *("clear", "sequential-equal-compute", "not reported"),
        is_above=True,
    ),
    _ratio(
        "A small reservoir is enough",
        *("clear-20th", "clear", "0.99, of a 200th"),
        limit=0.9,
        is_above=True,
    ),
    _ratio(
        "What is kept must be of all times",
        *("clear-20th", "fifo-20th", "not reported"),
        is_above=True,
    ),
    _ratio("Cloning adds to it", "no-cloning-20th", "clear-20th", "0.93, of half", is_above=False),
    _ratio("New data add to it", "replay-only", "clear", "0.89", is_above=False),
)
"""Claims of Rolnick et al. 2018, with the mean over three tasks of the ratios in its tables."""


def claim(of: Claim, scores: Scores) -> Interval | None:
    """Returns a claim's number; None if one of its arms has no records."""
    if not all(scores.get(arm) for arm in of.arms):
        return None
    return statistics.interval_of(of.of_seeds(scores), of.number)


def judged(scores: Scores) -> list[tuple[Claim, Interval | None, str]]:
    """Returns claims, their numbers, and verdicts that are corrected for their being several."""
    found = [claim(each, scores) for each in CLAIMS]
    corrected = statistics.holm(
        [each.p(scores) if x else 1.0 for each, x in zip(CLAIMS, found, strict=True)]
    )
    return [
        (each, x, each.verdict(x, p)) for each, x, p in zip(CLAIMS, found, corrected, strict=True)
    ]


class Effect(NamedTuple):
    """What training another task does to a task: means over seeds, of which one is None."""

    block: tasks.Block
    task: int
    forgetting: float | None
    transfer: float | None


def effects(of_seeds: Sequence[Record]) -> list[Effect]:
    """Returns forgetting or transfer of each task in each block of another."""
    runs = [statistics.continual_run(record) for record in of_seeds]
    found: dict[tuple[int, str], list[continual.Change]] = {}
    for change in (change for run in runs for change in continual.changes(run)):
        found.setdefault((change.block, change.task), []).append(change)
    return [
        Effect(
            *(runs[0].blocks[block], runs[0].tasks.index(task)),
            *(_known([x.forgetting for x in same]), _known([x.transfer for x in same])),
        )
        for (block, task), same in found.items()
    ]


def _known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
