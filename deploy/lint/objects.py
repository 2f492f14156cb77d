"""Renders manifests to objects and pods."""

import functools
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

Object = dict[str, Any]  # a Kubernetes object, or a part of one
ROOT = pathlib.Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
BIN = pathlib.Path(sys.executable).parent  # where kubectl and hadolint are


class RenderError(Exception):
    """kubectl cannot render a directory; the message is kubectl's."""


@functools.cache
def render(directory: pathlib.Path) -> tuple[Object, ...]:
    """Returns the objects that `kubectl apply -k` would send to a cluster.

    Raises:
      RenderError: kubectl refuses the directory.
    """
    rendered = subprocess.run(
        [BIN / "kubectl", "kustomize", directory], capture_output=True, text=True
    )
    if rendered.returncode != 0:
        raise RenderError(rendered.stderr.strip())
    return tuple(yaml.safe_load_all(rendered.stdout))


def name_of(thing: Object) -> str:
    """Returns kind and name of an object, such as Service/impala-learner."""
    return f"{thing['kind']}/{thing['metadata']['name']}"


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    """Returns the objects of some kinds."""
    return [each for each in objects if each["kind"] in kinds]


class Pod(NamedTuple):
    """A workload's pods, and one of their containers."""

    name: str  # of the workload: kind and name
    workload: Object
    labels: Mapping[str, str]
    spec: Object
    container: Object

    @property
    def words(self) -> list[str]:
        """Returns the command line."""
        return [*self.container.get("command", ()), *self.container.get("args", ())]

    @property
    def ports(self) -> dict[str, int]:
        """Returns the opened ports: name -> number."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}

    def port(self, port: int | str) -> int | None:
        """Returns the number of a port, given by name or number; None if it is not opened."""
        number = self.ports.get(port) if isinstance(port, str) else port
        return number if number in self.ports.values() else None


def pods_of(objects: Sequence[Object]) -> list[Pod]:
    """Returns the pods of all workloads, by container."""
    return [
        Pod(
            name_of(each),
            each,
            each["spec"]["template"]["metadata"]["labels"],
            each["spec"]["template"]["spec"],
            container,
        )
        for each in objects
        if "template" in each.get("spec", {})
        for container in each["spec"]["template"]["spec"]["containers"]
    ]


def programs_of(objects: Sequence[Object]) -> list[Pod]:
    """Returns the pods that run this project's program; those of Envoy do not."""
    return [pod for pod in pods_of(objects) if pod.words[:1] == ["impala"]]


def is_selected(selector: Object, labels: Mapping[str, str]) -> bool:
    """Returns whether a label selector matches; an empty one matches everything.

    Raises:
      NotImplementedError: it uses features of selectors that this project does not use.
    """
    if not {*selector} <= {"matchLabels", "matchExpressions"}:
        raise NotImplementedError(f"Selector {selector}: use matchLabels or matchExpressions.")
    for expression in selector.get("matchExpressions", ()):
        if expression["operator"] != "In":
            raise NotImplementedError(f"Selector {expression}: use the operator In.")
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()
