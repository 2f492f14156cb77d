"""Gauges: reads totals and levels from a learner's components for a row of telemetry."""

import dataclasses

from impala.logdir.checkpoint import Counters
from impala.logdir.rows import Row
from learner.data.ingest import Ingest
from learner.data.pacing import Pacing
from learner.data.replay import Replay
from learner.evaluation.snapshots import Snapshots
from learner.fleet.incarnations import Incarnations
from learner.fleet.records import Records
from learner.service.inference import Inference
from learner.service.server import Server
from learner.telemetry.writer import Writer
from learner.update.checkpoints import Checkpoints
from learner.update.guard import Guard
from learner.update.phases import Phases

_MOST_WORKERS = 32  # actors that have scalars of their own; `impala status` shows all


@dataclasses.dataclass(frozen=True)
class Gauges:
    """Reads a learner's components."""

    phases: Phases
    records: Records
    server: Server | None
    ingest: Ingest
    pacing: Pacing | None
    replay: Replay | None
    guard: Guard
    checkpoints: Checkpoints
    snapshots: Snapshots
    writer: Writer
    inference: Inference | None
    incarnations: Incarnations

    def read(self, counters: Counters) -> Row:
        """Returns the current totals and levels of a run with these counters."""
        records = self.records
        totals = records.accounts.totals()
        active, silent = records.roster.actors()
        refusals = self.server.refusals() if self.server is not None else {}
        found: Row = {
            "progress": self.phases.progress(counters),
            "phase/number": self.phases.number(counters),
            "checkpoint/age_seconds": self.checkpoints.age_seconds,
            "learner/starts": len(self.incarnations.earlier) + 1,
            "actor/active": active,
            "actor/silent": silent,
            "actor/quarantined": records.quarantine.count(),
            "actor/joins": records.roster.joins,
            **{f"actor/environment_faults/{kind}": n for kind, n in records.roster.faults.items()},
            "ingest/bytes": records.roster.received_bytes,
            "ingest/capacity": self.ingest.capacity,
            "ingest/depth": self.ingest.depth,
            "unrolls/received": totals.received,
            "unrolls/learned": totals.learned,
            "unrolls/queued": totals.queued,
            "messages/duplicates": totals.duplicates,
            "guard/skipped_updates": self.guard.skipped_updates,
            "guard/culprits": self.guard.culprits,
            "guard/rollbacks": self.guard.rollbacks,
            "evaluations/waiting": len(self.snapshots),
            "info_names/dropped": records.info_names.dropped,
            "telemetry/dropped": self.writer.dropped,
            **{f"unrolls/dropped/{reason}": n for reason, n in totals.dropped.items()},
            **{f"refused/{reason}": n for reason, n in refusals.items()},
            **{f"messages/rejected/{reason}": n for reason, n in totals.rejected.items()},
            **{f"messages/violations/{kind}": n for kind, n in records.violations.totals().items()},
        }
        for actor in records.roster.members() if active <= _MOST_WORKERS else ():
            if actor.role != "actor" or not actor.active:
                continue
            found[f"worker/{actor.name}/frames_per_second"] = actor.frames_per_second
            if actor.recent_return is not None:
                found[f"worker/{actor.name}/return_recent"] = actor.recent_return
            elif actor.reward_per_step is not None:
                found[f"worker/{actor.name}/reward_per_step"] = actor.reward_per_step
        if self.inference is not None and self.inference.rows:
            found["inference/rows"] = self.inference.rows
            found["inference/versions"] = self.inference.versions
        if self.pacing is not None:
            found |= {"ingest/depth": self.pacing.queued, "pacing/making": self.pacing.making}
        if self.replay is not None:
            contents = self.replay.contents()._asdict()
            found |= {f"replay/{name}": value for name, value in contents.items()}
        return found
