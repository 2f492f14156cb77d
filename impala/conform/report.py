"""What a run of the kit found: the sentences of the page that were kept, and the others."""

import collections
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Failed(Exception):
    """The other side did not do what the page says; the message says what it did."""


class Row(NamedTuple):
    """A sentence of the page, and how it was kept."""

    case: str
    sentence: str
    result: str  # passed, FAILED or not tested
    detail: str


class Report:
    """Collects what was seen of each sentence; the first failure counts.

    Args:
      sentences: those that will be looked at, by case.
    """

    def __init__(self, sentences: Mapping[str, Iterable[str]]) -> None:
        self._sentences = {case: tuple(of_case) for case, of_case in sentences.items()}
        self._failed: dict[tuple[str, str], str] = {}
        self._untested: dict[tuple[str, str], str] = {}  # why
        self._done: dict[str, str] = {}  # case -> why it was not tested, or ""

    def failed(self, case: str, detail: str, sentence: str | None = None) -> None:
        """Notes that a sentence of a case, or all of them, was not kept."""
        assert case in self._sentences and sentence in (None, *self._sentences[case])
        for each in self._sentences[case] if sentence is None else (sentence,):
            self._failed.setdefault((case, each), detail)

    def untested(self, case: str, why: str, sentence: str) -> None:
        """Notes that a sentence of a case cannot be tested."""
        assert sentence in self._sentences[case]
        self._untested[case, sentence] = why

    def done(self, case: str, untested: str = "") -> None:
        """Notes that a case is over, or why it cannot be tested."""
        self._done[case] = untested

    def rows(self) -> list[Row]:
        """Returns a row for each sentence."""
        rows = []
        for case, sentences in self._sentences.items():
            for sentence in sentences:
                if (detail := self._failed.get((case, sentence))) is not None:
                    rows.append(Row(case, sentence, "FAILED", detail))
                elif untested := self._why_untested(case, sentence):
                    rows.append(Row(case, sentence, "not tested", untested))
                else:
                    rows.append(Row(case, sentence, "passed", ""))
        return rows

    def _why_untested(self, case: str, sentence: str) -> str:
        return self._untested.get((case, sentence)) or self._done.get(case, "it did not come to it")

    def is_broken(self, case: str) -> bool:
        """Returns whether a sentence of a case was broken."""
        return any(of == case for of, _ in self._failed)

    @property
    def is_good(self) -> bool:
        """Whether no sentence was broken."""
        return not self._failed

    def text(self) -> str:
        """Returns the table, and a line that sums it up."""
        lines, rows, case = [], self.rows(), ""
        for row in rows:
            if row.case != case:
                case = row.case
                lines.append(f"\n{case}")
            lines.append(f"  {row.result:<10}  {row.sentence}")
            if row.detail:
                lines.append(f"{'':14}{row.detail}")
        results = collections.Counter(row.result for row in rows)
        summed = ", ".join(f"{count} {result}" for result, count in results.items())
        return "\n".join([*lines, "", f"{len(rows)} sentences of docs/wire-protocol.md: {summed}."])
