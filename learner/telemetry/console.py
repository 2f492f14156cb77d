"""A sink that shows the state of a run: on a terminal, as lines of text, or in the log."""

import logging
from collections.abc import Callable

import rich.console
import rich.live
import rich.table
import rich.text

from impala.environments import pace
from impala.logdir import rows
from impala.logdir.rows import Row
from learner.telemetry.sinks import Sink

_log = logging.getLogger(__name__)

_MOST = 0.5  # share of the time that a learner waits


class Console(Sink):
    """Shows the newest row: live on a terminal, one line per row in a file or in the log."""

    def __init__(
        self,
        console: rich.console.Console | None = None,
        to_log: bool = False,
        advice: str = "",
        phase: Callable[[int], str] = lambda _: "",
        is_live: bool = True,
    ):
        """Begins the live view, if there is a terminal.

        Args:
          console: where to show rows; standard output by default.
          to_log: write rows to the log instead.
          advice: what helps where environments are the limit.
          phase: the title of the phase of this number, "" if the run has no other one.
          is_live: whether there may be a live view, which takes over standard output.
        """
        self._advice = advice  # "" once a line has it
        self._phase = phase
        self._console = console or rich.console.Console()
        self._to_log = to_log
        self._live = (
            rich.live.Live(console=self._console, auto_refresh=False, transient=False)
            if self._console.is_terminal and is_live and not to_log
            else None
        )
        if self._live:
            self._live.start()

    def write(self, row: Row) -> None:
        """Shows a row."""
        line = _line(row, self._advice, self._phase(int(row.get("phase/number", 1))))
        if self._live:
            view = rich.console.Group(rich.text.Text(line, "bold"), _table(row))
            self._live.update(view, refresh=True)
            return
        if self._advice and line.endswith(self._advice):
            self._advice = ""
        if self._to_log:
            _log.info("%s", line)
        else:
            print(line, file=self._console.file, flush=True)

    def close(self) -> None:
        """Leaves the last row on the screen."""
        if self._live:
            self._live.stop()


def _line(row: Row, advice: str = "", phase: str = "") -> str:
    """Returns a row as one line of text, as far as its numbers are known."""
    returns = rows.recent_returns(row).values()
    speed, progress = row["speed/frames_per_second"], row["progress"]
    parts = [f"frames {row['frames']:,.0f} ({progress:.1%})"]
    if phase:
        parts.append(f"phase {phase}")
    if returns:
        parts.append(f"return {'/'.join(f'{value:.2f}' for value in returns)}")
    elif rewards := rows.rewards_per_step(row).values():
        parts.append(f"reward per step {'/'.join(f'{value:.4f}' for value in rewards)}")
    parts.append(f"{speed:,.0f} frames/s")
    if speed > 0 and progress > 0:
        left = row["frames"] / progress - row["frames"]  # in frames, if the rest is as what was
        parts.append(f"left {left / speed / 60:.0f} min")
    for name, word, digits in (
        ("loss/total", "loss", 2),
        ("policy/entropy", "entropy", 3),
        ("policy_lag/mean", "lag", 1),
    ):
        if name in row:
            parts.append(f"{word} {row[name]:.{digits}f}")
    parts.append(f"actors {row.get('actor/active', 0):.0f}")
    waits = f"waits: learner {row['learner/wait_share']:.0%}"
    if "actor/wait_share" in row:
        waits += f" actors {row['actor/wait_share']:.0%}"
    parts.append(waits)
    share, step = row.get("actor/environment_share", 0.0), row.get("environment/step_seconds", 0.0)
    if row["learner/wait_share"] > _MOST and (clause := pace.slow(share, step)):
        parts.append(f"{clause}: {advice}" if advice else clause)
    return "  ".join(parts)


def _table(row: Row) -> rich.table.Table:
    """Returns a table of all scalars; a row holds those that differ only in the last part."""
    groups: dict[str, list[rich.text.Text]] = {}
    for name in sorted(row):
        group, _, last = name.rpartition("/")
        value = f"{row[name]:,.4g}" if abs(row[name]) < 1e4 else f"{row[name]:,.0f}"
        pair = rich.text.Text.assemble(last, "=", (value, "bold"))
        groups.setdefault(group, []).append(pair)
    table = rich.table.Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for group, pairs in sorted(groups.items()):
        table.add_row(rich.text.Text(group or "run"), rich.text.Text("  ").join(pairs))
    return table
