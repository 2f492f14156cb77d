"""The learner acts for callers of Act: versions, batches, refusals, and the death of its thread."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import gymnasium as gym
import messages
import numpy as np
import pytest
import services

from impala.config import values
from impala.config.schema import Config
from impala.types import Parameters, StepType
from learner.fleet.refusals import InvalidRequest, NotOffered
from learner.service.calls import TooSlow
from learner.service.inference import MOST_VERSIONS, Acted, Caller, Inference
from learner.service.server import Server, _Calls
from learner.service.service import LearnerService
from protos import codec
from protos.impala.v1 import learner_pb2 as pb
from protos.impala.v1 import learner_pb2_grpc as pb_grpc


class _Step:
    """Says which version acted, and adds 1 to the core state. Waits while `goes` is not set."""

    def __init__(self, **drawn: tuple[int, ...]) -> None:
        self.drawn: Mapping[str, tuple[int, ...]] = drawn
        self.goes = threading.Event()
        self.goes.set()
        self.calls: list[tuple[int, int]] = []  # version and rows, padding included
        self.given: list[Sequence[np.ndarray]] = []

    def held(self, values: Sequence[np.ndarray]) -> int:
        return int(values[0][0, 0])

    def __call__(self, held: int, given: Sequence[np.ndarray]) -> list[np.ndarray]:
        assert self.goes.wait(services.WAIT)
        rows = len(given[0])
        self.calls.append((held, rows))
        self.given.append(given)
        full = np.full(rows, held, np.float32)
        return [full.astype(np.int64), np.tile(full[:, None], 3), full, given[4] + 1.0]


def _inference(step: Any, **config: Any) -> Inference:
    made = Inference(
        values.from_dict(Config, config), messages.SPACES, messages.spec(), lambda: step
    )
    made.publish(_parameters(1))
    return made


def _parameters(version: int) -> Parameters:
    values = [np.full((2, 3), version, np.float32)]
    return Parameters(messages.LEARNER, version, progress=0.5, frames=1000, values=values)


def _request(
    num_envs: int = 2, begins: bool = True, state: float = 0.0, **kw: Any
) -> pb.ActRequest:
    arrays = [
        np.zeros(num_envs, np.bool_),
        np.zeros((num_envs, 3), np.uint8),
        np.zeros((num_envs, 2), np.float32),
        np.full(num_envs, StepType.MID, np.int8),
        np.full((num_envs, 2), state, np.float32),
    ]
    usual = {"actor": "a", "incarnation": 1, "tensors": codec.encode(arrays)}
    return pb.ActRequest(**{**usual, "begins": begins, "num_envs": num_envs, **kw})


def _tensors(flag: int = 0, step_type: int = 1) -> list[bytes]:
    """The tensors of a row of one environment."""
    return [bytes([flag]), bytes(3), bytes(8), bytes([step_type]), bytes(8)]


def _act(caller: Caller, *args: Any, **kw: Any) -> Acted:
    return asyncio.run(caller.act(_request(*args, **kw)))


def test_an_unroll_is_acted_by_one_version_held_for_it() -> None:
    inference = _inference(_Step())
    with inference.caller() as first:
        assert _act(first).parameters.version == 1
        inference.publish(_parameters(2))
        with inference.caller() as second:
            assert _act(second).parameters.version == 2
            acted = _act(first, begins=False, state=4.0)
            assert acted.parameters.version == 1
            np.testing.assert_array_equal(acted.arrays[3], np.full((2, 2), 5.0))
            assert inference.versions == 2
        assert inference.versions == 1
        assert _act(first).parameters.version == 2
        assert inference.versions == 1
    assert inference.versions == 0
    assert inference.rows == 8
    inference.close()


def test_a_bounded_number_of_versions_is_held() -> None:
    inference = _inference(_Step())
    opened = []
    for version in range(1, MOST_VERSIONS + 4):
        inference.publish(_parameters(version))
        opened.append(inference.caller())
        acted = _act(opened[-1].__enter__())
        assert acted.parameters.version == min(version, MOST_VERSIONS)
    assert inference.versions == MOST_VERSIONS == 16
    opened[0].__exit__(None, None, None)
    with inference.caller() as caller:  # there is room again
        assert _act(caller).parameters.version == MOST_VERSIONS + 3
    for each in opened[1:]:
        each.__exit__(None, None, None)
    assert inference.versions == 0
    inference.close()


def test_waiting_rows_are_batched_and_given_back_by_caller() -> None:
    """Given one call under way, three callers of two versions wait, and one of them leaves."""
    step = _Step()
    inference = _inference(step)

    async def play() -> list[Acted]:
        with (
            inference.caller() as busy,
            inference.caller() as one,
            inference.caller() as two,
            inference.caller() as three,
        ):
            await busy.act(_request())
            step.goes.clear()
            held = asyncio.create_task(busy.act(_request(begins=False)))
            await asyncio.sleep(0)
            while inference._waiting:  # until it is under way
                await asyncio.sleep(0.001)
            waiting = [asyncio.create_task(one.act(_request(3, state=10.0)))]
            gone = asyncio.create_task(two.act(_request(2, state=20.0)))
            await asyncio.sleep(0)
            inference.publish(_parameters(2))
            waiting.append(asyncio.create_task(three.act(_request(1, state=30.0))))
            await asyncio.sleep(0)
            gone.cancel()
            step.goes.set()
            answers = await asyncio.gather(held, *waiting)
            with pytest.raises(asyncio.CancelledError):
                await gone
            return answers

    _, first, other = asyncio.run(play())
    np.testing.assert_array_equal(first.arrays[3], np.full((3, 2), 11.0))
    np.testing.assert_array_equal(other.arrays[3], np.full((1, 2), 31.0))
    assert (first.parameters.version, other.parameters.version) == (1, 2)
    assert step.calls == [(1, 2), (1, 2), (1, 4), (2, 1)]  # 3 rows, padded to 4; 2 have gone
    inference.close()


def test_a_call_of_the_agent_has_a_bounded_number_of_rows() -> None:
    """Given three callers that wait, two of which are too many together."""
    step = _Step()
    most = 600
    inference = _inference(step, learner={"max_envs_per_message": most}, actor={"num_envs": most})

    async def play() -> None:
        with contextlib.ExitStack() as stack:
            callers = [stack.enter_context(inference.caller()) for _ in range(4)]
            step.goes.clear()
            waiting = [asyncio.create_task(callers[0].act(_request(1)))]
            await asyncio.sleep(0)
            while inference._waiting:  # until it is under way
                await asyncio.sleep(0.001)
            waiting += [asyncio.create_task(x.act(_request(most))) for x in callers[1:]]
            await asyncio.sleep(0)
            step.goes.set()
            await asyncio.gather(*waiting)

    asyncio.run(play())
    assert step.calls == [(1, 1), *[(1, 1024)] * 3]  # padded
    inference.close()


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        ([_request(begins=False)], "begins an unroll: set begins"),
        ([_request(0)], "num_envs is 0, it must be 1 to 4"),
        ([_request(5)], "num_envs is 5, it must be 1 to 4"),
        ([_request(2), _request(3, begins=False)], "num_envs is 3 after 2"),
        ([_request(tensors=[])], r"0 tensors, expected 5.*step type and the core state"),
        ([_request(num_envs=1, tensors=_request(2).tensors)], "timestep/observation"),
        ([_request(state=np.nan)], r"core_state has the number nan, .*beyond 1e.10. Scale it down"),
        ([_request(state=1e30)], r"core_state has the number 1.*beyond 1e.10. Scale it down"),
        ([_request(1, tensors=_tensors(flag=2))], "has a bool that is neither 0 nor 1"),
        ([_request(1, tensors=_tensors(step_type=3))], "step_type is not 0, 1 or 2"),
        (
            [_request(), *[_request(begins=False)] * messages.UNROLL_LENGTH],
            r"row 4 of an unroll of 4 steps.*set begins",
        ),
    ],
)
def test_rows_that_cannot_be_computed_are_refused_by_name(
    requests: list[pb.ActRequest], complaint: str
) -> None:
    inference = _inference(_Step(), learner={"max_envs_per_message": 4}, actor={"num_envs": 4})

    async def play() -> None:
        with inference.caller() as caller:
            for request in requests[:-1]:
                await caller.act(request)
            with pytest.raises(InvalidRequest, match=complaint):
                await caller.act(requests[-1])

    asyncio.run(play())
    assert inference.versions == 0
    inference.close()


def test_actions_are_uniform_until_the_first_update() -> None:
    space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
    config = values.from_dict(Config, {"agent": {"random_warm_up": True}})
    spaces = messages.SPACES[0], space
    inference = Inference(config, spaces, messages.spec(), lambda: _Step())
    inference.publish(_parameters(0))
    with inference.caller() as caller:
        actions = _act(caller, 400).arrays[0]
        assert actions.shape == (400, 1) and actions.dtype == np.float32
        assert np.abs(actions.mean()) < 0.3 and np.abs(actions.std() - 4 / 12**0.5) < 0.2
        inference.publish(_parameters(1))
        assert (_act(caller, 400).arrays[0] == 1).all()
    inference.close()


def test_epsilons_stay_and_other_numbers_are_drawn_anew() -> None:
    step = _Step(epsilon_final=(), uniform=(2,), normal=(1,))
    finals = {"finals": [0.1, 0.5], "weights": [1.0, 3.0]}
    inference = _inference(step, agent={"policy": "epsilon_greedy", "epsilon": finals})
    with inference.caller() as caller:
        for _ in range(2):
            _act(caller, 200)
    (epsilons, uniform, normal), (same, other, _) = (given[5:] for given in step.given)
    assert (epsilons[:200] == same[:200]).all() and 0.35 < epsilons[:200].mean() < 0.45
    assert (uniform[:200] != other[:200]).all() and 0.4 < uniform[:200].mean() < 0.6
    assert normal.shape[1:] == (1,) and abs(normal[:200].mean()) < 0.3
    inference.close()


def test_a_row_that_the_network_cannot_compute_is_refused_alone() -> None:
    class Fails(_Step):
        def __call__(self, held: int, given: Sequence[np.ndarray]) -> list[np.ndarray]:
            assert not (given[4] == 9.0).any(), "no such index"
            return super().__call__(held, given)

    inference = _inference(Fails())

    async def play() -> list[Any]:
        with inference.caller() as one, inference.caller() as two:
            rows = [one.act(_request(state=1.0)), two.act(_request(state=9.0))]
            return await asyncio.gather(*rows, return_exceptions=True)

    good, bad = asyncio.run(play())
    np.testing.assert_array_equal(good.arrays[3], np.full((2, 2), 2.0))
    assert isinstance(bad, InvalidRequest) and "cannot compute this row: no such index" in str(bad)
    inference.close()
    with inference.caller() as late, pytest.raises(RuntimeError, match="Inference has ended"):
        _act(late)


def test_death_of_the_thread_reaches_callers_and_learner() -> None:
    def dies(name: str, value: float) -> None:
        raise ValueError(f"no such number: {name}")

    inference = Inference(Config(), messages.SPACES, messages.spec(), lambda: _Step(), dies)
    inference.publish(_parameters(1))
    inference.check()
    with inference.caller() as caller:
        for _ in range(2):  # who waits for it, and who comes later
            with pytest.raises(RuntimeError, match="has died: no such number: batch_size"):
                _act(caller)
    with pytest.raises(RuntimeError, match="Inference for callers of Act has died"):
        inference.check()
    service = messages.service(inference=inference)
    server = Server(service, "127.0.0.1:0")
    server.start()
    with pytest.raises(RuntimeError, match="Inference"):
        server.check()
    server.stop(0.0)
    inference.close()


def test_a_failing_agent_step_is_told_to_callers_only() -> None:
    def cannot() -> Any:
        raise ValueError("the torso reads its variables in a tf.function of its own")

    inference = Inference(Config(), messages.SPACES, messages.spec(), cannot)
    inference.publish(_parameters(1))
    lines = []
    with inference.caller() as caller:
        for _ in range(4):  # who waits for it, and who comes later
            with pytest.raises(NotOffered, match=r"in a tf\.function of its own") as refused:
                _act(caller)
            lines.append(len(refused.traceback))
    assert lines[3] == lines[2]  # the traceback of one exception would hold all requests
    inference.check()
    service = messages.service(inference=inference)
    service.join(messages.join_request("a", 1))
    service.publish(_parameters(1))
    code, line, replies = _status(service, _request())
    assert (code, replies) == (grpc.StatusCode.FAILED_PRECONDITION, 0)
    assert "act with parameters" in line
    inference.close()


# ---------------------------------------------------------------------------------- over gRPC


def _status(service: LearnerService, *requests: pb.ActRequest) -> tuple[grpc.StatusCode, str, int]:
    """The status of a stream that is left open, its line, and how many replies came before."""
    server, replies, goes_on = Server(service, "127.0.0.1:0"), 0, threading.Event()

    def sent() -> Any:
        yield from requests
        goes_on.wait(services.WAIT)

    try:
        with grpc.insecure_channel(server.start()) as channel:
            stub = pb_grpc.LearnerStub(channel)
            try:
                for _ in stub.Act(sent(), timeout=services.WAIT):
                    replies += 1
            except grpc.RpcError as error:
                return error.code(), error.details(), replies
            return grpc.StatusCode.OK, "", replies
    finally:
        goes_on.set()
        server.stop(0.0)
        service.close()


def test_streams_end_with_a_status_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    code = grpc.StatusCode
    status, why, _ = _status(messages.service(), _request())
    assert status == code.FAILED_PRECONDITION and "learner.inference is never" in why

    def served(**kw: Any) -> LearnerService:
        inference = _inference(_Step())
        service = messages.service(inference=inference, **kw)
        service.join(messages.join_request("a", 1))
        service.publish(_parameters(1))
        return service

    service = messages.service(inference=_inference(_Step()))
    service.join(messages.join_request("a", 1))
    status, why, _ = _status(service, _request())
    assert status == code.UNAVAILABLE and "no parameters yet" in why
    status, why, _ = _status(served(), _request(incarnation=2))
    assert status == code.NOT_FOUND and "join again" in why
    status, why, replies = _status(served(), _request(), _request(actor="b"))
    assert (status, replies) == (code.INVALID_ARGUMENT, 1) and "one actor" in why
    status, why, replies = _status(served(), _request(), _request(0))
    assert (status, replies) == (code.INVALID_ARGUMENT, 1) and "num_envs is 0" in why
    service = served()
    inference = service._inference
    assert inference is not None
    asked = itertools.count()  # first for the first row and its reply
    seconds = property(lambda _: services.WAIT if next(asked) < 2 else 1.0)
    monkeypatch.setattr(LearnerService, "hang_seconds", seconds, raising=False)
    status, why, replies = _status(service, _request())
    assert (status, replies) == (code.DEADLINE_EXCEEDED, 1) and "actor.hang_seconds" in why
    assert inference.versions == 0


def test_an_unroll_that_takes_too_long_is_ended() -> None:
    """However fast its rows come, and whoever does not read."""
    calls = _Calls.__new__(_Calls)
    calls._service = SimpleNamespace(hang_seconds=100.0)  # type: ignore[assignment]

    async def held_for(seconds: float) -> object:
        began = time.monotonic() - seconds
        return await calls._in_time(asyncio.sleep(0.5, "done"), began)

    assert asyncio.run(held_for(0.0)) == asyncio.run(held_for(150.0)) == "done"
    with pytest.raises(TooSlow, match="an unroll took twice as long"):
        asyncio.run(held_for(199.9))


def test_a_reply_has_what_the_unroll_needs() -> None:
    service = messages.service(inference=_inference(_Step()))
    service.join(messages.join_request("a", 1))
    service.publish(_parameters(7))

    async def acted() -> pb.ActReply:
        with service.acting() as act:
            return await act(_request(state=3.0))

    reply = asyncio.run(acted())
    assert (reply.learner_incarnation, reply.parameter_version) == (messages.LEARNER, 7)
    action, policy, baseline, state = reply.tensors
    np.testing.assert_array_equal(np.frombuffer(action, np.int64), [7, 7])
    np.testing.assert_array_equal(np.frombuffer(policy, np.float32), [7.0] * 6)
    np.testing.assert_array_equal(np.frombuffer(baseline, np.float32), [7.0] * 2)
    np.testing.assert_array_equal(np.frombuffer(state, np.float32), [4.0] * 4)
    service.close()
