"""A sink: some columns of each row, as CSV."""

import csv
import dataclasses
import pathlib

from impala.logdir.rows import Row
from learner.telemetry.sinks import Sink


class CsvRows(Sink):
    """Writes LOGDIR/FILE, a line for each row."""

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """Rows as CSV."""

        file: str = "rows.csv"
        """Its name, in the log directory."""
        columns: tuple[str, ...] = ("frames", "updates")
        """Numbers of a row that are written; empty where a row lacks one."""

    def __init__(self, logdir: pathlib.Path, settings: Settings) -> None:
        super().__init__(logdir, settings)
        self._columns = settings.columns
        self._file = logdir / settings.file

    def write(self, row: Row) -> None:
        with open(self._file, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([row.get(name, "") for name in self._columns])
