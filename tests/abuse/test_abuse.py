"""Absurd messages from a caller with credentials, beside an actor that goes on as if nothing were.

`make abuse` has more of them, against learners that train.
"""

import threading
from collections.abc import Iterator

from abuse.caller import Caller
from callers import Actor, Learner
from services import WAIT

from protos.impala.v1 import learner_pb2 as pb

MESSAGES = 1_500


def test_absurd_messages_change_only_their_senders_account() -> None:
    with Learner() as learner, Actor(learner.address, "good", 1) as good:
        caller = Caller(learner.address, token="", name="mallory", others=[], seed=7, absurd=True)
        calling = threading.Thread(target=caller.run, args=(MESSAGES, 1e9))
        calling.start()

        def messages() -> Iterator[pb.Unrolls]:
            while calling.is_alive() and good.sequence < MESSAGES:
                yield good.next()

        receipts = list(good.stub.StreamUnrolls(messages(), timeout=WAIT))
        calling.join(WAIT)
        learner.server.check()
        totals, status = learner.accounts.totals(), learner.service.get_status()

    assert caller.report.sent == MESSAGES
    assert receipts
    assert {receipt.status for receipt in receipts} == {pb.STATUS_ACCEPTED}
    # Nobody's message was lost or counted twice.
    assert not caller.report.unsure
    accepted = 2 * len(receipts) + sum(caller.report.accepted.values())
    assert (totals.received, totals.queued) == (accepted, accepted)
    assert sum(caller.report.accepted.values()) > 0, "Not all that is absurd can be refused."
    assert status.duplicates == caller.report.heard["STATUS_DUPLICATE"]
    # The caller is named, and nothing that it wrote is shown as it is.
    members = {member.name: member for member in status.members}
    assert members["mallory"].blamed > MESSAGES // 5
    assert not members["good"].blamed
    texts = [text for m in status.members for text in (m.name, m.last_rejection, m.last_fault)]
    assert all(text.isprintable() for text in texts)
    assert status.dropped_info_names > 0
