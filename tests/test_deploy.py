"""The manifests, images and dashboards under deploy/ pass, and mistakes in them are found.

What is in the repository must give no complaint; each of the mistakes that are seeded at the end
must be found by the check that is for it.
"""

import pathlib
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest
import yaml

from deploy.lint import __main__ as lint
from deploy.lint.checks import CHECKS, complaints
from deploy.lint.commands import Started, started
from deploy.lint.images import containerfile, containerfile_complaints
from deploy.lint.objects import BIN, DEPLOY, OVERLAYS, ROOT, render
from deploy.lint.placement import preferences
from deploy.lint.references import NAMESPACE, fixed_when_made
from deploy.lint.schemas import VERSIONS, schema_complaints
from impala.commands.actor import Actor
from impala.commands.learner import Learner
from impala.runtime.installation import MODULES

# What is in the repository passes.


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_passes(overlay: str, check: str) -> None:
    assert CHECKS[check](render(DEPLOY / "overlays" / overlay)) == []


def test_the_overlays_are_those_there_should_be() -> None:
    assert {*OVERLAYS} >= {"local", "gpu", "peers", "spot-actors", "tls", "envoy", "monitoring"}
    assert len(VERSIONS) == 3
    components = {path.name for path in (DEPLOY / "components").iterdir()}
    production = (DEPLOY / "overlays/production/kustomization.yaml").read_text(encoding="utf-8")
    assert {*re.findall(r"components/(\S+)", production)} == components - {"envoy"}


def test_an_overlay_does_what_it_is_for() -> None:
    def pod(overlay: str, role: str) -> Started:
        (found,) = started(render(DEPLOY / "overlays" / overlay), role)
        return found

    local = pod("local", "learner").command
    assert isinstance(local, Learner)
    assert local.settings.environment.id == "Catch"
    assert local.settings.learner.checkpoint_seconds == 10
    assert local.security.insecure
    gpu = pod("gpu", "learner")
    assert gpu.pod.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    secure = pod("tls", "learner").command
    assert isinstance(secure, Learner) and not secure.security.insecure
    assert pod("spot-actors", "actor").pod.spec["tolerations"]
    assert "tolerations" not in pod("spot-actors", "evaluator").pod.spec
    peer, actor = pod("peers", "learner"), pod("peers", "actor").command
    assert isinstance(peer.command, Learner) and isinstance(actor, Actor)
    assert peer.pod.workload["spec"]["replicas"] == len(peer.command.peers.split(",")) == 2
    assert actor.num_actors == len(actor.learner.split(",")) == 2
    kinds = {each["kind"] for each in render(DEPLOY / "overlays/production")}
    assert kinds >= {"PodMonitor", "PrometheusRule", "ScaledObject", "Certificate", "Issuer"}


def test_nothing_resets_what_was_scaled() -> None:
    """`kubectl apply` sets what a manifest says, and the actors' number is not among that."""
    for overlay in OVERLAYS:
        (actor,) = started(render(DEPLOY / "overlays" / overlay), "actor")
        assert "replicas" not in actor.pod.workload["spec"]


def test_one_overlay_can_be_applied_over_another() -> None:
    base = fixed_when_made(render(DEPLOY / "base"))
    assert base["StatefulSet/impala-learner: volumeClaimTemplates"]
    for overlay in OVERLAYS:
        fixed = fixed_when_made(render(DEPLOY / "overlays" / overlay))
        assert {name: fixed.get(name) for name in base} == base


def test_actors_on_preemptible_nodes_are_spread_nowhere_else() -> None:
    for overlay in ("spot-actors", "production"):
        (actor,) = started(render(DEPLOY / "overlays" / overlay), "actor")
        assert "topologySpreadConstraints" not in actor.pod.spec
        assert preferences(actor.pod, {"karpenter.sh/capacity-type": "spot"}) > 0
    (actor,) = started(render(DEPLOY / "overlays/local"), "actor")
    assert actor.pod.spec["topologySpreadConstraints"]


def test_the_namespace_asks_for_the_restricted_level() -> None:
    (namespace,) = yaml.safe_load_all((DEPLOY / "namespace.yaml").read_text(encoding="utf-8"))
    assert schema_complaints([namespace]) == []
    assert namespace["metadata"]["name"] == NAMESPACE
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_containerfile_passes() -> None:
    linted = subprocess.run(
        [BIN / "hadolint", DEPLOY / "Containerfile"], capture_output=True, text=True
    )
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")
    assert containerfile_complaints(containerfile()) == []


def test_the_images_hold_every_package() -> None:
    for package in MODULES:
        assert f"\nCOPY {package} " in containerfile()


