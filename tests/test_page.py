"""The page of the wire protocol: what no other test shows, and that each sentence has a test."""

import ast
import asyncio
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import messages
import numpy as np
import pytest
import tree
from page import PAGE, normal, says
from scripted import Script

from actors import channel
from actors import client as client_module
from impala.config.schema import EnvironmentConfig
from impala.environments.catch import Catch
from impala.environments.episodes import EpisodeStatistics
from impala.parts import build
from impala.runtime import process
from impala.types import Parameters, StepType
from learner.data.ingest import Ingest
from learner.data.pacing import Pacing
from learner.fleet.accounts import Accounts, Superseded
from learner.service import server as server_module
from learner.service import service as service_module
from learner.service.service import LearnerService
from protos.impala.v1 import learner_pb2 as pb
from protos.network import Network

TESTS = pathlib.Path(__file__).parent


def _submit(service: LearnerService, message: pb.Unrolls) -> pb.Receipt:
    return asyncio.run(service.submit(message))


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
        receipt = _submit(self.service, self.message(sequence, **kw))
        if receipt.reason != pb.REASON_UNKNOWN_ACTOR:
            self.acknowledged = (sequence, receipt.acknowledged_unrolls, receipt.proof)
        return receipt


@says(
    "A message is judged in this order, and the first that holds is its answer: its sender "
    "(`REASON_UNKNOWN_ACTOR`, `REASON_QUARANTINED`), the end of training (`STATUS_FINISHED`), its "
    "number (`STATUS_DUPLICATE`, `REASON_SEQUENCE`), its contents.",
    "So a number that was used up is a duplicate, whatever the message holds.",
)
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


@says(
    "Whoever forgets messages that have no receipt goes on with the number after the last "
    "acknowledged one, or as a new incarnation: numbers are not left out.",
    "`acknowledged_sequence` says where the numbers go on all the same.",
    "In the same incarnation the numbers go on after the last acknowledged one.",
)
def test_after_forgotten_messages_the_numbers_go_on_after_the_acknowledged_one() -> None:
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


@says(
    "`acknowledged_sequence` is the sequence number of the last message of this incarnation that "
    "got a receipt of any kind but `REASON_UNKNOWN_ACTOR`; `acknowledged_unrolls` and `proof` are "
    "copied from that receipt.",
    "`STATUS_DUPLICATE` and `STATUS_REJECTED` acknowledge a message, too; a message is "
    "acknowledged once, by the first receipt that it gets.",
    "Each receipt but that of an unknown actor says in `acknowledged_unrolls` how many unrolls of "
    "this incarnation the learner has accepted up to and including that message; a message that "
    "was rejected adds nothing, also when it is answered as a duplicate later.",
)
def test_receipts_of_every_kind_acknowledge_and_each_message_counts_once() -> None:
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


@says(
    "Receipts that are still to come in a stream that the actor leaves are lost: it sends these "
    "messages again, too, and those that had been accepted are duplicates.",
)
def test_what_was_accepted_in_a_stream_that_was_left_is_a_duplicate() -> None:
    service = messages.service()
    actor = Foreign(service)
    assert actor.send(1, task=9).status == pb.STATUS_REJECTED
    acknowledged = actor.acknowledged
    assert [actor.send(number).status for number in (2, 3)] == [pb.STATUS_ACCEPTED] * 2
    actor.acknowledged = acknowledged  # it had left: these receipts were lost
    actor.join()
    assert [actor.send(number).status for number in (2, 3)] == [pb.STATUS_DUPLICATE] * 2
    assert actor.send(4).status == pb.STATUS_ACCEPTED


