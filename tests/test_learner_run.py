"""The wiring of a learner, without actors: when checkpoints are written, and of what."""

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import tree

from impala.config.schema import AgentConfig, Config, LearnerConfig
from impala.logdir import checkpoint
from impala.logdir.directory import LogDirectory
from impala.types import Batch, StepType
from learner.data.mix import Origin, Prepared
from learner.run import _Run

T, B = 4, 2


class Stop:
    """In the place of signals: the end is asked for after so many looks."""

    cause = "a test"

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class NoServer:
    """In the place of a server that nobody has called."""

    def check(self) -> None:
        pass

    def stop(self, _grace_seconds: float) -> None:
        pass

    def refusals(self) -> dict[str, int]:
        return {}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> Iterator[_Run]:
    """A critic's run that an actor-critic will take over."""
    config = Config(
        environment=dataclasses.replace(Config().environment, id="Catch"),
        agent=AgentConfig(hidden_sizes=(8,)),
        learner=LearnerConfig(unroll_length=T, checkpoint_seconds=300.0),
        phases=("critic:1000", "actor_critic"),
        total_frames=10_000,
    )
    with LogDirectory(tmp_path / "run", fresh=False) as directory:
        made = _Run(config, directory, Stop(3), False, None, None, rows_to_log=True)  # type: ignore[arg-type]
        made._server = NoServer()  # type: ignore[assignment]
        yield made
        made.close()


def good_batch(run: _Run) -> Batch:
    spec = run._service._validator._spec
    unroll = tree.map_structure(
        lambda leaf: np.zeros((T + 1, B, *leaf.shape[1:]), leaf.dtype), spec._replace(core_state=())
    )
    unroll.timestep.step_type[:] = StepType.MID
    unroll.timestep.reward[:] = 1.0
    unroll = unroll._replace(
        frames=np.full(B, T, np.int32), parameter_version=np.zeros(B, np.int64)
    )
    return Batch(unroll, np.zeros(B, np.bool_))


def learn(run: _Run) -> None:
    batch = good_batch(run)
    prepared = Prepared(batch, [Origin("a", None)] * B, [], B, B * T, B * T, [])
    _, update = run._guard.learn(run._learner, prepared)
    run._learner.count(unrolls=B, frames=B * T, steps=B * T, seconds=1.0)
    if update is not None:
        run._due.updated()


def spoil(run: _Run) -> None:
    for variable in run._agent.baseline_variables:
        variable.assign(np.full(variable.shape, 1e30, np.float32))


def test_the_first_checkpoint_is_not_kept_waiting_by_actors_that_send_nothing_more(
    run: _Run,
) -> None:
    seconds = [0.0]
    run._due = checkpoint.Due(300.0, has_one=False, clock=lambda: seconds[0])
    run._mix.get = lambda timeout: None  # type: ignore[method-assign]
    seconds[0] = 301.0
    assert list(run.updates()) == []
    assert not checkpoint.exists(run._logdir)  # nothing was learned
    seconds[0] = 0.0
    learn(run)
    seconds[0] = 30.0
    run._stop.looks = 3  # type: ignore[attr-defined]
    assert list(run.updates()) == []
    assert checkpoint.load(run._logdir).counters.updates == 1
    # It is not written over and over, which would push the ones before it out.
    seconds[0] = 1000.0
    run._stop.looks = 3  # type: ignore[attr-defined]
    assert list(run.updates()) == []
    assert len(checkpoint._saved(run._logdir / "checkpoints")) == 1


def test_variables_in_doubt_are_neither_saved_at_an_end_nor_handed_to_the_next_phase(
    run: _Run,
) -> None:
    learn(run)
    run._save()
    good = run._learner.agent_values()
    last_good = run._learner.last_good
    assert last_good is not None
    for end in (run._next_phase, lambda: run.end("exit")):
        spoil(run)
        learn(run)
        assert run._guard.in_doubt
        end()
        saved = checkpoint.load(run._logdir)
        for value, expected in zip(saved.agent_values, good, strict=True):
            np.testing.assert_array_equal(value, expected)
        assert saved.counters == run._learner.counters
        # The next algorithm's variables are tried on what the one before has learned from.
        assert run._learner.last_good is last_good
    assert len(checkpoint._saved(run._logdir / "checkpoints")) == 3
