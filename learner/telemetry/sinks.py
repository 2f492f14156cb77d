"""The base class of sinks, which write rows of telemetry."""

import abc
import pathlib
from collections.abc import Mapping

import numpy as np

from impala.logdir.rows import Row

Histograms = Mapping[str, np.ndarray]
Images = dict[str, np.ndarray]


class Sink(abc.ABC):
    """Receives the rows of a run, one after another.

    A row maps names to finite numbers. Totals of the run and levels are those at the end of the
    row's interval; all other numbers are a mean or a quantile over it. Every row has "frames",
    "steps", "updates" and "unrolls" (learned from, in the whole run), "seconds" (of training, in
    the whole run), "progress" (share of the run that is done, 0 to 1) and
    "speed/frames_per_second". When known, it also has, for example, "loss/total",
    "gradient_norm", "policy_lag/mean", "episode/TASK/return_recent" (mean return of the last 100
    episodes) and "evaluation/TASK/return".

    All methods are called in one thread beside training: a slow sink delays rows, and rows that
    wait too long are merged, but training is not delayed. A sink named in `telemetry.sinks` gets a
    row every `learner.log_seconds` while the run lasts. If it raises, that is logged once, in a
    line, the sink gets the next row all the same, and the run goes on. `close` is called in any
    case.
    """

    def __init__(self, logdir: pathlib.Path, settings: object = None) -> None:
        """Opens the sink, when the learner starts.

        Args:
          logdir: the run's log directory; a resumed run finds there what it wrote before.
          settings: an instance of the class's nested dataclass `Settings`; None if it has none.
        """
        del logdir, settings

    @abc.abstractmethod
    def write(self, row: Row) -> None:
        """Writes one row, which must not be changed: other sinks receive it too."""

    def write_histograms(self, histograms: Histograms, frames: float) -> None:
        """Writes the numbers behind the last row's quantiles. The default does nothing.

        Args:
          histograms: arrays [N] by name, none of them empty; of very many numbers, a random sample.
          frames: environment frames of that row.
        """
        del histograms, frames

    def write_images(self, images: Images, frames: float) -> None:
        """Writes images of what the agent sees. The default does nothing.

        Args:
          images: uint8 arrays [N, height, width, 1 or 3] by name: the newest observations of an
            environment, in their order.
          frames: environment frames of the row that they belong to.
        """
        del images, frames

    def close(self) -> None:
        """Closes the sink, when the run has ended or failed. The default does nothing."""
        return None


def pass_on(sink: Sink, row: Row, histograms: Histograms, images: Images) -> None:
    """Gives a sink a row with its histograms and images, if there are any."""
    frames = row["frames"]
    sink.write(row)
    if histograms:
        sink.write_histograms(histograms, frames)
    if images:
        sink.write_images(images, frames)
