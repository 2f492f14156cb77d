"""The way of a batch to a device and of its results back, with a second CPU in the place of a GPU.

What runs in what order is the same there; how long it takes is not.
"""

import _ctypes
import asyncio
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tree
from services import WAIT

from benchmarks import gpu
from impala import finite
from impala.config.presets import PRESETS
from impala.config.schema import Config, LearnerConfig, MixConfig
from impala.parts import build
from impala.runtime import process
from impala.schedule import phases, tasks
from impala.types import Batch, Parameters, StepType, Unroll
from learner.fleet.incarnations import Incarnations
from learner.update import devices
from learner.update.demand import Demand
from learner.update.learner import Learner
from learner.update.phases import Phases
from learner.update.publisher import Publisher
from learner.update.training import Iteration

T, B, UPDATES = 5, 4, 4
CONFIG = dataclasses.replace(
    PRESETS["catch"][1],
    learner=LearnerConfig(unroll_length=T),
    mix=MixConfig(fresh=B),
    total_frames=1000,
)
SPACES = build.spaces(tasks.make(CONFIG.environment, CONFIG.tasks))


def make_learner(config: Config = CONFIG) -> Learner:
    agent = build.agent(config.agent, *SPACES, seed=1)
    return Learner(build.algorithm(config.algorithm, config, agent), config, phases.make(config)[0])


def make_unroll(learner: Learner, seed: int) -> Unroll:
    random = np.random.default_rng(seed)
    spec = build.unroll_spec(learner._algorithm.agent, *SPACES, T)
    unroll = tree.map_structure(
        lambda leaf: random.integers(0, 2, (T + 1, B, *leaf.shape[1:])).astype(leaf.dtype),
        spec._replace(core_state=()),
    )
    unroll.timestep.step_type[:] = StepType.MID
    return unroll._replace(frames=np.full(B, T, np.int32), parameter_version=np.zeros(B, np.int64))


def make_batch(learner: Learner, seed: int) -> Batch:
    return Batch(make_unroll(learner, seed), np.zeros(B, np.bool_))


