"""The settings that a learner sends to its actors: all that they need, and nothing else."""

import dataclasses
import json
import pathlib
from typing import Annotated, Any

import pytest

from actors import settings as told
from actors.session import LearnerError
from impala.agents.torsos import MLP
from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import OPERATIONAL, Config
from impala.logdir import checkpoint
from impala.parts import build, sections
from impala.parts.components import TORSO, Allowed
from impala.schedule import tasks
from learner.service import settings
from protos import codec
from protos.impala.v1 import learner_pb2 as pb


def reply_of(config: Config) -> pb.JoinReply:
    """The reply of a learner, as far as it has settings."""
    return pb.JoinReply(
        protocol=codec.PROTOCOL_VERSION,
        settings=settings.for_actors(config, tasks.make(config.environment, config.tasks)),
    )


def changed(reply: pb.JoinReply, **settings: Any) -> pb.JoinReply:
    """The same reply with other settings."""
    sent = json.loads(reply.settings)
    return pb.JoinReply(protocol=reply.protocol, settings=json.dumps({**sent, **settings}))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"tasks": 3}', '{"tasks": [{}]}', '{"tasks": [1], "parts": 2}']
)
def test_settings_that_make_no_sense_are_an_error(text: str) -> None:
    reply = pb.JoinReply(protocol=codec.PROTOCOL_VERSION, settings=text)
    with pytest.raises(LearnerError, match="this actor is impala"):
        told.read(reply, "actor", Allowed())


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_learner_tells_is_what_its_actors_read(preset: str) -> None:
    config = PRESETS[preset][1]
    played, read = told.read(reply_of(config), "evaluator", Allowed())
    assert played == tasks.make(config.environment, config.tasks)
    assert read.agent == config.agent and read.actor == config.actor
    assert read.evaluator.episodes == config.evaluator.episodes


class WideTorso(MLP):
    """A custom torso, which has settings."""

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
    sent = json.loads(reply.settings)
    assert sent["parts"] == {"wide_torso": {"width": 64, "label": "a"}}
    assert sent["needs"] == ["agent.torso", "environment.id", "wide_torso.width"]
    _, read = told.read(reply, "actor", Allowed((__name__,)))
    assert sections.found(read)[TORSO, f"{__name__}:WideTorso"].settings == of_torso

    with pytest.raises(LearnerError, match=rf"--allow {__name__}:WideTorso"):
        told.read(reply, "actor", Allowed())
    # The part is of a newer version at the learner, with settings that this one does not know.
    reply = changed(reply, parts={"wide_torso": {"width": 64, "depth": 2}})
    _, read = told.read(reply, "actor", Allowed((__name__,)))
    of_torso = sections.found(read)[TORSO, f"{__name__}:WideTorso"].settings
    assert of_torso == WideTorso.Settings(width=64)
    reply = changed(reply, needs=["wide_torso.depth"])
    with pytest.raises(LearnerError, match=r"wide_torso\.depth is not known here"):
        told.read(reply, "actor", Allowed((__name__,)))


EVIL = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n"


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ("tasks", {"environments": ["Catch"]}),
        ("environment", {"id": "Catch"}),
        ("agent", {"torso": "mlp"}),
        ("no section", {}),
    ],
)
def test_settings_of_parts_cannot_stand_in_for_what_is_played(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, section: str, part: Any
) -> None:
    """Given a learner that names a module of its choice, and hides that from what is checked."""
    (tmp_path / "evil_module.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    reply = reply_of(PRESETS["catch"][1])
    evil = [{"name": "Game", "environment": {"id": "evil_module:Game-v0"}}]
    reply = changed(reply, tasks=evil, parts={section: part})
    with pytest.raises(
        LearnerError, match=f"sends '{section}' as the settings of a custom part"
    ) as error:
        told.read(reply, "actor", Allowed())
    assert "\n" not in str(error.value)
    reply = changed(reply, parts={})
    with pytest.raises(LearnerError, match="--allow evil_module:Game-v0"):
        told.read(reply, "actor", Allowed())
    # Nor does anything that is built look at an id that has not been found allowed.
    unchecked = dataclasses.replace(Config().environment, id="evil_module:Game-v0")
    with pytest.raises(ValueError, match="evil_module:Game-v0 is not built in"):
        build.environment(unchecked, 1)
    assert not (tmp_path / "imported").exists()


def test_settings_of_parts_that_are_not_named_are_left_out() -> None:
    reply = reply_of(PRESETS["catch"][1])
    reply = changed(reply, parts={"wide_torso": {"width": 64}, "own": {"__class__": {}}})
    _, read = told.read(reply, "actor", Allowed())
    assert type(read) is Config and read.own == ()


def test_a_checkpoint_plays_with_an_older_version_of_a_part() -> None:
    """Given settings that the part does not know, at their default and not."""
    named = values.from_dict(
        Config, {"environment": {"id": "Catch"}, "agent": {"torso": f"{__name__}:WideTorso"}}
    )
    own = {"wide_torso": {"width": 64, "depth": 2, "__class__": {}}}
    needs = frozenset({"wide_torso.width"})
    allow = Allowed((__name__,))
    restored = sections.restore(named, own, needs, allow)
    of_torso = sections.found(restored)[TORSO, f"{__name__}:WideTorso"].settings
    assert of_torso == WideTorso.Settings(width=64)
    assert (
        sections.restore(named, {**own, "tasks": {"environments": ["x:Y"]}}, needs, allow)
        == restored
    )
    with pytest.raises(values.OptionError, match=r"wide_torso\.depth is not known here"):
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
    assert agreed({"actor": {"max_environment_bytes": 2**32, "num_envs": 3}}) == before
    assert agreed({"evaluator": {"every_frames": 5, "greedy": True}}) == before
    assert agreed({"environment": {"vectorization": "own"}}) == before
    assert agreed({"agent": {"hidden_sizes": [8]}}) != before
    assert agreed({"environment": {"repeat": {"most": 2}}}) != before
    assert agreed({"tasks": {"environments": ["Catch", 'Catch{"rows": 5}']}}) != before
