"""The examples run: each learns or is trained with, as its page says."""

import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import test_algorithms

from impala.config.schema import ObjectiveConfig

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


def _run(*arguments: object, seconds: float = 280.0) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=EXAMPLES,
        env={name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_that_learns_catch_runs() -> None:
    said = _run("catch.py", "--total-frames", 3_000)
    assert said.splitlines()[-1].startswith("mean return -0.")


@pytest.mark.slow
def test_the_page_learns_catch() -> None:
    said = _run("catch.py", seconds=600.0)
    assert float(said.split()[-1]) >= 0.9


def test_parts_of_ones_own_are_trained_with_together(tmp_path: pathlib.Path) -> None:
    script = f"""
import impala
trained = impala.train(
    "catch", {str(tmp_path / "run")!r}, total_frames=3_000,
    environment={{"id": "custom_environment:Corridor"}},
    agent={{"torso": "custom_torso:Gated"}}, gated={{"width": 8}},
    algorithm="custom_algorithm:Impact", impact={{"clip": 0.2}},
)
assert trained.status == "finished" and trained.frames >= 3_000, trained
allow = ["custom_environment", "custom_torso", "custom_algorithm"]
policy = impala.load({str(tmp_path / "run")!r}, allow=allow)
environment = policy.environment()
observation, _ = environment.reset(seed=0)
print("acted", policy(observation))
"""
    assert _run("-c", script).splitlines()[-1] in ("acted 0", "acted 1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_environment", "custom_torso", "custom_algorithm"])
def test_each_part_is_trained_with_alone(name: str, tmp_path: pathlib.Path) -> None:
    said = _run(f"{name}.py", "--total-frames", 3_000, "--logdir", tmp_path / "run", seconds=600.0)
    assert said.splitlines()[-1].startswith("{")


def test_impact_is_the_surrogate_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sums written out, with ratios on both sides of every clip."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from custom_algorithm import Impact

    settings = Impact.Settings(clip=0.2, rho=1.5, gae_lambda=0.9, entropy_cost=0.0)
    agent = test_algorithms.table_agent()
    algorithm = Impact(agent, ObjectiveConfig(discount=0.9), settings)
    rng = np.random.default_rng(3)
    agent.policy.assign_add(0.7 * rng.normal(size=agent.policy.shape))  # away from the target
    agent.baseline.assign_add(rng.normal(size=agent.baseline.shape))
    arrays = test_algorithms.make_arrays()
    batch = test_algorithms.make_batch(arrays, agent)

    found = algorithm.loss(batch).loss.numpy()

    target = algorithm._target
    old, values_now, values_then = target.policy, agent.baseline.numpy(), target.baseline.numpy()
    expected = np.zeros(found.shape)
    clips = set()
    for b in range(found.shape[1]):
        steps = len(found)
        seam = [arrays["step_type"][t + 1, b] == 0 for t in range(steps)]
        action = [int(arrays["action"][t + 1, b]) for t in range(steps)]

        def log(table: "tf.Variable | np.ndarray", t: int, b: int = b) -> np.ndarray:
            logits = np.asarray(table, np.float64)[t, b]
            return logits - np.log(np.sum(np.exp(logits)))

        pi = [math.exp(log(agent.policy, t)[action[t]]) for t in range(steps)]
        pi_target = [math.exp(log(old, t)[action[t]]) for t in range(steps)]
        worker = [math.exp(log(arrays["policy"], t + 1)[action[t]]) for t in range(steps)]
        for t in range(steps):
            if seam[t]:
                continue
            advantage, weight = 0.0, 1.0
            for i in range(t, steps):
                if seam[i]:
                    break
                rho = min(1.0, pi_target[i] / worker[i])
                discount = 0.9 * arrays["discount"][i + 1, b]
                reward = arrays["reward"][i + 1, b]
                delta = reward + discount * values_then[i + 1, b] - values_then[i, b]
                advantage += weight * rho * delta
                weight *= discount * 0.9 * rho
            ratio = min(worker[t] / pi_target[t], 1.5) * pi[t] / worker[t]
            clipped = min(max(ratio, 0.8), 1.2)
            clips |= {(worker[t] / pi_target[t] > 1.5), ("low", "in", "high")[int(ratio > 0.8)
                      + int(ratio > 1.2)]}  # fmt: skip
            surrogate = min(ratio * advantage, clipped * advantage)
            error = values_then[t, b] + advantage - values_now[t, b]
            expected[t, b] = -surrogate + 0.5 * 0.5 * error**2
    assert clips == {True, False, "low", "in", "high"}
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
