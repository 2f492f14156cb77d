"""What one caller with credentials claims (frames, versions, receipts) is bounded or proven."""

import asyncio
import json
import logging
import pathlib
import stat
from typing import Any

import messages
import pytest

from impala.config.rules import validate
from impala.config.schema import (
    Config,
    EnvironmentConfig,
    MixConfig,
    RepeatConfig,
    ReplayConfig,
)
from impala.config.values import OptionError
from impala.types import Parameters
from learner.data.ingest import Ingest
from learner.data.mix import Mix
from learner.data.replay import Replay
from learner.data.rows import Layout
from learner.fleet.accounts import LEARNER_CRASH, Accounts
from learner.fleet.incarnations import Incarnations
from learner.fleet.receipts import ReceiptProofs, load_key
from protos.impala.v1 import learner_pb2 as pb

UNROLLS = 200  # that the replay can hold, with as many frames as an unroll can have
FRAMES = messages.FRAMES_PER_STEP * messages.UNROLL_LENGTH
ABSURD = (10**6, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)


# Frames.


def test_impossible_frames_end_no_run_and_shrink_no_reservoir() -> None:
    """Given a replay of 200 unrolls, one message claims 100,000 frames for each of its steps."""
    ingest = Ingest(capacity=10**6)
    service = messages.service(ingest=ingest)
    fingerprint = service.join(messages.join_request()).fingerprint
    layout, frames = Layout(messages.spec()), UNROLLS * FRAMES
    replay = Replay(layout, None, "reservoir", capacity_frames=frames, memory=2**20, seed=1)
    mix = Mix(ingest, MixConfig(fresh=2, replayed=2, warm_up_unrolls=1), layout, replay)

    def send(sequence: int, frames: int) -> tuple[int, int]:
        """Sends a message and has it learned from; its status, and the frames learned from."""
        message = messages.message(
            sequence, frames=[frames - frames // 4, frames], fingerprint=fingerprint
        )
        status = messages.submit(service, message).status
        if status == pb.STATUS_REJECTED:
            return status, 0
        prepared = mix.get(timeout=20.0)
        assert prepared is not None
        return status, prepared.frames

    try:
        for sequence in range(1, UNROLLS):
            assert send(sequence, FRAMES)[0] == pb.STATUS_ACCEPTED
        held = len(replay)
        assert held >= UNROLLS
        for number, frames in enumerate((100_000, 100_000 * messages.UNROLL_LENGTH, 2**32 - 1)):
            assert send(UNROLLS + number, frames) == (pb.STATUS_REJECTED, 0)
        assert send(UNROLLS + 3, FRAMES)[0] == pb.STATUS_ACCEPTED  # the batch thread lives
        assert len(replay) >= held - 1
        assert replay.contents().frames <= UNROLLS * FRAMES
    finally:
        mix.close()


def test_an_unroll_too_large_for_replay_is_refused_at_once() -> None:
    config = Config(
        environment=EnvironmentConfig(id="CartPole-v1", repeat=RepeatConfig(most=5)),
        mix=MixConfig(replayed=8),
        replay=ReplayConfig(capacity_frames=99),
    )
    with pytest.raises(OptionError, match=r"CartPole-v1 can have 100 frames \(20 steps of up to 5"):
        validate(config)
    with pytest.raises(OptionError, match="more than the 2147483647 that can be counted"):
        huge = RepeatConfig(most=2**31)
        validate(Config(environment=EnvironmentConfig(id="CartPole-v1", repeat=huge)))


# Versions.


def test_versions_of_earlier_learners_are_taken_up_to_a_bound(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "incarnations.json"
    first = Incarnations(path, own=1)
    first.reserve(0)
    assert path.exists()
    written = path.stat().st_mtime_ns
    for version in range(1001):
        first.reserve(version)
    assert path.stat().st_mtime_ns == written  # once for a thousand updates
    first.reserve(1001)

    second = Incarnations(path, own=2)
    assert second.earlier == {1: 2001}
    second.reserve(900)  # it resumed from a checkpoint
    assert Incarnations(path, own=3).earlier == {1: 2001, 2: 1900}


def test_unpublished_versions_are_refused_and_blame_nobody() -> None:
    accounts = Accounts()
    service = messages.service(accounts=accounts)
    fingerprint = service.join(messages.join_request()).fingerprint
    expected = {
        (messages.LEARNER, 0): pb.REASON_UNSPECIFIED,  # accepted
        (messages.LEARNER, 1): pb.REASON_VERSION,
        (messages.EARLIER, 1000): pb.REASON_UNSPECIFIED,
        (messages.EARLIER, 1001): pb.REASON_VERSION,
        (5, 0): pb.REASON_VERSION,  # of another run, or of none
    }
    for sequence, ((learner, version), reason) in enumerate(expected.items(), 1):
        message = messages.message(
            sequence,
            learner_incarnation=learner,
            parameter_version=version,
            fingerprint=fingerprint,
        )
        assert messages.submit(service, message).reason == reason
    assert accounts.totals().received == 4
    assert accounts.totals().rejected == {"version": 3}


# What a join claims to have been acknowledged.


class _Learner:
    """A service that can crash: its next life has the key, and the accounts of a checkpoint."""

    def __init__(self, key: bytes = b"k" * 32, max_ledgers: int = 10_000) -> None:
        self.key = key
        self.max_ledgers = max_ledgers
        self.accounts = Accounts(max_ledgers)
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.service = messages.service(
            self.accounts, Ingest(capacity=10**6), proofs=ReceiptProofs(self.key, self.lives)
        )

    def crash(self, state: dict) -> None:
        self.accounts = Accounts(self.max_ledgers)
        self.accounts.restore(json.loads(json.dumps(state)))
        self.start()

    def join(self, receipt: pb.Receipt | None = None, **kw: Any) -> str:
        """An actor joins with what it kept of a receipt; the fingerprint."""
        kept: dict[str, Any] = {}
        if receipt is not None:
            kept["acknowledged_sequence"] = receipt.sequence
            kept["acknowledged_unrolls"] = receipt.acknowledged_unrolls
            kept["proof"] = receipt.proof
        return self.service.join(messages.join_request(**{**kept, **kw})).fingerprint

    def send(self, sequence: int, fingerprint: str, **kw: Any) -> pb.Receipt:
        return messages.submit(
            self.service, messages.message(sequence, fingerprint=fingerprint, **kw)
        )

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.accounts.totals().dropped)


def test_what_a_crash_lost_is_counted_when_it_is_proven() -> None:
    learner = _Learner()
    fingerprint = learner.join()
    learner.send(1, fingerprint)
    state = learner.accounts.state()
    receipt = learner.send(2, fingerprint)
    assert (receipt.acknowledged_unrolls, len(receipt.proof)) == (4, 24)
    learner.crash(state)
    for _ in range(3):  # once, however often it is said
        learner.join(receipt)
        assert learner.dropped == {LEARNER_CRASH: 4}
    assert learner.send(3, fingerprint).status == pb.STATUS_ACCEPTED


@pytest.mark.parametrize("unrolls", ABSURD)
@pytest.mark.parametrize("sequence", [1, 2**63, 2**64 - 1])
def test_a_claim_without_proof_is_neither_counted_nor_refused(sequence: int, unrolls: int) -> None:
    """Given an actor with a receipt for 4 unrolls, which the learner lost when it crashed."""
    learner = _Learner()
    state = learner.accounts.state()
    fingerprint = learner.join()
    receipt = learner.send(1, fingerprint, num_envs=4)
    learner.crash(state)

    claim: dict[str, Any] = {"acknowledged_sequence": sequence, "acknowledged_unrolls": unrolls}
    learner.join(**claim)
    learner.join(actor="b", incarnation=2, **claim, proof=b"")
    learner.join(actor="b", incarnation=3, **claim, proof=receipt.proof)
    assert learner.accounts.totals()[:3] == (0, 0, {})
    status = pb.RunStatus.FromString(learner.service.get_status().SerializeToString())
    assert (status.received, dict(status.dropped)) == (0, {})
    learner.crash(learner.accounts.state())
    assert learner.accounts.totals()[:3] == (0, 0, {})


def test_an_actor_without_a_proof_goes_on_after_a_crash() -> None:
    """What the crash lost is not counted, and everything else is."""
    learner = _Learner()
    fingerprint = learner.join()
    learner.send(1, fingerprint)
    state = learner.accounts.state()
    learner.send(2, fingerprint)
    learner.crash(state)
    learner.join(acknowledged_sequence=2, acknowledged_unrolls=4)
    assert learner.send(3, fingerprint).status == pb.STATUS_ACCEPTED
    assert learner.accounts.totals()[:3] == (2, 0, {})


def test_a_proof_is_good_for_one_actor_and_claim_alone() -> None:
    learner = _Learner()
    state = learner.accounts.state()
    fingerprint = learner.join()
    receipt = learner.send(1, fingerprint)
    flipped = receipt.proof[:-1] + bytes([receipt.proof[-1] ^ 1])
    of_another_learner = bytes([receipt.proof[0] ^ 1]) + receipt.proof[1:]
    forged: list[dict[str, Any]] = [
        {"actor": "b"},
        {"incarnation": 2},
        {"acknowledged_sequence": 2},
        {"acknowledged_unrolls": 3},
        {"proof": flipped},
        {"proof": of_another_learner},
        {"proof": receipt.proof[:-1]},
        {"proof": receipt.proof + b"\0"},
        {"proof": b""},
    ]
    learner.crash(state)
    for kw in forged:
        learner.join(receipt, **kw)
        assert learner.dropped == {}, kw
    other_key = _Learner(b"o" * 32)
    other_key.join(receipt)  # as after --fresh
    assert other_key.dropped == {}
    learner.join(receipt, incarnation=1)
    assert learner.dropped == {LEARNER_CRASH: 2}


def test_a_rejection_without_receipt_is_no_crash_loss() -> None:
    """Given a message with a version that is not published yet, and that is when it comes again."""
    learner = _Learner()
    learner.service.publish(Parameters(messages.LEARNER, 0, 0.0, 0, []))
    fingerprint = learner.join()
    learner.send(1, fingerprint)
    rejected = learner.send(2, fingerprint, parameter_version=1)
    assert (rejected.reason, rejected.acknowledged_unrolls) == (pb.REASON_VERSION, 2)
    state = learner.accounts.state()
    learner.service.publish(Parameters(messages.LEARNER, 1, 0.0, 0, []))
    learner.join()
    duplicates = [learner.send(1, fingerprint), learner.send(2, fingerprint, parameter_version=1)]
    assert [receipt.status for receipt in duplicates] == [pb.STATUS_DUPLICATE] * 2
    assert [receipt.acknowledged_unrolls for receipt in duplicates] == [2, 2]

    learner.crash(state)  # the first message was still queued
    learner.join(duplicates[-1])
    assert learner.dropped == {LEARNER_CRASH: 2}


def _crowd(learner: _Learner, incarnations: range) -> None:
    """Joins as a with new incarnations, more than the learner remembers."""
    assert len(incarnations) > learner.max_ledgers
    for incarnation in incarnations:
        learner.join(incarnation=incarnation)


@pytest.mark.parametrize("is_in_checkpoint", [False, True])
def test_a_crash_loss_is_counted_once_even_if_forgotten(
    is_in_checkpoint: bool,
) -> None:
    """Given a learner that crashed with 2 unrolls of a's first incarnation in its queue."""
    learner = _Learner(max_ledgers=20)
    state = learner.accounts.state()
    receipt = learner.send(1, learner.join())
    learner.crash(state)
    learner.join(receipt)
    assert learner.dropped == {LEARNER_CRASH: 2}
    if is_in_checkpoint:
        learner.crash(learner.accounts.state())
    for start in (100, 200):
        _crowd(learner, range(start, start + 30))
        assert ["a", 1] not in [each[:2] for each in learner.accounts.state()["ledgers"]]
        learner.join(receipt)
        assert learner.dropped == {LEARNER_CRASH: 2}


def test_the_key_is_kept_and_readable_by_its_owner_alone(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "receipt.key"
    with caplog.at_level(logging.WARNING):
        key = load_key(path)
        assert len(key) == 32
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert load_key(path) == key
        assert not caplog.records
        path.write_bytes(key[:-1])
        assert load_key(path) not in (key, key[:-1])
        assert "is damaged (31 bytes instead of 32)" in caplog.text
        assert len(caplog.records) == 1
        path.unlink()
        path.mkdir()
        assert len(load_key(path)) == 32
        assert "cannot be read" in caplog.text


# Whose stream it is.


def test_a_stream_is_of_one_actor_and_harms_nobody_else() -> None:
    """Given two actors that have joined, one sends messages in the name of the other."""
    accounts = Accounts()
    service = messages.service(accounts)
    for number, name in enumerate("ab", 1):
        fingerprint = service.join(messages.join_request(name, number)).fingerprint

    async def story() -> list[pb.Receipt]:
        sent = [("nobody", 9, 1), ("a", 1, 1), ("b", 2, 1), ("a", 2, 1), ("b", 2, 0), ("a", 1, 2)]
        with service.stream() as submit:
            mine = [
                await submit(
                    messages.message(
                        sequence, actor=actor, incarnation=incarnation, fingerprint=fingerprint
                    )
                )
                for actor, incarnation, sequence in sent
            ]
        with service.stream() as submit:
            good = messages.message(1, actor="b", incarnation=2, fingerprint=fingerprint)
            return [*mine, await submit(good)]

    receipts = asyncio.run(story())
    unknown = pb.REASON_UNKNOWN_ACTOR
    assert [receipt.reason for receipt in receipts] == [unknown, 0, *[unknown] * 3, 0, 0]
    assert "The stream is of a, the message of 'b'" in receipts[2].detail
    assert not any(receipt.proof for receipt in receipts if receipt.reason == unknown)
    assert accounts.totals().received == 6
    assert accounts.totals().rejected == {"unknown_actor": 4}
    rejected = {member.name: member.rejected for member in service.get_status().members}
    assert rejected == {"a": 3, "b": 0}
