"""Telemetry: collects numbers and makes a row of them at the end of each interval.

`learner.telemetry.writer` passes the rows to the sinks.
"""

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tree

from impala.logdir.checkpoint import Counters
from impala.logdir.rows import Row
from impala.types import Episode, Nest
from learner.telemetry.sinks import Histograms, Images

_RECENT_EPISODES = 100  # of a task, over which its running mean return is taken
_MOST_VALUES = 2**15  # of a sample that are kept
_MOST_NEW = 1024  # additions to a sample before they are processed
_random = np.random.default_rng(0)  # selects the numbers of a sample; has its own lock


class Sample:
    """Numbers of a distribution, without those that are not finite.

    Mean and maximum are exact. Of very many numbers, only a random sample is kept: those with the
    smallest of the random keys that all have got.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._new: list[np.ndarray | float] = []  # not processed yet
        self._kept, self._keys = np.zeros(0), np.zeros(0)
        self._count, self._sum, self._largest = 0, 0.0, -math.inf

    def add(self, values: np.ndarray | float) -> None:
        """Adds numbers of any shape."""
        self._new.append(values)
        if len(self._new) >= _MOST_NEW:
            self._settle()

    def merge(self, later: "Sample") -> None:
        """Adds the numbers of another sample."""
        later._settle()
        self._count += later._count
        self._sum += later._sum
        self._largest = max(self._largest, later._largest)
        self._keep(later._kept, later._keys)

    def values(self) -> np.ndarray:
        """Returns the numbers kept: [N]."""
        self._settle()
        return self._kept

    def scalars(self) -> Row:
        """Returns mean, maximum and quantiles; nothing if there are no numbers."""
        values = self.values()
        if not values.size:
            return {}
        quantiles = (10, 50, 90)
        found = np.percentile(values, quantiles)
        return {
            "mean": self._sum / self._count,
            **{f"p{q}": float(value) for q, value in zip(quantiles, found, strict=True)},
            "max": self._largest,
        }

    def _settle(self) -> None:
        """Processes the new numbers."""
        if self._new:
            values = np.concatenate([np.ravel(each) for each in self._new], dtype=np.float64)
            values, self._new = values[np.isfinite(values)], []
            self._count += values.size
            self._sum += float(values.sum())
            self._largest = max(self._largest, float(values.max(initial=-math.inf)))
            self._keep(values, _random.random(values.size))

    def _keep(self, values: np.ndarray, keys: np.ndarray) -> None:
        self._kept = np.concatenate([self._kept, values])
        self._keys = np.concatenate([self._keys, keys])
        if self._kept.size > _MOST_VALUES:
            smallest = np.argpartition(self._keys, _MOST_VALUES)[:_MOST_VALUES]
            self._kept, self._keys = self._kept[smallest], self._keys[smallest]


@dataclasses.dataclass
class Spread:
    """Mean, smallest and largest of numbers and their standard deviation, all of them exact."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared differences from the mean
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, value: float) -> None:
        """Adds a number."""
        self.merge(Spread(1, value, 0.0, value, value))

    def merge(self, later: "Spread") -> None:
        """Adds the numbers of another one."""
        count, difference = self.count + later.count, later.mean - self.mean
        self.squares += later.squares + difference**2 * self.count * later.count / count
        self.mean += difference * later.count / count
        self.count = count
        self.smallest = min(self.smallest, later.smallest)
        self.largest = max(self.largest, later.largest)

    def scalars(self, name: str) -> Row:
        """Returns the mean by this name, and the others by names that begin with it."""
        return {
            name: self.mean,
            f"{name}_min": self.smallest,
            f"{name}_max": self.largest,
            f"{name}_deviation": math.sqrt(self.squares / self.count),
        }


