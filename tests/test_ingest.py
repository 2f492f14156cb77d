"""What may come in, and how it queues."""

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import messages
import numpy as np
import pytest
import tree

from impala.config.schema import Config, LimitsConfig
from impala.types import Episode, StepType
from learner.data.bounds import limit_of, message_bounds
from learner.data.ingest import Arrival, Ingest, IngestClosed, Rejection, Validator
from protos.impala.v1 import learner_pb2 as pb

T = messages.UNROLL_LENGTH


def _validator(**kw: Any) -> Validator:
    return Validator(messages.spec(), "print", messages.MAX_ENVS, messages.bounds(**kw))


def _check(message: pb.Unrolls, newest_version: int | None = 3, **kw: Any) -> Arrival | Rejection:
    return _validator(**kw).check(message, newest_version)


def _detail(message: pb.Unrolls, **kw: Any) -> str:
    """What is wrong with a message that is refused."""
    rejection = _check(message, **kw)
    assert isinstance(rejection, Rejection)
    return rejection.detail


def _good(**kw: Any) -> pb.Unrolls:
    return messages.message(**{"fingerprint": "print", **kw})


def test_a_good_message_becomes_views_of_its_bytes() -> None:
    sent = messages.unroll(num_envs=3)
    arrival = _check(_good(num_envs=3, arrays=sent, sequence=9, parameter_version=2))
    assert isinstance(arrival, Arrival)
    tree.map_structure(
        np.testing.assert_array_equal,
        arrival.unroll._replace(frames=(), parameter_version=()),
        sent,
    )
    for array in tree.flatten(arrival.unroll._replace(frames=(), parameter_version=())):
        assert not array.flags.writeable
        assert not array.flags.owndata
    assert arrival.unroll.frames.tolist() == [4 * T] * 3
    assert arrival.unroll.frames.dtype == np.int32
    assert arrival.unroll.parameter_version.tolist() == [2] * 3
    assert arrival.unroll.parameter_version.dtype == np.int64
    assert (arrival.actor, arrival.incarnation, arrival.sequence, arrival.offset) == ("a", 1, 9, 0)
    assert arrival.episodes == [Episode(1.5, 9, 36, {"lives": 3.0})]
    assert (arrival.elapsed_seconds, arrival.waited_seconds) == (0.5, 0.25)
    assert arrival.pace == (0.0, 0)  # an actor need not say it
    arrival = _check(_good(environment_seconds=0.5))
    assert isinstance(arrival, Arrival) and arrival.pace == (0.5, 2 * T)


def _with(path: str, value: float, at: tuple[int, ...] = (1, 1)) -> pb.Unrolls:
    """A good message but for one number in one leaf."""
    arrays = messages.unroll()
    leaves = {"/".join(map(str, name)): leaf for name, leaf in tree.flatten_with_path(arrays)}
    leaves[path][at] = value
    return _good(arrays=arrays)


def _episode(**kw: Any) -> pb.Unrolls:
    return _good(episodes=[pb.Episode(**kw)])


def _bool_byte(value: int) -> pb.Unrolls:
    message = _good()
    message.tensors[0] = bytes([value]) * len(message.tensors[0])  # timestep/observation/flag
    return message


def _tensor(change: Callable[[bytes], bytes]) -> pb.Unrolls:
    message = _good()
    message.tensors[1] = change(message.tensors[1])
    return message


