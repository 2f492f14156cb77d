"""The manifests, images and dashboards under deploy/, held against the program without a cluster.

Each check is a function from what was rendered to a list of complaints. What is in the repository
must give none; the mistakes that are seeded at the end must each be found by the check that is for
them. TensorFlow is never loaded: what the learner exports is read from its source.
"""

import ast
import functools
import itertools
import json
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml
from manifests import (
    BIN,
    DEPLOY,
    OVERLAYS,
    ROOT,
    SECRETS,
    Object,
    Pod,
    Started,
    all_started,
    is_selected,
    name_of,
    of_kind,
    pods_of,
    render,
    role_of,
    started,
)

import actors.run
from actors.metrics import ActorMetrics
from impala.commands import main as cli
from impala.commands import train
from impala.commands.parsing import parse
from impala.runtime.credentials import certificate_grants
from impala.runtime.installation import MODULES, VERSION
from impala.runtime.security import ServerSecurity
from learner.front.server import LIVENESS, SERVICE_NAME

VERSIONS = [*dict.fromkeys(kubernetes_validate.utils.all_versions())][-3:]  # the newest
NAMESPACE = "impala"
MONITORING = "namespace monitoring"


# Kubernetes' own schemas.


@functools.cache
def schema_complaint(thing: str, version: str) -> str | None:
    """What is wrong with an object, given as JSON."""
    try:
        kubernetes_validate.validate(json.loads(thing), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{version}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"{version}: {error.message}"
    return None


def schema_complaints(objects: Sequence[Object]) -> list[str]:
    """Objects that one of the versions does not take."""
    return [
        f"{name_of(each)}: {complaint}"
        for each in objects
        if (each["apiVersion"], each["kind"]) not in CUSTOM
        for version in VERSIONS
        if (complaint := schema_complaint(json.dumps(each), version))
    ]


# Custom resources, whose schemas are in clusters only: the fields that are used here, by hand. "!"
# marks what must be there, a list holds the form of its items, str as a key stands for any name.
KEY = {"algorithm!": str, "size": int, "encoding": str, "rotationPolicy": str}
SCALING = {
    "stabilizationWindowSeconds": int,
    "policies!": [{"type!": str, "value!": int, "periodSeconds!": int}],
}
CUSTOM: dict[tuple[str, str], Any] = {
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef!": {"kind": str, "name!": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "pollingInterval": int,
        "advanced": {
            "horizontalPodAutoscalerConfig": {
                "behavior": {"scaleUp": SCALING, "scaleDown": SCALING}
            }
        },
        "triggers!": [
            {
                "type!": str,
                "metricType": str,
                "metadata!": {
                    "serverAddress!": str,
                    "query!": str,
                    "threshold!": str,
                    "ignoreNullValues": str,
                },
            }
        ],
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector!": {"matchLabels!": {str: str}},
        "podMetricsEndpoints!": [{"port!": str, "path": str, "interval": str}],
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups!": [
            {
                "name!": str,
                "rules!": [
                    {
                        "alert!": str,
                        "expr!": str,
                        "for": str,
                        "labels!": {"severity!": str},
                        "annotations!": {"summary!": str, "runbook!": str},
                    }
                ],
            }
        ]
    },
    ("cert-manager.io/v1", "Issuer"): {"selfSigned": {}, "ca": {"secretName!": str}},
    ("cert-manager.io/v1", "Certificate"): {
        "isCA": bool,
        "commonName": str,
        "secretName!": str,
        "secretTemplate!": {"labels!": {str: str}},
        "duration": str,
        "renewBefore": str,
        "dnsNames": [str],
        "uris": [str],
        "usages": [str],
        "privateKey": KEY,
        "issuerRef!": {"kind!": str, "name!": str},
    },
}


def form_complaints(where: str, value: Any, form: Any) -> Iterator[str]:
    """Where a value is not of a form of `CUSTOM`."""
    if isinstance(form, type):
        if type(value) is not form:
            yield f"{where} is {value!r}, not {form.__name__}"
    elif isinstance(form, list):
        if not isinstance(value, list) or not value:
            yield f"{where} is {value!r}, not a list"
        else:
            for i, item in enumerate(value):
                yield from form_complaints(f"{where}[{i}]", item, form[0])
    elif not isinstance(value, dict):
        yield f"{where} is {value!r}, not an object"
    elif str in form:
        for key, item in value.items():
            yield from form_complaints(f"{where}.{key}", item, form[str])
    else:
        forms = {key.removesuffix("!"): item for key, item in form.items()}
        yield from (
            f"{where} has no {key[:-1]}" for key in form if key[-1] == "!" and key[:-1] not in value
        )
        for key, item in value.items():
            if key in forms:
                yield from form_complaints(f"{where}.{key}", item, forms[key])
            else:
                yield f"{where} has an unknown {key}"


