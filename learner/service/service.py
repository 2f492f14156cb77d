"""The Learner service of protos/impala/v1/learner.proto, without gRPC: messages in, messages out.

`join`, `submit`, `permit`, `acting`, `get_parameters`, `get_executable_policy`, `get_status` and
`evaluators.report` are called on one event loop; the others from any thread.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tree

from impala import finite
from impala.config.values import OptionError
from impala.runtime.credentials import Role
from impala.runtime.installation import VERSION
from impala.runtime.printable import printable
from impala.schedule.tasks import Schedule
from impala.types import Parameters, StepType, TimeStep
from learner.checks.checks import Checks
from learner.checks.violations import ProtocolViolation
from learner.data.ingest import (
    Arrival,
    Ingest,
    IngestClosed,
    Rejection,
    Validator,
    wire_specs,
)
from learner.data.pacing import LEFT_SECONDS, Pacing, Permit
from learner.evaluation.evaluators import Evaluators
from learner.evaluation.snapshots import Snapshots
from learner.fleet.accounts import Admission
from learner.fleet.receipts import ReceiptProofs
from learner.fleet.records import Records, RefusedOutput
from learner.fleet.refusals import (
    IncompatibleProtocol,
    InvalidRequest,
    NotOffered,
    Quarantined,
    Unavailable,
    UnknownActor,
    check_name,
)
from learner.fleet.roster import Member
from learner.service.executable import ExecutablePolicy
from learner.service.inference import Caller, Inference
from learner.service.parameters import PublishedParameters
from learner.service.terms import Terms, described
from learner.update.demand import Demand
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_POLL_SECONDS = 0.2  # between looks whether the result is on disk
_PERMIT_SECONDS = 0.8 * LEFT_SECONDS  # that a call waits for a permit, so that it is heard of
_MAX_VERSION = 40  # characters kept of a program's version
# No honest actor causes these, not by a restart nor by another version of the spec, but for a
# message that was sent before a restart with a lower limit of environments.
_BLAMED = {
    *(pb.REASON_NUM_ENVS, pb.REASON_TENSOR_COUNT, pb.REASON_TENSOR_SIZE),
    *(pb.REASON_NOT_FINITE, pb.REASON_RANGE, pb.REASON_MEANING),
}
REASONS = {
    reason: name.removeprefix("REASON_").lower() for name, reason in pb.Reason.items() if reason
}
"""Reason of a rejection -> its name in the accounts."""
_ROLES: dict[Role, "pb.Role"] = {"actor": pb.ROLE_ACTOR, "evaluator": pb.ROLE_EVALUATOR}


class Lineage(NamedTuple):
    """A learner's incarnation, and the earlier learners of its run."""

    incarnation: int  # drawn at random when the learner starts, not 0
    earlier: Mapping[int, int]  # incarnation -> the highest version that it can have published
    proofs: ReceiptProofs  # of receipts, which only learners of this run can verify


class Submit(Protocol):
    """`LearnerService.submit`, also of one stream."""

    async def __call__(
        self, message: pb.Unrolls, tensors: Sequence[memoryview] = ()
    ) -> pb.Receipt: ...


class Act(Protocol):
    """Answers the requests of one stream of `Act`, one after another."""

    async def __call__(self, request: pb.ActRequest) -> pb.ActReply: ...


