"""Checks which pods prefer preemptible nodes, and which avoid them."""

from collections.abc import Mapping, Sequence

from deploy.lint.commands import role_of, started
from deploy.lint.objects import Object, Pod

PREEMPTIBLE = {  # label -> values, as the clouds and Karpenter document them
    "cloud.google.com/gke-spot": {"true"},
    "cloud.google.com/gke-provisioning": {"spot", "preemptible"},
    "kubernetes.azure.com/scalesetpriority": {"spot"},
    "eks.amazonaws.com/capacityType": {"SPOT"},
    "karpenter.sh/capacity-type": {"spot"},
}


def preferences(pod: Pod, node: Mapping[str, str]) -> int:
    """Returns the total weight of a pod's preferences that a node with these labels satisfies."""
    rules = pod.spec.get("affinity", {}).get("nodeAffinity", {})
    if not {*rules} <= {"preferredDuringSchedulingIgnoredDuringExecution"}:
        raise NotImplementedError(f"{pod.name}: only preferences are judged, not {rules}.")
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
    """Returns learners that may run on such nodes, and actors that avoid them."""
    found: list[str] = []
    nodes = [{label: value} for label, values in PREEMPTIBLE.items() for value in sorted(values)]
    for each in started(objects):
        pod, role = each.pod, role_of(each)
        ordinary = preferences(pod, {})
        for node in nodes:
            preemptible = preferences(pod, node)
            if role == "learner" and preemptible >= ordinary:
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
