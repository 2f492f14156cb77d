"""What deploy/ renders to, and its pods' commands as the program reads them, without a cluster."""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import certificates
import trustme
import yaml

from impala.commands import main as cli
from impala.commands.parsing import parse
from impala.config import values
from impala.runtime.credentials import ROLES, SecurityError

Object = dict[str, Any]  # a Kubernetes object, or a part of one

ROOT = pathlib.Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
BIN = pathlib.Path(sys.executable).parent  # where kubectl and hadolint are

# What docs/kubernetes.md has the operator create: secret -> file -> contents.
TOKENS = {role: f"{role} {'0123456789abcdef' * 4}\n" for role in sorted(ROLES)}
SECRETS = {
    "impala-learner-tokens": {"tokens": "".join(TOKENS.values()), "reader": TOKENS["reader"]},
    "impala-actor-token": {"token": TOKENS["actor"]},
    "impala-evaluator-token": {"token": TOKENS["evaluator"]},
}


@functools.cache
def render(directory: pathlib.Path) -> tuple[Object, ...]:
    """What `kubectl apply -k` would send to a cluster."""
    rendered = subprocess.run(
        [BIN / "kubectl", "kustomize", directory], capture_output=True, text=True
    )
    assert rendered.returncode == 0, rendered.stderr
    return tuple(yaml.safe_load_all(rendered.stdout))


def name_of(thing: Object) -> str:
    return f"{thing['kind']}/{thing['metadata']['name']}"


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


class Pod(NamedTuple):
    """A workload's pods, each of which has one container here."""

    name: str  # of the workload: kind and name
    workload: Object
    labels: Mapping[str, str]
    spec: Object
    container: Object

    @property
    def words(self) -> list[str]:
        return [*self.container.get("command", ()), *self.container.get("args", ())]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    def port(self, port: int | str) -> int | None:
        """The number of a port, which may be given by its name; None if it is not opened."""
        number = self.ports.get(port) if isinstance(port, str) else port
        return number if number in self.ports.values() else None


def pods_of(objects: Sequence[Object]) -> list[Pod]:
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


def is_selected(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; an empty one matches everything."""
    assert {*selector} <= {"matchLabels", "matchExpressions"}, selector
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


# Command lines.


class Started(NamedTuple):
    """A pod and its command, as the program reads it."""

    pod: Pod
    command: cli.Learner | cli.Actor


@contextlib.contextmanager
def files_of(pod: Pod, objects: Sequence[Object]) -> Iterator[pathlib.Path]:
    """A directory that holds what the pod sees of its ConfigMaps and Secrets, at the same paths."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    secrets = SECRETS | {
        each["spec"]["secretName"]: certificate_files(json.dumps(each["spec"]))
        for each in of_kind(objects, "Certificate")
    }
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        for mount in pod.container["volumeMounts"]:
            place = root / mount["mountPath"].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            volume = volumes.get(mount["name"], {})
            source = volume.get("configMap") or volume.get("secret") or {}
            contents = maps.get(source.get("name", "")) or secrets.get(
                source.get("secretName", ""), {}
            )
            paths = {item["key"]: item["path"] for item in source.get("items", ())}
            for key, text in contents.items():
                if not paths or key in paths:
                    (place / paths.get(key, key)).write_text(text, encoding="utf-8")
        yield root


@functools.cache
def _authority() -> trustme.CA:
    return trustme.CA()


@functools.cache
def certificate_files(specification: str) -> dict[str, str]:
    """What cert-manager puts into a Secret for a Certificate, whose `spec` this is as JSON."""
    spec, authority = json.loads(specification), _authority()
    issued = certificates.issue(authority, *spec.get("dnsNames", ()), *spec.get("uris", ()))
    return {
        "tls.crt": "".join(blob.bytes().decode() for blob in issued.cert_chain_pems),
        "tls.key": issued.private_key_pem.bytes().decode(),
        "ca.crt": authority.cert_pem.bytes().decode(),
    }


def start(pod: Pod, objects: Sequence[Object]) -> Started | str:
    """Reads a pod's command line as the program does in it; or what the program says against it."""
    if pod.words[0] != "impala" or pod.words[1] not in ("learner", "actor"):
        return f"{pod.name} runs {pod.words[:2]}"
    environment = {each["name"]: each["value"] for each in pod.container.get("env", ())}
    silence = io.StringIO()
    command: cli.Learner | cli.Actor
    with files_of(pod, objects) as root:
        # Absolute paths are looked up among the pod's files; a learner's runs are on the claim.
        words = [re.sub(r"=(?=/)", f"={root}", word) for word in pod.words[2:]]
        try:
            with (
                contextlib.redirect_stderr(silence),
                mock.patch.dict(os.environ, environment, clear=True),
            ):
                command = parse(pod.words[1], cli.COMMANDS[pod.words[1]][0], words)
            if isinstance(command, cli.Learner):
                command.security.check(
                    command.listen, health=command.health_listen, metrics=command.metrics_listen
                )
            else:
                command.security.check(metrics=command.metrics_listen)
        except (values.OptionError, SecurityError) as error:
            return f"{pod.name}: {str(error).replace(str(root), '')}"
        except SystemExit:
            return f"{pod.name}: {silence.getvalue()}"
    return Started(pod, command)


@functools.cache
def _start(workload: str, files: str) -> Started | str:
    (pod,) = pods_of([json.loads(workload)])
    return start(pod, json.loads(files))


def all_started(objects: Sequence[Object]) -> list[Started | str]:
    """What becomes of each pod's command. What several overlays have alike is read once."""
    files = json.dumps(of_kind(objects, "ConfigMap", "Certificate"))
    return [_start(json.dumps(pod.workload), files) for pod in pods_of(objects)]


def started(objects: Sequence[Object], role: str = "") -> list[Started]:
    """The pods whose commands are right, maybe of one role only: learner, actor or evaluator."""
    right = [each for each in all_started(objects) if isinstance(each, Started)]
    return [each for each in right if role in ("", role_of(each))]


def role_of(each: Started) -> str:
    return "learner" if isinstance(each.command, cli.Learner) else each.command.role