def custom_complaints(objects: Sequence[Object]) -> list[str]:
    """Custom resources of another form, or that lead nowhere."""
    found: list[str] = []
    pods = pods_of(objects)
    names = {name_of(each) for each in objects}
    certificates = of_kind(objects, "Certificate")
    made = {each["spec"]["secretName"] for each in certificates}
    for each in objects:
        name, spec = name_of(each), each.get("spec", {})
        form = CUSTOM.get((each["apiVersion"], each["kind"]))
        if form is None:
            continue
        if wrong := [*form_complaints(name, spec, form)]:
            found += wrong
            continue
        match each["kind"]:
            case "ScaledObject":
                target = spec["scaleTargetRef"]
                if f"{target['kind']}/{target['name']}" not in names:
                    found.append(f"{name} scales {target}, which is not there")
            case "PodMonitor":
                for pod in pods:
                    for endpoint in spec["podMetricsEndpoints"]:
                        if not is_selected(spec["selector"], pod.labels):
                            found.append(f"{name} does not select {pod.name}")
                        elif endpoint["port"] not in pod.ports:
                            found.append(f"{name}: {pod.name} has no port {endpoint['port']}")
            case "Issuer":
                if "ca" in spec and spec["ca"]["secretName"] not in made:
                    found.append(f"{name}: no certificate makes {spec['ca']['secretName']}")
            case "Certificate":
                issuer = f"{spec['issuerRef']['kind']}/{spec['issuerRef']['name']}"
                if issuer not in names:
                    found.append(f"{name}: there is no {issuer}")
    return found


# References within Kubernetes.


def reference_complaints(objects: Sequence[Object]) -> list[str]:
    """Selectors, volumes and accounts that name nothing, or too much."""
    found: list[str] = []
    pods = pods_of(objects)
    by_name = {name_of(each): each for each in objects}
    certificates = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    for each in objects:
        if each["metadata"].get("namespace") != NAMESPACE:
            found.append(f"{name_of(each)} is not in the namespace {NAMESPACE}")
        if each["kind"] in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
            selector = each["spec"]["selector"]
            selected = [pod.name for pod in pods if is_selected(selector, pod.labels)]
            own = [pod.name for pod in pods if pod.workload is each] or selected[:1]
            if not selected or selected != own:
                found.append(f"{name_of(each)} selects the pods of {selected}")
    for pod in pods:
        account = by_name.get(f"ServiceAccount/{pod.spec.get('serviceAccountName')}", {})
        if account.get("automountServiceAccountToken") is not False:
            found.append(f"{pod.name} has no account of its own without a token")
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            if not is_selected(constraint["labelSelector"], pod.labels):
                found.append(f"{pod.name} is spread among pods of another kind")
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        claims = {
            claim["metadata"]["name"]
            for claim in pod.workload["spec"].get("volumeClaimTemplates", ())
        }
        for each in pod.container["volumeMounts"]:
            if each["name"] not in volumes.keys() | claims:
                found.append(f"{pod.name} mounts {each['name']}, which is not there")
        for volume in volumes.values():
            if "configMap" in volume and f"ConfigMap/{volume['configMap']['name']}" not in by_name:
                found.append(f"{pod.name}: there is no ConfigMap {volume['configMap']['name']}")
            if "secret" in volume and (
                volume["secret"]["secretName"] not in SECRETS.keys() | certificates
            ):
                found.append(f"{pod.name}: nobody makes {volume['secret']['secretName']}")
    return found


