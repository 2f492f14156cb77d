"""Custom sinks: a failing one is dropped, and the run goes on."""

import copy
import logging
import pathlib
from collections.abc import Callable

from impala.config import values
from impala.config.schema import Config
from impala.logdir.rows import Row
from impala.parts import build, sections
from impala.parts.components import SINK, described
from learner.telemetry.sinks import Histograms, Images, Sink, pass_on

_log = logging.getLogger(__name__)


class CustomSink:
    """A sink from outside this package, used until it raises an error."""

    def __init__(self, name: str, sink: Sink):
        """Wraps a sink.

        Args:
          name: its name in the configuration, for the log.
          sink: the sink.
        """
        self._name = name
        self._sink = sink
        self.is_dropped = False
        """Whether it has raised an error, and gets no more rows."""

    def take(self, row: Row, histograms: Histograms, images: Images) -> None:
        """Passes on copies, which the sink may change."""
        copies = copy.deepcopy((row, histograms, images))
        self._unless_dropped(lambda: pass_on(self._sink, *copies))

    def close(self) -> None:
        """Closes the sink, unless it has raised."""
        self._unless_dropped(self._sink.close)

    def _unless_dropped(self, do: Callable[[], None]) -> None:
        if self.is_dropped:
            return
        try:
            do()
        except BaseException as error:  # including SystemExit, which would end the thread
            self.is_dropped = True
            _log.exception(
                "The sink %s raised %s and gets nothing more; the run goes on.",
                *(self._name, type(error).__name__),
            )


def make(config: Config, logdir: pathlib.Path) -> list[CustomSink]:
    """Returns the sinks in `telemetry.sinks`, opened.

    Args:
      config: the run's configuration, composed with the parts that it names.
      logdir: the run's log directory.

    Raises:
      OptionError: the constructor of a sink raises.
    """
    own = sections.found(config)
    made = []
    for name in config.telemetry.sinks:
        component, settings = build.part(SINK, name, None, own)
        try:
            sink = component(logdir, settings)
        except Exception as error:
            raise values.OptionError(
                f"The sink {name} cannot be opened: {described(error)}."
            ) from error
        made.append(CustomSink(name, sink))
    return made
