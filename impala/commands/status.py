"""`impala status`: shows the state of a learner's run and its fleet."""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from impala.commands.flags import ADDRESS, plainly
from impala.config import values
from impala.config.schema import Range
from impala.runtime import listen
from impala.runtime.credentials import SecurityError
from impala.runtime.security import ClientSecurity

if TYPE_CHECKING:
    import rich.console

    from protos.impala.v1 import learner_pb2 as pb


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Shows the state of a learner's run and its fleet."""

    learner: Positional[Annotated[str, arg(metavar="HOST:PORT|LOGDIR")]] = ADDRESS
    """Learner's address, HOST:PORT or unix:PATH; or its log directory on this host."""
    watch: Annotated[float, Range(0.0, 86_400.0)] = 0.0
    """Seconds between repetitions until Ctrl-C, also while the learner is away; 0: show it once."""
    json: bool = False
    """Print it once as JSON; counts are strings, as protobuf writes 64-bit integers."""
    security: ClientSecurity = dataclasses.field(default_factory=ClientSecurity)


def _address(learner: str) -> str:
    """Returns the address that a learner has written to its log directory; or what was given.

    Raises:
      OptionError: it cannot be read.
    """
    if not (directory := pathlib.Path(learner)).is_dir():
        return learner
    file = directory / "address"
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        raise values.OptionError(
            f"There is no {file}, which a learner writes while it serves that log directory: name "
            "that of a run that is under way, or HOST:PORT."
        ) from None
    except OSError as error:
        raise values.OptionError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise values.OptionError(f"{file} is no address that a learner has written.") from error


def status(command: Status) -> int:
    """Prints a table, once or repeatedly."""
    with plainly():
        listen.check_dialled(_address(command.learner))
    import rich.console
    import rich.live
    from google.protobuf import json_format

    from actors.channel import StatusClient
    from actors.session import LearnerError

    def get() -> "pb.RunStatus":
        try:
            address = _address(command.learner)  # another one, once the learner is back
        except values.OptionError as error:
            raise LearnerError(str(error)) from None
        with StatusClient(address, command.security) as client:
            return client.get()

    try:
        if command.json:
            print(
                json_format.MessageToJson(
                    get(),
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                )
            )
            return 0
        tables = watch(command.learner, get)
        if not command.watch:
            rich.console.Console().print(next(tables))
            return 0
        with rich.live.Live(next(tables), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(command.watch)
                live.update(next(tables), refresh=True)
    except SecurityError as error:
        raise values.OptionError(str(error)) from error
    except LearnerError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def watch(learner: str, get: "Callable[[], pb.RunStatus]") -> "Iterator[rich.console.Group]":
    """Yields tables of a learner's status; while it is away, of the last one.

    Args:
      learner: its address or log directory.
      get: returns its status; raises LearnerError without an answer.

    Yields:
      A table of the current status, whenever asked.

    Raises:
      LearnerRefused: it refuses to answer.
      LearnerError: it did not answer the first time.
    """
    import rich.console
    import rich.text

    from actors import status as view
    from actors.session import LearnerError, LearnerRefused

    last, answered = get(), time.monotonic()
    note = ""
    while True:
        table = view.render(learner, last)
        yield rich.console.Group(rich.text.Text(note, style="bold"), table) if note else table
        try:
            last, answered, note = get(), time.monotonic(), ""
        except LearnerRefused:
            raise
        except LearnerError as error:
            note = f"No answer for {time.monotonic() - answered:.0f} s: {error}"
