"""Two deterministic runs are equal, bit for bit: variables, replay's draws and telemetry."""

import asyncio
import itertools
import pathlib
from concurrent.futures import ThreadPoolExecutor

import messages
import numpy as np
import pytest
import services

from actors import policy
from actors.actor import Actor
from actors.messages import unrolls as unrolls_message
from actors.run import ActorSetup
from impala.config import values
from impala.config.presets import PRESETS
from impala.logdir import checkpoint, rows
from impala.parts.components import Allowed
from impala.types import Parameters
from learner.data.ingest import Ingest
from learner.data.mix import Mix
from learner.data.pacing import make_pacing
from learner.data.replay import Replay
from learner.data.rows import Layout
from learner.evaluation.snapshots import Snapshots
from learner.fleet.receipts import ReceiptProofs
from learner.fleet.records import Records
from learner.plan import make_plan
from learner.service.service import LearnerService, Lineage
from learner.service.terms import terms
from learner.update.learner import Update
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

FRESH, T = 8, 9
SMALL = (
    *("--deterministic", "--evaluate", "no", "--agent.hidden-sizes", 16),
    *("--mix.fresh", FRESH, "--mix.replayed", FRESH, "--mix.warm-up-unrolls", 20),
    *("--actor.num-envs", FRESH, "--learner.unroll-length", T, "--learner.checkpoints-kept", 1),
)
CLOCK = ("time", "actor/", "learner/", "ingest/")  # and what is in seconds


def _train(logdir: pathlib.Path, updates: int, seed: int) -> None:
    frames = updates * FRESH * T  # at most
    trained = services.run(
        *("train", "catch", "--logdir", logdir, "--seed", seed, *SMALL, "--total-frames", frames)
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr


def _runs(tmp_path: pathlib.Path, updates: int, *seeds: int) -> list[checkpoint.Checkpoint]:
    """Runs of these seeds, side by side; their last checkpoints."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        for done in [
            pool.submit(_train, tmp_path / str(i), updates, seed) for i, seed in enumerate(seeds)
        ]:
            done.result()
    return [checkpoint.load(tmp_path / str(i)) for i in range(len(seeds))]


def _telemetry(logdir: pathlib.Path) -> list[dict[str, float]]:
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(CLOCK) and "second" not in name
        }
        for row in rows.read(logdir)
    ]


def _check_equal(tmp_path: pathlib.Path, updates: int) -> None:
    one, other = _runs(tmp_path, updates, 3, 3)
    assert one.counters._replace(seconds=0.0) == other.counters._replace(seconds=0.0)
    assert one.counters.updates >= 0.95 * updates
    assert one.variables.keys() == other.variables.keys()
    for name, value in one.variables.items():
        np.testing.assert_array_equal(value, other.variables[name], err_msg=name)
    first, second = (_telemetry(tmp_path / name) for name in "01")
    assert first == second and len(first[-1]) > 30
    assert first[-1]["policy_lag/max"] == 0.0 and first[-1]["replay/policy_lag/max"] > 0.0


def _play(incarnation: int, updates: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Plays and learns in this process; the variables, and which unrolls were learned from."""
    settings = {
        "deterministic": True,
        "seed": 3,
        "agent": {"hidden_sizes": [8]},
        "mix": {"fresh": FRESH, "replayed": FRESH, "warm_up_unrolls": 12},
        "replay": {"storage": "memory"},
        "actor": {"num_envs": 4},
    }
    config = values.overlay(PRESETS["catch"][1], settings)
    plan = make_plan(config)
    learner = plan.phases.learner_at(checkpoint.Counters())
    pacing = make_pacing(config)
    assert pacing is not None
    ingest = Ingest(pacing.capacity)
    lineage = Lineage(incarnation, {}, ReceiptProofs(bytes(32), incarnation))
    service = LearnerService(
        terms(config, plan.phases.agent.variables, plan.unroll_spec, plan.played, plan.spaces),
        *(lineage, Records.begin(config), ingest, plan.schedule, Snapshots(1, "never")),
        pacing=pacing,
    )
    layout = Layout(plan.unroll_spec)
    replay = Replay(
        layout, None, "reservoir", capacity_frames=10_000, memory=2**20, seed=config.seed
    )
    mix = Mix(ingest, config.mix, layout, replay, pacing=pacing)
    drawn: list[np.ndarray] = []

    def publish() -> None:
        version = learner.counters.updates
        service.publish(Parameters(incarnation, version, 0.0, 0, learner.agent_values()))

    publish()
    reply = service.join(messages.join_request("a", incarnation))
    setup = ActorSetup(reply, "actor", Allowed())
    rounds = itertools.count(1)
    permit = 0

    def parameters() -> Parameters:
        nonlocal permit
        request = pb.GetParametersRequest(
            actor="a", incarnation=incarnation, round=next(rounds), unrolls=4
        )
        data = service.get_parameters(request, asyncio.run(service.permit(request)))
        given = pb.GetParametersReply.FromString(data)
        permit = given.permit.number
        tensors = codec.decode(given.parameters.tensors, reply.parameter_specs)
        return Parameters(incarnation, given.permit.version, 0.0, 0, tensors)

    chosen = policy.make_policy(setup.agent, setup.config, setup.spaces)
    actor = Actor(
        lambda task: [setup.environment(task, 2, 2 * i) for i in range(2)], chosen, T, setup.seed
    )
    stream = actor.run(parameters, whole_rounds=True)
    sequence = itertools.count(1)
    try:
        while learner.counters.updates < updates:
            for unrolls in itertools.islice(stream, FRESH // 2):
                message, tensors = unrolls_message("a", incarnation, reply, unrolls)
                message.sequence, message.permit = next(sequence), permit
                views, _ = codec.split(b"".join(tensors))
                assert asyncio.run(service.submit(message, views)).status == pb.STATUS_ACCEPTED
            prepared = mix.get(timeout=60.0)
            assert prepared is not None
            if prepared.batch is not None:
                assert isinstance(learner.update(prepared.batch), Update)
                drawn.append(prepared.batch.unroll.timestep.observation)
                publish()
            service.learned()
    finally:
        mix.close()
    return [variable.numpy() for variable in plan.phases.agent.variables], drawn


def test_deterministic_runs_do_not_depend_on_incarnations() -> None:
    one, other = _play(7, 12), _play(8, 12)
    for arrays, others in zip(one, other, strict=True):
        for array, same in zip(arrays, others, strict=True):
            np.testing.assert_array_equal(array, same)
    assert not np.array_equal(one[1][0], one[1][-1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_are_equal_by_seed_after_500_updates(
    tmp_path: pathlib.Path,
) -> None:
    _check_equal(tmp_path, 530)
    assert checkpoint.load(tmp_path / "0").counters.updates >= 500
    (another,) = _runs(tmp_path / "another", 30, 4)
    one = checkpoint.load(tmp_path / "0")
    assert any((one.variables[name] != value).any() for name, value in another.variables.items())
