"""Environments in processes of their own: what one of them does wrong, the others do not notice."""

import errno
import json
import multiprocessing.process
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import counting
import faulty
import numpy as np
import pytest
import services
from faulty import Do

from impala import environments
from impala.config.schema import ActorConfig, EnvironmentConfig
from impala.environments import processes
from impala.environments.base import Environment
from impala.environments.episodes import EpisodeStatistics
from impala.environments.failure import EnvironmentFailed
from impala.runtime.backoff import Backoff
from impala.types import EnvironmentFault, StepType, TimeStep

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def make(num_envs: int, first: int = 0, seconds: float = 30.0, **kwargs: Any) -> Environment:
    max_bytes = kwargs.pop("max_bytes", 0)
    return environments.make(
        EnvironmentConfig(id=faulty.ID, kwargs=json.dumps(kwargs), vectorization="async"),
        num_envs,
        actor=ActorConfig(hang_seconds=10.0 * seconds, max_environment_bytes=max_bytes),
        first=first,
    )


Row = tuple[list[int], float, float, int]  # observation, reward, discount, step type


def row(timestep: TimeStep, i: int) -> Row:
    """What environment i says."""
    return (
        timestep.observation[i].tolist(),
        float(timestep.reward[i]),
        float(timestep.discount[i]),
        int(timestep.step_type[i]),
    )


def expected(seed: int) -> Iterator[Row]:
    """All rows of an environment that counts, from its seed on."""
    episode = 0
    while True:
        yield [seed, episode, 0], 0.0, 1.0, FIRST
        length = counting.episode_length(seed, episode)
        for step in range(1, length):
            yield [seed, episode, step], float(step), 1.0, MID
        discount = float(counting.ends_by_time_limit(seed, episode))
        yield [seed, episode, length], float(length), discount, LAST
        episode += 1


class Witness:
    """Plays, and checks that all environments count on, but for those that are said to fail."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.timestep = environment.reset(7)
        self._start(range(environment.num_envs))

    def _start(self, which: Sequence[int]) -> None:
        if not hasattr(self, "_rows"):
            self._rows: list[Iterator[Row]] = [iter(()) for _ in range(self._environment.num_envs)]
        for i in which:
            self._rows[i] = expected(int(self.timestep.observation[i, 0]))
            assert row(self.timestep, i) == next(self._rows[i])

    def step(self, *, fails: Sequence[int] = (), begins: Sequence[int] = (), **do: Do) -> Any:
        """One step; `e2=Do.KILL` is what environment 2 is told, which `fails`; `begins` is where a
        new process is expected to say FIRST.
        """
        before = [row(self.timestep, i) for i in range(self._environment.num_envs)]
        action = np.zeros(self._environment.num_envs, np.int64)
        for name, what in do.items():
            action[int(name[1:])] = what
        self._environment.send(action)
        step = self._environment.recv()
        self.timestep = step.timestep
        for i, rows in enumerate(self._rows):
            if i in fails:
                assert row(self.timestep, i) == (before[i][0], 0.0, 1.0, LAST)
                assert step.frames[i] == 1
            elif i not in begins:
                assert row(self.timestep, i) == next(rows)
                assert (step.frames[i] > 0) == (self.timestep.step_type[i] != FIRST)
        for i in begins:
            assert self.timestep.step_type[i] == FIRST and step.frames[i] == 0
            assert self.timestep.observation[i, 0] != before[i][0][0]  # another seed
        self._start(begins)
        return step

    def until(self, i: int, wanted: Callable[[int], bool]) -> None:
        """Plays until environment i's step type is wanted."""
        while not wanted(int(self.timestep.step_type[i])):
            assert not self.step().faults


def workers(environment: Environment) -> list[Any]:
    return environment._environment._workers  # type: ignore[attr-defined]