NAN, INF = float("nan"), float("inf")
BAD = {
    "fingerprint": (_good(fingerprint="other"), pb.REASON_FINGERPRINT, "'other'.*'print'"),
    "no environment": (_good(num_envs=0), pb.REASON_NUM_ENVS, "num_envs is 0.* 1 to 8"),
    "many environments": (_good(num_envs=9), pb.REASON_NUM_ENVS, "num_envs is 9.* 1 to 8"),
    "E without its arrays": (_good(arrays=messages.unroll(3)), pb.REASON_TENSOR_SIZE, "bytes"),
    "frames of others": (_good(frames=[1, 1, 1]), pb.REASON_NUM_ENVS, "frames has 3"),
    "many frames": (_good(frames=[4, 2**31]), pb.REASON_RANGE, "frames holds 2147483648"),
    "more frames than steps can play": (
        _good(frames=[3 * 6 + 1, 4]),
        pb.REASON_RANGE,
        r"frames holds 19 for the 3 steps of environment 0.* 1 to 6.*limits\.frames_per_step",
    ),
    "frames of a seam": (_good(frames=[3, 4 * 6 + 1]), pb.REASON_RANGE, "holds 25 for the 4 steps"),
    "no frames": (_good(frames=[3, 0]), pb.REASON_RANGE, "frames holds 0 for the 4 steps"),
    "large reward": (
        _with("timestep/reward", -1.1e6),
        pb.REASON_RANGE,
        r"reward holds -1100000.0: .* 1e\+06 at most\. Raise limits\.reward",
    ),
    "large policy": (_with("output/policy", 3e38), pb.REASON_RANGE, r"1e\+07 at most"),
    "nearly a mask": (_with("output/policy", -1.1e9), pb.REASON_RANGE, r"1e\+07 at most"),
    "large baseline": (_with("output/baseline", -3e38), pb.REASON_RANGE, r"Raise limits\.reward"),
    "large to see": (
        _with("timestep/observation/speed", 1e11),
        pb.REASON_RANGE,
        r"speed holds 99999997952.0.*Scale it down",
    ),
    "large core": (_with("core_state", 1e30), pb.REASON_RANGE, r"Scale it down"),
    "missing tensor": (_good(tensors=[b""]), pb.REASON_TENSOR_COUNT, "1 tensors.*spec has 10"),
    "short tensor": (_tensor(lambda x: x[:-1]), pb.REASON_TENSOR_SIZE, "image' has 29 bytes.* 30"),
    "long tensor": (_tensor(lambda x: x + x), pb.REASON_TENSOR_SIZE, "image' has 60 bytes.* 30"),
    "no tensor": (_tensor(lambda x: b""), pb.REASON_TENSOR_SIZE, "image' has 0 bytes.* 30"),
    "nan reward": (_with("timestep/reward", NAN), pb.REASON_NOT_FINITE, "reward holds nan"),
    "nan discount": (_with("timestep/discount", NAN), pb.REASON_NOT_FINITE, "discount"),
    "inf policy": (_with("output/policy", INF), pb.REASON_NOT_FINITE, "policy holds inf"),
    "inf baseline": (_with("output/baseline", -INF), pb.REASON_NOT_FINITE, "baseline holds -inf"),
    "nan seen": (_with("timestep/observation/speed", NAN), pb.REASON_NOT_FINITE, "speed"),
    "nan core": (_with("core_state", NAN), pb.REASON_NOT_FINITE, "core_state"),
    "a bool of 2": (_bool_byte(2), pb.REASON_RANGE, "flag.* holds 2"),
    "discount": (_with("timestep/discount", 1.5), pb.REASON_RANGE, "discount holds 1.5"),
    "negative discount": (_with("timestep/discount", -0.5), pb.REASON_RANGE, "discount"),
    "step type": (_with("timestep/step_type", 3), pb.REASON_RANGE, "step_type holds 3"),
    "negative step type": (_with("timestep/step_type", -1), pb.REASON_RANGE, "step_type"),
    "FIRST from nowhere": (_with("timestep/step_type", 0), pb.REASON_RANGE, "from MID to FIRST"),
    "LAST without FIRST": (_with("timestep/step_type", 2), pb.REASON_RANGE, "from LAST to MID"),
    "action": (_with("output/action", 3), pb.REASON_RANGE, "output/action holds 3.* 0 to 2"),
    "negative action": (_with("output/action", -1), pb.REASON_RANGE, "action holds -1"),
    "future version": (_good(parameter_version=4), pb.REASON_VERSION, "is 4.* is 3"),
    "huge version": (_good(parameter_version=2**63), pb.REASON_VERSION, "is 9223372036854775808"),
    "nobody's version": (_good(learner_incarnation=0), pb.REASON_VERSION, "learner_incarnation"),
    "nan return": (_episode(episode_return=NAN), pb.REASON_RANGE, "episode_return is nan"),
    "inf info": (_episode(info={"x": INF}), pb.REASON_RANGE, "x is inf"),
    "odd name": (_episode(info={"\x1b[2J\n": INF}), pb.REASON_RANGE, r"'s \\x1b\[2J\\n is inf"),
    "large return": (
        _episode(episode_return=3.1e6, length=3),
        pb.REASON_RANGE,
        r"episode_return is 3100000.0 in 3 steps.*limits\.reward",
    ),
    "no steps": (_episode(length=0), pb.REASON_RANGE, "length is 0"),
    "endless": (_episode(length=2**31), pb.REASON_RANGE, "length is 2147483648"),
    "frames of an episode": (
        _episode(length=3, frames=19),
        pb.REASON_RANGE,
        r"frames are 19 in 3 steps: .* at most 6.*limits\.frames_per_step",
    ),
    "inf seconds": (_good(elapsed_seconds=INF), pb.REASON_RANGE, "elapsed_seconds is inf"),
    "many seconds": (_good(elapsed_seconds=1e30), pb.REASON_RANGE, r"must be 0 to 1e\+09"),
    "many episodes": (_good(episodes=[pb.Episode()] * 9), pb.REASON_RANGE, "9 episodes.* 8"),
    "nan seconds": (_good(elapsed_seconds=NAN), pb.REASON_RANGE, "elapsed_seconds is nan"),
    "negative seconds": (_good(waited_seconds=-1), pb.REASON_RANGE, "waited_seconds is -1"),
    "nan seconds in environments": (
        _good(environment_seconds=NAN),
        pb.REASON_RANGE,
        "environment_seconds is nan",
    ),
    "waiting all the time and more": (
        _good(waited_seconds=1.75),
        pb.REASON_RANGE,
        "waited_seconds is 1.75 of elapsed_seconds 0.5",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_message_is_refused_with_what_is_wrong(name: str) -> None:
    message, reason, detail = BAD[name]
    rejection = _check(message)
    assert isinstance(rejection, Rejection), rejection
    assert pb.Reason.Name(rejection.reason) == pb.Reason.Name(reason)
    assert re.search(detail, rejection.detail), rejection.detail
    assert len(rejection.detail) < 400


def test_what_looks_odd_but_is_right_passes() -> None:
    first = messages.unroll()
    first.timestep.step_type[0, 1] = StepType.FIRST  # an episode begins in row 0
    last = messages.unroll()
    last.timestep.step_type[T, 1] = StepType.LAST  # and one ends in the last row
    for message in (
        _good(arrays=first),
        _good(arrays=last),
        _good(episodes=[]),
        _good(waited_seconds=1.25),
        _good(frames=[3, 4]),  # one a step, none for the seam
        _good(frames=[18, 24]),  # as many as there can be
        _with("output/policy", -1e9),  # an action mask
        _episode(
            length=1, info={str(i) * 300: 0 for i in range(1000)}
        ),  # left out later: info_names
        _with("timestep/reward", 1e6),
        _with("output/baseline", -1e8),
        _episode(episode_return=-3e6, length=3, frames=18),
    ):
        assert isinstance(_check(message), Arrival)


def test_bounds_of_actions_fit_the_action() -> None:
    with pytest.raises(ValueError, match="2 action leaves, but the action has 1"):
        _validator(actions=[None, None])
    assert isinstance(_check(_with("output/action", 99), actions=[None]), Arrival)


def test_versions_of_learners_that_never_were_are_refused() -> None:
    rejection = _check(_good(learner_incarnation=5), newest_version=None)
    assert isinstance(rejection, Rejection)
    assert rejection.reason == pb.REASON_VERSION
    assert "learner_incarnation is 5, which is none of this run's" in rejection.detail
    assert isinstance(_check(_good(parameter_version=3), newest_version=3), Arrival)


def test_limits_and_frames_follow_configuration_and_task() -> None:
    limits = LimitsConfig(reward=1e9)
    large = _with("timestep/reward", 1e9)
    assert isinstance(_check(large, limits=limits), Arrival)
    assert "1e+09" in _detail(_with("timestep/reward", 2e9), limits=limits)
    assert isinstance(_check(_with("output/baseline", 1e11), limits=limits), Arrival)
    assert "1e+11 at most" in _detail(_with("output/baseline", 2e11), limits=limits)

    for reward in (1.1, 1e30):  # which float32, as they are sent, does not have
        own = LimitsConfig(reward=reward)
        assert isinstance(_check(_with("timestep/reward", -reward), limits=own), Arrival)
        beyond = float(np.nextafter(np.float32(reward), np.float32(np.inf)))
        assert isinstance(_check(_with("timestep/reward", beyond), limits=own), Rejection)

    slow_and_fast: dict[str, Any] = {"frames_per_step": [1, 50]}
    assert "1 to 1" in _detail(_good(frames=[3, 5]), **slow_and_fast)
    fast = _good(frames=[150, 200], task=1)
    assert isinstance(_check(fast, **slow_and_fast), Arrival)


_HALF_BOUNDED = gym.spaces.Box(
    np.array([-np.inf, 0.0], np.float32), np.array([1.0, np.inf], np.float32)
)


@pytest.mark.parametrize(
    ("space", "good", "bad"),
    [
        (gym.spaces.Discrete(3, start=2), 2, 5),
        (gym.spaces.MultiDiscrete([2, 3]), [1, 2], [2, 2]),
        (gym.spaces.MultiBinary(2), [0, 1], [0, 2]),
        (gym.spaces.Box(-2.0, 2.0, (2,)), [2.00001, -2.0], [2.001, 0.0]),
        (_HALF_BOUNDED, [-1e30, 1e30], [2.0, 0.0]),
        (gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(1)}), 0, 2),
    ],
)
def test_actions_are_those_of_the_action_space(space: gym.Space, good: object, bad: object) -> None:
    for bounds in message_bounds(Config(), [], (space, space)).actions:
        for action, is_good in ((good, True), (bad, False)):
            array = np.asarray(action, np.float64)
            assert bounds is not None
            inside = (array >= bounds.low).all() and (array <= bounds.high).all()
            assert inside == is_good


