"""Puts an actor through the cases of the wire protocol, and reports which it passed."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import NamedTuple

from impala.config.schema import Config
from impala.conform.learner import Learner, Run, serving
from impala.conform.subject import POLL_SECONDS, Failed, Subject
from learner.fleet.refusals import IncompatibleProtocol
from protos.impala.v1 import learner_pb2 as pb

_QUIET_SECONDS = 1.0  # for which an actor that should send nothing is watched
_ENOUGH = {"messages": 40, "rows": 4000, "episodes": 20}  # to look for violations in
_MAY_END = "(The actor may end now: then start it again, unless the kit has started it.)"
# After which an actor joins again.
_TO_JOIN = ("REASON_FINGERPRINT", "REASON_SEQUENCE", "REASON_NUM_ENVS", "REASON_QUARANTINED")
_REASONS = (
    *("REASON_TENSOR_COUNT", "REASON_TENSOR_SIZE", "REASON_NOT_FINITE", "REASON_RANGE"),
    *("REASON_MEANING", *_TO_JOIN, "REASON_VERSION", ""),  # "": one of a later protocol
)

MESSAGES = "Messages"
REQUIREMENTS = {
    "Joining": "The first Join acknowledges nothing. While there are no parameters the actor asks "
    "again, and sends nothing; it never acts with parameters that it did not get.",
    MESSAGES: "In all cases, messages are valid and mean what they say: rows, seams, episodes, "
    "frames, actions and their policy. They are numbered 1, 2, 3, ..., come in the newest stream, "
    "and a retry repeats number and contents.",
    "Parameters": "Newer parameters act soon after they are published.",
    "Back-pressure": "At most max_unrolls_in_flight messages are without a receipt.",
    "A broken stream": "The actor joins again with the same incarnation and with what its last "
    "receipt acknowledged, and sends again, in order, what had no receipt.",
    "Receipts that get lost": "A message that the learner had seen is sent again, and forgotten "
    "when it is answered as a duplicate.",
    "An unknown actor": "After REASON_UNKNOWN_ACTOR the actor joins and sends the message again.",
    "Refusals": "A refused message is never sent again, and the next one has the next number. "
    "After some reasons the actor joins or pulls first. An unknown reason is like the others.",
    "A restarted learner": "After another learner of the same run has answered, the actor acts "
    "with its parameters, even if their version is lower.",
    "Another run": "Another fingerprint: the actor forgets what has no receipt, and begins anew "
    "with environments that are reset, or exits.",
    "The end of training": "The actor stops sending, and its process ends with status 0.",
    "Another major version": "The actor gives up with an error.",
    "A newer setting": "The actor gives up with an error if settings.needs has one that it does "
    "not know.",
}
"""What each case requires of an actor."""
_NEW_ACTOR = ("Another major version", "A newer setting")  # another one is started


class Row(NamedTuple):
    """A case, and how the actor did in it."""

    case: str
    result: str  # passed, FAILED or not tested
    detail: str = ""


class Kit:
    """Puts one actor through all cases, in an order in which each begins with an actor that plays.

    Args:
      config: of the run that is played.
      seconds: that the actor may take for each thing that it has to do.
      command: starts the actor; {address} in it stands for the kit's. Empty: somebody else does.
      say: is called with lines for people.
    """

    def __init__(
        self, config: Config, seconds: float, command: str, say: Callable[[str], None]
    ) -> None:
        self._run, self._seconds, self._say = Run(config), seconds, say
        self._shorter = self._run.shorter()
        self._learner = Learner(self._run)
        self._actor = Subject(self._learner, seconds, command)
        self._most_in_flight = config.learner.max_in_flight
        self._rows: dict[str, Row] = {}

    async def run(self, listen: str, only: Collection[str] = tuple(REQUIREMENTS)) -> "list[Row]":
        """Serves on an address until all cases, or only some of them, are over.

        Returns:
          A row for each case.

        Raises:
          OSError: the address cannot be bound.
        """
        cases: dict[str, Callable[[], Awaitable[None]]] = {
            "Joining": self._joins,
            MESSAGES: self._plays,
            "Parameters": self._takes_newer,
            "Back-pressure": self._stands_still,
            "A broken stream": self._stream_breaks,
            "Receipts that get lost": self._receipts_get_lost,
            "An unknown actor": self._is_unknown,
            "Refusals": self._is_refused,
            "A restarted learner": self._learner_comes_back,
            "Another run": self._another_run,
            "The end of training": self._training_ends,
            "Another major version": self._another_major_version,
            "A newer setting": self._setting_of_a_later_version,
        }
        try:
            async with serving(self._learner, listen) as address:
                played = ", ".join(
                    task["name"] for task in json.loads(self._run.terms.settings)["tasks"]
                )
                self._say(f"Listening on {address}, for an actor that plays {played}.")
                self._actor.address = address
                self._actor.start()
                for case in filter(only.__contains__, cases):
                    self._say(f"{case} ...")
                    self._rows[case] = await self._result(case, cases[case])
                    self._learner.usual()
                    if not self._learner.joins:
                        break  # nobody is there
        finally:
            self._actor.end()
            self._run.close()
            self._shorter.close()
        self._look_back()
        missing = (Row(case, "not tested", "the kit did not come to it") for case in only)
        return [self._rows.get(row.case, row) for row in missing]

    async def _result(self, case: str, put_through: Callable[[], Awaitable[None]]) -> Row:
        if case in _NEW_ACTOR and not self._actor.is_ours:
            return Row(case, "not tested", "only an actor that the kit starts: --actor")
        if case not in _NEW_ACTOR and any(row.result != "passed" for row in self._rows.values()):
            try:
                await self._actor.plays_on()
            except Failed as failed:
                return Row(case, "not tested", str(failed))
        try:
            await put_through()
        except Failed as failed:
            return Row(case, "FAILED", str(failed))
        return Row(case, "passed")

    def _look_back(self) -> None:
        """Notes what was wrong at any time."""
        learner = self._learner
        named = {
            (heard.message.learner_incarnation, heard.message.parameter_version)
            for heard in learner.messages
        }
        if unknown := sorted(named - learner.served):
            detail = f"messages name {unknown[0]} (incarnation, version), which it has not got"
            self._rows["Joining"] = Row("Joining", "FAILED", detail)
        if learner.wrong:
            self._rows[MESSAGES] = Row(MESSAGES, "FAILED", learner.wrong[0])

    # The cases.

    async def _joins(self) -> None:
        learner, until = self._learner, self._actor.until
        await until("join", lambda: learner.joins, 2 * self._seconds)
        request = learner.joins[0][1]
        claims = (request.acknowledged_sequence, request.acknowledged_unrolls, request.proof)
        if claims != (0, 0, b""):
            raise Failed(f"the first Join acknowledges {claims}")
        await until("ask for parameters, or to be acted for", lambda: learner.pulls)
        asked = learner.pulls
        await asyncio.sleep(_QUIET_SECONDS)
        if learner.messages:
            raise Failed("it sends unrolls before it can have parameters")
        await until("ask again, as there were no parameters", lambda: learner.pulls > asked)
        learner.publish(0)
        learner.publish()
        await until("send a message", lambda: learner.messages, 2 * self._seconds)

    async def _plays(self) -> None:
        """Plays for a while, with several versions."""
        learner = self._learner
        end, published = time.monotonic() + 2 * self._seconds, 0
        while not learner.wrong:
            messages = len(learner.messages)
            seen = {"messages": messages, "rows": learner.rows, "episodes": learner.episodes}
            if all(seen[name] >= least for name, least in _ENOUGH.items()):
                return
            if messages >= published + 8:
                published = messages
                learner.publish()
            if time.monotonic() > end:
                raise Failed(f"it played too little to be judged: {seen} of {_ENOUGH}")
            self._actor.check("play on")
            await asyncio.sleep(POLL_SECONDS)

    async def _takes_newer(self) -> None:
        await self._actor.playing()
        self._learner.publish()
        await self._actor.acts_with_newest()

    async def _stands_still(self) -> None:
        await self._actor.sends()
        await asyncio.sleep(_QUIET_SECONDS)
        if (most := self._learner.most_in_flight) > self._most_in_flight:
            raise Failed(f"{most} messages were without a receipt")

    async def _stream_breaks(self) -> None:
        """Breaks the stream while messages wait, which the learner has not read."""
        await self._actor.sends()
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

        def receipt(message: pb.Unrolls) -> pb.Receipt:
            return pb.Receipt(
                sequence=message.sequence,
                status=pb.STATUS_REJECTED,
                reason=pb.REASON_UNKNOWN_ACTOR,
                learner_incarnation=learner.incarnation,
                newest_version=learner.version,
            )

        await self._actor.comes_back(await self._actor.refuse(receipt, until_joined=True))

    async def _is_refused(self) -> None:
        for name in _REASONS:
            try:
                await self._is_refused_for(name)
            except Failed as failed:
                raise Failed(f"{name or 'an unknown reason'}: {failed}") from None

    async def _is_refused_for(self, name: str) -> None:
        learner = self._learner

        def receipt(message: pb.Unrolls) -> pb.Receipt:
            made = learner.used_up(message)
            if name:
                made.MergeFrom(pb.Receipt(reason=name))
            else:  # status and reason 77
                made.MergeFrom(pb.Receipt.FromString(b"\x10\x4d\x18\x4d"))
            return made

        refused = await self._actor.refuse(receipt)
        number = refused.message.sequence
        if name in _TO_JOIN:
            await self._actor.joins_again(refused.joins)
        if name == "REASON_VERSION":
            await self._actor.until("pull", lambda: learner.pulls > refused.pulls)
        await self._actor.goes_on(number + 2)
        if number in (heard.message.sequence for heard in learner.messages[refused.messages :]):
            raise Failed(f"it sends message {number} again, which was refused")

    async def _learner_comes_back(self) -> None:
        """As after a crash: another incarnation, and a version from long before."""
        learner = self._learner
        await self._actor.sends()
        for _ in range(5):
            learner.publish()
        before = await self._actor.break_stream()
        learner.restart()
        learner.publish(1)
        await self._actor.comes_back(before)
        await self._actor.acts_with_newest()

    async def _another_run(self) -> None:
        learner = self._learner
        await self._actor.sends()
        await self._actor.break_stream()
        joins, heard, wrong = len(learner.joins), len(learner.messages), len(learner.wrong)
        learner.begin(self._shorter)
        learner.publish(0)
        learner.publish()
        self._say(_MAY_END)
        for what, condition in (
            ("join the new run", lambda: len(learner.joins) > joins),
            ("send a message to the new run", lambda: any(learner.acknowledged)),
        ):
            await self._actor.until(what, condition, 2 * self._seconds, restart=True)
        if len(learner.wrong) > wrong:
            raise Failed(learner.wrong[-1])
        message = learner.messages[heard].message
        names = [spec.name for spec in learner.reply.unroll_specs]
        step_types = message.tensors[names.index("timestep/step_type")]
        if any(step_types[: message.num_envs]):  # of row 0, a byte for each
            raise Failed("its environments go on as if it were the same run: row 0 is no reset")

    async def _training_ends(self) -> None:
        """Ends training while a message of the actor waits."""
        learner = self._learner
        await self._actor.sends()
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
        def refuse(request: pb.JoinRequest) -> pb.JoinReply:
            raise IncompatibleProtocol(
                "The kit speaks protocol 99.0 now: run the same major version on both sides."
            )

        self._learner.join = refuse
        await self._gives_up()

    async def _setting_of_a_later_version(self) -> None:
        def join(request: pb.JoinRequest) -> pb.JoinReply:
            reply = self._learner.service.join(request)
            sent = json.loads(reply.settings)
            sent["needs"].append("environment.of_a_later_version")
            reply.settings = json.dumps(sent)
            return reply

        self._learner.join = join
        await self._gives_up()

    async def _gives_up(self) -> None:
        """Starts another actor, which has to end with an error and to send nothing."""
        learner = self._learner
        self._actor.end()
        learner.begin(self._run)
        learner.publish(0)
        joins, heard = len(learner.joins), len(learner.messages)
        self._actor.start()
        await self._actor.until("join", lambda: len(learner.joins) > joins, 2 * self._seconds)
        await self._actor.ends(None)
        if len(learner.messages) > heard:
            raise Failed("it sent messages")
        if len(learner.joins) > joins + 1:
            raise Failed(f"it joined {len(learner.joins) - joins} times")


def table(rows: list[Row]) -> Iterator[str]:
    """Yields lines: each case with its result, and what a failed one requires."""
    for row in rows:
        yield f"{row.result:<10}  {row.case}{': ' if row.detail else ''}{row.detail}"
        if row.result == "FAILED":
            yield f"{'':12}{REQUIREMENTS[row.case]}"
