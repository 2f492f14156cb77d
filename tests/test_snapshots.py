"""Snapshots are made at fixed frames, and evaluated in order, whatever the evaluators' speed."""

import pathlib
from types import SimpleNamespace
from typing import Any

import messages
import numpy as np
import pytest

from impala.config import values
from impala.config.presets import PRESETS
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Counters
from impala.runtime.signals import EndRequest
from impala.types import Parameters
from learner import shutdown
from learner.evaluation import snapshots as snapshots_module
from learner.evaluation.snapshot_maker import SnapshotMaker
from learner.evaluation.snapshots import Snapshot, Snapshots
from learner.update.checkpoints import Resumed
from protos.impala.v1 import learner_pb2 as pb

LEARNER = 7
SPACES: Any = None  # none are stored


def waiting(*frames: int, num_tasks: int = 1) -> Snapshots:
    """Those of these frames wait."""
    snapshots = Snapshots(num_tasks, "auto")
    for number in frames:
        snapshots.add(Snapshot(pathlib.Path(str(number)), LEARNER, number, number, 0.0))
    return snapshots


def given(snapshots: Snapshots) -> tuple[int, int] | None:
    """Frames and task that the next evaluator gets."""
    found = snapshots.next()
    return found and (found[0].frames, found[1])


def test_snapshots_are_given_in_order_then_again() -> None:
    snapshots = waiting(0, 10, num_tasks=2)
    first_round = [(0, 0), (0, 1), (10, 0), (10, 1)]
    assert [given(snapshots) for _ in range(4)] == first_round
    snapshots.settle(LEARNER, 10, 0, 1.0)
    snapshots.settle(LEARNER, 0, 1, 1.0)
    assert [given(snapshots) for _ in range(2)] == [(0, 0), (10, 1)]  # whoever had them is dead?
    snapshots.add(Snapshot(pathlib.Path("20"), LEARNER, 20, 20, 0.0))
    assert given(snapshots) == (20, 0)
    for frames, task in ((0, 0), (10, 1), (20, 0), (20, 1)):
        assert not snapshots.are_over
        snapshots.settle(LEARNER, frames, task, 3.0)
        snapshots.end()
    assert given(snapshots) is None and snapshots.are_over
    assert [(each.frames, each.mean) for each in snapshots.take_evaluated()] == [
        *[(0, 2.0), (10, 2.0), (20, 3.0)]
    ]