@says(
    "An incarnation that the learner has not seen before takes over its name; an older one is told "
    "`REASON_UNKNOWN_ACTOR` from then on, and its next `Join` is refused with "
    "`FAILED_PRECONDITION`: of two processes with one name the one that came first ends.",
    "The same incarnation may join as often as it likes.",
    "Which incarnation is the larger number does not matter.",
)
@pytest.mark.parametrize(("first", "second"), [(5, 9), (9, 5)])
def test_of_two_incarnations_of_one_name_the_one_that_came_first_ends(
    first: int, second: int
) -> None:
    service = messages.service()
    old = Foreign(service, incarnation=first)
    old.join()
    assert old.send(1).status == pb.STATUS_ACCEPTED
    new = Foreign(service, incarnation=second)
    assert old.send(2).reason == pb.REASON_UNKNOWN_ACTOR
    with pytest.raises(Superseded):  # FAILED_PRECONDITION, as test_server shows
        old.join()
    assert new.send(1).status == pb.STATUS_ACCEPTED
    new.join()
    assert new.send(2).status == pb.STATUS_ACCEPTED


@says(
    "`ROLE_EVALUATOR` joins for the same reply and may call `GetSnapshot`, `ReportEvaluation` and "
    "`GetParameters`, but has no index and may not send unrolls: they are answered with "
    "`REASON_UNKNOWN_ACTOR`.",
)
def test_unrolls_of_an_evaluator_are_those_of_an_unknown_actor() -> None:
    service = messages.service()
    service.publish(Parameters(messages.LEARNER, 3, 0.5, 10, [np.ones((2, 3), np.float32)]))
    actor = service.join(messages.join_request("a"))
    evaluator = service.join(messages.join_request("e", role=pb.ROLE_EVALUATOR))
    assert evaluator == actor and evaluator.actor_index == 0
    sent = messages.message(actor="e", fingerprint=evaluator.fingerprint)
    assert _submit(service, sent).reason == pb.REASON_UNKNOWN_ACTOR
    assert service.evaluators.get_snapshot(pb.GetSnapshotRequest(actor="e")) == b""
    pulled = pb.GetParametersReply.FromString(service.get_parameters(pb.GetParametersRequest()))
    assert pulled.parameters.version == 3


@says(
    "The learner does not refuse what an actor sends beyond `max_unrolls_in_flight`: it waits in "
    "the connection, and its unrolls are older.",
    "When the queue is full a receipt waits until there is room, and the learner reads no further "
    "message of that stream meanwhile.",
    "There is no other signal and no timeout, and nothing is dropped.",
)
def test_more_messages_than_may_be_in_flight_wait_and_are_not_refused() -> None:
    async def story() -> "list[pb.Status]":
        ingest = Ingest(capacity=2)
        service = messages.service(ingest=ingest)
        actor = Foreign(service)
        statuses = []

        async def stream() -> None:  # as the server reads one: message by message
            for sequence in range(1, 9):  # 2 may be in flight
                statuses.append((await service.submit(actor.message(sequence))).status)

        streaming = asyncio.create_task(stream())
        for taken in range(1, 9):
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(statuses) == taken  # the next one has found no room
            assert ingest.get(0.0) is not None
        await streaming
        return statuses

    assert asyncio.run(story()) == [pb.STATUS_ACCEPTED] * 8


@says(
    "No output led to it; the learner does not use what stands there, and of the action it only "
    "checks its size: fill in zeros.",
    "The very first row 0 is the reset: `step_type` FIRST, reward 0, discount 1.",
)
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


@says(
    "Every episode whose LAST row is among rows 1..T is reported once, in `episodes`: the sum of "
    "its raw rewards, its agent steps, its frames, and the numeric `info` of its last step.",
    "It takes up a row but is not experience: the learner masks it out, and no frame counter and "
    "no episode length counts it.",
)
def test_episodes_are_sums_over_their_rows_without_seams() -> None:
    environment, statistics = Script(2, 0), EpisodeStatistics(2)
    environment.reset(1)
    rewards, steps, frames = np.zeros(2), np.zeros(2, int), np.zeros(2, int)
    for _ in range(40):
        environment.send(np.zeros(2, np.int64))
        step = environment.recv()
        is_seam = step.timestep.step_type == StepType.FIRST
        assert (step.timestep.reward[is_seam] == 0).all() and (step.frames[is_seam] == 0).all()
        rewards, steps, frames = (
            rewards + step.timestep.reward,
            steps + ~is_seam,
            frames + step.frames,
        )
        for index, episode in statistics.update(step):
            assert step.timestep.step_type[index] == StepType.LAST
            told = (episode.episode_return, episode.length, episode.frames)
            assert told == (rewards[index], steps[index], frames[index])
            assert episode.info == {name: of[index] for name, of in step.info.items()}
            rewards[index] = steps[index] = frames[index] = 0