def assert_same(one: Any, other: Any) -> None:
    tree.map_structure(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("xla", [False, True], ids=["graph", "xla"])
def test_published_parameters_are_read_only_and_stay(
    xla: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "uses_xla", lambda config, device: xla)
    learner = make_learner(dataclasses.replace(CONFIG, deterministic=True))  # which waits for XLA
    learner.update(make_batch(learner, 0))
    published, saved = learner.agent_values(), learner.variables()
    copies = tree.map_structure(np.copy, (published, saved))
    for seed in range(1, 3):
        learner.update(make_batch(learner, seed))
    assert_same((published, saved), copies)
    assert any((a != b).any() for a, b in zip(published, learner.agent_values(), strict=True))
    assert not any(value.flags.writeable for value in [*published, *saved.values()])


class Gate:
    """In the place of a service: what is published waits until it is let in."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.published: list[Parameters] = []

    def publish(self, parameters: Parameters, **shown: Any) -> None:
        assert self.open.wait(WAIT)
        finite.check({"all": np.concatenate([v.ravel() for v in parameters.values])}, "No")
        self.published.append(parameters)


class Counts:
    """In the place of a guard."""

    skipped_updates = rollbacks = 0


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def demand() -> Demand:
    return Demand()


@pytest.fixture
def publisher(gate: Gate, demand: Demand, tmp_path: pathlib.Path) -> Iterator[Publisher]:
    made = Publisher(
        gate.publish,
        Incarnations(tmp_path / "incarnations.json", own=7),
        Phases(CONFIG, make_learner()._algorithm.agent),
        Counts(),  # type: ignore[arg-type]
        demand,
    )
    yield made
    gate.open.set()
    made.close()


def iteration_of(learner: Learner) -> Iteration:
    return Iteration(learner, None, None, 0.0, 0.0, False, True, False)


def test_a_version_is_published_while_the_next_update_runs(
    gate: Gate, publisher: Publisher
) -> None:
    learner, expected = make_learner(), []
    for seed in range(UPDATES):
        learner.update(make_batch(learner, seed))
        expected.append(tree.map_structure(np.copy, learner.agent_values()))
        gate.open.set()  # for the version before
        publisher.wait()
        gate.open.clear()
        publisher.take(iteration_of(learner))
        assert len(gate.published) == seed
    gate.open.set()
    publisher.wait()
    assert [each.version for each in gate.published] == [1, 2, 3, 4]
    assert_same([each.values for each in gate.published], expected)


def test_a_busy_learner_publishes_when_it_is_asked(
    gate: Gate, demand: Demand, publisher: Publisher
) -> None:
    learner = make_learner()
    gate.open.set()
    publisher.publish(learner)

    async def ask() -> None:
        await asyncio.wait_for(demand.wait(), 0.1)  # nothing is newer: nobody waits
        learner.update(make_batch(learner, 0))
        publisher.take(iteration_of(learner), has_time=False)
        assert len(gate.published) == 1  # nobody has asked

        asked = asyncio.create_task(demand.wait())
        await asyncio.sleep(0)
        assert not asked.done() and demand.is_asked
        learner.update(make_batch(learner, 1))
        publisher.take(iteration_of(learner), has_time=False)
        await asyncio.wait_for(asked, WAIT)
        assert [each.version for each in gate.published] == [0, 2]
        publisher.take(iteration_of(learner)._replace(is_new=False), has_time=False)
        publisher.wait()
        assert len(gate.published) == 2  # nothing is new

    asyncio.run(ask())


def test_who_asks_a_learner_that_hangs_gets_what_there_is() -> None:
    demand = Demand()
    demand.fall_behind()
    asyncio.run(asyncio.wait_for(demand.wait(), WAIT))


def test_a_version_that_is_not_finite_ends_the_run(gate: Gate, publisher: Publisher) -> None:
    learner = make_learner()
    publisher.take(iteration_of(learner))
    variable = learner._algorithm.agent.variables[0]
    variable.assign(np.full(variable.shape, np.nan, np.float32))
    gate.open.set()
    publisher.take(iteration_of(learner))
    with pytest.raises(finite.NotFiniteError):
        publisher.take(iteration_of(learner)._replace(is_new=False))
    with pytest.raises(finite.NotFiniteError):
        publisher.publish(learner)
    assert len(gate.published) == 1
    assert all(np.isfinite(value).all() for value in gate.published[0].values)


def test_the_benchmark_of_a_gpu_measures_an_update_on_any_device() -> None:
    measured = gpu.update(CONFIG, "mlp", 2, xla=False, seconds=0.0)
    assert measured.name.startswith("mlp, batch 2, ")
    assert measured.steps_per_second == pytest.approx(measured.updates_per_second * 2 * T)
    assert measured.updates_per_second > 0.0
    assert measured.megabytes_per_second > 0.0
    assert gpu.table([measured]).splitlines()[2].startswith("| mlp | 2 | no |")


def test_xla_compiles_on_gpus_by_itself() -> None:
    off = dataclasses.replace(CONFIG, learner=LearnerConfig(jit_compile=False))
    name = "/job:localhost/replica:0/task:0/device:"
    assert devices.uses_xla(CONFIG, name + "GPU:0")
    assert not devices.uses_xla(CONFIG, name + "CPU:0")
    assert not devices.uses_xla(off, name + "GPU:0")


_IMPORTS = """
import sys
from impala.runtime import process
process.load_tensorflow(use_gpus=False)
import sonnet, tensorflow as tf
print("keras" in sys.modules)
print(tf.keras.layers.Dense(3)(tf.ones([1, 2])).shape)
"""


def test_keras_is_imported_by_who_uses_it() -> None:
    environ = {name: value for name, value in os.environ.items() if "KERAS" not in name}
    child = subprocess.run(
        [sys.executable, "-c", _IMPORTS], env=environ, capture_output=True, text=True, check=True
    )
    assert child.stdout.split("\n")[:2] == ["False", "(1, 3)"]


_SAYS_WHAT_IS_LOADED = """
import pathlib

from impala.runtime import process

process.load_tensorflow(use_gpus=True)
print(pathlib.Path("/proc/self/maps").read_text())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cusolver_is_loaded_from_its_wheel(
    tmp_path: pathlib.Path,
) -> None:
    wheel = tmp_path / "nvidia" / "cusolver" / "lib"
    wheel.mkdir(parents=True)
    library = wheel / "libcusolver.so.11"
    shutil.copy(_ctypes.__file__, library)  # any shared library
    (wheel / "libcusolver.so.12").write_bytes(b"none")  # TensorFlow says what it misses
    child = subprocess.run(
        [sys.executable, "-c", _SAYS_WHAT_IS_LOADED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(library) in child.stdout


def test_limits_of_a_cgroup_below_the_root_hold(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a Slurm step (cgroup v2), and of a unit of systemd (v1)."""
    own = tmp_path / "own"
    monkeypatch.setattr(process, "_CGROUPS", tmp_path)
    monkeypatch.setattr(process, "_OWN_CGROUPS", own)
    for name, text in (
        ("job/memory.max", "8000000"),
        ("job/step/memory.max", "max"),
        ("job/cpu.max", "150000 100000"),
        ("job/step/cpu.max", "max 100000"),
        ("memory/unit/memory.limit_in_bytes", "4000000"),
        ("cpu/unit/cpu.cfs_quota_us", "50000"),
        ("cpu/unit/cpu.cfs_period_us", "100000"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    for lines, memory, cores in (
        ("0::/job/step\n", 8_000_000, 1.5),
        ("7:cpu,cpuacct:/unit\n3:memory:/unit\n0::/\n", 4_000_000, 0.5),
    ):
        own.write_text(lines)
        assert (process.memory(), process._cgroup_cores()) == (memory, cores)
    own.unlink()
    assert process.memory() > 8_000_000 and process._cgroup_cores() == 2**31
