"""Name and version of this distribution, and a check that its modules are what Python imports.

Some of the modules have common names, such as `actors` and `protos`. Another distribution, or a
file in a folder of PYTHONPATH, may bring a module of the same name. Without the check, the error
would appear later, as a missing attribute.
"""

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
      ModuleTaken: one of them is not where this file is, or is not there at all.
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
                f"Python finds the module {name} in {found}, and not in {root}, where "
                f"{DISTRIBUTION} is. Install the two in different virtual environments, or rename "
                "the file, or take its folder out of PYTHONPATH."
            )