@says(
    "`actor` is advice: whether an actor has `num_envs` environments in `num_groups` groups is its "
    "own decision, within the message size, and the learner does not check it.",
    "An actor echoes it.",
)
def test_how_many_environments_a_message_has_is_the_actors_decision() -> None:
    service = messages.service()
    actor = Foreign(service)
    for sequence, num_envs in enumerate((1, messages.MAX_ENVS, 3), 1):
        assert actor.send(sequence, num_envs=num_envs).status == pb.STATUS_ACCEPTED
    assert actor.send(4, num_envs=messages.MAX_ENVS + 1).reason == pb.REASON_NUM_ENVS
    assert actor.send(5, fingerprint="another").reason == pb.REASON_FINGERPRINT


@says(
    "(Both fields are empty if that is no longer known, which takes an actor with more messages in "
    "flight than it may have.)",
)
def test_receipts_for_what_is_long_ago_prove_nothing() -> None:
    accounts = Accounts(max_in_flight=2)
    actor = Foreign(messages.service(accounts))
    for sequence in (1, 2, 3):
        actor.send(sequence)
    assert actor.send(2).proof
    forgotten = actor.send(1)
    assert forgotten.status == pb.STATUS_DUPLICATE
    assert (forgotten.acknowledged_unrolls, forgotten.proof) == (0, b"")


@says(
    "Then `JoinReply.needs_permits` is true, the setting stands in `settings.needs`, and all of "
    "this holds.",
    "In other runs nothing of it does.",
    "The learner answers when the round may begin, or after at most 20 seconds without `permit`: "
    "ask again.",
)
def test_permits_are_given_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_module._PERMIT_SECONDS == 20.0
    monkeypatch.setattr(service_module, "_PERMIT_SECONDS", 0.01)
    ask = pb.GetParametersRequest(actor="a", incarnation=1, round=1, unrolls=4)
    for pacing in (None, Pacing(fresh=4, lag=0, exact=True)):
        service = messages.service(pacing=pacing)
        service.publish(Parameters(messages.LEARNER, 0, 0.0, 0, []))
        reply = service.join(messages.join_request("a"))
        assert reply.needs_permits == (pacing is not None)
        permit = asyncio.run(service.permit(ask))
        assert (permit is not None) == reply.needs_permits
    second = pb.GetParametersRequest(actor="a", incarnation=1, round=2, unrolls=4)
    assert asyncio.run(service.permit(second)) is None  # the first round has not been sent


