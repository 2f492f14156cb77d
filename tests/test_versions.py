"""Versions side by side: what was written by one opens in another, or is refused by name.

tests/stored/ holds what earlier versions wrote; `newer` is a next version, made up.
"""

import contextlib
import copy
import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any

import messages
import numpy as np
import pytest
import yaml
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from actors import settings as told
from actors.session import LearnerError
from impala.agents.torsos import MLP
from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import OPERATIONAL, Config
from impala.logdir import checkpoint
from impala.logdir.checkpoint import CheckpointError
from impala.parts import build, sections
from impala.parts.components import TORSO, Allowed
from impala.play.evaluation import play_episodes
from impala.play.player import Player
from impala.runtime.installation import VERSION
from impala.schedule import tasks
from learner.fleet.accounts import Accounts
from learner.plan import plan_of
from learner.service import settings
from learner.service.terms import terms
from learner.update.checkpoints import Checkpoints, resume
from learner.update.phases import Phases
from protos import codec
from protos.impala.v1 import learner_pb2 as pb

TESTS = pathlib.Path(__file__).parent
STORED = TESTS / "stored"
OLDEST = STORED / "run-before-schema"  # written by commit a966f2c

# Every setting that changes neither what is played nor what is learned, so that a version may go on
# without knowing it. All others matter. A new setting is to be thought about, and listed here if it
# is marked OPERATIONAL.
MARKED = {
    "environment.vectorization",
    *("actor.num_envs", "actor.num_groups", "actor.env_threads"),
    "actor.hang_seconds",
    *("actor.environment_seconds", "actor.max_environment_bytes", "actor.max_memory_bytes"),
    "actor.step_info",
    *("guard.max_skips", "guard.window_updates"),
    *("learner.max_envs_per_message", "learner.checkpoint_seconds", "learner.checkpoints_kept"),
    "learner.checkpoint_store",
    *("learner.log_seconds", "learner.jit_compile", "learner.threads", "learner.devices"),
    *("learner.keep_best", "learner.milestones", "learner.milestone_hours"),
    "evaluator.every_seconds",
    *("learner.snapshots", "learner.max_snapshots", "learner.inference"),
    *("limits.info_names", "limits.frames_per_step", "limits.reward", "limits.observation"),
    *("limits.policy_parameter", "limits.baseline"),
    *("quarantine.blames", "quarantine.window_seconds", "quarantine.seconds"),
    *("checks.on_mistake", "checks.recompute"),
    *("replay.storage", "replay.on_damage", "telemetry.log_episodes", "telemetry.sinks"),
}


def newer(*arguments: object) -> str:
    """Runs the made-up next version; returns what it prints."""
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "newer.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_setting_is_known_to_matter_or_not() -> None:
    paths = values.flatten(Config())
    assert {path for path in paths if values.is_operational(Config, path)} == MARKED


def test_what_matters_is_what_is_away_from_its_default() -> None:
    data = {"agent": {"hidden_sizes": [8]}, "actor": {"num_envs": 2}, "seed": 0}
    config = values.from_dict(Config, data)
    assert values.settings_that_matter(config) == {"agent.hidden_sizes": (8,)}
    assert values.changed(config) == {"agent.hidden_sizes": (8,), "actor.num_envs": 2}


# ------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_from_before_schemas_opens() -> None:
    saved = checkpoint.load(OLDEST)
    assert saved.counters == checkpoint.Counters(2778, 22224, 200016, 200016, 201.39536289300122)
    assert saved.config.agent.hidden_sizes == (8,)
    assert saved.config.environment.id == "Catch"
    assert saved.spaces is None and not saved.unknown
    shapes = [value.shape for value in saved.agent_values]
    assert shapes == [(1,), (8, 1), (3,), (8, 3), (8,), (50, 8)]


