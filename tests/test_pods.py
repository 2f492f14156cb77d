"""The pods' own commands, with certificates and tokens, on loopback: a run from start to SIGTERM.

Slow: it trains Catch to its pass line.
"""

import contextlib
import functools
import json
import pathlib
import re
import subprocess
import urllib.request
from collections.abc import Sequence

import grpc
import pytest
import services
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.lint.commands import files_of
from deploy.lint.objects import DEPLOY, Object, Pod, pods_of, render
from impala.commands.learner import Learner
from impala.commands.parsing import parse
from impala.logdir import checkpoint

# The local overlay, which trains Catch, with mutual TLS.
_LOCAL = "resources: [{here}/overlays/local]\ncomponents: [{here}/components/tls]\n"
# The overlay of two learners, which train Catch.
_PEERS = """resources: [{here}/overlays/peers]
patches:
  - target: {{kind: StatefulSet}}
    patch: |
      - {{op: replace, path: /spec/template/spec/containers/0/args/1, value: catch}}
"""


def _rendered(directory: pathlib.Path, kustomization: str) -> tuple[Object, ...]:
    directory.mkdir()
    up = "../" * len(directory.resolve().parts)
    here = f"{up}{DEPLOY.resolve().relative_to('/')}"
    (directory / "kustomization.yaml").write_text(kustomization.format(here=here))
    return render(directory)


def _words(
    pod: Pod, root: pathlib.Path, learner: str, peers: str = "", peer: int = 0
) -> tuple[list[str], dict[str, int]]:
    """A pod's arguments with its files and ports in their places here; and the ports by flag."""
    ports: dict[str, int] = {}
    words = []
    for word in pod.words[1:]:
        flag, _, value = word.partition("=")
        if value.startswith("0.0.0.0:"):
            ports[flag] = services.free_port()
            word = f"{flag}=127.0.0.1:{ports[flag]}"
        elif flag == "--learner":
            word = f"{flag}={learner}"
        elif flag == "--peers":
            word = f"{flag}={peers}"
        words.append(re.sub(r"=(?=/)", f"={root}", word))
    if peers:
        words.append(f"--peer={peer}")  # which the pod's name says
    if learner and "--security.tls-ca" in {word.partition("=")[0] for word in words}:
        words.append("--security.tls-server-name=impala-learner")  # it is dialled as 127.0.0.1
    return words, ports


