"""Settings as messages and back, field by field: a field has the name of its setting.

A setting that is text of a few choices is an enum, whose values have the field's type as a prefix:
"sync" is VECTORIZATION_SYNC. So a field that is added to a message needs no code here.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message


class SettingsError(ValueError):
    """A setting cannot travel, or came with a value that this version does not know."""


def fill(message: Message, settings: Mapping[str, Any], path: str = "") -> None:
    """Puts nested settings into a message.

    Args:
      message: has a field for each of them, and is changed.
      settings: name -> number, text, bool, list, or settings.
      path: of the section that they are, for errors.

    Raises:
      SettingsError: there is no such field, or it cannot hold the value; names the setting.
    """
    fields = message.DESCRIPTOR.fields_by_name
    for name, value in settings.items():
        where = f"{path}.{name}" if path else name
        if name not in fields:
            raise SettingsError(f"{where} cannot be sent: {message.DESCRIPTOR.name} has no {name}.")
        field = fields[name]
        try:
            if field.message_type is not None:
                section = getattr(message, name)
                section.SetInParent()
                fill(section, value, where)
            elif field.is_repeated:
                getattr(message, name).extend(value)
            elif field.enum_type is not None:
                number = field.enum_type.values_by_name[
                    f"{_prefix(field.enum_type)}{value.upper()}"
                ]
                setattr(message, name, number.number)
            else:
                setattr(message, name, value)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, SettingsError):
                raise
            raise SettingsError(f"{where} is {value!r}, which cannot be sent: {error}.") from error


def plain(message: Message, path: str = "") -> dict[str, Any]:
    """Returns the settings in a message as nested plain data, without those that are absent.

    Args:
      message: as `fill` has made it; fields that this version does not know are left out.
      path: of the section that it is, for errors.

    Raises:
      SettingsError: an enum has a value that this version does not know; names the setting.
    """
    settings: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        where = f"{path}.{field.name}" if path else field.name
        if field.is_repeated:
            settings[field.name] = list(value)
        elif not message.HasField(field.name):
            continue
        elif field.message_type is not None:
            settings[field.name] = plain(value, where)
        elif field.enum_type is None:
            settings[field.name] = value
        elif value:  # 0 is UNSPECIFIED, which is as if it were absent
            settings[field.name] = _choice(field.enum_type, value, where)
    return settings


def _choice(enum: Any, number: int, path: str) -> str:
    if number not in enum.values_by_number:
        names = ", ".join(value.name for value in enum.values[1:])
        raise SettingsError(f"{path} is number {number}; known here are {names}.")
    name: str = enum.values_by_number[number].name
    return name.removeprefix(_prefix(enum)).lower()


def _prefix(enum: Any) -> str:
    """What the names of an enum's values begin with."""
    name: str = enum.values_by_number[0].name
    return name.removesuffix("UNSPECIFIED")
