"""docs/sources.md: every row says what is ours, what shows it, and what differs."""

import pathlib
import re

import pytest

from impala.config import values
from impala.config.presets import PRESETS
from impala.config.schema import Config
from ledger.experiments import EXPERIMENTS

ROOT = pathlib.Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/sources.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| row ")
]
# tests/FILE, and behind it -k WORDS, or parts of the names of tests
SHOWN = re.compile(r"tests/(test_\w+\.py)`(?:, `-k ([^`]+)`)?(?:: ((?:`\w+`(?:, )?)+))?")
SECTIONS = "environment agent objective impala actor_critic critic q_learning sac optimiser mix"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_is_complete_and_names_what_there_is(row: list[str]) -> None:
    assert len(row) == 4 and all(row), "a row has four cells, none of them empty"
    _, ours, shown, _ = row
    found = SHOWN.findall(shown)
    assert found or "record" in shown or "preset" in shown
    for file, words, names in found:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        tests = " ".join(re.findall(r"(?:def|class) (\w+)", text)).lower()
        for word in {*re.findall(r"\w+", words), *re.findall(r"\w+", names)} - {"or"}:
            assert word.lower() in tests, f"{file} has no test named like {word}"
    for record in re.findall(r"records? ((?:`[\w-]+`(?:, )?)+)", shown):
        for name in re.findall(r"[\w-]+", record):
            assert name in EXPERIMENTS, f"there is no experiment {name}"
    for preset in re.findall(r"preset `([\w-]+)`", ours + shown):
        assert preset in PRESETS
    known = {path.replace("no_", "") for path in values.flatten(Config())}
    for section, name in re.findall(r"`(\w+)\.([\w-]+?)(?: [^`]*)?`", ours):
        if section in SECTIONS.split():
            path = f"{section}.{name.replace('-', '_').removeprefix('no_')}"
            assert any(each == path or each.startswith(f"{path}.") for each in known), path