def _is_serving(port: int, service: str) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _passes_probes(pod: Pod, ports: dict[str, int]) -> bool:
    """As the kubelet asks."""
    of_numbers = {pod.ports["metrics"]: ports["--metrics-listen"]}
    if "health" in pod.ports:
        of_numbers[pod.ports["health"]] = ports["--health-listen"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = pod.container.get(kind, {})
        for how, asked in probe.items():
            if how not in ("grpc", "httpGet"):
                continue
            number = pod.port(asked["port"])
            assert number is not None
            port = of_numbers[number]
            if how == "grpc" and not _is_serving(port, asked.get("service", "")):
                return False
            if how == "httpGet" and not _answers(port, asked["path"]):
                return False
    return True


Running = tuple[Pod, subprocess.Popen[bytes], dict[str, int]]  # with its ports


def _wait_for_probes(running: Sequence[Running]) -> None:
    for pod, _, ports in running:
        services.wait_for(
            f"the probes of {pod.name}", functools.partial(_passes_probes, pod, ports)
        )


def _end(running: Sequence[Running]) -> None:
    """Ends pods by SIGTERM, which are all there and have so much time."""
    for pod, process, ports in running:
        assert process.poll() is None, (pod.name, process.args)
        assert _passes_probes(pod, ports)
        process.terminate()
        seconds = pod.spec["terminationGracePeriodSeconds"]
        assert process.wait(timeout=seconds) == 0, pod.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pods_train_together_and_end_well(tmp_path: pathlib.Path) -> None:
    objects = _rendered(tmp_path / "overlay", _LOCAL)
    learner_pod, actor_pod, evaluator_pod = (
        next(pod for pod in pods_of(objects) if pod.name == name)
        for name in (
            "StatefulSet/impala-learner",
            "Deployment/impala-actor",
            "Deployment/impala-evaluator",
        )
    )
    assert "--security.insecure" not in learner_pod.words
    running: list[Running] = []
    with contextlib.ExitStack() as stack:

        def start(pod: Pod, learner: str = "") -> pathlib.Path:
            root = stack.enter_context(files_of(pod, objects))
            words, ports = _words(pod, root, learner)
            log = tmp_path / f"{len(running)}.log"
            running.append((pod, stack.enter_context(services.impala(*words, log=log)), ports))
            return root

        # Given a learner, two actors and an evaluator, started as in their pods ...
        root = start(learner_pod)
        logdir = root / "runs" / "run"
        address = services.address_of(logdir)
        for pod in (actor_pod, actor_pod, evaluator_pod):
            start(pod, address)
        _wait_for_probes(running)

        # ... when the run is done ...
        total = parse(
            "learner", Learner, ["catch", f"--config={root}/etc/impala/run/run.yaml"]
        ).settings.total_frames
        services.wait_for(
            "the end",
            lambda: any(row["frames"] >= total for row in services.rows(logdir)),
            seconds=400.0,
        )
        services.wait_for("a checkpoint", lambda: checkpoint.exists(logdir))

        # ... then all of them are still there, and end on SIGTERM in the time that they have.
        _end(running)

        # And Catch is learned.
        report = tmp_path / "report.json"
        evaluated = services.run("evaluate", logdir, "--greedy", "--json", report)
        assert evaluated.returncode == 0, evaluated.stderr
        assert json.loads(report.read_text())["summary"]["return_mean"] >= 0.99
        assert (logdir / "evaluations.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_pods_of_two_learners_train_together_and_end_well(tmp_path: pathlib.Path) -> None:
    objects = _rendered(tmp_path / "overlay", _PEERS)
    pods = {pod.name: pod for pod in pods_of(objects)}
    learner_pod, actor_pod = pods["StatefulSet/impala-learner"], pods["Deployment/impala-actor"]
    peers = ",".join(f"localhost:{services.free_port()}" for _ in range(2))
    running: list[Running] = []
    with contextlib.ExitStack() as stack:

        def start(pod: Pod, learner: str = "", peer: int = 0) -> pathlib.Path:
            root = stack.enter_context(files_of(pod, objects))
            words, ports = _words(pod, root, learner, "" if learner else peers, peer)
            log = tmp_path / f"{len(running)}.log"
            running.append((pod, stack.enter_context(services.impala(*words, log=log)), ports))
            return root

        # Given both learners and two pods of actors, with an actor for each learner...
        logdirs = [start(learner_pod, peer=i) / "runs" / "run" for i in (0, 1)]
        addresses = ",".join(map(services.address_of, logdirs))
        for _ in range(2):
            start(actor_pod, addresses)
        _wait_for_probes(running)

        # ...when the run is done...
        saved = [
            services.wait_for("the end", functools.partial(_finished, logdir), seconds=400.0)
            for logdir in logdirs
        ]

        # ...then both have learned from the same number of actors, and all end on SIGTERM.
        _end(running)
        assert saved[0].counters == saved[1].counters
        assert [len(each.accounts["indices"]) for each in saved] == [2, 2]
        report = tmp_path / "report.json"
        evaluated = services.run("evaluate", logdirs[0], "--greedy", "--json", report)
        assert evaluated.returncode == 0, evaluated.stderr
        assert json.loads(report.read_text())["summary"]["return_mean"] >= 0.99


def _finished(logdir: pathlib.Path) -> checkpoint.Checkpoint | None:
    """The checkpoint of a finished run, if it has finished."""
    if not checkpoint.exists(logdir):
        return None
    saved = checkpoint.load(logdir)
    return saved if saved.counters.frames >= saved.config.total_frames else None
