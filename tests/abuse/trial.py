"""Training Catch with three honest actors beside one bad caller, judged from outside.

Three trials, each with a learner and actors of its own: beside a caller that sends as many harmless
messages, beside one that sends absurd ones, and the same without quarantine. Judged are the score,
the throughput of the honest actors, everything that was saved, and the accounts: what each party
says it got receipts for against what the learner's last checkpoint says.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import services
from prometheus_client.parser import text_string_to_metric_families

from impala.logdir import checkpoint

_TOKENS = {
    "actor": ("honest-token-0123456789", "honest-*"),
    "bad": ("mallory-token-0123456789", "mallory*"),
    "reader": ("reader-token-0123456789", ""),
}
_ACTORS = 3
_ENVS = 16  # of each actor


class Outcome(NamedTuple):
    """What came of a trial."""

    score: float  # mean return of 200 greedy episodes
    honest_frames_per_second: float  # while the caller was calling
    caller: dict[str, Any]  # its report
    member: dict[str, Any]  # what the status says of it
    status: dict[str, Any]  # of the run
    accounts: dict[str, Any]  # of the last checkpoint
    learner_status: int


def run(
    directory: pathlib.Path,
    *,
    absurd: bool,
    count: int,
    per_second: float,
    frames: int,
    seed: int,
    guarded: bool = True,
    settings: Sequence[object] = (),
) -> Outcome:
    """Trains to the end beside a caller, on a port that is `guarded` by the relay or not.

    Raises:
      AssertionError: something saved is not finite, or the accounts are not exact.
    """
    logdir = directory / "run"
    logdir.mkdir(parents=True)
    listen = "127.0.0.1:0" if guarded else f"unix:{directory / 'socket'}"
    tokens = directory / "tokens"
    tokens.write_text(
        "".join(
            f"{'actor' if role == 'bad' else role} {token} {names}".rstrip() + "\n"
            for role, (token, names) in _TOKENS.items()
        )
    )
    files = {}
    for role, (token, _) in _TOKENS.items():
        files[role] = directory / f"{role}.token"
        files[role].write_text(f"{token}\n")
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(
            services.impala(
                *("learner", "catch", "--logdir", logdir, "--listen", listen),
                *("--security.token-file", tokens, "--total-frames", frames, "--seed", 100 + seed),
                *("--mix.replayed", 16, "--replay.capacity-frames", 50_000),
                *("--learner.checkpoint-seconds", 5.0, *settings),
                log=directory / "learner.log",
            )
        )
        address = services.address_of(logdir)
        actors = [
            stack.enter_context(
                services.impala(
                    *("actor", "--learner", address, "--name", f"honest-{i}"),
                    *("--num-envs", _ENVS, "--security.token-file", files["actor"]),
                    *("--metrics-listen", "127.0.0.1:0", "--when-finished", "idle"),
                    log=directory / f"actor-{i}.log",
                )
            )
            for i in range(_ACTORS)
        ]
        assert len(actors) == _ACTORS
        metrics = [_metrics_address(directory / f"actor-{i}.log") for i in range(_ACTORS)]
        services.wait_for_row(logdir, "updates", lambda row: row["updates"] > 20)
        report = directory / "caller.json"
        begun, played = time.monotonic(), _honest_frames(metrics)
        caller = subprocess.Popen(
            [
                *(sys.executable, "-m", "abuse.caller", address, str(report)),
                *("--token", _TOKENS["bad"][0], "--seed", str(seed), "--count", str(count)),
                *("--per-second", str(per_second), "--others"),
                *(f"honest-{i}" for i in range(_ACTORS)),
                *([] if absurd else ["--harmless"]),
            ]
        )
        stack.callback(caller.kill)
        status: dict[str, Any] = {}
        rate = 0.0
        while caller.poll() is None:
            time.sleep(1.0)
            status = _status(address, files["reader"]) or status
            if learner.poll() is not None:
                break
            rate = (_honest_frames(metrics) - played) / (time.monotonic() - begun)
        learner_status = learner.wait(timeout=900.0)
        accepted = {f"honest-{i}": _accepted(each) for i, each in enumerate(metrics)}
        caller.wait(timeout=60.0)
    called = json.loads(report.read_text())
    saved = checkpoint.load(logdir)
    _check_finite(logdir)
    _check_accounts(saved.accounts, accepted, called)
    members = status.get("members", [])
    member: dict[str, Any] = next((m for m in members if m["name"] == "mallory"), {})
    return Outcome(
        _score(logdir), rate, called, member, status, dict(saved.accounts), learner_status
    )


def _status(address: str, token: pathlib.Path) -> dict[str, Any] | None:
    done = services.run("status", address, "--json", "--security.token-file", token)
    return json.loads(done.stdout) if done.returncode == 0 else None


def _metrics_address(log: pathlib.Path) -> str:
    def found() -> str | None:
        words = [line.split()[-1] for line in log.read_text().splitlines() if "metrics on" in line]
        return words[0] if words else None

    return str(services.wait_for("an actor's metrics", found))


def _samples(address: str) -> Iterator[tuple[str, dict[str, str], float]]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20.0) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _honest_frames(metrics: Sequence[str]) -> float:
    return sum(
        value
        for address in metrics
        for name, _, value in _samples(address)
        if name == "impala_actor_frames_total"
    )


def _accepted(address: str) -> int:
    """Unrolls that an actor got receipts for."""
    return sum(
        int(value)
        for name, labels, value in _samples(address)
        if name == "impala_actor_unrolls_total" and labels["status"] == "accepted"
    )


def _check_finite(logdir: pathlib.Path) -> None:
    saved = list(logdir.glob("checkpoints/*/variables.npz"))
    assert saved, "There is no checkpoint."
    for path in saved:
        with np.load(path) as arrays:
            for name in arrays.files:
                assert np.isfinite(arrays[name]).all(), f"{path}: {name} is not finite."


def _check_accounts(
    state: Mapping[str, Any], accepted: dict[str, int], called: dict[str, Any]
) -> None:
    """Everyone's own count against the learner's, to the unit."""
    accounted: dict[str, dict[str, int]] = {}
    for name, incarnation, unrolls, *_ in state["ledgers"]:
        accounted.setdefault(name, {})[str(incarnation)] = unrolls
    for name, unrolls in accepted.items():
        found = sum(accounted.get(name, {}).values())
        assert found == unrolls, f"{name} got receipts for {unrolls}, accounted are {found}."
    for incarnation, unrolls in called["accepted"].items():
        found = accounted.get("mallory", {}).get(incarnation, 0)
        most = unrolls + called["unsure"].get(incarnation, 0)
        assert unrolls <= found <= most, f"Of mallory {found} are accounted, {unrolls} to {most}."
    total = sum(unrolls for of_name in accounted.values() for unrolls in of_name.values())
    received = state["learned"] + sum(state["dropped"].values())
    assert received == total, f"{received} were received, the ledgers hold {total}."
    assert not state["dropped"].get("learner_crash"), "Nothing crashed."


def _score(logdir: pathlib.Path) -> float:
    result = logdir / "evaluation.json"
    done = services.run(*("evaluate", logdir, "--episodes", 200, "--greedy", "--json", result))
    assert done.returncode == 0, done.stderr
    return float(json.loads(result.read_text())["summary"]["return_mean"])
