"""The training loop and what consumes it, without actors or a server."""

import contextlib
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tree
from services import WAIT

from impala.config.schema import AgentConfig, Config, LearnerConfig, TasksConfig
from impala.config.values import OptionError
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Counters
from impala.logdir.directory import LogDirectory, StorageError
from impala.parts import build
from impala.schedule import tasks
from impala.types import Batch, Episode, StepType
from learner import run
from learner.data.mix import Prepared, Provenance
from learner.data.replay import Origin
from learner.evaluation.evaluators import EvaluationReport
from learner.evaluation.snapshots import Snapshot
from learner.fleet.records import Records
from learner.plan import Plan, make_plan
from learner.service.service import LearnerService
from learner.update import devices
from learner.update.checkpoints import Checkpoints, resume
from learner.update.guard import Guard
from learner.update.peers import Peers, Standing
from learner.update.phases import Phases
from learner.update.training import Iteration, Training

T, B = 4, 2
CONFIG = Config(
    environment=dataclasses.replace(Config().environment, id="Catch"),
    agent=AgentConfig(hidden_sizes=(8,)),
    learner=LearnerConfig(unroll_length=T, checkpoint_seconds=300.0),
    phases=("critic:1000", "actor_critic"),  # a critic's run that an actor-critic will take over
    total_frames=10_000,
)


class Batches:
    """In the place of a mix: gives what it is told to, and then nothing."""

    def __init__(self) -> None:
        self.ready: list[Prepared] = []
        self.phases_begun = 0

    def get(self, timeout: float) -> Prepared | None:
        return self.ready.pop(0) if self.ready else None

    def shift_version(self, updates: int) -> None:
        pass

    def begin_phase(self, version: int, empties_replay: bool) -> None:
        self.phases_begun += empties_replay


class Scene:
    """A run's training loop and its checkpoints, by a clock that only moves when it is told to."""

    def __init__(self, logdir: pathlib.Path) -> None:
        self.logdir = logdir
        self.seconds = 0.0
        self.batches = Batches()
        spaces = build.spaces(tasks.make(CONFIG.environment, CONFIG.tasks))
        self.agent = build.agent(CONFIG.agent, *spaces)
        self.spec = build.unroll_spec(self.agent, *spaces, T)
        phases, records = Phases(CONFIG, self.agent), Records.begin(CONFIG)
        resumed = resume(logdir, phases, records.accounts, initial=None)
        self.guard = Guard(
            *(logdir, self.batches, None),  # type: ignore[arg-type]
            blame=records.quarantine.blame,
            refused_outputs=records.refused_outputs,
        )
        self.training = Training(phases, resumed.learner, self.batches, self.guard)  # type: ignore[arg-type]
        self.checkpoints = Checkpoints(
            *(logdir, resumed, spaces, records.accounts, None), clock=lambda: self.seconds
        )

    def prepared(self, frames: int = B * T, is_replay: bool = False) -> Prepared:
        """A good batch, after which so many frames count."""
        unroll = tree.map_structure(
            lambda leaf: np.zeros((T + 1, B, *leaf.shape[1:]), leaf.dtype),
            self.spec._replace(core_state=()),
        )
        unroll.timestep.step_type[:] = StepType.MID
        unroll.timestep.reward[:] = 1.0
        unroll = unroll._replace(
            frames=np.full(B, T, np.int32), parameter_version=np.zeros(B, np.int64)
        )
        batch = Batch(unroll, np.full(B, is_replay))
        return Prepared(batch, [Origin("a", None)] * B, [], B, frames, frames, [], True)

    def iterations(self, count: int, consume: Callable[[Iteration], None]) -> list[Iteration]:
        """Lets the loop make so many iterations, or fewer if the run ends."""
        made: list[Iteration] = []
        for iteration in self.training.iterations(until=lambda: len(made) == count):
            consume(iteration)
            made.append(iteration)
        return made

    def spoil(self) -> None:
        for variable in self.agent.baseline_variables:
            variable.assign(np.full(variable.shape, 1e30, np.float32))

    def saved(self) -> list[pathlib.Path]:
        return checkpoint.of_kind(self.logdir, "checkpoints")