class Interval:
    """The numbers collected in one interval of a run.

    Merging two intervals gives the same as one over both.

    Frames are environment frames (repeats counted), steps are agent decisions; both are counted
    when they have been learned from.
    """

    def __init__(self, base: Counters, since: float):
        """Starts empty.

        Args:
          base: counters from which speeds are measured.
          since: the start, by the clock of its end.
        """
        self._base = base
        self.counters = base
        """The run's counters at its end."""
        self.since = since
        """Its start."""
        self._until = since
        self._means: dict[str, tuple[float, int]] = {}  # name -> sum, weight
        self._spreads: dict[str, Spread] = {}
        self._samples: dict[str, Sample] = {}
        self._newest: dict[str, Nest] = {}
        self.images: Images = {}
        """The newest images by name, uint8 [N, height, width, 1 or 3]."""
        self.is_last = False
        """Whether it is the last one of its run."""
        self.waited_seconds = 0.0
        """Time in which the learner had no data."""
        # Name -> seconds, of them those waited, and in environments.
        self._actors: dict[str, tuple[float, float, float]] = {}
        self._levels: Row = {}

    @property
    def updates(self) -> int:
        """How many were made in it."""
        return self.counters.updates - self._base.updates

    @property
    def seconds(self) -> float:
        """Returns its duration."""
        return self._until - self.since

    def mean(self, name: str, value: float, weight: int = 1) -> None:
        """Adds a value to a scalar that is averaged."""
        total, weights = self._means.get(name, (0.0, 0))
        self._means[name] = (total + value * weight, weights + weight)

    def actor(self, name: str, seconds: float, waited: float, playing: float) -> None:
        """Adds an actor's times: in total, waiting for the learner, and in environments."""
        before = self._actors.get(name, (0.0, 0.0, 0.0))
        self._actors[name] = before[0] + seconds, before[1] + waited, before[2] + playing

    def sample(self, name: str, values: np.ndarray | float) -> None:
        """Adds numbers to a distribution."""
        self._samples.setdefault(name, Sample()).add(values)

    def newest(self, name: str, values: Nest) -> None:
        """Replaces the numbers [N, ...] of a histogram that is not in the row."""
        self._newest[name] = values

    def episodes(self, name: str, episodes: Sequence[Episode]) -> None:
        """Adds finished episodes."""
        for episode in episodes:
            for key, number in (("return", episode.episode_return), ("length", episode.length)):
                self._spreads.setdefault(f"{name}/{key}", Spread()).add(number)
            self.mean(f"{name}/frames", episode.frames)
            for key, value in episode.info.items():
                self.mean(f"{name}/info/{key}", value)

    def levels(self, levels: Mapping[str, float]) -> None:
        """Sets values that are not averaged."""
        self._levels |= levels

    def end(self, counters: Counters, now: float) -> None:
        """Ends the interval."""
        self.counters, self._until = counters, now

    def merge(self, later: "Interval") -> None:
        """Appends the interval that follows this one."""
        for name, (total, weight) in later._means.items():
            before, weights = self._means.get(name, (0.0, 0))
            self._means[name] = (before + total, weights + weight)
        for name, spread in later._spreads.items():
            self._spreads.setdefault(name, Spread()).merge(spread)
        for name, sample in later._samples.items():
            self._samples.setdefault(name, Sample()).merge(sample)
        self._newest |= later._newest
        self.images |= later.images
        self.waited_seconds += later.waited_seconds
        for name, times in later._actors.items():
            self.actor(name, *times)
        self._levels = dict(later._levels)
        self.is_last |= later.is_last
        self.end(later.counters, self._until + later.seconds)

    def row(self) -> tuple[Row, Histograms]:
        """Returns the row of this interval.

        Returns:
          Scalars; and the numbers of all distributions and histograms, each leaf of a nest by
          itself.
        """
        row = self._scalars()
        # A mean over actors, however many messages each sends: autoscaling depends on it.
        times = [times for times in self._actors.values() if times[0] > 0]
        waits = [min(1.0, waited / elapsed) for elapsed, waited, _ in times]
        # What environments take need not be said.
        paces = [min(1.0, playing / elapsed) for elapsed, _, playing in times if playing > 0]
        for name, shares in (("actor/wait_share", waits), ("actor/environment_share", paces)):
            if shares:
                row[name] = sum(shares) / len(shares)
        for name, spread in self._spreads.items():
            row |= spread.scalars(name)
        for name, sample in self._samples.items():
            row |= {f"{name}/{which}": value for which, value in sample.scalars().items()}
        row |= self._levels
        histograms = {name: sample.values() for name, sample in self._samples.items()}
        histograms |= self._parts()
        return (
            {name: value for name, value in row.items() if _is_finite(value)},
            {name: values for name, values in histograms.items() if values.size},
        )

    def _scalars(self) -> Row:
        elapsed = max(self.seconds, 1e-9)
        base, counters = self._base, self.counters
        return {
            "frames": counters.frames,
            "steps": counters.steps,
            "updates": counters.updates,
            "unrolls": counters.unrolls,
            "seconds": counters.seconds,
            "row_seconds": self.seconds,
            "speed/frames_per_second": (counters.frames - base.frames) / elapsed,
            "speed/steps_per_second": (counters.steps - base.steps) / elapsed,
            "speed/updates_per_second": (counters.updates - base.updates) / elapsed,
            "learner/wait_share": min(1.0, self.waited_seconds / elapsed),
            **{name: total / weight for name, (total, weight) in self._means.items()},
        }

    def _parts(self) -> dict[str, np.ndarray]:
        found = {}
        for path, leaf in tree.flatten_with_path(self._newest):
            name = "/".join(map(str, path))
            parts = leaf.reshape(len(leaf), math.prod(leaf.shape[1:]))
            for i, part in enumerate(parts.T):
                found[f"{name}/{i}" if len(parts.T) > 1 else name] = part
        return found


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of an int
        return False