class LearnerService:
    """The learner's service for actors and evaluators."""

    def __init__(
        self,
        terms: Terms,
        lineage: Lineage,
        records: Records,
        ingest: Ingest,
        schedule: Schedule,
        snapshots: Snapshots,
        pacing: Pacing | None = None,
        executable: ExecutablePolicy | None = None,
        inference: Inference | None = None,
        demand: Demand | None = None,
    ):
        """Makes a service without parameters, which `publish` provides.

        Args:
          terms: common to everyone who joins.
          lineage: this learner, and the earlier ones of its run.
          records: updated with what is received and by whom.
          ingest: receives the messages.
          schedule: tells which task to play; used by nobody else.
          snapshots: handed to evaluators.
          pacing: gives permits to begin unrolls. Without it none is needed.
          executable: the executable policy. Without it there is none.
          inference: acts for callers. Without it they have to act themselves.
          demand: told when callers ask for parameters. Without it each version is published.

        Raises:
          OptionError: the largest message would exceed gRPC's limit.
        """
        self._lineage = lineage
        self._records = records
        self._ingest = ingest
        self._schedule = schedule
        self._pacing = pacing
        self._executable = executable
        self._inference = inference
        self._demand = demand or Demand()
        self._is_deterministic = terms.is_deterministic
        self._parameters = PublishedParameters(schedule, pacing)
        unroll_specs, num_core_state_specs = wire_specs(terms.unroll_spec)
        fingerprint = codec.fingerprint(unroll_specs, terms.parameter_specs, terms.agreed)
        self.hang_seconds = terms.hang_seconds
        """That an actor may take for a row: it holds parameters meanwhile."""
        self._validator = Validator(
            terms.unroll_spec, fingerprint, terms.max_envs_per_message, terms.bounds
        )
        self.evaluators = Evaluators(
            *(terms.seed, schedule.num_tasks, records, snapshots),
            *(self._validator, self._newest_of),
        )
        if self.max_message_bytes > 2**31 - 1:
            raise OptionError(
                f"learner.max_envs_per_message is {terms.max_envs_per_message} and "
                f"learner.unroll_length {terms.unroll_spec.timestep.reward.shape[0] - 1}: a "
                f"message may have {self.max_message_bytes} bytes, gRPC takes at most "
                f"{2**31 - 1}. Lower one of them."
            )
        self._welcome = pb.JoinReply(
            protocol=codec.PROTOCOL_VERSION,
            learner_incarnation=lineage.incarnation,
            seed=terms.seed,
            settings=terms.settings,
            version=f"impala {VERSION}",
            fingerprint=fingerprint,
            unroll_length=terms.unroll_spec.timestep.reward.shape[0] - 1,
            unroll_specs=unroll_specs,
            num_core_state_specs=num_core_state_specs,
            parameter_specs=terms.parameter_specs,
            max_unrolls_in_flight=terms.max_in_flight,
            max_message_bytes=self._validator.max_message_bytes,
            needs_permits=pacing is not None,
            observation_space=described(terms.spaces[0], "timestep/observation"),
            action_space=described(terms.spaces[1], "output/action"),
            limits=terms.limits,
        )
        # For room: the newest message of each actor and incarnation.
        self._waiting: dict[tuple[str, int], asyncio.Timeout] = {}
        self._refuses = terms.checks.on_violation == "refuse"
        self._checked = 0  # messages
        self._checks: Checks | None = None
        if terms.checks.on_violation != "off":
            self._checks = Checks(self._welcome, terms.spaces[1], terms.agent)

    @property
    def max_message_bytes(self) -> int:
        """Returns the size of the largest message that an actor may send."""
        return self._validator.max_message_bytes

    def check_bytes_beside_tensors(self, size: int) -> None:
        """Checks the size of a message without its tensors, before it is parsed.

        Raises:
          InvalidRequest: no message may have so much.
        """
        if size > (most := self._validator.max_bytes_beside_tensors()):
            raise InvalidRequest(
                f"What is not tensors has {size} bytes, at most {most} are possible: send fewer "
                "numbers of info."
            )

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Registers an actor; an evaluator is not counted and gets index 0.

        Raises:
          IncompatibleProtocol: the caller uses another major version.
          InvalidRequest: a field has an impossible value.
          Quarantined: the actor is refused for a while.
          Superseded: another incarnation has taken the actor's name since this one joined.
        """
        if not codec.compatible(request.protocol):
            ours, theirs = codec.PROTOCOL_VERSION, request.protocol
            program = printable(request.version, _MAX_VERSION) or "of an unknown version"
            raise IncompatibleProtocol(
                f"The actor ({program}) speaks "
                f"protocol {theirs.major}.{theirs.minor}, the learner (impala {VERSION}) "
                f"{ours.major}.{ours.minor}: run the same major version on both sides."
            )
        check_name(request.actor)
        if request.incarnation == 0:
            raise InvalidRequest("incarnation is 0: draw another at random when the actor starts.")
        if request.role not in (pb.ROLE_ACTOR, pb.ROLE_EVALUATOR):
            raise InvalidRequest(f"role is {request.role}: say ROLE_ACTOR or ROLE_EVALUATOR.")
        if (quarantined := self._quarantined(request.actor)) is not None:
            self._records.roster.refused(request.actor, quarantined)
            raise Quarantined(quarantined)
        reply = pb.JoinReply()
        reply.CopyFrom(self._welcome)
        reply.finished = self._parameters.are_final
        version = request.version[:_MAX_VERSION]
        if request.role == pb.ROLE_EVALUATOR:
            reply.finished = self.evaluators.join()
            self._records.roster.joined(request.actor, "evaluator", version)
        else:
            index = self._records.accounts.join(
                request.actor,
                request.incarnation,
                request.acknowledged_sequence,
                request.acknowledged_unrolls if self._can_be_lost(request) else 0,
            )
            self._records.roster.joined(request.actor, "actor", version)
            reply.task = self._parameters.task(request.actor)
            # So that a restarted actor does not play its old episodes again.
            start = request.incarnation
            if self._is_deterministic:
                start = self._records.accounts.lives(request.actor)
            entropy = np.random.SeedSequence([reply.seed, index, start])
            reply.seed = int(entropy.generate_state(1)[0])
            if self._pacing is not None:
                self._pacing.replaced((request.actor, request.incarnation))
        return reply

    async def submit(self, message: pb.Unrolls, tensors: Sequence[memoryview] = ()) -> pb.Receipt:
        """Submits unrolls to the ingest. Waits while it is full.

        It may be cancelled: then the message is either not counted, or counted and queued.

        Args:
          message: as received, with or without its tensors.
          tensors: from `codec.split`; those of the message come after them.

        Returns:
          The receipt, which also reports anything wrong with the message.

        Raises:
          Unavailable: a message came over another stream of the sender while this one waited.
        """
        if (receipt := self._refusal(message)) is not None:
            return receipt
        newest = self._newest_of(message.learner_incarnation)
        checked = self._validator.check(message, newest, tensors)
        if isinstance(checked, Rejection):
            return self._reject(message, checked)
        named = message.actor, message.incarnation
        try:
            async with self._only_one_waits(named):
                try:
                    async with self._ingest.room(message.num_envs):
                        return self._receive(message, checked)
                except IngestClosed:  # Training has ended: it is finished once that is on disk.
                    while not self._parameters.are_final:
                        await asyncio.sleep(_POLL_SECONDS)
                    return self._receipt(message, pb.STATUS_FINISHED)
        except TimeoutError:
            raise Unavailable(
                f"{message.actor} has sent a message over another stream while this one waited for "
                "room: keep one stream open."
            ) from None

    def _receive(self, message: pb.Unrolls, checked: Arrival) -> pb.Receipt:
        """Takes a valid message for which there is room."""
        if (receipt := self._refusal(message)) is not None:  # a copy may have waited, too
            return receipt
        if (refused := self._check(message, checked)) is not None:
            return self._reject(message, refused)
        named = message.actor, message.incarnation
        admission = self._records.accounts.receive(*named, message.sequence, message.num_envs)
        if admission.verdict == "duplicate":
            return self._receipt(message, pb.STATUS_DUPLICATE)
        return self._accept(message, checked, admission)

    def _refusal(self, message: pb.Unrolls) -> pb.Receipt | None:
        """Judges a message by its sender, the run and its number, in this order.

        Returns:
          The receipt of a message that is not taken, whatever it holds.
        """
        accounts, named = self._records.accounts, (message.actor, message.incarnation)
        if not accounts.may_send(*named):
            return self._reject(message, _unknown(message))
        if (quarantined := self._quarantined(message.actor)) is not None:
            return self._reject(message, Rejection(pb.REASON_QUARANTINED, quarantined))
        if self._parameters.are_final:
            return self._receipt(message, pb.STATUS_FINISHED)
        admission = accounts.judge(*named, message.sequence)
        if admission.verdict == "accepted":
            return None
        if admission.verdict == "duplicate":
            return self._receipt(message, pb.STATUS_DUPLICATE)
        detail = (
            f"sequence is {message.sequence}, the next one is {admission.expected_sequence}: "
            "number the messages of an incarnation 1, 2, 3, ... and send them in order."
        )
        return self._reject(message, Rejection(pb.REASON_SEQUENCE, detail))

    @contextlib.asynccontextmanager
    async def _only_one_waits(self, sender: tuple[str, int]) -> AsyncIterator[None]:
        """Lets a sender's newest message wait: an older one was sent over a stream that is gone.

        Otherwise as many as there are streams would wait, each with all its bytes.

        Raises:
          TimeoutError: another message of this sender has come.
        """
        async with asyncio.timeout(None) as waiting:
            if (older := self._waiting.get(sender)) is not None:
                older.reschedule(asyncio.get_running_loop().time())
            self._waiting[sender] = waiting
            try:
                yield
            finally:
                if self._waiting.get(sender) is waiting:
                    del self._waiting[sender]

    @contextlib.contextmanager
    def stream(self) -> Iterator[Submit]:
        """Yields the `submit` of one stream of messages.

        The first message that is allowed binds the stream to its actor and incarnation; messages of
        others are rejected.
        """
        sender: tuple[str, int] | None = None

        async def submit(message: pb.Unrolls, tensors: Sequence[memoryview] = ()) -> pb.Receipt:
            nonlocal sender
            named = message.actor, message.incarnation
            if sender is None and self._records.accounts.may_send(*named):
                self._records.roster.began(message.actor)
                sender = named
            if sender is not None and sender != named:
                return self._reject_another(message, sender[0])
            return await self.submit(message, tensors)

        try:
            yield submit
        finally:
            if sender is not None:
                has_left = self._records.roster.ended(sender[0])
                if has_left and self._pacing is not None:
                    self._pacing.left(sender)

    def refused(self, actor: str, why: str) -> None:
        """Notes, for the status, that an actor of this name was turned away."""
        self._records.roster.refused(actor, why)

    def blame(self, actor: str, why: str) -> None:
        """Notes that an actor, known by an earlier message, sent what no honest actor sends."""
        self._records.quarantine.blame(actor, why)
        self._records.roster.refused(actor, why)

    async def permit(self, request: pb.GetParametersRequest) -> Permit | None:
        """Waits, for a while, until the caller may begin a round of unrolls.

        Returns:
          None if it may not yet, has not asked for it, was replaced, or the run has finished.

        Raises:
          InvalidRequest: no such round can ever begin.
          Quarantined: the actor is refused for a while.
          UnknownActor: it asks for a permit, and has to join first.
        """
        pacing, key = self._pacing, (request.actor, request.incarnation)
        if not self._records.accounts.may_send(*key):
            if pacing is not None and request.round:  # it sends nothing, so no stream would tell it
                raise UnknownActor(_unknown(request).detail)
            return None
        self._records.roster.heard(request.actor, "actor")  # the name is a sign of life
        if pacing is None:
            return None
        if not request.round:
            pacing.heard(key)
            return None
        if (quarantined := self._quarantined(request.actor)) is not None:
            raise Quarantined(quarantined)
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended with all that waited on it
                loop.call_soon_threadsafe(changed.set)

        def ask() -> Permit | None:
            try:
                return pacing.ask(key, request.round, request.unrolls, wake)
            except ValueError as error:
                raise InvalidRequest(str(error)) from None

        if (permit := ask()) is None and not self._parameters.are_final:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _PERMIT_SECONDS)
            # Again: another incarnation may have joined, and nobody would use this one's permit.
            if not self._parameters.are_final and self._records.accounts.may_send(*key):
                permit = ask()
        return permit

    async def newest_parameters(self) -> None:
        """Waits until what was learned is published, for as long as an update takes."""
        await self._demand.wait()

    def get_parameters(
        self, request: pb.GetParametersRequest, permit: Permit | None = None
    ) -> bytes:
        """Returns the newest parameters, if the caller does not hold them.

        Args:
          request: what the caller holds.
          permit: of the caller. The parameters are those that it is for; an actor that needs one
            and has none gets no parameters.

        Returns:
          A serialised GetParametersReply, the same bytes for all callers. It has no parameters if
          the caller holds the newest, or before the first `publish`.
        """
        return self._parameters.reply(request, permit)

    async def get_executable_policy(
        self, request: pb.GetExecutablePolicyRequest
    ) -> pb.GetExecutablePolicyReply:
        """Returns the executable policy, unless the caller holds it.

        Raises:
          NotOffered: there is none.
        """
        if self._executable is None:
            raise NotOffered("This learner has no executable policy: act with parameters.")
        made = await self._executable.get()
        reply = pb.GetExecutablePolicyReply(digest=made.digest)
        if request.digest != made.digest:
            reply.onnx = made.onnx
        return reply

    @contextlib.contextmanager
    def acting(self) -> Iterator[Act]:
        """Yields what acts for one stream; what that has pinned is released at the end.

        Raises:
          NotOffered: the learner does not act for others.
        """
        if self._inference is None:
            why = "learner.inference is never" if self._pacing is None else "actors need permits"
            raise NotOffered(
                f"This learner does not act for others, as {why}: act with parameters or the "
                "executable policy, or start the learner with --learner.inference auto and "
                "without mix.lag_budget, mix.exact_lag and deterministic."
            )
        with self._inference.caller() as caller:
            sender: tuple[str, int] | None = None

            async def act(request: pb.ActRequest) -> pb.ActReply:
                nonlocal sender
                named = request.actor, request.incarnation
                if sender not in (None, named):
                    raise InvalidRequest("A stream of Act is of one actor and incarnation.")
                if not self._records.accounts.may_send(*named):
                    raise UnknownActor(_unknown(request).detail)
                sender = named
                if (quarantined := self._quarantined(request.actor)) is not None:
                    raise Quarantined(quarantined)
                self._records.roster.heard(request.actor, "actor")
                return await self._act(caller, request)

            yield act

    async def _act(self, caller: Caller, request: pb.ActRequest) -> pb.ActReply:
        """Acts in one row of a caller that is known."""
        if self._parameters.are_final:
            return pb.ActReply(finished=True)
        if self._parameters.newest is None:
            raise Unavailable("The learner has no parameters yet: ask again.")
        self._demand.ask()
        acted = await caller.act(request)
        return pb.ActReply(
            learner_incarnation=acted.parameters.incarnation,
            parameter_version=acted.parameters.version,
            tensors=codec.encode(acted.arrays),
        )

    @property
    def queued(self) -> int:
        """Returns how many unrolls wait to be learned from."""
        return self._ingest.depth if self._pacing is None else self._pacing.queued

    def get_status(self) -> pb.RunStatus:
        """Returns the state of the run and its fleet."""
        published, totals = self._parameters.newest, self._records.accounts.totals()
        return pb.RunStatus(
            learner_incarnation=self._lineage.incarnation,
            parameter_version=published.parameters.version if published else 0,
            frames=published.parameters.frames if published else 0,
            progress=published.parameters.progress if published else 0.0,
            finished=self._parameters.are_final,
            queued=self.queued,
            queue_capacity=self._ingest.capacity,
            received=totals.received,
            learned=totals.learned,
            dropped=totals.dropped,
            rejected=totals.rejected,
            duplicates=totals.duplicates,
            members=[self._member(member) for member in self._records.roster.members()],
            waiting_snapshots=len(self.evaluators),
            dropped_info_names=self._records.info_names.dropped,
            violations=self._records.violations.totals(),
            checked=self._checked,
            version=f"impala {VERSION}",
            **(published.shown if published else {}),
        )

    def publish(self, parameters: Parameters, **shown: Any) -> None:
        """Publishes parameters to actors.

        Args:
          parameters: their arrays must not change any more.
          **shown: fields of the status: phase, skipped_updates and rollbacks. After another
            rollback no permit of an exact lag names parameters of before.

        Raises:
          NotFiniteError: a number in them is NaN or infinite.
        """
        finite.check(
            {f"tensor {i}": value for i, value in enumerate(parameters.values)},
            f"Parameters of version {parameters.version} are not published",
        )
        self._parameters.publish(parameters, shown)
        if self._inference is not None:
            self._inference.publish(parameters)

    def learned(self) -> None:
        """Takes note of a batch of fresh unrolls; what was learned from it has been published."""
        self._parameters.learned()

    def check(self) -> None:
        """Raises RuntimeError if a thread that answers callers has died."""
        if self._inference is not None:
            self._inference.check()

    def close(self) -> None:
        """Ends acting, and the making of an executable policy."""
        if self._inference is not None:
            self._inference.close()
        if self._executable is not None:
            self._executable.close()

    def finish(self) -> None:
        """Reports to everyone that training has ended, and accepts no more unrolls."""
        self._parameters.finish()
        self._ingest.close()
        if self._pacing is not None:
            self._pacing.wake()

    def _accept(self, message: pb.Unrolls, arrival: Arrival, admission: Admission) -> pb.Receipt:
        """Queues a message, and counts what it holds."""
        recorded = [self._records.info_names.keep(episode) for episode in arrival.episodes]
        arrival = arrival._replace(
            offset=admission.offset,
            queued=time.monotonic(),
            episodes=recorded,
            step_info=self._records.info_names.recorded(arrival.step_info),
            rewards=_rewards(arrival.unroll.timestep),
        )
        self._ingest.put(self._permitted(message, arrival))
        frames = int(arrival.unroll.frames.sum())
        self._schedule.played(arrival.task, frames)
        self._records.roster.sent(
            message.actor,
            unrolls=message.num_envs,
            frames=frames,
            version=message.parameter_version,
            size=sum(leaf.nbytes for leaf in tree.flatten(arrival.unroll)),
            returns=[episode.episode_return for episode in arrival.episodes],
            rewards=arrival.rewards,
            pace=arrival.pace,
        )
        self._records.roster.failed(message.actor, arrival.faults)
        self._records.violations.accepted(message.actor)
        return self._receipt(message, pb.STATUS_ACCEPTED)

    def _check(self, message: pb.Unrolls, arrival: Arrival) -> Rejection | None:
        """Looks for violations in a message that is next, and counts them.

        Returns:
          Why it is refused, if violations are.
        """
        if self._checks is None:
            return None
        unroll = arrival.unroll
        arrays = tree.flatten((unroll.timestep, unroll.output, unroll.core_state))
        violations = self._checks.check(message, arrays)
        self._checked += 1
        for violation in violations:
            self._records.violations.add(message.actor, violation)
        if violations and self._refuses:
            return Rejection(pb.REASON_MEANING, str(violations[0]))
        return None

    def _permitted(self, message: pb.Unrolls, arrival: Arrival) -> Arrival:
        """Looks up the permit of a message, if unrolls need one."""
        if self._pacing is None:
            return arrival
        unrolls = message.num_envs - arrival.offset
        key = message.actor, message.incarnation
        admitted = self._pacing.came(key, self._permit(message), unrolls)
        return arrival._replace(due=admitted.due, unpermitted=unrolls - admitted.unrolls)

    def _permit(self, message: pb.Unrolls) -> int:
        """Returns the number of a message's permit; 0 if an earlier learner gave it."""
        is_ours = message.learner_incarnation == self._lineage.incarnation
        return message.permit if is_ours else 0

    def _reject(self, message: pb.Unrolls, rejection: Rejection) -> pb.Receipt:
        name = REASONS[rejection.reason]
        if rejection.violation is not None:
            violation = ProtocolViolation(rejection.violation, rejection.detail)
            self._records.violations.add(message.actor, violation)
        elif rejection.reason == pb.REASON_VERSION:
            self._records.violations.refused_version(message.actor, rejection.detail)
        self._records.accounts.rejected(name, message.actor, message.incarnation, message.sequence)
        self._records.roster.refused(message.actor, f"{name}: {rejection.detail}", is_message=True)
        if rejection.of_network:
            is_ours = message.learner_incarnation == self._lineage.incarnation
            version = message.parameter_version if is_ours else None
            self._records.refused_outputs.append(
                RefusedOutput(message.actor, f"{name}: {rejection.detail}", version)
            )
        elif rejection.reason in _BLAMED and not (
            rejection.reason == pb.REASON_NUM_ENVS
            and message.num_envs > self._welcome.limits.num_envs
        ):
            self._records.quarantine.blame(message.actor, f"{name}: {rejection.detail}")
        if self._pacing is not None and rejection.reason != pb.REASON_UNKNOWN_ACTOR:
            self._pacing.invalidate((message.actor, message.incarnation), self._permit(message))
        receipt = self._receipt(message, pb.STATUS_REJECTED, rejection.reason)
        receipt.detail = rejection.detail
        return receipt

    def _reject_another(self, message: pb.Unrolls, sender: str) -> pb.Receipt:
        """Rejects a message in the stream of `sender` that names another actor."""
        detail = (
            f"The stream is of {sender}, the message of {message.actor[:80]!r} with incarnation "
            f"{message.incarnation}: open a stream for each."
        )
        self._records.accounts.rejected("unknown_actor")
        self._records.roster.refused(sender, f"unknown_actor: {detail}", is_message=True)
        receipt = self._receipt(message, pb.STATUS_REJECTED, pb.REASON_UNKNOWN_ACTOR)
        receipt.detail = detail
        return receipt

    def _receipt(
        self,
        message: pb.Unrolls,
        status: "pb.Status",
        reason: "pb.Reason" = pb.REASON_UNSPECIFIED,
    ) -> pb.Receipt:
        receipt = pb.Receipt(
            sequence=message.sequence,
            status=status,
            reason=reason,
            learner_incarnation=self._lineage.incarnation,
            newest_version=self._parameters.version,
            task=self._parameters.task(message.actor if reason != pb.REASON_UNKNOWN_ACTOR else ""),
        )
        if reason != pb.REASON_UNKNOWN_ACTOR:
            whose = message.actor, message.incarnation, message.sequence
            unrolls = self._records.accounts.acknowledged(*whose)
            if unrolls is not None:
                receipt.acknowledged_unrolls = unrolls
                receipt.proof = self._lineage.proofs.make(*whose, unrolls)
        return receipt

    def _can_be_lost(self, request: pb.JoinRequest) -> bool:
        """Returns whether a receipt of an earlier learner proves the actor's claim."""
        return self._lineage.proofs.of_earlier_learner(
            request.proof,
            request.actor,
            request.incarnation,
            request.acknowledged_sequence,
            request.acknowledged_unrolls,
        )

    def _newest_of(self, incarnation: int) -> int | None:
        """Returns the last version that a learner of this run can have published, or None."""
        if incarnation == self._lineage.incarnation:
            return self._parameters.version
        return self._lineage.earlier.get(incarnation)

    def _quarantined(self, actor: str) -> str | None:
        """Returns why an actor is refused, or None."""
        standing = self._records.quarantine.standing(actor)
        if not standing.seconds_left:
            return None
        return (
            f"{actor} is quarantined for {standing.seconds_left:.0f} s more, since it was blamed "
            f"{standing.blamed} times, last for {standing.why}"
        )

    def _member(self, member: Member) -> pb.Member:
        standing = self._records.quarantine.standing(member.name)
        message = pb.Member(**{**member._asdict(), "role": _ROLES[member.role]})
        message.blamed = standing.blamed
        message.quarantined_seconds = standing.seconds_left
        message.last_rejection = member.last_rejection or standing.why
        made = self._records.violations.of(member.name)
        message.violations.update(made.counts)
        message.last_violation = made.last
        return message


def _rewards(timestep: TimeStep) -> tuple[float, int]:
    """Returns the sum of the rewards in rows 1..T [T + 1, E], and the number of their steps."""
    steps = np.count_nonzero(timestep.step_type[1:] != StepType.FIRST)
    return float(timestep.reward[1:].sum(dtype=np.float64)), int(steps)


def _unknown(message: pb.Unrolls | pb.ActRequest | pb.GetParametersRequest) -> Rejection:
    return Rejection(
        pb.REASON_UNKNOWN_ACTOR,
        f"No Join for actor {message.actor[:80]!r} with incarnation {message.incarnation}, or "
        "another incarnation joined since: join again, and give each actor its own name.",
    )
