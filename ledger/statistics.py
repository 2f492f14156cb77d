"""Scores of records, and their means with bootstrapped intervals over seeds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.stats

from impala.analysis import continual
from impala.config import values
from impala.config.schema import Config
from ledger.records import Record


class Interval(NamedTuple):
    """A mean over seeds, or a number that is computed of several, and its interval of 95%."""

    mean: float
    low: float  # as high: the mean, if there is one seed only
    high: float
    seeds: int  # of the arm with the fewest


def interval(of_seeds: Sequence[float]) -> Interval:
    """Returns the mean of at least one number and the interval that resampling seeds gives."""
    return interval_of({"": of_seeds}, lambda means: means[""])


def interquartile(of_seeds: Sequence[float]) -> Interval:
    """Returns the mean without the lowest and the highest quarter of seeds, and its interval.

    Agarwal et al. 2021, arXiv 2108.13264, section 4.3; of three seeds or fewer it is the mean.
    """
    return interval_of({"": of_seeds}, lambda means: means[""], mean=_interquartile_mean)


def interval_of(
    arms: Mapping[str, Sequence[float]],
    number: Callable[[Mapping[str, Any]], Any],
    mean: Callable[[np.ndarray, int], Any] = np.mean,
) -> Interval:
    """Returns a number of the means of several arms, each of whose seeds are resampled.

    A mean of ratios, seed by seed, would be above the ratio of the means, the more so the more
    seeds differ; and two arms with one seed have no more in common than with two.

    Args:
      arms: arm -> a number of each seed, at least one.
      number: of the arms' means, which are arrays.
      mean: of seeds, which are on an axis.
    """
    samples = [np.array(of_seeds, float) for of_seeds in arms.values()]

    def of_means(*resampled: np.ndarray, axis: int) -> Any:
        return number({arm: mean(x, axis) for arm, x in zip(arms, resampled, strict=True)})

    found, seeds = float(of_means(*samples, axis=0)), min(map(len, samples))
    if seeds == 1:
        return Interval(found, found, found, 1)
    result = scipy.stats.bootstrap(
        samples, of_means, method="percentile", rng=np.random.default_rng(0)
    )
    low, high = map(float, result.confidence_interval)
    return Interval(found, low, high, seeds)


def _interquartile_mean(of_seeds: np.ndarray, axis: int) -> Any:
    return scipy.stats.trim_mean(of_seeds, 0.25, axis=axis)


def welch(arms: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> float:
    """Returns the two-sided p of a weighted sum of arms' means being 0.

    Welch 1947: arms may differ in how much their seeds differ. Of one seed it is 1.

    Args:
      arms: arm -> a number of each seed.
      weights: arm -> the weight of its mean.
    """
    if min(map(len, arms.values())) < 2:
        return 1.0
    total, variance, freedom = 0.0, 0.0, 0.0
    for arm, weight in weights.items():
        of_seeds = np.array(arms[arm], float)
        of_arm = float(weight**2 * of_seeds.var(ddof=1) / of_seeds.size)
        total += weight * float(of_seeds.mean())
        variance += of_arm
        freedom += of_arm**2 / (of_seeds.size - 1)
    if variance == 0.0:
        return float(total == 0.0)
    t = abs(total) / math.sqrt(variance)
    return float(2 * scipy.stats.t.sf(t, variance**2 / freedom))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values that are corrected for being several: Holm 1979."""
    order = np.argsort(p_values)
    corrected = np.array(p_values, float)
    factors = np.arange(len(p_values), 0, -1)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(corrected[order] * factors))
    return corrected.tolist()


def continual_run(record: Record) -> continual.Run:
    """Returns the evaluations beside a run's training as curves of its tasks."""
    config = values.from_stored(Config, record.settings)
    history = continual.History(config)
    for line in record.evaluations:
        history.add(continual.parse(line))
    return history.run()


def _of_info(name: str) -> Callable[[Record], float]:
    return lambda record: float(np.mean([np.mean(each.info[name]) for each in record.final]))


def _forgetting(record: Record) -> float:
    return _mean(list(continual.forgetting(continual_run(record)).values()))


def _transfer(record: Record) -> float:
    return _mean(list(continual.transfer(continual_run(record)).values()))


def _mean(of_tasks: Sequence[float]) -> float:
    return float(np.mean(of_tasks)) if of_tasks else math.nan


def _in_training(record: Record) -> float:
    """Returns the mean over training of the return in training, over tasks.

    Until the first row with a return, it is that return.
    """
    of_tasks = []
    for points in record.training.values():
        frames, _, returns = np.transpose([[0, 0, points[0][2]], *points])
        of_tasks.append(np.trapezoid(returns, frames) / frames[-1])
    return float(np.mean(of_tasks))


def by_task(record: Record) -> dict[str, float]:
    """Returns the mean return of each task at the end."""
    return {each.task: float(np.mean(each.returns)) for each in record.final}


SCORES: Mapping[str, Callable[[Record], float]] = {
    "return": lambda record: _mean([*by_task(record).values()]),
    "return in training": _in_training,
    "late return in training": lambda record: late(record, 0.1),
    "regret": _of_info("regret"),
    "forgetting": _forgetting,
    "transfer": _transfer,
}
"""Name -> the number that a record gives, a mean over its tasks; NaN if it gives none."""


class Point(NamedTuple):
    """When a run came to a score."""

    frames: float
    seconds: float


def late(record: Record, share: float = 0.2) -> float:
    """Returns the mean training return over the last fifth of a run, on its first task.

    Args:
      record: of the run.
      share: another one than a fifth.
    """
    rows = next(iter(record.training.values()))
    return _mean([value for frames, _, value in rows if frames >= (1 - share) * record.frames])


def first(record: Record, threshold: float) -> Point | None:
    """Returns when the training return first came to a threshold, on a run's first task."""
    for frames, seconds, value in next(iter(record.training.values()), []):
        if value >= threshold:
            return Point(frames, seconds)
    return None
