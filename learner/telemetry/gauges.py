"""What a row of telemetry says of the parts of a learner as they stand: totals and levels."""

from impala.logdir.rows import Row
from learner.data.ingest import Ingest
from learner.data.replay import Replay
from learner.front.records import Records
from learner.telemetry.writer import Writer
from learner.update.guard import Guard


class Gauges:
    """Reads the parts."""

    def __init__(
        self, records: Records, ingest: Ingest, replay: Replay | None, writer: Writer, guard: Guard
    ):
        """Keeps the parts."""
        self._records = records
        self._ingest = ingest
        self._replay = replay
        self._writer = writer
        self._guard = guard

    def read(self) -> Row:
        """Returns how they stand now."""
        records = self._records
        totals = records.accounts.totals()
        active, silent = records.roster.actors()
        found: Row = {
            "actor/active": active,
            "actor/silent": silent,
            "actor/quarantined": records.quarantine.count(),
            "actor/joins": records.roster.joins,
            **{f"actor/environment_faults/{kind}": n for kind, n in records.roster.faults.items()},
            "ingest/bytes": records.roster.received_bytes,
            "ingest/capacity": self._ingest.capacity,
            "ingest/depth": self._ingest.depth,
            "unrolls/received": totals.received,
            "unrolls/learned": totals.learned,
            "unrolls/queued": totals.queued,
            "messages/duplicates": totals.duplicates,
            "guard/skipped_updates": self._guard.skipped_updates,
            "guard/culprits": self._guard.culprits,
            "guard/rollbacks": self._guard.rollbacks,
            "info_names/dropped": records.info_names.dropped,
            "telemetry/dropped": self._writer.dropped,
            **{f"unrolls/dropped/{reason}": n for reason, n in totals.dropped.items()},
            **{f"messages/rejected/{reason}": n for reason, n in totals.rejected.items()},
        }
        if self._replay is not None:
            summary = self._replay.summary()._asdict()
            found |= {f"replay/{name}": value for name, value in summary.items()}
        return found
