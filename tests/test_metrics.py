"""Rows of telemetry: means since the last row, speeds, and the three places they are written to."""

import io
import json
import pathlib

import numpy as np
import pytest
import rich.console
import tensorflow as tf

from impala.logdir.checkpoint import Counters
from impala.types import Episode
from learner.telemetry import images
from learner.telemetry.console import Console
from learner.telemetry.console import _line as console_line
from learner.telemetry.files import JsonLines, TensorBoard
from learner.telemetry.telemetry import Telemetry


def _episode(value: float) -> Episode:
    return Episode(episode_return=value, length=10, frames=40, info={"lives": 3.0})


def test_a_row_holds_the_means_since_the_last_row() -> None:
    telemetry = Telemetry()
    telemetry.begin(Counters())
    telemetry.interval.mean("loss/total", 1.0)
    telemetry.interval.mean("loss/total", 3.0)
    telemetry.policy_lag(np.array([0, 90, 1, 5]), np.array([False, True, False, False]))
    telemetry.policy_lag(np.array([2, 2, 2]), np.zeros(3, bool))
    telemetry.episodes("Catch", [_episode(1.0), _episode(-1.0), _episode(3.0)])
    telemetry.actor("a", "Catch", elapsed=2.0, waited=0.5)
    telemetry.actor("b", "Catch", elapsed=2.0, waited=1.5)
    row, _ = telemetry.end(Counters(updates=2, frames=400, steps=100), {"ingest/depth": 7}).row()
    assert row["loss/total"] == 2.0
    assert (row["policy_lag/mean"], row["policy_lag/p50"], row["policy_lag/max"]) == (2.0, 2.0, 5.0)
    assert row["replay/policy_lag/mean"] == 90.0  # replayed unrolls have a lag of their own
    assert row["episode/Catch/return"] == row["episode/Catch/return_recent"] == 1.0
    assert (row["episode/Catch/return_min"], row["episode/Catch/return_max"]) == (-1.0, 3.0)
    assert row["episode/Catch/return_deviation"] == pytest.approx(np.std([1.0, -1.0, 3.0]))
    assert row["episode/Catch/length"] == row["episode/Catch/length_max"] == 10.0
    assert row["episode/Catch/info/lives"] == 3.0
    assert row["actor/wait_share"] == 0.5
    assert row["episodes/Catch"] == 3
    assert row["ingest/depth"] == 7
    ratio = row["speed/frames_per_second"] / row["speed/steps_per_second"]
    assert ratio == pytest.approx(4.0)

    after, _ = telemetry.end(Counters(updates=2, frames=400, steps=100), {}).row()
    assert "loss/total" not in after and "policy_lag/max" not in after
    assert after["speed/frames_per_second"] == 0.0
    assert after["episode/Catch/return_recent"] == 1.0  # the last hundred episodes, not this row's


def test_the_share_that_actors_wait_is_a_mean_over_actors() -> None:
    """Given one of three that sends many small messages, or claims to have waited for ever."""
    for messages, seconds in ((1000, 0.001), (1, 1e9)):
        telemetry = Telemetry()
        for _ in range(messages):
            telemetry.actor("loud", "Catch", elapsed=seconds, waited=seconds)
        for name in ("a", "b"):
            telemetry.actor(name, "Catch", elapsed=3.0, waited=0.0)
            telemetry.actor(name, "Catch", elapsed=1.0, waited=1.0)
        telemetry.actor("new", "Catch", elapsed=0.0, waited=0.0)
        row, _ = telemetry.end(Counters(), {}).row()
        assert row["actor/wait_share"] == pytest.approx((1.0 + 0.25 + 0.25) / 3)
    assert "actor/wait_share" not in telemetry.end(Counters(), {}).row()[0]


def test_rows_say_what_environments_take_where_that_is_known() -> None:
    """Given an actor with slow environments, one with fast ones, and one that does not say it."""
    telemetry = Telemetry()
    telemetry.actor("slow", "Catch", 2.0, 0.0, pace=(2.0, 20))
    telemetry.actor("fast", "Catch", 2.0, 0.0, pace=(1.0, 100))
    telemetry.actor("unknown", "Catch", 2.0, 0.0)
    row, _ = telemetry.end(Counters(), {}).row()
    assert row["actor/environment_share"] == pytest.approx((1.0 + 0.5) / 2)
    assert row["environment/step_seconds"] == pytest.approx(3.0 / 120)
    telemetry.actor("unknown", "Catch", 2.0, 0.0)
    row, _ = telemetry.end(Counters(), {}).row()
    assert not {"actor/environment_share", "environment/step_seconds"} & row.keys()


def test_the_console_says_when_environments_are_the_limit() -> None:
    row = {"frames": 480.0, "progress": 0.8, "speed/frames_per_second": 1.0}
    row |= {"actor/environment_share": 0.97, "environment/step_seconds": 0.00512}
    said = "environments take 97% of the actors' time, 5.12 ms a step: less"
    assert console_line(row | {"learner/wait_share": 0.9}, "less").endswith(said)
    assert said not in console_line(row | {"learner/wait_share": 0.4}, "less")
    row |= {"actor/environment_share": 0.4, "learner/wait_share": 0.9}
    assert "environments" not in console_line(row, "less")


