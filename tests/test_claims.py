"""What one caller with credentials claims (frames, versions, receipts) is bounded or proven."""

import asyncio
import json
import logging
import pathlib

import messages
import pytest

from impala.configs import (
    AtariConfig,
    Config,
    EnvironmentConfig,
    LimitsConfig,
    MixConfig,
    RepeatConfig,
    ReplayConfig,
    TasksConfig,
)
from impala.options import OptionError, validate
from impala.tasks import frames_per_step, make
from learner.accounts import Accounts
from learner.incarnations import Incarnations
from learner.ingest import Ingest
from learner.mix import Mix
from learner.replay import Replay
from learner.service import LearnerService
from learner.storage import Memory
from protos.impala.v1 import learner_pb2 as pb

UNROLLS = 200  # that the replay can hold, with as many frames as an unroll can have
MOST = messages.FRAMES_PER_STEP * messages.UNROLL_LENGTH


def _submit(service: LearnerService, message: pb.Unrolls) -> pb.Receipt:
    return asyncio.run(service.submit(message))


# Frames.


def test_frames_that_nobody_can_have_played_end_no_run_and_shrink_no_reservoir():
    """Given a replay of 200 unrolls, one message claims 100,000 frames for each of its steps."""
    ingest = Ingest(capacity=10**6)
    service = messages.service(ingest=ingest)
    fingerprint = service.join(messages.join_request()).fingerprint
    replay = Replay(messages.spec(), Memory(), "reservoir", capacity_frames=UNROLLS * MOST, seed=1)
    mix = Mix(ingest, MixConfig(fresh=2, replayed=2, warm_up_unrolls=1), replay)

    def send(sequence: int, frames: int) -> tuple[int, int]:
        """Sends a message and has it learned from; its status, and the frames learned from."""
        message = messages.message(
            sequence, frames=[frames - frames // 4, frames], fingerprint=fingerprint
        )
        status = _submit(service, message).status
        if status == pb.STATUS_REJECTED:
            return status, 0
        prepared = mix.get(timeout=20.0)
        assert prepared is not None
        return status, prepared.frames

    try:
        for sequence in range(1, UNROLLS):
            assert send(sequence, MOST)[0] == pb.STATUS_ACCEPTED
        held = len(replay)
        assert held >= UNROLLS
        for number, frames in enumerate((100_000, 100_000 * messages.UNROLL_LENGTH, 2**32 - 1)):
            assert send(UNROLLS + number, frames) == (pb.STATUS_REJECTED, 0)
        assert send(UNROLLS + 3, MOST)[0] == pb.STATUS_ACCEPTED  # the batch thread lives
        assert len(replay) >= held - 1
        assert replay.summary().frames <= UNROLLS * MOST
    finally:
        mix.close()


def test_an_unroll_that_cannot_fit_into_replay_is_refused_at_the_start():
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


def test_frames_of_a_step_are_what_the_task_can_play():
    environment = EnvironmentConfig(
        id="ALE/Pong-v5", atari=AtariConfig(frame_skip=3), repeat=RepeatConfig(most=7)
    )
    names = ("ALE/Pong-v5", "CartPole-v1", 'CartPole-v1{"sutton_barto_reward": true}')
    played = make(environment, TasksConfig(environments=names))
    assert [frames_per_step(task, LimitsConfig()) for task in played] == [3, 7, 7]
    limits = LimitsConfig(frames_per_step=2)
    assert [frames_per_step(task, limits) for task in played] == [3, 14, 14]


# Versions.


def test_versions_of_the_learners_before_are_taken_up_to_what_they_can_have_published(tmp_path):
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


def test_of_a_hundred_and_more_learners_the_oldest_is_forgotten(tmp_path):
    path = tmp_path / "incarnations.json"
    for own in range(1, 151):
        Incarnations(path, own).reserve(own)
    assert list(Incarnations(path, 1000).earlier) == list(range(51, 151))


@pytest.mark.parametrize(
    "contents",
    ["", "{", "null", "[1, 2]", '[["a", 1]]', "[[1]]", "[[1, -1]]", f"[[1, {2**64}]]", "\x00" * 9],
)
def test_a_damaged_list_of_learners_is_an_empty_one(tmp_path, caplog, contents):
    path = tmp_path / "incarnations.json"
    path.write_text(contents)
    with caplog.at_level(logging.WARNING):
        incarnations = Incarnations(path, own=7)
    assert incarnations.earlier == {}
    assert len(caplog.records) == 1
    assert "damaged" in caplog.text
    incarnations.reserve(0)
    assert json.loads(path.read_text()) == [[7, 1000]]


def test_a_list_that_cannot_be_written_ends_no_run(tmp_path: pathlib.Path, caplog):
    gone = tmp_path / "gone"
    gone.mkdir()
    incarnations = Incarnations(gone / "incarnations.json", own=7)
    gone.rmdir()
    incarnations.reserve(0)
    assert "cannot be written (No such file or directory)" in caplog.text


def test_a_version_that_no_learner_published_is_refused_and_blames_nobody():
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
        assert _submit(service, message).reason == reason
    assert accounts.totals().received == 4
    assert accounts.totals().rejected == {"version": 3}
