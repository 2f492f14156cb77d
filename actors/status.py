"""What a person sees of a fleet: the learner's status as a table."""

import rich.box
import rich.console
import rich.table
import rich.text

from protos.impala.v1 import learner_pb2 as pb


def render(learner: str, status: pb.RunStatus) -> rich.console.Group:
    """Makes a table of a status, under a few lines about the run.

    Args:
      learner: its address.
      status: what it said.
    """
    state = "finished" if status.finished else f"{status.progress:.1%} done"
    dropped, rejected = dict(status.dropped), dict(status.rejected)
    lines = [
        f"{learner}: {state}, {status.frames:,} frames, version {status.parameter_version:,}, "
        f"queue {status.queued} of {status.queue_capacity} unrolls",
        f"unrolls: {status.received:,} received, {status.learned:,} learned from, "
        f"{_counts('dropped', dropped)}",
        f"messages: {_counts('rejected', rejected)}, {status.duplicates:,} duplicates",
    ]
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("name", overflow="fold", min_width=12)
    table.add_column("role")
    for column in ("last seen", "frames/s", "frames", "lag", "joins", "rejected"):
        table.add_column(column, justify="right")
    for member in status.members:
        is_actor = member.role == pb.ROLE_ACTOR
        behind = max(0, status.parameter_version - member.parameter_version)
        table.add_row(
            *(member.name, "actor" if is_actor else "evaluator", _ago(member.silent_seconds)),
            f"{member.frames_per_second:,.0f}" if is_actor else "",
            f"{member.frames:,}" if is_actor else "",
            "" if is_actor and not member.unrolls else f"{behind:,}",
            *(f"{member.joins:,}", f"{member.rejected:,}"),
            style="" if member.active else "dim",
        )
    if not status.members:
        table.add_row("nobody has joined in the last hour")
    speed = sum(member.frames_per_second for member in status.members)
    actors = [member for member in status.members if member.role == pb.ROLE_ACTOR]
    active = sum(member.active for member in actors)
    lines.append(f"{active} of {len(actors)} actors active, {speed:,.0f} frames/s together")
    rejections = [
        f"{member.name} was last rejected for {member.last_rejection}"
        for member in status.members
        if member.last_rejection
    ]
    text = rich.text.Text
    return rich.console.Group(*map(text, lines), table, *map(text, rejections))


def _counts(what: str, counts: dict[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()))
    return f"{sum(counts.values()):,} {what}" + (f" ({reasons})" if reasons else "")


def _ago(seconds: float) -> str:
    if seconds < 1.0:
        return "now"
    return f"{seconds:.0f} s ago" if seconds < 120.0 else f"{seconds / 60:.0f} min ago"
