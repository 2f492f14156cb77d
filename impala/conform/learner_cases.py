"""The bad messages that a learner is sent, and the sentences of the page that they are about."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from impala.conform.probe import Probe
from impala.conform.report import Failed, Report
from impala.runtime.security import ClientSecurity
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

_FIRST = 0  # timestep/step_type

JOIN, PARAMETERS, IDENTITY = "Join", "Parameters", "Names and incarnations"
GOOD, ORDER, NUMBERS = "Good messages", "The order of judgement", "Numbers of messages"
BAD, BYTES, ACT = "Bad messages", "Bytes that are no message", "Act"

_USED_UP = "So a number that was used up is a duplicate, whatever the message holds."
_GOES_ON = "A refused message does not end the stream and harms nobody else."
_DETAIL = "`Receipt.detail` tells people the value, the limit and the fix."
# Cause in the page's table of reasons, by the reason.
_CAUSES: Mapping[str, str] = {
    "REASON_UNKNOWN_ACTOR": "no `Join` of this name and incarnation with this learner, or another "
    "incarnation joined since",
    "REASON_FINGERPRINT": "another spec or other settings than the learner's",
    "REASON_SEQUENCE": "the number is 0 or one was skipped; the expected one is in `detail` and "
    "stays expected",
    "REASON_NUM_ENVS": "E is 0 or over the learner's limit, or `frames` has not E entries",
    "REASON_TENSOR_COUNT": "not one tensor per unroll spec",
    "REASON_TENSOR_SIZE": "a tensor has not the bytes of its dtype and shape",
    "REASON_NOT_FINITE": "NaN or infinity in any float tensor",
    "REASON_RANGE": "a number outside its range: task, bool, step type and its order, discount, "
    "action, an observation that is a choice, frames, an episode's numbers, seconds; a reward, "
    "observation, policy parameter or value estimate beyond the learner's [limits]",
    "REASON_VERSION": "`learner_incarnation` is 0 or no learner of this run, or it cannot have "
    "published that version",
}
LEARNER_SENTENCES: Mapping[str, Sequence[str]] = {
    JOIN: (
        "another major protocol version, or a newer process has joined under this name; the "
        "message says which",
        "an impossible name, incarnation, role or acknowledgement, or no `JoinRequest` at all; the "
        "message says which",
        "Spaces, policy, network and limits are absent from learners before 2.3.",
    ),
    PARAMETERS: ("The reply has no `parameters` if the caller holds the newest",),
    GOOD: (
        "The learner answers every message with one receipt, in order, and `Receipt.sequence` "
        "repeats the number.",
        "Each receipt but that of an unknown actor says in `acknowledged_unrolls` how many unrolls "
        "of this incarnation the learner has accepted up to and including that message",
    ),
    NUMBERS: ("seen this number before: the receipt was lost on its way", _USED_UP),
    ORDER: ("its sender (`REASON_UNKNOWN_ACTOR`, `REASON_QUARANTINED`)",),
    IDENTITY: (
        "an older one is told `REASON_UNKNOWN_ACTOR` from then on, and its next `Join` is refused "
        "with `FAILED_PRECONDITION`",
        "has no index and may not send unrolls: they are answered with `REASON_UNKNOWN_ACTOR`",
    ),
    BAD: (*_CAUSES.values(), _GOES_ON, _DETAIL),
    BYTES: (
        "Bytes that are no message of the right kind end any call, streams included, with "
        "`INVALID_ARGUMENT`",
        "`RESOURCE_EXHAUSTED` | a message is larger than `max_message_bytes`",
    ),
    ACT: (
        "An unroll that begins is acted by the newest parameters, and all of it by the same, which "
        "the replies name.",
        "`[E, ...]`: the leaves `output/action...`, `output/policy`, `output/baseline`, then the "
        "leaves of the core state after this row",
        "An unroll begins with row 0 (`begins`), and has T rows that are acted upon: 0 to T − 1.",
        "`NOT_FOUND`: nobody has joined by that name and incarnation, or another incarnation has "
        "since: `Join` and open another stream.",
        "`INVALID_ARGUMENT`: a request is wrong, and its line says what is.",
    ),
}


class _NotOffered(Exception):
    """The learner does not have what a case is about."""


class LearnerKit:
    """Sends a learner every bad message, each in the name of another actor.

    Args:
      learner: HOST:PORT or unix:PATH.
      security: the credentials to present.
      seconds: deadline of each call.
      say: is called with lines for people.
    """

    def __init__(
        self,
        learner: str,
        security: ClientSecurity,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.report = Report(LEARNER_SENTENCES)
        self._probe = Probe(learner, security, seconds)
        self._say = say

    def run(self) -> Report:
        """Sends everything."""
        cases: Mapping[str, Callable[[], None]] = {
            JOIN: self._joins,
            PARAMETERS: self._pulls,
            GOOD: self._good,
            NUMBERS: self._numbers,
            ORDER: self._order,
            IDENTITY: self._identity,
            BAD: self._bad,
            BYTES: self._bytes,
            ACT: self._acts,
        }
        try:
            for case, put_through in cases.items():
                self._say(f"{case} ...")
                untested = ""
                try:
                    if case == JOIN:
                        self._probe.connect()
                    put_through()
                except _NotOffered as refused:
                    untested = str(refused)
                except Failed as failed:
                    self.report.failed(case, str(failed))
                    if not self._probe.parameters.learner_incarnation:
                        break
                self.report.done(case, untested)
        finally:
            self._probe.close()
        return self.report

    def _joins(self) -> None:
        probe = self._probe
        refused: Mapping[str, Sequence[dict[str, Any]]] = {
            "FAILED_PRECONDITION": [{"protocol": pb.ProtocolVersion(major=99)}],
            "INVALID_ARGUMENT": [
                {"actor": ""},
                {"actor": "a" * 201},
                {"actor": "a\n"},
                {"incarnation": 0},
                {"role": pb.ROLE_UNSPECIFIED},
            ],
        }
        for (expected, requests), sentence in zip(
            refused.items(), LEARNER_SENTENCES[JOIN][:2], strict=True
        ):
            for fields in requests:
                if (status := probe.join_status(probe.request(**fields))) != expected:
                    detail = f"Join with {fields} is answered with {status}, not {expected}"
                    self.report.failed(JOIN, detail, sentence)
        for name in ("observation_space", "action_space", "unroll_specs", "parameter_specs"):
            if not getattr(probe.reply, name):
                raise Failed(f"JoinReply.{name} is empty")
        if probe.reply.protocol.minor >= 3 and not probe.reply.limits.num_envs:
            self.report.failed(JOIN, "limits are absent", LEARNER_SENTENCES[JOIN][2])

    def _pulls(self) -> None:
        held = self._probe.parameters
        again = self._probe.pull(
            learner_incarnation=held.learner_incarnation, newer_than=held.version + 2**40
        )
        if again.HasField("parameters"):
            raise Failed("who holds a newer version gets an older one")
        if not self._probe.pull(learner_incarnation=0).HasField("parameters"):
            raise Failed("who holds none gets none")

    def _good(self) -> None:
        """Two messages, of which the second follows the first."""
        probe = self._probe
        actor = probe.joined()
        first, second = probe.arrays(1), probe.arrays(2)
        for name, array in second.items():
            if not name.startswith("core_state"):
                array[0] = first[name][-1]
        receipts = probe.send(
            probe.message(actor, number, tensors=codec.encode(arrays.values()))
            for number, arrays in enumerate((first, second), 1)
        )
        for number, receipt in enumerate(receipts, 1):
            _expect(receipt, pb.STATUS_ACCEPTED)
            told = receipt.sequence, receipt.acknowledged_unrolls, bool(receipt.proof)
            if told != (number, number, True):
                raise Failed(f"(sequence, acknowledged_unrolls, proof or not) is {told}")

    def _numbers(self) -> None:
        probe = self._probe
        actor = probe.joined()
        good = probe.message(actor)
        spoilt = probe.message(actor, tensors=[], fingerprint="another")
        first, again, other = probe.send([good, good, spoilt])
        _expect(first, pb.STATUS_ACCEPTED)
        _expect(again, pb.STATUS_DUPLICATE)
        _expect(other, pb.STATUS_DUPLICATE)
        if again.acknowledged_unrolls != 1:
            raise Failed(f"a duplicate was counted: {again.acknowledged_unrolls} unrolls of 1")

    def _order(self) -> None:
        """Everything is wrong with a message of an unknown actor: its sender is what counts."""
        probe = self._probe
        message = probe.message(probe.request(), sequence=9, tensors=[], fingerprint="another")
        (receipt,) = probe.send([message])
        _expect(receipt, pb.STATUS_REJECTED, pb.REASON_UNKNOWN_ACTOR)
        if receipt.proof or receipt.acknowledged_unrolls:
            raise Failed("the receipt of an unknown actor proves something")

    def _identity(self) -> None:
        probe = self._probe
        old, evaluated = LEARNER_SENTENCES[IDENTITY]
        first = probe.joined()
        newer = pb.JoinRequest()
        newer.CopyFrom(first)
        newer.incarnation = first.incarnation // 2 + 1
        probe.join(newer)
        (receipt,) = probe.send([probe.message(first)])
        _expect(receipt, pb.STATUS_REJECTED, pb.REASON_UNKNOWN_ACTOR)
        if (status := probe.join_status(first)) != "FAILED_PRECONDITION":
            self.report.failed(IDENTITY, f"its next Join is answered with {status}", old)
        evaluator = probe.request(role=pb.ROLE_EVALUATOR)
        if probe.join_status(evaluator) == "OK":  # some runs have nothing to evaluate
            (receipt,) = probe.send([probe.message(evaluator)])
            if receipt.reason != pb.REASON_UNKNOWN_ACTOR:
                self.report.failed(
                    IDENTITY, f"its unrolls are answered with {_said(receipt)}", evaluated
                )

    def _bad(self) -> None:
        """Each is sent twice, then a good one: a number that is used up is not judged again."""
        probe = self._probe
        for what, reason, spoil in self._spoilt():
            sentence = _CAUSES[reason]
            try:
                actor = probe.joined() if reason != "REASON_UNKNOWN_ACTOR" else probe.request()
                message = probe.message(actor)
                spoil(message)
                messages = [message, message]
                expected: Any = pb.Reason.Value(reason)
                if reason not in ("REASON_UNKNOWN_ACTOR", "REASON_SEQUENCE"):
                    messages.append(probe.message(actor, 2, frames=[1, 1]))
                receipts = probe.send(messages)
                _expect(receipts[0], pb.STATUS_REJECTED, expected)
                if not receipts[0].detail:
                    self.report.failed(BAD, f"{what}: the receipt has no detail", _DETAIL)
                if len(messages) == 3:
                    _expect(receipts[1], pb.STATUS_DUPLICATE)
                    if receipts[2].reason != pb.REASON_NUM_ENVS:
                        detail = f"after {what}, another message gets {_said(receipts[2])}"
                        self.report.failed(BAD, detail, _GOES_ON)
                else:
                    _expect(receipts[1], pb.STATUS_REJECTED, expected)
            except Failed as failed:
                self.report.failed(BAD, f"{what}: {failed}", sentence)

    def _spoilt(self) -> list[tuple[str, str, Callable[[pb.Unrolls], None]]]:
        """Returns (what is wrong, the reason that is to be given, a function that makes it so)."""
        probe = self._probe
        arrays, limits = probe.arrays(), probe.reply.limits
        names = list(arrays)
        length = probe.reply.unroll_length

        def fields(**changes: Any) -> Callable[[pb.Unrolls], None]:
            def spoil(message: pb.Unrolls) -> None:
                for name, value in changes.items():
                    if isinstance(value, list):
                        message.ClearField(name)
                        getattr(message, name).extend(value)
                    else:
                        setattr(message, name, value)

            return spoil

        def tensor(name: str, value: float, row: int = -1) -> Callable[[pb.Unrolls], None]:
            def spoil(message: pb.Unrolls) -> None:
                array = arrays[name].copy()
                array[row] = value
                message.tensors[names.index(name)] = codec.encode([array])[0]

            return spoil

        def shorter(message: pb.Unrolls) -> None:
            message.tensors[0] = message.tensors[0][:-1]

        def fewer(message: pb.Unrolls) -> None:
            del message.tensors[-1]

        numbers = "REASON_RANGE"
        found: list[tuple[str, str, Callable[[pb.Unrolls], None]]] = [
            ("nobody has joined", "REASON_UNKNOWN_ACTOR", fields()),
            ("another fingerprint", "REASON_FINGERPRINT", fields(fingerprint="another")),
            ("no fingerprint", "REASON_FINGERPRINT", fields(fingerprint="")),
            ("number 0", "REASON_SEQUENCE", fields(sequence=0)),
            ("a number was left out", "REASON_SEQUENCE", fields(sequence=3)),
            ("no environments", "REASON_NUM_ENVS", fields(num_envs=0, frames=[])),
            ("frames of two", "REASON_NUM_ENVS", fields(frames=[length] * 2)),
            ("one tensor too few", "REASON_TENSOR_COUNT", fewer),
            ("one byte too few", "REASON_TENSOR_SIZE", shorter),
            (
                "two environments, tensors of one",
                "REASON_TENSOR_SIZE",
                fields(num_envs=2, frames=[length] * 2),
            ),
            ("a reward that is NaN", "REASON_NOT_FINITE", tensor("timestep/reward", math.nan)),
            ("an infinite baseline", "REASON_NOT_FINITE", tensor("output/baseline", math.inf)),
            ("a task that there is not", numbers, fields(task=len(probe.reply.settings.tasks))),
            ("a step type that there is not", numbers, tensor("timestep/step_type", 7)),
            ("FIRST after MID", numbers, tensor("timestep/step_type", _FIRST)),
            ("a discount of 2", numbers, tensor("timestep/discount", 2.0)),
            ("frames of 0", numbers, fields(frames=[0])),
            ("too many frames", numbers, fields(frames=[2**31])),
            (
                "a return that is NaN",
                numbers,
                fields(episodes=[pb.Episode(episode_return=math.nan, length=1, frames=1)]),
            ),
            ("an episode without steps", numbers, fields(episodes=[pb.Episode()])),
            ("negative seconds", numbers, fields(elapsed_seconds=-1.0)),
            (
                "more seconds waited than passed",
                numbers,
                fields(elapsed_seconds=1.0, waited_seconds=9.0),
            ),
            ("learner 0", "REASON_VERSION", fields(learner_incarnation=0)),
            ("a learner of another run", "REASON_VERSION", fields(learner_incarnation=1)),
            ("a version of tomorrow", "REASON_VERSION", fields(parameter_version=2**40)),
        ]
        if limits.num_envs:
            many = limits.num_envs + 1
            found.append(
                (
                    "too many environments",
                    "REASON_NUM_ENVS",
                    fields(num_envs=many, frames=[length] * many),
                )
            )
            found.append(
                (
                    "a reward beyond its limit",
                    numbers,
                    tensor("timestep/reward", 10 * limits.reward),
                )
            )
            found.append(
                (
                    "a baseline beyond its limit",
                    numbers,
                    tensor("output/baseline", 10 * limits.baseline),
                )
            )
        for space in probe.reply.action_space:
            beyond = [*space.high] or [
                first + n for first, n in zip(space.start, space.n, strict=True)
            ]
            if np.isfinite(beyond).all():
                found.append(
                    (
                        "an action that there is not",
                        numbers,
                        tensor(space.name, max(beyond) * 2 + 1),
                    )
                )
        return found

    def _bytes(self) -> None:
        probe = self._probe
        no_message, too_large = LEARNER_SENTENCES[BYTES]
        if (status := probe.stream_status(b"\xff" * 40)) != "INVALID_ARGUMENT":
            self.report.failed(BYTES, f"they are answered with {status}", no_message)
        large = probe.message(probe.joined(), tensors=[bytes(probe.reply.max_message_bytes)])
        if (status := probe.stream_status(large.SerializeToString())) != "RESOURCE_EXHAUSTED":
            self.report.failed(BYTES, f"it is answered with {status}", too_large)

    def _acts(self) -> None:
        """A whole unroll and the beginning of the next one, then requests that are wrong."""
        probe = self._probe
        one_version, tensors, length, unknown, wrong = LEARNER_SENTENCES[ACT]
        actor, steps = probe.joined(), probe.reply.unroll_length
        rows = [probe.row(actor, begins=step % steps == 0) for step in range(steps + 1)]
        replies, status = probe.act(rows)
        if not replies and status in ("FAILED_PRECONDITION", "UNIMPLEMENTED"):
            raise _NotOffered(f"this learner does not act for others ({status})")
        if len(replies) != len(rows):
            raise Failed(f"{len(replies)} of {len(rows)} rows were answered, then {status}")
        named = {(each.learner_incarnation, each.parameter_version) for each in replies[:steps]}
        if len(named) != 1 or 0 in next(iter(named))[:1]:
            self.report.failed(ACT, f"versions of one unroll are {sorted(named)}", one_version)
        sizes = [[len(tensor) for tensor in each.tensors] for each in replies]
        if any(each != probe.acted_sizes() for each in sizes):
            detail = f"bytes of its tensors are {sizes[0]}, not {probe.acted_sizes()}"
            self.report.failed(ACT, detail, tensors)
        for sentence, expected, sent in (
            (length, "INVALID_ARGUMENT", [probe.row(actor)]),
            (length, "INVALID_ARGUMENT", [*rows[:steps], probe.row(actor)]),
            (unknown, "NOT_FOUND", [probe.row(probe.request(), begins=True)]),
            (wrong, "INVALID_ARGUMENT", [probe.row(actor, begins=True, num_envs=0)]),
            (wrong, "INVALID_ARGUMENT", [probe.row(actor, begins=True, tensors=[])]),
        ):
            _, status = probe.act(sent)
            if status != expected:
                detail = f"{len(sent)} rows are answered with {status}, not {expected}"
                self.report.failed(ACT, detail, sentence)


def _expect(
    receipt: pb.Receipt, status: "pb.Status", reason: "pb.Reason" = pb.REASON_UNSPECIFIED
) -> None:
    if (receipt.status, receipt.reason) != (status, reason):
        wanted = pb.Status.Name(status)
        if reason:
            wanted = f"{wanted}, {pb.Reason.Name(reason)}"
        raise Failed(f"the receipt says {_said(receipt)}, not {wanted}")


def _said(receipt: pb.Receipt) -> str:
    status, reason = (
        kind.Name(number) if number in kind.values() else str(number)
        for kind, number in ((pb.Status, receipt.status), (pb.Reason, receipt.reason))
    )
    if not receipt.reason:
        return status
    return f"{status}, {reason} ({receipt.detail})"
