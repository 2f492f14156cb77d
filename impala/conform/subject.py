"""The actor that is put through the cases: its process, and what is waited for."""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from impala.conform.learner import Learner
from impala.runtime.tether import tethered
from protos.impala.v1 import learner_pb2 as pb

POLL_SECONDS = 0.01
_RESTART_SECONDS = 1.0  # before an actor that has ended is started again
_SESSION_SECONDS = 0.6  # so long that the backoff begins anew


class Failed(Exception):
    """The actor did not do what a case requires; the message says what it did."""


class Before:
    """What had been heard before something happened.

    Args:
      learner: that hears.
      message: the newest, or the one that it happened to.
    """

    def __init__(self, learner: Learner, message: pb.Unrolls) -> None:
        self.message = message
        self.stream = learner.streams
        self.joins = len(learner.joins)
        self.messages = len(learner.messages)
        self.pulls = learner.pulls
        self.acknowledged = learner.delivered


class Subject:
    """An actor that plays for the kit's learner.

    Args:
      learner: that it plays for.
      seconds: that it may take for each thing that it has to do.
      command: starts it; {address} in it stands for the learner's. Empty: somebody else does.
    """

    def __init__(self, learner: Learner, seconds: float, command: str) -> None:
        self._learner, self._seconds, self._command = learner, seconds, command
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        """Address of the learner."""

    def start(self) -> None:
        """Starts its process, if it is the kit's to start."""
        if words := shlex.split(self._command.replace("{address}", self.address)):
            self._learner.actor = ""  # whose name may be another one now
            self._process = subprocess.Popen(  # with what it starts itself
                tethered(words),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                start_new_session=True,
            )

    def end(self) -> None:
        """Ends its process at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def is_ours(self) -> bool:
        """Whether the kit has started it."""
        return self._process is not None

    def check(self, what: str) -> None:
        """Raises Failed if it has ended, and so cannot do something."""
        if self._process is not None and (status := self._process.poll()) is not None:
            raise Failed(f"the actor ended with status {status}, and did not {what}")

    async def until(
        self,
        what: str,
        condition: Callable[[], Any],
        seconds: float | None = None,
        restart: bool = False,
    ) -> None:
        """Waits for something that the actor has to do. Raises Failed if it does not in time."""
        seconds = seconds or self._seconds
        end = time.monotonic() + seconds
        while not condition():
            if restart and self._process is not None and self._process.poll() is not None:
                await asyncio.sleep(_RESTART_SECONDS)
                self.start()
            self.check(what)
            if time.monotonic() > end:
                raise Failed(f"within {seconds:g} s, the actor did not {what}")
            await asyncio.sleep(POLL_SECONDS)

    async def plays_on(self) -> None:
        """Waits for a message after a case that failed; the actor is started again if it ended."""
        learner = self._learner
        if learner.version < 0:
            learner.publish(0)
        heard = len(learner.messages)
        what = "play on after a case that failed"
        await self.until(what, lambda: len(learner.messages) > heard, 2 * self._seconds, True)

    async def playing(self) -> None:
        """Waits until the actor is in its loop, in a session so long that backoff begins anew."""
        learner = self._learner
        heard = len(learner.messages)
        await self.until("send messages", lambda: len(learner.messages) >= heard + 2)
        await self.until(
            f"go on for {_SESSION_SECONDS:g} s without joining again",
            lambda: time.monotonic() >= learner.joins[-1][0] + _SESSION_SECONDS,
        )

    async def sends(self) -> None:
        """Waits for a message that has no receipt; none is read from now on."""
        await self.playing()
        self._learner.room.clear()
        await self.until("send a message", lambda: self._learner.unanswered)

    async def acts_with_newest(self) -> None:
        """Waits for a message that was acted with the newest parameters."""
        learner = self._learner
        newest = learner.incarnation, learner.version

        def acts() -> bool:
            message = learner.messages[-1].message
            return (message.learner_incarnation, message.parameter_version) == newest

        await self.until(f"act with version {newest[1]}, which is the newest", acts)

    async def break_stream(self) -> Before:
        """Breaks the streams. Returns what was before that."""
        before = Before(self._learner, self._learner.messages[-1].message)
        await self._learner.break_streams()
        return before

    async def joins_again(self, joins: int) -> int:
        """Waits for another Join than the first ones. Returns the number that it acknowledges."""
        learner = self._learner
        await self.until("join again", lambda: len(learner.joins) > joins)
        request = learner.joins[-1][1]
        if request.incarnation != learner.messages[-1].message.incarnation:
            raise Failed("it joins again with another incarnation")
        number = request.acknowledged_sequence
        if (receipt := learner.acknowledged.get(number)) is None:
            raise Failed(f"its Join acknowledges message {number}, which had no receipt")
        claim = request.acknowledged_unrolls, bytes(request.proof)
        if claim != (receipt.acknowledged_unrolls, receipt.proof):
            raise Failed(
                f"its Join says that {claim[0]} unrolls were accepted up to message {number}, the "
                f"receipt said {receipt.acknowledged_unrolls}; or it has another proof"
            )
        return number

    async def comes_back(self, before: Before) -> None:
        """Waits for the Join and the messages after a break, and compares them."""
        learner = self._learner
        acknowledged = await self.joins_again(before.joins)
        if acknowledged < before.acknowledged:
            raise Failed(
                f"its Join acknowledges message {acknowledged}, the last receipt was for message "
                f"{before.acknowledged}"
            )
        await self.until(
            "send messages in a new stream", lambda: learner.messages[-1].stream > before.stream
        )
        first = next(
            heard.message.sequence for heard in learner.messages if heard.stream > before.stream
        )
        if first != acknowledged + 1:
            raise Failed(
                f"the first message of its new stream is {first}, it acknowledges {acknowledged}"
            )
        await self.goes_on(before.message.sequence + 1)

    async def goes_on(self, number: int) -> None:
        """Waits for a message of at least this number."""
        what = f"go on to message {number}"
        await self.until(what, lambda: self._learner.messages[-1].message.sequence >= number)

    async def refuse(
        self, receipt: Callable[[pb.Unrolls], pb.Receipt], until_joined: bool = False
    ) -> Before:
        """Refuses the next message, or all until the next Join. Returns what was before that."""
        learner = self._learner
        await self.playing()
        refused: list[Before] = []

        def refuse(message: pb.Unrolls) -> pb.Receipt | None:
            if refused and (not until_joined or len(learner.joins) > refused[0].joins):
                return None
            refused.append(Before(learner, message))
            return receipt(message)

        learner.refuse = refuse
        await self.until("send a message", lambda: refused)
        return refused[0]

    async def ends(self, status: int | None) -> None:
        """Waits for the end of the process: with a status, or with an error."""
        process = self._process
        assert process is not None
        end = time.monotonic() + self._seconds
        while process.poll() is None:
            if time.monotonic() > end:
                raise Failed(f"its process does not end within {self._seconds:g} s")
            await asyncio.sleep(POLL_SECONDS)
        if process.returncode != status and (status is not None or not process.returncode):
            wanted = "an error" if status is None else status
            raise Failed(f"its process ends with status {process.returncode}, not {wanted}")
