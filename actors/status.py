"""Renders a learner's status as a table, for `impala status`.

Texts that callers wrote are escaped: names, reasons of rejections, and faults of environments.
"""

from collections.abc import Mapping

import rich.box
import rich.console
import rich.table
import rich.text

from impala.runtime.printable import duration, printable
from protos.impala.v1 import learner_pb2 as pb

_MAX_DETAIL = 500  # characters of a rejection or a fault


def render(learner: str, status: pb.RunStatus) -> rich.console.Group:
    """Returns a table of a status, under a few lines about the run.

    Args:
      learner: its address or log directory.
      status: as the learner sent it.
    """
    actors = [member for member in status.members if member.role == pb.ROLE_ACTOR]
    speed = sum(member.frames_per_second for member in status.members)
    active = sum(member.active for member in actors)
    lines = [
        *_about_the_run(learner, status),
        f"{active} of {len(actors)} actors active, {speed:,.0f} frames/s together",
    ]
    notes = [note for member in status.members for note in _notes(member, status)]
    text = rich.text.Text
    return rich.console.Group(*map(text, lines), _table(status), *map(text, notes))


def _about_the_run(learner: str, status: pb.RunStatus) -> list[str]:
    state = "finished" if status.finished else f"{status.progress:.1%} done"
    phase = f"phase {status.phase}, " if status.phase else ""
    lines = [
        f"{learner}: {state}, {phase}{status.frames:,} frames, version "
        f"{status.parameter_version:,}, "
        f"queue {status.queued} of {status.queue_capacity} unrolls",
        f"unrolls: {status.received:,} received, {status.learned:,} learned from, "
        f"{_counts('dropped', status.dropped)}",
        f"messages: {_counts('rejected', status.rejected)}, {status.duplicates:,} duplicates",
    ]
    if status.checked or status.violations:
        found = _counts("found", status.violations) if status.violations else "none"
        lines.append(f"violations: {found} in {status.checked:,} messages")
    if status.skipped_updates or status.rollbacks:
        lines.append(
            f"updates: {status.skipped_updates:,} skipped as not finite, "
            f"{status.rollbacks:,} rolled back to a checkpoint"
        )
    if status.waiting_snapshots:
        lines.append(f"evaluations: {status.waiting_snapshots:,} snapshots to go")
    if any(status.refused.values()):
        lines.append(f"strangers: {_counts('refused', status.refused)}")
    if status.dropped_info_names:
        lines.append(f"episode info: {status.dropped_info_names:,} numbers not recorded")
    return lines


def _table(status: pb.RunStatus) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("name", overflow="fold", min_width=12)
    table.add_column("role")
    for column in ("last seen", "frames/s", "return", "frames", "lag"):
        table.add_column(column, justify="right")
    only_if_any = {
        "rejoins": [max(0, member.joins - 1) for member in status.members],
        "rejected": [member.rejected for member in status.members],
        "blamed": [member.blamed for member in status.members],
        "faults": [member.environment_faults for member in status.members],
        "violations": [sum(member.violations.values()) for member in status.members],
    }
    no_episodes = [
        each.HasField("reward_per_step") and not each.HasField("recent_return")
        for each in status.members
    ]
    if any(no_episodes):
        table.add_column("reward/step", justify="right")
    has_pace = any(each.HasField("step_seconds") for each in status.members)
    if has_pace:
        table.add_column("step", justify="right")
    seldom = {name: counts for name, counts in only_if_any.items() if any(counts)}
    for name in seldom:
        table.add_column(name, justify="right")
    for number, member in enumerate(status.members):
        is_actor = member.role == pb.ROLE_ACTOR
        behind = max(0, status.parameter_version - member.parameter_version)
        table.add_row(
            rich.text.Text(printable(member.name)),  # no markup
            *("actor" if is_actor else "evaluator", _ago(member.silent_seconds)),
            f"{member.frames_per_second:,.0f}" if is_actor else "",
            f"{member.recent_return:,.2f}" if member.HasField("recent_return") else "",
            f"{member.frames:,}" if is_actor else "",
            "" if is_actor and not member.unrolls else f"{behind:,}",
            *([f"{member.reward_per_step:,.4f}" if no_episodes[number] else ""] * any(no_episodes)),
            *([_step(member)] * has_pace),
            *[f"{counts[number]:,}" for counts in seldom.values()],
            style="" if member.active else "dim",
        )
    if not status.members:
        table.add_row("nobody has joined in the last hour")
    return table


def _notes(member: pb.Member, status: pb.RunStatus) -> list[str]:
    """Returns what the table has no column for: quarantine, rejection, version, last fault."""
    name = printable(member.name)
    notes = []
    if member.quarantined_seconds > 0:
        notes.append(f"{name} is quarantined for {member.quarantined_seconds:,.0f} s")
    if member.last_rejection:
        why = printable(member.last_rejection, _MAX_DETAIL)
        notes.append(f"{name} was last rejected for {why}")
    if member.violations:
        last = printable(member.last_violation, _MAX_DETAIL)
        notes.append(f"{name}: {_counts('violations', member.violations)}, the last one {last}")
    if member.version and member.version != status.version:
        theirs, ours = printable(member.version), printable(status.version)
        notes.append(f"{name} runs {theirs}, the learner {ours}")
    if member.last_fault:
        fault = printable(member.last_fault, _MAX_DETAIL)
        notes.append(f"{name}'s last environment fault: {fault}")
    return notes


def _counts(what: str, counts: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{n:,} {printable(reason)}" for reason, n in sorted(counts.items()))
    return f"{sum(counts.values()):,} {what}" + (f" ({reasons})" if reasons else "")


def _step(member: pb.Member) -> str:
    """Returns the time of a step of an environment."""
    return duration(member.step_seconds) if member.HasField("step_seconds") else ""


def _ago(seconds: float) -> str:
    if seconds < 1.0:
        return "now"
    return f"{seconds:.0f} s ago" if seconds < 120.0 else f"{seconds / 60:.0f} min ago"
