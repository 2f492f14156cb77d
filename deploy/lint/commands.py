"""Checks the pods' command lines by parsing them as the program does, with their mounted files."""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from unittest import mock

import trustme

from deploy.lint import certificates
from deploy.lint.objects import Object, Pod, of_kind, pods_of, programs_of
from impala.commands.actor import Actor
from impala.commands.learner import Learner
from impala.commands.parsing import parse
from impala.config import values
from impala.runtime import listen
from impala.runtime.credentials import ROLES, SecurityError, certificate_grants
from impala.runtime.security import ServerSecurity
from learner import peer_config

# What docs/kubernetes.md has the operator create: secret -> file -> contents.
TOKENS = {role: f"{role} {'0123456789abcdef' * 4}\n" for role in sorted(ROLES)}
SECRETS = {
    "impala-learner-tokens": {"tokens": "".join(TOKENS.values()), "reader": TOKENS["reader"]},
    "impala-actor-token": {"token": TOKENS["actor"]},
    "impala-evaluator-token": {"token": TOKENS["evaluator"]},
}


_COMMANDS: Mapping[str, type[Learner | Actor]] = {"learner": Learner, "actor": Actor}


class Started(NamedTuple):
    """A pod and its parsed command."""

    pod: Pod
    command: Learner | Actor


@contextlib.contextmanager
def files_of(pod: Pod, objects: Sequence[Object]) -> Iterator[pathlib.Path]:
    """Makes a directory with what a pod sees of its ConfigMaps and Secrets, at the same paths."""
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
    """Returns what cert-manager puts into a Certificate's Secret; its `spec` is given as JSON."""
    spec, authority = json.loads(specification), _authority()
    issued = certificates.issue(authority, *spec.get("dnsNames", ()), *spec.get("uris", ()))
    return {
        "tls.crt": "".join(blob.bytes().decode() for blob in issued.cert_chain_pems),
        "tls.key": issued.private_key_pem.bytes().decode(),
        "ca.crt": authority.cert_pem.bytes().decode(),
    }


def start(pod: Pod, objects: Sequence[Object]) -> Started | str:
    """Returns a pod's parsed command, or the program's error message."""
    if pod.words[0] != "impala" or pod.words[1] not in _COMMANDS:
        return f"{pod.name} runs {pod.words[:2]}"
    environment = {each["name"]: each.get("value", "") for each in pod.container.get("env", ())}
    silence = io.StringIO()
    command: Learner | Actor
    with files_of(pod, objects) as root:
        # Absolute paths are mapped to the pod's files; a learner's runs are on the claim.
        words = [re.sub(r"=(?=/)", f"={root}", word) for word in pod.words[2:]]
        try:
            with (
                contextlib.redirect_stderr(silence),
                mock.patch.dict(os.environ, environment, clear=True),
            ):
                command = parse(pod.words[1], _COMMANDS[pod.words[1]], words)
            if isinstance(command, Learner):
                command.security.check(
                    command.listen,
                    health=command.health_listen,
                    metrics=command.metrics_listen,
                    has_peers=bool(command.peers),
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
    """Returns each pod's parsed command or error; what several overlays share is parsed once."""
    files = json.dumps(of_kind(objects, "ConfigMap", "Certificate"))
    return [_start(json.dumps(pod.workload), files) for pod in programs_of(objects)]


def started(objects: Sequence[Object], role: str = "") -> list[Started]:
    """Returns the pods with valid commands; with a role, only those of that role."""
    right = [each for each in all_started(objects) if isinstance(each, Started)]
    return [each for each in right if role in ("", role_of(each))]


def role_of(each: Started) -> str:
    """Returns learner, actor or evaluator."""
    return "learner" if isinstance(each.command, Learner) else each.command.role


def command_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns commands that the program would refuse, or that lose data that must be kept."""
    found = [each for each in all_started(objects) if isinstance(each, str)]
    for each in started(objects):
        pod, command = each
        if command.when_finished != "idle":
            found.append(f"{pod.name} exits when training has finished, to be started again")
        if command.log_format != "json":
            found.append(f"{pod.name} does not log JSON")
        if not isinstance(command, Learner):
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
        found += [f"{pod.name} {why}" for why in peer_complaints(pod, command)]
    roles = sorted(map(role_of, started(objects)))
    if roles != ["actor", "evaluator", "learner"] and not found:
        found.append(f"there are {roles}")
    return found


def peer_complaints(pod: Pod, command: Learner) -> Iterator[str]:
    """Yields what is wrong with learners that are peers."""
    spec, peers = pod.workload["spec"], peer_config.addresses(command.peers)
    if spec["replicas"] != max(1, len(peers)):
        yield f"has {spec['replicas']} replicas and {len(peers)} peers"
    name, service = pod.workload["metadata"]["name"], spec["serviceName"]
    for i, peer in enumerate(peers):
        if peer.rpartition(":")[0] != f"{name}-{i}.{service}":
            yield f"is not peer {i} at {peer}"
    try:
        peer_config.check(command.settings, max(1, len(peers)))
    except values.OptionError as error:
        yield str(error)
    if peers and spec.get("updateStrategy", {}).get("type") != "OnDelete":
        yield "waits for peers with other settings when it is updated"


def agreement_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns learners and actors whose settings do not match."""
    found: list[str] = []
    certificates = {
        each["spec"]["secretName"]: each["spec"] for each in of_kind(objects, "Certificate")
    }
    for learner in started(objects, "learner"):
        assert isinstance(learner.command, Learner)
        asked = learner.command.security
        names = {name for each in _shown(learner.pod, certificates) for name in each["dnsNames"]}
        if asked.tls_cert is not None and (roles := _roles(learner.pod, certificates)) != {
            "reader"
        }:
            found.append(f"{learner.pod.name}: its certificate is for {roles}, not a reader")
        for pod, command in started(objects):
            if isinstance(command, Learner):
                continue
            shown = command.security
            if shown.is_encrypted != (asked.tls_cert is not None):
                found.append(f"{pod.name}: one side speaks TLS, the other does not")
            if (shown.token_file is None) != (asked.token_file is None):
                found.append(f"{pod.name}: one side knows of tokens, the other does not")
            roles = _roles(pod, certificates)
            if asked.tls_client_ca is not None and roles != {command.role}:
                found.append(f"{pod.name}: its certificate is for {roles}, not {command.role}")
            for address in listen.dialled(command.learner):
                host = address.rpartition(":")[0]
                if asked.tls_cert is not None and host not in names:
                    found.append(
                        f"{pod.name} dials {host}, the learner's certificate is for {names}"
                    )
    return found


def _roles(pod: Pod, certificates: Mapping[str, Object]) -> set[str]:
    """Returns the roles in the URI names of a pod's certificates."""
    shown = _shown(pod, certificates)
    uris = [uri for each in shown for uri in each.get("uris", ())]
    grants = certificate_grants(uris, ServerSecurity().trust_domain)
    assert all(grant.names is None for grant in grants)  # the pods of a Deployment share one
    return {grant.role for grant in grants}


def _shown(pod: Pod, certificates: Mapping[str, Object]) -> list[Object]:
    """Returns the certificates that a pod mounts."""
    secrets = [volume.get("secret", {}).get("secretName") for volume in pod.spec["volumes"]]
    return [certificates[secret] for secret in secrets if secret in certificates]