def test_observations_that_are_choices_are_those_of_their_space() -> None:
    """A network may look numbers up in a table, which has no row for others."""
    seen = messages.SPACES[0]
    assert isinstance(seen, gym.spaces.Dict)
    image = gym.spaces.MultiDiscrete([5, 4, 256], start=[0, 1, 0])
    space = gym.spaces.Dict({**seen.spaces, "image": image})
    bounds = message_bounds(Config(), [], (space, space)).observations
    arrays = messages.unroll()
    numbers = arrays.timestep.observation["image"]
    numbers[:] = [4, 1, 255]
    assert isinstance(_check(_good(arrays=arrays), observations=bounds), Arrival)
    for row, value in ((0, [5, 1, 0]), (3, [4, 0, 0]), (3, [4, 5, 0])):
        numbers[:] = [4, 4, 0]
        numbers[row, 1] = value
        refused = _check(_good(arrays=arrays), observations=bounds)
        assert isinstance(refused, Rejection) and refused.reason == pb.REASON_RANGE
        assert "timestep/observation/image holds" in refused.detail
    arrays.timestep.observation["speed"][:] = 1e6  # a box need not be kept to
    numbers[:] = 1
    assert isinstance(_check(_good(arrays=arrays), observations=bounds), Arrival)


def test_large_whole_numbers_in_observations_are_limited() -> None:
    limit = {
        kind: limit_of("timestep/observation", np.dtype(kind), LimitsConfig())
        for kind in ("uint8", "bool", "int64", "float16")
    }
    assert limit["uint8"] is limit["bool"] is None
    assert limit["int64"] is not None and limit["float16"] is not None
    assert limit["int64"].beyond(np.array([5, -(2**63)])) == -(2**63)
    assert limit["int64"].beyond(np.array([5, -1000])) is None
    assert limit["float16"].beyond(np.array([1.0, np.inf], np.float16)) == np.inf
    assert limit["float16"].beyond(np.array([], np.float16)) is None


