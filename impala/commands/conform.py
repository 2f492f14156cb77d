"""`impala conform`: puts an actor, or a learner, through the cases of the wire protocol."""

import asyncio
import dataclasses
import logging
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from impala.commands.flags import plainly
from impala.config import values
from impala.config.schema import Range
from impala.runtime import listen
from impala.runtime.security import ClientSecurity
from impala.runtime.signals import EndRequest

if TYPE_CHECKING:
    from impala.conform.cases import Kit
    from impala.conform.report import Report

_LOOK_SECONDS = 0.05  # between looks whether a signal has come


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conform:
    """Puts an actor, or a learner, through every case of the wire protocol.

    Ends with a table of the sentences of docs/wire-protocol.md that were kept and that were not.
    The exit status is 0 if none was broken.
    """

    learner: str = ""
    """HOST:PORT or unix:PATH of a learner, to which to be an actor that sends every bad message.
    Use one that was started for it: what it accepts, it learns from."""
    security: ClientSecurity = dataclasses.field(default_factory=ClientSecurity)
    listen: str = ""
    """HOST:PORT (port 0: any free one) or unix:PATH, where to be a learner that learns nothing."""
    preset: Literal["catch", "pendulum"] = "catch"
    """What the actor is to play."""
    actor: str = ""
    """Command that starts the actor; {address} in it stands for the address of the kit. It is
    started again when it has ended. Empty: you start it."""
    seconds: Annotated[float, Range(0.1)] = 20.0
    """The most that the other side may take for one thing that it has to do."""


def conform(command: Conform) -> int:
    """Runs the kit and prints what it found."""
    if bool(command.listen) == bool(command.learner):
        raise values.OptionError(
            "Give --listen ADDRESS to try an actor, or --learner ADDRESS to try a learner."
        )
    if command.learner:
        return _try_learner(command)
    if listen.socket_path(command.listen) is None:
        with plainly():
            listen.parse("The kit", command.listen)
    try:
        words = shlex.split(command.actor)
    except ValueError as error:
        raise values.OptionError(f"--actor is {command.actor!r}: {error}.") from None
    if words and shutil.which(words[0]) is None:
        raise values.OptionError(f"--actor is {command.actor!r}: there is no program {words[0]!r}.")
    from impala.conform.cases import Kit

    logging.getLogger("learner").setLevel(logging.ERROR)  # the table has what it would warn of
    with EndRequest() as request:
        try:
            with plainly():
                kit = Kit(command.preset, command.seconds, command.actor, _say)
                return _told(asyncio.run(_run(kit, command.listen, request)))
        except asyncio.CancelledError:
            assert request.received is not None
            return 128 + request.received


async def _run(kit: "Kit", listen: str, request: EndRequest) -> "Report":
    """Runs the kit, which a signal cancels: it ends its actor first."""
    running = asyncio.create_task(kit.run(listen))
    while not request.is_set() and not running.done():
        await asyncio.wait([running], timeout=_LOOK_SECONDS)
    running.cancel()
    return await running


def _try_learner(command: Conform) -> int:
    with plainly():
        command.security.check()
        listen.check_dialled(command.learner)
    from impala.conform.learner_cases import LearnerKit

    try:
        with plainly():
            kit = LearnerKit(command.learner, command.security, command.seconds, _say)
        return _told(kit.run())
    except KeyboardInterrupt:
        return 130


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _told(report: "Report") -> int:
    print(report.text())
    return 0 if report.is_good else 1
