"""The guard at the update: what is not finite moves nothing, and whose it is is found out."""

import collections
import dataclasses
import json
import pathlib
from typing import Any

import gymnasium as gym
import messages
import numpy as np
import pytest
import tensorflow as tf
import tree

from impala.config.schema import (
    AgentConfig,
    Config,
    LearnerConfig,
    OptimiserConfig,
    SacConfig,
)
from impala.finite import NotFiniteError
from impala.logdir import checkpoint
from impala.logdir.checkpoint import Checkpoint
from impala.parts import build
from impala.schedule import phases, tasks
from impala.types import Batch, StepType, Unroll
from learner.data.mix import Prepared, Provenance
from learner.data.replay import Origin, Replay
from learner.data.rows import Layout
from learner.fleet.accounts import Accounts
from learner.fleet.records import RefusedOutput
from learner.update import devices, output_judge
from learner.update.devices import columns
from learner.update.guard import Guard
from learner.update.learner import Learner, Refusal, Update

T, B = 4, 6
OBSERVATIONS = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
CHOICES = gym.spaces.Discrete(3)
BOX = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
SMALL = AgentConfig(hidden_sizes=(8,))
HUGE = 3e38


def config_of(algorithm: str, optimiser: str = "adam", **kwargs: Any) -> Config:
    values: dict[str, Any] = {"policy": "epsilon_greedy"} if algorithm == "q_learning" else {}
    return Config(
        algorithm=algorithm,
        sac=SacConfig(critic_hidden_sizes=(8,)),
        optimiser=OptimiserConfig(name=optimiser, learning_rate=0.01, epsilon=1e-4),
        **{
            "agent": dataclasses.replace(SMALL, **values),
            "learner": LearnerConfig(unroll_length=T),
            **kwargs,
        },
    )


def make(algorithm: str = "impala", optimiser: str = "adam", **kwargs: Any) -> Learner:
    return learner_of(config_of(algorithm, optimiser, **kwargs))


def learner_of(config: Config) -> Learner:
    agent = build.agent(config.agent, *spaces_of(config), seed=1)
    return Learner(build.algorithm(config.algorithm, config, agent), config, phases.make(config)[0])


def spaces_of(config: Config) -> tuple[gym.Space, gym.Space]:
    if config.environment.id == "Catch":
        return build.spaces(tasks.make(config.environment, config.tasks))
    return OBSERVATIONS, BOX if config.algorithm == "sac" else CHOICES


def spec_of(learner: Learner) -> Unroll:
    return build.unroll_spec(learner._algorithm.agent, *spaces_of(learner.config), T)


def batch_for(learner: Learner, seed: int = 0, size: int = B) -> Batch:
    rng = np.random.default_rng(seed)
    spec = spec_of(learner)
    unroll = tree.map_structure(
        lambda leaf: rng.normal(size=(T + 1, size, *leaf.shape[1:])).astype(leaf.dtype),
        spec._replace(core_state=()),
    )
    if learner.phase.algorithm != "sac":
        unroll.output.action[:] = rng.integers(0, 3, (T + 1, size))
    unroll.timestep.step_type[:] = StepType.MID
    unroll.timestep.discount[:] = 1.0
    unroll = unroll._replace(
        frames=np.full(size, T, np.int32), parameter_version=np.zeros(size, np.int64)
    )
    return Batch(unroll, np.zeros(size, np.bool_))


def poisoned(batch: Batch, unrolls: list[int], value: float = np.nan) -> Batch:
    batch = tree.map_structure(np.copy, batch)
    batch.unroll.timestep.reward[2, unrolls] = value
    return batch


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


# ----------------------------------------------------------------------------- one update