@pytest.mark.parametrize("folder", sorted(STORED.glob("run-*")), ids=lambda path: path.name)
def test_a_run_that_any_version_began_goes_on_where_it_was(
    tmp_path: pathlib.Path, folder: pathlib.Path
) -> None:
    logdir = tmp_path / "run"
    shutil.copytree(folder, logdir)
    before = checkpoint.load(logdir)
    config = before.config
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    assert before.spaces in (None, spaces)

    agent, accounts = build.agent(config.agent, *spaces, seed=5), Accounts(max_in_flight=2)
    resumed = resume(logdir, Phases(config, agent), accounts, None)
    assert resumed.learner.counters == before.counters
    Checkpoints(logdir, resumed, spaces, accounts, None).save(resumed.learner)

    after = checkpoint.load(logdir)
    assert after.spaces == spaces
    assert after._replace(variables={}, spaces=None) == before._replace(variables={}, spaces=None)
    assert list(after.variables) == list(before.variables)
    for name, value in before.variables.items():
        np.testing.assert_array_equal(after.variables[name], value)


def test_an_agent_from_before_schemas_plays_as_well_as_it_did() -> None:
    player = Player(checkpoint.choose(OLDEST))
    with contextlib.closing(player.environment(num_envs=8)) as environment:
        episodes = play_episodes(environment, player.agent, 48, greedy=True, seed=0)
    assert np.mean([episode.episode_return for episode in episodes]) > 0.9  # of at most 1


def test_newer_checkpoints_keep_unknown_content(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = {"learner": {"tidy_seconds": 3.5, "log_seconds": 0.01, "unroll_length": 9}}
    newer("write", tmp_path, json.dumps(theirs))

    saved = checkpoint.load(tmp_path)
    assert saved.config.learner.unroll_length == 9 and saved.config.seed == 7
    assert saved.config.learner.log_seconds == 5.0  # this version takes no 0.01
    assert saved.unknown == {
        "agent": {"layer_norm": False},
        "learner": {"tidy_seconds": 3.5, "log_seconds": 0.01},
        "curiosity": {"cost": 0.0, "sizes": []},
    }
    (said,) = caplog.messages
    assert "impala 9.9" in said and "learner.tidy_seconds" in said and "curiosity.sizes" in said
    assert "learner.log_seconds" in said
    checkpoint.choose(tmp_path)
    assert caplog.messages == [said]  # once in a process

    # A run that goes on keeps it in its config.yaml, beside what it was started with.
    written = yaml.safe_load(values.to_yaml(saved.config, saved.unknown))
    assert written["learner"]["tidy_seconds"] == 3.5 and written["learner"]["log_seconds"] == 0.01
    assert values.from_stored(Config, written)[0] == saved.config

    # This version goes on and writes its own checkpoint, which the newer one opens again.
    checkpoint.save(tmp_path, saved._replace(counters=checkpoint.Counters(2)), keep=3)
    back = json.loads(newer("read", tmp_path))
    assert back["config"]["learner"]["tidy_seconds"] == 3.5
    assert back["config"]["learner"]["log_seconds"] == 0.01
    assert back["config"]["learner"]["unroll_length"] == 9
    assert back["unknown"] == {}

    # What a person has set here meanwhile comes before what the newer one had.
    again = checkpoint.load(tmp_path)
    assert again.unknown == saved.unknown and again.config == saved.config
    config = values.overlay(again.config, {"learner": {"log_seconds": 30.0}})
    stored = values.with_rest(config, again.unknown)["learner"]
    assert stored["log_seconds"] == 30.0 and stored["tidy_seconds"] == 3.5


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"agent": {"layer_norm": True}}, "agent.layer_norm = True"),
        ({"curiosity": {"sizes": [3]}}, r"curiosity.sizes = \[3\]"),
    ],
)
def test_unknown_settings_that_matter_are_refused(
    tmp_path: pathlib.Path, settings: dict[str, Any], named: str
) -> None:
    shutil.copytree(OLDEST / "checkpoints", tmp_path / "checkpoints")  # one that would open
    newer("write", tmp_path, json.dumps(settings))
    expected = rf"impala 9.9 with schema 1.1, this is impala {VERSION} with schema 1.0.* {named}"
    for name in ("newest", "1"):
        with pytest.raises(CheckpointError, match=f"{expected}.*Open it with impala 9.9") as error:
            checkpoint.choose(tmp_path, name)
        assert "\n" not in str(error.value)


def test_a_newer_version_opens_what_this_one_wrote(tmp_path: pathlib.Path) -> None:
    saved = checkpoint.load(OLDEST)
    checkpoint.save(tmp_path, saved, keep=3)
    read = json.loads(newer("read", tmp_path))
    assert read["config"]["agent"]["hidden_sizes"] == [8]
    assert read["config"]["agent"]["layer_norm"] is False  # the behaviour of before
    assert read["config"]["learner"]["tidy_seconds"] == 60.0
    assert read["unknown"] == {}


