"""Checks ports of flags, containers, probes, services and network policies."""

import itertools
from collections.abc import Iterator, Sequence

from deploy.lint.commands import started
from deploy.lint.objects import Object, Pod, is_selected, name_of, of_kind, pods_of
from impala.commands.actor import Actor
from impala.commands.learner import Learner
from impala.runtime import listen
from learner import peer_config
from learner.service.server import LIVENESS, SERVICE_NAME

MONITORING = "namespace monitoring"
LISTENS = {"grpc": "listen", "health": "health_listen", "metrics": "metrics_listen"}
HEALTH = ("", SERVICE_NAME, LIVENESS)  # services that probes may ask for


def port_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns ports that are inconsistent."""
    found: list[str] = []
    for each in started(objects):
        pod = each.pod
        listens = {
            name: str(getattr(each.command, field))
            for name, field in LISTENS.items()
            if getattr(each.command, field, None)
        }
        if isinstance(each.command, Learner) and (
            peers := peer_config.addresses(each.command.peers)
        ):
            # Of each peer, on all interfaces.
            listens["peers"] = f"0.0.0.0:{peers[0].rpartition(':')[2]}"
        said = {name: int(where.rpartition(":")[2]) for name, where in listens.items()}
        if pod.ports != said:
            found.append(f"{pod.name} opens {pod.ports}, its flags say {said}")
        for name, where in listens.items():
            if not where.startswith("0.0.0.0:"):
                found.append(f"{pod.name} serves {name} on {where}, where nobody reaches it")
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            found += [f"{pod.name}: {kind} {why}" for why in probe_complaints(pod, kind)]
        if isinstance(each.command, Actor):
            for address in listen.dialled(each.command.learner):
                host, _, port = address.rpartition(":")
                if (host, port) not in grpc_services(objects) | grpc_pods(objects):
                    found.append(f"{pod.name} dials {address}, which no headless service is")
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
    """Returns name and port of every headless service."""
    return {
        (service["metadata"]["name"], str(port["port"]))
        for service in of_kind(objects, "Service")
        if service["spec"].get("clusterIP") == "None"
        for port in service["spec"]["ports"]
    }


def grpc_pods(objects: Sequence[Object]) -> set[tuple[str, str]]:
    """Returns name and port of every pod of a StatefulSet with a headless service."""
    ports = dict(grpc_services(objects))
    return {
        (f"{each['metadata']['name']}-{i}.{service}", ports[service])
        for each in of_kind(objects, "StatefulSet")
        if (service := each["spec"]["serviceName"]) in ports
        for i in range(each["spec"]["replicas"])
    }


def probe_complaints(pod: Pod, kind: str) -> Iterator[str]:
    """Yields complaints about a probe; an actor needs no readiness probe."""
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
    """Returns pods that network policies open to others than intended."""
    found: list[str] = []
    pods = pods_of(objects)
    learners = {pod.name for pod in pods if "grpc" in pod.ports}
    grpc = {pod.ports["grpc"] for pod in pods if pod.name in learners}
    for pod in pods:
        is_learner = pod.name in learners
        if "metrics" in pod.ports:
            wanted = {pod.ports["metrics"]: {MONITORING}}
        else:  # Envoy
            wanted = {port: {"everyone"} for port in pod.ports.values()}
        if is_learner:
            wanted[pod.ports["grpc"]] = {pod.name for pod in pods} - learners
            if "peers" in pod.ports:
                wanted[pod.ports["peers"]] = {pod.name}
        if (reached := traffic(objects, pod, "ingress")) != wanted:
            found.append(f"{pod.name} is reached by {reached}, it should be by {wanted}")
        wanted = {53: {"everyone"}, **dict.fromkeys(grpc, learners)}
        reaches = traffic(objects, pod, "egress")
        if is_learner:  # it only answers, except to its peers
            own = pod.ports.get("peers")
            wanted = {53: {"everyone"}, own: {pod.name}} if own is not None else {}
        if reaches != wanted:
            found.append(f"{pod.name} reaches {reaches}, it should {wanted}")
    return found


def traffic(objects: Sequence[Object], pod: Pod, direction: str) -> dict[int, set[str]]:
    """Returns port -> who may use it. Without any policy for the pod, everyone: port 0."""
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
