"""Custom sinks: makes those that the configuration names."""

import contextlib
import pathlib

from impala.config import values
from impala.config.schema import Config
from impala.parts import build, sections
from impala.parts.components import SINK, described
from learner.telemetry.sinks import Sink


def make(config: Config, logdir: pathlib.Path) -> list[Sink]:
    """Returns the sinks in `telemetry.sinks`, opened.

    Args:
      config: the run's configuration, composed with the parts that it names.
      logdir: the run's log directory.

    Raises:
      OptionError: the constructor of a sink raises.
    """
    own = sections.found(config)
    made: list[Sink] = []
    for name in config.telemetry.sinks:
        component, settings = build.part(SINK, name, None, own)
        try:
            made.append(component(logdir, settings))
        except Exception as error:
            for sink in made:
                with contextlib.suppress(Exception):  # the first error counts
                    sink.close()
            raise values.OptionError(
                f"The sink {name} cannot be opened: {described(error)}."
            ) from error
    return made
