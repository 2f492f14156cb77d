"""Areas, forgetting and transfer against pencil and paper, and the figure that shows them."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks.continual import report, tiers
from impala.config import values
from impala.config.schema import Config, EnvironmentConfig, TasksConfig
from impala.logdir import continual, plot

CONFIG = Config(
    environment=EnvironmentConfig(id="Catch"),
    tasks=TasksConfig(environments=("a", "b"), cycles=2),
    total_frames=400,
)

# Every hundred frames. Task a is trained from 0 to 100 and from 200 to 300, b in between and after.
RETURNS = {"a": [0.0, 8.0, 2.0, 10.0, 5.0], "b": [-1.0, 1.0, 4.0, 3.0, 4.0]}


def write(logdir: pathlib.Path, lines: list[tuple]) -> pathlib.Path:
    logdir.mkdir(exist_ok=True)
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


def test_forgetting_is_what_a_trained_task_loses_while_another_is_trained(
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


def test_what_a_restarted_learner_repeats_counts_once(tmp_path: pathlib.Path) -> None:
    lines = [("a", 0, [0.0]), ("a", 100, [1.0]), ("a", 200, [2.0]), ("a", 120, [5.0], "another")]
    curve = continual.read(write(tmp_path, lines)).curves["a"]
    assert (curve.frames.tolist(), curve.returns.tolist()) == ([0, 100, 120], [0, 1, 5])


def test_evaluators_may_report_in_any_order_and_tasks_may_change(tmp_path: pathlib.Path) -> None:
    lines = [("a", 0, [0.0]), ("a", 200, [2.0]), ("a", 100, [1.0]), ("of before", 100, [1.0])]
    run = continual.read(write(tmp_path, lines))
    assert list(run.curves) == ["a"]
    assert run.curves["a"].frames.tolist() == [0, 100, 200]
    plot.draw([tmp_path], tmp_path / "figure.png")  # while b was not evaluated yet


def test_normalised_is_0_for_random_and_1_for_the_reference() -> None:
    assert continual.normalised(-1.0, -1.0, 3.0) == 0.0
    assert continual.normalised(3.0, -1.0, 3.0) == 1.0
    assert continual.normalised(1.0, -1.0, 3.0) == 0.5


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


def test_what_cannot_be_drawn_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="no episode yet"):
        plot.draw([tmp_path], tmp_path / "figure.png")
    with pytest.raises(ValueError, match=r"use one of .*\.png"):
        plot.draw([story(tmp_path / "one")], tmp_path / "figure.doc")


def test_an_arm_scores_0_if_nothing_is_learned_and_1_if_all_is_as_alone(
    tmp_path: pathlib.Path,
) -> None:
    tier = tiers.Tier("catch", ("a", "b"), frames=100, cycles=2, flags=(), fresh=1)

    def run(arm: str, seed: int, a: list[float], b: list[float]) -> None:
        lines = [
            (task, 100 * i, [value])
            for task, values in (("a", a), ("b", b))
            for i, value in enumerate(values)
        ]
        write(report.logdir(tmp_path, arm, seed), lines)

    for seed in (1, 2):
        run("separate-0", seed, [0.0, 4.0, 4.0, 4.0, 4.0], [2.0] * 5)
        run("separate-1", seed, [0.0] * 5, [2.0, 6.0, 6.0, 6.0, 6.0])
        run("clear", seed, [0.0, 4.0, 4.0, 4.0, 4.0], [2.0, 6.0, 6.0, 6.0, 6.0])
        run("sequential", seed, [0.0, 4.0, 0.0, 4.0, 0.0], [2.0] * 5)
    runs = {
        (arm, seed): continual.read(report.logdir(tmp_path, arm, seed))
        for arm in ("separate-0", "separate-1", "clear", "sequential")
        for seed in (1, 2)
    }
    scores = report.scores(tier, runs, (1, 2))
    assert list(scores) == ["clear", "sequential"]
    assert scores["clear"].area.tolist() == pytest.approx([1.0, 1.0])
    # Task a's area is 2 of 3.5, task b's is none.
    assert scores["sequential"].area.tolist() == pytest.approx([2 / 3.5 / 2] * 2)
    assert scores["clear"].forgetting.tolist() == pytest.approx([0.0, 0.0])
    assert scores["sequential"].forgetting.tolist() == pytest.approx([0.5, 0.5])  # 1 and 0


def test_all_arms_learn_from_as_many_fresh_unrolls_and_play_every_task() -> None:
    tier = tiers.MINUTES
    for name, flags in tiers.arms(tier).items():
        assert flags[flags.index("--mix.fresh") + 1] == str(tier.fresh), name
        first = flags.index("--tasks.environments") + 1
        assert tuple(flags[first : first + len(tier.tasks)]) == tier.tasks, name