def test_one_that_crashes_is_replaced_and_the_others_count_on(tmp_path: pathlib.Path) -> None:
    crashes = (
        (Do.RAISE, "KeyError: 'gear'"),
        (Do.EXIT, "its process ended with status 3"),
        (Do.KILL, "its process was killed by SIGKILL"),
        (Do.SEGFAULT, "its process was killed by SIGSEGV"),
        (Do.NOT_FINITE, f"ValueError: {faulty.ID}: the reward is nan"),
    )
    with closing(make(6, first=10)) as environment:
        witness = Witness(environment)
        for i, (crash, detail) in enumerate(crashes):
            witness.until(i, lambda step_type: step_type != LAST)
            do: dict[str, Any] = {f"e{i}": crash}
            step = witness.step(fails=[i], **do)
            (fault,) = step.faults
            expected = EnvironmentFault(10 + i, "crashed", f"fault 1, {detail}", fault.where)
            assert fault == expected
            assert fault.where.endswith(", in step") == (crash in (Do.RAISE, Do.NOT_FINITE))
            assert not witness.step(begins=[i]).faults
        for _ in range(20):
            assert not witness.step().faults
        # Two at once, one of them for the second time.
        witness.until(0, lambda step_type: step_type == FIRST)
        fails = [i for i in (0, 5) if witness.timestep.step_type[i] != LAST]
        kills: dict[str, Any] = {f"e{i}": Do.KILL for i in fails}
        step = witness.step(fails=fails, **kills)
        assert [fault.environment for fault in step.faults] == [10 + i for i in fails]
        assert step.faults[0].detail == "fault 2, its process was killed by SIGKILL"
        witness.step(begins=fails)
        for _ in range(10):
            witness.step()


def test_hanging_ones_are_killed_with_their_children(
    tmp_path: pathlib.Path,
) -> None:
    children = tmp_path / "children"
    with closing(make(5, seconds=5.0, children=str(children))) as environment:
        witness = Witness(environment)
        while (witness.timestep.step_type[:4] == LAST).any():
            witness.step()
        witness.step(e1=Do.START_A_CHILD)
        child = int(children.read_text())
        while (witness.timestep.step_type[:4] == LAST).any():
            witness.step()
        old = [worker._process.pid for worker in workers(environment)]
        start = time.monotonic()
        hang: dict[str, Any] = {f"e{i}": Do.HANG for i in range(1, 4)}
        step = witness.step(fails=range(4), e0=Do.HANG_IN_C, **hang)
        assert time.monotonic() - start < 15.0  # all within one deadline, not one after another
        detail = "fault 1, no answer within 5 s"
        assert step.faults == [EnvironmentFault(i, "hung", detail) for i in range(4)]
        services.wait_for("their ends", lambda: not any(map(services.is_alive, [*old[:4], child])))
        assert services.is_alive(old[4])
        witness.step(begins=range(4))
        for _ in range(10):
            witness.step()


def test_a_death_between_episodes_leaves_only_a_fault() -> None:
    """Where FIRST is due it comes from the new process: no LAST follows a LAST."""
    with closing(make(2)) as environment:
        witness = Witness(environment)
        witness.until(1, lambda step_type: step_type == LAST)
        os.kill(workers(environment)[1]._process.pid, signal.SIGKILL)
        step = witness.step(begins=[1])
        assert [fault.environment for fault in step.faults] == [1]
        for _ in range(10):
            assert not witness.step().faults


def test_one_that_fails_to_start_is_tried_again(tmp_path: pathlib.Path) -> None:
    failures = tmp_path / "failures"
    failures.write_text("2")
    with closing(make(1, failures=str(failures))) as environment:
        witness = Witness(environment)
        faults = witness.step().faults
        why = "OSError: no such game server"
        assert [fault.detail for fault in faults] == [f"fault 1, {why}", f"fault 2, {why}"]
        assert not any(fault.cuts for fault in faults)  # the step after them may be LAST
        # It has made a step: what fails from now on begins a new row.
        failures.write_text("3")
        witness.until(0, lambda step_type: step_type == LAST)
        assert len(witness.step(begins=[0]).faults) == 3


