"""Checks objects against Kubernetes' schemas, and custom resources against our own."""

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import kubernetes_validate

from deploy.lint.objects import Object, is_selected, name_of, of_kind, programs_of

VERSIONS = [*dict.fromkeys(kubernetes_validate.utils.all_versions())][-3:]  # the newest


@functools.cache
def schema_complaint(thing: str, version: str) -> str | None:
    """Returns what is wrong with an object, given as JSON, or None."""
    try:
        kubernetes_validate.validate(json.loads(thing), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{version}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"{version}: {error.message}"
    return None


def schema_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns objects that one of the versions of Kubernetes refuses."""
    return [
        f"{name_of(each)}: {complaint}"
        for each in objects
        if (each["apiVersion"], each["kind"]) not in CUSTOM
        for version in VERSIONS
        if (complaint := schema_complaint(json.dumps(each), version))
    ]


# Schemas of custom resources, which only clusters have: the fields used here, written by hand. "!"
# marks required fields, a list holds the form of its items, str as a key stands for any name.
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
    """Yields where a value does not have a form of `CUSTOM`."""
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
    """Returns custom resources of another form, or with invalid references."""
    found: list[str] = []
    pods = programs_of(objects)
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
