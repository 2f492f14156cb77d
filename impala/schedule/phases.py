"""The phases of a run: which algorithm learns, and from when to when."""

import typing
from typing import NamedTuple

from impala.config.schema import AlgorithmName, Config
from impala.schedule import tasks


class Phase(NamedTuple):
    """A stretch of a run in which one algorithm learns. What is annealed is annealed over it."""

    algorithm: AlgorithmName
    start: int  # environment frames of the run
    end: int

    def progress(self, frames: int) -> float:
        """Share of the phase done, 0 to 1, when the run has learned from so many frames."""
        return min(1.0, max(0, frames - self.start) / (self.end - self.start))


def make(config: Config) -> list[Phase]:
    """The phases of a run, one behind the other.

    Raises:
      ValueError: if an algorithm is unknown, frames are missing or stand behind the last phase, or
        nothing is left for it.
    """
    total = tasks.total_frames(config)
    words = [word for entry in config.phases for word in entry.split(",")] or [config.algorithm]
    made: list[Phase] = []
    for i, word in enumerate(words):
        name, _, frames = word.partition(":")
        if name not in (known := typing.get_args(AlgorithmName)):
            raise ValueError(
                f"phases has {word!r}, but there is no algorithm {name!r}; there are "
                f"{', '.join(known)}."
            )
        start = made[-1].end if made else 0
        end = total if i == len(words) - 1 and not frames else start + _frames(word, frames)
        made.append(Phase(typing.cast(AlgorithmName, name), start, end))
    last = made[-1]
    if last.end != total or last.start >= total:
        raise ValueError(
            f"phases is {' '.join(words)} and the run has {total:,} frames: the last phase takes "
            "what the others leave, so give it no number, and leave it some."
        )
    return made


def current(phases: list[Phase], frames: int) -> Phase:
    """The phase of a run that has learned from so many environment frames."""
    return next((phase for phase in phases if frames < phase.end), phases[-1])


def _frames(word: str, text: str) -> int:
    try:
        frames = float(text)
    except ValueError:
        frames = 0.0
    if not frames.is_integer() or frames < 1:
        raise ValueError(
            f"phases has {word!r}; every phase but the last is ALGORITHM:FRAMES, as critic:500000."
        )
    return int(frames)
