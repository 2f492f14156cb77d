"""The manifests, images and dashboards under deploy/ pass, and mistakes in them are found.

What is in the repository must give no complaint; each of the mistakes that are seeded at the end
must be found by the check that is for it.
"""

import functools
import itertools
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import NamedTuple

import pytest
import yaml

from deploy.lint import __main__ as lint
from deploy.lint.checks import CHECKS, complaints
from deploy.lint.commands import SECRETS, Started, started
from deploy.lint.images import containerfile, containerfile_complaints
from deploy.lint.metrics import known_metrics
from deploy.lint.network import traffic
from deploy.lint.objects import BIN, DEPLOY, OVERLAYS, ROOT, of_kind, pods_of, render
from deploy.lint.placement import PREEMPTIBLE, preferences
from deploy.lint.references import NAMESPACE, RUN, fixed_when_made
from deploy.lint.schemas import VERSIONS, schema_complaints
from impala.commands import main as cli
from impala.commands.actor import Actor
from impala.commands.learner import Learner
from impala.commands.parsing import parse
from impala.runtime.installation import MODULES

SINCE_THE_START = {"impala_joins_total"}  # of the learner, which no checkpoint holds

# What is in the repository passes.


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_passes(overlay: str, check: str) -> None:
    assert CHECKS[check](render(DEPLOY / "overlays" / overlay)) == []


def test_the_overlays_are_those_there_should_be() -> None:
    assert {*OVERLAYS} >= {"local", "gpu", "peers", "spot-actors", "tls", "monitoring"}
    assert len(VERSIONS) == 3
    components = {path.name for path in (DEPLOY / "components").iterdir()}
    production = (DEPLOY / "overlays/production/kustomization.yaml").read_text(encoding="utf-8")
    assert {*re.findall(r"components/(\S+)", production)} == components


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
        assert fixed_when_made(render(DEPLOY / "overlays" / overlay)) == base


def test_actors_on_preemptible_nodes_are_spread_nowhere_else() -> None:
    for overlay in ("spot-actors", "production"):
        (actor,) = started(render(DEPLOY / "overlays" / overlay), "actor")
        assert "topologySpreadConstraints" not in actor.pod.spec
        assert preferences(actor.pod, {"karpenter.sh/capacity-type": "spot"}) > 0
    (actor,) = started(render(DEPLOY / "overlays/local"), "actor")
    assert actor.pod.spec["topologySpreadConstraints"]


def test_all_roles_know_the_same_nodes_as_preemptible() -> None:
    for each in started(render(DEPLOY / "overlays/spot-actors")):
        terms = each.pod.spec["affinity"]["nodeAffinity"]
        known = {
            rule["key"]: {*rule["values"]}
            for term in terms["preferredDuringSchedulingIgnoredDuringExecution"]
            for rule in term["preference"]["matchExpressions"]
        }
        assert known == PREEMPTIBLE, each.pod.name


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


def test_the_pages_know_every_alert_and_every_metric_and_none_that_is_not_there() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    (rules,) = of_kind(render(DEPLOY / "overlays/monitoring"), "PrometheusRule")
    for rule in rules["spec"]["groups"][0]["rules"]:
        assert f"`{rule['alert']}`" in words
        assert " ".join(rule["annotations"]["runbook"].split()) in words
    named = set(re.findall(r"`(impala_\w+)", page))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known_metrics()}
    assert named <= known_metrics().keys() | families
    assert families <= named


def test_no_alert_takes_a_counter_that_a_crash_sets_back_for_one_that_has_increased() -> None:
    """`increase` takes every step back for a start from zero."""
    (rules,) = of_kind(render(DEPLOY / "overlays/monitoring"), "PrometheusRule")
    for rule in rules["spec"]["groups"][0]["rules"]:
        for name in re.findall(r"\bincrease\((\w+)", rule["expr"]):
            assert name in SINCE_THE_START, rule["alert"]


