"""Areas, forgetting and transfer against pencil and paper, and the figure that shows them."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from impala.analysis import continual, plot
from impala.commands import main as cli
from impala.config import values
from impala.config.schema import Config, EnvironmentConfig, TasksConfig

CONFIG = Config(
    environment=EnvironmentConfig(id="Catch"),
    tasks=TasksConfig(environments=("a", "b"), cycles=2),
    total_frames=400,
)

# Every hundred frames. Task a is trained from 0 to 100 and from 200 to 300, b in between and after.
RETURNS = {"a": [0.0, 8.0, 2.0, 10.0, 5.0], "b": [-1.0, 1.0, 4.0, 3.0, 4.0]}


def write(logdir: pathlib.Path, lines: list[tuple]) -> pathlib.Path:
    logdir.mkdir(parents=True, exist_ok=True)
    (logdir / "config.yaml").write_text(values.to_yaml(CONFIG))
    with open(logdir / "evaluations.jsonl", "w") as file:
        for task, frames, returns, *learner in lines:
            line = {"task": task, "frames": frames, "returns": returns, "learner": [*learner, 0][0]}
            file.write(json.dumps(line) + "\n")
    return logdir


def story(logdir: pathlib.Path) -> pathlib.Path:
    return write(
        logdir,
        [
            (task, 100 * i, [value - 1, value + 1])
            for i in range(5)
            for task, values in RETURNS.items()
            for value in values[i : i + 1]
        ],
    )


def test_curves_are_means_over_episodes(tmp_path: pathlib.Path) -> None:
    run = continual.read(story(tmp_path))
    assert run.curves["a"].frames.tolist() == [0, 100, 200, 300, 400]
    assert run.curves["a"].returns.tolist() == RETURNS["a"]
    assert run.curves["a"].at(150) == 5.0


def test_the_area_is_the_mean_return_over_training(tmp_path: pathlib.Path) -> None:
    run = continual.read(story(tmp_path))
    assert run.curves["a"].area(400) == pytest.approx((4 + 5 + 6 + 7.5) / 4)
    assert run.curves["a"].area(150) == pytest.approx((4 * 100 + 6.5 * 50) / 150)


def test_forgetting_is_what_training_another_task_costs(
    tmp_path: pathlib.Path,
) -> None:
    run = continual.read(story(tmp_path))
    by_block = {(c.task, c.block): (c.forgetting, c.transfer) for c in continual.changes(run)}
    assert by_block == {
        ("b", 0): (None, pytest.approx((1 - -1) / 4)),  # not yet trained: transfer
        ("a", 1): (pytest.approx((8 - 2) / 10), None),
        ("b", 2): (pytest.approx((4 - 3) / 4), None),
        ("a", 3): (pytest.approx((10 - 5) / 10), None),
    }
    assert continual.forgetting(run) == {"a": pytest.approx(0.55), "b": pytest.approx(0.25)}
    assert continual.transfer(run) == {"b": pytest.approx(0.5)}


def test_how_each_task_stands(tmp_path: pathlib.Path) -> None:
    standing = continual.summary(continual.read(story(tmp_path)))
    assert standing["a"] == pytest.approx((5.0, 10.0, 0.5, 5.625, 0.55, 0.0))
    assert standing["b"] == pytest.approx((4.0, 4.0, 1.0, 2.375, 0.25, 0.5))


def test_what_was_not_seen_yet_was_not_forgotten(tmp_path: pathlib.Path) -> None:
    lines = [("a", 0, [0.0]), ("a", 100, [8.0]), ("a", 150, [6.0])]
    run = continual.read(write(tmp_path, lines))
    assert [change.block for change in continual.changes(run)] == [1]
    assert continual.summary(run)["a"].forgetting == pytest.approx(2 / 8)


def test_before_its_first_evaluation_nothing_is_known_of_a_task(tmp_path: pathlib.Path) -> None:
    lines = [("a", 250, [8.0]), ("a", 300, [6.0]), ("a", 400, [4.0])]
    changes = continual.changes(continual.read(write(tmp_path, lines)))
    assert [change.block for change in changes if change.task == "a"] == [3]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # An evaluator that was given 300 before the restart reports after another one.
        ([("resumed", 350), (400, 2), (300, 1), (450, 2)], [300, 400, 450]),
        # What the first learner came to beyond 350 is not part of the run.
        ([(300, 1), (400, 1), (450, 1), ("resumed", 350), (500, 2), (405, 2)], None),
    ],
)
def test_a_resumed_learner_goes_on_whoever_reports_first(
    tmp_path: pathlib.Path, lines: list[tuple], expected: list[int] | None
) -> None:
    write(tmp_path, [])
    with open(tmp_path / "evaluations.jsonl", "w") as file:
        for first, second in lines:
            report = {"task": "a", "frames": first, "returns": [1.0], "learner": second}
            mark = {"time": 1.0, "resumed": second}
            file.write(json.dumps(mark if first == "resumed" else report) + "\n")
    assert continual.read(tmp_path).curves["a"].frames.tolist() == (expected or [300, 405, 500])


def test_evaluators_may_report_in_any_order_and_tasks_may_change(tmp_path: pathlib.Path) -> None:
    lines = [("a", 0, [0.0]), ("a", 200, [2.0]), ("a", 100, [1.0]), ("of before", 100, [1.0])]
    run = continual.read(write(tmp_path, lines))
    assert list(run.curves) == ["a"]
    assert run.curves["a"].frames.tolist() == [0, 100, 200]
    plot.draw([tmp_path], tmp_path / "figure.png")  # while b was not evaluated yet


def test_a_run_without_evaluations_is_told_what_to_do(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="--evaluate yes"):
        continual.read(tmp_path)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_figure_of_two_runs_is_written(tmp_path: pathlib.Path, ending: str) -> None:
    output = tmp_path / "figures" / f"figure.{ending}"
    (tmp_path / "other").mkdir()
    same_name = story(tmp_path / "other" / "one")
    plot.draw([story(tmp_path / "one"), story(tmp_path / "two"), same_name], output)
    content = output.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 10_000


def test_without_evaluations_returns_in_training_are_drawn(tmp_path: pathlib.Path) -> None:
    rows = [
        {"frames": 100 * i, "seconds": i, "episode/Catch/return_recent": float(np.sin(i))}
        for i in range(9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot.draw([tmp_path], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5_000
    of_before = write(tmp_path, [("of before", 100, [1.0])])  # of no task that it still has
    assert len(plot.figure([of_before]).axes) == 2  # over frames and over time


def _trained(logdir: pathlib.Path, id: str, returns: list[float], **changes: Any) -> pathlib.Path:
    """A run with rows of telemetry, a second and a hundred frames apart."""
    logdir.mkdir(parents=True)
    config = values.overlay(Config(), {"environment": {"id": id}, **changes})
    (logdir / "config.yaml").write_text(values.to_yaml(config))
    rows = [
        {"frames": 100 * i, "seconds": i, f"episode/{id}/return_recent": value}
        for i, value in enumerate(returns)
    ]
    (logdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return logdir


def _legends(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_seeds_are_drawn_as_their_mean_in_a_band(tmp_path: pathlib.Path) -> None:
    one = _trained(tmp_path / "one-seed0", "Catch", [0.0, 1.0, 2.0], seed=0)
    two = _trained(tmp_path / "one-seed7", "Catch", [0.0, 3.0, 8.0, 9.0], seed=7)
    # Another learning rate is another experiment; how often it is logged changes nothing.
    fast = _trained(tmp_path / "fast", "Catch", [5.0, 5.0], optimiser={"learning_rate": 1.0})
    third = _trained(
        tmp_path / "one-seed3", "Catch", [0.0, 2.0, 5.0], seed=3, learner={"log_seconds": 9.0}
    )
    figure = plot.figure([one, two, fast, third])

    rate = "optimiser.learning_rate"
    assert _legends(figure) == [
        f"{rate} 0.0006 (3 runs: mean, smallest to largest)",
        f"{rate} 1",
    ]
    over_frames, over_time = figure.axes
    for axes, end in ((over_frames, 200.0), (over_time, 2.0)):
        mean, alone = axes.get_lines()
        assert np.asarray(mean.get_xdata())[-1] == pytest.approx(
            end
        )  # as far as every seed has come
        assert np.asarray(mean.get_ydata())[-1] == pytest.approx((2 + 8 + 5) / 3)
        assert np.asarray(alone.get_ydata()).tolist() == [5.0, 5.0]
        (band,) = axes.collections
        assert band.get_datalim(axes.transData).y1 == pytest.approx(8.0)
    assert over_frames.get_xlabel() == "environment frames"
    assert over_time.get_xlabel() == "seconds of training"


def test_runs_are_named_by_directories_if_too_much_differs(tmp_path: pathlib.Path) -> None:
    few = {"learner": {"unroll_length": 9}, "optimiser": {"learning_rate": 1.0}}
    many = few | {"impala": {"entropy_cost": 1.0, "entropy_anneal": 0.5}}
    many |= {"agent": {"core": "lstm", "torso": "shallow", "frame_stack": 4}}
    one = _trained(tmp_path / "one", "Catch", [1.0])
    rate, length = "optimiser.learning_rate", "learner.unroll_length"
    for changes, names in (
        (few, [f"{rate} 0.0006, {length} 20", f"{rate} 1, {length} 9"]),
        (many, ["one", "other"]),
    ):
        other = _trained(tmp_path / str(len(changes)) / "other", "Catch", [1.0], **changes)
        assert _legends(plot.figure([one, other])) == names


def test_curves_of_twenty_runs_can_be_told_apart(tmp_path: pathlib.Path) -> None:
    runs = [_trained(tmp_path / str(n), "Catch", [float(n)], total_frames=n + 1) for n in range(20)]
    lines = plot.figure(runs).legends[0].get_lines()
    assert len({(str(line.get_color()), line.get_linestyle()) for line in lines}) == 20


def test_a_run_that_went_back_is_drawn_with_what_came_last(tmp_path: pathlib.Path) -> None:
    logdir = _trained(tmp_path / "run", "Catch", [0.0, 1.0, 2.0])
    with open(logdir / "metrics.jsonl", "a") as file:
        row = {"frames": 100, "seconds": 1, "episode/Catch/return_recent": 7.0}
        file.write(json.dumps(row) + "\n")
    line = plot.figure([logdir]).axes[0].get_lines()[0]
    assert np.asarray(line.get_xydata()).tolist() == [[0, 0], [100, 7]]


def test_plot_says_what_is_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plot"]) == 2
    needs = "impala: plot needs the log directories of runs: impala plot LOGDIR [LOGDIR ...]. "
    assert capsys.readouterr().err == needs + "runs has none.\n"
    story(tmp_path / "runs" / "b")
    story(tmp_path / "runs" / "a")
    assert cli.main(["plot"]) == 2
    assert capsys.readouterr().err == needs + "There are: runs/a, runs/b.\n"
    assert cli.main(["plot", "runs/a", "runs/c"]) == 2
    assert "There is no log directory runs/c." in capsys.readouterr().err


def test_what_cannot_be_drawn_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="no episode and no reward yet"):
        plot.draw([tmp_path], tmp_path / "figure.png")
    with pytest.raises(ValueError, match=r"use one of .*\.png"):
        plot.draw([story(tmp_path / "one")], tmp_path / "figure.doc")
