"""Writes what this version stores and sends into tests/stored/, for the versions after it.

`PYTHONPATH=tests .venv/bin/python -m keep` is run once for each minor version, before it is
released. tests/test_versions.py reads all that was kept, of every version.
"""

import asyncio
import contextlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

import messages
import numpy as np
from google.protobuf import text_format
from google.protobuf.message import Message

from impala.config import values
from impala.config.schema import AgentConfig, Config
from impala.logdir import checkpoint
from impala.schedule import tasks
from impala.types import Parameters
from learner.data.pacing import Pacing
from learner.evaluation.snapshots import Snapshot, Snapshots
from learner.service import description, settings
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

STORED = pathlib.Path(__file__).parent / "stored"
RUN = (
    *("--total-frames", "2000", "--num-actors", "1", "--agent.hidden-sizes", "8"),
    *("--actor.num-envs", "8", "--mix.fresh", "8", "--learner.unroll-length", "10"),
    *("--learner.checkpoints-kept", "1", "--seed", "3", "--evaluate", "no"),
)
SETTINGS = {
    "environment": {"id": "ALE/Pong-v5", "last_action": True, "atari": {"actions": [0, 2, 3]}},
    "tasks": {"environments": ["ALE/Pong-v5", 'ALE/Pong-v5{"difficulty":1}']},
    "agent": {"torso": "shallow", "core": "lstm", "frame_stack": 4, "policy": "epsilon_greedy"},
    "actor": {"num_envs": 64},
    "evaluator": {"greedy": True},
}


class Named(NamedTuple):
    """A variable of an agent, as far as it is described."""

    name: str


def exchanged() -> dict[str, Message]:
    """What an actor, an evaluator and a learner of now say to each other."""
    config = values.from_dict(Config, SETTINGS)
    request = messages.join_request(
        "host-7-0",
        81,
        protocol=codec.PROTOCOL_VERSION,
        acknowledged_sequence=2,
        acknowledged_unrolls=4,
        proof=b"proof",
        version="impala 0.1.0",
    )
    snapshots = Snapshots(1, "auto")
    snapshots.add(Snapshot(pathlib.Path("not read"), messages.LEARNER, 3, 100, 0.5))
    service = messages.service(pacing=Pacing(fresh=8, lag=1, exact=False), snapshots=snapshots)
    service.publish(Parameters(messages.LEARNER, 3, 0.5, 100, [np.zeros((2, 3), np.float32)]))
    reply = service.join(request)
    reply.version = "impala 0.1.0"
    played = tasks.make(config.environment, config.tasks)
    reply.settings.CopyFrom(settings.message(config, played))
    reply.settings.parts["my_torso"] = '{"width": 64}'
    reply.life = 1
    named = [f"agent/{head}/{name}" for head in ("baseline", "policy") for name in "bw"]
    described = description.of(
        Config(agent=AgentConfig(hidden_sizes=())),
        [Named(name) for name in named],
        messages.SPACES,
        messages.bounds(),
    )
    reply.network.CopyFrom(described.network)
    reply.limits.CopyFrom(described.limits)
    ask = pb.GetParametersRequest(actor="host-7-0", incarnation=81, round=4, unrolls=2)
    permit = asyncio.run(service.permit(ask))
    given = pb.GetParametersReply.FromString(service.get_parameters(ask, permit))
    unrolls = messages.message(
        3,
        actor="host-7-0",
        incarnation=81,
        fingerprint=reply.fingerprint,
        permit=given.permit.number,
    )
    unrolls.environment_faults.add(environment=1, kind=pb.FAULT_KIND_HUNG, detail="hung")
    receipt = asyncio.run(service.submit(unrolls))
    receipt.proof = b"proof"  # which is made with a key drawn at random
    held = pb.GetSnapshotRequest(actor="judge", learner_incarnation=messages.LEARNER, frames=100)
    return {
        "JoinRequest": request,
        "JoinReply": reply,
        "GetParametersRequest": ask,
        "GetParametersReply": given,
        "Unrolls": unrolls,
        "Receipt": receipt,
        "GetSnapshotRequest": held,
        "GetExecutablePolicyRequest": pb.GetExecutablePolicyRequest(digest="ab" * 32),
        "GetExecutablePolicyReply": pb.GetExecutablePolicyReply(digest="cd" * 32, onnx=b"onnx"),
        "ActRequest": pb.ActRequest(
            actor="host-7-0", incarnation=81, begins=True, num_envs=2, tensors=[b"seen", b"state"]
        ),
        "ActReply": pb.ActReply(
            learner_incarnation=messages.LEARNER,
            parameter_version=3,
            tensors=[b"action", b"policy", b"baseline", b"state"],
        ),
        "GetSnapshotReply": pb.GetSnapshotReply.FromString(service.evaluators.get_snapshot(held)),
    }


def keep_messages(folder: pathlib.Path) -> None:
    """Writes each message as bytes and as text."""
    folder.mkdir(parents=True)
    for name, message in exchanged().items():
        (folder / f"{name}.binpb").write_bytes(message.SerializeToString())
        (folder / f"{name}.txtpb").write_text(text_format.MessageToString(message))


def keep_run(folder: pathlib.Path) -> None:
    """Trains Catch for a few updates and writes its configuration and checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        logdir = pathlib.Path(name, "run")
        command = [sys.executable, "-m", "impala", "train", "catch", "--logdir", str(logdir), *RUN]
        subprocess.run(command, check=True)
        folder.mkdir(parents=True)
        shutil.copy(logdir / "config.yaml", folder)
        shutil.copytree(logdir / "checkpoints", folder / "checkpoints")


def main() -> None:
    """Writes what is not there yet."""
    version = codec.PROTOCOL_VERSION
    for what, folder in (
        (keep_messages, STORED / f"protocol-{version.major}.{version.minor}"),
        (keep_run, STORED / f"run-{checkpoint.SCHEMA[0]}.{checkpoint.SCHEMA[1]}"),
    ):
        with contextlib.suppress(FileExistsError):
            what(folder)
            print(f"kept {folder}")


if __name__ == "__main__":
    main()