def test_the_alert_on_restarts_sees_each_of_them_and_other_pods_by_the_same_name() -> None:
    (rules,) = of_kind(render(DEPLOY / "overlays/monitoring"), "PrometheusRule")
    (query,) = [
        " ".join(rule["expr"].split())
        for rule in rules["spec"]["groups"][0]["rules"]
        if rule["alert"] == "ImpalaLearnerRestarts"
    ]
    # A pod that replaces another has another address, the label `instance`.
    assert re.match(
        r"changes\(max by \(namespace, pod\) \(process_start_time_seconds\{(.*)\}\)", query
    )
    for overlay in OVERLAYS:
        for learner in started(render(DEPLOY / "overlays" / overlay), "learner"):
            (selected,) = re.findall(r'pod=~"(.*?)"', query)
            assert re.fullmatch(selected, f"{learner.pod.workload['metadata']['name']}-0")


def test_the_pages_name_files_and_secrets_that_are_there() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    for path in re.findall(r"\bdeploy/[\w./-]*\w", page):
        assert (ROOT / path).exists(), path
    for secret, files in SECRETS.items():
        assert secret in page
        assert all(f"--from-file={file}=" in page for file in files)


def kubectl_commands(page: str) -> list[list[str]]:
    """The words of each kubectl command in a page's blocks, without `kubectl` and the namespace."""
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines() if not language else ():
            words = shlex.split(line, comments=True)
            for piped in itertools.groupby(words, lambda word: word != "|"):
                command = [*piped[1]]
                if command[0] == "kubectl":
                    command = command[: command.index("--")] if "--" in command else command
                    found.append(command[3:] if command[1:3] == ["-n", NAMESPACE] else command[1:])
    return found


@functools.cache
def kubectl_help(*words: str) -> str:
    return subprocess.run([BIN / "kubectl", "help", *words], capture_output=True, text=True).stdout


def test_kubectl_knows_every_flag_of_the_pages() -> None:
    commands = kubectl_commands("kubernetes") + kubectl_commands("operations")
    assert len(commands) > 25
    for command in commands:
        flags = [word.split("=")[0] for word in command if re.match("--?[a-z]", word)]
        plain = [*itertools.takewhile(lambda word: not word.startswith("-"), command)]
        verb = plain[: {"create": 3, "rollout": 2}.get(plain[0], 1)]
        known = kubectl_help(*verb)
        assert known, verb
        for flag in flags:
            assert re.search(rf"{re.escape(flag)}[=,]", known), (verb, flag)


def test_every_command_for_a_secret_gives_all_keys_that_a_pod_mounts() -> None:
    """`kubectl replace` and `apply` delete the keys that are left out."""
    mounted: dict[str, set[str]] = {}
    for overlay in OVERLAYS:
        for pod in pods_of(render(DEPLOY / "overlays" / overlay)):
            for volume in pod.spec["volumes"]:
                if volume.get("secret", {}).get("secretName") in SECRETS:
                    keys = mounted.setdefault(volume["secret"]["secretName"], set())
                    keys |= {item["key"] for item in volume["secret"]["items"]}
    assert mounted == {name: {*files} for name, files in SECRETS.items()}
    seen = []
    for page in ("kubernetes", "operations", "security"):
        for command in kubectl_commands(page):
            if command[:3] == ["create", "secret", "generic"]:
                given = re.findall(r"--from-file=(\w+)=", " ".join(command))
                assert mounted[command[3]] == {*given}, command
                seen.append(command[3])
    assert {*seen} == {*SECRETS}
    assert len(seen) > len(SECRETS)  # to make them, and to replace a token