# The restricted Pod Security level.

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def restricted_complaints(objects: Sequence[Object]) -> list[str]:
    """What the level `restricted` of the Pod Security Standards, baseline included, forbids."""
    workloads = [pod.workload for pod in pods_of(objects)]
    found = [
        f"{name_of(each)} has containers that no check looks at"
        for each in objects
        if "containers" in json.dumps(each.get("spec", {})) and each not in workloads
    ]
    for pod in pods_of(objects):
        context = pod.spec.get("securityContext", {})
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(field):
                found.append(f"{pod.name} has {field}")
        for volume in pod.spec.get("volumes", ()):
            if not {*volume} - {"name"} <= VOLUMES:
                found.append(f"{pod.name}: volume {volume['name']} is {sorted(volume)}")
        if context.get("sysctls") or context.get("windowsOptions"):
            found.append(f"{pod.name} sets sysctls or Windows options")
        containers = [
            each
            for field in ("initContainers", "containers", "ephemeralContainers")
            for each in pod.spec.get(field, ())
        ]
        for container in containers:
            name = f"{pod.name}, container {container['name']}"
            found += [f"{name} {wrong}" for wrong in container_complaints(container, context)]
    return found


def container_complaints(container: Object, pod: Object) -> Iterator[str]:
    """What the level forbids of a container whose pod has this security context."""
    own = container.get("securityContext", {})
    both = {**pod, **own}  # what the container says counts
    if both.get("runAsNonRoot") is not True:
        yield "may run as root"
    if 0 in (pod.get("runAsUser"), own.get("runAsUser")):
        yield "runs as root"
    if own.get("privileged"):
        yield "is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "keeps capabilities"
    if not {*capabilities.get("add", ())} <= {"NET_BIND_SERVICE"}:
        yield "adds capabilities"
    if own.get("procMount", "Default") != "Default":
        yield "sees all of /proc"
    if both.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield "is not confined by AppArmor"
    if both.get("seLinuxOptions"):
        yield "sets SELinux options"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "takes a port of its host"
    handlers = {**container, **container.get("lifecycle", {})}
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "postStart", "preStop"):
        for action in ("httpGet", "tcpSocket"):
            if handlers.get(name, {}).get(action, {}).get("host"):
                yield f"has a {name} of another host"


def house_complaints(objects: Sequence[Object]) -> list[str]:
    """What this project asks for beyond the restricted level."""
    found: list[str] = []
    for pod in pods_of(objects):
        container = pod.container
        if not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            found.append(f"{pod.name} may write to its image")
        if pod.spec.get("automountServiceAccountToken") is not False:
            found.append(f"{pod.name} has a token for the cluster's API")
        if pod.spec.get("enableServiceLinks") is not False:
            found.append(f"{pod.name} gets IMPALA_... variables from services")
        for kind, name in itertools.product(("requests", "limits"), ("cpu", "memory")):
            if name not in container.get("resources", {}).get(kind, {}):
                found.append(f"{pod.name} has no {kind} of {name}")
        image, _, tag = container["image"].partition(":")
        if (image, tag) not in ((target, VERSION) for target in IMAGES):
            found.append(f"{pod.name} runs {container['image']}, not version {VERSION}")
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for name, value in image_environment().items():
            if value.startswith("/tmp") and "/tmp" not in mounts:
                found.append(f"{pod.name}: {name} is {value}, which cannot be written")
        if pod.spec["terminationGracePeriodSeconds"] < grace_seconds(pod):
            found.append(f"{pod.name} may be killed before it has drained")
    return found


def grace_seconds(pod: Pod) -> float:
    """What the program itself allows for an end: a checkpoint, or the last receipts."""
    return train._GRACE_SECONDS if pod.words[1] == "learner" else 2 * actors.run._DRAIN_SECONDS


# Command lines.


def command_complaints(objects: Sequence[Object]) -> list[str]:
    """Commands that the program would refuse, or that lose what should be kept."""
    found = [each for each in all_started(objects) if isinstance(each, str)]
    for each in started(objects):
        pod, command = each
        if command.when_finished != "idle":
            found.append(f"{pod.name} exits when training has finished, to be started again")
        if command.log_format != "json":
            found.append(f"{pod.name} does not log JSON")
        if not isinstance(command, cli.Learner):
            continue
        claims = {
            claim["metadata"]["name"]
            for claim in pod.workload["spec"].get("volumeClaimTemplates", ())
        }
        kept = [
            mount["mountPath"] for mount in pod.container["volumeMounts"] if mount["name"] in claims
        ]
        logdir = next(word for word in pod.words if word.startswith("--logdir="))
        # Below the mount, not at it: --fresh moves an old run to a neighbour of the directory.
        if not any(logdir.startswith(f"--logdir={path}/") for path in kept):
            found.append(f"{pod.name}: {logdir} is not within a claim ({kept})")
        if command.config is None:
            found.append(f"{pod.name} has no --config")
        if command.fresh or command.empty_replay:
            found.append(f"{pod.name} starts over whenever it is restarted")
    roles = sorted(map(role_of, started(objects)))
    if roles != ["actor", "evaluator", "learner"] and not found:
        found.append(f"there are {roles}")
    return found


