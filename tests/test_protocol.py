"""The learner answers an actor as docs/wire-protocol.md says, message by message."""

from typing import Any

import messages
import numpy as np
import tree

from impala.types import Parameters, StepType
from learner.fleet.accounts import Accounts
from learner.service.service import LearnerService
from protos.impala.v1 import learner_pb2 as pb


class Foreign:
    """An actor that keeps to the page: it knows nothing of ours but messages."""

    def __init__(self, service: LearnerService, name: str = "a", incarnation: int = 1) -> None:
        self.service, self.name, self.incarnation = service, name, incarnation
        self.acknowledged: tuple[int, int, bytes] = (0, 0, b"")
        self.join()

    def join(self) -> None:
        fields = ("acknowledged_sequence", "acknowledged_unrolls", "proof")
        claim: dict[str, Any] = dict(zip(fields, self.acknowledged, strict=True))
        request = messages.join_request(self.name, self.incarnation, **claim)
        self.fingerprint = self.service.join(request).fingerprint

    def message(self, sequence: int, **kw: Any) -> pb.Unrolls:
        named = {"actor": self.name, "incarnation": self.incarnation}
        return messages.message(sequence, **{"fingerprint": self.fingerprint, **named, **kw})

    def send(self, sequence: int, **kw: Any) -> pb.Receipt:
        receipt = messages.submit(self.service, self.message(sequence, **kw))
        if receipt.reason != pb.REASON_UNKNOWN_ACTOR:
            self.acknowledged = (sequence, receipt.acknowledged_unrolls, receipt.proof)
        return receipt


def test_a_message_is_judged_by_sender_end_number_and_contents() -> None:
    """Given messages in which everything is wrong, of which less and less is mended."""
    accounts = Accounts()
    service = messages.service(accounts)
    actor = Foreign(service)
    wrong: dict[str, Any] = {"fingerprint": "x", "tensors": [], "parameter_version": 9}
    assert actor.send(1).status == pb.STATUS_ACCEPTED
    assert actor.send(1, **wrong).status == pb.STATUS_DUPLICATE
    assert actor.send(3, **wrong).reason == pb.REASON_SEQUENCE
    assert actor.send(0, **wrong).reason == pb.REASON_SEQUENCE
    assert actor.send(2, **wrong).reason == pb.REASON_FINGERPRINT
    assert actor.send(2, **wrong).status == pb.STATUS_DUPLICATE  # the number is used up
    assert actor.send(2, incarnation=5, **wrong).reason == pb.REASON_UNKNOWN_ACTOR
    totals = accounts.totals()
    assert (totals.received, totals.duplicates) == (2, 2)
    assert totals.rejected == {"sequence": 2, "fingerprint": 1, "unknown_actor": 1}
    service.finish()
    assert actor.send(2, incarnation=5).reason == pb.REASON_UNKNOWN_ACTOR
    for sequence in (0, 1, 3, 9):
        assert actor.send(sequence, **wrong).status == pb.STATUS_FINISHED


def test_numbers_go_on_after_the_last_acknowledged_one() -> None:
    service = messages.service()
    actor = Foreign(service)
    assert actor.send(1).status == pb.STATUS_ACCEPTED
    # Messages 2 and 3 got lost with the stream, and the actor has dropped them.
    actor.join()
    assert actor.send(4).reason == pb.REASON_SEQUENCE
    actor.acknowledged = (1, 2, b"")
    actor.join()
    assert actor.send(2).status == pb.STATUS_ACCEPTED
    # A learner that never saw this actor, such as that of a new run, is told where it is.
    actor.service = messages.service()
    actor.join()
    assert actor.send(3).status == pb.STATUS_ACCEPTED
    # Or as a new incarnation.
    again = Foreign(actor.service, incarnation=2)
    assert again.send(1).status == pb.STATUS_ACCEPTED


def test_receipts_of_every_kind_acknowledge_once() -> None:
    accounts = Accounts()
    actor = Foreign(messages.service(accounts))
    told = []
    for sequence, fields in ((1, {}), (1, {}), (2, {"task": 9}), (2, {}), (3, {}), (1, {})):
        receipt = actor.send(sequence, **fields)
        told.append((receipt.status, receipt.acknowledged_unrolls))
    assert told == [
        (pb.STATUS_ACCEPTED, 2),
        (pb.STATUS_DUPLICATE, 2),
        (pb.STATUS_REJECTED, 2),
        (pb.STATUS_DUPLICATE, 2),  # of the rejected one
        (pb.STATUS_ACCEPTED, 4),
        (pb.STATUS_DUPLICATE, 2),  # up to that message, which is long acknowledged
    ]
    unknown = actor.send(4, incarnation=7)
    assert (unknown.acknowledged_unrolls, unknown.proof) == (0, b"")
    assert actor.send(4).acknowledged_unrolls == 6
    # Rejected and duplicate messages move the claim on, too: a learner that knows nothing of the
    # actor goes on after them.
    assert actor.acknowledged[0] == 4
    actor.send(5, task=9)
    actor.service = messages.service()
    actor.join()
    assert actor.send(6).status == pb.STATUS_ACCEPTED


def test_unrolls_of_an_evaluator_are_those_of_an_unknown_actor() -> None:
    service = messages.service()
    service.publish(Parameters(messages.LEARNER, 3, 0.5, 10, [np.ones((2, 3), np.float32)]))
    actor = service.join(messages.join_request("a"))
    evaluator = service.join(messages.join_request("e", role=pb.ROLE_EVALUATOR))
    actor.seed = evaluator.seed
    assert evaluator == actor
    sent = messages.message(actor="e", fingerprint=evaluator.fingerprint)
    assert messages.submit(service, sent).reason == pb.REASON_UNKNOWN_ACTOR
    assert service.evaluators.get_snapshot(pb.GetSnapshotRequest(actor="e")) == b""
    pulled = pb.GetParametersReply.FromString(service.get_parameters(pb.GetParametersRequest()))
    assert pulled.parameters.version == 3


def test_the_output_of_the_very_first_row_may_be_zeros() -> None:
    """Also where the action space has no 0: the small one's has three actions from 0 on."""
    actor = Foreign(messages.service())
    first = messages.unroll()
    first.timestep.step_type[0] = StepType.FIRST
    first.timestep.reward[0], first.timestep.discount[0] = 0.0, 1.0
    for leaf in tree.flatten(first.output):
        leaf[0] = 0
    assert actor.send(1, arrays=first).status == pb.STATUS_ACCEPTED
    first.output.action[0] = 77
    assert actor.send(2, arrays=first).status == pb.STATUS_ACCEPTED


def test_receipts_for_what_is_long_ago_prove_nothing() -> None:
    accounts = Accounts(max_in_flight=2)
    actor = Foreign(messages.service(accounts))
    for sequence in (1, 2, 3):
        actor.send(sequence)
    assert actor.send(2).proof
    forgotten = actor.send(1)
    assert forgotten.status == pb.STATUS_DUPLICATE
    assert (forgotten.acknowledged_unrolls, forgotten.proof) == (0, b"")
