"""Puts an actor through the cases of the page."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

import grpc

from impala.conform import golden
from impala.conform.learner import Judged, Learner, Refusal, serving, shorter
from impala.conform.report import Failed, Report
from impala.conform.sentences import (
    BACKOFF,
    BROKEN,
    FINISH,
    FORGETS,
    IN_FLIGHT,
    JOIN,
    JOINS,
    LOST,
    MAJOR,
    MISTAKES,
    NEEDS,
    NEW_RUN,
    NUMBERED,
    ONE_STREAM,
    OWN_WEIGHTS,
    PARAMETERS,
    PRESSURE,
    PULLS,
    REFUSALS,
    RESTART,
    SENTENCE_OF,
    SENTENCES,
    SMALLER,
    STREAM,
    UNCHANGED,
    UNKNOWN,
    VALID,
)
from impala.conform.subject import POLL_SECONDS, Before, Subject
from learner.checks.mistakes import Mistake
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_QUIET_SECONDS = 1.0  # for which an actor that should send nothing is watched
_ENOUGH = {
    "messages": 40,
    "rows": 4000,
    "episodes": 20,
    "recomputed": 10,
}  # to look for mistakes in
_REFUSED_JOINS = 3
_MAY_END = "(The actor may end now: then start it again, unless the kit has started it.)"
_ROUND = 8  # messages, among which there is one of each group
_LONG_SESSION_SECONDS = 2.0  # after Joins that failed, for the backoff to begin anew
_LONGEST_SESSION_SECONDS = 10.0  # for that, whatever the backoff was
_ITS_OWN = (MAJOR, NEEDS)  # cases for which another actor is started


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
        self._say = say
        self._case = ""  # at present
        self._learner = Learner(self._run, self._mistaken)
        self._actor = Subject(self._learner, seconds, command)

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
            async with serving(self._learner, listen) as address:
                self._say(f"Listening on {address}, for an actor that plays {self._played}.")
                self._actor.address = address
                self._actor.start()
                missing, is_in_doubt = "", False
                for case, put_through in cases.items():
                    if case not in only:
                        continue
                    if case in _ITS_OWN and not self._actor.is_ours:
                        self.report.done(case, "only an actor that the kit starts: --actor")
                        continue
                    if is_in_doubt and not missing and case not in _ITS_OWN:
                        missing = await self._actor.missing()
                    if missing and case not in _ITS_OWN:
                        self.report.done(case, missing)
                        continue
                    self._say(f"{case} ...")
                    self._case = case
                    try:
                        await put_through()
                        is_in_doubt = False
                    except Failed as failed:
                        self.report.failed(case, str(failed))
                        is_in_doubt = True
                        if case == JOIN and not self._learner.joins:
                            break  # nobody is there
                    finally:
                        self._learner.usual()
                    self.report.done(case)
                self._sum_up()
        finally:
            self._actor.end()
        return self.report

    @property
    def _played(self) -> str:
        return ", ".join(task.name for task in self._run.reply.settings.tasks)

    # The cases.

    async def _joins(self) -> None:
        learner = self._learner
        await self._actor.until("join", lambda: learner.joins, 2 * self._seconds)
        request = learner.joins[0][1]
        claims = (request.acknowledged_sequence, request.acknowledged_unrolls, request.proof)
        if claims != (0, 0, b""):
            detail = f"the first Join acknowledges {claims}"
            self.report.failed(JOIN, detail, "All are 0 or empty at the first `Join`.")
        await self._actor.until("ask for parameters", lambda: learner.pulls)
        asked = learner.pulls
        await asyncio.sleep(_QUIET_SECONDS)
        if learner.messages:
            self.report.failed(JOIN, "it sends unrolls before it can have parameters", OWN_WEIGHTS)
        await self._actor.until(
            "ask again for parameters, as there were none", lambda: learner.pulls > asked
        )
        learner.publish(0)
        learner.publish()
        await self._actor.until("send a message", lambda: learner.messages)
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
            if learner.refused or self.report.is_broken(MISTAKES) or time.monotonic() > end:
                break
            self._actor.check("play on")
            await asyncio.sleep(POLL_SECONDS)
        if time.monotonic() > end:
            raise Failed(f"it played too little to be judged: {seen()} of {_ENOUGH}")

    async def _takes_newer(self) -> None:
        await self._actor.playing()
        self._learner.publish()
        await self._actor.acts_with_newest()

    async def _stands_still(self) -> None:
        learner, most = self._learner, self._run.reply.max_unrolls_in_flight
        await self._actor.playing()
        learner.room.clear()
        await self._actor.until(f"send {most} messages", lambda: learner.unanswered >= most)
        await asyncio.sleep(_QUIET_SECONDS)
        if learner.unanswered > most:
            raise Failed(f"it has sent {learner.unanswered} messages without a receipt")

    async def _stream_breaks(self) -> None:
        """Breaks the stream while messages wait, which the learner has not read."""
        learner = self._learner
        await self._actor.playing()
        learner.room.clear()
        await self._actor.until("send a message", lambda: learner.unanswered)
        await self._actor.comes_back(await self._actor.break_stream())

    async def _receipts_get_lost(self) -> None:
        learner = self._learner
        await self._actor.playing()
        learner.receipts.clear()
        await self._actor.until("send a message", lambda: learner.unanswered)
        await asyncio.sleep(10 * POLL_SECONDS)  # the service has judged it
        await self._actor.comes_back(await self._actor.break_stream())

    async def _is_unknown(self) -> None:
        """Knows nothing of the actor until it joins again."""
        learner = self._learner
        await self._actor.playing()
        joins = len(learner.joins)
        refused: list[Before] = []

        async def answer(message: pb.Unrolls, judged: Judged) -> pb.Receipt:
            if len(learner.joins) > joins:
                return await judged()
            refused.append(Before(learner, message))
            return pb.Receipt(
                sequence=message.sequence,
                status=pb.STATUS_REJECTED,
                reason=pb.REASON_UNKNOWN_ACTOR,
                learner_incarnation=learner.incarnation,
                newest_version=learner.version,
            )

        learner.answer = answer
        await self._actor.until("send a message", lambda: refused)
        await self._actor.comes_back(refused[0])

    async def _is_refused(self) -> None:
        learner = self._learner
        general = SENTENCES[REFUSALS][0]
        try:
            await self._has_to_send_smaller_ones()
        except Failed as failed:
            self.report.failed(REFUSALS, f"REASON_NUM_ENVS: {failed}", SMALLER)
        said = {**FORGETS, **JOINS, "REASON_VERSION": PULLS, "": SENTENCES[REFUSALS][-1]}
        for name, sentence in said.items():

            def receipt(message: pb.Unrolls, name: str = name) -> pb.Receipt:
                made = learner.used_up(message)
                if name:
                    made.MergeFrom(pb.Receipt(reason=name))
                else:  # of tomorrow
                    made.MergeFrom(pb.Receipt.FromString(b"\x10\x4d\x18\x4d"))
                return made

            try:
                refused = await self._actor.refuse_next(receipt)
                if name in JOINS:
                    await self._actor.joins_again(refused.joins)
                if name == "REASON_VERSION":
                    await self._actor.until(
                        "pull", functools.partial(self._actor.has_pulled, refused.pulls)
                    )
                number = refused.message.sequence
                await self._actor.until(
                    f"send message {number + 2} after one that was refused",
                    functools.partial(self._actor.has_come_to, number + 2),
                )
                later = [heard.message.sequence for heard in learner.messages[refused.messages :]]
                if number in later:
                    raise Failed(f"it sends message {number} again, which was refused")
            except Failed as failed:
                detail = f"{name or 'an unknown reason'}: {failed}"
                self.report.failed(REFUSALS, detail, sentence)
                self.report.failed(REFUSALS, detail, general)

    async def _has_to_send_smaller_ones(self) -> None:
        """Takes only half the environments in a message from now on. The actor may start anew."""
        learner = self._learner
        await self._actor.playing()
        largest = max(heard.message.num_envs for heard in learner.messages[-_ROUND:])
        if largest == 1:
            why = "its messages are of 1 environment, and cannot be smaller"
            self.report.untested(REFUSALS, why, SMALLER)
            return
        most, first = largest // 2, len(learner.messages)
        refused: list[pb.Unrolls] = []

        def limit(reply: pb.JoinReply) -> None:
            reply.limits.num_envs = most
            learner.actor = ""  # the next one to join may be started anew, under another name

        async def answer(message: pb.Unrolls, judged: Judged) -> pb.Receipt:
            if message.num_envs <= most:
                return await judged()
            refused.append(message)
            receipt = learner.used_up(message)
            receipt.reason = pb.REASON_NUM_ENVS
            return receipt

        def are_small() -> bool:
            last = learner.messages[first:][-_ROUND:]
            small = [x for x in last if x.message.num_envs <= most]
            return bool(refused) and len(small) == _ROUND

        learner.on_reply, learner.answer = limit, answer
        self._say(_MAY_END)
        what = f"send only messages of at most {most} environments, the limit of its Join"
        await self._actor.until(what, are_small, 2 * self._seconds, restart=True)
        learner.answer = lambda message, judged: judged()
        numbers = [(x.message.incarnation, x.message.sequence) for x in learner.messages]
        if numbers.count((refused[0].incarnation, refused[0].sequence)) > 1:
            raise Failed(f"it sends message {refused[0].sequence} again, which was refused")

    async def _calls_fail(self) -> None:
        learner = self._learner
        # The cases before have ended sessions early, so the actor may wait for long between Joins.
        await self._actor.playing(_LONGEST_SESSION_SECONDS)
        for status in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
            await self._actor.playing()
            left = _REFUSED_JOINS

            def refuse(request: pb.JoinRequest, status: grpc.StatusCode = status) -> None:
                nonlocal left
                if left:
                    left -= 1
                    raise Refusal(status, "The kit refuses this, to see what follows.")

            learner.on_join = refuse
            began = len(learner.joins)
            learner.room.clear()
            await self._actor.until("send a message", lambda: learner.unanswered)
            before = await self._actor.break_stream()
            most = began + _REFUSED_JOINS
            await self._actor.until(
                "keep on joining", functools.partial(self._actor.has_joined, most)
            )
            times = [at for at, _ in learner.joins[began:]]
            took = times[_REFUSED_JOINS] - times[0]
            fastest = 0.5 * sum(0.1 * 2**i for i in range(_REFUSED_JOINS))
            if took < fastest:
                raise Failed(
                    f"after {_REFUSED_JOINS} Joins that failed it had waited {took:.2f} s; with "
                    f"backoff it is {fastest:.2f} s at least"
                )
            await self._actor.comes_back(before)
            await self._actor.playing(_LONG_SESSION_SECONDS)

    async def _learner_comes_back(self) -> None:
        """As after a crash: another incarnation, and a version from long before."""
        learner = self._learner
        await self._actor.playing()
        learner.room.clear()
        await self._actor.until("send a message", lambda: learner.unanswered)
        for _ in range(5):
            learner.publish()
        before = await self._actor.break_stream()
        learner.restart()
        learner.publish(1)
        await self._actor.comes_back(before)
        await self._actor.acts_with_newest()

    async def _another_run(self) -> None:
        learner = self._learner
        await self._actor.playing()
        learner.room.clear()
        await self._actor.until("send a message", lambda: learner.unanswered)
        await self._actor.break_stream()
        joins, heard = len(learner.joins), len(learner.messages)
        learner.begin(shorter(self._run))
        learner.publish(0)
        learner.publish()
        self._say(_MAY_END)
        await self._actor.until(
            "join the new run", lambda: len(learner.joins) > joins, 2 * self._seconds, restart=True
        )
        await self._actor.until(
            "send a message to the new run",
            lambda: any(learner.acknowledged),
            2 * self._seconds,
            restart=True,
        )
        number = next(filter(None, learner.acknowledged))
        if learner.acknowledged[number].status != pb.STATUS_ACCEPTED:
            return  # named below
        message = next(x.message for x in learner.messages[heard:] if x.message.sequence == number)
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
        await self._actor.playing()
        learner.room.clear()
        await self._actor.until("send messages", lambda: learner.unanswered >= most)
        learner.service.finish()
        learner.room.set()
        await asyncio.sleep(_QUIET_SECONDS)
        heard = len(learner.messages)
        await asyncio.sleep(_QUIET_SECONDS)
        if len(learner.messages) > heard:
            raise Failed("it goes on sending messages")
        if self._actor.is_ours:
            await self._actor.ends(0)

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
        self._actor.end()
        learner.begin(self._run)
        learner.publish(0)
        learner.on_join, learner.on_reply = refuse, change
        joins, heard = len(learner.joins), len(learner.messages)
        self._actor.start()
        await self._actor.until("join", lambda: len(learner.joins) > joins, 2 * self._seconds)
        await self._actor.ends(None)
        if len(learner.messages) > heard:
            raise Failed("it sent messages")
        if len(learner.joins) > joins + 1:
            raise Failed(f"it joined {len(learner.joins) - joins} times")

    # What is seen throughout.

    def _mistaken(self, message: pb.Unrolls, mistake: Mistake) -> None:
        detail = f"message {message.sequence}, in the case {self._case!r}: {mistake}"
        self.report.failed(MISTAKES, detail, SENTENCE_OF[mistake.kind])

    def _sum_up(self) -> None:
        """Notes what was wrong at any time."""
        learner, report = self._learner, self.report
        for receipt in learner.refused:
            reason, detail = pb.Reason.Name(receipt.reason), receipt.detail
            if receipt.reason == pb.REASON_SEQUENCE:
                report.failed(STREAM, detail, NUMBERED)
            elif receipt.reason == pb.REASON_FINGERPRINT:
                report.failed(NEW_RUN, detail)
            else:
                report.failed(STREAM, f"{reason}: {detail}", VALID)
        for unreadable in learner.unreadable:
            report.failed(STREAM, unreadable, VALID)
        for changed in learner.changed_retries:
            report.failed(STREAM, changed, UNCHANGED)
        if learner.most_in_flight > self._run.reply.max_unrolls_in_flight:
            report.failed(
                PRESSURE, f"{learner.most_in_flight} messages were without a receipt", IN_FLIGHT
            )
        named = {
            (heard.message.learner_incarnation, heard.message.parameter_version)
            for heard in learner.messages
        }
        if unknown := sorted(named - learner.served):
            detail = f"messages name {unknown[0]} (incarnation, version), which it has not got"
            report.failed(JOIN, detail, OWN_WEIGHTS)
        if learner.in_older_streams:
            detail = f"{learner.in_older_streams} messages came in another stream than the newest"
            report.failed(STREAM, detail, ONE_STREAM)
        if learner.messages:
            report.done(STREAM)