@says(
    "Replies to `GetParameters` are as large as the agent: lift the client's receive limit, which "
    "is 4 MB by default (`grpc.max_receive_message_length` = -1).",
    "**Connections.** A connection has at most 64 open calls.",
    "**Keepalive.** Client: a ping every 30 s, also without calls (`grpc.keepalive_time_ms` 30000, "
    "`grpc.keepalive_timeout_ms` 10000, `grpc.keepalive_permit_without_calls` 1, "
    "`grpc.http2.max_pings_without_data` 0).",
    "The learner allows a ping every 10 s; more often earns `too_many_pings` and a closed "
    "connection.",
    "It pings every 60 s itself, so streams from hosts that vanished end.",
    "set `grpc.initial_reconnect_backoff_ms` to 100 and `grpc.max_reconnect_backoff_ms` to 10000 "
    "or less.",
    "**Deadlines.** `Join` 10 s, `GetParameters` 60 s, `StreamUnrolls` none.",
    "At process start call `mallopt(M_ARENA_MAX, 2)`, `mallopt(M_MMAP_THRESHOLD, 1<<30)`, "
    "`mallopt(M_TRIM_THRESHOLD, 2^31-1)` and `mallopt(M_TOP_PAD, 64<<20)`, or set "
    "`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_` and `MALLOC_TOP_PAD_`.",
)
def test_settings_of_the_connection_are_those_of_our_own_actors() -> None:
    client, server = dict(channel._OPTIONS), dict(server_module._options(1000))
    assert client["grpc.max_receive_message_length"] == -1
    assert client["grpc.keepalive_time_ms"] == 30_000
    assert client["grpc.keepalive_timeout_ms"] == 10_000
    assert client["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert client["grpc.initial_reconnect_backoff_ms"] == 100
    assert int(client["grpc.max_reconnect_backoff_ms"]) <= 10_000
    assert server["grpc.max_concurrent_streams"] == 64
    assert server["grpc.http2.min_recv_ping_interval_without_data_ms"] == 10_000
    assert server["grpc.keepalive_time_ms"] == 60_000
    assert (client_module.CALL_SECONDS, client_module._PULL_SECONDS) == (10.0, 60.0)
    assert sorted(process._MALLOC_OPTIONS.values()) == [2, 64 << 20, 1 << 30, 2**31 - 1]


@says(
    "The package is called `impala.v1` in every version: so any learner can answer the `Join` of "
    "any actor.",
)
def test_the_package_has_the_same_name_in_every_version() -> None:
    assert {version.name for version in (TESTS / "stored").glob("protocol-*")} >= {"protocol-2.0"}
    assert pb.DESCRIPTOR.package == "impala.v1"
    assert server_module.SERVICE_NAME == "impala.v1.Learner"


@says(
    "So a convolution of 3 with stride 2 widens 84 pixels by one behind, and 47 by one on each "
    "side.",
)
@pytest.mark.parametrize(("pixels", "before"), [(84, 0), (47, 1)])
def test_a_padded_window_begins_where_the_page_says(pixels: int, before: int) -> None:
    """Given a kernel that is 1 in its first pixel alone, which may stand before the image."""
    layer = pb.Layer(kind=pb.Layer.KIND_CONVOLUTION, parameters=[0, 1], stride=2, padded=True)
    reply = pb.JoinReply(
        observation_space=[pb.Space(name="x", kind=pb.Space.KIND_BOX, low=[0], high=[1])],
        network=pb.Network(
            inputs=[pb.Network.Input(observation="x", kind="KIND_NUMBERS", scale=1.0)],
            policy=[layer, pb.Layer(kind=pb.Layer.KIND_FLATTEN)],
            baseline=[layer, pb.Layer(kind=pb.Layer.KIND_FLATTEN)],
        ),
    )
    kernel = np.zeros((3, 3, 1, 1), np.float32)
    kernel[0, 0] = 1.0
    image = np.arange(1, pixels**2 + 1, dtype=np.float32).reshape(1, 1, pixels, pixels)
    parameters = [np.zeros(1, np.float32), kernel]
    seen = Network(reply).unroll(parameters, {"x": image}, np.ones((1, 1), np.int8), []).outputs
    outputs = -(-pixels // 2)
    corner = seen.reshape(outputs, outputs)
    assert corner[0, 0] == (0.0 if before else 1.0)
    assert corner[1, 1] == image[0, 0, 2 - before, 2 - before]


# -------------------------------------------------------------------------------------- Catch


@says(
    "The board has 10 rows and 5 columns; the observation is `[rows, columns]`, 1 where the ball "
    "or the paddle is, else 0.",
    "An episode begins with the ball in row 0, in a column that is drawn uniformly, and the paddle "
    "in the last row, in column 2 (half of the columns, rounded down).",
    "With each step the ball falls by a row, and the paddle moves by action − 1 columns: 0 is "
    "left, 1 stays, 2 is right; at an edge it stays.",
    "When the ball has come to the last row the episode terminates, after 9 steps: the reward is 1 "
    "if the paddle is where the ball is, and otherwise −1.",
    "All other rewards are 0, and each step is one frame.",
    "In `environment.kwargs`, `rows` and `columns` are the board's size; `shift` s makes the "
    "paddle move by (action + s) mod 3 − 1; `marked` true adds a row below the paddle, in which "
    "only cell s is 1; `reward` r makes the rewards r and −r.",
)
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"rows": 4, "columns": 4}, {"shift": 2, "marked": True, "reward": 0.5}],
    ids=["as it is", "small", "shifted"],
)
def test_catch_is_what_the_page_says(kwargs: dict[str, Any]) -> None:
    rows, columns = kwargs.get("rows", 10), kwargs.get("columns", 5)
    shift, worth = kwargs.get("shift", 0), kwargs.get("reward", 1.0)
    num_envs, rng = 200, np.random.default_rng(0)
    environment = Catch(num_envs, **kwargs)
    timestep, frames = environment.reset(3), np.zeros(num_envs)
    begun: list[int] = []
    for _ in range(3):
        assert (timestep.step_type == StepType.FIRST).all()
        balls = timestep.observation[:, 0].argmax(axis=1)
        paddles = np.full(num_envs, columns // 2)
        begun += balls.tolist()
        for row in range(rows):
            board = np.zeros((num_envs, rows + ("marked" in kwargs), columns), np.uint8)
            every = np.arange(num_envs)
            board[every, row, balls] = board[every, rows - 1, paddles] = 1
            if "marked" in kwargs:
                board[:, rows, shift] = 1
            np.testing.assert_array_equal(timestep.observation, board)
            is_last = row == rows - 1
            if row:
                assert (frames == 1).all()
                expected = np.where(paddles == balls, worth, -worth) if is_last else 0.0
                np.testing.assert_array_equal(timestep.reward, np.broadcast_to(expected, num_envs))
                assert (timestep.discount == (0.0 if is_last else 1.0)).all()
                kind = StepType.LAST if is_last else StepType.MID
                assert (timestep.step_type == kind).all()
            action = rng.integers(0, 3, num_envs)
            environment.send(action)
            timestep, frames, *_ = environment.recv()
            paddles = np.clip(paddles + (action + shift) % 3 - 1, 0, columns - 1)
    counts = np.bincount(begun, minlength=columns)
    assert counts.min() > 0.7 * counts.mean() and counts.max() < 1.3 * counts.mean()


# ----------------------------------------------------------------------------------- Pendulum


@says(
    "Its state is an angle θ, 0 if upright, and a speed ω; the observation is `[cos θ, sin θ, ω]`.",
    "An episode begins with θ drawn uniformly from −π to π and ω from −1 to 1.",
    "The action is a torque u from −2 to 2, and the reward −(φ² + 0.1 ω² + 0.001 u²), where φ is θ "
    "brought to −π ≤ φ < π and ω is the speed before the step.",
    "Then ω is increased by 0.05 (1.5 g sin θ + 3 u) and clipped to −8 and 8, and θ by 0.05 times "
    "this new ω.",
    "`g` in `environment.kwargs` is 10 by default.",
    "After 200 steps the episode is truncated: the discount is 1.",
    "Each step is one frame.",
)
@pytest.mark.parametrize("kwargs", [{}, {"g": 9.5}])
def test_pendulum_is_what_the_page_says(kwargs: dict[str, float]) -> None:
    num_envs, rng, g = 4, np.random.default_rng(0), kwargs.get("g", 10.0)
    config = EnvironmentConfig(id="Pendulum-v1", kwargs=json.dumps(kwargs))
    environment = build.environment(config, num_envs)
    seen = environment.reset(3).observation
    for step in range(1, 201):
        theta, omega = np.arctan2(seen[:, 1], seen[:, 0]), seen[:, 2].astype(np.float64)
        if step == 1:
            assert (np.abs(omega) <= 1.0).all() and np.std(theta) > 0.1
        u = rng.uniform(-2.0, 2.0, num_envs)
        environment.send(u[:, np.newaxis].astype(np.float32))
        timestep, frames, *_ = environment.recv()
        reward = -(theta**2 + 0.1 * omega**2 + 0.001 * u**2)
        np.testing.assert_allclose(timestep.reward, reward, 1e-3, 1e-3)
        omega = np.clip(omega + 0.05 * (1.5 * g * np.sin(theta) + 3.0 * u), -8.0, 8.0)
        theta = theta + 0.05 * omega
        seen = timestep.observation
        expected = np.stack([np.cos(theta), np.sin(theta), omega], axis=-1)
        np.testing.assert_allclose(seen, expected, 1e-4, 1e-4)
        assert (timestep.discount == 1.0).all() and (frames == 1).all()
        kind = StepType.LAST if step == 200 else StepType.MID
        assert (timestep.step_type == kind).all()
    environment.close()


# ---------------------------------------------------------------------------------- sentences

# What is no rule of the two sides: headings of what follows, advice, reasons, and history. A
# sentence is named by how it begins.
_NO_RULE = (
    *("The protocol between actors", "This page and", "An example is the actor in Node"),
    *(
        "Nothing executable is sent",
        "An example of both is the actor in [`clients/python`]",
        "How fast these are is in",
    ),
    *("Draw a random incarnation.", "Check `protocol`.", "If `finished`, stop."),
    *("`GetParameters` until there", "Parameters always come from", "Act T steps in E"),
    *("Send them as one", "Repeat.", "When the stream breaks:", "The name identifies the actor"),
    *(
        "The learner draws an incarnation",
        "Seed environments and action",
        "`JoinReply` is complete",
    ),
    *("The other settings are mandatory.", "For the preset `catch`", "What `Catch` is"),
    *("What Gymnasium's `Pendulum-v1` is",),
    *("Protobuf has no canonical", "In this order:", "A stream ends with a gRPC"),
    *("The reasons are", "`StreamUnrolls` has no deadline.", "Ask for the next permit late"),
    *(
        "A **group** is the E",
        "Most need only a part",
        "This is Gymnasium's autoreset",
        "While you write an actor",
        "What waits in messages and",
        "The learner ends, too, unless",
        "Parameters have an",
        "A learner that resumed",
        "While a message waits for room",
        "All of this is advice",
    ),
    *("Asking about once a second", "`Join` first, since its", "Training ends after"),
    *("The learner waits for that", "Bearer TOKEN", "**Compression.**"),
    *("**Memory.**", "`version` in `JoinRequest`", "A minor version may add"),
    *("What that means on both", "Whatever changes the meaning", "In 2.0, settings", "2.1 adds"),
    *("2.2 adds", "2.3 adds", "2.4 adds", "2.5 adds"),
    *("The `return` that a learner prints", "Other pages, files and names"),
)


def _sentences(page: str) -> Iterator[str]:
    """The sentences of the page, without examples, and the rows of tables of values."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.strip().splitlines() if not line.startswith("#")]
        if lines and lines[0].startswith("|"):
            # Tables of fields and settings are compared with the messages in test_versions.py.
            values = (line.split(" | ") for line in lines[2:])
            yield from (f"{row[0]} |" for row in values if re.match(r"\| `(KIND|FAMILY)_", row[0]))
            continue
        for item in re.split(r"\n(?=\* |\d+\. )", "\n".join(lines)):
            text = normal(re.sub(r"^(\* |\d+\. )", "", item))
            yield from filter(None, re.split(r"(?<=[.:;!?])\s+(?=[A-Z`*(\d])", text))


def _quotations() -> list[str]:
    """Everything that a test says that the page says."""
    quoted = []
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "says":
                quoted += [normal(ast.literal_eval(argument)) for argument in node.args]
    return quoted


def test_each_sentence_is_quoted_by_a_test_or_is_no_rule() -> None:
    quoted = _quotations()
    sentences = list(dict.fromkeys(_sentences(PAGE)))
    open_ones = [
        sentence
        for sentence in sentences
        if not any(sentence in quote or quote in sentence for quote in quoted)
    ]
    assert [quote for quote in quoted if quote not in normal(PAGE)] == []
    assert [sentence for sentence in open_ones if not sentence.startswith(_NO_RULE)] == []
    for start in _NO_RULE:  # nothing is excused that is gone, or that a test quotes
        assert any(sentence.startswith(start) for sentence in open_ones), start