def start(
    logdir: pathlib.Path, *, fresh: bool = False, init_from: pathlib.Path | None = None
) -> None:
    """Runs a learner."""
    listen = f"unix:{logdir / 'socket'}"
    options = run.Options(logdir=logdir, listen=listen, fresh=fresh, init_from=init_from)
    run.run_learner(CONFIG, options)


@pytest.fixture
def scene(tmp_path: pathlib.Path) -> Scene:
    return Scene(tmp_path / "run")


def test_errors_of_own_parts_are_not_blamed_on_the_logdir(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an environment or a network whose constructor finds one of its files missing."""

    def make_plan(*_: object, **__: object) -> Plan:
        raise FileNotFoundError(2, "No such file or directory", "levels.txt")

    monkeypatch.setattr(run, "make_plan", make_plan)
    monkeypatch.setattr(devices, "set_up", lambda config: None)  # TensorFlow has begun here
    with pytest.raises(FileNotFoundError, match=r"levels\.txt"):
        start(tmp_path / "run")


def test_nothing_is_moved_for_a_run_that_cannot_be_made(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given --fresh and an environment that no agent can play."""

    def make_plan(*_: object, **__: object) -> Plan:
        raise OptionError("no distribution is for such actions")

    monkeypatch.setattr(run, "make_plan", make_plan)
    monkeypatch.setattr(devices, "set_up", lambda config: None)  # TensorFlow has begun here
    scene.checkpoints.save(scene.training.learner)
    with pytest.raises(OptionError, match="such actions"):
        start(scene.logdir, fresh=True)
    assert checkpoint.exists(scene.logdir)


_HANGS = """
import time
import gymnasium as gym

class Hangs(gym.Env):
    def __init__(self):
        time.sleep(1000)
"""


def test_a_learner_whose_environment_hangs_ends(tmp_path: pathlib.Path) -> None:
    (tmp_path / "hanging.py").write_text(_HANGS)
    words = "learner catch --environment.id hanging:Hangs --actor.hang-seconds 8 --logdir run"
    ended = subprocess.run(
        [sys.executable, "-m", "impala", *words.split(), "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
        timeout=WAIT,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "no end of making the environments for" in ended.stdout
    assert "actor.hang_seconds times tasks is 8" in ended.stdout


def test_a_new_run_begins_with_nothing_of_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given what a run has kept that was killed before its first checkpoint."""
    best = scene.logdir / "best"

    def resumed(*arguments: object) -> None:
        raise InterruptedError("it has started")

    monkeypatch.setattr(run, "resume", resumed)
    monkeypatch.setattr(devices, "set_up", lambda config: None)  # TensorFlow has begun here
    best.mkdir(parents=True)
    scene.checkpoints.save(scene.training.learner)
    with pytest.raises(InterruptedError):
        start(scene.logdir)
    assert best.exists()  # it is of the run that goes on
    for path in scene.saved():
        checkpoint.delete(path)
    with pytest.raises(InterruptedError):
        start(scene.logdir)
    assert not best.exists()


def test_a_resumed_learner_waits_only_for_the_reports_that_it_lacks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a snapshot that was evaluated in one of two tasks before the learner stopped."""
    config = dataclasses.replace(
        CONFIG,
        tasks=TasksConfig(environments=("Catch", 'Catch{"rows": 9}')),
        learner=dataclasses.replace(CONFIG.learner, snapshots="always"),
    )
    evaluated: list[Snapshot] = []
    asked: list[tuple[Snapshot, int] | None] = []

    def train(made: run.Run, *given: object) -> str:
        if evaluated:
            asked.extend(made.snapshots.next() for _ in range(2))
            return ""
        made.snapshot_maker.make_if_due(made.training.learner)
        first = made.snapshots.next()
        assert first is not None and first[1] == 0
        evaluated.append(first[0])
        place = (first[0].incarnation, first[0].version, first[0].frames)
        made.evaluations.add(EvaluationReport("e", 0, *place, [Episode(1.0, 9, 9, {})]))
        return ""

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(devices, "set_up", lambda config: None)  # TensorFlow has begun here
    for _ in range(2):
        listen = f"unix:{tmp_path / 'socket'}"
        run.run_learner(config, run.Options(logdir=tmp_path / "run", listen=listen))
    assert asked == [(evaluated[0], 1)] * 2


def test_the_loop_reports_each_step_and_ends_with_the_run(scene: Scene) -> None:
    """Given a batch, a message that only goes to replay, and a batch with the run's last frames."""
    warm_up = Prepared(None, [], [Provenance("a", 1, 1, B, None)], B, B * T, B * T, [], True)
    seen: list[tuple[int, int]] = []

    def consume(iteration: Iteration) -> None:
        seen.append((iteration.learner.counters.updates, iteration.learner.counters.frames))

    scene.batches.ready = [scene.prepared(), warm_up]
    learned, remembered, nothing = scene.iterations(3, consume)
    assert seen == [(1, B * T), (1, 2 * B * T), (1, 2 * B * T)]  # each was consumed at once
    assert learned.update is not None and remembered.update is None and nothing.prepared is None
    assert [iteration.is_new for iteration in (learned, remembered, nothing)] == [True, True, False]
    assert list(remembered.provenance) == warm_up.provenance and not nothing.provenance
    assert not any(iteration.begins_phase for iteration in (learned, remembered, nothing))
    scene.batches.ready = [scene.prepared(frames=1000), scene.prepared(frames=10_000)]
    trained_by = []
    second, last = scene.iterations(9, lambda each: trained_by.append(each.learner.trained_by))
    assert second.begins_phase and second.learner.phase.algorithm == "actor_critic"
    assert trained_by == ["critic", "actor_critic"]  # snapshots say so
    assert not last.begins_phase and last.learner is second.learner
    assert scene.training.is_finished
    assert scene.iterations(9, consume) == []


class Second(Peers):
    """The second peer, of a first one with these counters."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self.is_first = False
        self.counters = counters

    def of_first(self, own: Any) -> Any:
        return self.counters if isinstance(own, Counters) else own


class Scripted(Peers):
    """The first of two peers, of which the other says what it is told to."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__()
        self.count = 2
        self.said = said

    def meet(self, own: Any) -> list[Any]:
        return [own, self.said.pop(0)]


def test_peers_learn_together_count_together_and_end_together(scene: Scene) -> None:
    def says(**changes: Any) -> list[Any]:
        idle = Standing(False, False, False, None, queued=3, lag=None, waited_seconds=0.5)
        return list(idle._replace(**changes))

    # Given a batch here, for which the other is ready in the third round, when it has counted what
    # it only adds to its replay, and which asks for the end later.
    script = [
        says(),
        *(says(has_news=True), [2, 30, 20, 1]),
        *(says(has_batch=True, lag=2.0), [2, 5, 5, 0]),
        says(ends=True),
    ]
    scene.training._peers = Scripted(script)
    scene.batches.ready = [scene.prepared()]
    waits, counts, learns = scene.iterations(9, lambda iteration: None)

    # Then the batch waits, and both count what both have.
    assert not waits.is_new and waits.prepared is None
    assert counts.is_new and counts.prepared is None and counts.update is None
    assert learns.update is not None and learns.prepared is not None
    assert learns.learner.counters[:4] == (1, B + 4, B * T + 25, B * T + 35)
    assert learns.learner.counters.episodes == 1
    assert [peer.queued for peer in learns.standings] == [0, 3]
    assert [peer.lag for peer in learns.standings] == [0.0, 2.0]
    assert not script and not scene.training.is_finished


@pytest.mark.parametrize("across_phases", [False, True])
def test_replay_begins_anew_with_a_phase_unless_it_is_kept(
    scene: Scene, across_phases: bool
) -> None:
    phases = scene.training._phases
    replay = dataclasses.replace(CONFIG.replay, across_phases=across_phases)
    phases.config = dataclasses.replace(CONFIG, replay=replay)
    scene.batches.ready = [scene.prepared(), scene.prepared(frames=1000), scene.prepared()]
    first, second, _ = scene.iterations(3, lambda iteration: None)
    assert not first.begins_phase and second.begins_phase
    assert scene.batches.phases_begun == (0 if across_phases else 1)


def test_doubtful_variables_are_not_saved_or_handed_on(
    scene: Scene,
) -> None:
    scene.batches.ready = [scene.prepared()]
    scene.iterations(1, scene.checkpoints.take)
    scene.checkpoints.save(scene.training.learner)
    good = scene.training.learner.agent_values()
    last_good = scene.training.learner.last_good
    assert last_good is not None

    def end_the_phase() -> None:
        # What counts is fresh and only goes to replay: it is not lost with the batch.
        scene.batches.ready = [scene.prepared(frames=1000, is_replay=True)]
        (iteration,) = scene.iterations(1, scene.checkpoints.take)
        assert iteration.update is None and iteration.begins_phase and not iteration.in_doubt

    def end_the_run() -> None:
        assert scene.training.settle()
        scene.checkpoints.save(scene.training.learner)

    for end in (end_the_phase, end_the_run):
        scene.spoil()
        scene.batches.ready = [scene.prepared()]
        scene.seconds += 1000.0  # a checkpoint would be due
        (iteration,) = scene.iterations(1, scene.checkpoints.take)
        assert iteration.update is None and iteration.in_doubt
        end()
        saved = checkpoint.load(scene.logdir)
        for value, expected in zip(saved.agent_values, good, strict=True):
            np.testing.assert_array_equal(value, expected)
        assert saved.counters == scene.training.learner.counters
        # The next algorithm's variables are tried on what the one before has learned from.
        assert scene.training.learner.last_good is last_good
    assert len(scene.saved()) == 3


@pytest.mark.parametrize("fails", ["", "save", "settle"])
def test_actors_hear_of_the_end_once_the_result_is_on_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Given a run at its last frame whose disk is full, or whose variables are in doubt."""
    said: list[bool] = []
    finish = LearnerService.finish

    def note(service: LearnerService) -> None:
        said.append(checkpoint.exists(tmp_path / "run"))
        finish(service)

    def train(made: run.Run, stop: object, closing: contextlib.ExitStack) -> str:
        made.training.learner.count(
            unrolls=1, frames=CONFIG.total_frames, steps=1, episodes=0, seconds=1.0
        )
        if made.server is not None:
            made.server.start()
            closing.callback(made.server.stop, 0.0)
        if fails == "save":
            monkeypatch.setattr(made.checkpoints, "save", _full)
        if fails == "settle":
            monkeypatch.setattr(made.training, "settle", lambda: False)
        return ""

    monkeypatch.setattr(LearnerService, "finish", note)
    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(devices, "set_up", lambda config: None)  # TensorFlow has begun here
    options = run.Options(logdir=tmp_path / "run", listen=f"unix:{tmp_path / 'socket'}")
    assert run.run_learner(CONFIG, options) == (1 if fails else 0)
    assert said == ([] if fails else [True])


def _full(learner: object) -> None:
    raise StorageError("no space left")


def test_a_peer_of_a_new_run_keeps_no_replay_of_another(
    scene: Scene, tmp_path: pathlib.Path
) -> None:
    """Given the checkpoint and replay of a run whose first peer has lost everything."""
    scene.batches.ready = [scene.prepared()]
    scene.iterations(1, scene.checkpoints.take)
    scene.checkpoints.save(scene.training.learner)
    with LogDirectory(scene.logdir) as directory, contextlib.ExitStack() as closing:
        directory.replay.mkdir()
        for first, is_kept in ((scene.training.learner.counters, True), (Counters(), False)):
            group = Second(first)
            options = run.Options(logdir=scene.logdir, listen="127.0.0.1:0")
            plan = make_plan(CONFIG)
            run.build_state(CONFIG, options, plan, group, directory, None, closing)
            assert directory.replay.exists() == is_kept
