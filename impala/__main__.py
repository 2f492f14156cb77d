"""`python -m impala` is the `impala` command."""

import signal
import sys

from impala import cli


def main() -> int:
    """Runs the command line; SIGTERM ends it from the first moment on, also as process 1."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
