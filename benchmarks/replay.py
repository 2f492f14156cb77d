"""Measures the cost of replay on disk: updates with half of each batch replayed, against none.

Mix, replay and update have the threads and the precision of a learner. It never waits for actors:
recorded messages of a real game arrive as fast as it takes them. Both variants alternate within one
run. CPU time is of all threads: on a machine with other work, its ratio is the one to trust.
"""

import contextlib
import itertools
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tree

from actors import policy
from actors.actor import Actor
from benchmarks.setting import Options
from impala.agents.agent import Agent
from impala.config import schema as configs
from impala.environments.spaces import Spaces
from impala.parts import build
from impala.runtime import process
from impala.schedule import phases, tasks
from impala.types import Parameters, Unroll
from learner.data.ingest import Arrival, Ingest
from learner.data.mix import Mix
from learner.data.replay import Replay
from learner.data.rows import Layout
from learner.data.storage import Disk
from learner.update import devices
from learner.update.learner import Learner

_ROUNDS = 4
_MESSAGES = 24
_UNROLLS = 4000  # in replay before anything is measured


class _Updates(NamedTuple):
    """What updates and making their batches take."""

    per_second: float
    cpu_seconds: float  # of each, all threads


class _Endless(Ingest):
    """Repeats recorded messages for ever."""

    def __init__(self, arrivals: Sequence[Arrival]):
        super().__init__(capacity=1)
        self._recorded = itertools.cycle(arrivals)

    def get(self, timeout: float) -> Arrival:
        return next(self._recorded)


def measure(config: configs.Config, options: Options) -> dict[str, float]:
    """Measures on the configuration's environment, agent and batch size."""
    process.tune_malloc()
    devices.set_up(config)
    size = config.mix.batch_size
    spaces = build.spaces(tasks.make(config.environment, config.tasks))
    agent = build.agent(config.agent, *spaces)
    spec = build.unroll_spec(agent, *spaces, config.learner.unroll_length)
    layout = Layout(spec)
    unrolls = list(_recorded(config, agent, spaces))
    arrivals = [
        Arrival(unroll, "recorded", 1, number, 0, 0, [], 0.0, 0.0)
        for number, unroll in enumerate(unrolls)
    ]
    learner = Learner(
        build.algorithm(config.algorithm, config, agent), config, phases.make(config)[0]
    )
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        replay = Replay(
            layout,
            Disk(pathlib.Path(directory), "benchmark"),
            "reservoir",
            capacity_frames=10**9,
            memory=0,
        )
        stack.callback(replay.close)
        start = time.perf_counter()
        for rows in itertools.cycle([layout.rows(unroll) for unroll in unrolls]):
            replay.add(rows, "actor-0")
            if len(replay) >= _UNROLLS:
                break
        add_seconds = (time.perf_counter() - start) / len(replay)
        replay.commit()  # what is drawn from now on is read from the disk
        target = layout.empty(8)
        start = time.perf_counter()
        for _ in range(200):
            replay.sample(target)
        sample_seconds = (time.perf_counter() - start) / 1600

        halves = configs.MixConfig(fresh=size - size // 2, replayed=size // 2)
        measured: dict[bool, list[_Updates]] = {False: [], True: []}
        for _ in range(_ROUNDS):
            for has_replay in (False, True):
                mix = Mix(
                    _Endless(arrivals),
                    halves if has_replay else configs.MixConfig(fresh=size),
                    layout,
                    replay if has_replay else None,
                    place=None if learner.reads_rows else learner.place_rows,
                )
                measured[has_replay].append(_updates(learner, mix, options.seconds / _ROUNDS / 2))
                mix.close()
    fresh, replaying = (_Updates(*np.mean(measured[kind], axis=0)) for kind in (False, True))
    return {
        "updates/s, all fresh": fresh.per_second,
        "updates/s, half replayed": replaying.per_second,
        "share of all fresh": replaying.per_second / fresh.per_second,
        "CPU of an update, all fresh, ms": 1e3 * fresh.cpu_seconds,
        "CPU of an update, half replayed, ms": 1e3 * replaying.cpu_seconds,
        "share of all fresh, by CPU": fresh.cpu_seconds / replaying.cpu_seconds,
        "add an unroll, µs": add_seconds * 1e6,
        "sample an unroll, µs": sample_seconds * 1e6,
    }


def _recorded(config: configs.Config, agent: Agent, spaces: Spaces) -> Iterator[Unroll]:
    """Yields messages of a game played with the agent's initial weights."""
    environment = build.environment(config.environment, config.mix.batch_size)
    values = [variable.numpy() for variable in agent.variables]
    parameters = Parameters(1, 0, 0.0, 0, values)
    acting = policy.make_policy(agent, config.agent, spaces)
    actor = Actor(lambda task: [environment], acting, config.learner.unroll_length, seed=0)
    with contextlib.closing(environment):
        for unrolls in itertools.islice(actor.run(lambda: parameters), _MESSAGES):
            copied: Unroll = tree.map_structure(np.array, unrolls.unroll)
            versions = np.zeros(copied.frames.shape[0], np.int64)
            yield copied._replace(parameter_version=versions)


def _updates(learner: Learner, mix: Mix, seconds: float) -> _Updates:
    """Measures updates after the first, which may build a graph."""
    count, start, spent = -1, 0.0, 0.0
    while count < 0 or time.perf_counter() < start + seconds:
        prepared = mix.get(timeout=10.0)
        assert prepared is not None and prepared.batch is not None
        learner.update(prepared.batch, placed=prepared.placed)
        count += 1
        if count == 0:
            start, spent = time.perf_counter(), time.process_time()
    took, spent = time.perf_counter() - start, time.process_time() - spent
    return _Updates(count / took, spent / count)
