"""A learner that learns nothing: cases decide what it answers, and everything it hears is kept.

Messages are judged by the learner's own service (`learner.service.service`), which needs no
TensorFlow; a case puts something between its answer and the actor. All of it is on one event loop.
"""

import asyncio
import contextlib
import functools
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from impala.config.schema import ChecksConfig, Config, LimitsConfig, QuarantineConfig
from impala.conform import golden
from impala.runtime import listen as addresses
from impala.schedule.tasks import Schedule
from impala.types import AgentOutput, ArraySpec, Parameters, TimeStep, Unroll
from learner.checks.checks import Checks
from learner.checks.mistakes import Kind, Mistake
from learner.checks.network import Claim, Recomputation
from learner.data.bounds import Bounds, MessageBounds, box
from learner.data.ingest import Ingest
from learner.evaluation.snapshots import Snapshots
from learner.fleet.accounts import Accounts, Superseded
from learner.fleet.info_names import InfoNames
from learner.fleet.mistakes import Mistakes
from learner.fleet.quarantine import Quarantine
from learner.fleet.receipts import ReceiptProofs
from learner.fleet.records import Records
from learner.fleet.refusals import IncompatibleProtocol, InvalidRequest, NotOffered
from learner.fleet.refused_outputs import RefusedOutputs
from learner.fleet.roster import Roster
from learner.service.service import LearnerService, Lineage
from learner.service.terms import Terms
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc

LEARNED_SCALE = 3.0  # of the parameters: how decided the policy is
_MESSAGE_SECONDS = 0.004  # for each of them: a fast actor need not keep a core busy
_RECOMPUTED_IN_A_ROW = 3  # unrolls that differ before it is a mistake, as the learner has it

Judged = Callable[[], Awaitable[pb.Receipt]]
"""Has the service judge a message."""
Answer = Callable[[pb.Unrolls, Judged], Awaitable[pb.Receipt]]