def test_the_end_of_a_run_waits_for_evaluators_that_live(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Given one that evaluates, and then none."""
    now, heard = 0.0, 0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(shutdown, "time", clock)
    monkeypatch.setattr(snapshots_module, "time", clock)
    snapshots = waiting(0, 10)

    def check() -> None:
        nonlocal now, heard
        now += 50.0
        snapshots.settle(LEARNER, 0, 0, 1.0)
        if heard < 4:
            heard += 1
            snapshots.heard()

    shutdown.await_evaluations(snapshots, check, EndRequest())
    assert (heard, len(snapshots)) == (4, 1)
    assert "1 snapshots are not evaluated. They are kept" in caplog.text


def test_the_first_report_counts_and_those_of_others_do_not() -> None:
    snapshots = waiting(0)
    for incarnation, frames, task in ((LEARNER + 1, 0, 0), (LEARNER, 1, 0), (LEARNER, 0, 1)):
        assert not snapshots.awaits(incarnation, frames, task)
        snapshots.settle(incarnation, frames, task, 9.0)
    for mean in (1.0, 2.0):
        snapshots.settle(LEARNER, 0, 0, mean)
    assert [each.mean for each in snapshots.take_evaluated()] == [1.0]
    assert snapshots.take_evaluated() == []


def test_reported_snapshots_are_not_played_again() -> None:
    snapshots = Snapshots(1, "auto")
    snapshots.add(Snapshot(pathlib.Path("0"), messages.LEARNER, 3, 99, 0.0))
    service = messages.service(snapshots=snapshots)
    service.publish(Parameters(messages.LEARNER, 3, progress=0.0, frames=99, values=[]))
    assert given(snapshots) == (99, 0)
    report = pb.Evaluation(
        actor="e",
        learner_incarnation=messages.LEARNER,
        parameter_version=3,
        frames=99,
        episodes=[pb.Episode(episode_return=21, length=5)],
    )
    service.evaluators.report(report)
    assert given(snapshots) is None
    assert snapshots.awaits(messages.LEARNER, 99, 0)


@pytest.mark.parametrize(
    ("keep", "before", "after"),
    [("auto", False, True), ("always", True, True), ("never", False, False)],
)
def test_who_wants_them(keep: Any, before: bool, after: bool) -> None:
    snapshots = Snapshots(1, keep)
    assert snapshots.are_wanted == before
    snapshots.heard()
    assert snapshots.are_wanted == after


def test_a_resumed_run_wants_its_evaluations() -> None:
    snapshots = Snapshots(1, "auto")
    snapshots.settle(LEARNER, 0, 0, 1.0)  # as evaluations.jsonl says
    assert snapshots.are_wanted
    assert waiting(0).are_wanted  # one is on the disk


class Story:
    """A run of 1000 frames, 10 to an update; an evaluation every 300."""

    seconds_per_frame = 0.0

    def __init__(self, logdir: pathlib.Path, frames: int = 0, **changes: Any) -> None:
        settings = {"total_frames": 1000, "evaluator": {"every_frames": 300}}
        config = values.overlay(PRESETS["catch"][1], settings | changes)
        self.logdir, self.frames, self.config = logdir, frames, config
        self.snapshots = Snapshots(1, "always")
        phases: Any = SimpleNamespace(config=config, progress=lambda c: c.frames / 1000)
        resumed = Resumed(self._learner())
        self.maker = SnapshotMaker(logdir, resumed, phases, SPACES, self.snapshots, LEARNER)
        self.maker.make_if_due(resumed.learner)

    def _learner(self) -> Any:
        return SimpleNamespace(
            config=self.config,
            counters=Counters(
                updates=self.frames // 10,
                frames=self.frames,
                seconds=self.frames * self.seconds_per_frame,
            ),
            trained_by="impala",
            variables=lambda: {
                "agent/000/w:0": np.full(3, self.frames, np.float32),
                "optimiser/000/m:0": np.zeros(3, np.float32),
            },
        )

    def goes_on_to(self, frames: int, in_doubt: bool = False) -> "Story":
        while self.frames < frames:
            self.frames += 10
            iteration: Any = SimpleNamespace(learner=self._learner(), in_doubt=in_doubt)
            self.maker.take(iteration)
        return self

    @property
    def made(self) -> list[int]:
        """Frames of the snapshots on the disk, whose variables are these frames too."""
        saved = [checkpoint.load(p) for p in checkpoint.of_kind(self.logdir, "snapshots")]
        assert [each.agent_values[0][0] for each in saved] == [s.counters.frames for s in saved]
        assert all(list(each.variables) == ["agent/000/w:0"] for each in saved)
        return [each.counters.frames for each in saved]


def test_they_are_made_at_fixed_frames_and_at_the_end(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path)
    assert story.made == [0]
    assert story.goes_on_to(890).made == [0, 300, 600]
    assert story.goes_on_to(1000).made == [0, 300, 600, 900, 1000]
    story.maker.make_last(story._learner())  # there is one already
    assert story.made == [0, 300, 600, 900, 1000]
    assert len(story.snapshots) == 5


def test_they_are_made_at_the_ends_of_phases_and_blocks(tmp_path: pathlib.Path) -> None:
    phases = Story(tmp_path / "a", phases=["critic:450", "impala"])
    assert phases.goes_on_to(1000).made == [0, 300, 450, 600, 900, 1000]
    tasks = {"environments": ["Catch", 'Catch{"rows": 8}'], "frames": [250, 150], "cycles": 2}
    blocks = Story(tmp_path / "b", tasks=tasks)
    assert blocks.goes_on_to(800).made == [0, 250, 300, 400, 600, 650, 800]


def test_they_are_made_at_fixed_seconds_if_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Story, "seconds_per_frame", 0.5)
    by_both = Story(tmp_path / "a", evaluator={"every_seconds": 125.0, "every_frames": 300})
    assert by_both.goes_on_to(1000).made == [0, 250, 300, 500, 600, 750, 900, 1000]
    changes: dict[str, Any] = {"evaluator": {"every_seconds": 200.0, "every_frames": 0}}
    alone = Story(tmp_path / "b", **changes)
    assert alone.goes_on_to(780).made == [0, 400]
    again = Story(tmp_path / "b", frames=780, **changes)  # after a restart
    assert again.goes_on_to(1000).made == [0, 400, 800, 1000]


def test_variables_in_doubt_wait_until_they_are_good(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path).goes_on_to(290).goes_on_to(350, in_doubt=True)
    assert story.made == [0]
    assert story.goes_on_to(360).made == [0, 360]
    assert story.goes_on_to(600).made == [0, 360, 600]


def test_a_restart_keeps_past_snapshots_only(
    tmp_path: pathlib.Path,
) -> None:
    Story(tmp_path).goes_on_to(700)
    again = Story(tmp_path, frames=450)  # at the last checkpoint
    assert again.made == [0, 300]
    assert [given(again.snapshots) for _ in range(2)] == [(0, 0), (300, 0)]
    assert again.snapshots.awaits(LEARNER, 300, 0)
    assert again.goes_on_to(620).made == [0, 300, 600]


def test_training_waits_at_the_bound_and_says_so(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.evaluation.snapshot_maker._MOST_WAITING", 2)
    story = Story(tmp_path).goes_on_to(300)
    assert [story.maker.has_room() for _ in range(3)] == [False] * 3
    assert sum("Training waits for evaluators" in message for message in caplog.messages) == 1
    story.snapshots.settle(LEARNER, 0, 0, 1.0)
    assert story.maker.has_room()
    assert not story.goes_on_to(600).maker.has_room()
