"""Entry point of `python -m impala` and of the `impala` command."""

import contextlib
import os
import signal
import sys
from types import FrameType

from impala.runtime import installation, process
from impala.runtime.signals import is_ignored


def main() -> int:
    """Runs the command line. A signal ends it at any time, also as process 1 of a container.

    Commands that have work to do on a signal, such as a checkpoint, handle it themselves.
    """
    _put_working_directory_last()
    process.bound_numpy_threads()  # before anything imports NumPy
    for number in (signal.SIGTERM, signal.SIGHUP):
        if not is_ignored(number):
            signal.signal(number, _leave)
    try:
        installation.check()
        from impala.commands import main as cli

        return cli.main()
    except installation.ModuleTaken as error:
        print(f"impala: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # during the interpreter's shutdown
        return 128 + signal.SIGINT


def _put_working_directory_last() -> None:
    """Moves the working directory to the end of Python's path.

    The user's environments are found there, but a user's `actors.py` or `types.py` hides nothing.
    """
    with contextlib.suppress(OSError):  # it has been deleted
        here = os.getcwd()
        if not sys.flags.safe_path and sys.path[:1] in ([""], [here]):  # by python -m or -c
            del sys.path[0]
        if here not in sys.path:
            sys.path.append(here)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
