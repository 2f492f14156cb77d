"""Checks metrics of dashboards, alerts and autoscaling against what the program exports."""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Sequence

from actors.metrics import ActorMetrics
from deploy.lint.objects import ROOT, Object, name_of
from learner.telemetry.prometheus import DISTRIBUTIONS, SCALARS

TARGET_LABELS = {"namespace", "pod", "job", "instance", "container", "endpoint"}
OTHERS = {  # exported by Prometheus, its client library and the kubelet
    "up": set[str](),
    "process_start_time_seconds": set(),
    "kubelet_volume_stats_available_bytes": {"persistentvolumeclaim"},
    "kubelet_volume_stats_capacity_bytes": {"persistentvolumeclaim"},
}
GROUPING = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"
KEYWORDS = {"and", "or", "unless", "bool", "offset", "Inf", "NaN"}


@functools.cache
def known_metrics() -> dict[str, set[str]]:
    """Returns the name of every series of learner and actors -> its labels."""
    found: dict[str, set[str]] = {}

    def add(name: str, labels: set[str], is_histogram: bool) -> None:
        if is_histogram:
            found.update({f"{name}_bucket": labels | {"le"}})
            found.update({f"{name}_{suffix}": labels for suffix in ("count", "sum")})
        else:
            found[name] = labels

    for is_histogram, metrics in ((False, SCALARS), (True, DISTRIBUTIONS)):
        for name, row in ((each.name, each.row) for each in metrics):
            add(name, {*re.findall(r"\{(\w+)\}", row)}, is_histogram)
    for metric in vars(ActorMetrics()).values():
        for family in getattr(metric, "describe", list)():
            name = family.name + ("_total" if family.type == "counter" else "")
            add(name, {*metric._labelnames}, family.type == "histogram")
    add("impala_build_info", {"impala", "tensorflow"}, False)  # of both, by their exporter
    return found


def queries(objects: Sequence[Object]) -> Iterator[tuple[str, str, str]]:
    """Yields the place of a query, the query, and its legend with {{label}} in it."""
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
    """Returns metrics and labels that nothing exports."""
    return [
        f"{where}: {complaint}"
        for where, query, legend in queries(objects)
        for complaint in query_complaints(query, legend)
    ]


def query_complaints(query: str, legend: str = "") -> Iterator[str]:
    """Yields metrics and labels of a PromQL query that nothing exports."""
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
    """Returns the sources that name the scalars of a row."""
    files = [*(ROOT / "learner").rglob("*.py"), *(ROOT / "impala/algorithms").glob("*.py")]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def dashboard_of(config_map: Object) -> Object:
    """Returns the dashboard that a ConfigMap holds."""
    (text,) = config_map["data"].values()
    dashboard: Object = json.loads(text)
    return dashboard


def dashboard_complaints(objects: Sequence[Object]) -> list[str]:
    """Returns panels that overlap, have no description, or ask a fixed data source."""
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