def documented_overlay(directory: pathlib.Path) -> pathlib.Path:
    """Writes `my-run`, whose files the page has, and deploy/ beside it. Returns its directory."""
    (page,) = (path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*kubernetes.md"))
    shutil.copytree(DEPLOY, directory / "deploy")
    overlay = directory / "my-run"
    overlay.mkdir()
    blocks = re.findall(r"^```yaml\n(# my-run/(\S+),.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == page.count("```yaml")
    for block, file in blocks:
        (overlay / file).write_text(block, encoding="utf-8")
    (overlay / "run.yaml").write_text("total_frames: 1_000_000", encoding="utf-8")
    return overlay


def test_the_overlay_of_a_page_is_right(tmp_path: pathlib.Path) -> None:
    directory = documented_overlay(tmp_path)
    objects = render(directory)
    assert complaints(directory) == []
    (learner,) = started(objects, "learner")
    assert isinstance(learner.command, Learner)
    assert learner.command.settings.agent.core == "lstm"
    assert learner.command.settings.total_frames == 1_000_000


# Seeded mistakes are found.


class Mistake(NamedTuple):
    """What somebody might write into a file, and what the check that is for it says."""

    file: str
    right: str
    wrong: str
    overlay: str
    check: str
    complaint: str


MISTAKES = {
    "a peer that is not there": Mistake(
        *("overlays/peers/learner.yaml", "replicas: 2", "replicas: 1"),
        *("peers", "commands", "has 1 replicas and 2 peers"),
    ),
    "an actor for a learner that is not there": Mistake(
        *("overlays/peers/kustomization.yaml", "learner-1.impala-learner:50051", "learner-2.b:1"),
        *("peers", "ports", "dials impala-learner-2.b:1, which no headless service is"),
    ),
    "a wrong flag": Mistake(
        *("base/actor.yaml", "--when-finished=", "--when-finish="),
        *("local", "commands", "actor has no flag --when-finish"),
    ),
    "a setting that does not exist": Mistake(
        *("base/run.yaml", "checkpoint_seconds", "checkpoint_second"),
        *("tls", "commands", "There is no setting 'learner.checkpoint_second'"),
    ),
    "runs outside the claim": Mistake(
        *("base/learner.yaml", "--logdir=/runs/run", "--logdir=/tmp/run"),
        *("gpu", "commands", "--logdir=/tmp/run is not within a claim"),
    ),
    "a key that the Secret does not have": Mistake(
        *("base/actor.yaml", "- key: token\n", "- key: tokens\n"),
        *("local", "commands", "/etc/impala/tokens/token cannot be read"),
    ),
    "a certificate for another role": Mistake(
        *(
            "components/tls/certificates.yaml",
            "spiffe://cluster.local/impala/actor",
            "spiffe://cluster.local/impala/reader",
        ),
        *("tls", "agreement", "its certificate is for {'reader'}, not actor"),
    ),
    "a metric of the dashboard that does not exist": Mistake(
        *("components/monitoring/dashboard.json", "impala_queue_unrolls{", "impala_queue{"),
        *("monitoring", "metrics", "nothing exports impala_queue"),
    ),
    "a field of the autoscaler that does not exist": Mistake(
        *("components/keda/scaled-object.yaml", "maxReplicaCount", "maxReplicas"),
        *("production", "custom", "has an unknown maxReplicas"),
    ),
    "a container as root": Mistake(
        *("base/learner.yaml", "runAsUser: 10001", "runAsUser: 0"),
        *("local", "restricted", "StatefulSet/impala-learner, container learner runs as root"),
    ),
    "a root file system that can be written": Mistake(
        *("base/evaluator.yaml", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
        *("local", "house", "may write to its image"),
    ),
    "an actor that is its pod's first process": Mistake(
        *("base/actor.yaml", "shareProcessNamespace: true", "shareProcessNamespace: false"),
        *("local", "house", "has nobody to reap"),
    ),
    "another version of the image": Mistake(
        *("base/kustomization.yaml", "newTag: ", "newTag: 9."),
        *("gpu", "image", "runs impala-learner:9."),
    ),
    "a port that nothing listens on": Mistake(
        *("base/learner.yaml", "--health-listen=0.0.0.0:8080", "--health-listen=0.0.0.0:8081"),
        *("local", "ports", "its flags say"),
    ),
    "a policy that lets nobody in": Mistake(
        *("base/network.yaml", "component: evaluator", "component: judge"),
        *("local", "policies", "is reached by"),
    ),
    "a field that does not exist": Mistake(
        *("base/actor.yaml", "terminationGracePeriodSeconds", "terminationGraceSeconds"),
        *("local", "schema", "terminationGraceSeconds"),
    ),
    "a StatefulSet that a broken pod blocks": Mistake(
        *("base/learner.yaml", "podManagementPolicy: Parallel", "minReadySeconds: 1"),
        *("local", "apply", "keeps a pod that never becomes ready"),
    ),
    "actors that are spread over all nodes": Mistake(
        *("components/spot-actors/actor.yaml", "      topologySpreadConstraints: null\n", ""),
        *("spot-actors", "placement", "and is spread over others all the same"),
    ),
    "a claim that is not there": Mistake(
        *("base/learner.yaml", "- name: runs\n", "- name: run-data\n"),
        *("gpu", "references", "mounts run-data, which is not there"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str, tmp_path: pathlib.Path) -> None:
    mistake = MISTAKES[name]
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy)
    file = copy / mistake.file
    text = file.read_text(encoding="utf-8")
    assert mistake.right in text
    file.write_text(text.replace(mistake.right, mistake.wrong), encoding="utf-8")
    complaints = CHECKS[mistake.check](render(copy / "overlays" / mistake.overlay))
    assert any(mistake.complaint in complaint for complaint in complaints), complaints


def test_an_overlay_may_have_a_namespace_and_secrets_of_its_own(tmp_path: pathlib.Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy" / "overlays" / "mine"
    overlay.mkdir()
    key = {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}}
    patch = [{"op": "add", "path": "/spec/template/spec/containers/0/env", "value": [key]}]
    target = {"kind": "StatefulSet", "name": "impala-learner"}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "mine",
        "resources": ["../local"],
        "patches": [{"target": target, "patch": yaml.safe_dump(patch)}],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
    assert lint.main([str(overlay)]) == 0


def test_the_command_prints_what_is_wrong_with_an_overlay(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy" / "overlays" / "local"
    assert lint.main([str(overlay)]) == 0
    assert capsys.readouterr().out == ""

    manifest = tmp_path / "deploy" / "base" / "actor.yaml"
    manifest.write_text(manifest.read_text().replace("--when-finished=", "--when-finish="))
    render.cache_clear()
    assert lint.main([str(overlay)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{overlay}: commands: Deployment/impala-actor")
    assert "no flag --when-finish" in line

    assert lint.main([str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
