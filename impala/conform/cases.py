"""The cases that an actor is put through, and the sentences of the page that they are about."""

import asyncio
import contextlib
import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import grpc

from impala.conform import golden
from impala.conform.learner import Judged, Learner, Refusal, serving, shorter
from impala.conform.report import Failed, Report
from learner.checks.mistakes import Kind, Mistake
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_POLL_SECONDS = 0.01
_RESTART_SECONDS = 1.0  # before an actor that has ended is started again
_QUIET_SECONDS = 1.0  # for which an actor that should send nothing is watched
_ENOUGH = {
    "messages": 40,
    "rows": 4000,
    "episodes": 20,
    "recomputed": 10,
}  # to look for mistakes in
_REFUSED_JOINS = 3
# A session so long begins the backoff anew; after Joins that failed, it has to be longer.
_SESSION_SECONDS, _LONG_SESSION_SECONDS = 0.6, 2.0

JOIN, STREAM, PARAMETERS = "Joining", "Messages and numbers", "Parameters"
MISTAKES, REFUSALS, UNKNOWN = "Mistakes", "Refusals", "A learner that does not know the actor"
PRESSURE, BROKEN, LOST = "Back-pressure", "A broken stream", "Receipts that get lost"
BACKOFF, RESTART, NEW_RUN = "Calls that fail", "A learner that comes back", "Another run"
FINISH, MAJOR, NEEDS = "The end of training", "Another major version", "A setting of tomorrow"

_NUMBERED = "The messages of an incarnation are numbered 1, 2, 3, ..."
_UNCHANGED = "A retry repeats the number and the contents."
_IN_FLIGHT = (
    "An actor has at most `max_unrolls_in_flight` **messages** without a receipt, and stands still "
    "when it has that many."
)
_OWN_WEIGHTS = "Parameters always come from the learner: never act with weights of your own."
_VALID = "A tensor is a `bytes` field with nothing but values:"
_ONE_STREAM = "Keep one stream open at a time;"
# What an actor does with a message that was refused: by the reason, the row of the page.
_FORGETS = {
    "REASON_NUM_ENVS": "forgets it, and sends smaller messages",
    "REASON_TENSOR_COUNT": "forgets it",
    "REASON_TENSOR_SIZE": "forgets it",
    "REASON_NOT_FINITE": "forgets it",
    "REASON_RANGE": "forgets it",
    "REASON_MEANING": "forgets it; its program has to be mended",
}
_JOINS = {
    "REASON_FINGERPRINT": "forgets it, and `Join`s for the new ones",
    "REASON_SEQUENCE": "forgets it; after a `Join` with its `acknowledged_sequence` the numbers "
    "agree again",
}
_PULLS = "forgets it, and pulls parameters"
_QUARANTINED = (
    "the actor is quarantined, or its host has joined too often; the message says which, and for "
    "how long | tries again, with backoff, and keeps what has no receipt"
)
SENTENCE_OF = {
    Kind.SHIFTED_ACTIONS: "Row t holds the time step that the environment gave at t and the agent "
    "output that **led to it**",
    Kind.BYTE_ORDER: "C order (the last axis varies fastest), **little endian**, IEEE 754 floats",
    Kind.BEHAVIOUR_POLICY: "`output/policy` holds the parameters that the action was drawn from",
    Kind.IMPOSSIBLE_ACTION: "a choice that is masked, or has no probability by `output/policy`; a "
    "number more than ten deviations from its mean",
    Kind.ROW_0: "**Row 0** is row T of the same environment's unroll before, bit for bit.",
    Kind.SEAM: "a FIRST row with reward 0 and discount 1",
    Kind.SEAM_FRAMES: "`Unrolls.frames[i]` counts the environment frames (action repeats included) "
    "that environment i played in rows 1..T, without seams",
    Kind.MISSING_FRAMES: "at least 1 for each row that is not a seam",
    Kind.EPISODES: "Every episode whose LAST row is among rows 1..T is reported once, in "
    "`episodes`",
    Kind.EPISODE_RETURN: "the sum of its raw rewards, its agent steps, its frames",
    Kind.OBSERVATION: "as the environment gave it: single frames, never floats made of bytes",
    Kind.VERSION: "**Rows 1..T** are acted by one version of the parameters, the message's "
    "`learner_incarnation` and `parameter_version`.",
}
SENTENCES: Mapping[str, tuple[str, ...]] = {
    JOIN: (
        "An **incarnation** is a random 64-bit number, not 0, drawn when the actor process starts.",
        "All are 0 or empty at the first `Join`.",
        "`GetParameters` until there are some.",
        _OWN_WEIGHTS,
    ),
    STREAM: (_VALID, _NUMBERED, _UNCHANGED, _ONE_STREAM),
    MISTAKES: tuple(SENTENCE_OF.values()),
    PARAMETERS: (
        "The same incarnation and a higher `newest_version` in a receipt: there is something to "
        "pull.",
    ),
    PRESSURE: (_IN_FLIGHT,),
    BROKEN: (
        "`Join` again, with the same name and incarnation, then open a new stream and send again, "
        "in order and unchanged, every message that has no receipt.",
        "`acknowledged_unrolls` and `proof` are copied from that receipt",
    ),
    LOST: ("seen this number before: the receipt was lost on its way | forgets the message",),
    REFUSALS: (
        "the actor forgets the message, never sends it again, and goes on with the next number",
        *dict.fromkeys([*_FORGETS.values(), *_JOINS.values()]),
        _PULLS,
        "An unknown status or reason, from a newer minor version, is treated as a rejection.",
    ),
    UNKNOWN: ("ends the stream, `Join`s, **sends the message again** under the same number",),
    BACKOFF: (
        _QUARANTINED,
        "no learner there, or it is stopping | tries again, with backoff",
        "0.1 s, doubled up to 10 s, each time multiplied by a random 0.5 to 1",
    ),
    RESTART: (
        "Another incarnation than the one held, in any reply or receipt: pull, whatever the "
        "version.",
    ),
    NEW_RUN: (
        "what has no receipt is worthless to it, so forget it, and build environments and agent "
        "anew from the new reply (or exit and be started again)",
    ),
    FINISH: (
        "An actor stops at the first of these signs, or waits for the next run by joining every "
        "few seconds with a new incarnation.",
    ),
    MAJOR: (
        "another major protocol version, or a newer process has joined under this name; the "
        "message says which | gives up",
    ),
    NEEDS: ("An actor that does not know one of them must give up rather than guess.",),
}


