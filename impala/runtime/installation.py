"""Name and version of this distribution, and a check that its modules are what Python imports.

Some of the modules have common names, such as `actors` and `protos`. Another distribution, or a
file in a folder of PYTHONPATH, may bring a module of the same name. Without the check, the error
would appear later, as a missing attribute.
"""

import base64
import hashlib
import importlib.metadata
import importlib.util
import pathlib

DISTRIBUTION = "impala-rl"
VERSION = "0.1.0"  # pyproject.toml reads it here
MODULES = ("actors", "impala", "learner", "protos", "vtrace")


class ModuleTaken(Exception):
    """A module of this distribution is missing, or something else has taken its name."""


def check() -> None:
    """Checks where Python finds the modules of this distribution, without importing them.

    Raises:
      ModuleTaken: one of them is not where this file is, is not there at all, or is there but was
        overwritten by another distribution.
    """
    root = pathlib.Path(__file__).resolve().parents[2]
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleTaken(
                f"The module {name} of {DISTRIBUTION} is missing from {root}: install "
                f"{DISTRIBUTION} again."
            )
        # A folder without __init__.py has no origin.
        found = spec.origin or next(iter(spec.submodule_search_locations or ()), "nowhere")
        if pathlib.Path(found).resolve() != root / name / "__init__.py":
            raise ModuleTaken(
                f"Python finds the module {name} in {found}, {_owner(name, pathlib.Path(found))}, "
                f"and not in {root}, where {DISTRIBUTION} is. {_FIX}"
            )
    for name, path in _overwritten():
        raise ModuleTaken(
            f"The module {name} of {DISTRIBUTION} was overwritten in {path}, "
            f"{_owner(name, path)}. {_FIX}"
        )


_FIX = (
    "Install the two in different virtual environments, or rename the file, or take its folder "
    "out of PYTHONPATH."
)


def _overwritten() -> list[tuple[str, pathlib.Path]]:
    """Returns the modules whose __init__.py is not the one that was installed, with its path."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # it runs from a source tree
        return []
    found = []
    for file in files:
        if len(file.parts) == 2 and file.parts[0] in MODULES and file.name == "__init__.py":
            path = pathlib.Path(str(file.locate()))
            digest = hashlib.sha256(path.read_bytes()).digest()
            installed = base64.urlsafe_b64encode(digest).decode().rstrip("=")
            if file.hash is not None and file.hash.value != installed:
                found.append((file.parts[0], path))
    return found


def _owner(name: str, path: pathlib.Path) -> str:
    """Returns which distribution a module belongs to, for an error message."""
    others = {*importlib.metadata.packages_distributions().get(name, ())} - {DISTRIBUTION}
    for other in sorted(others):
        root = pathlib.Path(str(importlib.metadata.distribution(other).locate_file("")))
        if path.resolve().is_relative_to(root.resolve()):
            return f"which belongs to the distribution {other}"
    return "which belongs to no distribution"
