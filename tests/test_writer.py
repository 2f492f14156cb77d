"""The writer beside training: what blocks, fails or comes in floods neither ends nor delays it."""

import ast
import dataclasses
import logging
import pathlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import services
import tensorflow as tf

from impala.analysis import continual
from impala.config import values
from impala.config.schema import Config, EnvironmentConfig, TelemetryConfig
from impala.logdir import json_lines, rows
from impala.logdir.checkpoint import Counters
from impala.parts import build, sections
from impala.types import Episode
from learner.evaluation.evaluations import Evaluations
from learner.evaluation.evaluators import EvaluationReport
from learner.evaluation.snapshots import Snapshot, Snapshots
from learner.telemetry import custom_sinks, sinks
from learner.telemetry.console import Console
from learner.telemetry.files import JsonLines, TensorBoard
from learner.telemetry.prometheus import Prometheus
from learner.telemetry.sinks import Histograms
from learner.telemetry.telemetry import Interval, Sample
from learner.telemetry.writer import Attempts, Files, Writer

CONFIG = Config(environment=EnvironmentConfig(id="Catch"))
LEARNER = 7


class Sink(sinks.Sink):
    """Keeps rows; does what it is told with each before."""

    def __init__(self, before: Callable[[dict[str, float]], object] = lambda row: None) -> None:
        self.rows: list[dict[str, float]] = []
        self.histograms: list[Histograms] = []
        self.before = before
        self.is_closed = False

    def write(self, row: dict[str, float]) -> None:
        self.before(row)
        self.rows.append(row)

    def write_histograms(self, histograms: Histograms, frames: float) -> None:
        self.histograms.append(histograms)

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def writing(
    logdir: pathlib.Path,
    live: Sequence[sinks.Sink] = (),
    files: Sequence[sinks.Sink] = (),
    exporter: sinks.Sink | None = None,
    own: Sequence[sinks.Sink] = (),
    resumed: int = 0,
) -> Iterator[Writer]:
    (logdir / "config.yaml").write_text(values.to_yaml(CONFIG))
    evaluations = Evaluations(logdir, CONFIG, ["Catch"], snapshots(0, 50, 70, 2**53), resumed)
    writer = Writer(evaluations, queue.Queue(64), exporter, live, files, own)
    try:
        yield writer
    finally:
        writer.close(1.0)


def interval(number: int, seconds: float = 5.0, **levels: float) -> Interval:
    """The one after `number` others: each has an update with its number as the loss."""
    made = Interval(Counters(updates=number, frames=100 * number), 0.0)
    made.mean("loss", float(number))
    made.sample("lag", np.array([number, 2 * number]))
    made.levels({"level": number, **levels})
    end = Counters(updates=number + 1, frames=100 * (number + 1), seconds=seconds * (number + 1))
    made.end(end, seconds)
    return made


def report(
    frames: int, value: float = 1.0, learner: int = LEARNER, version: int = 3
) -> EvaluationReport:
    episodes = [Episode(value, 9, 9, {"lives": 2.0})]
    return EvaluationReport("e", 0, learner, version, frames, episodes)


def snapshots(*frames: int, num_tasks: int = 1) -> Snapshots:
    """Those that wait for reports."""
    made = Snapshots(num_tasks, "auto")
    for number in frames:
        made.add(Snapshot(pathlib.Path(str(number)), LEARNER, 3, number, 0.0))
    return made