class Kit:
    """Puts one actor through all cases, in an order in which each begins with an actor that plays.

    Args:
      preset: what is played, one of the golden runs.
      seconds: that the actor may take for each thing that it has to do.
      command: starts the actor; {address} in it stands for the kit's. Empty: somebody else does.
      say: is called with lines for people.
    """

    def __init__(
        self, preset: str, seconds: float, command: str, say: Callable[[str], None]
    ) -> None:
        self.report = Report(SENTENCES)
        self._run = golden.run(preset)
        self._seconds = seconds
        self._command = command
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._learner = Learner(self._run, self._mistaken)
        self._address = ""

    async def run(self, listen: str, only: Collection[str] = tuple(SENTENCES)) -> Report:
        """Serves on an address until all cases, or only some of them, are over.

        Raises:
          OSError: the address cannot be bound.
        """
        cases: Mapping[str, Callable[[], Awaitable[None]]] = {
            JOIN: self._joins,
            MISTAKES: self._plays,
            PARAMETERS: self._takes_newer,
            PRESSURE: self._stands_still,
            BROKEN: self._stream_breaks,
            LOST: self._receipts_get_lost,
            UNKNOWN: self._is_unknown,
            REFUSALS: self._is_refused,
            BACKOFF: self._calls_fail,
            RESTART: self._learner_comes_back,
            NEW_RUN: self._another_run,
            FINISH: self._training_ends,
            MAJOR: self._another_major_version,
            NEEDS: self._setting_of_tomorrow,
        }
        try:
            async with serving(self._learner, listen) as self._address:
                self._say(f"Listening on {self._address}, for an actor that plays {self._played}.")
                self._start_actor()
                for case, put_through in cases.items():
                    if case not in only:
                        continue
                    self._say(f"{case} ...")
                    try:
                        if self._process is None and case in (MAJOR, NEEDS):
                            self.report.done(case, "only an actor that the kit starts: --actor")
                            continue
                        await put_through()
                    except Failed as failed:
                        self.report.failed(case, str(failed))
                        if case == JOIN and not self._learner.joins:
                            break  # nobody is there
                    finally:
                        self._learner.usual()
                    self.report.done(case)
                self._sum_up()
        finally:
            self._end_actor()
        return self.report

    @property
    def _played(self) -> str:
        return ", ".join(task.name for task in self._run.reply.settings.tasks)

    # The cases.

    async def _joins(self) -> None:
        learner = self._learner
        await self._until("join", lambda: learner.joins, 2 * self._seconds)
        request = learner.joins[0][1]
        claims = (request.acknowledged_sequence, request.acknowledged_unrolls, request.proof)
        if claims != (0, 0, b""):
            detail = f"the first Join acknowledges {claims}"
            self.report.failed(JOIN, detail, "All are 0 or empty at the first `Join`.")
        await self._until("ask for parameters", lambda: learner.pulls)
        asked = learner.pulls
        await asyncio.sleep(_QUIET_SECONDS)
        if learner.messages:
            self.report.failed(JOIN, "it sends unrolls before it can have parameters", _OWN_WEIGHTS)
        await self._until(
            "ask again for parameters, as there were none", lambda: learner.pulls > asked
        )
        learner.publish(0)
        learner.publish()
        await self._until("send a message", lambda: learner.messages)
        learner.usual()

    async def _plays(self) -> None:
        """Plays for a while, with several versions."""
        learner = self._learner

        def seen() -> dict[str, int]:
            return {
                "messages": len(learner.messages),
                "rows": learner.rows,
                "episodes": learner.episodes,
                "recomputed": learner.recomputed,
            }

        end, told = time.monotonic() + 2 * self._seconds, 0
        while any(seen()[name] < least for name, least in _ENOUGH.items()):
            if len(learner.messages) >= told + 8:
                told = len(learner.messages)
                learner.publish()
            if learner.refused or not self.report.is_good or time.monotonic() > end:
                break
            await asyncio.sleep(_POLL_SECONDS)
        if time.monotonic() > end:
            raise Failed(f"it played too little to be judged: {seen()} of {_ENOUGH}")

    async def _takes_newer(self) -> None:
        await self._playing()
        self._learner.publish()
        await self._acts_with_newest()

    async def _stands_still(self) -> None:
        learner, most = self._learner, self._run.reply.max_unrolls_in_flight
        await self._playing()
        learner.room.clear()
        await self._until(f"send {most} messages", lambda: learner.unanswered >= most)
        await asyncio.sleep(_QUIET_SECONDS)
        if learner.unanswered > most:
            raise Failed(f"it has sent {learner.unanswered} messages without a receipt")

    async def _stream_breaks(self) -> None:
        """Breaks the stream while messages wait, which the learner has not read."""
        learner = self._learner
        await self._playing()
        learner.room.clear()
        await self._until("send a message", lambda: learner.unanswered)
        await self._comes_back(await self._break())

    async def _receipts_get_lost(self) -> None:
        learner = self._learner
        await self._playing()
        learner.receipts.clear()
        await self._until("send a message", lambda: learner.unanswered)
        await asyncio.sleep(10 * _POLL_SECONDS)  # the service has judged it
        await self._comes_back(await self._break())

    async def _is_unknown(self) -> None:
        """Knows nothing of the actor until it joins again."""
        learner = self._learner
        await self._playing()
        joins = len(learner.joins)
        refused: list[_Before] = []

        async def answer(message: pb.Unrolls, judged: Judged) -> pb.Receipt:
            if len(learner.joins) > joins:
                return await judged()
            refused.append(_Before(learner, message))
            return pb.Receipt(
                sequence=message.sequence,
                status=pb.STATUS_REJECTED,
                reason=pb.REASON_UNKNOWN_ACTOR,
                learner_incarnation=learner.incarnation,
                newest_version=learner.version,
            )

        learner.answer = answer
        await self._until("send a message", lambda: refused)
        await self._comes_back(refused[0])

    async def _is_refused(self) -> None:
        learner = self._learner
        general = SENTENCES[REFUSALS][0]
        said = {**_FORGETS, **_JOINS, "REASON_VERSION": _PULLS, "": SENTENCES[REFUSALS][-1]}
        for name, sentence in said.items():

            def receipt(message: pb.Unrolls, name: str = name) -> pb.Receipt:
                made = learner.used_up(message)
                if name:
                    made.MergeFrom(pb.Receipt(reason=name))
                else:  # of tomorrow
                    made.MergeFrom(pb.Receipt.FromString(b"\x10\x4d\x18\x4d"))
                return made

            try:
                refused = await self._refuse_next(receipt)
                if name in _JOINS:
                    await self._joins_again(refused.joins)
                if name == "REASON_VERSION":
                    await self._until("pull", functools.partial(self._has_pulled, refused.pulls))
                number = refused.message.sequence
                await self._until(
                    f"send message {number + 2} after one that was refused",
                    functools.partial(self._has_come_to, number + 2),
                )
                later = [heard.message.sequence for heard in learner.messages[refused.messages :]]
                if number in later:
                    raise Failed(f"it sends message {number} again, which was refused")
            except Failed as failed:
                detail = f"{name or 'an unknown reason'}: {failed}"
                self.report.failed(REFUSALS, detail, sentence)
                self.report.failed(REFUSALS, detail, general)

    async def _calls_fail(self) -> None:
        learner = self._learner
        for status in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
            await self._playing()
            left = _REFUSED_JOINS

            def refuse(request: pb.JoinRequest, status: grpc.StatusCode = status) -> None:
                nonlocal left
                if left:
                    left -= 1
                    raise Refusal(status, "The kit refuses this, to see what follows.")

            learner.on_join = refuse
            began = len(learner.joins)
            learner.room.clear()
            await self._until("send a message", lambda: learner.unanswered)
            before = await self._break()
            most = began + _REFUSED_JOINS
            await self._until("keep on joining", functools.partial(self._has_joined, most))
            times = [at for at, _ in learner.joins[began:]]
            took = times[_REFUSED_JOINS] - times[0]
            fastest = 0.5 * sum(0.1 * 2**i for i in range(_REFUSED_JOINS))
            if took < fastest:
                raise Failed(
                    f"after {_REFUSED_JOINS} Joins that failed it had waited {took:.2f} s; with "
                    f"backoff it is {fastest:.2f} s at least"
                )
            await self._comes_back(before)
            await self._playing(_LONG_SESSION_SECONDS)

    async def _learner_comes_back(self) -> None:
        """As after a crash: another incarnation, and a version from long before."""
        learner = self._learner
        await self._playing()
        learner.room.clear()
        await self._until("send a message", lambda: learner.unanswered)
        for _ in range(5):
            learner.publish()
        before = await self._break()
        learner.restart()
        learner.publish(1)
        await self._comes_back(before)
        await self._acts_with_newest()

    async def _another_run(self) -> None:
        learner = self._learner
        await self._playing()
        learner.room.clear()
        await self._until("send a message", lambda: learner.unanswered)
        await self._break()
        joins, heard = len(learner.joins), len(learner.messages)
        learner.begin(shorter(self._run))
        learner.publish(0)
        learner.publish()
        self._say("(The actor may end now: then start it again, unless the kit has started it.)")
        await self._until(
            "join the new run", lambda: len(learner.joins) > joins, 2 * self._seconds, restart=True
        )
        await self._until(
            "send a message of the new run",
            lambda: len(learner.messages) > heard,
            2 * self._seconds,
            restart=True,
        )
        if learner.refused:
            return  # named below
        message = learner.messages[heard].message
        reply = learner.reply
        specs = codec.with_environments(
            reply.unroll_specs, reply.num_core_state_specs, message.num_envs
        )
        arrays = dict(
            zip(
                (spec.name for spec in specs),
                codec.decode(message.tensors, specs),
                strict=True,
            )
        )
        if (arrays["timestep/step_type"][0] != 0).any():
            raise Failed("its environments go on as if it were the same run: row 0 is no reset")

    async def _training_ends(self) -> None:
        """Ends training while the actor waits for room."""
        learner, most = self._learner, self._run.reply.max_unrolls_in_flight
        await self._playing()
        learner.room.clear()
        await self._until("send messages", lambda: learner.unanswered >= most)
        learner.service.finish()
        learner.room.set()
        await asyncio.sleep(_QUIET_SECONDS)
        heard = len(learner.messages)
        await asyncio.sleep(_QUIET_SECONDS)
        if len(learner.messages) > heard:
            raise Failed("it goes on sending messages")
        if self._process is not None:
            await self._ends(0)

    async def _another_major_version(self) -> None:
        def refuse(request: pb.JoinRequest) -> None:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                "The kit speaks protocol 99.0 now: run the same major version on both sides.",
            )

        await self._gives_up(refuse=refuse)

    async def _setting_of_tomorrow(self) -> None:
        def change(reply: pb.JoinReply) -> None:
            reply.settings.needs.append("environment.of_tomorrow")

        await self._gives_up(change=change)

    async def _gives_up(
        self,
        refuse: Callable[[pb.JoinRequest], None] = lambda request: None,
        change: Callable[[pb.JoinReply], None] = lambda reply: None,
    ) -> None:
        """Starts another actor, which has to end with an error and to send nothing."""
        learner = self._learner
        self._end_actor()
        learner.begin(self._run)
        learner.publish(0)
        learner.on_join, learner.on_reply = refuse, change
        joins, heard = len(learner.joins), len(learner.messages)
        self._start_actor()
        await self._until("join", lambda: len(learner.joins) > joins, 2 * self._seconds)
        await self._ends(None)
        if len(learner.messages) > heard:
            raise Failed("it sent messages")
        if len(learner.joins) > joins + 1:
            raise Failed(f"it joined {len(learner.joins) - joins} times")

    # Their steps.

    async def _until(
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
            ended = self._process.poll() if self._process is not None else None
            if ended is not None and restart:
                await asyncio.sleep(_RESTART_SECONDS)
                self._start_actor()
            elif ended is not None:
                raise Failed(f"the actor ended with status {ended}, and did not {what}")
            if time.monotonic() > end:
                raise Failed(f"within {seconds:g} s, the actor did not {what}")
            await asyncio.sleep(_POLL_SECONDS)

    def _has_pulled(self, times: int) -> bool:
        return self._learner.pulls > times

    def _has_joined(self, times: int) -> bool:
        return len(self._learner.joins) > times

    def _has_come_to(self, number: int) -> bool:
        return self._learner.messages[-1].message.sequence >= number

    async def _playing(self, seconds: float = _SESSION_SECONDS) -> None:
        """Waits until the actor is in its loop, in a session so long that backoff begins anew."""
        learner = self._learner
        heard = len(learner.messages)
        await self._until("send messages", lambda: len(learner.messages) >= heard + 2)
        await self._until(
            f"go on for {seconds:g} s without joining again",
            lambda: time.monotonic() >= learner.joins[-1][0] + seconds,
        )

    async def _acts_with_newest(self) -> None:
        learner = self._learner
        newest = learner.incarnation, learner.version

        def acts() -> bool:
            message = learner.messages[-1].message
            return (message.learner_incarnation, message.parameter_version) == newest

        await self._until(f"act with version {newest[1]}, which is the newest", acts)

    async def _break(self) -> "_Before":
        """Breaks the stream. Returns what was before it."""
        before = _Before(self._learner, self._learner.messages[-1].message)
        await self._learner.break_streams()
        return before

    async def _joins_again(self, joins: int) -> int:
        """Waits for another Join than the first ones. Returns the number that it acknowledges."""
        learner = self._learner
        await self._until("join again", lambda: len(learner.joins) > joins)
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

    async def _comes_back(self, before: "_Before") -> None:
        """Waits for the Join and the messages after a break, and compares them."""
        learner = self._learner
        acknowledged = await self._joins_again(before.joins)
        if acknowledged < before.acknowledged:
            raise Failed(
                f"its Join acknowledges message {acknowledged}, the last receipt was for message "
                f"{before.acknowledged}"
            )
        await self._until(
            "send messages in a new stream", lambda: learner.messages[-1].stream > before.stream
        )
        first = next(
            heard.message.sequence for heard in learner.messages if heard.stream > before.stream
        )
        if first != acknowledged + 1:
            raise Failed(
                f"the first message of its new stream is {first}, it acknowledges {acknowledged}"
            )
        await self._until(
            "go on with new messages",
            lambda: learner.messages[-1].message.sequence > before.message.sequence,
        )

    async def _refuse_next(self, receipt: Callable[[pb.Unrolls], pb.Receipt]) -> "_Before":
        """Refuses the next message, and returns what was before it."""
        learner = self._learner
        await self._playing()
        refused: list[_Before] = []

        async def answer(message: pb.Unrolls, judged: Judged) -> pb.Receipt:
            learner.answer = lambda message, judged: judged()
            refused.append(_Before(learner, message))
            return receipt(message)

        learner.answer = answer
        await self._until("send a message", lambda: refused)
        return refused[0]

    # The actor's process.

    def _start_actor(self) -> None:
        if self._command:
            words = shlex.split(self._command.replace("{address}", self._address))
            self._learner.actor = ""  # whose name may be another one now
            self._process = subprocess.Popen(  # with what it starts itself
                words, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
            )

    def _end_actor(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    async def _ends(self, status: int | None) -> None:
        """Waits for the end of the process: with a status, or with an error."""
        process = self._process
        assert process is not None
        end = time.monotonic() + self._seconds
        while process.poll() is None:
            if time.monotonic() > end:
                raise Failed(f"its process does not end within {self._seconds:g} s")
            await asyncio.sleep(_POLL_SECONDS)
        if process.returncode != status and (status is not None or not process.returncode):
            wanted = "an error" if status is None else status
            raise Failed(f"its process ends with status {process.returncode}, not {wanted}")

    # What is seen throughout.

    def _mistaken(self, mistake: Mistake) -> None:
        self.report.failed(MISTAKES, str(mistake), SENTENCE_OF[mistake.kind])

    def _sum_up(self) -> None:
        """Notes what was wrong at any time."""
        learner, report = self._learner, self.report
        for receipt in learner.refused:
            reason, detail = pb.Reason.Name(receipt.reason), receipt.detail
            if receipt.reason == pb.REASON_SEQUENCE:
                report.failed(STREAM, detail, _NUMBERED)
            elif receipt.reason == pb.REASON_FINGERPRINT:
                report.failed(NEW_RUN, detail)
            else:
                report.failed(STREAM, f"{reason}: {detail}", _VALID)
        for changed in learner.changed_retries:
            report.failed(STREAM, changed, _UNCHANGED)
        if learner.most_in_flight > self._run.reply.max_unrolls_in_flight:
            report.failed(
                PRESSURE, f"{learner.most_in_flight} messages were without a receipt", _IN_FLIGHT
            )
        named = {
            (heard.message.learner_incarnation, heard.message.parameter_version)
            for heard in learner.messages
        }
        if unknown := sorted(named - learner.served):
            detail = f"messages name {unknown[0]} (incarnation, version), which it has not got"
            report.failed(JOIN, detail, _OWN_WEIGHTS)
        if learner.in_older_streams:
            detail = f"{learner.in_older_streams} messages came in another stream than the newest"
            report.failed(STREAM, detail, _ONE_STREAM)
        if learner.messages:
            report.done(STREAM)


class _Before:
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
