"""Ten thousand malformed messages, while a good actor goes on as if nothing were."""

import collections
import ctypes
import gc
import pathlib
import random
import resource
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import messages
import numpy as np
import pytest
import tree
from callers import STREAM_METHOD, Actor, Learner, received
from services import WAIT

from protos.impala.v1 import learner_pb2 as pb

MALFORMED = 10_000
STREAMS = 4

FLOATS = ("timestep/reward", "timestep/discount", "output/policy", "output/baseline", "core_state")


# The reason that a receipt gives, or one of several.
Expected = pb.Reason | tuple[pb.Reason, ...]


def _spoil(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, Expected]:
    """One malformed message and the reason that its receipt must give."""
    kinds: list[Callable[[Actor, random.Random], tuple[pb.Unrolls, Expected]]] = [
        _random_tensors,
        _truncated,
        _oversized,
        _wrong_dtype,
        _wrong_count,
        _wrong_num_envs,
        _wrong_fingerprint,
        _not_finite,
        _out_of_range,
        _bad_episode,
        _future_version,
        _unknown_actor,
        _skipped,
    ]
    return rng.choice(kinds)(actor, rng)


def _random_tensors(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, tuple[pb.Reason, ...]]:
    message = actor.next()
    sizes = [len(tensor) for tensor in message.tensors]
    # All bits set in floats are NaN, so that at least one of the checks must bite.
    random_bytes = [rng.randbytes(size) for size in sizes[:-1]] + [b"\xff" * sizes[-1]]
    del message.tensors[:]
    message.tensors.extend(random_bytes)
    return message, (pb.REASON_NOT_FINITE, pb.REASON_RANGE)


