"""`impala replay-update`: computes a refused update again."""

import dataclasses
import pathlib
import sys
from typing import Annotated

from tyro.conf import Positional, arg

from impala.commands.flags import Allow
from impala.parts.components import Allowed
from impala.runtime import process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayUpdate:
    """Computes a refused update again, without actors, and shows whose data caused it."""

    file: Positional[Annotated[pathlib.Path, arg(metavar="FILE")]]
    """File LOGDIR/bad-updates/UPDATE.npz, written by a learner. The exit status is 0 if the result
    is identical bit for bit, and 1 if it is not or the file cannot be used."""
    allow: Allow = ()
    """Code that may be imported if the file names it, besides installed entry points of the group
    impala.components: MODULE, for what it defines, or MODULE:ATTRIBUTE."""


def replay_update(command: ReplayUpdate) -> int:
    """Prints the result of computing an update again."""
    if not command.file.is_file():
        print(f"impala: there is no file {command.file}.", file=sys.stderr)
        return 1
    process.load_tensorflow(use_gpus=True)
    from learner.update import bad_updates

    try:
        result = bad_updates.again(command.file, Allowed(command.allow))
    except ValueError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 1
    print("\n".join(result.lines))
    return 0 if result.identical else 1
