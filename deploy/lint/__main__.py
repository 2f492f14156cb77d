"""`python -m deploy.lint [DIRECTORY ...]`: prints complaints; status 1 if there are any."""

import argparse
import pathlib
import sys

from deploy.lint.checks import complaints, own_complaints
from deploy.lint.objects import RenderError


def main(argv: list[str] | None = None) -> int:
    """Runs all checks. Returns 0 without complaints, 1 with any, 2 if rendering fails."""
    parser = argparse.ArgumentParser(prog="python -m deploy.lint", description=__doc__)
    parser.add_argument(
        "directory",
        nargs="*",
        type=pathlib.Path,
        help="a kustomization to render and check; without any, the overlays of this project",
    )
    directories = parser.parse_args(argv).directory
    try:
        found = [each for directory in directories for each in complaints(directory)]
        if not directories:
            found = own_complaints()
    except (RenderError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 2
    for complaint in found:
        print(complaint)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