def agreement_complaints(objects: Sequence[Object]) -> list[str]:
    """Learner and actors that would not understand each other."""
    found: list[str] = []
    certificates = {
        each["spec"]["secretName"]: each["spec"] for each in of_kind(objects, "Certificate")
    }
    for learner in started(objects, "learner"):
        assert isinstance(learner.command, cli.Learner)
        asked = learner.command.security
        names = {name for each in _shown(learner.pod, certificates) for name in each["dnsNames"]}
        if asked.tls_cert is not None and (roles := _roles(learner.pod, certificates)) != {
            "reader"
        }:
            found.append(f"{learner.pod.name}: its certificate is for {roles}, not a reader")
        for pod, command in started(objects):
            if isinstance(command, cli.Learner):
                continue
            shown = command.security
            if shown.is_encrypted != (asked.tls_cert is not None):
                found.append(f"{pod.name}: one side speaks TLS, the other does not")
            if (shown.token_file is None) != (asked.token_file is None):
                found.append(f"{pod.name}: one side knows of tokens, the other does not")
            roles = _roles(pod, certificates)
            if asked.tls_client_ca is not None and roles != {command.role}:
                found.append(f"{pod.name}: its certificate is for {roles}, not {command.role}")
            host = command.learner.rpartition(":")[0]
            if asked.tls_cert is not None and host not in names:
                found.append(f"{pod.name} dials {host}, the learner's certificate is for {names}")
    return found


def _roles(pod: Pod, certificates: Mapping[str, Object]) -> set[str]:
    """What the URI names in a pod's certificates say that it may do."""
    shown = _shown(pod, certificates)
    uris = [uri for each in shown for uri in each.get("uris", ())]
    grants = certificate_grants(uris, ServerSecurity().trust_domain)
    assert all(grant.names is None for grant in grants)  # the pods of a Deployment share one
    return {grant.role for grant in grants}


def _shown(pod: Pod, certificates: Mapping[str, Object]) -> list[Object]:
    """The certificates that a pod mounts."""
    secrets = [volume.get("secret", {}).get("secretName") for volume in pod.spec["volumes"]]
    return [certificates[secret] for secret in secrets if secret in certificates]


# Ports: of flags, containers, probes, services and policies.

LISTENS = {"grpc": "listen", "health": "health_listen", "metrics": "metrics_listen"}
HEALTH = ("", SERVICE_NAME, LIVENESS)  # what probes may ask about


def port_complaints(objects: Sequence[Object]) -> list[str]:
    """Ports that one place says and another does not."""
    found: list[str] = []
    for each in started(objects):
        pod = each.pod
        listens = {
            name: str(getattr(each.command, field))
            for name, field in LISTENS.items()
            if getattr(each.command, field, None)
        }
        said = {name: int(listen.rpartition(":")[2]) for name, listen in listens.items()}
        if pod.ports != said:
            found.append(f"{pod.name} opens {pod.ports}, its flags say {said}")
        for name, listen in listens.items():
            if not listen.startswith("0.0.0.0:"):
                found.append(f"{pod.name} serves {name} on {listen}, where nobody reaches it")
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            found += [f"{pod.name}: {kind} {why}" for why in probe_complaints(pod, kind)]
        if isinstance(each.command, cli.Actor):
            host, _, port = each.command.learner.rpartition(":")
            if (host, port) not in grpc_services(objects):
                found.append(f"{pod.name} dials {host}:{port}, which no headless service is")
    for service in of_kind(objects, "Service"):
        pods = [
            pod
            for pod in pods_of(objects)
            if service["spec"]["selector"].items() <= pod.labels.items()
        ]
        if not pods:
            found.append(f"{name_of(service)} selects nothing")
        for pod, port in itertools.product(pods, service["spec"]["ports"]):
            if (number := pod.port(port["targetPort"])) != port["port"]:
                found.append(f"{name_of(service)}: port {port} is {number} of {pod.name}")
            if number == pod.ports.get("health"):
                found.append(f"{name_of(service)} leads to the health port of {pod.name}")
    for workload in of_kind(objects, "StatefulSet"):
        if workload["spec"]["serviceName"] not in {name for name, _ in grpc_services(objects)}:
            found.append(f"{name_of(workload)} has no headless service")
    return found


