"""A learner that learns nothing: cases decide what it answers, and everything it hears is kept.

Messages are judged, checked for violations and acted for by the learner's own service
(`learner.service.service`); a case puts something between its answer and the actor. All of it is on
one event loop.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
import tree
from google.protobuf.message import DecodeError

from impala.config import values
from impala.config.schema import Config
from impala.runtime.security import ServerSecurity
from impala.schedule.tasks import Schedule
from impala.types import Parameters, StepType, Unroll
from learner.data.ingest import Ingest
from learner.evaluation.snapshots import Snapshots
from learner.fleet.accounts import Accounts
from learner.fleet.receipts import ReceiptProofs
from learner.fleet.records import Records
from learner.fleet.refusals import InvalidRequest, NotOffered
from learner.plan import acting_step, make_plan
from learner.service import calls
from learner.service.executable import ExecutablePolicy
from learner.service.inference import Inference
from learner.service.server import bind, pings
from learner.service.service import LearnerService, Lineage
from learner.service.terms import terms
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

_SCALE = 3.0  # of the parameters: how decided the policy is
_ROUNDING = 0.03  # of what agents compute, relative
_RECOMPUTED = 20  # messages
_MESSAGE_SECONDS = 0.004  # for each of them: a fast actor need not keep a core busy


class Heard(NamedTuple):
    """A message of the actor."""

    message: pb.Unrolls
    stream: int  # the number of the stream that it came in: 1, 2, 3, ...


class Run:
    """What is served of a run.

    Args:
      config: the run.
      executable: its executable policy; None: made from the configuration when it is asked for.
    """

    def __init__(self, config: Config, executable: ExecutablePolicy | None = None) -> None:
        self.config, plan = config, make_plan(config)
        variables = plan.phases.agent.variables
        self.terms = terms(config, variables, plan.unroll_spec, plan.played, plan.spaces)
        self.executable = executable or ExecutablePolicy(config, plan.spaces)
        self.inference = Inference(
            *(config, plan.spaces, plan.unroll_spec), step=lambda: acting_step(config, plan.spaces)
        )
        self._step = acting_step(config, plan.spaces)

    def shorter(self) -> "Run":
        """Returns another run in the same environment, whose unrolls have other lengths."""
        length = max(1, self.config.learner.unroll_length - 2)
        changes = {"learner": {"unroll_length": length}}
        return Run(values.overlay(self.config, changes), self.executable)

    def is_acted_by(self, values: Sequence[np.ndarray], unroll: Unroll) -> bool:
        """Returns whether the agent computes the policy and baseline of an unroll [T + 1, E, ...].

        Args:
          values: the parameters.
          unroll: of any number of environments.
        """
        held, step_type = self._step.held(values), unroll.timestep.step_type
        drawn = [
            np.full((step_type.shape[1], *shape), 0.5, np.float32)
            for shape in self._step.drawn.values()
        ]
        state = tree.flatten(unroll.core_state)
        for row in range(len(step_type) - 1):
            seen = [leaf[row] for leaf in tree.flatten(unroll.timestep.observation)]
            outputs = self._step(held, [*seen, step_type[row], *state, *drawn])
            *_, policy, baseline = outputs[: len(outputs) - len(state)]
            state = outputs[len(outputs) - len(state) :]
            acts = step_type[row + 1] != StepType.FIRST  # elsewhere the action is ignored
            sent = unroll.output
            for right, found in ((policy, sent.policy), (baseline, sent.baseline)):
                error = np.abs(right - found[row + 1])[acts].max(initial=0.0)
                if error > _ROUNDING * (1.0 + np.abs(right).max()):
                    return False
        return True

    def close(self) -> None:
        """Ends its threads and processes."""
        self.inference.close()
        self.executable.close()


class Learner(pb_grpc.LearnerServicer):
    """Serves one actor. A case sets `join`, `refuse` and `receipts`, and looks at what is heard.

    Args:
      run: that the actor joins first.
    """

    def __init__(self, run: Run) -> None:
        self.room = asyncio.Event()  # clear it to have messages wait, unread
        self.receipts = asyncio.Event()  # clear it to withhold the receipts of those that were read
        self.joins: list[tuple[float, pb.JoinRequest]] = []  # with the time, monotonic
        self.messages: list[Heard] = []
        self.pulls = 0  # requests for parameters, and unrolls that the learner was to act in
        self.wrong: list[str] = []  # what was wrong with messages, whatever the case
        self.unanswered = 0  # messages of the present stream
        self.streams = 0
        self.most_in_flight = 0
        self.episodes = self.rows = self.recomputed = 0
        self.served: set[tuple[int, int]] = set()  # incarnation and version that the actor has got
        self._kept: dict[tuple[int, int], bytes] = {}  # messages by incarnation and number
        self._broken = asyncio.Event()
        self._open = 0  # streams
        self._refused = calls.Refused()
        self.usual()
        self.begin(run)

    # What cases do.

    def usual(self) -> None:
        """Answers as a learner does."""
        self.room.set()
        self.receipts.set()
        self.join: Callable[[pb.JoinRequest], pb.JoinReply] = lambda it: self.service.join(it)
        self.refuse: Callable[[pb.Unrolls], pb.Receipt | None] = lambda message: None

    def begin(self, run: Run) -> None:
        """Begins a run: nobody has joined it, and there are no parameters."""
        self._run = run
        self.actor = ""
        self.acknowledged: dict[int, pb.Receipt] = {0: pb.Receipt()}  # receipts, by number
        self.delivered = 0  # the number of the last one that has certainly been sent
        self._kept.clear()
        self._accounts, self._key = Accounts(), secrets.token_bytes(32)
        self._earlier: dict[int, int] = {}
        self._start()

    def restart(self) -> None:
        """Starts another learner of the same run, as after a crash before the first checkpoint."""
        self._earlier = {**self._earlier, self.incarnation: self.version}
        state, self._accounts = self._accounts.state(), Accounts()
        self._accounts.restore(state)
        self._start()

    def _start(self) -> None:
        run = self._run
        self.incarnation = secrets.randbits(63) + 1
        self.version = -1
        self._values: dict[int, Sequence[np.ndarray]] = {}  # parameters by version
        quiet = values.overlay(run.config, {"quarantine": {"blames": 0}})
        records = Records.begin(quiet)._replace(accounts=self._accounts)
        self._ingest, self._violations = Ingest(1 << 20), records.violations
        self._proofs = ReceiptProofs(self._key, self.incarnation)
        self.reply = pb.JoinReply()  # of the last Join
        self.service = LearnerService(
            *(run.terms, Lineage(self.incarnation, self._earlier, self._proofs), records),
            *(self._ingest, Schedule(run.config), Snapshots(1, "auto")),
            executable=run.executable,
            inference=run.inference,
        )

    def publish(self, version: int | None = None) -> None:
        """Publishes parameters, of the next version or of this one. Each version has other ones."""
        self.version = self.version + 1 if version is None else version
        rng = np.random.default_rng([self.version, self.incarnation])
        parameters = []
        for spec in self._run.terms.parameter_specs:
            shape = tuple(spec.shape)
            fan_in = int(np.prod(shape[:-1])) if len(shape) > 1 else 100
            parameters.append(rng.normal(0.0, _SCALE * fan_in**-0.5, shape).astype(np.float32))
        self._values[self.version] = parameters
        self.service.publish(Parameters(self.incarnation, self.version, 0.5, 0, parameters))

    async def break_streams(self) -> None:
        """Ends all streams, as when the network fails: nothing that waits in them is read."""
        self._broken.set()
        while self._open:
            await asyncio.sleep(0.001)
        self._broken = asyncio.Event()
        self.room.set()
        self.receipts.set()

    def used_up(self, message: pb.Unrolls) -> pb.Receipt:
        """Uses up the number of a message that a case refuses. The receipt lacks the reason."""
        named = message.actor, message.incarnation, message.sequence
        self._accounts.rejected("conform", *named)
        unrolls = self._accounts.acknowledged(*named) or 0
        return pb.Receipt(
            sequence=message.sequence,
            status=pb.STATUS_REJECTED,
            detail="The kit refuses this message, to see what follows.",
            learner_incarnation=self.incarnation,
            newest_version=self.version,
            acknowledged_unrolls=unrolls,
            proof=self._proofs.make(*named, unrolls),
        )

    # What the actor calls.

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        self.joins.append((time.monotonic(), request))
        async with calls.statuses(context, self._refused):
            if self.actor and request.actor != self.actor:
                raise NotOffered(f"The kit takes one actor at a time, and has {self.actor!r}.")
            self.actor = request.actor
            self.reply = self.join(request)
            return self.reply
        raise AssertionError

    async def GetParameters(
        self, request: pb.GetParametersRequest, context: Any
    ) -> pb.GetParametersReply:
        self.pulls += 1
        reply = pb.GetParametersReply.FromString(self.service.get_parameters(request))
        if reply.HasField("parameters"):
            self.served.add((reply.parameters.learner_incarnation, reply.parameters.version))
        return reply

    async def GetExecutablePolicy(
        self, request: pb.GetExecutablePolicyRequest, context: Any
    ) -> pb.GetExecutablePolicyReply:
        async with calls.statuses(context, self._refused):
            return await self.service.get_executable_policy(request)
        raise AssertionError

    async def Act(self, requests: AsyncIterator[pb.ActRequest], context: Any) -> None:
        async def answer() -> None:
            with self.service.acting() as act:
                async for request in requests:
                    self.pulls += request.begins
                    reply = await act(request)
                    self.served.add((reply.learner_incarnation, reply.parameter_version))
                    await context.write(reply)
                    if reply.finished:
                        return

        await self._until_broken([answer()], context)

    async def StreamUnrolls(self, requests: AsyncIterator[pb.Unrolls], context: Any) -> None:
        self.streams += 1
        self.unanswered = 0
        number = self.streams
        arrived: asyncio.Queue[pb.Unrolls | None] = asyncio.Queue()

        async def read() -> None:  # ahead of the answers, to see how much the actor sends
            try:
                async for message in requests:
                    self._hear(message, number)
                    arrived.put_nowait(message)
            except DecodeError as error:
                self.wrong.append(f"its bytes are no Unrolls ({error})")
                raise InvalidRequest(self.wrong[-1]) from error
            finally:
                arrived.put_nowait(None)

        async def talk() -> None:
            while (message := await arrived.get()) is not None:
                await asyncio.sleep(_MESSAGE_SECONDS)
                await self.room.wait()
                receipt = self.refuse(message) or await self._judged(message)
                await self.receipts.wait()
                is_known = receipt.reason != pb.REASON_UNKNOWN_ACTOR
                if is_known:
                    self.acknowledged[message.sequence] = receipt
                if number == self.streams:
                    self.unanswered -= 1  # before the actor can know of it
                await context.write(receipt)
                if is_known:
                    self.delivered = message.sequence

        try:
            await self._until_broken([talk(), read()], context)
        finally:
            if number == self.streams:
                self.unanswered = 0

    async def _until_broken(self, parts: list[Any], context: Any) -> None:
        """Serves a stream until its first part ends, or all streams are broken."""
        broken = self._broken
        self._open += 1
        tasks = [asyncio.create_task(each) for each in (*parts, broken.wait())]
        try:
            await asyncio.wait([tasks[0], tasks[-1]], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            try:  # the actor may cancel the stream now
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._open -= 1
        if broken.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "The connection was lost.")
        async with calls.statuses(context, self._refused):
            for task in tasks:
                if not task.cancelled():
                    task.result()

    def _hear(self, message: pb.Unrolls, stream: int) -> None:
        self.messages.append(Heard(message, stream))
        if stream != self.streams:
            self.wrong.append("a message came in another stream than the newest")
        else:
            self.unanswered += 1
            self.most_in_flight = max(self.most_in_flight, self.unanswered)
        key = message.incarnation, message.sequence
        contents = message.SerializeToString(deterministic=True)
        if self._kept.setdefault(key, contents) != contents:
            self.wrong.append(f"message {message.sequence} came again with other contents")

    async def _judged(self, message: pb.Unrolls) -> pb.Receipt:
        """Returns the service's receipt for a message, and notes what is wrong with it."""
        known = self._violations.of(message.actor)
        receipt = await self.service.submit(message)
        while (arrival := self._ingest.get(0.0)) is not None:  # nothing is learned from it
            self.episodes += len(arrival.episodes)
            unroll = arrival.unroll
            self.rows += int((unroll.timestep.step_type[1:] != StepType.FIRST).sum())
            values = self._values.get(message.parameter_version)
            if values is None or message.learner_incarnation != self.incarnation:
                continue
            if self.recomputed < _RECOMPUTED and not self._run.is_acted_by(values, unroll):
                self.wrong.append(
                    f"message {message.sequence}: output/policy or output/baseline is not what the "
                    "agent computes: row t holds what led to row t, computed of row t - 1, with "
                    "the core state of that row and the parameters that the message names"
                )
            self.recomputed += 1
        found = self._violations.of(message.actor)
        if found != known:
            self.wrong.append(f"message {message.sequence}: {found.last}")
        elif receipt.status == pb.STATUS_REJECTED:
            reason = pb.Reason.Name(receipt.reason)
            self.wrong.append(f"message {message.sequence}: {reason}: {receipt.detail}")
        return receipt


@contextlib.asynccontextmanager
async def serving(learner: Learner, listen: str) -> AsyncIterator[str]:
    """Serves on an address while the context lasts; gives the address that was bound.

    Raises:
      OSError: it cannot be bound.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.so_reuseport", 0),
            *pings(),
        ]
    )
    pb_grpc.add_LearnerServicer_to_server(learner, server)
    address = bind(server, listen, ServerSecurity())
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0.0)
