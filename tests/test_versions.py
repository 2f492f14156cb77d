"""Versions side by side: another major version is refused by name, a newer minor one works."""

import hashlib
import json
import pathlib
import shutil
from typing import Any

import half_trained
import messages
import pytest

from actors import settings as received
from actors.session import LearnerError
from impala.config.presets import PRESETS
from impala.logdir import checkpoint
from impala.parts.components import Allowed
from impala.runtime.installation import VERSION
from impala.schedule import tasks
from learner.fleet.refusals import IncompatibleProtocol
from learner.service import settings
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

MAJOR, MINOR = codec.PROTOCOL_VERSION.major, codec.PROTOCOL_VERSION.minor
CATCH = PRESETS["catch"][1]
UNKNOWN = b"\xa0\x3f\x2a"  # field 1012, which no message has, is 42


def reply(major: int = MAJOR) -> pb.JoinReply:
    """The reply of a learner of another version to an actor of Catch."""
    return pb.JoinReply(
        protocol=pb.ProtocolVersion(major=major, minor=MINOR + 1),
        version="impala 9.9",
        settings=settings.for_actors(CATCH, tasks.make(CATCH.environment, CATCH.tasks)),
    )


def of_version_9_9(logdir: pathlib.Path, changes: dict[str, Any]) -> pathlib.Path:
    """A log directory with one checkpoint, whose state has these changes and the right digests."""
    shutil.copytree(half_trained.STORED / "catch", logdir)
    [saved] = (logdir / "checkpoints").iterdir()
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps({**state, "version": "9.9", **changes}))
    files = [(name, (saved / name).read_bytes()) for name in ("state.json", "variables.npz")]
    lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files)
    (saved / "MANIFEST").write_text(lines)
    return logdir


def test_learner_refuses_another_major_version() -> None:
    protocol = pb.ProtocolVersion(major=MAJOR + 1, minor=7)
    sides = rf"\(impala 9\.9\) speaks protocol {MAJOR + 1}\.7, the learner .* {MAJOR}\.{MINOR}:"
    with pytest.raises(IncompatibleProtocol, match=sides):
        messages.service().join(messages.join_request(protocol=protocol, version="impala 9.9"))


def test_actor_refuses_another_major_version() -> None:
    sides = rf"impala 9\.9 with protocol {MAJOR + 1}\.{MINOR + 1}, .* protocol {MAJOR}\.{MINOR}: "
    with pytest.raises(LearnerError, match=sides + "Run the same major version"):
        received.read(reply(MAJOR + 1), "actor", Allowed())


def test_unknown_fields_of_a_newer_minor_version_are_ignored() -> None:
    protocol = pb.ProtocolVersion(major=MAJOR, minor=MINOR + 1)
    request = messages.join_request(protocol=protocol)
    request.MergeFromString(UNKNOWN)
    assert messages.service().join(request).fingerprint
    newer = reply()
    newer.MergeFromString(UNKNOWN)
    sent = json.loads(newer.settings)
    for section in (sent, sent["agent"], sent["tasks"][0]):
        section["later"] = 42
    newer.settings = json.dumps(sent)
    assert received.read(newer, "actor", Allowed())[1].agent == CATCH.agent


def test_missing_fields_of_an_older_minor_version_have_defaults() -> None:
    older = reply()
    sent = json.loads(older.settings)
    del sent["agent"]["standardise_images"], sent["actor"]
    older.settings = json.dumps(sent)
    assert received.read(older, "actor", Allowed())[1].agent == CATCH.agent


@pytest.mark.parametrize("need", ["agent.layer_norm", "environment.crop", "evaluator.temperature"])
def test_an_unknown_setting_that_matters_is_refused(need: str) -> None:
    newer = reply()
    sent = json.loads(newer.settings)
    newer.settings = json.dumps({**sent, "needs": [need]})
    with pytest.raises(LearnerError, match=rf"impala 9\.9 .* impala {VERSION} .* {need} is not kn"):
        received.read(newer, "evaluator", Allowed())
    if need.startswith("evaluator"):
        assert received.read(newer, "actor", Allowed())


def test_an_unknown_choice_is_refused_by_name() -> None:
    newer = reply()
    sent = json.loads(newer.settings)
    newer.settings = json.dumps({**sent, "agent": {"policy": "softest"}})
    with pytest.raises(LearnerError, match=r"agent\.policy is 'softest'"):
        received.read(newer, "actor", Allowed())


def test_a_checkpoint_of_a_newer_minor_schema_opens(tmp_path: pathlib.Path) -> None:
    major, minor = checkpoint.SCHEMA
    changes = {
        "schema": {"major": major, "minor": minor + 1},
        "config": {"agent": {"hidden_sizes": [50], "layer_norm": False}, "later": {"cost": 1.0}},
        "later": 1,
    }
    saved = checkpoint.choose(of_version_9_9(tmp_path / "run", changes))
    assert saved.config.agent.hidden_sizes == (50,)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": {"major": 9, "minor": 1}}, "These are different major"),
        ({"needs": ["agent.layer_norm"]}, "agent.layer_norm is not known here"),
        ({"config": {"agent": {"lstm_size": -1}}}, "agent.lstm_size is -1"),
        ({"spaces": [{"type": "Graph"}, {"type": "Graph"}]}, "Graph"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: pathlib.Path, changes: dict[str, Any], why: str
) -> None:
    logdir = of_version_9_9(tmp_path / "run", changes)
    for text in ("newest", "232"):
        with pytest.raises(
            checkpoint.CheckpointError, match=rf"impala 9\.9 .* impala {VERSION} .*{why}"
        ) as error:
            checkpoint.choose(logdir, text)
        assert "\n" not in str(error.value)