def grpc_services(objects: Sequence[Object]) -> set[tuple[str, str]]:
    """Name and port of every headless service."""
    return {
        (service["metadata"]["name"], str(port["port"]))
        for service in of_kind(objects, "Service")
        if service["spec"].get("clusterIP") == "None"
        for port in service["spec"]["ports"]
    }


def probe_complaints(pod: Pod, kind: str) -> Iterator[str]:
    """What is wrong with a probe: an actor has no readiness, everything else is there."""
    probe = pod.container.get(kind)
    is_learner = "health" in pod.ports
    if probe is None:
        if is_learner or kind != "readinessProbe":
            yield "is missing"
    elif is_learner:
        if probe.get("grpc", {}).get("port") != pod.ports["health"]:
            yield f"asks {probe.get('grpc')}, gRPC health is on {pod.ports['health']}"
        elif probe["grpc"].get("service", "") not in HEALTH:
            yield f"asks for {probe['grpc']['service']}, there are {HEALTH}"
    else:
        http = probe.get("httpGet", {})
        if http.get("path") != "/metrics" or pod.port(http["port"]) != pod.ports["metrics"]:
            yield f"asks {http}, metrics are on {pod.ports['metrics']}"


def policy_complaints(objects: Sequence[Object]) -> list[str]:
    """Who reaches which port, and who should."""
    found: list[str] = []
    pods = pods_of(objects)
    learners = {pod.name for pod in pods if "grpc" in pod.ports}
    grpc = {pod.ports["grpc"] for pod in pods if pod.name in learners}
    for pod in pods:
        is_learner = pod.name in learners
        wanted = {pod.ports["metrics"]: {MONITORING}}
        if is_learner:
            wanted[pod.ports["grpc"]] = {pod.name for pod in pods} - learners
        if (reached := traffic(objects, pod, "ingress")) != wanted:
            found.append(f"{pod.name} is reached by {reached}, it should be by {wanted}")
        wanted = {} if is_learner else {53: {"everyone"}, **dict.fromkeys(grpc, learners)}
        if (reaches := traffic(objects, pod, "egress")) != wanted:
            found.append(f"{pod.name} reaches {reaches}, it should {wanted}")
    return found


def traffic(objects: Sequence[Object], pod: Pod, direction: str) -> dict[int, set[str]]:
    """Port -> who may use it. Without any policy for the pod, everyone: port 0."""
    found: dict[int, set[str]] = {}
    policies = [
        each["spec"]
        for each in of_kind(objects, "NetworkPolicy")
        if is_selected(each["spec"]["podSelector"], pod.labels)
        and direction.capitalize() in each["spec"]["policyTypes"]
    ]
    if not policies:
        return {0: {"everyone"}}
    for rule in itertools.chain.from_iterable(policy.get(direction, ()) for policy in policies):
        peers: set[str] = set()
        for peer in rule.get("from" if direction == "ingress" else "to") or [{}]:
            if not peer:
                peers.add("everyone")
            elif "namespaceSelector" in peer:
                peers.add(
                    f"namespace {', '.join(peer['namespaceSelector']['matchLabels'].values())}"
                )
            else:
                peers |= {
                    other.name
                    for other in pods_of(objects)
                    if is_selected(peer["podSelector"], other.labels)
                }
        for port in rule.get("ports") or [{"port": 0}]:
            found.setdefault(port["port"], set()).update(peers)
    return found


# Metrics of dashboards, alerts and autoscaling.

TARGET_LABELS = {"namespace", "pod", "job", "instance", "container", "endpoint"}
OTHERS = {  # what Prometheus and the kubelet say
    "up": set[str](),
    "kubelet_volume_stats_available_bytes": {"persistentvolumeclaim"},
    "kubelet_volume_stats_capacity_bytes": {"persistentvolumeclaim"},
}
GROUPING = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"
KEYWORDS = {"and", "or", "unless", "bool", "offset", "Inf", "NaN"}


