"""Checks the restricted Pod Security level, and this project's further requirements."""

import itertools
import json
from collections.abc import Iterator, Sequence

import actors.run
from deploy.lint.images import IMAGES, image_environment
from deploy.lint.objects import Object, Pod, name_of, pods_of, programs_of
from impala.commands import train
from impala.runtime.installation import VERSION

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
    """Returns what the Pod Security level `restricted`, baseline included, forbids."""
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
    """Yields what the level forbids in a container whose pod has this security context."""
    own = container.get("securityContext", {})
    both = {**pod, **own}  # the container's setting overrides the pod's
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
    """Returns violations of this project's requirements beyond the restricted level."""
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
    for pod in programs_of(objects):
        mounts = {mount["mountPath"] for mount in pod.container["volumeMounts"]}
        for name, value in image_environment().items():
            if value.startswith("/tmp") and "/tmp" not in mounts:
                found.append(f"{pod.name}: {name} is {value}, which cannot be written")
        if pod.words[1] == "actor" and not pod.spec.get("shareProcessNamespace"):
            found.append(f"{pod.name} has nobody to reap what environments leave behind")
        if pod.spec["terminationGracePeriodSeconds"] < grace_seconds(pod):
            found.append(f"{pod.name} may be killed before it has drained")
    return found


def image_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns pods that run images of other versions."""
    images = [f"{name}:{VERSION}" for name in IMAGES]
    return [
        f"{pod.name} runs {pod.container['image']}, not version {VERSION}"
        for pod in programs_of(objects)
        if pod.container["image"] not in images
    ]


def grace_seconds(pod: Pod) -> float:
    """Returns the program's own time limit for its end: a checkpoint, or the last receipts."""
    return train.GRACE_SECONDS if pod.words[1] == "learner" else 2 * actors.run._DRAIN_SECONDS
