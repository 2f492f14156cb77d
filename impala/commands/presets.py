"""`impala presets`: lists the presets."""

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

    table = rich.table.Table("preset", box=None, pad_edge=False)
    table.add_column("frames", justify="right")
    table.add_column("what it trains", overflow="fold")
    for name, (line, config) in PRESETS.items():
        table.add_row(name, f"{tasks.total_frames(config):,}", line)
    rich.console.Console().print(table)
    return 0