def test_one_that_never_starts_ends_the_actor_with_its_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_BACKOFF", Backoff(0.0, 0.0))
    failures = tmp_path / "failures"
    failures.write_text("1000")
    with (
        closing(make(1, first=4, failures=str(failures))) as environment,
        pytest.raises(RuntimeError, match=r"environment 4 of faulty.*no such game.*10 times in a"),
    ):
        environment.reset(0)
    assert failures.read_text() == "990"


def test_the_reason_is_why_it_failed_and_not_why_it_could_not_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_BACKOFF", Backoff(0.0, 0.0))
    config = EnvironmentConfig(id="looked:Unmade", vectorization="async")
    with (
        closing(environments.make(config, 1)) as environment,
        pytest.raises(EnvironmentFailed) as failed,
    ):
        environment.reset(0)
    assert failed.value.error.startswith("KeyError: 'gear'")


def test_a_process_that_cannot_be_started_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = iter([multiprocessing.process.BaseProcess.start])

    def start(process: multiprocessing.process.BaseProcess) -> None:
        if (really := next(starts, None)) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        really(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with closing(make(2)) as environment:
        with pytest.raises(EnvironmentFailed, match=r"OSError: .*Too many open files"):
            environment.reset(0)
        first = workers(environment)[0]._process.pid
        assert services.is_alive(first)
    services.wait_for("its end", lambda: not services.is_alive(first))


def test_one_that_leaks_is_replaced_at_the_end_of_an_episode() -> None:
    with closing(make(2, max_bytes=200 << 20)) as environment:
        witness = Witness(environment)
        witness.until(1, lambda step_type: step_type != LAST)
        witness.step(e1=Do.LEAK)
        witness.until(1, lambda step_type: step_type == LAST)
        [fault] = witness.step(begins=[1]).faults
        assert (fault.environment, fault.kind) == (1, "crashed")
        assert "actor.max_environment_bytes is 209,715,200" in fault.detail
        for _ in range(20):
            assert not witness.step().faults


def test_a_cut_episode_counts_as_one_and_the_seam_as_none() -> None:
    with closing(make(1)) as environment:
        statistics = EpisodeStatistics(1)
        timestep = environment.reset(3)
        seed = int(timestep.observation[0, 0])
        assert counting.episode_length(seed, 0) > 3
        episodes, frames = [], 0
        for action in (0, 0, Do.KILL, 0, 0):
            environment.send(np.array([action]))
            step = environment.recv()
            episodes += statistics.update(step)
            frames += int(step.frames[0])
        [(_, cut)] = episodes
        played = sum(map(counting.frames_of, (1, 2)))
        assert (cut.episode_return, cut.length, cut.frames) == (1 + 2, 3, played + 1)
        assert frames == played + 1 + counting.frames_of(1)  # none for the seam


def test_processes_end_with_the_actor_even_if_they_hang(
    tmp_path: pathlib.Path,
) -> None:
    children = tmp_path / "children"
    script = """
import sys, numpy as np
from faulty import Do
from test_processes import make, workers
environment = make(2, children=sys.argv[1])
environment.reset(0)
environment.send(np.array([0, Do.START_A_CHILD]))
environment.recv()
environment.send(np.array([0, Do.COUNT]))
environment.recv()
environment.send(np.array([0, Do.HANG_IN_C]))
print(*(worker._process.pid for worker in workers(environment)), flush=True)
environment.recv()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(children)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as actor:
        assert actor.stdout is not None
        pids = [int(pid) for pid in actor.stdout.readline().split()]
        pids.append(int(children.read_text()))
        assert all(map(services.is_alive, pids))
        actor.kill()
    services.wait_for("their ends", lambda: not any(map(services.is_alive, pids)))