def test_a_report_settles_a_snapshot_once_and_for_ever(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    waiting = snapshots(100, 200, num_tasks=2)
    evaluations = Evaluations(tmp_path, CONFIG, ["Catch", "other"], waiting, 0)
    for task, frames, value in [(0, 100, 1.0), (0, 100, 9.0), (1, 100, 4.0), (0, 200, 2.0)]:
        evaluations.add(report(frames, value)._replace(task=task))
    evaluations.close()
    assert evaluations.dropped == 1
    (whole,) = waiting.take_evaluated()
    assert (whole.frames, whole.mean) == (100, 2.5)
    assert "Evaluation of other at 100 frames: return 4.00, mean of 1 episode(s)." in caplog.text
    assert "return 9.00" not in caplog.text

    again = snapshots(100, 200, num_tasks=2)  # after a restart
    Evaluations(tmp_path, CONFIG, ["Catch", "other"], again, 0).close()
    assert again.take_evaluated() == [whole]
    assert not again.awaits(LEARNER, 200, 0) and again.awaits(LEARNER, 200, 1)


def test_a_learner_that_resumes_says_from_where(tmp_path: pathlib.Path) -> None:
    """The report of frame 200 is of what was trained for nothing, though nobody reported since."""
    for frames, of_reports in ((0, (100, 200)), (150, ()), (220, (210,))):
        evaluations = Evaluations(tmp_path, CONFIG, ["Catch"], snapshots(*of_reports), frames)
        for number in of_reports:
            evaluations.add(report(number))
        evaluations.close()
    lines = json_lines.read(tmp_path / "evaluations.jsonl", continual.parse)
    assert [x.frames for x in lines] == [100, 200, 150, 220, 210]
    assert [isinstance(x, continual.Resumed) for x in lines] == [False, False, True, True, False]
    assert evaluations._history.run().curves["Catch"].frames.tolist() == [100, 210]


def test_a_report_that_cannot_be_written_is_awaited_still(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = snapshots(100)
    evaluations = Evaluations(tmp_path, CONFIG, ["Catch"], waiting, 0)

    def fail(line: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(evaluations._file, "write", fail)
        with pytest.raises(OSError, match="No space"):
            evaluations.add(report(100))
    assert waiting.awaits(LEARNER, 100, 0)
    evaluations.add(report(100))
    evaluations.close()
    assert not len(waiting)


def test_a_sink_that_blocks_does_not_hold_training_up(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a terminal does after Ctrl-S. What there is no room for is counted, and told later."""
    release = threading.Event()
    stuck = Sink(lambda row: release.wait(60.0))
    with writing(tmp_path, live=[stuck]) as writer:
        for number in range(500):
            writer.put(interval(number))
        assert not writer.drain(0.01)
        assert 430 <= writer.dropped <= 500
        assert sum("rows are merged" in line for line in caplog.messages) == 1
        release.set()
        assert writer.drain(30.0)
        assert len(stuck.rows) == 500 - writer.dropped
        assert stuck.rows[-1]["updates"] == 500
    assert stuck.is_closed


@pytest.mark.parametrize("is_drained", [True, False])
def test_the_last_row_gets_through_a_full_queue(tmp_path: pathlib.Path, is_drained: bool) -> None:
    """Given a console that is stuck until the run ends, and a hundred rows."""
    release = threading.Event()
    console = Sink(lambda row: release.wait(60.0))
    with writing(tmp_path, live=[console], files=[file := Sink()]) as writer:
        for number in range(100):
            writer.put(interval(number), is_last=number == 99)
        release.set()
        if is_drained:
            assert writer.drain(30.0)
            writer.put(interval(100))  # after the run: for the exporter alone
        writer.close(30.0)
    assert [row["updates"] for row in (console.rows[-1], file.rows[-1])] == [100, 100]
    assert len(console.rows) == 100 - writer.dropped < 70
    updates = np.diff([0, *(row["updates"] for row in console.rows)])
    losses = np.array([row["loss"] for row in console.rows])
    assert np.sum(updates * losses) == pytest.approx(sum(range(100)))


def test_a_sink_that_is_stuck_at_the_end_is_left_behind(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    with writing(tmp_path, live=[Sink(lambda row: release.wait(60.0))]) as writer:
        writer.put(interval(0))
        writer.close(0.05)
    assert any("rows are lost" in line for line in caplog.messages)
    release.set()


def test_a_sink_that_fails_is_told_of_once_and_tried_again(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(row: dict[str, float]) -> None:
        if row["updates"] < 20:
            raise OSError(28, "No space left on device")
        if row["updates"] < 30:
            raise ValueError("I/O operation on closed file")

    broken, good = Sink(fail), Sink()
    with writing(tmp_path, live=[broken, good], files=[Sink(fail)]) as writer:
        for number in range(40):
            writer.put(interval(number))
            assert writer.drain(30.0)
        assert [row["updates"] for row in good.rows] == list(range(1, 41))
        assert [row["updates"] for row in broken.rows] == list(range(30, 41))
    errors = [line for line in caplog.messages if "Sink fails" in line]
    assert len(errors) == 4  # two kinds of errors, of two sinks
    assert "OSError" in errors[0] and "No space left" in errors[0]


@pytest.mark.parametrize("error", [RuntimeError("lost the connection"), SystemExit(1)])
def test_a_custom_sink_that_raises_is_told_of_and_gets_the_next_row(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail(row: dict[str, float]) -> None:
        if row["updates"] == 3:
            raise error

    broken, good, console = Sink(fail), Sink(lambda row: row.clear()), Sink()
    with writing(tmp_path, live=[console], own=[broken, good]) as writer:
        for number in range(6):
            writer.put(interval(number))
            assert writer.drain(30.0)
    assert [row["updates"] for row in console.rows] == [1, 2, 3, 4, 5, 6]
    assert [row["updates"] for row in broken.rows] == [1, 2, 4, 5, 6]
    assert len(good.rows) == 6 and len(good.histograms) == 6
    assert broken.is_closed and good.is_closed
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert f"Sink fails, and training goes on: {type(error).__name__}: {error}" in record.message
    assert "test_writer.py:" in record.message


class Board(sinks.Sink):
    """As a user would write it: rows of one group, into a file of the log directory."""

    @dataclasses.dataclass(frozen=True)
    class Settings:
        """What of a row is written."""

        group: str = "loss"
        """Names before the first slash."""

    def __init__(self, logdir: pathlib.Path, settings: Settings) -> None:
        if not settings.group:
            raise ValueError("group is empty")
        self._file = open(logdir / "board.txt", "a")  # noqa: SIM115
        self._group = settings.group

    def write(self, row: dict[str, float]) -> None:
        named = {name: value for name, value in row.items() if name.split("/")[0] == self._group}
        self._file.write(f"{named}\n")

    def close(self) -> None:
        self._file.close()


def board_config(group: str) -> Config:
    telemetry = TelemetryConfig(sinks=("test_writer:Board",))
    config = Config(environment=CONFIG.environment, telemetry=telemetry)
    return sections.compose(config, board=Board.Settings(group))


def test_a_configured_sink_gets_rows_and_its_settings(
    tmp_path: pathlib.Path,
) -> None:
    with writing(tmp_path, own=custom_sinks.make(board_config("lag"), tmp_path)) as writer:
        writer.put(interval(0))
        writer.put(interval(1), is_last=True)
        assert writer.drain(30.0)
    lines = (tmp_path / "board.txt").read_text().splitlines()
    assert [sorted(ast.literal_eval(line)) for line in lines] == [
        ["lag/max", "lag/mean", "lag/p10", "lag/p50", "lag/p90"]
    ] * 2


def test_a_sink_that_cannot_be_opened_is_refused_in_one_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(values.OptionError) as refused:
        custom_sinks.make(board_config(""), tmp_path)
    assert str(refused.value).startswith("The sink test_writer:Board cannot be opened: ValueError")
    assert "group is empty" in str(refused.value) and "test_writer.py:" in str(refused.value)


def test_when_a_sink_cannot_be_opened_the_others_are_closed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, make, closed = board_config("lag"), build.part, []
    config = dataclasses.replace(
        config, telemetry=TelemetryConfig(sinks=("test_writer:Board",) * 2)
    )

    def close(board: Board) -> None:
        closed.append(board)
        board._file.close()

    monkeypatch.setattr(Board, "close", close)
    parts = iter([make, lambda *_: (lambda *_: 1 / 0, None)])
    monkeypatch.setattr(build, "part", lambda *given: next(parts)(*given))
    with pytest.raises(values.OptionError, match="ZeroDivisionError"):
        custom_sinks.make(config, tmp_path)
    assert len(closed) == 1


# Files.


def test_intervals_merged_are_as_if_gathered_at_once() -> None:
    whole = Interval(Counters(), 0.0)
    merged: Interval | None = None
    for number in range(5):
        part = Interval(Counters(frames=100 * number), float(number))
        for each in (whole, part):
            for value in np.random.default_rng(number).normal(size=number + 1):
                each.mean("loss", value, weight=number + 1)
            each.sample("lag", np.random.default_rng(number).normal(size=50))
            each.newest("action", np.array([number]))
            each.waited_seconds += 0.1 * number
            each.actor(f"actor {number % 2}", 1.0, 0.2 * number, 0.1 * number)
            each.levels({"level": number})
            each.episodes("episode/Catch", [Episode(float(number), 9, 9, {"lives": 1.0})])
            each.end(Counters(frames=100 * (number + 1)), number + 1.0)
        if merged is None:
            merged = part
        else:
            merged.merge(part)
    assert merged is not None
    (row, histograms), (expected, all_at_once) = merged.row(), whole.row()
    assert row == pytest.approx(expected)
    assert row["speed/frames_per_second"] == 100.0
    assert row["row_seconds"] == 5.0
    assert {name: np.sort(values).tolist() for name, values in histograms.items()} == {
        name: np.sort(values).tolist() for name, values in all_at_once.items()
    }


def test_a_sample_of_many_numbers_is_bounded_and_right() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.exponential(size=300_000)
    sample, other = Sample(), Sample()
    for part in np.array_split(numbers[:250_000], 100):
        sample.add(part)
    for part in np.array_split(numbers[250_000:], 100):
        other.add(part)
    sample.add(np.array([np.nan, np.inf]))
    sample.merge(other)
    found = sample.scalars()
    assert sample.values().size < 40_000
    assert found["mean"] == pytest.approx(numbers.mean(), rel=1e-9)
    assert found["max"] == numbers.max()
    for quantile in (10, 50, 90):
        assert found[f"p{quantile}"] == pytest.approx(np.percentile(numbers, quantile), rel=0.05)


def test_rows_of_files_become_rare_and_hold_all_that_happened() -> None:
    """Of a day with a row every five seconds. What a file gets of the loss is the mean of all."""
    file = Sink()
    writing = Files([file], Attempts())
    for number in range(17_280):
        writing.write(interval(number))
    updates = [0, *(int(row["updates"]) for row in file.rows)]
    assert updates[:200] == list(range(200))  # each row, in the first minutes
    assert max(np.diff(updates)) <= 12  # a minute, in the end
    assert 1_440 < len(file.rows) < 2_200
    for before, after, row in zip(updates, updates[1:], file.rows, strict=False):
        assert row["loss"] == np.mean(range(before, after))
        assert row["lag/max"] == 2 * (after - 1)
        assert row["level"] == after - 1
        assert row["speed/frames_per_second"] == pytest.approx(20.0)
    assert 48 < len(file.histograms) < 200
    assert updates[-1] < 17_280
    writing.close()  # of a run that has failed
    assert file.rows[-1]["updates"] == 17_280


# Evaluations.


def test_evaluations_are_filed_and_told_of_outside_of_training(tmp_path: pathlib.Path) -> None:
    console = Sink()
    with writing(tmp_path, live=[console]) as writer:
        writer._reports.put(report(0, value=0.0, version=1))
        writer._reports.put(report(50, value=20.0))
        assert writer.drain(30.0)
        writer.put(interval(0))
        assert writer.drain(30.0)
        (row,) = console.rows
        assert row["evaluation/Catch/return"] == 10.0
        assert row["evaluation/Catch/info/lives"] == 2.0
        assert row["evaluation/Catch/snapshot_frames"] == 25.0
        assert (row["task/Catch/now"], row["task/Catch/best"]) == (20.0, 20.0)
        assert writer._evaluations.summaries["Catch"].now == 20.0
    assert continual.read(tmp_path).curves["Catch"].returns.tolist() == [0.0, 20.0]


def test_a_sink_that_hangs_does_not_hold_up_evaluations(tmp_path: pathlib.Path) -> None:
    """For which training waits when there are too many snapshots, and at its end."""
    has_hung, goes_on = threading.Event(), threading.Event()

    def hang(row: dict[str, float]) -> None:
        has_hung.set()
        goes_on.wait()

    with writing(tmp_path, live=[Sink(hang)]) as writer:
        try:
            writer.put(interval(0))
            assert has_hung.wait(services.WAIT)
            writer._reports.put(report(50, value=20.0))
            services.wait_for(
                "the report", lambda: not writer._evaluations._snapshots.awaits(LEARNER, 50, 0)
            )
        finally:
            goes_on.set()
    assert continual.read(tmp_path).curves["Catch"].returns.tolist() == [20.0]


# Absurd numbers.

ABSURD: dict[str, float] = {
    "progress": 1e-300,
    "nan": float("nan"),
    "inf": float("inf"),
    "largest": 1.7e308,
    "steps": 2**64,
    "beyond": 10**400,
    "frames": 2**70,
    "episode/Catch/info/return_recent": 5.0,
}


def test_absurd_numbers_reach_every_place_or_are_left_out(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorBoard refused whole numbers beyond 2^63, and ended the learner with that."""
    board, lines = TensorBoard(tmp_path), JsonLines(tmp_path)
    exporter = Prometheus("127.0.0.1:0")
    console = Console(to_log=True)
    with writing(tmp_path, [console], [board, lines], exporter) as writer:
        made = interval(0, **ABSURD)
        made.newest("action", np.array([np.nan, np.inf, -1e300, 3.0]))
        made.sample("rpc_seconds/Join", np.array([np.inf, 1.0]))
        writer.put(made, is_last=True)
        assert writer.drain(60.0)
        labels = {
            (sample.name, *sample.labels.values())
            for family in exporter.collect()
            for sample in family.samples
        }
    assert [line for line in caplog.messages if "fails" in line] == []
    (row,) = rows.read(tmp_path)
    assert row["frames"] == 2**70 and row["steps"] == 2**64 and row["largest"] == 1.7e308
    assert "nan" not in row and "inf" not in row and "beyond" not in row
    assert not any(name == "impala_episode_return" for name, *_ in labels)  # an info, no return
    (events,) = (tmp_path / "tensorboard").iterdir()
    tags = {
        value.tag: event.step
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert tags["histogram/action"] == tags["largest"] == 2**63 - 1