class Refusal(Exception):
    """A call is to end with this status."""

    def __init__(self, status: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Heard(NamedTuple):
    """A message of the actor."""

    message: pb.Unrolls
    stream: int  # the number of the stream that it came in: 1, 2, 3, ...


class Learner(pb_grpc.LearnerServicer):
    """Serves one actor. A case sets `answer`, `on_join` and `receipts`, and looks at what is heard.

    Args:
      run: what is told to the actor.
      found: called with each message that has a mistake, and the mistake.
    """

    def __init__(self, run: golden.Run, found: Callable[[pb.Unrolls, Mistake], None]) -> None:
        self._found = found
        self.room = asyncio.Event()  # clear it to have messages wait, unread
        self.receipts = asyncio.Event()  # clear it to withhold the receipts of those that were read
        self.joins: list[tuple[float, pb.JoinRequest]] = []  # with the time, monotonic
        self.messages: list[Heard] = []
        self.pulls = 0
        self.refused: list[pb.Receipt] = []  # what the service refused of itself
        self.unanswered = 0  # messages of the present stream
        self.streams = 0
        self.most_in_flight = 0
        self.in_older_streams = 0  # messages that came in another stream than the newest
        self.changed_retries: list[str] = []
        self.unreadable: list[str] = []  # what was no message, and why
        self.recomputed = 0
        self.episodes = 0
        self.rows = 0
        self.served: set[tuple[int, int]] = set()  # parameters that the actor has got
        self.acknowledged: dict[int, pb.Receipt] = {}  # receipts, by number
        self.delivered = 0  # the number of the last one that has certainly been sent
        self._kept: dict[tuple[int, int], bytes] = {}  # messages by incarnation and number
        self._differed = 0
        self._broken = asyncio.Event()
        self._open = 0  # streams
        self._earlier: dict[int, int] = {}
        self.usual()
        self.begin(run)

    # What cases do.

    def usual(self) -> None:
        """Answers as a learner does."""
        self.room.set()
        self.receipts.set()
        self.on_join: Callable[[pb.JoinRequest], None] = lambda request: None
        self.on_reply: Callable[[pb.JoinReply], None] = lambda reply: None
        self.answer: Answer = lambda message, judged: judged()

    def begin(self, run: golden.Run) -> None:
        """Begins a run: nobody has joined it, and there are no parameters."""
        self.reply, self._onnx = run.reply, run.onnx
        self._terms = _terms(run)
        self.actor = ""
        self.acknowledged, self.delivered = {0: pb.Receipt()}, 0
        self._kept.clear()
        self._accounts, self._key = Accounts(), secrets.token_bytes(32)
        self._mistakes = Mistakes()
        self._earlier = {}
        self._start()

    def restart(self) -> None:
        """Is another learner of the same run, as after a crash before the first checkpoint."""
        self._earlier = {**self._earlier, self.incarnation: self.version}
        state, self._accounts = self._accounts.state(), Accounts()
        self._accounts.restore(state)
        self._start()

    def _start(self) -> None:
        self.incarnation = secrets.randbits(63) + 1
        self.version = -1
        self._values: dict[int, Sequence[np.ndarray]] = {}
        self._ingest = Ingest(1 << 20)
        records = Records(
            self._accounts,
            Roster(),
            Quarantine(QuarantineConfig(blames=0)),
            InfoNames(64),
            RefusedOutputs(),
            self._mistakes,
        )
        self._proofs = ReceiptProofs(self._key, self.incarnation)
        lineage = Lineage(self.incarnation, self._earlier, self._proofs)
        self.service = LearnerService(
            *(self._terms, lineage, records, self._ingest, Schedule(Config())), Snapshots(1, "auto")
        )
        self._checks = Checks(self.reply)
        self._recomputation = Recomputation(self.reply)

    def publish(self, version: int | None = None) -> None:
        """Publishes parameters, of the next version or of this one. Each version has other ones."""
        self.version = self.version + 1 if version is None else version
        rng = np.random.default_rng([self.version, self.incarnation])
        values = []
        for spec in self.reply.parameter_specs:
            shape = tuple(spec.shape)
            fan_in = int(np.prod(shape[:-1])) if len(shape) > 1 else 100
            values.append(rng.normal(0.0, LEARNED_SCALE * fan_in**-0.5, shape).astype(np.float32))
        self._values[self.version] = values
        self.service.publish(Parameters(self.incarnation, self.version, 0.5, 0, values))

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
        async with _statuses(context):
            if self.actor and request.actor != self.actor:
                raise Refusal(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"The kit takes one actor at a time, and has {self.actor!r}.",
                )
            self.actor = request.actor
            self.on_join(request)
            reply = self.service.join(request)
            self.on_reply(reply)
            return reply
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
        digest = hashlib.sha256(self._onnx).hexdigest()
        onnx = self._onnx if request.digest != digest else b""
        return pb.GetExecutablePolicyReply(digest=digest, onnx=onnx)

    async def Act(self, requests: Any, context: Any) -> None:
        async with _statuses(context):
            with self.service.acting():  # as a learner does that does not act for others
                raise AssertionError

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.RunStatus:
        return self.service.get_status()

    async def StreamUnrolls(self, requests: Any, context: Any) -> None:
        self.streams += 1
        self.unanswered = 0
        number, broken = self.streams, self._broken
        arrived: asyncio.Queue[pb.Unrolls | None] = asyncio.Queue()

        async def read() -> None:  # ahead of the answers, to see how much the actor sends
            try:
                async for message in requests:
                    self._hear(message, number)
                    arrived.put_nowait(message)
            except DecodeError as error:
                self.unreadable.append(f"its bytes are no Unrolls ({error})")
                raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, self.unreadable[-1]) from error
            finally:
                arrived.put_nowait(None)

        async def talk() -> None:
            while (message := await arrived.get()) is not None:
                await asyncio.sleep(_MESSAGE_SECONDS)
                await self.room.wait()
                receipt = await self.answer(message, functools.partial(self._judged, message))
                await self.receipts.wait()
                is_known = receipt.reason != pb.REASON_UNKNOWN_ACTOR
                if is_known:
                    self.acknowledged[message.sequence] = receipt
                self.unanswered -= 1  # before the actor can know of it
                await context.write(receipt)
                if is_known:
                    self.delivered = message.sequence

        self._open += 1
        tasks = [asyncio.create_task(each) for each in (read(), talk(), broken.wait())]
        try:
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            try:  # the actor may cancel the stream now
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._open -= 1
                self.unanswered = 0 if number == self.streams else self.unanswered
        if broken.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "The connection was lost.")
        async with _statuses(context):
            for task in tasks:
                if not task.cancelled():
                    task.result()

    def _hear(self, message: pb.Unrolls, stream: int) -> None:
        self.messages.append(Heard(message, stream))
        if stream != self.streams:
            self.in_older_streams += 1
        else:
            self.unanswered += 1
            self.most_in_flight = max(self.most_in_flight, self.unanswered)
        key = message.incarnation, message.sequence
        contents = message.SerializeToString(deterministic=True)
        if self._kept.setdefault(key, contents) != contents:
            self.changed_retries.append(
                f"message {message.sequence} came again with other contents"
            )

    async def _judged(self, message: pb.Unrolls) -> pb.Receipt:
        """Has the service judge a message, and looks for mistakes in one that it accepts."""
        known = dict(self._mistakes.of(message.actor).counts)
        receipt = await self.service.submit(message)
        while self._ingest.get(0.0) is not None:  # nothing is learned from it
            pass
        if receipt.status == pb.STATUS_REJECTED:
            named = self._mistakes.of(message.actor).counts
            kinds = [kind for kind in named if named[kind] != known.get(kind, 0)]
            if receipt.reason == pb.REASON_VERSION:
                kinds = [Kind.VERSION]
            for kind in kinds:
                self._found(message, Mistake(Kind(kind), receipt.detail))
            if not kinds:
                self.refused.append(receipt)
        elif receipt.status == pb.STATUS_ACCEPTED:
            self._look_at(message)
        return receipt

    def _look_at(self, message: pb.Unrolls) -> None:
        reply = self.reply
        specs = codec.with_environments(
            reply.unroll_specs, reply.num_core_state_specs, message.num_envs
        )
        arrays = codec.decode(message.tensors, specs)
        for mistake in self._checks.check(message, arrays):
            self._found(message, mistake)
        by_name = self._checks.by_name(arrays)
        self.episodes += len(message.episodes)
        self.rows += int((by_name["timestep/step_type"][1:] != 0).sum())
        values = self._values.get(message.parameter_version)
        if values is None or message.learner_incarnation != self.incarnation:
            return
        env = self.recomputed % message.num_envs
        states = arrays[len(arrays) - reply.num_core_state_specs :]
        seen = {space.name: by_name[space.name][:, env] for space in reply.observation_space}
        claim = Claim(
            seen,
            by_name["timestep/step_type"][:, env],
            by_name["output/policy"][:, env],
            by_name["output/baseline"][:, env],
            [leaf[env] for leaf in states],
        )
        differs = self._recomputation.check(values, claim)
        self.recomputed += 1
        self._differed = 0 if differs is None else self._differed + 1
        if differs is not None and self._differed >= _RECOMPUTED_IN_A_ROW:
            self._found(message, differs)


