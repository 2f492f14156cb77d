"""Measures the pipe from messages to updates: the real service, with a device that takes no time.

Two senders send messages of 16 environments that show Pong, as fast as the learner takes them, and
pull parameters four times a second. What a device would compute is computed once. Updates in a
second, and the CPU time of one, are what an infinitely fast device would leave. With --against
another checkout is measured in turn.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.setting import Options
from impala.config import schema as configs

_MIXES = ((4, 12), (16, 48), (32, 0))
_ENVS, _SENDERS = 16, 2
_ROUNDS = 4
_WARM_UP_SECONDS = 5.0  # of each learner, after its first update

# Both run in the measured checkout, and use names that checkouts have in common.
_LEARNER = """
import json, os, pathlib, sys, threading, time
import tensorflow as tf
import tree
from impala.__main__ import main
from learner.update.learner import Learner
try:
    from impala.agents.compiled import Flat
except ImportError:
    from impala.flat import Flat
seconds, warm_up, log = float(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])
updates = 0
call, update = Flat.__call__, Learner.update

def called(self, *arguments):
    results = call(self, *arguments)
    function = getattr(self._function, "func", None)
    if getattr(function, "__name__", "") == "_update_once":
        for kind, (computed, like) in self._calls.items():
            if not hasattr(computed, "found"):
                leaves = [tf.convert_to_tensor(x) for x in tree.flatten(arguments)]
                def cached(*leaves, found=computed(*leaves)):
                    return found
                cached.found = True
                self._calls[kind] = cached, like
    return results

def counted(self, *arguments, **named):
    global updates
    found = update(self, *arguments, **named)
    updates += 1
    return found

Flat.__call__, Learner.update = called, counted

def cpu_of_threads():
    spent = {}
    for thread in threading.enumerate():
        fields = pathlib.Path(f"/proc/self/task/{thread.native_id}/schedstat")
        if fields.exists():
            spent[thread.name] = int(fields.read_text().split()[0]) / 1e9
    return spent

def watch():
    while updates < 20:
        time.sleep(0.05)
    time.sleep(warm_up)
    begin = time.monotonic(), time.process_time(), updates, cpu_of_threads()
    time.sleep(seconds)
    end = time.monotonic(), time.process_time(), updates, cpu_of_threads()
    count = end[2] - begin[2]
    threads = {name: 1e3 * (cpu - begin[3].get(name, 0.0)) / count for name, cpu in end[3].items()}
    log.write_text(json.dumps({
        "updates/s": count / (end[0] - begin[0]), "CPU ms": 1e3 * (end[1] - begin[1]) / count,
        "threads": threads}))
    os._exit(0)

threading.Thread(target=watch, daemon=True, name="watch").start()
sys.argv[1:] = sys.argv[4:]
sys.exit(main())
"""
_SENDER = '''
import dataclasses, pathlib, sys, threading, time
import numpy as np
from benchmarks import ingest
from impala.config import presets
from impala.config import schema as configs
try:
    from impala.parts import build
except ImportError:
    from impala import build
address, index, envs = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
random_batch = ingest.random_batch
def played(config, agent, spaces):
    """The same experience, which shows Pong."""
    batch = random_batch(config, agent, spaces)
    environment = build.environment(config.environment, envs)
    environment.reset(index)
    rng, seen = np.random.default_rng(index), []
    for _ in range(60 + config.learner.unroll_length):
        environment.send(rng.integers(0, spaces[1].n, envs))
        seen.append(np.array(environment.recv().timestep.observation))
    batch.unroll.timestep.observation[:] = np.stack(seen)[-config.learner.unroll_length - 1:]
    return batch
ingest.random_batch = played
class Begin:
    def wait(self, timeout):
        pass
ingest._begin = Begin()
while not address.exists():
    time.sleep(0.1)

def pull():
    """Pulls parameters four times a second, as an actor does."""
    channel = ingest.grpc.insecure_channel(address.read_text().strip())
    stub = ingest.pb_grpc.LearnerStub(channel)
    while True:
        stub.GetParameters(ingest.pb.GetParametersRequest(), timeout=30.0)
        time.sleep(0.25)

threading.Thread(target=pull, daemon=True).start()
config = dataclasses.replace(presets.PRESETS["atari"][1], mix=configs.MixConfig(fresh=envs))
try:
    ingest._send(config, address.read_text().strip(), index, 1e6)
except Exception:
    pass  # the learner has ended
'''


def measure(config: configs.Config, options: Options) -> dict[str, float]:
    """Measures each mix in this checkout, and in turn in the one of `--against`."""
    del config
    trees = {"here": pathlib.Path(__file__).resolve().parent.parent}
    if options.against is not None:
        trees["there"] = options.against.resolve()
    measured: dict[str, float] = {}
    for fresh, replayed in _MIXES:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        for _ in range(_ROUNDS):
            for name, tree in trees.items():
                rounds[name].append(_measured(tree, fresh, replayed, options.seconds / _ROUNDS))
        for name, found in rounds.items():
            label = f"{fresh}+{replayed}, {name}"
            for key in ("updates/s", "CPU ms"):
                values = [one[key] for one in found]
                measured[f"{label}: {key}"] = statistics.median(values)
            of_two = [
                sum(ms for thread, ms in one["threads"].items() if thread in ("mix", "MainThread"))
                for one in found
            ]
            measured[f"{label}: CPU ms of mix and main thread"] = statistics.median(of_two)
        if len(rounds) == 2:
            ratios = [
                one["updates/s"] / other["updates/s"]
                for one, other in zip(rounds["here"], rounds["there"], strict=True)
            ]
            measured[f"{fresh}+{replayed}: here / there, updates/s"] = statistics.median(ratios)
    return measured


def _measured(tree: pathlib.Path, fresh: int, replayed: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found, logdir = folder / "found.json", folder / "run"
        environment = os.environ | {"PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "2"}
        flags = ("--mix.fresh", str(fresh), "--mix.replayed", str(replayed))
        learner = subprocess.Popen(
            [
                *(sys.executable, "-c", _LEARNER, str(seconds), str(_WARM_UP_SECONDS), str(found)),
                *("learner", "atari", "--logdir", str(logdir), "--listen", "127.0.0.1:0", *flags),
                *("--total-frames", "1_000_000_000", "--learner.threads", "1"),
            ],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(log := (folder / "log").open("w+")),
        )
        senders = [
            subprocess.Popen(
                [sys.executable, "-c", _SENDER, str(logdir / "address"), str(index), str(_ENVS)],
                cwd=tree,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for index in range(_SENDERS)
        ]
        try:
            learner.wait(timeout=seconds + 180.0)
            if not found.exists():
                log.seek(0)
                raise RuntimeError(f"The learner in {tree} has ended: {log.read()[-2000:]}")
            result: dict[str, Any] = json.loads(found.read_text())
            return result
        finally:
            for process in (learner, *senders):
                process.kill()
                process.wait()
            log.close()
