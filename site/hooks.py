"""Makes a site of the pages: their order, pages outside of docs/, and the reference of the code.

MkDocs calls these functions by their names.
"""

import json
import pathlib
import posixpath
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parent.parent

# Pages of the site that are not in docs/, and where they are.
OUTSIDE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "clients/node.md": "clients/node/README.md",
    "clients/python.md": "clients/python/README.md",
}
SECTIONS = re.findall(r"^class (\w*Config)\b", (ROOT / "impala/config/schema.py").read_text(), re.M)

# Pages made of docstrings: title, options of mkdocstrings, modules.
REFERENCE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "reference-python.md": (
        "Python interface",
        {},
        (
            "impala.commands.library",
            "impala.play.policy",
            "actors.external",
            "vtrace.vtrace",
            "impala.environments.base",
            "impala.algorithms.base",
        ),
    ),
    "reference-settings.md": (
        "Settings",
        {"merge_init_into_class": False, "members": SECTIONS},
        ("impala.config.schema",),
    ),
}


def on_config(config: MkDocsConfig) -> None:
    """Takes the navigation from the list of pages in docs/README.md."""
    config.mdx_configs["toc"]["slugify"] = _slug
    sections: list[dict[str, Any]] = [{"Start": [{"Overview": "index.md"}]}]
    for line in (ROOT / "docs/README.md").read_text().splitlines():
        if heading := re.fullmatch(r"(\w[^\[]*?)(?: \(.*\))?:", line):
            if heading[1] not in sections[-1]:
                sections.append({heading[1]: []})
        elif entry := re.match(r"\d+\. \[(.*?)\]\((.*?)\)", line):
            next(iter(sections[-1].values())).append({entry[1]: entry[2]})
    reference = [{title: page} for page, (title, *_) in REFERENCE.items()]
    project = [{"Contributing": "CONTRIBUTING.md"}, {"Changelog": "CHANGELOG.md"}]
    clients = [{"Actor in Node": "clients/node.md"}, {"Actor in Python": "clients/python.md"}]
    config.nav = [*sections, {"Reference": reference}, {"Project": project + clients}]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of docs/ and the reference; the list of pages is the navigation."""
    if listed := files.get_file_from_path("README.md"):
        files.remove(listed)
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, (title, options, modules) in REFERENCE.items():
        parts = (  # JSON is YAML
            f"::: {each}\n    options: {json.dumps({'toc_label': each, **options})}"
            for each in modules
        )
        files.append(File.generated(config, page, content="\n\n".join([f"# {title}", *parts])))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links between files to the pages of the site; what is no page loses its link."""
    here = page.file.src_uri
    source = OUTSIDE.get(here, f"docs/{here}")
    pages = {of: page for page, of in OUTSIDE.items()} | {"docs/README.md": "index.md"}

    def led(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        there = pages.get(target, target.removeprefix("docs/"))
        if not files.get_file_from_path(there):
            return text if text[0] != "!" else link[0]
        return f"{text}({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    code = r"^```.*?^```"
    parts = re.split(f"({code})", markdown, flags=re.M | re.S)
    linked = r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)"
    parts[::2] = [re.sub(linked, led, part) for part in parts[::2]]
    return "".join(parts)


def _slug(text: str, separator: str) -> str:
    """Names a heading's anchor as GitHub does, which the pages' links use."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)
