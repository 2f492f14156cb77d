"""The pages lead where they say: relative links and anchors exist, and commands of ours parse."""

import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from impala.commands import main as cli
from impala.commands.parsing import parse

ROOT = pathlib.Path(__file__).parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("clients/*/*.md"))
}


def _anchors(text: str) -> set[str]:
    """The names by which GitHub links to a page's headings."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", [each for each in PAGES if not each.startswith("CHANGELOG")])
def test_commands_of_a_page_parse(page: str) -> None:
    for words in _commands(PAGES[page]):
        if not any(re.match(r"(walk|corridor|my_parts|my_presets):", word) for word in words):
            parse(words[0], cli.COMMANDS[words[0]][0], words[1:])


def test_commands_of_pages_are_found() -> None:
    assert len([words for page in PAGES for words in _commands(PAGES[page])]) >= 30


def _commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each `impala` command in blocks of commands."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if language not in ("", "sh", "bash", "console"):
            continue
        block = re.sub(r"'\{[^']*\}'", lambda json: json[0].replace("\n", " "), block)
        for line in re.findall(
            r"^(?:[$] +)?(?:impala|.*-- impala) (.*)", block.replace("\\\n", " "), re.M
        ):
            words = shlex.split(line, comments=True)
            if words and words[0] in cli.COMMANDS and not {"|", ">", "&", "..."} & {*words}:
                yield words


def test_the_site_builds_without_dead_links(tmp_path: pathlib.Path) -> None:
    """MkDocs is strict: a link or anchor that leads nowhere is an error."""
    mkdocs = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path))
    built = subprocess.run(
        [*mkdocs, "--config-file", str(ROOT / "site/mkdocs.yml")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    pages = {page.name: page.read_text() for page in tmp_path.rglob("*.html")}
    assert "exact_lag" in pages["reference-settings.html"]
    assert "from_importance_weights" in pages["reference-python.html"]
    assert not re.findall(r'href="[^":]*\.(?:md|py)["#]', "".join(pages.values()))
