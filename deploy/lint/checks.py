"""The list of all checks."""

import pathlib
from collections.abc import Callable, Mapping, Sequence

from deploy.lint.commands import agreement_complaints, command_complaints
from deploy.lint.images import containerfile, containerfile_complaints
from deploy.lint.metrics import dashboard_complaints, metric_complaints
from deploy.lint.network import policy_complaints, port_complaints
from deploy.lint.objects import DEPLOY, OVERLAYS, Object, render
from deploy.lint.placement import placement_complaints
from deploy.lint.references import apply_complaints, namespace_complaints, reference_complaints
from deploy.lint.schemas import custom_complaints, schema_complaints
from deploy.lint.security import house_complaints, image_complaints, restricted_complaints

CHECKS: Mapping[str, Callable[[Sequence[Object]], list[str]]] = {
    "schema": schema_complaints,
    "custom": custom_complaints,
    "namespace": namespace_complaints,
    "references": reference_complaints,
    "restricted": restricted_complaints,
    "house": house_complaints,
    "image": image_complaints,
    "commands": command_complaints,
    "agreement": agreement_complaints,
    "ports": port_complaints,
    "policies": policy_complaints,
    "metrics": metric_complaints,
    "dashboards": dashboard_complaints,
    "apply": apply_complaints,
    "placement": placement_complaints,
}
NOT_FOR_OTHERS = ("image", "namespace")  # a user's overlay may have others


def own_complaints() -> list[str]:
    """Returns complaints about this project's overlays and its Containerfile."""
    found = [
        f"overlays/{overlay}: {name}: {complaint}"
        for overlay in OVERLAYS
        for name, check in CHECKS.items()
        for complaint in check(render(DEPLOY / "overlays" / overlay))
    ]
    return found + [f"Containerfile: {each}" for each in containerfile_complaints(containerfile())]


def complaints(directory: pathlib.Path) -> list[str]:
    """Returns complaints about a user's overlay.

    Raises:
      RenderError: kubectl refuses the directory.
    """
    objects = render(directory)
    return [
        f"{directory}: {name}: {complaint}"
        for name, check in CHECKS.items()
        if name not in NOT_FOR_OTHERS
        for complaint in check(objects)
    ]