class Telemetry:
    """Collects numbers in consecutive intervals."""

    def __init__(self, tasks: Sequence[str] = ()):
        """Starts the first interval.

        Args:
          tasks: their names, in the order that rows have them in.
        """

        def none() -> collections.deque[float]:
            return collections.deque(maxlen=_RECENT_EPISODES)

        self._recent = collections.defaultdict(none, {task: none() for task in tasks})
        self._totals = collections.defaultdict[str, float](float, {"learner/wait_seconds": 0.0})
        self._lock = threading.Lock()  # samples come from any thread
        self.interval = Interval(Counters(), time.monotonic())
        """The current interval, for the thread that ends it; other threads call `sample`."""

    def begin(self, counters: Counters) -> None:
        """Sets the base of speeds, before the first update."""
        with self._lock:
            self.interval = Interval(counters, time.monotonic())

    def waited(self, seconds: float) -> None:
        """Adds time in which the learner had no data."""
        self.interval.waited_seconds += seconds
        self._totals["learner/wait_seconds"] += seconds

    def sample(self, name: str, values: np.ndarray | float) -> None:
        """Adds numbers to a distribution. Thread-safe."""
        with self._lock:
            self.interval.sample(name, values)

    def policy_lag(self, lags: np.ndarray, is_replay: np.ndarray) -> None:
        """Adds the lags of one batch's unrolls, in updates: [B]."""
        self.sample("policy_lag", lags[~is_replay])
        self.sample("replay/policy_lag", lags[is_replay])

    def unrolls(self, task: str, count: int, lag: int, dropped: str | None) -> None:
        """Adds what became of unrolls of a task: learned from, or dropped for this reason.

        Args:
          task: that was played.
          count: unrolls.
          lag: of the oldest of them when that was decided, in updates.
          dropped: why they were not learned from; None if they were.
        """
        fate = "learned" if dropped is None else f"dropped/{dropped}"
        self._totals[f"task/{task}/unrolls/{fate}"] += count
        self.interval.mean(f"task/{task}/policy_lag/{fate.partition('/')[0]}", lag, count)

    def lengths(self, task: str, episodes: Sequence[Episode], is_dropped: bool) -> None:
        """Adds episodes that ended in unrolls that were learned from, or in dropped ones."""
        fate = "dropped" if is_dropped else "learned"
        for episode in episodes:
            self.interval.mean(f"task/{task}/episode_length/{fate}", episode.length)

    def rewards(self, task: str, total: float, steps: int) -> None:
        """Adds raw rewards of a task: their sum, and the number of agent steps that gave them."""
        if steps:
            self.interval.mean(f"task/{task}/reward_per_step", total / steps, steps)

    def actor(
        self,
        name: str,
        task: str,
        elapsed: float,
        waited: float,
        pace: tuple[float, int] = (0.0, 0),
    ) -> None:
        """Adds times of an actor that played a task.

        Args:
          name: of the actor.
          task: that it played.
          elapsed: seconds.
          waited: of them, for the learner.
          pace: of them, in environments, and how many steps took these; zeros: not known.
        """
        self._totals[f"task/{task}/wait_seconds"] += waited
        seconds, steps = pace
        self.interval.actor(name, elapsed, waited, seconds)
        if steps:
            self.interval.mean("environment/step_seconds", seconds / steps, steps)

    def episodes(self, task: str, episodes: Sequence[Episode]) -> None:
        """Adds finished episodes of a task."""
        self.interval.episodes(f"episode/{task}", episodes)
        if episodes:
            self._recent[task].extend(episode.episode_return for episode in episodes)
            self._totals[f"episodes/{task}"] += len(episodes)

    def end(self, counters: Counters, gauges: Mapping[str, float]) -> Interval:
        """Ends and returns the interval; the next one begins."""
        with self._lock:
            now, ended = time.monotonic(), self.interval
            self.interval = Interval(counters, now)
        ended.levels({**gauges, **self._totals})
        for task, returns in self._recent.items():
            if returns:
                ended.levels({f"episode/{task}/return_recent": sum(returns) / len(returns)})
        ended.end(counters, now)
        return ended