def _truncated(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    message = actor.next()
    i = rng.randrange(len(message.tensors))
    message.tensors[i] = message.tensors[i][: rng.randrange(len(message.tensors[i]))]
    return message, pb.REASON_TENSOR_SIZE


def _oversized(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    message = actor.next()
    i = rng.randrange(len(message.tensors))
    message.tensors[i] += bytes(rng.randint(1, 700_000))
    return message, pb.REASON_TENSOR_SIZE


def _wrong_dtype(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    arrays = messages.unroll()
    wide = tree.map_structure(lambda x: x.astype(np.float64), arrays)
    return actor.next(arrays=wide), pb.REASON_TENSOR_SIZE


def _wrong_count(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    message = actor.next()
    if rng.random() < 0.5:
        del message.tensors[rng.randrange(len(message.tensors)) :]
    else:
        message.tensors.extend([b""] * rng.randint(1, 100))
    return message, pb.REASON_TENSOR_COUNT


def _wrong_num_envs(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    message = actor.next()  # with two environments
    message.num_envs = rng.choice([0, 1, 3, messages.MAX_ENVS + 1, 2**31, 2**32 - 1])
    return message, pb.REASON_NUM_ENVS


def _wrong_fingerprint(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    return actor.next(fingerprint="x" * rng.randint(0, 1000)), pb.REASON_FINGERPRINT


def _leaf(actor: Actor, path: str, value: float) -> pb.Unrolls:
    arrays = messages.unroll()
    leaves = {"/".join(map(str, name)): leaf for name, leaf in tree.flatten_with_path(arrays)}
    leaves[path].flat[-1] = value
    return actor.next(arrays=arrays)


def _not_finite(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    value = rng.choice([float("nan"), float("inf"), float("-inf")])
    return _leaf(actor, rng.choice(FLOATS), value), pb.REASON_NOT_FINITE


def _out_of_range(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    path, value = rng.choice(
        [
            ("timestep/step_type", rng.choice([0, 3, -1, 100])),
            ("timestep/discount", rng.choice([-0.1, 1.1, 1e30])),
            ("output/action", rng.choice([-1, 3, 2**40])),
        ]
    )
    return _leaf(actor, path, value), pb.REASON_RANGE


def _bad_episode(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    episodes = rng.choice(
        [
            [pb.Episode(episode_return=float("nan"))],
            [pb.Episode(info={"x": float("inf")})],
            [pb.Episode(info={str(i): float("nan") for i in range(100)})],
            [pb.Episode()] * 100,
        ]
    )
    return actor.next(episodes=episodes), pb.REASON_RANGE


def _future_version(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    version = rng.choice([1, 2**40, 2**64 - 1])
    return actor.next(parameter_version=version), pb.REASON_VERSION


def _unknown_actor(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    kw: dict[str, Any] = rng.choice(
        [{"actor": "nobody"}, {"incarnation": 12345}, {"actor": "x" * 10_000}]
    )
    return actor.message(actor.sequence + 1, **kw), pb.REASON_UNKNOWN_ACTOR


def _skipped(actor: Actor, rng: random.Random) -> tuple[pb.Unrolls, pb.Reason]:
    sequence = rng.choice([0, actor.sequence + 2, actor.sequence + 1000, 2**64 - 1])
    return actor.message(sequence), pb.REASON_SEQUENCE


def _attack(learner: Learner, number: int, count: int, counted: collections.Counter) -> None:
    """Sends malformed messages on one stream and compares every receipt with what must come."""
    rng = random.Random(number)
    with Actor(learner.address, f"bad-{number}", 1000 + number) as actor:
        expected: collections.deque = collections.deque()

        def spoilt() -> Iterator[pb.Unrolls]:
            for i in range(count):
                if i % 10 == 9 and actor.sequence:  # a replayed sequence number of a good message
                    message, reason = actor.message(rng.randint(1, actor.sequence)), None
                else:
                    message, reason = _spoil(actor, rng)
                expected.append((message.sequence, reason))
                yield message

        for receipt in received(actor.stub.StreamUnrolls(spoilt())):
            sequence, reason = expected.popleft()
            assert receipt.sequence == sequence
            if reason is None:
                assert receipt.status == pb.STATUS_DUPLICATE
                counted["duplicate"] += 1
                continue
            reasons = reason if isinstance(reason, tuple) else (reason,)
            assert receipt.status == pb.STATUS_REJECTED, reason
            assert receipt.reason in reasons, receipt
            assert 20 < len(receipt.detail) < 500
            counted[pb.Reason.Name(receipt.reason).removeprefix("REASON_").lower()] += 1
        assert not expected


def _resident_bytes() -> int:
    """Returns what is in use; what glibc keeps for later depends on how busy the machine is."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_malformed_messages_are_each_answered_and_counted() -> None:
    with Learner() as learner, Actor(learner.address, "good", 1) as good:
        counted: list[collections.Counter] = [collections.Counter() for _ in range(STREAMS)]
        errors: list[BaseException] = []

        def attack(number: int) -> None:
            try:
                _attack(learner, number, MALFORMED // STREAMS, counted[number])
            except BaseException as error:
                errors.append(error)

        attackers = [threading.Thread(target=attack, args=(i,)) for i in range(STREAMS)]
        before, peak_before = _resident_bytes(), _peak_bytes()
        for thread in attackers:
            thread.start()

        def good_messages() -> Iterator[pb.Unrolls]:
            while any(thread.is_alive() for thread in attackers) and good.sequence < MALFORMED:
                yield good.next()

        receipts = list(received(good.stub.StreamUnrolls(good_messages())))
        for thread in attackers:
            thread.join()
        if errors:
            raise errors[0]

        assert len(receipts) > 10
        assert all(receipt.status == pb.STATUS_ACCEPTED for receipt in receipts)
        assert [receipt.sequence for receipt in receipts] == list(range(1, len(receipts) + 1))
        total = sum(counted, collections.Counter())
        duplicates = total.pop("duplicate")
        assert duplicates + sum(total.values()) == MALFORMED
        unseen = {"unspecified", "quarantined", "meaning"}  # there is no quarantine, and no check
        reasons = {name.removeprefix("REASON_").lower() for name in pb.Reason.keys()}  # noqa: SIM118
        assert {*total} == reasons - unseen
        totals = learner.accounts.totals()
        assert totals.rejected == total
        assert totals.duplicates == duplicates
        assert totals.received == 2 * len(receipts)
        learner.server.check()
    assert {name for name, _ in learner.taken} == {"good"}
    assert len(learner.taken) == len(receipts)
    # Some 250 MB came in. How much is on its way at once depends on how busy the machine is.
    assert _resident_bytes() - before < 60 << 20
    assert _peak_bytes() - peak_before < 150 << 20


def test_unreadable_grpc_frames_are_refused_and_others_go_on() -> None:
    """Random bytes and messages over the size limit never reach the service."""
    with Learner() as learner, Actor(learner.address, "good", 1) as good:
        limit = messages.service().max_message_bytes
        rng = random.Random(0)
        whole = good.message(1).SerializeToString()
        unreadable = [b"\xff" * 100, whole[:-1], b"\x0a\xff\xff\xff\xff\x0f"]
        unreadable += [b"\xff" + rng.randbytes(200) for _ in range(200)]
        raw = good.channel.stream_stream(STREAM_METHOD)  # bytes go out as they are
        for payload in unreadable:
            with pytest.raises(grpc.RpcError):
                list(raw(iter([payload]), timeout=WAIT))
        with pytest.raises(grpc.RpcError) as error:
            list(raw(iter([whole + bytes(limit)]), timeout=WAIT))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for method in ("Join", "GetParameters", "GetSnapshot", "ReportEvaluation"):
            with pytest.raises(grpc.RpcError):
                good.channel.unary_unary(f"/impala.v1.Learner/{method}")(b"\xff" * 9, timeout=WAIT)

        receipts = list(good.stub.StreamUnrolls(iter([good.next()]), timeout=WAIT))
        assert [receipt.status for receipt in receipts] == [pb.STATUS_ACCEPTED]
        assert learner.accounts.totals().rejected == {}
        learner.server.check()
