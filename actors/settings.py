"""Reads the settings that a learner sends to its actors as this version's configuration."""

import dataclasses
import json
import logging
from typing import Any

from actors.session import LearnerError
from impala.config import values
from impala.config.schema import Config
from impala.parts import sections
from impala.parts.components import Allowed
from impala.runtime.credentials import Role
from impala.runtime.installation import VERSION
from impala.schedule.tasks import Task
from protos import codec, settings
from protos.impala.v1 import learner_pb2 as pb

_log = logging.getLogger(__name__)

_FIX = "run the learner's version of impala here, or do without this setting there"


def read(reply: pb.JoinReply, role: Role, allow: Allowed) -> tuple[list[Task], Config]:
    """Returns the tasks and settings from a learner, which may be of another version.

    Missing settings have their defaults. Settings that this version does not know are ignored,
    unless they change what is played.

    Args:
      reply: from the learner.
      role: an actor ignores settings that only evaluators need.
      allow: what may be imported if the learner names it.

    Returns:
      The tasks, and a configuration of which only `agent`, `actor`, `evaluator` and the sections of
      parts of one's own are set.

    Raises:
      LearnerError: the learner uses another protocol, names something that is not installed or not
        allowed, or has changed a setting that affects what is played and is unknown here.
    """
    if not codec.compatible(reply.protocol):
        raise LearnerError(
            f"{_sides(reply)}: run the same major version of the protocol on both sides"
        )
    told = reply.settings
    if not told.tasks:
        raise LearnerError(f"{_sides(reply)}; it names no task that could be played")
    built_in = {field.name for field in dataclasses.fields(Config)}
    for section in told.parts:
        if section in built_in or not section.isidentifier():
            raise LearnerError(
                f"{_sides(reply)}; it sends {section!r} as the settings of a part of one's own, "
                "which cannot be their section"
            )
    try:
        data = {
            "agent": settings.plain(told.agent, "agent"),
            "actor": settings.plain(told.actor, "actor"),
            "evaluator": settings.plain(told.evaluator, "evaluator"),
        }
        tasks = [_task(task, reply) for task in told.tasks]
        named, _ = values.from_stored(Config, sections.naming(data))
        naming = [dataclasses.replace(named, environment=task.environment) for task in tasks]
        composed = sections.class_of(*naming, allow=allow)()
        for part in composed.own:
            if part.section in told.parts:
                data[part.section] = json.loads(told.parts[part.section])
        config = _known(composed, data, reply)
    except settings.SettingsError as error:
        raise LearnerError(f"{_sides(reply)}; {error}: {_FIX}") from None
    except (values.OptionError, json.JSONDecodeError) as error:
        raise LearnerError(f"{_sides(reply)}: {error}") from None
    known = values.flatten(config)
    for path in told.needs:
        if path not in known and (role == "evaluator" or not path.startswith("evaluator.")):
            raise LearnerError(
                f"{_sides(reply)}, which does not know {path}, and that changes what is played: "
                f"{_FIX}"
            )
    return tasks, config


def _task(told: pb.ActorSettings.Task, reply: pb.JoinReply) -> Task:
    environment = {"environment": settings.plain(told.environment, "environment")}
    return Task(told.name, _known(Config(), environment, reply).environment)


def _known(config: Config, data: dict[str, Any], reply: pb.JoinReply) -> Config:
    """Returns the configuration with the known settings of `data` applied.

    An invalid value is an error, except of operational settings, which keep their default.
    """
    read, rest = values.from_stored(type(config), data)
    known = values.flatten(read)
    for path, value in values.leaves(rest).items():
        if path in known:
            what = f"{_sides(reply)}, which cannot take {path} = {value!r}"
            if not values.is_operational(type(read), path):
                raise LearnerError(f"{what}: {_FIX}")
            _log.warning("%s: it stands at its default", what)
    return read


def _sides(reply: pb.JoinReply) -> str:
    ours, theirs = codec.PROTOCOL_VERSION, reply.protocol
    return (
        f"the learner is {reply.version or 'of an unknown version'} with protocol "
        f"{theirs.major}.{theirs.minor}, this actor is impala {VERSION} with protocol "
        f"{ours.major}.{ours.minor}"
    )
