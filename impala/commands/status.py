"""`impala status`: how a learner's run and its fleet are doing."""

import dataclasses
import sys
import time
from typing import Annotated

from tyro.conf import Positional, arg

from impala.commands.flags import ADDRESS
from impala.config import values
from impala.config.schema import Range
from impala.runtime.credentials import SecurityError
from impala.runtime.security import ClientSecurity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Shows how a learner's run and its fleet are doing."""

    learner: Positional[Annotated[str, arg(metavar="HOST:PORT")]] = ADDRESS
    """The learner's address, or unix:PATH."""
    watch: Annotated[float, Range(0.0)] = 0.0
    """Show it again every so many seconds, until Ctrl-C; 0: once."""
    json: bool = False
    """Print it as JSON, once; counts are strings, as protobuf writes 64-bit integers."""
    security: ClientSecurity = dataclasses.field(default_factory=ClientSecurity)


def status(command: Status) -> int:
    """Prints a table, once or again and again."""
    import rich.console
    import rich.live
    from google.protobuf import json_format

    from actors import status as view
    from actors.channel import StatusClient
    from actors.session import LearnerError

    try:
        with StatusClient(command.learner, command.security) as client:
            if command.json:
                print(
                    json_format.MessageToJson(
                        client.get(),
                        preserving_proto_field_name=True,
                        always_print_fields_with_no_presence=True,
                    )
                )
                return 0
            table = view.render(command.learner, client.get())
            if not command.watch:
                rich.console.Console().print(table)
                return 0
            with rich.live.Live(table, auto_refresh=False, screen=True) as live:
                while True:
                    time.sleep(command.watch)
                    live.update(view.render(command.learner, client.get()), refresh=True)
    except SecurityError as error:
        raise values.OptionError(str(error)) from error
    except LearnerError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
