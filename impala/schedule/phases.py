"""The phases of a run: which algorithm learns in which part of it."""

import re
from typing import NamedTuple

from impala.config.schema import Config
from impala.parts.components import ALGORITHM, ComponentError, check_name
from impala.schedule import tasks


class Phase(NamedTuple):
    """A part of a run in which one algorithm learns."""

    algorithm: str
    start: int  # environment frames of the run
    end: int
    restarts: tuple[int, ...] = ()
    """Frames between start and end, ascending, at which annealing begins anew."""

    def progress(self, frames: int) -> float:
        """Returns how far quantities are annealed, 0 to 1, after `frames` frames of the run.

        It is the share that is done of the phase, or of its part between two restarts.
        """
        start = max((x for x in self.restarts if x <= frames), default=self.start)
        end = min((x for x in self.restarts if x > frames), default=self.end)
        return min(1.0, max(0, frames - start) / (end - start))


class Word(NamedTuple):
    """A phase as written by the user."""

    text: str
    algorithm: str
    frames: str  # "" if not given


def words(config: Config) -> list[Word]:
    """Returns the phases of a configuration as written; one if it names none."""
    texts = [text for entry in config.phases for text in entry.split(",")]
    return [_word(text) for text in texts] or [Word(config.algorithm, config.algorithm, "")]


def _word(text: str) -> Word:
    name, colon, rest = text.partition(":")
    # MODULE:CLASS:FRAMES; an attribute does not begin with a digit.
    if name not in ALGORITHM.built_in and re.match(r"[^\W\d]", rest):
        attribute, _, frames = rest.partition(":")
        return Word(text, f"{name}{colon}{attribute}", frames)
    return Word(text, name, rest)


def make(config: Config) -> list[Phase]:
    """Returns the phases of a run, in order.

    Raises:
      ValueError: an algorithm is unknown, frames are missing or given for the last phase, none are
        left for it, or annealing is to begin anew in turns that there are not.
    """
    total = tasks.total_frames(config)
    turns = _turns(config)
    of_run = words(config)
    text = " ".join(word.text for word in of_run)
    made: list[Phase] = []
    for i, word in enumerate(of_run):
        try:
            check_name("The algorithm", word.algorithm, ALGORITHM)
        except ComponentError:
            raise ValueError(
                f"phases has {word.text!r}, but there is no algorithm {word.algorithm!r}; there "
                f"are {', '.join(ALGORITHM.built_in)}, and those of your own, as MODULE:CLASS."
            ) from None
        start = made[-1].end if made else 0
        end = total if i == len(of_run) - 1 and not word.frames else start + _frames(word)
        restarts = tuple(frames for frames in turns if start < frames < end)
        made.append(Phase(word.algorithm, start, end, restarts))
    last = made[-1]
    if last.end != total or last.start >= total:
        raise ValueError(
            f"phases is {text} and the run has {total:,} frames: the last phase takes "
            "what the others leave, so give it no number, and leave it some."
        )
    return made


def _turns(config: Config) -> list[int]:
    """Returns the frames at which tasks' turns end, if quantities are annealed anew in each."""
    if not config.tasks.anneal_anew:
        return []
    if config.tasks.order != "sequential":
        raise ValueError(
            "tasks.anneal_anew is set, but tasks.order is simultaneous: tasks have no turns then. "
            "Set one of them otherwise."
        )
    return sorted({block.end for block in tasks.blocks(config)})


def current(phases: list[Phase], frames: int) -> Phase:
    """Returns the phase after `frames` environment frames of the run."""
    return next((phase for phase in phases if frames < phase.end), phases[-1])


def _frames(word: Word) -> int:
    try:
        frames = float(word.frames)
    except ValueError:
        frames = 0.0
    if not frames.is_integer() or frames < 1:
        raise ValueError(
            f"phases has {word.text!r}; every phase but the last is ALGORITHM:FRAMES, as "
            "critic:500000."
        )
    return int(frames)
