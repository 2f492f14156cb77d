"""The best agent and milestones are kept beside the checkpoints that a run goes on from."""

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from impala.config import values
from impala.config.presets import PRESETS
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint, CheckpointError, Counters
from impala.types import Episode
from learner.evaluation.best_and_milestones import BestAndMilestones
from learner.evaluation.snapshots import Evaluated
from learner.update import named_variables
from learner.update.checkpoints import Resumed

SPACES: Any = None  # none are stored
PLAYED = {"tasks": [["Catch", {}]]}


class Story:
    """A run of 1000 frames, whose agent is the number of its updates."""

    def __init__(
        self,
        logdir: pathlib.Path,
        frames: int = 0,
        total_episodes: int = 0,
        **settings: Any,
    ) -> None:
        self.logdir = logdir
        self.config = values.overlay(
            PRESETS["catch"][1],
            {
                "total_frames": 1000,
                "total_episodes": total_episodes,
                "learner": {"milestones": 0} | settings,
            },
        )
        self.evaluated: list[Evaluated] = []
        self.frames = frames
        self.kept = BestAndMilestones(
            *(logdir, Resumed(self._learner()), SPACES, self._take_evaluated),
            settings=self.config.learner,
        )

    def _take_evaluated(self) -> list[Evaluated]:
        evaluated, self.evaluated = self.evaluated, []
        return evaluated

    def _learner(self) -> Any:
        updates = self.frames // 10
        return SimpleNamespace(
            config=self.config,
            # A run of two hours, with an episode every ten frames.
            counters=Counters(
                updates=updates,
                frames=self.frames,
                seconds=7.2 * self.frames,
                episodes=self.frames // 10,
            ),
            trained_by="impala",
            variables=lambda: {
                "agent/000/w:0": np.full(3, updates, np.float32),
                "optimiser/000/m:0": np.zeros(3, np.float32),
            },
        )

    def goes_on_to(
        self,
        frames: int,
        returns: list[float] | None = None,
        in_doubt: bool = False,
        rewards: tuple[float, int] = (0.0, 0),
    ) -> "Story":
        self.frames = frames
        episodes = [Episode(value, 1, 1, {}) for value in returns or []]
        arrivals = [SimpleNamespace(episodes=episodes, rewards=rewards)]
        step: Any = SimpleNamespace(
            learner=self._learner(),
            prepared=SimpleNamespace(arrivals=arrivals) if returns is not None else None,
            in_doubt=in_doubt,
        )
        self.kept.take(step)
        return self

    def is_evaluated(self, mean: float) -> "Story":
        """The agent as it is now is a snapshot that has been evaluated."""
        learner = self._learner()
        variables = named_variables.of_agent(learner.variables())
        made = Checkpoint(self.config, learner.counters, variables, {}, incarnation=1)
        path = checkpoint.save(self.logdir, made, keep=None, kind="snapshots")
        self.evaluated.append(Evaluated(path, self.frames, mean))
        return self

    @property
    def best(self) -> int | None:
        """Updates of the best agent."""
        try:
            saved = checkpoint.choose(self.logdir, "best")
        except CheckpointError:
            return None
        assert list(saved.variables) == ["agent/000/w:0"]  # all that is needed to play
        assert saved.agent_values[0][0] == saved.counters.updates
        return saved.counters.updates

    @property
    def score(self) -> dict[str, Any]:
        return json.loads((self.logdir / "best" / "score.json").read_text())


def test_the_agent_with_the_best_evaluation_is_kept(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path)
    assert story.goes_on_to(100).best is None
    assert story.is_evaluated(-5.0).goes_on_to(110).best == 10
    assert story.is_evaluated(3.5).goes_on_to(500).best == 11
    assert story.is_evaluated(3.0).is_evaluated(2.0).goes_on_to(600).best == 11
    assert story.score == {**PLAYED, "return": 3.5, "by": "evaluation", "frames": 110}
    assert not list((tmp_path / "snapshots").iterdir())
    assert len(list((tmp_path / "best").iterdir())) == 2  # it, and its score


