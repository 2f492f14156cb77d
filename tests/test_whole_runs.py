"""What the benchmarks of whole runs read out of a run, and make of it."""

import json
import math
import pathlib

import pytest

from benchmarks import passing, speed_up
from impala.config import values
from impala.config.presets import PRESETS


@pytest.fixture
def logdir(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run with a row of telemetry every 1,000 frames: 2 s each at first, then 4 s."""
    evaluations = [(0, [9, 9]), (1500, [500, 460]), (2500, [440, 500]), (3500, [500, 500])]
    rows = [(1000, 2.0), (2000, 6.0), (3000, 10.0), (4000, 14.0)]
    (tmp_path / "config.yaml").write_text(values.to_yaml(PRESETS["cartpole-q"][1]))
    (tmp_path / "evaluations.jsonl").write_text(
        "".join(
            json.dumps({"task": "CartPole-v1", "learner": 1, "frames": frames, "returns": returns})
            + "\n"
            for frames, returns in evaluations
        )
    )
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"frames": f, "seconds": s}) + "\n" for f, s in rows)
    )
    return tmp_path


@pytest.mark.parametrize(
    ("least", "frames", "seconds"),
    [(319.0, 2500, 8.0), (320.0, 3500, 12.0), (483.0, 3500, 12.0), (484.0, math.inf, math.inf)],
)
def test_the_first_three_evaluations_that_pass_say_when(
    logdir: pathlib.Path, least: float, frames: float, seconds: float
) -> None:
    assert passing.read(logdir, least) == pytest.approx((frames, seconds))


def test_a_run_with_fewer_evaluations_has_not_passed(logdir: pathlib.Path) -> None:
    path = logdir / "evaluations.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert passing.read(logdir, 0.0) == (math.inf, math.inf)


def test_the_table_compares_medians_with_the_paper() -> None:
    measured = {1: [40.0, 60.0, 400.0], 2: [30.0, 20.0, math.inf]}
    assert speed_up.speed_ups(measured) == {1: 1.0, 2: 2.0}
    rows = speed_up.table(measured).splitlines()[2:]
    assert rows == [
        "| 1 | 40, 60, 400 | 60 | 1.00 | 1.0 |",
        "| 2 | 30, 20, inf | 30 | 2.00 | 3.0 |",
        "| 4 |  |  |  | 6.3 |",
        "| 8 |  |  |  | 13.3 |",
        "| 16 |  |  |  | 24.1 |",
    ]