def test_another_major_version_is_refused_naming_both(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = checkpoint.load(OLDEST)
    checkpoint.save(tmp_path, saved, keep=3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "SCHEMA", (2, 0))
        patch.setattr(checkpoint, "VERSION", "9.9")
        checkpoint.save(tmp_path, saved, keep=3)
    with pytest.raises(
        CheckpointError, match=r"9.9 with schema 2.0.* with schema 1.0, another maj"
    ):
        checkpoint.load(tmp_path)


def rewrite(saved: pathlib.Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Changes the state of a checkpoint, with digests that are right."""
    contents = {name: (saved / name).read_bytes() for name in ("state.json", "variables.npz")}
    state = json.loads(contents["state.json"])
    edit(state)
    contents["state.json"] = json.dumps(state).encode()
    for name, content in {**contents, "MANIFEST": checkpoint._manifest(contents)}.items():
        (saved / name).write_bytes(content)


def test_what_a_version_would_not_have_written_is_damage(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = checkpoint.load(OLDEST)
    checkpoint.save(tmp_path, saved, keep=3)
    newest = checkpoint.save(tmp_path, saved, keep=3)
    # It is at its default, as `needs` says.
    rewrite(newest, lambda state: state["config"]["agent"].update(lstm_size=-1))
    caplog.set_level(logging.WARNING)
    assert checkpoint.load(tmp_path).config == saved.config
    assert "agent.lstm_size is -1" in caplog.text and "Going back to" in caplog.text


def test_spaces_of_a_newer_version_are_refused(tmp_path: pathlib.Path) -> None:
    shutil.copytree(OLDEST / "checkpoints", tmp_path / "checkpoints")
    newest = checkpoint.save(tmp_path, checkpoint.load(OLDEST), keep=3)
    graph = {"type": "Graph", "nodes": 3}
    rewrite(newest, lambda state: state.update(version="9.9", spaces=[graph, graph]))
    with pytest.raises(
        CheckpointError, match=r"impala 9\.9, .*Graph.* is not a space .*Open it with"
    ):
        checkpoint.load(tmp_path)


# ------------------------------------------------------------------------------------- wire

PAGE = (TESTS.parent / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
UNKNOWN = b"\xa0\x06\x2a"  # field 100, which is none of ours, is 42


def reply_of(config: Config, version: str = "impala 9.9", minor: int = 6) -> pb.JoinReply:
    """What a learner of a newer minor version answers, as far as this one can say it."""
    return pb.JoinReply(
        protocol=pb.ProtocolVersion(major=codec.PROTOCOL_VERSION.major, minor=minor),
        version=version,
        settings=settings.message(config, tasks.make(config.environment, config.tasks)),
    )


def described(descriptor: Any, path: str = "") -> dict[str, str]:
    """Every field of a message's descriptor, by the path that the page gives it, with its type."""
    types: dict[str, str] = {}
    for field in descriptor.fields:
        where = f"{path}{field.name}"
        if where == "tasks":
            types |= {"tasks[].name": "string"}
            types |= described(pb.ActorSettings.Environment.DESCRIPTOR, "environment.")
        elif field.name == "parts":
            types[where] = "map<string, string>"
        elif field.message_type is not None:
            types |= described(field.message_type, f"{where}.")
        else:
            kinds = {field.TYPE_STRING: "string", field.TYPE_BOOL: "bool"}
            kinds |= {field.TYPE_UINT64: "uint64", field.TYPE_DOUBLE: "double"}
            name = field.enum_type.name if field.enum_type else kinds[field.type]
            types[where] = f"repeated {name}" if field.is_repeated else name
            assert field.is_repeated or field.has_presence, where  # absent differs from 0
    return types


def test_page_message_and_configuration_have_the_same_settings() -> None:
    page = PAGE[PAGE.index("### Settings") : PAGE.index("## Tasks")]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| (?:`(.*?)`)? \| \S.* \|$", page, re.M)
    assert {path: kind for path, kind, _ in rows} == described(pb.ActorSettings.DESCRIPTOR)

    sections = ("environment", "agent", "actor", "evaluator")
    configured = {
        path: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for path, value in values.flatten(Config()).items()
        if path.partition(".")[0] in sections
    }
    paged = {path: default for path, _, default in rows if path.partition(".")[0] in sections}
    assert {path: re.sub(r"\.0$", "", value).lower() for path, value in configured.items()} == {
        path: default.lower() for path, default in paged.items()
    }


def fields_of(*descriptors: Any) -> dict[str, str]:
    """Every field of these messages, as Message.field, with the type that the page gives it."""
    kinds = {
        **{number: name for name, number in vars(FieldDescriptor).items() if name[:5] == "TYPE_"}
    }
    types = {}
    for descriptor in descriptors:
        for field in descriptor.fields:
            named = field.message_type or field.enum_type
            name = named.name if named else kinds[field.type].removeprefix("TYPE_").lower()
            types[f"{descriptor.name}.{field.name}"] = "repeated " * field.is_repeated + name
    return types


def test_page_and_message_have_the_same_fields_and_kinds() -> None:
    messages = (
        *(pb.JoinReply, pb.ProtocolVersion, pb.TensorSpec, pb.Space, pb.Limits),
        *(pb.Policy, pb.Policy.Factor, pb.Network, pb.Network.Input, pb.Layer),
    )
    rows = re.findall(r"^\| `([A-Z]\w+\.\w+)` \| `([^`]+)` \| (.*) \|$", PAGE, re.M)
    assert {path: kind for path, kind, _ in rows} == fields_of(*(m.DESCRIPTOR for m in messages))
    assert len(rows) == len({path for path, _, _ in rows})
    kinds = sorted(
        value.name
        for enum in (pb.Space.Kind, pb.Policy.Family, pb.Network.Input.Kind, pb.Layer.Kind)
        for value in enum.DESCRIPTOR.values
        if value.number
    )
    assert sorted(re.findall(r"^\| `((?:KIND|FAMILY)_\w+)` \| .* \|$", PAGE, re.M)) == kinds


def test_the_page_shows_what_is_sent_for_catch() -> None:
    example = re.search(r"^```\n(protocol \{.*?)^```$", PAGE, re.M | re.S)
    assert example is not None
    shown = text_format.Parse(example[1], pb.JoinReply())
    config = PRESETS["catch"][1]
    plan = plan_of(config)
    told = terms(config, plan.phases.agent.variables, plan.unroll_spec, plan.played, plan.spaces)
    service = messages.service(terms=told)
    assert shown == service.join(messages.join_request())


@pytest.mark.parametrize(
    "path", sorted(STORED.glob("protocol-*/*.binpb")), ids=lambda path: path.name
)
def test_recorded_messages_say_what_they_said(path: pathlib.Path) -> None:
    cls: type[Message] = getattr(pb, path.stem)
    read = cls.FromString(path.read_bytes())
    assert read == text_format.Parse(path.with_suffix(".txtpb").read_text(), cls())
    assert cls.FromString(read.SerializeToString()) == read


@pytest.mark.parametrize("folder", sorted(STORED.glob("protocol-*")), ids=lambda path: path.name)
def test_a_learner_takes_what_actors_of_every_minor_version_sent(folder: pathlib.Path) -> None:
    service = messages.service()
    request = pb.JoinRequest.FromString((folder / "JoinRequest.binpb").read_bytes())
    reply = service.join(request)
    assert reply.actor_index == 0
    sent = pb.Unrolls.FromString((folder / "Unrolls.binpb").read_bytes())
    assert sent.fingerprint == reply.fingerprint  # nothing that is new has changed it
    (member,) = service.get_status().members
    assert member.version == request.version


def test_an_actor_reads_what_the_learner_of_2_0_told() -> None:
    recorded = (STORED / "protocol-2.0" / "JoinReply.binpb").read_bytes()
    read = told.read(pb.JoinReply.FromString(recorded), "evaluator", Allowed())
    played, config = read
    assert [task.name for task in played] == ["ALE/Pong-v5", 'ALE/Pong-v5{"difficulty":1}']
    environment = played[1].environment
    assert json.loads(environment.kwargs) == {"difficulty": 1}
    assert environment.last_action and environment.atari.actions == (0, 2, 3)
    assert values.changed(config.agent) == {
        "torso": "shallow",
        "core": "lstm",
        "frame_stack": 4,
        "policy": "epsilon_greedy",
    }
    assert values.changed(config.actor) == {"num_envs": 64}
    assert values.changed(config.evaluator) == {"every_frames": 500_000, "greedy": True}


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_learner_tells_is_what_its_actors_read(preset: str) -> None:
    config = PRESETS[preset][1]
    played, read = told.read(reply_of(config), "evaluator", Allowed())
    assert played == tasks.make(config.environment, config.tasks)
    assert read.agent == config.agent and read.actor == config.actor
    assert read.evaluator.episodes == config.evaluator.episodes


def test_an_actor_goes_on_without_what_it_does_not_know() -> None:
    config = PRESETS["minatar-q"][1]
    plain = reply_of(config)
    newer = copy.deepcopy(plain)
    for message in (
        *(newer, newer.settings, newer.settings.agent, newer.settings.agent.epsilon),
        *(newer.settings.actor, newer.settings.evaluator),
        *(newer.settings.tasks[0], newer.settings.tasks[0].environment),
    ):
        message.MergeFromString(UNKNOWN)
    came = pb.JoinReply.FromString(newer.SerializeToString())
    assert told.read(came, "actor", Allowed()) == told.read(plain, "actor", Allowed())
    assert came.SerializeToString() == newer.SerializeToString()  # nothing was lost on the way


@pytest.mark.parametrize("need", ["agent.layer_norm", "environment.atari.crop", "my_torso.width"])
def test_actors_refuse_unknown_settings_that_matter(need: str) -> None:
    reply = reply_of(PRESETS["catch"][1])
    reply.settings.needs.append(need)
    sides = rf"impala 9\.9 with protocol 2\.6, this actor is impala {VERSION} with protocol 2\.5"
    with pytest.raises(
        LearnerError, match=rf"{sides}.* {need}.*run the learner's version"
    ) as error:
        told.read(reply, "actor", Allowed())
    assert "\n" not in str(error.value)


def test_what_only_evaluators_need_is_refused_by_evaluators_only() -> None:
    reply = reply_of(PRESETS["catch"][1])
    reply.settings.needs.append("evaluator.temperature")
    assert told.read(reply, "actor", Allowed())[0][0].name == "Catch"
    with pytest.raises(LearnerError, match=r"evaluator\.temperature"):
        told.read(reply, "evaluator", Allowed())


def test_a_value_of_a_newer_version_is_refused_by_name() -> None:
    reply = reply_of(PRESETS["catch"][1])
    reply.settings.agent.policy = 7  # type: ignore[assignment]
    with pytest.raises(LearnerError, match=r"agent\.policy is number 7; .*POLICY_EPSILON_GREEDY"):
        told.read(reply, "actor", Allowed())
    reply = reply_of(PRESETS["catch"][1])
    reply.settings.tasks[0].environment.atari.height = 1000
    with pytest.raises(LearnerError, match=r"environment\.atari\.height = 1000"):
        told.read(reply, "actor", Allowed())


def test_operational_values_give_way_to_the_default(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply = reply_of(PRESETS["catch"][1])
    reply.settings.actor.hang_seconds = 1e-3
    assert told.read(reply, "actor", Allowed())[1].actor == Config().actor
    assert "actor.hang_seconds = 0.001" in caplog.text


def test_what_an_older_learner_omits_is_at_its_default() -> None:
    config = PRESETS["catch"][1]
    reply = reply_of(config, minor=0)
    reply.settings.agent.ClearField("standardise_images")
    reply.settings.agent.policy = pb.ActorSettings.POLICY_UNSPECIFIED
    reply.settings.ClearField("actor")
    reply.settings.tasks[0].environment.ClearField("atari")
    played, read = told.read(reply, "actor", Allowed())
    assert played == tasks.make(config.environment, config.tasks)
    assert read.agent == config.agent and read.actor == Config().actor


@pytest.mark.parametrize("major", [1, 3])
def test_an_actor_refuses_a_learner_of_another_major_version(major: int) -> None:
    reply = reply_of(PRESETS["catch"][1])
    reply.protocol.major = major
    with pytest.raises(
        LearnerError, match=rf"protocol {major}\.6, this actor .* 2\.5: run the same"
    ):
        told.read(reply, "actor", Allowed())


NOW, NEXT = ("-m", "impala"), (str(TESTS / "newer.py"), "impala")


def start(
    version: tuple[str, ...], log: pathlib.Path, *arguments: object
) -> "subprocess.Popen[str]":
    """Starts the command line of this version, or of the next one, with all it says in a file."""
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as said:
        return subprocess.Popen(
            [sys.executable, *version, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("learners", "actors", "flags", "refused"),
    [
        (NEXT, NOW, (), False),
        (NOW, NEXT, (), False),
        (NEXT, NOW, ("--agent.layer-norm",), True),
        (NEXT, NEXT, ("--agent.layer-norm",), False),
    ],
    ids=["newer learner", "newer actor", "a setting that matters", "both newer"],
)
def test_learner_and_actor_of_two_minor_versions_train_together(
    tmp_path: pathlib.Path,
    learners: tuple[str, ...],
    actors: tuple[str, ...],
    flags: tuple[str, ...],
    refused: bool,
) -> None:
    logdir, address = tmp_path / "run", f"unix:{tmp_path / 'socket'}"
    small = ("--agent.hidden-sizes", 8, "--mix.fresh", 8, "--total-frames", 3000, *flags)
    learner = start(
        *(learners, tmp_path / "learner.log"),
        *("learner", "catch", "--logdir", logdir, "--listen", address, *small),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(learner.wait)
        stack.callback(learner.kill)
        actor = start(actors, tmp_path / "actor.log", "actor", "--learner", address)
        stack.callback(actor.wait)
        stack.callback(actor.kill)
        status = actor.wait()
        said = (tmp_path / "actor.log").read_text()
        if refused:
            assert status == 1, said
            assert "does not know agent.layer_norm" in said.splitlines()[-1]
        else:
            assert status == 0, said
            assert learner.wait() == 0, (tmp_path / "learner.log").read_text()
            if not flags:
                assert checkpoint.load(logdir).counters.frames >= 3000


class WideTorso(MLP):
    """A torso of one's own, which has settings."""

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """Settings of the torso."""

        width: int = 8
        """Units."""
        label: Annotated[str, OPERATIONAL] = ""
        """What it is called."""


def test_settings_of_parts_of_ones_own_travel_beside_the_others() -> None:
    named = values.from_dict(
        Config, {"environment": {"id": "Catch"}, "agent": {"torso": f"{__name__}:WideTorso"}}
    )
    of_torso = WideTorso.Settings(width=64, label="a")
    config = sections.compose(named, wide_torso=of_torso)
    reply = reply_of(config)
    assert json.loads(reply.settings.parts["wide_torso"]) == {"width": 64, "label": "a"}
    assert reply.settings.needs == ["agent.torso", "environment.id", "wide_torso.width"]
    _, read = told.read(reply, "actor", Allowed((__name__,)))
    assert sections.found(read)[TORSO, f"{__name__}:WideTorso"].settings == of_torso

    with pytest.raises(LearnerError, match=rf"--allow {__name__}:WideTorso"):
        told.read(reply, "actor", Allowed())
    # The part is of a newer version at the learner, with settings that this one does not know.
    reply.settings.parts["wide_torso"] = '{"width": 64, "depth": 2}'
    _, read = told.read(reply, "actor", Allowed((__name__,)))
    of_torso = sections.found(read)[TORSO, f"{__name__}:WideTorso"].settings
    assert of_torso == WideTorso.Settings(width=64)
    reply.settings.needs.append("wide_torso.depth")
    with pytest.raises(LearnerError, match=r"does not know wide_torso\.depth"):
        told.read(reply, "actor", Allowed((__name__,)))


EVIL = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("tasks", '{"environments": ["Catch"]}'),
        ("environment", '{"id": "Catch"}'),
        ("agent", '{"torso": "mlp"}'),
        ("no section", "{}"),
    ],
)
def test_settings_of_parts_cannot_stand_in_for_what_is_played(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, section: str, text: str
) -> None:
    """Given a learner that names a module of its choice, and hides that from what is checked."""
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    reply = reply_of(PRESETS["catch"][1])
    reply.settings.tasks[0].environment.id = "evil_module:Game-v0"
    reply.settings.parts[section] = text
    with pytest.raises(LearnerError, match=f"sends '{section}' as the settings of a part") as error:
        told.read(reply, "actor", Allowed())
    assert "\n" not in str(error.value)
    del reply.settings.parts[section]
    with pytest.raises(LearnerError, match="--allow evil_module:Game-v0"):
        told.read(reply, "actor", Allowed())
    # Nor does anything that is built look at an id that has not been found allowed.
    unchecked = dataclasses.replace(Config().environment, id="evil_module:Game-v0")
    with pytest.raises(ValueError, match="evil_module:Game-v0 is not built in"):
        build.environment(unchecked, 1)
    assert not (tmp_path / "imported").exists()


def test_settings_of_parts_that_are_not_named_are_left_out() -> None:
    reply = reply_of(PRESETS["catch"][1])
    reply.settings.parts["wide_torso"] = '{"width": 64}'
    reply.settings.parts["own"] = '{"__class__": {}}'
    _, read = told.read(reply, "actor", Allowed())
    assert type(read) is Config and read.own == ()


def test_a_checkpoint_plays_with_an_older_version_of_a_part() -> None:
    """Given settings that the part does not know, or cannot take, at their default and not."""
    named = values.from_dict(
        Config, {"environment": {"id": "Catch"}, "agent": {"torso": f"{__name__}:WideTorso"}}
    )
    own = {"wide_torso": {"width": 64, "label": 3, "depth": 2, "__class__": {}}}
    needs = frozenset({"wide_torso.width"})
    allow = Allowed((__name__,))
    restored = sections.restore(named, own, needs, allow)
    of_torso = sections.found(restored)[TORSO, f"{__name__}:WideTorso"].settings
    assert of_torso == WideTorso.Settings(width=64)
    assert (
        sections.restore(named, {**own, "tasks": {"environments": ["x:Y"]}}, needs, allow)
        == restored
    )
    with pytest.raises(values.OptionError, match=r"wide_torso\.depth is 2, which the part that is"):
        sections.restore(named, own, needs | {"wide_torso.depth"}, allow)


def test_a_checkpoint_names_required_settings_of_parts(tmp_path: pathlib.Path) -> None:
    named = values.from_dict(Config, {"agent": {"torso": f"{__name__}:WideTorso"}, "seed": 3})
    config = sections.compose(named, wide_torso=WideTorso.Settings(width=64, label="a"))
    checkpoint.save(tmp_path, checkpoint.Checkpoint(config, checkpoint.Counters(), {}, {}), keep=1)
    saved = checkpoint.load(tmp_path)
    assert saved.own == {"wide_torso": {"width": 64, "label": "a"}}
    assert saved.needs == {"wide_torso.width"}


def test_default_settings_leave_the_fingerprint() -> None:
    """So that actors go on with a learner that was replaced by a newer version."""
    config = PRESETS["catch"][1]
    agreed = json.loads(settings.agreed(config, tasks.make(config.environment, config.tasks)))
    assert agreed == {
        "tasks": [["Catch", {"id": "Catch"}]],
        "agent": {},
    }


def test_only_what_experience_depends_on_is_fingerprinted() -> None:
    """A learner that comes back for longer, or with other advice to actors, keeps its actors."""
    config = PRESETS["catch"][1]

    def agreed(data: dict[str, Any]) -> str:
        changed = values.overlay(config, data)
        return settings.agreed(changed, tasks.make(changed.environment, changed.tasks))

    before = agreed({})
    assert agreed({"total_frames": 2 * config.total_frames}) == before
    assert agreed({"actor": {"max_memory_bytes": 2**32, "num_envs": 3}}) == before
    assert agreed({"evaluator": {"every_frames": 5, "greedy": True}}) == before
    assert agreed({"environment": {"vectorization": "own"}}) == before
    assert agreed({"agent": {"hidden_sizes": [8]}}) != before
    assert agreed({"environment": {"repeat": {"most": 2}}}) != before
    assert agreed({"tasks": {"environments": ["Catch", 'Catch{"rows": 5}']}}) != before


def test_a_setting_that_cannot_travel_is_refused_by_name() -> None:
    config = values.from_dict(Config, {"environment": {"atari": {"frame_skip": 2**64}}})
    with pytest.raises(ValueError, match=r"environment\.atari\.frame_skip is 18446744073709551616"):
        reply_of(config)
