"""Checks references within the manifests, and what a server changes when they are applied."""

from collections.abc import Iterator, Sequence
from typing import Any

from deploy.lint.commands import SECRETS
from deploy.lint.objects import Object, is_selected, name_of, of_kind, pods_of

NAMESPACE = "impala"  # which queries of the autoscaler and of an alert name


def namespace_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns objects that are in another namespace than this project's."""
    return [
        f"{name_of(each)} is not in the namespace {NAMESPACE}"
        for each in objects
        if each["metadata"].get("namespace") != NAMESPACE
    ]


def reference_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns selectors, volumes and accounts that refer to nothing, or to too much."""
    found: list[str] = []
    pods = pods_of(objects)
    by_name = {name_of(each): each for each in objects}
    certificates = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    namespaces = {each["metadata"].get("namespace", "of the context") for each in objects}
    if len(namespaces) > 1 or "of the context" in namespaces:
        found.append(f"the objects are in the namespaces {sorted(namespaces)}: set one for all")
    for each in objects:
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
        for each in pod.container.get("volumeMounts", ()):
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


RUN = {"app.kubernetes.io/name": "impala"}  # the label of all objects of a run


def apply_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns objects without the run's label, and fields that a server stores differently."""
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
    """Yields path and value of every leaf, including empty lists."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(f"{path}.{key}", item)
    elif isinstance(value, list) and value:
        for i, item in enumerate(value):
            yield from leaves(f"{path}[{i}]", item)
    else:
        yield path, value


def fixed_when_made(objects: Sequence[Object]) -> dict[str, Any]:
    """Returns what cannot be changed by applying another version."""
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
