"""`impala export`: writes a checkpoint's agent as a model that runs without this package."""

import dataclasses
import logging
import pathlib
import sys
from typing import Literal

from impala.commands import outputs
from impala.commands.playing import PlayerFlags, open_player, played
from impala.config import values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(PlayerFlags):
    """Writes a checkpoint's agent as a model that runs without this package."""

    output: pathlib.Path | None = None
    """Directory of the model; an earlier one there is replaced. None: LOGDIR/export."""
    format: Literal["savedmodel", "onnx"] = "savedmodel"
    """savedmodel, for TensorFlow; or onnx, for the most likely action only (extra onnx)."""


def export(command: Export) -> int:
    """Writes a model, compares it with the agent on played episodes, and prints the result."""
    output = command.output or command.logdir / "export"
    description = {"savedmodel": "model.json", "onnx": "model.onnx.json"}[command.format]
    player = open_player(command, output / description)
    from impala.play import export as models

    logging.getLogger("tensorflow").setLevel(logging.WARNING)  # it logs what it has written
    write = {"savedmodel": models.saved_model, "onnx": models.onnx}[command.format]
    try:
        with outputs.writing(output), played():
            tried = write(player, output, models.recorded(player))
    except models.ExportError as error:
        print(f"impala: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        raise values.OptionError(str(error)) from error
    print(
        f"{output}: {player.task} after {player.counters.frames:,} frames. Beside the agent, in "
        f"{tried.calls} calls: the same actions, and at most {tried.difference:.2g} between other "
        f"outputs. {description} describes inputs and outputs."
    )
    return 0
