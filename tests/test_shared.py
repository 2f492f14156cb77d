"""Actors of one host share pulls: one asks the learner, the others read what it got."""

import collections
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from fake_learner import FakeLearner
from services import wait_for

from actors import shared
from actors.client import LearnerClient
from actors.shared import SharedPulls
from protos.impala.v1 import learner_pb2 as pb

LEARNER = 5
ADDRESS = "learner-host:50051"


class Learner:
    """Answers pulls with its newest version."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.version = 1
        self.calls = self.answers = 0
        self.finished = False
        self._seconds = seconds

    def call(self, request: pb.GetParametersRequest) -> pb.GetParametersReply:
        self.calls += 1
        version = self.version
        time.sleep(self._seconds)
        if (request.learner_incarnation, request.newer_than) == (LEARNER, version):
            return pb.GetParametersReply(finished=self.finished)
        self.answers += 1
        return pb.GetParametersReply(
            parameters=pb.Parameters(
                learner_incarnation=LEARNER, version=version, tensors=[b"%d" % version * 1000]
            )
        )


def held(version: int) -> pb.GetParametersRequest:
    return pb.GetParametersRequest(learner_incarnation=LEARNER, newer_than=version)


NONE = pb.GetParametersRequest()


def pulled(actor: SharedPulls, request: pb.GetParametersRequest, learner: Learner) -> int:
    """The version that an actor has after a pull."""
    reply = actor.pull(LEARNER, request, learner.call)
    reply = actor.newer(LEARNER, -1) if reply is None else reply
    assert reply is not None
    return version_of(reply)


def version_of(reply: pb.GetParametersReply) -> int:
    assert reply.parameters.tensors == [b"%d" % reply.parameters.version * 1000]
    return reply.parameters.version


@pytest.fixture
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(shared, "_MOST_SECONDS", 60.0)  # the machine may be busy
    return tmp_path / "shared"


@pytest.fixture
def impatient(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[SharedPulls, SharedPulls]:
    """Two actors that wait for a moment only for one that pulls."""
    monkeypatch.setattr(shared, "_WAIT_SECONDS", 0.05)
    return SharedPulls(ADDRESS, directory), SharedPulls(ADDRESS, directory)


def test_what_one_has_pulled_the_others_read(directory: pathlib.Path) -> None:
    learner = Learner()
    actors = [SharedPulls(ADDRESS, directory) for _ in range(10)]
    assert [pulled(each, NONE, learner) for each in actors] == [1] * 10
    assert learner.calls == 1
    # A newer one is for those that hold an older one, and of this learner only.
    learner.version = 2
    assert pulled(actors[0], held(1), learner) == 2
    first = actors[1].newer(LEARNER, 1)
    assert first is not None and version_of(first) == 2
    assert actors[1].newer(LEARNER, 2) is None and actors[1].newer(LEARNER + 1, 0) is None
    assert directory.stat().st_mode & 0o777 == 0o700


def test_what_was_asked_for_long_ago_is_not_taken(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given actors that ask each second: what is older than a quarter of that is too old."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(shared, "_MOST_SECONDS", 0.25)
    learner = Learner()
    one, other = SharedPulls(ADDRESS, directory), SharedPulls(ADDRESS, directory)
    for each in (one, other):
        each.pull(LEARNER, NONE, learner.call)
    calls = learner.calls
    now, learner.version = 101.0, 2
    one.pull(LEARNER, held(1), learner.call)
    now, learner.version = 101.2, 3
    assert pulled(other, held(1), learner) == 2
    assert learner.calls == calls + 1
    now, learner.version = 101.6, 4
    assert pulled(other, held(1), learner) == 4  # asked 0.4 s after that
    # What nobody has is asked for: the others' version is not sent once more, and counts as new.
    now = 102.6
    assert pulled(one, held(2), learner) == 4
    assert (learner.calls, learner.answers) == (calls + 3, calls + 2)
    assert pulled(other, held(3), learner) == 4
    assert learner.calls == calls + 3
    now, learner.finished = 103.6, True
    reply = one.pull(LEARNER, held(2), learner.call)
    assert reply is not None and reply.finished
    learner.finished = False
    now = 50.0  # as after a new start of the host
    assert pulled(SharedPulls(ADDRESS, directory), NONE, learner) == 4
    assert learner.calls == calls + 5


def test_a_pull_that_fails_is_not_waited_for(directory: pathlib.Path) -> None:
    learner = Learner()

    def fail(request: pb.GetParametersRequest) -> pb.GetParametersReply:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        SharedPulls(ADDRESS, directory).pull(LEARNER, NONE, fail)
    assert pulled(SharedPulls(ADDRESS, directory), NONE, learner) == 1


HOLDER = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def puller(directory: pathlib.Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has begun to pull."""
    lock = SharedPulls(ADDRESS, directory)._path(LEARNER).with_suffix(".lock")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_one_that_is_killed_while_it_pulls_leaves_it_to_the_next(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_WAIT_SECONDS", 600.0)
    learner, actor = Learner(), SharedPulls(ADDRESS, directory)
    with puller(directory) as process:
        pulling = threading.Thread(
            target=actor.pull, args=(LEARNER, NONE, learner.call), daemon=True
        )
        pulling.start()
        pulling.join(0.2)
        assert pulling.is_alive() and learner.calls == 0  # it waits
        process.send_signal(signal.SIGKILL)
        pulling.join(60.0)
    assert (pulling.is_alive(), learner.calls) == (False, 1)


def test_a_frozen_puller_is_waited_for_a_moment(
    directory: pathlib.Path, impatient: tuple[SharedPulls, SharedPulls]
) -> None:
    learner, one, other = Learner(), *impatient
    with puller(directory) as process:
        process.send_signal(signal.SIGSTOP)
        assert pulled(one, NONE, learner) == 1
        # What one has pulled without the lock is for the others too.
        assert pulled(other, NONE, learner) == 1
        assert learner.calls == 1
        learner.version = 2
        assert pulled(other, held(1), learner) == 2


def test_a_directory_of_others_is_not_used(
    directory: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir()
    directory.chmod(0o777)
    link = directory.with_name("link")
    link.symlink_to(directory)
    for path in (directory, link, directory.with_name("missing") / "below"):
        learner = Learner()
        for _ in range(2):
            assert pulled(SharedPulls(ADDRESS, path), NONE, learner) == 1
        assert learner.calls == 2
    assert not list(directory.iterdir())
    assert "not a directory of this user with mode 700" in caplog.text


def test_what_learners_that_are_gone_have_left_is_deleted(directory: pathlib.Path) -> None:
    learner, actor = Learner(), SharedPulls(ADDRESS, directory)
    for name in ("old", "new"):
        (directory / name).touch()
    os.utime(directory / "old", (1.0, 1.0))
    actor.pull(LEARNER, NONE, learner.call)
    assert {"new", actor._path(LEARNER).name} <= {path.name for path in directory.iterdir()}
    assert not (directory / "old").exists()


def test_who_leaves_deletes_what_others_then_pull_again(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner()
    one, other = SharedPulls(ADDRESS, directory), SharedPulls(ADDRESS, directory)
    for each in (one, other):
        pulled(each, NONE, learner)
    one.pull(LEARNER + 1, NONE, learner.call)  # another learner has joined it
    assert other.newer(LEARNER, -1) is None
    one.leave()
    assert not list(directory.iterdir())
    learner.version = 2
    assert pulled(other, held(1), learner) == 2
    assert list(directory.iterdir())
    learner.version, replace = 3, os.replace

    def replace_before_another_leaves(*paths: pathlib.Path) -> None:
        replace(*paths)
        other.leave()

    monkeypatch.setattr(os, "replace", replace_before_another_leaves)
    one.pull(LEARNER, held(2), learner.call)
    assert not caplog.text


def test_clients_of_a_host_share_parameters(directory: pathlib.Path) -> None:
    with FakeLearner() as learner, contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(
                LearnerClient(
                    learner.address,
                    name=f"{n}",
                    incarnation=n + 1,
                    shared=SharedPulls(ADDRESS, directory),
                )
            )
            for n in range(3)
        ]
        for client in clients:
            client.join()
        versions = collections.Counter(client.parameters().version for client in clients)
        assert len(versions) == 1
        np.testing.assert_array_equal(
            clients[0].parameters().values[0], clients[2].parameters().values[0]
        )
        learner.publish(7)
        clients[0].prefetch()
        wait_for("the pull", lambda: clients[0].parameters().version == 7)
        assert clients[1].parameters().version == 7  # without a pull of its own
        clients[0].close()
        learner.publish(8)
        clients[1].prefetch()
        wait_for("another pull", lambda: clients[1].parameters().version == 8)
    assert not list(directory.iterdir())
