"""Checks the Containerfile against the version, the pods and the repository."""

import functools
import re

from deploy.lint.objects import DEPLOY, ROOT, pods_of, render
from impala.runtime.installation import VERSION

IMAGES = ("impala-learner", "impala-actor")


@functools.cache
def containerfile() -> str:
    """Returns the Containerfile with continued lines joined."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    return text.replace("\\\n", "")


@functools.cache
def image_environment() -> dict[str, str]:
    """Returns the variables that the images set."""
    return {
        name: value
        for line in re.findall(r"^ENV (.*)$", containerfile(), re.MULTILINE)
        for name, value in re.findall(r"(\w+)=(\S+)", line)
    }


@functools.cache
def containerfile_complaints(text: str) -> list[str]:
    """Returns complaints that a linter cannot have: versions, users and sources."""
    found = []
    (version,) = re.findall(r"^ARG VERSION=(\S+)$", text, re.MULTILINE)
    if version != VERSION:
        found.append(f"VERSION is {version}, the project has {VERSION}")
    users = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    pods = pods_of(render(DEPLOY / "base"))
    wanted = {
        f"{context['runAsUser']}:{context['runAsGroup']}"
        for context in (pod.spec["securityContext"] for pod in pods)
    }
    if {*users} != wanted:
        found.append(f"the user is {users}, the pods' is {sorted(wanted)}")
    allowed = [
        line.removeprefix("!")
        for line in (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    if sorted(allowed) != sorted(copied):
        found.append(f"copied is {sorted(copied)}, .containerignore lets through {sorted(allowed)}")
    if (ROOT / ".dockerignore").resolve() != (ROOT / ".containerignore").resolve():
        found.append(".dockerignore, which docker reads, is no link to .containerignore")
    found += [f"there is no {source} to copy" for source in copied if not (ROOT / source).exists()]
    return found