@contextlib.asynccontextmanager
async def _statuses(context: Any) -> Any:
    """Ends a call with the status that an exception of the service stands for."""
    try:
        yield
    except Refusal as refusal:
        await context.abort(refusal.status, str(refusal))
    except InvalidRequest as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except (IncompatibleProtocol, NotOffered, Superseded) as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


@contextlib.asynccontextmanager
async def serving(learner: Learner, listen: str) -> Any:
    """Serves on an address while the context lasts; gives the address that was bound.

    Raises:
      OSError: it cannot be bound.
    """
    if addresses.socket_path(listen) is None:
        addresses.parse("The kit", listen)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    pb_grpc.add_LearnerServicer_to_server(learner, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"Cannot listen on {listen!r}: {error}") from error
    await server.start()
    try:
        is_path = addresses.socket_path(listen) is not None
        yield listen if is_path else f"{listen.rpartition(':')[0]}:{port}"
    finally:
        await server.stop(0.0)


def _terms(run: golden.Run) -> Terms:
    """Returns the terms of a run from what is told of it."""
    reply = run.reply
    described = pb.JoinReply(
        observation_space=reply.observation_space,
        action_space=reply.action_space,
        policy=reply.policy,
        network=reply.network,
        limits=reply.limits,
    )
    limits = LimitsConfig()
    return Terms(
        _unroll_spec(reply),
        list(reply.parameter_specs),
        reply.settings,
        run.agreed,
        seed=reply.seed,
        is_deterministic=False,
        max_envs_per_message=reply.limits.num_envs,
        max_in_flight=reply.max_unrolls_in_flight,
        bounds=MessageBounds(
            [_bounds(space) for space in reply.action_space],
            list(reply.limits.frames_per_step),
            limits,
        ),
        described=described,
        checks=ChecksConfig("off"),  # the kit looks for mistakes itself
    )


def _bounds(space: pb.Space) -> Bounds:
    if space.kind == pb.Space.KIND_BOX:
        return box(np.array(space.low), np.array(space.high))
    start = np.array(space.start)
    return Bounds(start[0], start[0] + int(space.n[0]) - 1)


def _unroll_spec(reply: pb.JoinReply) -> Unroll:
    """Returns the nest whose leaves have the names of `unroll_specs`."""
    leaves = {
        spec.name: ArraySpec(tuple(spec.shape), codec.numpy_dtype(spec.dtype))
        for spec in reply.unroll_specs
    }

    def nest(name: str) -> Any:
        if name in leaves:
            return leaves[name]
        inside = {
            key.removeprefix(f"{name}/").partition("/")[0]
            for key in leaves
            if key.startswith(f"{name}/")
        }
        return {key: nest(f"{name}/{key}") for key in inside} or ()

    return Unroll(
        timestep=TimeStep(
            nest("timestep/observation"),
            *(leaves[f"timestep/{name}"] for name in ("reward", "discount", "step_type")),
        ),
        output=AgentOutput(
            nest("output/action"), leaves["output/policy"], leaves["output/baseline"]
        ),
        core_state=nest("core_state"),
        frames=(),
        parameter_version=(),
    )


def shorter(run: golden.Run) -> golden.Run:
    """Returns another run in the same environment, whose unrolls have other lengths."""
    reply = pb.JoinReply()
    reply.CopyFrom(run.reply)
    timed = len(reply.unroll_specs) - reply.num_core_state_specs
    reply.unroll_length = max(1, reply.unroll_length - 2)
    for spec in reply.unroll_specs[:timed]:
        spec.shape[0] = reply.unroll_length + 1
    return run._replace(reply=reply)
