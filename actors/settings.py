"""Reads the settings that a learner sends to its actors as this version's configuration."""

import dataclasses
import json

from actors.session import LearnerError
from impala.config import values
from impala.config.schema import Config
from impala.parts import sections
from impala.parts.components import Allowed
from impala.runtime.credentials import Role
from impala.runtime.installation import VERSION
from impala.schedule.tasks import Task
from protos import codec
from protos.impala.v1 import learner_pb2 as pb


def read(reply: pb.JoinReply, role: Role, allow: Allowed) -> tuple[list[Task], Config]:
    """Returns the tasks and settings from a learner, which may be of another minor version.

    Missing settings have their defaults. Settings that this version does not know are ignored,
    unless they change what is played.

    Args:
      reply: from the learner.
      role: an actor ignores settings that only evaluators need.
      allow: what may be imported if the learner names it.

    Returns:
      The tasks, and a configuration of which only `agent`, `actor`, `evaluator` and the sections of
      custom parts are set.

    Raises:
      LearnerError: the learner uses another protocol, names something that is not installed or not
        allowed, or has changed a setting that affects what is played and is unknown here.
    """
    try:
        if not codec.compatible(reply.protocol):
            raise values.OptionError("Run the same major version of the protocol on both sides.")
        return _read(reply.settings, role, allow)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        ours, theirs = codec.PROTOCOL_VERSION, reply.protocol
        raise LearnerError(
            f"The learner is {reply.version or 'of an unknown version'} with protocol "
            f"{theirs.major}.{theirs.minor}, this actor is impala {VERSION} with protocol "
            f"{ours.major}.{ours.minor}: {error}"
        ) from None


def _read(text: str, role: Role, allow: Allowed) -> tuple[list[Task], Config]:
    sent = json.loads(text or "{}")
    if not isinstance(sent, dict) or not sent.get("tasks"):
        raise values.OptionError("It names no task that could be played.")
    parts = dict(sent.get("parts", {}))
    built_in = {field.name for field in dataclasses.fields(Config)}
    for section in parts:
        if section in built_in or not section.isidentifier():
            raise values.OptionError(
                f"It sends {section!r} as the settings of a custom part, which cannot be their "
                "section."
            )
    tasks = [
        Task(
            str(task["name"]),
            values.from_stored(Config, {"environment": task["environment"]}).environment,
        )
        for task in sent["tasks"]
    ]
    data = {name: sent.get(name, {}) for name in ("agent", "actor", "evaluator")}
    named = values.from_stored(Config, sections.naming(data))
    naming = [dataclasses.replace(named, environment=task.environment) for task in tasks]
    composed = sections.class_of(*naming, allow=allow)
    data |= {part.section: parts[part.section] for part in composed.own if part.section in parts}
    ignored = () if role == "evaluator" else ("evaluator.",)
    needs = [path for path in sent.get("needs", []) if not path.startswith(ignored)]
    return tasks, values.from_stored(composed, data, needs)