@pytest.mark.parametrize(
    ("algorithm", "optimiser"), [("impala", "rmsprop"), ("q_learning", "adam"), ("sac", "adam")]
)
def test_a_batch_that_is_not_finite_moves_nothing(algorithm: str, optimiser: str) -> None:
    """No variable, slot, count of steps, target network or temperature, bit for bit."""
    learner = make(algorithm, optimiser)
    assert isinstance(learner.update(batch_for(learner)), Update)
    before, counters = learner.variables(), learner.counters
    refusal = learner.update(poisoned(batch_for(learner, 1), [0, 1, 2, 3, 4, 5]))
    assert isinstance(refusal, Refusal)
    assert refusal.not_finite[0] == "the loss"
    assert_same(before, learner.variables())
    assert learner.counters == counters
    # And all of it does move with a good one: target networks, counts and all.
    assert isinstance(learner.update(batch_for(learner, 2)), Update)
    after = learner.variables()
    unmoved = [name for name, value in before.items() if value.tobytes() == after[name].tobytes()]
    if algorithm == "sac":
        assert not [name for name in unmoved if "baseline" not in name]
    if algorithm == "q_learning":  # whose target network and baseline stay
        assert not [name for name in unmoved if name.startswith("agent/") and "policy" in name]
    else:
        assert len(unmoved) < len(before) / 2


def test_variables_that_would_not_be_finite_are_moved_back() -> None:
    """The gradients are finite; the step is what is too large."""
    learner = make("impala", "rmsprop")
    optimiser = dataclasses.replace(learner.config.optimiser, learning_rate=3e38)
    learner.config = dataclasses.replace(learner.config, optimiser=optimiser)
    batch = batch_for(learner)
    batch.unroll.timestep.reward[:] = 100.0
    before = learner.variables()
    refusal = learner.update(batch)
    assert isinstance(refusal, Refusal)
    assert any(name.startswith("the new value of agent/") for name in refusal.not_finite)
    assert refusal.culprits == []
    assert_same(before, learner.variables())


def test_gradients_with_a_norm_beyond_float32_are_clipped() -> None:
    learner = make("impala", "rmsprop")
    before = learner.agent_values()
    batch = poisoned(batch_for(learner), [3], 3e18)
    batch.unroll.timestep.observation[:, 3] *= 100.0
    update = learner.update(batch)
    assert isinstance(update, Update)
    assert update.metrics["gradient_norm"] > np.sqrt(np.finfo(np.float32).max)
    assert all(np.isfinite(value).all() for value in learner.variables().values())
    assert any((a != b).any() for a, b in zip(before, learner.agent_values(), strict=True))