@functools.cache
def known_metrics() -> dict[str, set[str]]:
    """The name of every series of learner and actors -> its labels."""
    found: dict[str, set[str]] = {}

    def add(name: str, labels: set[str], is_histogram: bool) -> None:
        if is_histogram:
            found.update({f"{name}_bucket": labels | {"le"}})
            found.update({f"{name}_{suffix}": labels for suffix in ("count", "sum")})
        else:
            found[name] = labels

    for call in ast.walk(
        ast.parse((ROOT / "learner/telemetry/prometheus.py").read_text(encoding="utf-8"))
    ):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
            if call.func.id == "Scalar":  # name, kind, row, documentation
                add(words[0], {*re.findall(r"\{(\w+)\}", words[2])}, False)
            elif call.func.id == "Distribution":  # name, row, documentation
                add(words[0], {*re.findall(r"\{(\w+)\}", words[1])}, True)
    for metric in vars(ActorMetrics()).values():
        for family in getattr(metric, "describe", list)():
            name = family.name + ("_total" if family.type == "counter" else "")
            add(name, {*metric._labelnames}, family.type == "histogram")
    return found


def queries(objects: Sequence[Object]) -> Iterator[tuple[str, str, str]]:
    """Where a query stands, the query, and text with {{label}} in it for its results."""
    for each in objects:
        name = name_of(each)
        for group in each.get("spec", {}).get("groups", ()):
            for rule in group["rules"]:
                yield f"{name}, {rule['alert']}", rule["expr"], ""
        for trigger in each.get("spec", {}).get("triggers", ()):
            yield name, trigger["metadata"]["query"], ""
        if "grafana_dashboard" in each["metadata"].get("labels", {}):
            dashboard = dashboard_of(each)
            for variable in dashboard["templating"]["list"]:
                if variable["type"] == "query":  # label_values(METRIC, LABEL)
                    yield name, variable["query"]["query"].partition(",")[0], ""
            for panel in dashboard["panels"]:
                for target in panel.get("targets", ()):
                    yield f"{name}, {panel['title']}", target["expr"], target["legendFormat"]


def metric_complaints(objects: Sequence[Object]) -> list[str]:
    """Metrics and labels that nothing exports."""
    return [
        f"{where}: {complaint}"
        for where, query, legend in queries(objects)
        for complaint in query_complaints(query, legend)
    ]


def query_complaints(query: str, legend: str = "") -> Iterator[str]:
    """The same for one PromQL query."""
    known = known_metrics() | OTHERS
    text = re.sub(r'"[^"]*"', '""', query)
    grouped = {
        label for labels in re.findall(GROUPING, text) for label in re.findall(r"\w+", labels)
    }
    bare = re.sub(r"\[[^]]*\]|\{[^}]*\}", "", re.sub(GROUPING, " ", text))
    words = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)\b(?!\s*\()", bare)
    names = [word for word in words if word not in KEYWORDS]
    if not names:
        yield f"there is no metric in {query!r}"
    labels = {*TARGET_LABELS}
    for name in names:
        if name not in known:
            yield f"nothing exports {name}"
        labels |= known.get(name, set())
    matched = {
        label
        for part in re.findall(r"\{([^}]*)\}", text)
        for label in re.findall(r"(\w+)\s*[=!]", part)
    }
    for label in sorted((matched | grouped | {*re.findall(r"\{\{(\w+)\}\}", legend)}) - labels):
        yield f"{' and '.join(names)} have no label {label}"
    for scalar in re.findall(r'\bname=~?"([^"]+)"', query):
        literal = scalar.partition(".*")[0].rstrip("/")
        if f'"{literal}' not in telemetry():
            yield f"no row of telemetry has {scalar}"


@functools.cache
def telemetry() -> str:
    """The sources that name the scalars of a row."""
    files = [*(ROOT / "learner").rglob("*.py"), *(ROOT / "impala/algorithms").glob("*.py")]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def dashboard_of(config_map: Object) -> Object:
    (text,) = config_map["data"].values()
    return json.loads(text)


def dashboard_complaints(objects: Sequence[Object]) -> list[str]:
    """Panels that lie upon each other, say nothing of themselves, or ask a fixed data source."""
    found: list[str] = []
    for each in objects:
        if "grafana_dashboard" not in each["metadata"].get("labels", {}):
            continue
        panels = dashboard_of(each)["panels"]
        if len({panel["id"] for panel in panels}) < len(panels):
            found.append("two panels have the same id")
        taken: dict[tuple[int, int], str] = {}
        for panel in panels:
            title, place = panel["title"], panel["gridPos"]
            for cell in itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            ):
                if (other := taken.setdefault(cell, title)) != title or cell[0] >= 24:
                    found.append(f"{title} lies upon {other}, or outside")
                    break
            if panel["type"] == "row":
                continue
            if not panel.get("description") or not panel["targets"]:
                found.append(f"{title} has no description or shows nothing")
            sources = [target["datasource"]["uid"] for target in (panel, *panel["targets"])]
            if {*sources} != {"${datasource}"}:
                found.append(f"{title} asks {sources}")
    return found