def test_rows_say_by_task_what_was_learned_and_dropped() -> None:
    telemetry = Telemetry()
    telemetry.begin(Counters())
    telemetry.unrolls("Catch", 6, 1, None)
    telemetry.unrolls("Catch", 2, 5, None)
    telemetry.unrolls("Catch", 3, 9, "policy_lag")
    telemetry.lengths("Catch", [_episode(1.0)] * 2, is_dropped=False)
    telemetry.lengths("Catch", [_episode(1.0)._replace(length=40)], is_dropped=True)
    telemetry.actor("a", "Catch", elapsed=2.0, waited=0.5)
    row, _ = telemetry.end(Counters(), {}).row()
    of_task = {name: value for name, value in row.items() if name.startswith("task/")}
    assert of_task == {
        "task/Catch/unrolls/learned": 8,
        "task/Catch/unrolls/dropped/policy_lag": 3,
        "task/Catch/policy_lag/learned": 2.0,
        "task/Catch/policy_lag/dropped": 9.0,
        "task/Catch/episode_length/learned": 10.0,
        "task/Catch/episode_length/dropped": 40.0,
        "task/Catch/wait_seconds": 0.5,
    }
    telemetry.unrolls("Catch", 1, 0, None)
    row, _ = telemetry.end(Counters(), {}).row()
    assert row["task/Catch/unrolls/learned"] == 9  # a total
    assert "task/Catch/episode_length/dropped" not in row  # a mean of this row


def test_rows_reach_json_lines_tensorboard_and_console(tmp_path: pathlib.Path) -> None:
    telemetry = Telemetry()
    telemetry.begin(Counters())
    row, _ = telemetry.end(Counters(updates=1, frames=123, steps=40), {"loss/total": 0.25}).row()

    for _ in range(2):  # the second time is a resumed run: it goes on in the same file
        lines = JsonLines(tmp_path)
        lines.write(row)
        lines.close()
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["frames"] for entry in written] == [123, 123]
    assert written[0]["loss/total"] == 0.25

    board = TensorBoard(tmp_path)
    board.write(row)
    board.write_histograms({"action/move": np.array([0, 1, 1, 2])}, row["frames"])
    board.write_images({"observation": np.full([4, 64, 32, 3], 7, np.uint8)}, row["frames"])
    board.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    in_file = {
        value.tag: (event.step, tf.make_ndarray(value.tensor) if value.tensor.dtype else value)
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    step, scalar = in_file["loss/total"]
    assert (step, scalar.simple_value) == (123, 0.25)
    step, buckets = in_file["histogram/action/move"]  # of each bucket: left, right, count
    assert (step, buckets[:, 2].sum()) == (123, 4)
    step, (width, height, *pictures) = in_file["image/observation"]
    assert (step, int(width), int(height), len(pictures)) == (123, 32, 64, 4)
    np.testing.assert_array_equal(tf.io.decode_png(pictures[3]), np.full([64, 32, 3], 7))


def test_images_are_the_newest_observations_of_one_environment() -> None:
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (6, 2, 84, 80), np.uint8)
    board = rng.integers(0, 2, (6, 2, 10, 5, 4)).astype(bool)
    shown = images.of_observations({"seen": {"grey": grey, "board": board}, "speed": grey * 0.5})
    assert {*shown} == {"observation/seen/grey", "observation/seen/board"}
    np.testing.assert_array_equal(shown["observation/seen/grey"][..., 0], grey[2:, 0])
    # What is small is enlarged, on is white, and channels are beside each other.
    enlarged = shown["observation/seen/board"]
    assert enlarged.shape == (4, 70, 4 * 5 * 7, 1) and enlarged.dtype == np.uint8
    np.testing.assert_array_equal(enlarged[3, ::7, 35:70:7, 0], 255 * board[5, 0, :, :, 1])


def test_the_console_says_how_many_episodes_are_left() -> None:
    row = {"frames": 480.0, "progress": 0.8, "speed/frames_per_second": 1.0}
    line = console_line(row | {"learner/wait_share": 0.5})
    assert line.startswith("frames 480 (80.0%)  1 frames/s  left 2 min  ")


def test_the_console_gives_advice_once() -> None:
    row = {
        **{"frames": 1.0, "progress": 0.1, "speed/frames_per_second": 1.0},
        **{"learner/wait_share": 0.9, "actor/environment_share": 0.8},
        "environment/step_seconds": 0.3,
    }
    console = Console(rich.console.Console(file=(file := io.StringIO())), advice="run faster")
    console.write(row)
    console.write(row)
    first, second = file.getvalue().splitlines()
    assert first == f"{second}: run faster" and "environments take 80%" in second


def test_the_console_writes_lines_or_a_view_on_a_terminal(
    tmp_path: pathlib.Path,
) -> None:
    telemetry = Telemetry()
    telemetry.begin(Counters())
    telemetry.sample("policy_lag", np.arange(11.0))
    row, _ = telemetry.end(
        Counters(updates=1, frames=500),
        {"loss/total": 0.25, "actor/active": 1, "progress": 0.5},
    ).row()
    for terminal in (False, True):
        path = tmp_path / f"console-{terminal}"
        with open(path, "w", encoding="utf-8") as file:
            console = Console(
                rich.console.Console(
                    file=file, force_terminal=terminal, color_system=None, width=150
                ),
            )
            console.write(row)
            console.close()
        text = path.read_text()
        assert "frames 500 (50.0%)" in text
        assert "nan" not in text  # what is not known yet is not said
        if terminal:
            (lags,) = {line for line in text.splitlines() if line.startswith("policy_lag")}
            assert lags.split()[1:] == ["max=10", "mean=5", "p10=1", "p50=5", "p90=9"]
        else:
            assert len(text.splitlines()) == 1
            assert "\x1b" not in text