def test_the_largest_good_message_fits_the_limit_of_its_size() -> None:
    envs = messages.MAX_ENVS
    episode = pb.Episode(episode_return=1, length=1, frames=4, info={"l" * 20: 1.0, "t" * 20: 2.0})
    message = _good(num_envs=envs, arrays=messages.unroll(envs), episodes=[episode] * T * envs)
    assert isinstance(_check(message), Arrival)
    limit = _validator().max_message_bytes
    assert message.ByteSize() < limit < 2 * 2**20


def test_the_rest_of_a_message_is_bounded_by_environments() -> None:
    """It takes far longer to parse and check."""
    for envs in (1, messages.MAX_ENVS):
        most = _validator().max_bytes_beside_tensors(envs)
        arrays = messages.unroll(envs)
        info = {f"{number:0990}": 1.0 for number in range(most // 2000)}
        few = [pb.Episode(episode_return=1, length=1, frames=4, info=info)]
        assert isinstance(_check(_good(num_envs=envs, arrays=arrays, episodes=few)), Arrival)
        refused = _check(_good(num_envs=envs, arrays=arrays, episodes=few * 3))
        assert isinstance(refused, Rejection) and refused.reason == pb.REASON_RANGE
        assert f"at most {most} for {envs} environments" in refused.detail


def test_numbers_by_name_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs an object, which would keep the learner from others."""
    monkeypatch.setattr("learner.data.ingest.MOST_INFO", 1000)
    many = [pb.StepInfo()] * 2000
    assert "2000 names in step_info, at most 1024" in _detail(_good(step_info=many))
    envs = messages.MAX_ENVS
    info = {str(number): 1.0 for number in range(600)}
    episode = pb.Episode(episode_return=1, length=1, frames=4, info=info)
    arrays = messages.unroll(envs)
    assert "1200 numbers in the episodes' info, at most 1000" in _detail(
        _good(num_envs=envs, arrays=arrays, episodes=[episode] * 2)
    )


def _arrival(number: int, num_envs: int) -> Arrival:
    arrival = _check(_good(num_envs=num_envs, arrays=messages.unroll(num_envs), sequence=number))
    assert isinstance(arrival, Arrival)
    return arrival


async def _put(ingest: Ingest, number: int, num_envs: int) -> None:
    async with ingest.room(num_envs):
        ingest.put(_arrival(number, num_envs))


async def _settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def _numbers(ingest: Ingest) -> list[int]:
    """Takes everything out that is there now."""
    numbers = []
    while (arrival := ingest.get(timeout=0.0)) is not None:
        numbers.append(arrival.sequence)
    return numbers


def test_when_it_is_full_those_who_come_wait_in_order() -> None:
    async def story() -> None:
        ingest = Ingest(capacity=4)
        await _put(ingest, 1, 3)
        assert (ingest.depth, ingest.capacity) == (3, 4)
        waiting = [asyncio.create_task(_put(ingest, n, size)) for n, size in ((2, 2), (3, 1))]
        await _settle()
        assert ingest.depth == 3  # also the one that would fit waits for its turn

        assert await asyncio.to_thread(ingest.get, 1.0)  # another thread makes room
        await asyncio.gather(*waiting)
        assert ingest.depth == 3
        assert _numbers(ingest) == [2, 3]
        assert ingest.depth == 0

    asyncio.run(story())


def test_a_message_larger_than_the_queue_passes_when_it_is_empty() -> None:
    async def story() -> None:
        ingest = Ingest(capacity=2)
        await _put(ingest, 1, 5)
        waiting = asyncio.create_task(_put(ingest, 2, 5))
        await _settle()
        assert not waiting.done()
        assert _numbers(ingest) == [1]
        await waiting
        assert _numbers(ingest) == [2]

    asyncio.run(story())


def test_one_who_gives_up_waiting_leaves_no_trace() -> None:
    async def story() -> None:
        ingest = Ingest(capacity=2)
        await _put(ingest, 1, 2)
        gone, patient = (asyncio.create_task(_put(ingest, n, 2)) for n in (2, 3))
        await _settle()
        gone.cancel()
        await _settle()
        assert _numbers(ingest) == [1]
        await patient
        assert _numbers(ingest) == [3]

    asyncio.run(story())


def test_close_wakes_everyone_and_keeps_what_is_queued() -> None:
    async def story() -> None:
        ingest = Ingest(capacity=2)
        await _put(ingest, 1, 2)
        waiting = [asyncio.create_task(_put(ingest, n, 1)) for n in (2, 3)]
        await _settle()
        ingest.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [IngestClosed] * 2
        assert _numbers(ingest) == [1]

    asyncio.run(story())


def test_close_wakes_a_thread_that_waits_for_a_message() -> None:
    ingest = Ingest(capacity=2)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ingest.get(timeout=60.0)))
    thread.start()
    ingest.close()
    thread.join(timeout=30.0)
    assert answers == [None]


def test_many_senders_and_a_thread_that_takes_lose_nothing() -> None:
    ingest = Ingest(capacity=3)
    taken = []

    def take() -> None:
        while (arrival := ingest.get(timeout=10.0)) is not None:
            taken.append(arrival.sequence)

    async def send(sender: int) -> None:
        for i in range(50):
            await _put(ingest, 100 * sender + i, 1 + i % 4)

    async def story() -> None:
        await asyncio.gather(*map(send, range(1, 6)))

    thread = threading.Thread(target=take)
    thread.start()
    asyncio.run(story())
    ingest.close()
    thread.join(timeout=30.0)
    assert len(taken) == 250
    for sender in range(1, 6):  # and each sender's messages stay in order
        assert [n for n in taken if n // 100 == sender] == [100 * sender + i for i in range(50)]
