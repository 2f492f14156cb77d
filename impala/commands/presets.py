"""`impala presets`: a table of the presets."""

import dataclasses

from impala.config.presets import PRESETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Presets:
    """Lists the presets."""


def presets(command: Presets) -> int:
    """Prints a table of the presets."""
    import rich.console
    import rich.table

    from impala.schedule import tasks

    table = rich.table.Table()
    for column in ("preset", "environment", "network", "frames", "what it is"):
        table.add_column(column, justify="right" if column == "frames" else "left", overflow="fold")
    for name, (line, config) in PRESETS.items():
        network = f"{config.agent.torso}, {config.agent.core}"
        table.add_row(name, config.environment.id, network, f"{tasks.total_frames(config):,}", line)
    rich.console.Console().print(table)
    return 0