@pytest.mark.parametrize(
    ("algorithm", "optimiser"),
    [
        ("impala", "rmsprop"),
        ("sac", "adam"),
        pytest.param("q_learning", "adam", marks=pytest.mark.slow),
        pytest.param("critic", "adam", marks=pytest.mark.slow),
    ],
)
def test_an_update_that_xla_compiles_is_the_same(
    algorithm: str, optimiser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a checkpoint holds, and all metrics; half of the batch is replayed."""

    # XLA has another generator of random numbers: SAC's actions are drawn with this noise instead.
    def noise(shape: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return tf.sin(tf.cast(tf.reshape(tf.range(tf.reduce_prod(shape)), shape), tf.float32))

    monkeypatch.setattr(tf.random, "stateless_normal", noise)
    learners = [make(algorithm, optimiser)]
    monkeypatch.setattr(devices, "uses_xla", lambda config, device: True)
    learners.append(make(algorithm, optimiser, deterministic=True))  # which waits for XLA
    batch = batch_for(learners[0])._replace(is_replay=np.arange(B) % 2 == 1)
    one, other = (learner.update(batch) for learner in learners)
    assert isinstance(one, Update) and isinstance(other, Update)
    assert one.metrics.keys() == other.metrics.keys()
    for name, metric in one.metrics.items():
        assert other.metrics[name] == pytest.approx(metric, rel=1e-4, abs=1e-5), name
    before, values = make(algorithm, optimiser).variables(), learners[1].variables()
    for name, value in learners[0].variables().items():
        np.testing.assert_allclose(values[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert any((values[name] != value).any() for name, value in before.items())


# -------------------------------------------------------------------------- a run of them


class Versions:
    """In the place of a mix: what it was told."""

    shift = 0

    def shift_version(self, updates: int) -> None:
        self.shift += updates


class Scene:
    """A guard with a learner, a replay and accounts of two actors' messages."""

    def __init__(self, logdir: pathlib.Path, learner: Learner) -> None:
        self.learner, self.logdir = learner, logdir
        self.mix = Versions()
        self.blamed: list[str] = []
        self.layout = Layout(spec_of(learner))
        self.replay = Replay(self.layout, None, "fifo", capacity_frames=1000, memory=2**20)
        self.accounts = Accounts()
        self.sequence = 0
        self.refused_outputs: collections.deque[RefusedOutput] = collections.deque()
        self.seconds = 0.0
        self.accounts.join("good", 1, 0, 0)
        self.accounts.join("bad", 1, 0, 0)
        self.guard = Guard(
            logdir,
            self.mix,  # type: ignore[arg-type]
            self.replay,
            lambda actor, why: self.blamed.append(f"{actor}: {why}"),
            self.refused_outputs,
            clock=lambda: self.seconds,
        )

    def prepare(self, batch: Batch, fresh: int = B, weights: np.ndarray | None = None) -> Prepared:
        """Unrolls of which the first half are the bad actor's; those not fresh lie in replay."""
        unroll, half = batch.unroll, B // 2
        rows = self.layout.rows(unroll)
        self.replay.add(rows[:half], "bad")
        first = self.replay.add(rows[half:], "good") - half
        actors = ["bad"] * half + ["good"] * (B - half)
        self.sequence += 1
        parts = []
        for actor in ("bad", "good"):
            if count := actors[:fresh].count(actor):
                self.accounts.receive(actor, 1, self.sequence, count)
                parts.append(Provenance(actor, 1, self.sequence, count, None))
        return Prepared(
            Batch(unroll, np.arange(B) >= fresh),
            [Origin(actor, first + i) for i, actor in enumerate(actors)],
            parts,
            unrolls=fresh,
            frames=int(unroll.frames[:fresh].sum()),
            steps=T * fresh,
            arrivals=[],
            is_whole=True,
            episodes=int((unroll.timestep.step_type[1:, :fresh] == StepType.LAST).sum()),
            weights=weights,
        )

    def learn(
        self, batch: Batch, fresh: int = B, weights: np.ndarray | None = None
    ) -> tuple[Prepared, Update | None]:
        prepared, update = self.guard.learn(self.learner, self.prepare(batch, fresh, weights))
        for part in prepared.provenance:
            self.accounts.settle(*part.account)
        self.learner.count(
            unrolls=prepared.unrolls, frames=prepared.frames, steps=prepared.steps, seconds=0.0
        )
        return prepared, update

    def judge_outputs(self) -> bool:
        """As the training loop does: whether the variables were rolled back."""
        finding = self.guard.judge_outputs(self.learner)
        if finding is not None:
            self.guard.apply_finding(self.learner, finding)
        return finding is not None

    def save(self) -> None:
        saved = Checkpoint(self.learner.config, self.learner.counters, self.learner.variables(), {})
        checkpoint.save(self.logdir, saved, keep=3)


@pytest.fixture
def scene(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr("learner.update.guard._MOST_SKIPS", 3)
    monkeypatch.setattr("learner.update.guard._WINDOW_BATCHES", 10)
    return Scene(tmp_path, make("impala"))


def spoil(learner: Learner, value: float = 1e30) -> None:
    """What is left of a learner whose values have grown beyond all bounds."""
    for variable in learner._algorithm.agent.baseline_variables:
        variable.assign(np.full(variable.shape, value, np.float32))


@pytest.mark.parametrize(
    ("algorithm", "value"),
    # SAC draws its noise by an unroll's place in the batch, so that it has no such oracle.
    [("impala", HUGE), ("impala", np.nan), ("critic", np.nan), ("q_learning", np.nan)],
)
def test_the_others_are_learned_from_as_if_it_had_not_been_there(
    tmp_path: pathlib.Path, algorithm: str, value: float
) -> None:
    # Given two learners alike; one gets a batch with a poisoned unroll in it ...
    scene = Scene(tmp_path, make(algorithm))
    oracle = make(algorithm)
    good = batch_for(oracle)
    bad = poisoned(good, [1], value)
    _, update = scene.learn(bad)
    # ... and the other one a batch without it ...
    expected = oracle.update(columns(good, [0, 2, 3, 4, 5]))
    # ... then both are at the same place, and at the same update.
    assert update is not None and isinstance(expected, Update)
    for name, value_of_it in oracle.variables().items():
        np.testing.assert_allclose(
            scene.learner.variables()[name], value_of_it, rtol=1e-4, atol=1e-6, err_msg=name
        )
    assert scene.learner.counters.updates == oracle.counters.updates == 1
    assert scene.mix.shift == 0
    total = "critic/loss/total" if algorithm == "critic" else "loss/total"
    assert update.metrics[total] == pytest.approx(expected.metrics[total], rel=1e-4)


def test_culprits_alone_are_dropped_removed_and_blamed(scene: Scene) -> None:
    scene.learn(batch_for(scene.learner))
    held = len(scene.replay)
    prepared, update = scene.learn(poisoned(batch_for(scene.learner, 1), [0, 2]))
    assert update is not None
    # Five of six parts in the order of the queue: the bad actor's one good unroll is learned from.
    assert [(p.actor, p.unrolls, p.dropped) for p in prepared.provenance] == [
        *[("bad", 1, "not_finite"), ("bad", 1, None), ("bad", 1, "not_finite"), ("good", 3, None)]
    ]
    assert (prepared.unrolls, prepared.frames, prepared.steps) == (4, 4 * T, 4 * T)
    totals = scene.accounts.totals()
    assert (totals.received, totals.learned, totals.queued) == (2 * B, 2 * B - 2, 0)
    assert totals.dropped == {"not_finite": 2}
    assert scene.learner.counters == checkpoint.Counters(2, 2 * B - 2, (2 * B - 2) * T, 10 * T)
    assert len(scene.replay) == held + B - 2
    assert not {B, B + 2} & set(messages.held(scene.replay))
    (blame,) = scene.blamed
    assert blame.startswith("bad: 2 unrolls with which update 2 is not finite in the loss, the gr")
    assert (scene.guard.culprits, scene.guard.skipped_updates) == (2, 0)


def test_replayed_culprits_are_not_accounted_for_again(scene: Scene) -> None:
    scene.learn(batch_for(scene.learner))
    bad = poisoned(batch_for(scene.learner, 1), [0, 5])
    prepared, update = scene.learn(bad, fresh=3)
    assert update is not None
    assert scene.accounts.totals().dropped == {"not_finite": 1}
    assert scene.accounts.totals().learned == B + 2
    assert {blame.split(":")[0] for blame in scene.blamed} == {"bad", "good"}
    # Seen again in a batch that had been made before they were removed, they are left out again;
    # but their actors have been blamed for them.
    again = prepared._replace(provenance=[], batch=Batch(bad.unroll, np.ones(B, np.bool_)))
    _, update = scene.guard.learn(scene.learner, again)
    assert update is not None
    assert len(scene.blamed) == 2
    assert scene.accounts.totals().dropped == {"not_finite": 1}


def test_demonstrations_that_are_not_learned_from_do_not_count(scene: Scene) -> None:
    good = batch_for(scene.learner)
    drawn: dict[str, Any] = {"frames": B * T, "steps": B * T, "fresh": [(good.unroll, slice(None))]}
    for batch, left in ((good, B), (poisoned(good, [1]), B - 1)):
        prepared = scene.prepare(batch, fresh=0)._replace(**drawn, is_demonstrated=True)
        prepared, update = scene.guard.learn(scene.learner, prepared)
        assert update is not None
        assert (prepared.unrolls, prepared.frames, prepared.steps) == (0, left * T, left * T)
    spoil(scene.learner)
    prepared = scene.prepare(good, fresh=0)._replace(**drawn, is_demonstrated=True)
    prepared, update = scene.guard.learn(scene.learner, prepared)
    assert update is None
    assert (prepared.unrolls, prepared.frames, prepared.steps, prepared.fresh) == (0, 0, 0, ())


def test_a_batch_without_culprits_is_skipped(scene: Scene) -> None:
    scene.learn(batch_for(scene.learner))
    held = len(scene.replay)
    spoil(scene.learner)
    before = scene.learner.variables()
    prepared, update = scene.learn(batch_for(scene.learner, 1), fresh=4)
    assert update is None
    assert_same(before, scene.learner.variables())
    assert scene.accounts.totals().dropped == {"skipped_update": 4}
    assert (prepared.unrolls, prepared.frames, prepared.steps) == (0, 0, 0)
    assert scene.learner.counters.updates == 1
    assert scene.mix.shift == -1  # the version that the next batch moves is the same still
    assert len(scene.replay) == held + B
    assert scene.blamed == []
    assert scene.guard.in_doubt
    assert (scene.guard.culprits, scene.guard.skipped_updates) == (0, 1)


def test_too_many_skips_go_back_to_the_newest_checkpoint(
    scene: Scene,
) -> None:
    scene.learn(batch_for(scene.learner))
    scene.save()
    good = scene.learner.variables()
    scene.learn(batch_for(scene.learner, 1))
    spoil(scene.learner)
    for seed in range(3):
        scene.learn(batch_for(scene.learner, seed))
    assert_same(good, scene.learner.variables())
    assert scene.guard.rollbacks == 1
    # Version 1 was saved, 2 was published: what comes now is 3, for actors to take.
    assert scene.learner.counters.updates == 3
    assert scene.learner.counters.frames == 2 * B * T
    assert scene.mix.shift == -3 + 1
    assert not scene.guard.in_doubt
    _, update = scene.learn(batch_for(scene.learner, 4))
    assert update is not None
    totals = scene.accounts.totals()
    assert (totals.learned, totals.dropped) == (3 * B, {"skipped_update": 3 * B})


def test_the_second_time_ends_the_run_and_says_what_was_seen(scene: Scene) -> None:
    scene.learn(batch_for(scene.learner))
    scene.save()
    with pytest.raises(NotFiniteError) as caught:
        for _ in range(10):
            spoil(scene.learner)
            scene.learn(batch_for(scene.learner, 1))
    assert scene.guard.rollbacks == 1
    assert scene.guard.skipped_updates == 6
    for words in (
        "3 of the last 3",
        "bad (9), good (9)",
        "the loss",
        "learning_rate",
        "bad-updates",
    ):
        assert words in str(caught.value)


def test_without_a_checkpoint_the_run_ends_at_once(scene: Scene) -> None:
    spoil(scene.learner)
    with pytest.raises(NotFiniteError, match=r"no checkpoint to go back to.*--empty-replay"):
        for seed in range(3):
            scene.learn(batch_for(scene.learner, seed))


def test_batches_of_culprits_are_no_reason_to_go_back(scene: Scene) -> None:
    """Else one actor could end a run."""
    scene.learn(batch_for(scene.learner))
    for _ in range(12):
        scene.learn(poisoned(batch_for(scene.learner), list(range(B))))
    assert (scene.guard.rollbacks, scene.guard.skipped_updates) == (0, 12)
    assert scene.accounts.totals().dropped == {"not_finite": 12 * B}
    assert scene.learn(batch_for(scene.learner))[1] is not None


def test_variables_in_doubt_are_not_saved_at_an_end(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.learn(batch_for(scene.learner))
    good = scene.learner.variables()
    assert scene.guard.settle(scene.learner)  # there is no doubt, and nothing happens
    spoil(scene.learner)
    scene.learn(batch_for(scene.learner, 1))
    assert not scene.guard.settle(scene.learner)
    assert "are in doubt: not saved" in caplog.text
    scene.learner.assign(good)
    scene.save()
    spoil(scene.learner)
    assert scene.guard.settle(scene.learner)
    assert_same(good, scene.learner.variables())
    assert scene.learner.counters.updates == 2
    assert not scene.guard.in_doubt


# --------------------------------------------------------------- outputs that are refused


def refuse(scene: Scene, count: int = 1, version: int | None = None) -> None:
    version = scene.learner.counters.updates if version is None else version
    for _ in range(count):
        scene.refused_outputs.append(RefusedOutput("good", "range: output/baseline", version))


def test_actors_are_blamed_if_the_learners_outputs_are_good(
    scene: Scene,
) -> None:
    scene.learn(batch_for(scene.learner))
    assert not scene.judge_outputs()  # nothing was refused
    refuse(scene, 2)
    assert not scene.judge_outputs()
    assert scene.blamed == ["good: range: output/baseline"] * 2
    assert not scene.judge_outputs()
    assert len(scene.blamed) == 2


@pytest.mark.parametrize("algorithm", ["impala", "q_learning", "sac"])
def test_a_blank_batch_tells_whose_outputs_are_bad_at_first(
    tmp_path: pathlib.Path, algorithm: str
) -> None:
    """Else one actor alone could end the run."""
    scene = Scene(tmp_path, make(algorithm))
    scene.guard = Guard(
        *(tmp_path, scene.mix, scene.replay),  # type: ignore[arg-type]
        blame=lambda actor, why: scene.blamed.append(actor),
        refused_outputs=scene.refused_outputs,
        clock=lambda: scene.seconds,
        blank=output_judge.blank(spec_of(scene.learner)),
    )
    refuse(scene, 200)
    scene.seconds = 60.0
    refuse(scene)
    assert not scene.judge_outputs()
    assert scene.blamed == ["good"] * 201
    assert scene.learner.last_good is None
    if algorithm == "impala":
        spoil(scene.learner)
        refuse(scene)
        with pytest.raises(NotFiniteError, match="the run began with are too large"):
            scene.judge_outputs()


@pytest.mark.parametrize("value", [1e9, 1e30, np.nan])
def test_diverged_variables_go_back_to_a_good_checkpoint(
    scene: Scene, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a good checkpoint, and a newer one whose outputs are beyond the limits ...
    scene.learn(batch_for(scene.learner))
    scene.save()
    good = scene.learner.agent_values()
    spoil(scene.learner, 1e9)
    scene.learner.counters = scene.learner.counters._replace(updates=5)
    scene.save()
    # ... when actors send what the diverged variables make them compute ...
    spoil(scene.learner, value)
    refuse(scene)
    # ... then nobody is blamed, and the good one's variables are the next version.
    assert scene.judge_outputs()
    for one, other in zip(good, scene.learner.agent_values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (scene.learner.counters.updates, scene.mix.shift, scene.guard.rollbacks) == (6, 1, 1)
    assert "100% of the learner's own outputs are beyond limits too, at update 5" in caplog.text
    # What was still under way is nobody's fault either; what comes of the new version is.
    refuse(scene, version=5)
    assert not scene.judge_outputs()
    assert scene.blamed == []
    refuse(scene, version=6)
    assert not scene.judge_outputs()
    assert len(scene.blamed) == 1
    # A learner that starts again goes on from them, not from the newer checkpoint ...
    saved = checkpoint.load(scene.logdir)
    for one, other in zip(good, saved.agent_values, strict=True):
        np.testing.assert_array_equal(one, other)
    # ... and if they diverge again at once, then the run ends.
    spoil(scene.learner, 1e9)
    refuse(scene)
    with pytest.raises(NotFiniteError, match=r"has not helped.*optimiser\.learning_rate"):
        scene.judge_outputs()


def test_a_run_that_learned_nothing_does_not_stall(
    scene: Scene,
) -> None:
    refuse(scene, 200)
    assert not scene.judge_outputs()
    scene.seconds = 60.0
    refuse(scene)
    with pytest.raises(NotFiniteError, match=r"Lower optimiser\.learning_rate") as end:
        scene.judge_outputs()
    assert scene.blamed == []
    assert f"out of {scene.logdir / 'checkpoints'}" in str(end.value)


# ------------------------------------------------------------------- bad updates on disk


def written(scene: Scene) -> list[pathlib.Path]:
    return sorted((scene.logdir / "bad-updates").iterdir())


def test_a_bad_update_is_written_with_its_culprits(scene: Scene) -> None:
    for seed in range(3):
        scene.learn(batch_for(scene.learner, seed))
    bad = poisoned(batch_for(scene.learner, 9), [1, 4], HUGE)
    scene.learn(bad._replace(unroll=bad.unroll._replace(parameter_version=np.arange(B))))
    (path,) = written(scene)
    assert path.name == "000000000004.npz"
    with np.load(path, allow_pickle=False) as arrays:
        summary = json.loads(str(arrays["summary"]))
        rewards = arrays["batch/unroll/timestep/reward"]
    assert summary["culprits"] == [1, 4] and "the loss" in summary["not_finite"]
    assert [summary["origins"][i][0] for i in (1, 4)] == ["bad", "good"]
    assert np.abs(rewards[:, [1, 4]]).max() > 1e18 > np.abs(rewards[:, [0, 2, 3]]).max()


# --------------------------------------------------------- nothing that is not finite gets out


def test_nothing_that_is_not_finite_is_saved_or_loaded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene.save()
    good = scene.learner.variables()
    scene.learner._algorithm.agent.variables[0].assign_add(
        np.full(scene.learner._algorithm.agent.variables[0].shape, np.inf, np.float32)
    )
    with pytest.raises(NotFiniteError, match=r"No checkpoint is written: agent/000/.* holds inf"):
        scene.save()
    assert_same(good, dict(checkpoint.load(scene.logdir).variables))