def test_what_a_page_replaces_a_secret_by_is_whole(tmp_path: pathlib.Path) -> None:
    """The documented command, as far as it needs no cluster, on the files that it names."""
    (command,) = (
        command
        for command in kubectl_commands("kubernetes")
        if "impala-learner-tokens" in command and "--dry-run=client" in command
    )
    for file in re.findall(r"--from-file=\w+=(\S+)", " ".join(command)):
        (tmp_path / file).write_text("actor 0123\n", encoding="utf-8")
    made = subprocess.run(
        [BIN / "kubectl", "--namespace", NAMESPACE, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    secret = yaml.safe_load(made.stdout)
    assert secret["metadata"]["namespace"] == NAMESPACE
    assert secret["data"].keys() == {"tokens", "reader"}


def test_a_token_is_added_on_a_line_of_its_own(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    (add,) = re.findall(r"^((?:echo.*\n)?cat .* >> tokens)$", text, re.MULTILINE)
    (tmp_path / "tokens").write_text("reader " + "0" * 64)  # its last line has no end
    (tmp_path / "actor.token").write_text("actor " + "1" * 64 + "\n")
    subprocess.run(["bash", "-c", add], cwd=tmp_path, check=True)
    lines = (tmp_path / "tokens").read_text().split("\n")
    assert [line.split()[0] for line in lines if line] == ["reader", "actor"]


def test_the_page_undoes_all_workloads_together_and_cleans_up_after_itself() -> None:
    commands = [" ".join(command) for command in kubectl_commands("kubernetes")]
    assert not [command for command in commands if command.startswith("rollout undo")]
    objects = render(DEPLOY / "overlays/production")
    for pod in pods_of(objects):
        kind, _, name = pod.name.partition("/")
        assert f"rollout status {kind.lower()}/{name}" in commands
    assert "drain NODE --ignore-daemonsets --delete-emptydir-data" in commands
    assert "delete pod impala-learner-0" in commands
    # What is left over is found by the label, but for the tokens and the claim.
    ((key, value),) = RUN.items()
    assert f"delete configmaps,secrets --selector {key}={value}" in commands


@pytest.mark.parametrize("page", ["kubernetes", "operations", "security"])
def test_the_commands_of_a_page_are_right(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    for block in re.findall(
        r"^```\n(.*?)^```", text.replace("\\\n", " "), re.DOTALL | re.MULTILINE
    ):
        for line in re.findall(r"(?:^|[$] +|-- +)impala (.*)", block, re.MULTILINE):
            name, *words = shlex.split(line)
            assert isinstance(parse(name, cli.COMMANDS[name][0], words), object)


def overlay_of_the_page(directory: pathlib.Path) -> pathlib.Path:
    """Writes `my-run`, whose files the page has, and deploy/ beside it. Returns its directory."""
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
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
    directory = overlay_of_the_page(tmp_path)
    objects = render(directory)
    assert complaints(directory) == []
    (learner,) = started(objects, "learner")
    assert isinstance(learner.command, Learner)
    assert learner.command.settings.agent.core == "lstm"
    assert learner.command.settings.total_frames == 1_000_000


def test_the_policy_of_a_page_lets_the_learner_reach_its_store(tmp_path: pathlib.Path) -> None:
    directory = overlay_of_the_page(tmp_path)
    run = "learner: {checkpoint_store: 's3://BUCKET/RUN'}"
    (directory / "run.yaml").write_text(run, encoding="utf-8")
    (complaint,) = complaints(directory)
    assert "StatefulSet/impala-learner does not reach s3://BUCKET/RUN, only {}" in complaint
    file = directory / "kustomization.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("resources:\n", "resources:\n  - store.yaml\n"), encoding="utf-8")
    render.cache_clear()
    assert complaints(directory) == []
    (learner,) = [pod for pod in pods_of(render(directory)) if "grpc" in pod.ports]
    assert traffic(render(directory), learner, "egress") == {53: {"everyone"}, 443: {"everyone"}}


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
    "a peer of another name": Mistake(
        *("overlays/peers/kustomization.yaml", "--peers=impala-learner-0", "--peers=learner-0"),
        *("peers", "commands", "is not peer 0 at learner-0.impala-learner:50052"),
    ),
    "peers that are replaced one by one": Mistake(
        *("overlays/peers/learner.yaml", "OnDelete", "RollingUpdate"),
        *("peers", "commands", "waits for peers with other settings"),
    ),
    "a peers' port that actors reach": Mistake(
        *("overlays/peers/network.yaml", "ingress:\n    - from:", "ingress:\n    - other:"),
        *("peers", "policies", "is reached by"),
    ),
    "an actor for a learner that is not there": Mistake(
        *("overlays/peers/kustomization.yaml", "learner-1.impala-learner:50051", "learner-2.b:1"),
        *("peers", "ports", "dials impala-learner-2.b:1, which no headless service is"),
    ),
    "a wrong flag": Mistake(
        *("base/actor.yaml", "--when-finished=", "--when-finish="),
        *("local", "commands", "actor has no flag --when-finish"),
    ),
    "a wrong value": Mistake(
        *("base/evaluator.yaml", "--role=evaluator", "--role=judge"),
        *("gpu", "commands", "judge"),
    ),
    "a preset that does not exist": Mistake(
        *("components/gpu/kustomization.yaml", "value: atari-deep", "value: atari-dep"),
        *("gpu", "commands", "The preset is 'atari-dep'"),
    ),
    "a setting that does not exist": Mistake(
        *("base/run.yaml", "checkpoint_seconds", "checkpoint_second"),
        *("tls", "commands", "There is no setting 'learner.checkpoint_second'"),
    ),
    "a configuration that is not mounted": Mistake(
        *("base/learner.yaml", "--config=/etc/impala/run/", "--config=/etc/impala/"),
        *("gpu", "commands", "Name a YAML file"),
    ),
    "runs outside the claim": Mistake(
        *("base/learner.yaml", "--logdir=/runs/run", "--logdir=/tmp/run"),
        *("gpu", "commands", "--logdir=/tmp/run is not within a claim"),
    ),
    "a run that starts over": Mistake(
        *("base/learner.yaml", "- --log-format=json", "- --fresh"),
        *("local", "commands", "starts over whenever it is restarted"),
    ),
    "no word of being insecure": Mistake(
        *("base/learner.yaml", "            - --security.insecure\n", ""),
        *("local", "commands", "Tokens would travel to 0.0.0.0:50051 in the clear"),
    ),
    "metrics for everyone without a word": Mistake(
        *("base/evaluator.yaml", "            - --security.open-ports\n", ""),
        *("local", "commands", "Metrics would be served on 0.0.0.0:9090 to whoever reaches it"),
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
    "a certificate for another name": Mistake(
        *("components/tls/certificates.yaml", "[impala-learner, localhost]", "[learner]"),
        *("tls", "agreement", "dials impala-learner, the learner's certificate is for"),
    ),
    "a metric of the dashboard that does not exist": Mistake(
        *("components/monitoring/dashboard.json", "impala_queue_unrolls{", "impala_queue{"),
        *("monitoring", "metrics", "nothing exports impala_queue"),
    ),
    "a scalar of the dashboard that does not exist": Mistake(
        *("components/monitoring/dashboard.json", "policy/entropy", "policy/chaos"),
        *("monitoring", "metrics", "no row of telemetry has policy/chaos"),
    ),
    "a metric of an alert that does not exist": Mistake(
        *("components/monitoring/alerts.yaml", "impala_updates_total[", "impala_updates["),
        *("monitoring", "metrics", "nothing exports impala_updates"),
    ),
    "a metric of the autoscaler that does not exist": Mistake(
        *("components/keda/scaled-object.yaml", "learner_wait_seconds", "learner_waits"),
        *("production", "metrics", "nothing exports impala_learner_waits_total"),
    ),
    "a label that does not exist": Mistake(
        *("components/keda/scaled-object.yaml", 'state="active"', 'status="active"'),
        *("production", "metrics", "no label status"),
    ),
    "a field of the autoscaler that does not exist": Mistake(
        *("components/keda/scaled-object.yaml", "maxReplicaCount", "maxReplicas"),
        *("production", "custom", "has an unknown maxReplicas"),
    ),
    "a container as root": Mistake(
        *("base/learner.yaml", "runAsUser: 10001", "runAsUser: 0"),
        *("local", "restricted", "StatefulSet/impala-learner, container learner runs as root"),
    ),
    "a container that may be root": Mistake(
        *("base/actor.yaml", "runAsNonRoot: true", "runAsNonRoot: false"),
        *("local", "restricted", "may run as root"),
    ),
    "a container that keeps its capabilities": Mistake(
        *("base/actor.yaml", "drop: [ALL]", "drop: [NET_RAW]"),
        *("spot-actors", "restricted", "keeps capabilities"),
    ),
    "a root file system that can be written": Mistake(
        *("base/evaluator.yaml", "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
        *("local", "house", "may write to its image"),
    ),
    "a grace period that is too short": Mistake(
        *(
            "base/learner.yaml",
            "terminationGracePeriodSeconds: 120",
            "terminationGracePeriodSeconds: 5",
        ),
        *("local", "house", "may be killed before it has drained"),
    ),
    "another version of the image": Mistake(
        *("base/kustomization.yaml", "newTag: ", "newTag: 9."),
        *("gpu", "image", "runs impala-learner:9."),
    ),
    "a port that nothing listens on": Mistake(
        *("base/learner.yaml", "--health-listen=0.0.0.0:8080", "--health-listen=0.0.0.0:8081"),
        *("local", "ports", "its flags say"),
    ),
    "metrics on loopback": Mistake(
        *("base/actor.yaml", "--metrics-listen=0.0.0.0:", "--metrics-listen=127.0.0.1:"),
        *("local", "ports", "where nobody reaches it"),
    ),
    "a learner of another name": Mistake(
        *("base/actor.yaml", "--learner=impala-learner:", "--learner=learner:"),
        *("local", "ports", "dials learner:50051, which no headless service is"),
    ),
    "a policy that lets nobody in": Mistake(
        *("base/network.yaml", "component: evaluator", "component: judge"),
        *("local", "policies", "is reached by"),
    ),
    "a kind that does not exist": Mistake(
        *("base/network.yaml", "kind: NetworkPolicy", "kind: NetworkPolice"),
        *("gpu", "schema", "NetworkPolice"),
    ),
    "a field that does not exist": Mistake(
        *("base/actor.yaml", "terminationGracePeriodSeconds", "terminationGraceSeconds"),
        *("local", "schema", "terminationGraceSeconds"),
    ),
    "an empty list": Mistake(
        *("base/network.yaml", "policyTypes: [Ingress, Egress] #", "egress: [] #"),
        *("local", "apply", ".spec.egress is [], which a server drops"),
    ),
    "a StatefulSet that a broken pod blocks": Mistake(
        *("base/learner.yaml", "podManagementPolicy: Parallel", "minReadySeconds: 1"),
        *("local", "apply", "keeps a pod that never becomes ready"),
    ),
    "a Secret that nobody finds again": Mistake(
        *("components/tls/kustomization.yaml", "kind: Certificate", "kind: Certificates"),
        *("tls", "apply", "Certificate/impala-actor is not found by the label of a run"),
    ),
    "a component that nobody finds again": Mistake(
        *(
            "components/keda/kustomization.yaml",
            "kubernetes.io/name: impala",
            "kubernetes.io/of: it",
        ),
        *("production", "apply", "ScaledObject/impala-actor is not found by the label of a run"),
    ),
    "actors that are spread over all nodes": Mistake(
        *("components/spot-actors/actor.yaml", "      topologySpreadConstraints: null\n", ""),
        *("spot-actors", "placement", "and is spread over others all the same"),
    ),
    "a learner on a node that may be taken away": Mistake(
        *("base/learner.yaml", "key: eks.amazonaws.com/capacityType", "key: capacityType"),
        *("local", "placement", "StatefulSet/impala-learner does not mind a node with {'eks."),
    ),
    "an evaluator on a node that may be taken away": Mistake(
        *("base/evaluator.yaml", "weight: 100", "weight: 0"),
        *("gpu", "placement", "Deployment/impala-evaluator does not mind a node with"),
    ),
    "a node that actors do not know to be pre-emptible": Mistake(
        *("components/spot-actors/actor.yaml", "values: [SPOT]", "values: [spot]"),
        *("production", "placement", "tolerates {'eks.amazonaws.com/capacityType': 'SPOT'}"),
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


def test_the_command_prints_what_is_wrong_with_an_overlay_of_ones_own(
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


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("USER 10001:10001", "USER root", "the user is ['root']"),
        ("127.0.0.1:8080", "127.0.0.1:8081", "a health check asks port 8081"),
        ("COPY vtrace vtrace", "COPY trace vtrace", "there is no trace to copy"),
        ("ARG VERSION=", "ARG VERSION=9.", "VERSION is 9."),
    ],
)
def test_a_mistake_in_the_containerfile_is_found(right: str, wrong: str, complaint: str) -> None:
    assert right in containerfile()
    complaints = containerfile_complaints(containerfile().replace(right, wrong))
    assert any(complaint in each for each in complaints), complaints
