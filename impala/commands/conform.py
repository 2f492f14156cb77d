"""`impala conform`: puts an actor through the cases of the wire protocol."""

import asyncio
import dataclasses
import logging
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from impala.commands.flags import plainly
from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import Range
from impala.runtime import listen
from impala.runtime.signals import EndRequest

if TYPE_CHECKING:
    from impala.conform.cases import Kit, Row

_LOOK_SECONDS = 0.05  # between looks whether a signal has come


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conform:
    """Puts an actor through every case of the wire protocol, with a learner that learns nothing.

    Ends with a table of the cases that it passed and failed.
    The exit status is 1 if it failed one.
    """

    listen: str
    """Address of that learner: HOST:PORT (port 0: any free one) or unix:PATH."""
    preset: Literal["catch", "pendulum"] = "catch"
    """What the actor is to play."""
    actor: str = ""
    """Command that starts the actor; {address} in it stands for the address of the learner. It is
    started again when it has ended. Empty: you start it."""
    seconds: Annotated[float, Range(0.1)] = 20.0
    """Time limit in seconds of each thing that a case waits for; twice as much where the actor has
    to start."""


def conform(command: Conform) -> int:
    """Runs the cases and prints their results."""
    if listen.socket_path(command.listen) is None:
        with plainly():
            listen.parse("The kit", command.listen)
    try:
        words = shlex.split(command.actor)
    except ValueError as error:
        raise values.OptionError(f"--actor is {command.actor!r}: {error}.") from None
    if words and shutil.which(words[0]) is None:
        raise values.OptionError(f"--actor is {command.actor!r}: there is no program {words[0]!r}.")
    from impala.conform.cases import Kit, table

    logging.getLogger("learner").setLevel(logging.ERROR)  # the table has what it would warn of
    with EndRequest() as request:
        try:
            with plainly():
                config = PRESETS[command.preset][1]
                kit = Kit(config, command.seconds, command.actor, _say)
                rows = asyncio.run(_run(kit, command.listen, request))
        except asyncio.CancelledError:
            assert request.received is not None
            return 128 + request.received
    print(*table(rows), sep="\n")
    return int(any(row.result == "FAILED" for row in rows))


async def _run(kit: "Kit", listen: str, request: EndRequest) -> "list[Row]":
    """Runs the kit, which a signal cancels: it ends its actor first."""
    running = asyncio.create_task(kit.run(listen))
    while not request.is_set() and not running.done():
        await asyncio.wait([running], timeout=_LOOK_SECONDS)
    running.cancel()
    return await running


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
