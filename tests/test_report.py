"""The page about runs: what it says, and that it needs nothing else."""

import html.parser
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from impala.analysis import curves, report, runs
from impala.analysis.curves import Curve
from impala.commands import main as cli
from impala.config import values
from impala.config.schema import Config

VOID = ("meta", "img", "br", "path", "use")


class Page(html.parser.HTMLParser):
    """The elements and texts of a page; all that is opened must be closed."""

    def __init__(self, file: pathlib.Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.text = file.read_text(encoding="utf-8")
        self.feed(self.text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self._open}:
            self.rows[-1][-1] += data


def run(logdir: pathlib.Path, returns: list[float], **changes: Any) -> pathlib.Path:
    """A run with rows of telemetry, a minute and a hundred frames apart, and two starts."""
    logdir.mkdir(parents=True)
    config = values.overlay(Config(), {"environment": {"id": "Catch"}, **changes})
    (logdir / "config.yaml").write_text(values.to_yaml(config))
    (logdir / "incarnations.json").write_text("[[7, 1000], [8, 2000]]")
    rows = [
        {
            **{"frames": 100 * i, "seconds": 60 * i, "episode/Catch/return_recent": value},
            **{"speed/frames_per_second": 50.0, "learner/wait_share": 0.25, "policy_lag/mean": 3},
            **{"guard/rollbacks": [0, 2, 2][i % 3], "unrolls/dropped/stale": [0, 5, 6][i % 3]},
            **{"ingest/bytes": [10, 900, 20][i % 3], "actor/joins": 1},
            "unrolls/dropped/run_finished": 9,
        }
        for i, value in enumerate(returns)
    ]
    (logdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reports = [
        {"task": "Catch", "frames": 100 * i, "returns": [value, value + 2.0], "learner": 7}
        for i, value in enumerate(returns)
    ]
    (logdir / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in reports))
    return logdir


def test_a_report_says_how_runs_did_and_what_differs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rate = {"optimiser": {"learning_rate": 0.5}}
    for seed, best in ((1, 2.0), (2, 3.0)):
        run(pathlib.Path(f"runs/slow-{seed}"), [0.0, best, best], seed=seed)
        run(pathlib.Path(f"runs/<b>-{seed}"), [0.0, 9.0, 8.0], seed=seed, **rate)
    directories = sorted(map(str, pathlib.Path("runs").iterdir()))
    assert cli.main(["report", *directories]) == 0  # with no checkpoint to record
    assert capsys.readouterr().out == "report.html\n"
    page = Page(tmp_path / "report.html")

    assert not page.loads and "script" not in page.tags and "b" not in page.tags
    assert "http" not in page.text.replace("http://www.w3.org", "")
    fast, slow = "optimiser.learning_rate 0.5", "optimiser.learning_rate 0.0006"
    assert [fast, "1, 2", "200", "2.0", "8", "9", "10"] in page.rows
    spread = ["2.5 (2 to 3)", "3.5 (3 to 4)", "3.5 (3 to 4)"]
    assert [slow, "1, 2", "200", "2.0", *spread] in page.rows
    assert [slow, "0.0006"] in page.rows
    assert [slow, "50", "25%", "–"] in page.rows
    # The nearest preset, and what differs from it.
    assert ["setting", "here", "in catch"] in page.rows
    assert ["optimiser.learning_rate", "0.5", "0.002"] in page.rows
    assert not any(row[:1] == ["environment.id"] for row in page.rows)
    # Two rollbacks before the learner was started again, and two after it.
    faults = "guard/rollbacks 4, unrolls/dropped/stale 6"
    assert ["runs/<b>-1", "2", "2", faults] in page.rows
    # Evaluations, training over frames and over time, speed, who waits, and lag.
    assert page.tags.count("figure") == 6
    assert re.search(r"No video: impala: \S+/&lt;b&gt;-1 has no checkpoint", page.text)


def test_a_report_says_what_is_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 2
    assert "report needs the log directories of runs" in capsys.readouterr().err
    assert cli.main(["report", "absent"]) == 2
    assert "There is no log directory absent." in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", "empty"]) == 2
    assert "empty has no episode and no reward yet" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_runs_are_compared_by_one_measure(tmp_path: pathlib.Path) -> None:
    """Given a run of low returns, and one in which no episode has ended yet."""
    made = [tmp_path / "ended", tmp_path / "begun"]
    for logdir, per_step, ends in zip(made, (-0.5, -1.0), (True, False), strict=True):
        run(logdir, [-200.0], seed=int(ends))
        row = {"frames": 9, "seconds": 1, "task/Catch/reward_per_step": per_step}
        row |= {"episode/Catch/return_recent": -200.0} if ends else {}
        (logdir / "metrics.jsonl").write_text(json.dumps(row))
        (logdir / "evaluations.jsonl").unlink()
    groups = runs.grouped(map(runs.read, made))
    training = runs.training(groups)
    assert training.what == "reward per step"
    (curves,) = training.over_frames["Catch"].values()
    assert [curve[1].tolist() for curve in curves] == [[-0.5], [-1.0]]
    assert report.best(groups).logdir == made[0]
    alone = runs.training(runs.grouped([runs.read(made[0])]))
    assert alone.what.startswith("return")


def test_speed_and_waits_are_means_over_time_also_if_batches_are_rarer_than_rows(
    tmp_path: pathlib.Path,
) -> None:
    """Given a batch of 640 frames every 20 seconds, the third in the last row, and rows every 5."""
    logdir = run(tmp_path / "run", [1.0])
    idle = {"row_seconds": 5.0, "speed/frames_per_second": 0.0, "learner/wait_share": 1.0}
    learned = {"row_seconds": 5.0, "speed/frames_per_second": 128.0, "learner/wait_share": 0.92}
    rows = [
        {"frames": 640 * (i // 4), "seconds": 20 * (i // 4), **(idle if i % 4 else learned)}
        for i in range(1, 13)
    ]
    (logdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = runs.read(logdir)
    page = report.page(runs.grouped([made]), None)
    assert "<td>32</td><td>98%</td>" in page
    for metric, mean in (("speed/frames_per_second", 32.0), ("learner/wait_share", 0.98)):
        curve = report._series(made, metric)
        assert curve is not None
        assert curve.x.tolist() == [640, 1280, 1920]
        assert curve.y == pytest.approx([mean] * 3)
    # It waits at the end, or goes back when it is resumed, and waits there.
    for batches in ((3, 3, 3), (2, 2)):
        more = [{"frames": 640 * i, "seconds": 20 * i, **idle} for i in batches]
        text = "".join(json.dumps(row) + "\n" for row in (*rows, *more))
        (logdir / "metrics.jsonl").write_text(text)
        curve = report._series(runs.read(logdir), "speed/frames_per_second")
        assert curve is not None
        assert curve.y == pytest.approx([32.0] * 3)


def test_faults_of_starts_are_added_up(tmp_path: pathlib.Path) -> None:
    """Given a start that ended before it had received as much as the next one's first row tells."""
    logdir = run(tmp_path / "run", [1.0])
    starts = [{"learner/starts": 1, "ingest/bytes": 5}, {"learner/starts": 2, "ingest/bytes": 9}]
    rows = [
        {"frames": i, "seconds": i, "guard/rollbacks": 2, **row} for i, row in enumerate(starts)
    ]
    (logdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "guard/rollbacks 4" in report.page(runs.grouped([runs.read(logdir)]), None)


def test_settings_that_cannot_be_read_are_near_no_preset(tmp_path: pathlib.Path) -> None:
    logdir = run(tmp_path / "run", [1.0])
    (logdir / "config.yaml").write_text("seed: [")
    page = report.page(runs.grouped([runs.read(logdir)]), None)
    assert "its config.yaml cannot be read" in page and "unchanged" not in page


def test_seeds_without_frames_in_common_are_drawn_by_themselves() -> None:
    """Such as one that has just begun."""
    long = Curve(np.array([1e3, 1e5]), np.array([0.0, 1.0]))
    begun = Curve(np.array([900.0]), np.array([0.5]))
    panel = Figure().subplots()
    curves.draw(panel, {"run": [long, long, begun]}, curves.styles(["run"]))
    drawn = [(np.asarray(line.get_xdata()).tolist(), line.get_marker()) for line in panel.lines]
    assert drawn == [([1e3, 1e5], "")] * 2 + [([900.0], ".")]


def test_two_runs_of_a_seed_are_not_averaged(tmp_path: pathlib.Path) -> None:
    made = [run(tmp_path / name, [1.0, 2.0]) for name in ("one", "two")]
    other = run(tmp_path / "three", [3.0, 4.0], seed=1)
    groups = runs.grouped(map(runs.read, [*made, other]))
    assert [len(group) for group in groups.values()] == [2, 1]
