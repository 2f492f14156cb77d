"""A small spec, good messages that fit it, and a learner service around them: shared by tests."""

import asyncio
import collections
import json
import secrets
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import tree

from impala.config.schema import ChecksConfig, Config, QuarantineConfig
from impala.schedule.tasks import Schedule
from impala.types import AgentOutput, ArraySpec, StepType, TimeStep, Unroll
from learner.data.bounds import Bounds, MessageBounds
from learner.data.ingest import Ingest
from learner.data.pacing import Pacing
from learner.data.replay import Replay
from learner.evaluation.snapshots import Snapshots
from learner.fleet.accounts import Accounts
from learner.fleet.info_names import InfoNames
from learner.fleet.quarantine import Quarantine
from learner.fleet.receipts import ReceiptProofs
from learner.fleet.records import Records, RefusedOutput
from learner.fleet.roster import Roster
from learner.fleet.violations import Violations
from learner.service.executable import ExecutablePolicy
from learner.service.inference import Inference
from learner.service.service import LearnerService, Lineage
from learner.service.terms import Terms
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

UNROLL_LENGTH = 4
MAX_ENVS = 8
LEARNER = 77  # the learner's incarnation
EARLIER = 55  # of a learner of the same run that came as far as version 1,000
FRAMES_PER_STEP = 6
SPACES = (
    gym.spaces.Dict(
        {
            "flag": gym.spaces.Box(0, 1, (), np.bool_),
            "image": gym.spaces.Box(0, 255, (3,), np.uint8),
            "speed": gym.spaces.Box(-1.0, 1.0, (2,), np.float32),
        }
    ),
    gym.spaces.Discrete(3),
)
SETTINGS = json.dumps({"tasks": [{"name": "Small", "environment": {"id": "Small"}}]})


def spec(
    observation: tuple[tuple[int, ...], type[np.generic]] = ((3,), np.uint8),
    unroll_length: int = UNROLL_LENGTH,
) -> Unroll:
    """One environment: bytes, a flag and a float to see, three actions, a core of two floats."""

    def rows(shape: tuple[int, ...], dtype: type[np.generic]) -> ArraySpec:
        return ArraySpec((unroll_length + 1, *shape), np.dtype(dtype))

    return Unroll(
        timestep=TimeStep(
            observation={
                "flag": rows((), np.bool_),
                "image": rows(*observation),
                "speed": rows((2,), np.float32),
            },
            reward=rows((), np.float32),
            discount=rows((), np.float32),
            step_type=rows((), np.int8),
        ),
        output=AgentOutput(
            action=rows((), np.int64),
            policy=rows((3,), np.float32),
            baseline=rows((), np.float32),
        ),
        core_state=ArraySpec((2,), np.dtype(np.float32)),
        frames=(),
        parameter_version=(),
    )


def unroll(num_envs: int = 2, unroll_spec: Unroll | None = None, seed: int = 0) -> Unroll:
    """A good unroll of E environments; only the first has an episode's end, in row 2."""
    unroll_spec = unroll_spec or spec()
    rng = np.random.default_rng(seed)
    timed = tree.map_structure(
        lambda leaf: rng.integers(0, 2, (leaf.shape[0], num_envs, *leaf.shape[1:])).astype(
            leaf.dtype
        ),
        unroll_spec._replace(core_state=()),
    )
    core_state = tree.map_structure(
        lambda leaf: rng.normal(size=(num_envs, *leaf.shape)).astype(leaf.dtype),
        unroll_spec.core_state,
    )
    timed.timestep.step_type[:] = StepType.MID
    timed.timestep.step_type[2:4, :1] = [[StepType.LAST], [StepType.FIRST]]
    return timed._replace(core_state=core_state)


def message(
    sequence: int = 1,
    num_envs: int = 2,
    *,
    actor: str = "a",
    incarnation: int = 1,
    fingerprint: str = "",
    arrays: Unroll | None = None,
    **kw: Any,
) -> pb.Unrolls:
    """A good message; name a field to make it another."""
    steps = UNROLL_LENGTH if arrays is None else len(arrays.timestep.reward) - 1
    if "tensors" not in kw:
        kw["tensors"] = codec.encode(tree.flatten(unroll(num_envs) if arrays is None else arrays))
    fields = {
        "actor": actor,
        "incarnation": incarnation,
        "sequence": sequence,
        "fingerprint": fingerprint,
        "learner_incarnation": LEARNER,
        "parameter_version": 0,
        "num_envs": num_envs,
        "frames": [4 * steps] * num_envs,
        "episodes": [pb.Episode(episode_return=1.5, length=9, frames=36, info={"lives": 3.0})],
        "elapsed_seconds": 0.5,
        "waited_seconds": 0.25,
    }
    return pb.Unrolls(**{**fields, **kw})


def bounds(num_tasks: int = 1, **kw: Any) -> MessageBounds:
    """Three actions, and a few frames a step."""
    known = {"actions": [Bounds(0, 2)], "frames_per_step": [FRAMES_PER_STEP] * num_tasks}
    return MessageBounds(**{**known, **kw})


def service(
    accounts: Accounts | None = None,
    ingest: Ingest | None = None,
    unroll_spec: Unroll | None = None,
    max_envs: int = MAX_ENVS,
    config: Config | None = None,
    quarantine: Quarantine | None = None,
    refused_outputs: collections.deque[RefusedOutput] | None = None,
    proofs: ReceiptProofs | None = None,
    pacing: Pacing | None = None,
    snapshots: Snapshots | None = None,
    terms: Terms | None = None,
    executable: ExecutablePolicy | None = None,
    inference: Inference | None = None,
    on_violation: Literal["warn", "refuse", "off"] = "off",
) -> LearnerService:
    """A service for the small spec; actors are only quarantined if a quarantine is given."""
    schedule = Schedule(config or Config())
    terms = terms or Terms(
        unroll_spec or spec(),
        codec.specs([ArraySpec((2, 3), np.dtype(np.float32))]),
        SETTINGS,
        "{}",
        seed=5,
        is_deterministic=False,
        max_envs_per_message=max_envs,
        max_in_flight=2,
        bounds=bounds(num_tasks=schedule.num_tasks),
        spaces=SPACES,
        checks=ChecksConfig(on_violation),
    )
    records = Records(
        accounts or Accounts(),
        Roster(),
        quarantine or Quarantine(QuarantineConfig(blames=0)),
        InfoNames(8),
        collections.deque() if refused_outputs is None else refused_outputs,
        Violations(),
    )
    proofs = proofs or ReceiptProofs(secrets.token_bytes(), LEARNER)
    lineage = Lineage(LEARNER, {EARLIER: 1000}, proofs)
    if snapshots is None:
        snapshots = Snapshots(schedule.num_tasks, "auto")
    ingest = ingest or Ingest(capacity=64)
    return LearnerService(
        terms, lineage, records, ingest, schedule, snapshots, pacing, executable, inference
    )


def join_request(actor: str = "a", incarnation: int = 1, **kw: Any) -> pb.JoinRequest:
    """How an actor of the right protocol introduces itself."""
    fields = {"protocol": codec.PROTOCOL_VERSION, "role": pb.ROLE_ACTOR}
    return pb.JoinRequest(**{"actor": actor, "incarnation": incarnation, **fields, **kw})


def submit(service: LearnerService, message: pb.Unrolls) -> pb.Receipt:
    """Returns what the service answers to a message."""
    return asyncio.run(service.submit(message))


def held(replay: Replay) -> np.ndarray:
    """Which unrolls a replay holds: how many had been added before each, ascending."""
    with replay._lock:
        return np.sort(np.array(replay._numbers, np.int64))