def test_a_hundred_training_episodes_count_without_evaluator(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path)
    assert story.goes_on_to(100, [9.0] * 99).best is None  # too few
    assert story.goes_on_to(100, [9.0]).best is None  # at the next fiftieth of the run
    assert story.goes_on_to(120, []).best == 12
    assert story.score == {**PLAYED, "return": 9.0, "by": "training", "frames": 120}
    assert story.goes_on_to(200, [8.0] * 100).best == 12
    assert story.goes_on_to(300, [10.0] * 100).best == 30
    # As soon as there is one, evaluations alone count, though they may be lower.
    assert story.goes_on_to(350, []).is_evaluated(1.0).goes_on_to(400, []).best == 35
    assert story.goes_on_to(500, [11.0] * 100).best == 35


def test_a_run_that_ends_keeps_its_best_and_milestones(
    tmp_path: pathlib.Path,
) -> None:
    """Of 10 episodes in 100 frames, where 1000 frames would be allowed."""
    story = Story(tmp_path, total_episodes=10, milestones=2)
    assert story.goes_on_to(10, [9.0] * 100).best == 1
    for frames in range(20, 101, 10):
        story.goes_on_to(frames, [])
    kept = sorted(path.name[:12] for path in (tmp_path / "milestones").iterdir())
    assert [int(name) for name in kept] == [5, 10]


def test_a_run_that_is_started_again_remembers_its_best(tmp_path: pathlib.Path) -> None:
    Story(tmp_path).is_evaluated(5.0).goes_on_to(100)
    again = Story(tmp_path, frames=100)
    assert again.is_evaluated(4.0).goes_on_to(200).best == 0
    assert again.is_evaluated(6.0).goes_on_to(300).best == 20
    (tmp_path / "best" / "score.json").write_text("{")  # damaged: the next is the best
    assert Story(tmp_path, frames=300).is_evaluated(1.0).goes_on_to(400).best == 30


def test_variables_in_doubt_are_not_kept_until_they_are_good(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path, milestones=1)
    assert story.goes_on_to(1000, [5.0] * 100, in_doubt=True).best is None
    assert not (tmp_path / "milestones").exists()
    assert story.goes_on_to(1000).best == 100
    assert [path.name for path in (tmp_path / "milestones").iterdir()] == ["000000000100-000001"]


def test_milestones_are_kept_in_equal_shares_of_the_run(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path, milestones=4)
    for frames in (0, 240, 260, 270, 500, 800, 990):
        story.goes_on_to(frames)
    story = Story(tmp_path, frames=800, milestones=4)  # back at a checkpoint
    for frames in (900, 1000, 1010):
        story.goes_on_to(frames)
    kept = sorted(int(path.name.split("-")[0]) for path in (tmp_path / "milestones").iterdir())
    assert kept == [26, 50, 80, 100]
    assert checkpoint.choose(tmp_path, "26").counters.frames == 260
    assert not checkpoint.exists(tmp_path)  # a run does not go on from these


def test_milestones_are_kept_every_so_many_hours(tmp_path: pathlib.Path) -> None:
    story = Story(tmp_path, milestone_hours=0.5)  # 250 frames
    story.goes_on_to(240).goes_on_to(260).goes_on_to(270).goes_on_to(490).goes_on_to(510)
    kept = [path.name[:12] for path in checkpoint.of_kind(tmp_path, "milestones")]
    assert kept == ["000000000026", "000000000051"]


def test_milestones_after_the_checkpoint_are_kept_once(tmp_path: pathlib.Path) -> None:
    """Given a learner that was killed after a milestone, and the next one at its checkpoint."""
    Story(tmp_path, milestones=10).goes_on_to(90).goes_on_to(100)
    Story(tmp_path, frames=90, milestones=10).goes_on_to(110).goes_on_to(150)
    kept = [path.name for path in checkpoint.of_kind(tmp_path, "milestones")]
    assert [name.split("-")[0] for name in kept] == ["000000000011"]