# Images.

IMAGES = ("impala-learner", "impala-actor")


@functools.cache
def containerfile() -> str:
    """The Containerfile with continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    return text.replace("\\\n", "")


@functools.cache
def image_environment() -> dict[str, str]:
    return {
        name: value
        for line in re.findall(r"^ENV (.*)$", containerfile(), re.MULTILINE)
        for name, value in re.findall(r"(\w+)=(\S+)", line)
    }


@functools.cache
def containerfile_complaints(text: str) -> list[str]:
    """What a linter does not know of: versions, users, ports and sources."""
    found = []
    (version,) = re.findall(r"^ARG VERSION=(\S+)$", text, re.MULTILINE)
    if version != VERSION:
        found.append(f"VERSION is {version}, the project has {VERSION}")
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    pods = pods_of(render(DEPLOY / "base"))
    wanted = {
        f"{context['runAsUser']}:{context['runAsGroup']}"
        for context in (pod.spec["securityContext"] for pod in pods)
    }
    if {*users} != wanted:
        found.append(f"the user is {users}, the pods' is {sorted(wanted)}")
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    if sorted(allowed) != sorted(copied):
        found.append(f"copied is {sorted(copied)}, .containerignore lets through {sorted(allowed)}")
    found += [f"there is no {source} to copy" for source in copied if not (ROOT / source).exists()]
    checks = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    ports = [port for pod in pods for port in pod.ports.values()]
    for check in map(json.loads, checks):
        compile(check[-1], "HEALTHCHECK", "exec")
        (port,) = re.findall(r"127\.0\.0\.1:(\d+)", check[-1])
        if int(port) not in ports:
            found.append(f"a health check asks port {port}, the pods have {sorted(ports)}")
    if len(checks) != len(IMAGES):
        found.append(f"there are {len(checks)} health checks for {len(IMAGES)} images")
    return found


# What a server makes of it when it is applied, again and over something else.

RUN = {"app.kubernetes.io/name": "impala"}  # the label by which all of a run is found


def apply_complaints(objects: Sequence[Object]) -> list[str]:
    """What would be no longer found, or what a server keeps otherwise than it was written."""
    found = [
        f"{name_of(each)}: {path} is {value!r}, which a server drops: each diff would show it"
        for each in objects
        for path, value in leaves("", each)
        if value is None or value == []
    ]
    for each in objects:
        labels = [each["metadata"].get("labels", {})]
        if each["kind"] == "Certificate":  # its Secret stays when it is deleted
            labels.append(each["spec"].get("secretTemplate", {}).get("labels", {}))
        if not all(RUN.items() <= some.items() for some in labels):
            found.append(f"{name_of(each)} is not found by the label of a run: {labels}")
        if each["kind"] == "StatefulSet" and each["spec"].get("podManagementPolicy") != "Parallel":
            found.append(
                f"{name_of(each)} keeps a pod that never becomes ready, whatever is applied"
            )
    return found


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Everything in an object that holds nothing more, and where; empty lists and objects too."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(f"{path}.{key}", item)
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from leaves(f"{path}[{i}]", item)
    else:
        yield path, value


def fixed_when_made(objects: Sequence[Object]) -> dict[str, Any]:
    """What cannot be changed by applying another version."""
    fields = {
        "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
        "Deployment": ("selector",),
        "Service": ("clusterIP",),
    }
    return {
        f"{name_of(each)}: {field}": each["spec"].get(field)
        for each in objects
        for field in fields.get(each["kind"], ())
    }


# Nodes that may be taken away.

PREEMPTIBLE = {  # label -> values, as the clouds and Karpenter document them
    "cloud.google.com/gke-spot": {"true"},
    "cloud.google.com/gke-provisioning": {"spot", "preemptible"},
    "kubernetes.azure.com/scalesetpriority": {"spot"},
    "eks.amazonaws.com/capacityType": {"SPOT"},
    "karpenter.sh/capacity-type": {"spot"},
}


def preferences(pod: Pod, node: Mapping[str, str]) -> int:
    """The weight of what a pod prefers that a node with these labels has."""
    rules = pod.spec.get("affinity", {}).get("nodeAffinity", {})
    assert {*rules} <= {"preferredDuringSchedulingIgnoredDuringExecution"}, rules
    return sum(
        term["weight"]
        for term in rules.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        if all(
            (node.get(each["key"]) in each["values"])
            == {"In": True, "NotIn": False}[each["operator"]]
            for each in term["preference"]["matchExpressions"]
        )
    )


def placement_complaints(objects: Sequence[Object]) -> list[str]:
    """Learners and evaluators that do not mind being taken away; actors that are kept from it."""
    found: list[str] = []
    nodes = [{label: value} for label, values in PREEMPTIBLE.items() for value in sorted(values)]
    for each in started(objects):
        pod, role = each.pod, role_of(each)
        ordinary = preferences(pod, {})
        for node in nodes:
            preemptible = preferences(pod, node)
            if role != "actor" and preemptible >= ordinary:
                found.append(f"{pod.name} does not mind a node with {node}")
            if (
                role == "actor"
                and ordinary < preemptible
                and pod.spec.get("topologySpreadConstraints")
            ):
                found.append(f"{pod.name} prefers {node}, and is spread over others all the same")
            if role == "actor" and pod.spec.get("tolerations") and preemptible <= ordinary:
                found.append(f"{pod.name} tolerates {node} and does not prefer it")
    return found


# What is in the repository passes.

CHECKS: dict[str, Callable[[Sequence[Object]], list[str]]] = {
    "schema": schema_complaints,
    "custom": custom_complaints,
    "references": reference_complaints,
    "restricted": restricted_complaints,
    "house": house_complaints,
    "commands": command_complaints,
    "agreement": agreement_complaints,
    "ports": port_complaints,
    "policies": policy_complaints,
    "metrics": metric_complaints,
    "dashboards": dashboard_complaints,
    "apply": apply_complaints,
    "placement": placement_complaints,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_passes(overlay: str, check: str) -> None:
    assert CHECKS[check](render(DEPLOY / "overlays" / overlay)) == []


def test_the_overlays_are_those_there_should_be() -> None:
    assert {*OVERLAYS} >= {"local", "gpu", "spot-actors", "tls", "monitoring"}
    assert len(VERSIONS) == 3
    components = {path.name for path in (DEPLOY / "components").iterdir()}
    production = (DEPLOY / "overlays/production/kustomization.yaml").read_text(encoding="utf-8")
    assert {*re.findall(r"components/(\S+)", production)} == components


def test_an_overlay_does_what_it_is_for() -> None:
    def pod(overlay: str, role: str) -> Started:
        (found,) = started(render(DEPLOY / "overlays" / overlay), role)
        return found

    local = pod("local", "learner").command
    assert isinstance(local, cli.Learner)
    assert local.settings.environment.id == "Catch"
    assert local.settings.learner.checkpoint_seconds == 10
    assert local.security.insecure
    gpu = pod("gpu", "learner")
    assert gpu.pod.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    secure = pod("tls", "learner").command
    assert isinstance(secure, cli.Learner) and not secure.security.insecure
    assert pod("spot-actors", "actor").pod.spec["tolerations"]
    assert "tolerations" not in pod("spot-actors", "evaluator").pod.spec
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


def test_the_pages_know_every_alert_and_no_metric_that_is_not_there() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    (rules,) = of_kind(render(DEPLOY / "overlays/monitoring"), "PrometheusRule")
    for rule in rules["spec"]["groups"][0]["rules"]:
        assert f"`{rule['alert']}`" in words
        assert " ".join(rule["annotations"]["runbook"].split()) in words
    named = set(re.findall(r"`(impala_\w+)", page))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known_metrics()}
    assert named <= known_metrics().keys() | families
    assert len(named) > 10


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
                keys = re.findall(r"--from-file=(\w+)=", " ".join(command))
                assert mounted[command[3]] == {*keys}, command
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


def test_the_overlay_of_a_page_is_right(tmp_path: pathlib.Path) -> None:
    page = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
    (overlay,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    directory = tmp_path / "my-run"
    directory.mkdir()
    (directory / "kustomization.yaml").write_text(overlay, encoding="utf-8")
    (directory / "run.yaml").write_text("total_frames: 1_000_000", encoding="utf-8")
    objects = render(directory)
    for check in CHECKS.keys() - {"house"}:  # which knows the project's own images only
        assert CHECKS[check](objects) == []
    (learner,) = started(objects, "learner")
    assert isinstance(learner.command, cli.Learner)
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
        *("gpu", "commands", "Give --config a YAML file"),
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
        *("gpu", "house", "runs impala-learner:9."),
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
